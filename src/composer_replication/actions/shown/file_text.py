"""One file as far as a session has shown it: its lines, those that nobody saw, and the edits since.

Lines are counted from one. A line that was not shown is None. What an edit wrote where its place is not known is kept
as a piece of its own, and the numbers of lines then hold no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Doubt = Literal[0, 1, 2]
"""0: as it was shown. 1: somebody came by who may have changed it. 2: it was changed, and nobody showed how."""

_UNSEEN = "\0"  # stands for lines that were not shown, and is in no text


class FileText:
    """Grows with what is shown; a view that contradicts what was known replaces it."""

    def __init__(self) -> None:
        self.doubt: Doubt = 0
        self.may_be_reworked = False  # something said so, or a formatter ran: more than that somebody came by
        self._lines: list[str | None] = []
        self._has_end = False  # the last line of the file is the last one here
        self._are_numbered = True
        self._pieces: list[str] = []
        self._text: str | None = ""

    @property
    def is_whole(self) -> bool:
        """Whether every line is known."""
        return self._has_end and self._are_numbered and None not in self._lines

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def show(self, first: int, lines: Sequence[str | None], *, has_end: bool = False) -> None:
        """Lines as a view shows them, from the one with the number `first`; a line that is cut is None."""
        start = max(first, 1) - 1
        before = self._lines[start : start + len(lines)]
        agrees = all(old is None or new is None or old == new for old, new in zip(before, lines, strict=False))
        is_all = has_end and start == 0
        if is_all or not agrees or not self._are_numbered or self.doubt == 2:
            self._forget()
        self._lines += [None] * (start + len(lines) - len(self._lines))
        known_lines = self._lines[start : start + len(lines)]
        self._lines[start : start + len(lines)] = [
            new if new is not None else old for old, new in zip(known_lines, lines, strict=True)
        ]
        if has_end:
            del self._lines[start + len(lines) :]
            self._has_end = True
        if is_all:
            self.doubt, self.may_be_reworked = 0, False
        self._text = None

    def glimpse(self, number: int, line: str) -> None:
        """A line as a search shows it, where nothing is known yet."""
        is_new = number > len(self._lines) or (number > 0 and self._lines[number - 1] is None)
        if number > 0 and is_new and self._are_numbered and not self.doubt and not self._has_end:
            self.show(number, [line])

    def write(self, text: str) -> None:
        """The whole file as it was written."""
        self.show(1, text.split("\n"), has_end=True)

    def replace(self, old: str, new: str, *, everywhere: bool = False) -> None:
        """An edit that worked."""
        shown_text = self.text
        if old and old in shown_text:
            self._are_numbered = self._are_numbered and (self.is_whole or not everywhere)
            changed = shown_text.replace(old, new) if everywhere else shown_text.replace(old, new, 1)
            self._lines = [None if line == _UNSEEN else line for line in changed.split("\n")]
            self._text = changed
            return
        self._pieces = [piece.replace(old, new) if old else piece for piece in self._pieces] + [new]
        self._are_numbered = False

    def count(self, wanted: str) -> int:
        """How often a text stands in what is known; a piece whose place is not known counts once."""
        number = self.text.count(wanted)
        return number or int(any(wanted in piece for piece in self._pieces))

    def contradicts(self, wanted: str, *, min_length: int = 24) -> bool:
        """Whether, wherever the first line of a text was shown, what was shown behind it is something else."""
        first, *rest = wanted.split("\n")
        if not rest or len(first.strip()) < min_length or not self._are_numbered:
            return False
        starts = [number for number, line in enumerate(self._lines) if line is not None and line.endswith(first)]
        return bool(starts) and all(self._differs(start + 1, rest) for start in starts)

    def _differs(self, start: int, rest: list[str]) -> bool:
        known_lines = self._lines[start : start + len(rest)]
        if len(known_lines) < len(rest):
            return self._has_end
        *middle, last = zip(known_lines, rest, strict=True)
        if any(line is not None and line != other_line for line, other_line in middle):
            return True
        return last[0] is not None and not last[0].startswith(last[1])

    @property
    def text(self) -> str:
        """All that is known, a mark between what does not belong together."""
        if self._text is None:
            self._text = "\n".join(_UNSEEN if line is None else line for line in self._lines)
        return self._text

    def is_part_of(self, whole: str) -> bool:
        """Whether every known line stands in the whole text, at its own number where numbers hold."""
        lines = whole.split("\n")
        if self._are_numbered:
            return len(self._lines) <= len(lines) and all(
                known_line is None or known_line == line for known_line, line in zip(self._lines, lines, strict=False)
            )
        return False

    def _forget(self) -> None:
        self._lines, self._has_end, self._are_numbered, self._pieces, self.doubt = [], False, True, [], 0
