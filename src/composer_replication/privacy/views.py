"""A text as the program that reads it sees it: lines joined behind a backslash, `\\u0026` and `\\/` as characters.

What is found in such a view is led back to where it stands in the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from composer_replication.privacy.rules import Span

# It starts with the backslash that all of them have: that is what makes the search fast.
_ESCAPE = re.compile(r"\\(?:(?<=[^\s\\]\\)(?:\r?\n|\\\\n)[ \t]*(?=[^\s\\])|\\{0,2}u00([2-7][0-9a-fA-F])|\\{0,2}(/))")


class View:
    """A rewritten text that remembers where its parts came from."""

    def __init__(self, text: str, matches: Iterable[re.Match[str]]) -> None:
        pieces: list[str] = []
        self._places, self._origins = [0], [0]
        cursor = length = 0
        for match in matches:
            code, slash = match.groups()
            written = chr(int(code, 16)) if code else slash or ""
            pieces += [text[cursor : match.start()], written]
            length += match.start() - cursor
            if written:  # the sign itself comes from the whole of its escape
                self._mark(length, match.start())
                length += len(written)
            self._mark(length, match.end())
            cursor = match.end()
        self.text = "".join([*pieces, text[cursor:]])

    def _mark(self, place: int, origin: int) -> None:
        self._places.append(place)
        self._origins.append(origin)

    def led_back(self, spans: Iterable[Span]) -> Iterator[Span]:
        """The same spans in the text that the view was made from."""
        for start, end, kind in spans:
            last = self._origin(end - 1)
            after = bisect_right(self._places, end - 1)
            # The last character may be an escape: then all of it belongs to the secret.
            escaped = after < len(self._places) and self._places[after] == end
            yield Span(self._origin(start), self._origins[after] if escaped else last + 1, kind)

    def _origin(self, place: int) -> int:
        index = bisect_right(self._places, place) - 1
        return self._origins[index] + place - self._places[index]


def unescaped(text: str) -> View | None:
    """The text without line continuations and JSON escapes, or None when it has none."""
    matches = list(_ESCAPE.finditer(text))
    return View(text, matches) if matches else None
