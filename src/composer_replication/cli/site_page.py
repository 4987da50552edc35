"""The page that `crf inspect` prints: one error site as the student and the hinted teacher see it, token by token.

    _Page    the parts of the page: student context, teacher context, aligned rows, summary
    Canvas   lines that break between tokens, next to a column of labels, in color or with marks only
    visible  a token's text as it can be shown

A character of a log that a terminal would act upon, or that the page uses as a mark, is written out between ‹ and ›.
So nothing in a log can pass for a mark, a label or a color.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from composer_replication.batch.hint_placement import TeacherContext
    from composer_replication.batch.render.renderer import Renderer
    from composer_replication.batch.site_view import IndexPair, SiteView


_FIRST, _LAST = 5, 3  # rows and tokens that are shown of a long list
_TOKEN_CELLS = 32
_THINKING = {
    "target": "the turn's own is learned with it (target)",
    "context": "the turn's own is in the header (context)",
    "left_out": "the turn's own is left out",
    "not_shown": "the turn's own has no place in this template",
}


def site_page(
    view: SiteView,
    renderer: Renderer,
    *,
    tokenizer: str,
    placement: str,
    left_out: str = "",
    proof: str = "",
    num_context: int,
    all_pairs: bool,
    width: int,
    is_colour: bool,
) -> str:
    """Return the page as text.

    Args:
        view: The site's tokens and index pairs.
        renderer: What rendered them.
        tokenizer: Name of the tokenizer, for the head of the page.
        placement: The hint placement of the config; the template may not support it.
        left_out: Why a training would drop the site; empty if it would not.
        proof: What the hint did in the last hint check; empty if unknown.
        num_context: Tokens of context to show on each side.
        all_pairs: Show all index pairs instead of the first and last ones.
        width: Columns of the page.
        is_colour: Use escape codes for colors; otherwise marks only.
    """
    page = _Page(view, renderer, Canvas(width, is_colour=is_colour), num_context)
    page.head(tokenizer)
    page.student()
    if view.teacher is not None:
        page.teacher(view.teacher)
        page.alignment(all_pairs)
    page.summary(placement)
    if left_out:
        page.canvas.line(one_line(f"no window of this training holds it ({left_out})"), "bad")
    if proof:
        page.canvas.line(one_line(proof))
    return page.canvas.text()


class _Page:
    """Writes the parts of the page to a canvas."""

    def __init__(self, view: SiteView, renderer: Renderer, canvas: Canvas, num_context: int) -> None:
        self.view, self.canvas = view, canvas
        self._renderer, self._num_context = renderer, num_context

    def head(self, tokenizer: str) -> None:
        site, view, canvas = self.view.site, self.view, self.canvas
        status = "kept" if site.is_kept else "not kept"
        what = f"{site.kind}, blame {site.blame}, confidence {site.confidence:g}, {status}: {site.reason}"
        canvas.line(one_line(f"site {site.id}  {what}"))
        where = f"conversation {site.conversation_id}, turn {site.turn_id}, tokenizer {tokenizer}"
        part = f", sequence {view.sequence + 1} of {view.num_sequences}" if view.num_sequences > 1 else ""
        canvas.line(one_line(where + part))
        self._legend()

    def _legend(self) -> None:
        canvas = self.canvas
        canvas.label("marks")
        for word, style, marks in (("target", "target", TARGET), ("call", "call", CALL)):
            canvas.tokens([PageToken(word, style)], marks=marks)
            canvas.words("  ")
        edge = "shades take turns by token" if canvas.is_colour else f"token{BOUNDARY}token"
        spelled = "…".join(SPELLED)
        canvas.words(f"{edge}  {NEWLINE} line end in the text  {LEFT_OUT} left out  {spelled} spelled out")
        canvas.end_line()

    def student(self) -> None:
        view, span, ids = self.view, self.view.span, self.view.student_ids
        self.canvas.line()
        self.canvas.line(f"student: {len(ids):,} tokens, the turn at {span.start} to {span.end - 1}, no hint", "title")
        before = max(0, span.header_start - self._num_context)
        self._part("context", ids[before : span.header_start], "context", left_out=before)
        self._part("header", ids[span.header_start : span.start], "context")
        self._target()
        self._thinking()
        after = ids[span.end : span.end + self._num_context]
        self._part("after", after, "context", left_out_after=len(ids) - span.end - len(after))
        if view.end_token is None:
            self.canvas.line(
                "  the turn ends without an end-of-turn token: it was cut off, or the template has none", "bad"
            )

    def _thinking(self) -> None:
        """Write what was done with the turn's thinking, if it has any or the template has a block for it."""
        span = self.view.span
        remarks = [_THINKING[span.thinking]] if span.thinking in _THINKING else []
        remarks += (
            ["the header ends with an empty thought, as with thinking switched off"] if span.has_empty_thought else []
        )
        if remarks:
            self.canvas.line(f"  thinking: {'; '.join(remarks)}")

    def _target(self) -> None:
        """Write every token of the turn, with its call marked."""
        span = self.view.span
        call = (span.call_start, span.call_end) if span.call_start is not None else (span.end, span.end)
        edges = (("target", span.start, call[0]), ("call", call[0], call[1]), ("target", call[1], span.end))
        for style, start, end in edges:
            if start is None or end is None or start == end:
                continue
            inner = CALL if style == "call" else ("", "")
            opening = (TARGET[0] if start == span.start else "") + inner[0]
            closing = inner[1] + (TARGET[1] if end == span.end else "")
            self.canvas.label(style)
            tokens = self._tokens(self.view.student_ids[start:end], style)
            self.canvas.tokens(tokens, cut=not self.canvas.is_colour, marks=(opening, closing))

    def teacher(self, teacher: TeacherContext) -> None:
        span, ids, number = self.view.span, teacher.ids, self._num_context
        header = teacher.start - (span.start - span.header_start)
        self.canvas.line()
        words = f"teacher: {len(ids):,} tokens, the hint at {teacher.hint_start} to {teacher.hint_end - 1}"
        self.canvas.line(f"{words} ({teacher.placement}), the turn from {teacher.start} on", "title")
        before = max(0, teacher.hint_start - number)
        self._part("context", ids[before : teacher.hint_start], "context", left_out=before)
        self._part("hint", ids[teacher.hint_start : teacher.hint_end], "hint")
        between = ids[teacher.hint_end : header]
        if len(between) > 2 * number:
            self._part("context", between[:number], "context", left_out_after=len(between) - 2 * number)
            between = between[len(between) - number :]
        self._part("context", between, "context")
        self._part("header", ids[header : teacher.start], "context")
        self._same_target(ids[teacher.start :])

    def _same_target(self, ids: Sequence[int]) -> None:
        """Write the first and last tokens of the turn in the teacher's context."""
        canvas, span, cut = self.canvas, self.view.span, not self.canvas.is_colour
        call = range(*(0, 0) if span.call_start is None else (span.call_start, span.call_end or 0))
        tokens = [
            token._replace(style="call") if at in call else token
            for at, token in enumerate(self._tokens(ids, "target"), start=span.start)
        ]
        canvas.label("target")
        if len(tokens) <= _FIRST + _LAST:
            canvas.tokens(tokens, cut=cut, marks=TARGET)
            return
        edge = BOUNDARY if cut else ""
        canvas.tokens(tokens[:_FIRST], cut=cut, marks=(TARGET[0], edge))
        canvas.left_out(len(tokens) - _FIRST - _LAST, ", the same as above")
        canvas.tokens(tokens[-_LAST:], cut=cut, marks=(edge, TARGET[1]))

    def alignment(self, all_pairs: bool) -> None:
        pairs, canvas = self.view.pairs, self.canvas
        canvas.line()
        canvas.line("alignment: the row of a position predicts the token after it", "title")
        canvas.line(f"  {'student row':>11}   {'id':>7} {cut_to('token', _TOKEN_CELLS)}   teacher row")
        if all_pairs or len(pairs) <= _FIRST + _LAST + 1:
            self._rows(pairs)
            return
        self._rows(pairs[:_FIRST])
        number = len(pairs) - _FIRST - _LAST
        canvas.line(f"  {LEFT_OUT:>11}   {LEFT_OUT:>7} {number:,} more (--tokens shows all)", "context")
        self._rows(pairs[-_LAST:])

    def _rows(self, pairs: Sequence[IndexPair]) -> None:
        tokens = self._tokens([pair.token for pair in pairs], "target")
        for pair, token in zip(pairs, tokens, strict=True):
            text = cut_to(one_line(token.text), _TOKEN_CELLS)
            self.canvas.line(f"  {pair.student:>11} → {pair.token:>7} {text} ← {pair.teacher}")

    def summary(self, placement: str) -> None:
        view, pairs, teacher = self.view, self.view.pairs, self.view.teacher
        call = f"{view.num_call_tokens:,}" if view.span.call_start is not None else "none"
        counts = f"target tokens: {view.num_target_tokens:,}, of which call: {call}"
        self.canvas.line()
        if view.span.no_target:
            self.canvas.line(f"{counts}; no channel trains on this turn ({view.span.no_target})", "bad")
            return
        if teacher is None:
            why = one_line(view.site.reason)
            self.canvas.line(f"{counts}; no hint, so channel 2 does not train on it ({why})", "bad")
            return
        position = teacher.placement
        if position != placement:
            position += f" (the template does not allow {placement})"
        self.canvas.line(f"{counts}; hint {teacher.hint_end - teacher.hint_start:,} tokens placed {position}", "good")
        first, last = pairs[0], pairs[-1]
        rows = f"student rows {first.student}..{last.student}, teacher rows {first.teacher}..{last.teacher}"
        same = f"every pair predicts the same token on both sides ({len(pairs):,} of {view.num_target_tokens:,})"
        self.canvas.line(f"{rows}; {same}", "good")

    def _part(self, label: str, ids: Sequence[int], style: str, *, left_out: int = 0, left_out_after: int = 0) -> None:
        if not ids and not left_out and not left_out_after:
            return
        canvas, tokens = self.canvas, self._tokens(ids, style)
        canvas.label(label)
        if left_out:
            canvas.left_out(left_out)
            canvas.break_line()
        canvas.tokens(tokens, cut=self._looks_special(tokens))
        if left_out_after:
            canvas.break_line()
            canvas.left_out(left_out_after)

    def _tokens(self, ids: Sequence[int], style: str) -> list[PageToken]:
        from composer_replication.batch.render.renderer import token_texts

        special = self._renderer.encoder.protected_ids
        texts = token_texts(self._renderer.tokenizer, ids)
        return [PageToken(text, style, index in special) for text, index in zip(texts, ids, strict=True)]

    def _looks_special(self, tokens: Sequence[PageToken]) -> bool:
        """Return whether ordinary tokens spell a special one, such as "<|im_end|>". Then their edges are drawn."""
        spelled = "".join("\0" if token.is_special else token.text for token in tokens)
        return re.search(self._renderer.protected.pattern, spelled) is not None


NEWLINE, TAB, BOUNDARY, LEFT_OUT = "⏎", "⇥", "│", "⋯"
TARGET, CALL = ("⟦", "⟧"), ("⟪", "⟫")
SPELLED = ("\u2039", "\u203a")  # single angle quotes
_MARKS = frozenset((NEWLINE, TAB, BOUNDARY, LEFT_OUT, *TARGET, *CALL, *SPELLED))
# A run of stray bytes ("\udce2\udc80") or one character. Bytes are invalid UTF-8, decoded with "surrogateescape".
_CHARACTER = re.compile("[\udc80-\udcff]+|.", re.DOTALL)
_GUTTER = 10
# SGR codes of the sixteen colors that every terminal has. Two for each kind of token, which alternate to show edges.
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


class PageToken(NamedTuple):
    """A token's text, its style, and whether it is special, so that only the template can have written it."""

    text: str
    style: str
    is_special: bool = False


class Canvas:
    """Collects colored text line by line."""

    def __init__(self, width: int, *, is_colour: bool) -> None:
        self.is_colour = is_colour
        self._width, self._column, self._indent = width, 0, 0
        self._parts: list[str] = []

    def text(self) -> str:
        """Return everything written so far, with a line end."""
        self.end_line()
        return "".join(self._parts)

    def line(self, text: str = "", style: str = "") -> None:
        """Write a line at the left edge. Text from logs in it must have gone through `one_line`."""
        self.end_line()
        self._parts.append(self._painted(text, _COLOURS[style][0]) + "\n")

    def label(self, word: str) -> None:
        """Begin a part: its name on the left, its text to the right of that."""
        self.end_line()
        self._indent = self._column = _GUTTER
        self._parts.append("  " + self._painted(word, _BOLD) + " " * (_GUTTER - 2 - len(word)))

    def words(self, text: str, style: str = "") -> None:
        """Write words of the page itself between tokens."""
        self._put("", text, "", _COLOURS[style][0])

    def break_line(self) -> None:
        """Start a new line, unless one has just begun."""
        if self._column > self._indent:
            self._break()

    def tokens(self, tokens: Sequence[PageToken], *, cut: bool = False, marks: tuple[str, str] = ("", "")) -> None:
        """Write tokens, with a line between them if `cut`, and with marks before the first and after the last."""
        for number, token in enumerate(tokens):
            before = (BOUNDARY if cut else "") if number else marks[0]
            after = marks[1] if number == len(tokens) - 1 else ""
            codes = _COLOURS[token.style][number % 2]
            if token.is_special:  # bold; dim and bold exclude each other
                codes = "" if codes == _DIM else f"{codes};{_BOLD}"
            self._put(before, visible(token.text), after, codes)

    def left_out(self, number: int, what: str = "") -> None:
        """Write how many tokens are not shown here."""
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
    """Return a token's text as it can be shown: a line end as ⏎ and a line end, a tab as ⇥, a stray byte as ‹e2›."""
    shown_text = _CHARACTER.sub(_shown, text)
    # A leading combining character (category M), such as an accent, would be drawn on top of the mark before it.
    return _code_point(text[0]) + shown_text[1:] if text and unicodedata.category(text[0])[0] == "M" else shown_text


def one_line(text: str) -> str:
    """Return the visible text without line ends."""
    return visible(text).replace("\n", "")


def cells(text: str) -> int:
    """Return how many columns a text takes; CJK characters and emoji take two."""
    from rich.cells import cell_len

    return len(text) if text.isascii() else cell_len(text)


def cut_to(text: str, width: int) -> str:
    """Return the text, truncated or padded with spaces to a number of columns."""
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
