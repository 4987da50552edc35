"""Runs of key characters: a key by itself stands in one. Most are words, and a session repeats the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence

from composer_replication.privacy.rules import Rule, Span
from composer_replication.privacy.shapes import entropy

Runs = list[tuple[int, str]]
"""With where each of them starts."""
_MIN_RUN = 16
_FEWEST = 5  # different characters: a rule under a heading has fewer, and no key and no encoding does
_CACHE_SIZE = 1 << 16
_CACHED_LENGTH = 160
# One byte a character: key characters become `a`, everything else a space, so a run is found without a regex on text.
_RUN_TABLE = bytes(97 if chr(code) in "+/=_-.~$" or (code < 128 and chr(code).isalnum()) else 32 for code in range(256))
_RUN = re.compile(b"a" * _MIN_RUN + b"a*")
_ESCAPE_HEAD = re.compile(r"u[0-9a-fA-F]{4}|[nrt]")
# Words and small numbers between separators: most paths and names. A random key has no such cut.
_WORDY = re.compile(
    r"(?:[./_=~$+-]*+(?:[A-Z]?[a-z]{2,20}+(?:[A-Z][a-z]{2,20}+)*+|[a-z]|[A-Z]{1,10}+|[0-9]{1,6}+)(?=[./_=~$+-]|$))++[./_=~$+-]*+"
)
_NUMBERS = re.compile(r"(?:\d{6}-){7}\d{6}")  # a key that a disk is unlocked with


def is_words(run: str) -> bool:
    """Whether a run is words and small numbers alone."""
    return _WORDY.fullmatch(run) is not None and not _NUMBERS.fullmatch(run)


def is_suspect(run: str) -> bool:
    """Whether a run may be a key, or encode one: it is neither wordy nor a public id."""
    return len(set(run)) >= _FEWEST and not entropy.is_wordy(run) and not entropy.is_public_id(run)


class CleanRuns:
    """Those without a secret, so that what a session repeats is looked at once. Bounded."""

    def __init__(self) -> None:
        self._clean: set[str] = set()

    def others(self, text: str, flat: bytes) -> Runs:
        """Runs of key characters that are not known to be clean, with where they start."""
        clean, runs = self._clean, []
        for match in _RUN.finditer(flat.translate(_RUN_TABLE)):
            start, end = match.span()
            run = text[start:end]
            if run in clean:
                continue
            if text[start - 1 : start] == "\\" and (head := _ESCAPE_HEAD.match(run)):
                start, run = start + head.end(), run[head.end() :]
            runs.append((start, run))
        return runs

    def remember(self, runs: Runs, found: list[Span], triggers: Sequence[tuple[str, Rule]], depends: set[str]) -> None:
        """Keep the runs that are clean whatever stands around them."""
        if len(found) > 64:  # a dump full of secrets: not worth the comparisons
            return
        if len(self._clean) >= _CACHE_SIZE:
            self._clean.clear()
        for start, run in runs:
            if len(run) > _CACHED_LENGTH or run in depends or any(trigger in f"\n{run}" for trigger, _ in triggers):
                continue
            if not found or not any(span.start < start + len(run) and start < span.end for span in found):
                self._clean.add(run)
