"""Which strings have been looked at and held no secret: a session repeats its texts. Bounded, and no secret in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from itertools import compress

Mark = str | tuple[int, int]
_CACHE_SIZE = 1 << 16
CACHED_LENGTH = 256
_IN_A_ROW = 3  # paragraphs, the one in question in the middle
_SHORTEST_PAGE = 600
_NUMBER = re.compile(r"\n *\d+→")  # before a line of a file, as agents show it
_REPEATED = re.compile(b"\x01+")
_NO_WORDS: frozenset[bytes] = frozenset()
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


class Paragraphs:
    """What a session repeats: a file is read, shown again behind an edit, and read once more with a line changed.

    A paragraph is repeated when it and its two neighbours stood so in a text without secrets. That text goes
    out as it is, so to look at the paragraph again could keep nothing back. Kept as hashes, bounded, for one session.
    """

    def __init__(self) -> None:
        self._known: dict[int, frozenset[bytes]] = {}  # a paragraph among its neighbours: the trigger words of its text
        self._latest: list[int] = []

    def unrepeated(self, texts: Iterable[str], border: str, words: set[bytes]) -> list[str]:
        """The texts without the numbers of lines, and with `border` where repeated paragraphs stood.

        The trigger words of what is left out go to `words`. What stands twice in the texts stays once.
        """
        if len(self._known) >= _CACHE_SIZE:
            self._known.clear()
        self._latest = []
        return [self._rest(text, border, words) if len(text) >= _SHORTEST_PAGE else text for text in texts]

    def remember(self, words: Set[bytes]) -> None:
        """The last texts were clean; these trigger words stood in them."""
        self._known.update(dict.fromkeys(self._latest, frozenset(words)))

    def forget(self) -> None:
        """The last texts were not clean."""
        for row in self._latest:
            del self._known[row]

    def _rest(self, text: str, border: str, words: set[bytes]) -> str:
        if _NUMBER.match(f"\n{text[:20]}"):
            text = _NUMBER.sub("\n", f"\n{text}")[1:]
        known_rows, paragraphs = self._known, text.split("\n\n")
        rows = list(map(hash, zip(*[paragraphs[first:] for first in range(_IN_A_ROW)], strict=False)))
        repeated = bytes(map(known_rows.__contains__, rows))
        if 1 in repeated:
            words.update(*{known_rows[row] for row in compress(rows, repeated)})
        new = [row for row in dict.fromkeys(rows) if row not in known_rows]
        self._latest += new
        known_rows.update(dict.fromkeys(new, _NO_WORDS))
        if 1 not in repeated:
            return text
        begin, parts = 0, []
        for match in _REPEATED.finditer(repeated):
            parts.append("\n\n".join(paragraphs[begin : match.start() + _IN_A_ROW // 2]))
            begin = match.end() + _IN_A_ROW // 2
        return border.join([*parts, "\n\n".join(paragraphs[begin:])])
