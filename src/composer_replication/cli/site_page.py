"""Format the page that `crf inspect` prints: one error site as student and hinted teacher see it, token by token.

    _Page     the parts of the page: student context, teacher context, aligned rows, summary
    _Canvas   a page of labeled lines that break only between tokens, in color or with marks only
    _visible  a token's text with unprintable characters spelled out

Control characters, and characters that the page uses as marks, are spelled out between ‹ and ›, as in ‹U+001B›. So no
text from a log can be mistaken for a mark, a label or a color.
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
    uses_color: bool,
) -> str:
    """Return the page as text.

    Args:
        view: The site's tokens and index pairs.
        renderer: The renderer that made the view.
        tokenizer: Name of the tokenizer, for the heading of the page.
        placement: The hint placement that the config asks for; the template may not support it.
        left_out: Why a training run would drop the site; empty if it would not.
        proof: The result of the site's last hint check, in words; empty if there is none.
        num_context: Tokens of context to show on each side.
        all_pairs: Show all index pairs instead of the first and last ones.
        width: Columns of the page.
        uses_color: Use escape codes for colors; otherwise marks only.
    """
    page = _Page(view, renderer, _Canvas(width, uses_color=uses_color), num_context)
    page.head(tokenizer)
    page.student()
    if view.teacher is not None:
        page.teacher(view.teacher)
        page.alignment(all_pairs)
    page.summary(placement)
    if left_out:
        page.canvas.line(_one_line(f"no window of this training holds it ({left_out})"), "bad")
    if proof:
        page.canvas.line(_one_line(proof))
    return page.canvas.text()


class _Page:
    """Writes the parts of the page to a canvas, in order."""

    def __init__(self, view: SiteView, renderer: Renderer, canvas: _Canvas, num_context: int) -> None:
        self.view, self.canvas = view, canvas
        self._renderer, self._num_context = renderer, num_context

    def head(self, tokenizer: str) -> None:
        site, view, canvas = self.view.site, self.view, self.canvas
        status = "kept" if site.is_kept else "not kept"
        what = f"{site.kind}, blame {site.blame}, confidence {site.confidence:g}, {status}: {site.reason}"
        canvas.line(_one_line(f"site {site.id}  {what}"))
        where = f"conversation {site.conversation_id}, turn {site.turn_id}, tokenizer {tokenizer}"
        part = f", sequence {view.sequence + 1} of {view.num_sequences}" if view.num_sequences > 1 else ""
        canvas.line(_one_line(where + part))
        self._write_legend()

    def _write_legend(self) -> None:
        canvas = self.canvas
        canvas.label("marks")
        for word, style, marks in (("target", "target", _TARGET), ("call", "call", _CALL)):
            canvas.tokens([_PageToken(word, style)], marks=marks)
            canvas.words("  ")
        edge = "shades take turns by token" if canvas.uses_color else f"token{_BOUNDARY}token"
        spelled = "…".join(_SPELLED)
        canvas.words(f"{edge}  {_NEWLINE} line end in the text  {_LEFT_OUT} left out  {spelled} spelled out")
        canvas.end_line()

    def student(self) -> None:
        view, span, ids = self.view, self.view.span, self.view.student_ids
        self.canvas.line()
        self.canvas.line(f"student: {len(ids):,} tokens, the turn at {span.start} to {span.end - 1}, no hint", "title")
        before = max(0, span.header_start - self._num_context)
        self._write_part("context", ids[before : span.header_start], "context", left_out=before)
        self._write_part("header", ids[span.header_start : span.start], "context")
        self._write_target()
        self._write_thinking()
        after = ids[span.end : span.end + self._num_context]
        self._write_part("after", after, "context", left_out_after=len(ids) - span.end - len(after))
        if view.end_token is None:
            self.canvas.line(
                "  the turn ends without an end-of-turn token: it was cut off, or the template has none", "bad"
            )

    def _write_thinking(self) -> None:
        """Write how the turn's thinking is rendered, if the turn has any or the template contains a block for it."""
        span = self.view.span
        remarks = [_THINKING[span.thinking]] if span.thinking in _THINKING else []
        remarks += (
            ["the header ends with an empty thought, as with thinking switched off"] if span.has_empty_thought else []
        )
        if remarks:
            self.canvas.line(f"  thinking: {'; '.join(remarks)}")

    def _write_target(self) -> None:
        """Write every token of the erring turn, with its call marked."""
        span = self.view.span
        call = (span.call_start, span.call_end) if span.call_start is not None else (span.end, span.end)
        edges = (("target", span.start, call[0]), ("call", call[0], call[1]), ("target", call[1], span.end))
        for style, start, end in edges:
            if start is None or end is None or start == end:
                continue
            inner = _CALL if style == "call" else ("", "")
            opening = (_TARGET[0] if start == span.start else "") + inner[0]
            closing = inner[1] + (_TARGET[1] if end == span.end else "")
            self.canvas.label(style)
            tokens = self._tokens(self.view.student_ids[start:end], style)
            self.canvas.tokens(tokens, draws_edges=not self.canvas.uses_color, marks=(opening, closing))

    def teacher(self, teacher: TeacherContext) -> None:
        span, ids, number = self.view.span, teacher.ids, self._num_context
        header = teacher.start - (span.start - span.header_start)
        self.canvas.line()
        words = f"teacher: {len(ids):,} tokens, the hint at {teacher.hint_start} to {teacher.hint_end - 1}"
        self.canvas.line(f"{words} ({teacher.placement}), the turn from {teacher.start} on", "title")
        before = max(0, teacher.hint_start - number)
        self._write_part("context", ids[before : teacher.hint_start], "context", left_out=before)
        self._write_part("hint", ids[teacher.hint_start : teacher.hint_end], "hint")
        between = ids[teacher.hint_end : header]
        if len(between) > 2 * number:
            self._write_part("context", between[:number], "context", left_out_after=len(between) - 2 * number)
            between = between[len(between) - number :]
        self._write_part("context", between, "context")
        self._write_part("header", ids[header : teacher.start], "context")
        self._write_repeated_target(ids[teacher.start :])

    def _write_repeated_target(self, ids: Sequence[int]) -> None:
        """Write the first and last tokens of the erring turn as they appear in the teacher's context."""
        canvas, span, draws_edges = self.canvas, self.view.span, not self.canvas.uses_color
        call = range(*(0, 0) if span.call_start is None else (span.call_start, span.call_end or 0))
        tokens = [
            token._replace(style="call") if at in call else token
            for at, token in enumerate(self._tokens(ids, "target"), start=span.start)
        ]
        canvas.label("target")
        if len(tokens) <= _FIRST + _LAST:
            canvas.tokens(tokens, draws_edges=draws_edges, marks=_TARGET)
            return
        edge = _BOUNDARY if draws_edges else ""
        canvas.tokens(tokens[:_FIRST], draws_edges=draws_edges, marks=(_TARGET[0], edge))
        canvas.left_out(len(tokens) - _FIRST - _LAST, ", the same as above")
        canvas.tokens(tokens[-_LAST:], draws_edges=draws_edges, marks=(edge, _TARGET[1]))

    def alignment(self, all_pairs: bool) -> None:
        pairs, canvas = self.view.pairs, self.canvas
        canvas.line()
        canvas.line("alignment: the row of a position predicts the token after it", "title")
        canvas.line(f"  {'student row':>11}   {'id':>7} {_cut_to('token', _TOKEN_CELLS)}   teacher row")
        if all_pairs or len(pairs) <= _FIRST + _LAST + 1:
            self._write_rows(pairs)
            return
        self._write_rows(pairs[:_FIRST])
        number = len(pairs) - _FIRST - _LAST
        canvas.line(f"  {_LEFT_OUT:>11}   {_LEFT_OUT:>7} {number:,} more (--tokens shows all)", "context")
        self._write_rows(pairs[-_LAST:])

    def _write_rows(self, pairs: Sequence[IndexPair]) -> None:
        tokens = self._tokens([pair.token for pair in pairs], "target")
        for pair, token in zip(pairs, tokens, strict=True):
            text = _cut_to(_one_line(token.text), _TOKEN_CELLS)
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
            why = _one_line(view.site.reason)
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

    def _write_part(
        self, label: str, ids: Sequence[int], style: str, *, left_out: int = 0, left_out_after: int = 0
    ) -> None:
        if not ids and not left_out and not left_out_after:
            return
        canvas, tokens = self.canvas, self._tokens(ids, style)
        canvas.label(label)
        if left_out:
            canvas.left_out(left_out)
            canvas.break_line()
        canvas.tokens(tokens, draws_edges=self._has_spelled_special_token(tokens))
        if left_out_after:
            canvas.break_line()
            canvas.left_out(left_out_after)

    def _tokens(self, ids: Sequence[int], style: str) -> list[_PageToken]:
        from composer_replication.batch.render.renderer import token_texts

        special = self._renderer.encoder.protected_ids
        texts = token_texts(self._renderer.tokenizer, ids)
        return [_PageToken(text, style, index in special) for text, index in zip(texts, ids, strict=True)]

    def _has_spelled_special_token(self, tokens: Sequence[_PageToken]) -> bool:
        """Return whether ordinary tokens together spell out a special token, such as "<|im_end|>"."""
        spelled = "".join("\0" if token.is_special else token.text for token in tokens)
        return re.search(self._renderer.protected.pattern, spelled) is not None


_NEWLINE, _TAB, _BOUNDARY, _LEFT_OUT = "⏎", "⇥", "│", "⋯"
_TARGET, _CALL = ("⟦", "⟧"), ("⟪", "⟫")
_SPELLED = ("\u2039", "\u203a")  # single angle quotes
_MARKS = frozenset((_NEWLINE, _TAB, _BOUNDARY, _LEFT_OUT, *_TARGET, *_CALL, *_SPELLED))
# A run of bytes that are not valid UTF-8 ("\udce2\udc80", decoded with "surrogateescape"), or one character.
_CHARACTER = re.compile("[\udc80-\udcff]+|.", re.DOTALL)
_GUTTER = 10
# SGR codes of the sixteen colors that every terminal has. Two for each kind of token, which alternate to show edges.
_BOLD, _DIM = "1", "2"
_COLORS = {
    "": ("", ""),
    "title": (_BOLD, _BOLD),
    "context": (_DIM, _DIM),
    "target": ("30;46", "30;106"),
    "call": ("30;43", "30;103"),
    "hint": ("35", "95"),
    "good": ("32", "32"),
    "bad": ("31", "31"),
}


class _PageToken(NamedTuple):
    """A token's text, its style, and whether it is a special token, which only the template can write."""

    text: str
    style: str
    is_special: bool = False


class _Canvas:
    """A page under construction: colored text, line by line."""

    def __init__(self, width: int, *, uses_color: bool) -> None:
        self.uses_color = uses_color
        self._width, self._column, self._indent = width, 0, 0
        self._parts: list[str] = []

    def text(self) -> str:
        """Return everything written so far, ending with a newline."""
        self.end_line()
        return "".join(self._parts)

    def line(self, text: str = "", style: str = "") -> None:
        """Write a line at the left edge. Text from logs must be passed through `_one_line` first."""
        self.end_line()
        self._parts.append(self._paint(text, _COLORS[style][0]) + "\n")

    def label(self, word: str) -> None:
        """Begin a part of the page, with its label on the left and its content to the right of the label."""
        self.end_line()
        self._indent = self._column = _GUTTER
        self._parts.append("  " + self._paint(word, _BOLD) + " " * (_GUTTER - 2 - len(word)))

    def words(self, text: str, style: str = "") -> None:
        """Write text that does not come from a log, between the tokens."""
        self._put("", text, "", _COLORS[style][0])

    def break_line(self) -> None:
        """Start a new line, unless one has just begun."""
        if self._column > self._indent:
            self._break()

    def tokens(
        self, tokens: Sequence[_PageToken], *, draws_edges: bool = False, marks: tuple[str, str] = ("", "")
    ) -> None:
        """Write tokens, with marks before the first and after the last token.

        With `draws_edges`, a bar is also drawn between tokens.
        """
        for number, token in enumerate(tokens):
            before = (_BOUNDARY if draws_edges else "") if number else marks[0]
            after = marks[1] if number == len(tokens) - 1 else ""
            codes = _COLORS[token.style][number % 2]
            if token.is_special:  # bold; dim and bold exclude each other
                codes = "" if codes == _DIM else f"{codes};{_BOLD}"
            self._put(before, _visible(token.text), after, codes)

    def left_out(self, number: int, what: str = "") -> None:
        """Write how many tokens are omitted here."""
        words = f"{number:,} token{'s' if number > 1 else ''}{what}"
        self.words(f" {words} ".join((_LEFT_OUT, _LEFT_OUT)), "context")

    def end_line(self) -> None:
        if self._column:
            self._parts.append("\n")
        self._column = self._indent = 0

    def _put(self, before: str, text: str, after: str, codes: str) -> None:
        first, *later_lines = text.split("\n")
        if self._column + _cells(before + first + after) > self._width:
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
        self._parts.append(self._paint(text, codes))
        self._column += _cells(text)

    def _paint(self, text: str, codes: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self.uses_color and codes and text else text


def _visible(text: str) -> str:
    """Return a token's text with unprintable characters spelled out: tab as ⇥, an invalid byte as ‹e2›."""
    shown_text = _CHARACTER.sub(_spell_character, text)
    # A leading combining character (category M), such as an accent, would be drawn on top of the mark before it.
    return _code_point(text[0]) + shown_text[1:] if text and unicodedata.category(text[0])[0] == "M" else shown_text


def _one_line(text: str) -> str:
    """Return the text on one line, with unprintable characters spelled out."""
    return _visible(text).replace("\n", "")


def _cells(text: str) -> int:
    """Return the width of a text in terminal columns. CJK characters and emoji are two columns wide."""
    from rich.cells import cell_len

    return len(text) if text.isascii() else cell_len(text)


def _cut_to(text: str, width: int) -> str:
    """Return the text, truncated with "⋯" or padded with spaces to a width of `width` columns."""
    short_text = text
    while _cells(short_text) > width:
        short_text = short_text[: min(len(short_text) - 2, width - 1)].rstrip(_LEFT_OUT) + _LEFT_OUT
    return short_text + " " * (width - _cells(short_text))


def _spell_character(match: re.Match[str]) -> str:
    chars = match[0]
    if "\udc80" <= chars[0] <= "\udcff":
        return " ".join(f"{ord(char) - 0xDC00:02x}" for char in chars).join(_SPELLED)
    if chars == "\n":
        return f"{_NEWLINE}\n"
    if chars == "\t":
        return _TAB
    return chars if chars.isprintable() and chars not in _MARKS else _code_point(chars)


def _code_point(character: str) -> str:
    return f"U+{ord(character):04X}".join(_SPELLED)
