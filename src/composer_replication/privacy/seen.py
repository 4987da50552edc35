"""Which strings have been looked at and held no secret: a session repeats its texts. Bounded, and no secret in it."""

from __future__ import annotations

import re
from collections.abc import Iterable

Mark = str | tuple[int, int]
_CACHE_SIZE = 1 << 16
CACHED_LENGTH = 256
# Ids and times: new on every record, so a cache does not help, and public.
_TRIVIAL = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?:toolu|msg|req|call)_[A-Za-z0-9]{20,30}"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z?"
)

is_id = _TRIVIAL.fullmatch  # looked up once: it runs on every id of every record


def mark_of(text: str) -> Mark:
    """What stands for a text in a cache. Long ones by hash: a log repeats whole files, and the cache stays small."""
    return text if len(text) <= CACHED_LENGTH else (hash(text), len(text))


def is_trivial(text: str) -> bool:
    """Whether a text is only an id or a time."""
    return 19 < len(text) < 37 and is_id(text) is not None


class Seen:
    """Strings without secrets. Bounded, and it never holds a secret."""

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest  # nothing below this length can hold anything
        self.clean: set[Mark] = set()  # nothing in it
        self.people: set[Mark] = set()  # no secret, but a home directory or a user name
        self.plain_keys: set[str] = set()  # clean field names that say nothing about their value

    def add(self, text: str, *, people: bool) -> None:
        """Remember a text without secrets."""
        self.add_all((text,), people=people)

    def add_all(self, texts: Iterable[str], *, people: bool) -> None:
        """Remember texts without secrets."""
        chosen = self.people if people else self.clean
        if len(chosen) >= _CACHE_SIZE:
            chosen.clear()
            self.plain_keys.clear()
        chosen.update(map(mark_of, texts))
