"""Words for secrets and programs that a line end cuts in two: `pas` and `sword`, `cu` and `rl`.

The pieces are looked for among the words of a text, like any trigger: a text without them is not searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from composer_replication.privacy.rules import word_set

_NAMES = word_set(
    "password passwd passphrase passcode secret token key auth credential credentials bearer authorization"
)
_PROGRAMS = word_set(
    "curl sshpass mysql mysqldump mysqladmin mariadb mongosh ldapsearch sqlcmd openssl docker htpasswd"
)
# Pieces that are words of their own, or of code: they would send every text to the search.
_COMMON = word_set(
    "url sql pass word words ret open opens key sec dump admin db adb my ssh search ldap phrase code ion per"
)
_AFTER = (b"url", b"sql", b"pass")  # behind `c`, `my` and `ssh`


def _cuts() -> Iterator[tuple[str, str]]:
    for word in sorted(_NAMES | _PROGRAMS):
        yield from ((word[:at], word[at:]) for at in range(1, len(word)))


def _rarer() -> Iterator[bytes]:
    """Of each cut the longer piece, or the other one where that is a word; `n` before it where the end is `\\n`."""
    for left, right in _cuts():
        pieces = [piece for piece in sorted((left, right), key=len) if len(piece) > 1 and piece not in _COMMON]
        if pieces:
            yield pieces[-1].encode()
            if pieces[-1] == right:
                yield b"n" + right.encode()


_LEFTS: dict[bytes, tuple[bytes, ...]] = {}
for _left, _right in _cuts():
    _LEFTS[_right.encode()] = (*_LEFTS.get(_right.encode(), ()), _left.encode())
RARE_PIECES: frozenset[bytes] = frozenset(_rarer())
WHOLE_WORDS: frozenset[bytes] = RARE_PIECES | {mark + right for right in _AFTER for mark in (b"", b"n")}
_LONGEST_INDENT = 60
_END = rb"(?<=[a-z_]%b)[ \t\r\\`]*+(?:\d{1,6}[?\t|:][ \t]*+)?+[+>|]?[ \t]*+([a-z]{1,14})(?![a-z])"
_ENDS = tuple((mark, re.compile(pattern + _END % pattern)) for mark, pattern in ((b"\n", rb"\n"), (b"\\n", rb"\\n")))


def broken_words(lower: bytes, pieces: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    """The line ends that stand inside such a word: from the end itself to the rest of the word.

    `pieces`: which of them occur. A line end is looked at where one of them stands beside it.
    """
    for piece in pieces:
        at = lower.find(piece)
        while at >= 0:
            end = at + len(piece)
            for mark, pattern in _ENDS:
                before = lower.rfind(mark, max(0, at - _LONGEST_INDENT), at)
                behind = lower.find(mark, end, end + 2 + len(mark))
                for place in (before, behind):
                    match = pattern.match(lower, place) if place >= 0 else None
                    lefts = _LEFTS.get(match[1]) if match else None
                    if match and lefts and lower.endswith(lefts, max(0, place - 14), place):
                        yield match.start(), match.start(1)
            at = lower.find(piece, end)
