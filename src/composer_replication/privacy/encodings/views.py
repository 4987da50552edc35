"""A text as the program that reads it sees it: lines joined behind a backslash, `\\u0026` and `\\/` as characters.

The colours of a terminal, which stand between a name and its value, are left out around names. What is found in such a
view is led back to where it stands in the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from composer_replication.privacy.rules import Span

_Edit = tuple[int, int, str]  # from, to, and what is written instead
# It starts with the backslash that all of them have: that is what makes the search fast.
_ESCAPE = re.compile(
    r"\\(?:(?<=[^\0\s\\]\\)z?(?:\r?\n|\\\\n)(?:[ \t]*\d{1,6}[→:|\t]|\+|-(?=[ \t]))?[ \t]*(?=[^\0\s\\])"
    r"|\\{0,2}u00([2-7][0-9a-fA-F])|\\{0,2}(/))"
)
_ENTITY = re.compile(r"&#(?:[xX]([2-7][0-9a-fA-F])|(3[2-9]|[4-9]\d|1[01]\d|12[0-6]));")
_ENCRYPTED = re.compile(
    r"ENC\[[A-Z0-9_]{3,20},[^\0\]\n]{0,4000}\]|ANSIBLE_VAULT;[^\0\n]{0,40}(?:(?:\n|\\n)[ \t]*+[0-9a-f]++)++"
)
_COLOUR = re.compile(r"(?:\x1b|\\{1,4}(?:u001[bB]|x1[bB]|033|e))\[[0-9;:?]{0,20}[A-Za-z]")
_WRITTEN_COLOUR = re.compile(r"\\(?:u001[bB]|x1[bB]|033|e)\[")  # in a text that was printed as JSON, or in a script
_WORD_REST = re.compile(r"[^\0\s]*")
_LEAD, _REACH, _NEAR = 100, 400, 60  # around the name with colours near it


class View:
    """A rewritten text that remembers where its parts came from."""

    def __init__(self, text: str, edits: Iterable[_Edit]) -> None:
        pieces: list[str] = []
        self._places, self._origins = [0], [0]
        self._ends: dict[int, int] = {}  # of a character that stands for an escape: where the escape ends
        cursor = length = 0
        for start, end, written in edits:
            pieces += [text[cursor:start], written]
            length += start - cursor
            if written:  # the sign itself comes from the whole of its escape
                self._mark(length, start)
                self._ends[length] = end
                length += len(written)
            self._mark(length, end)
            cursor = end
        self.text = "".join([*pieces, text[cursor:]])

    def _mark(self, position: int, origin: int) -> None:
        self._places.append(position)
        self._origins.append(origin)

    def led_back(self, spans: Iterable[Span]) -> Iterator[Span]:
        """The same spans in the text that the view was made from."""
        for start, end, kind in spans:
            # The last character may be an escape: then all of it belongs to the secret.
            yield Span(self._origin(start), self._ends.get(end - 1) or self._origin(end - 1) + 1, kind)

    def _origin(self, position: int) -> int:
        index = bisect_right(self._places, position) - 1
        return self._origins[index] + position - self._places[index]


def unescaped(text: str) -> View | None:
    """The text without line continuations and JSON escapes, or None when it has none."""
    edits: list[_Edit] = []
    if "\\" in text:
        matches = _ESCAPE.finditer(text)
        edits += [(*match.span(), chr(int(match[1], 16)) if match[1] else match[2] or "") for match in matches]
    if "&#" in text:
        edits += [(*match.span(), _character(match)) for match in _ENTITY.finditer(text)]
    return View(text, sorted(edits)) if edits else None


def _character(entity: re.Match[str]) -> str:
    return chr(int(entity[1], 16) if entity[1] else int(entity[2]))


def encrypted_blocks(text: str) -> list[tuple[int, int]]:
    """What sops and ansible-vault have encrypted: it is as random as a key, and nobody's secret without one."""
    if "ENC[" not in text and "_VAULT;" not in text:
        return []
    return [match.span() for match in _ENCRYPTED.finditer(text)]


def has_colours(text: str) -> bool:
    """Whether a text came from a terminal in colour, or was printed from one."""
    return "\x1b" in text or ("\\" in text and _WRITTEN_COLOUR.search(text) is not None)


def uncoloured(text: str, lower: bytes, words: Iterable[bytes]) -> View | None:
    """What stands around the words that have a colour near them, without colours and without the rest of the text."""
    positions = sorted({at for word in words for at in _hits(text, lower, word)})
    edits: list[_Edit] = []
    done = 0
    for at in positions:
        if at < done:
            continue
        begin, reach = max(done, at - _LEAD), min(len(text), at + _REACH)
        rest = _WORD_REST.match(text, reach)
        end = rest.end() if rest else reach
        edits.append((done, begin, "\n"))
        edits += [(*match.span(), "") for match in _COLOUR.finditer(text, begin, end)]
        done = end
    return View(text, [*edits, (done, len(text), "\n")]) if edits else None


def _hits(text: str, lower: bytes, word: bytes) -> Iterator[int]:
    at = lower.find(word)
    while at >= 0:
        if _COLOUR.search(text, at, at + _NEAR):
            yield at
        at = lower.find(word, at + len(word))
