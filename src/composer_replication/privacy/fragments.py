"""Words for secrets and programs that a line end cuts in two: `pas` and `sword`, `cu` and `rl`.

The pieces are looked for among the words of a text, like any trigger: a text without them is not searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from composer_replication.privacy import options
from composer_replication.privacy.rules import word_set

_NAMES = "password passwd passphrase passcode secret token key auth credential credentials bearer authorization".split()
# Pieces that are words of their own, or of code: they would send every text to the search.
_COMMON = word_set(
    "in is at all up url sql pass ret word words sec log get set put add to en th do go my red key net use user art all"
    " lap ls me in min dump import check show port ring den an add admin client server code phrase ion nation sh ssh"
    " tar ip zip rar app ad search modify delete re un dis ext more less her here it te st ts li cli ed al er es on or"
    " as am an be by he if no of so us we ten ken den men pen"
)
_SHORTEST = 4  # of a program


def _cuts() -> Iterator[tuple[str, str]]:
    programs = {name for name in options.PROGRAM_NAMES if name.isalpha() and len(name) >= _SHORTEST}
    for word in dict.fromkeys([*_NAMES, *sorted(programs)]):
        yield from ((word[:at], word[at:]) for at in range(1, len(word)))


_LEFTS: dict[bytes, tuple[bytes, ...]] = {}
for _left, _right in _cuts():
    _LEFTS[_right.encode()] = (*_LEFTS.get(_right.encode(), ()), _left.encode())
# Of each cut the piece that is rarer, where it is no word.
WHOLE_WORDS: frozenset[bytes] = frozenset(
    mark + piece.encode()
    for left, right in _cuts()
    for piece in [right if len(right) > 1 and right not in _COMMON else left]
    if len(piece) > 1 and piece not in _COMMON
    for mark in ([b"", b"n"] if piece == right else [b""])  # the end of a line in JSON is `\\n`
)
_BEFORE_OPTIONS = (b"url -", b"sql -", b"pass -")  # `c` and `url`, `ssh` and `pass`: with what follows they are rare
_END = rb"(?<=[a-z_]%b)[ \t\r\\`]*+(?:\d{1,6}[?\t|:][ \t]*+)?+[+>|]?[ \t]*+([a-z]{1,14})(?![a-z])"
_ENDS = tuple((mark, re.compile(pattern + _END % pattern)) for mark, pattern in ((b"\n", rb"\n"), (b"\\n", rb"\\n")))


def broken_words(lower: bytes, active: Set[bytes]) -> Iterator[tuple[int, int]]:
    """The line ends that stand inside such a word: from the end itself to the rest of the word."""
    if active.isdisjoint(WHOLE_WORDS) and not any(sign in lower for sign in _BEFORE_OPTIONS):
        return
    for mark, pattern in _ENDS:
        for match in pattern.finditer(lower) if mark in lower else ():
            lefts = _LEFTS.get(match[1])
            if lefts and lower.endswith(lefts, max(0, match.start() - 14), match.start()):
                yield match.start(), match.start(1)
