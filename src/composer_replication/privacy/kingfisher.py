"""The rules of kingfisher as one more rule, when the package is installed. It runs offline and in process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from composer_replication.optional import require
from composer_replication.privacy.rules import PLACEHOLDER, Rule, Span

_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True)
class _KingfisherRule(Rule):
    scanner: Any = field(default=None, repr=False)

    def spans(self, text: str) -> Iterator[Span]:
        # Its offsets count bytes of its own reading of the input, so the finding is looked up by value.
        for finding in self.scanner.scan(text):
            value = finding.secret
            if len(value) < 6 or PLACEHOLDER.search(value):
                continue
            start = text.find(value)
            while start >= 0:
                yield Span(start, start + len(value), self.kind)
                start = text.find(value, start + len(value))


def kingfisher_rule(*, confidence: str = "medium") -> Rule:
    """A rule for `Scrubber(extra_rules=[...])` that adds kingfisher's catalogue to ours. Needs `kingfisher_sdk`."""
    sdk = require("kingfisher_sdk", extra="privacy")
    scanner = sdk.Scanner(sdk.Rules(confidence=confidence))
    return _KingfisherRule("KINGFISHER", _NEVER, scanner=scanner)
