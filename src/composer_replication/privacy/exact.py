"""Values known beforehand (from the environment), in the spellings a log can hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Set
from urllib.parse import quote, quote_plus

from composer_replication.privacy.rules import Span

KIND = "ENV_SECRET"
_LETTERS = re.compile(r"[A-Za-z]{2,}")


class ExactValues:
    """Known values, plain, JSON-escaped and percent-encoded.

    Every spelling of a value keeps its longest piece of letters. That piece is looked for among the words of a text,
    like any other trigger, so that a text without it is never searched for the value.
    """

    def __init__(self, values: Iterable[str]) -> None:
        self._forms: dict[bytes, tuple[str, ...]] = {}
        for value in dict.fromkeys(value.strip() for value in values if value.strip()):
            trigger = max(_LETTERS.findall(value), key=len, default="").lower().encode()
            self._forms[trigger] = (*self._forms.get(trigger, ()), *_spellings(value))
        longest_first = sorted({form for forms in self._forms.values() for form in forms}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.triggers = tuple(filter(None, self._forms))

    def spans(self, text: str, active: Set[bytes]) -> Iterator[Span]:
        """Where known values stand. `active`: the triggers that occur; a value without letters is always looked for."""
        if self._pattern is None:
            return
        likely = [forms for trigger, forms in self._forms.items() if not trigger or trigger in active]
        if any(form in text for forms in likely for form in forms):
            for match in self._pattern.finditer(text):
                yield Span(match.start(), match.end(), KIND)


def _spellings(value: str) -> tuple[str, ...]:
    escaped = json.dumps(value)[1:-1]
    plain = json.dumps(value, ensure_ascii=False)[1:-1]
    return tuple(
        dict.fromkeys(
            (
                value,
                plain,
                escaped,
                escaped.replace("/", "\\/"),
                json.dumps(escaped)[1:-1],
                quote(value, safe=""),
                quote_plus(value),
                quote(value),
            )
        )
    )
