"""Tokens on a terminal: lines that break between tokens, beside a column of labels, in colour or with marks only.

Every character of a trace that a terminal would act upon, and every one that we use as a mark, is written out between
‹ and ›, so nothing in a text can pass for a mark, a label or a colour.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

NEWLINE, TAB, BOUNDARY, LEFT_OUT = "⏎", "⇥", "│", "⋯"
TARGET, CALL = ("⟦", "⟧"), ("⟪", "⟫")
SPELLED = ("\u2039", "\u203a")  # single angle quotes
_MARKS = frozenset((NEWLINE, TAB, BOUNDARY, LEFT_OUT, *TARGET, *CALL, *SPELLED))
_CHARACTER = re.compile("[\udc80-\udcff]+|.", re.DOTALL)
_GUTTER = 10

# SGR codes of the sixteen colours that every terminal has. Tokens of one kind take turns, so that their edges show.
_BOLD, _DIM = "1", "2"
_COLOURS = {
    "": ("", ""),
    "title": (_BOLD, _BOLD),
    "context": (_DIM, _DIM),
    "target": ("30;46", "30;106"),
    "call": ("30;43", "30;103"),
    "hint": ("35", "95"),
    "good": ("32", "32"),
    "bad": ("31", "31"),
}


class Token(NamedTuple):
    """A token's text, what it is part of, and whether only the template can have written it."""

    text: str
    style: str
    is_special: bool = False


class Canvas:
    """Collects painted text line by line."""

    def __init__(self, width: int, *, is_colour: bool) -> None:
        self.is_colour = is_colour
        self._width, self._column, self._indent = width, 0, 0
        self._parts: list[str] = []

    def text(self) -> str:
        """Everything so far, with a line end."""
        self.end_line()
        return "".join(self._parts)

    def line(self, text: str = "", style: str = "") -> None:
        """A line of our own words at the left edge; what they quote has gone through `one_line`."""
        self.end_line()
        self._parts.append(self._painted(text, _COLOURS[style][0]) + "\n")

    def label(self, word: str) -> None:
        """Begin a part: its name in the gutter, its text to the right of it."""
        self.end_line()
        self._indent = self._column = _GUTTER
        self._parts.append("  " + self._painted(word, _BOLD) + " " * (_GUTTER - 2 - len(word)))

    def words(self, text: str, style: str = "") -> None:
        """Our own words where the text stands."""
        self._put("", text, "", _COLOURS[style][0])

    def break_line(self) -> None:
        """Go on below, unless a line has just begun."""
        if self._column > self._indent:
            self._break()

    def tokens(self, tokens: Sequence[Token], *, cut: bool = False, marks: tuple[str, str] = ("", "")) -> None:
        """The text of tokens; `cut` draws a line between them, `marks` stand before the first and after the last."""
        for number, token in enumerate(tokens):
            before = (BOUNDARY if cut else "") if number else marks[0]
            after = marks[1] if number == len(tokens) - 1 else ""
            codes = _COLOURS[token.style][number % 2]
            if token.is_special:
                codes = "" if codes == _DIM else f"{codes};{_BOLD}"
            self._put(before, visible(token.text), after, codes)

    def left_out(self, number: int, what: str = "") -> None:
        """Say that tokens are not shown here."""
        words = f"{number:,} token{'s' if number > 1 else ''}{what}"
        self.words(f" {words} ".join((LEFT_OUT, LEFT_OUT)), "context")

    def end_line(self) -> None:
        if self._column:
            self._parts.append("\n")
        self._column = self._indent = 0

    def _put(self, before: str, text: str, after: str, codes: str) -> None:
        first, *later_lines = text.split("\n")
        if self._column + cells(before + first + after) > self._width:
            self.break_line()
        self._write(before, _BOLD)
        self._write(first, codes)
        for line in later_lines:  # a line end of the text is one here too
            self._break()
            self._write(line, codes)
        self._write(after, _BOLD)

    def _break(self) -> None:
        self._parts.append("\n")
        self._column = 0

    def _write(self, text: str, codes: str) -> None:
        if not text:
            return
        if self._column < self._indent:
            self._parts.append(" " * (self._indent - self._column))
            self._column = self._indent
        self._parts.append(self._painted(text, codes))
        self._column += cells(text)

    def _painted(self, text: str, codes: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self.is_colour and codes and text else text


def visible(text: str) -> str:
    """A token's text as it can be shown: a line end as ⏎ and a line end, a tab as ⇥, a stray byte as ‹e2›."""
    shown_text = _CHARACTER.sub(_shown, text)
    # A character that combines with the one before it would sit on our mark.
    return _code_point(text[0]) + shown_text[1:] if text and unicodedata.category(text[0])[0] == "M" else shown_text


def one_line(text: str) -> str:
    """The same without line ends."""
    return visible(text).replace("\n", "")


def cells(text: str) -> int:
    """How many columns a text takes."""
    from rich.cells import cell_len

    return len(text) if text.isascii() else cell_len(text)


def cut_to(text: str, width: int) -> str:
    """The text, cut and filled up with spaces to a number of columns."""
    short_text = text
    while cells(short_text) > width:
        short_text = short_text[: min(len(short_text) - 2, width - 1)].rstrip(LEFT_OUT) + LEFT_OUT
    return short_text + " " * (width - cells(short_text))


def _shown(match: re.Match[str]) -> str:
    chars = match[0]
    if "\udc80" <= chars[0] <= "\udcff":
        return " ".join(f"{ord(char) - 0xDC00:02x}" for char in chars).join(SPELLED)
    if chars == "\n":
        return f"{NEWLINE}\n"
    if chars == "\t":
        return TAB
    return chars if chars.isprintable() and chars not in _MARKS else _code_point(chars)


def _code_point(character: str) -> str:
    return f"U+{ord(character):04X}".join(SPELLED)
