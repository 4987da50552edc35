"""The page that `crf inspect` prints: what the student and the teacher see, and which of their rows belong together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from composer_replication.cli.pages.token_canvas import (
    BOUNDARY,
    CALL,
    LEFT_OUT,
    NEWLINE,
    SPELLED,
    TARGET,
    Canvas,
    Token,
    cut_to,
    one_line,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer_replication.batch.hint_placement import TeacherContext
    from composer_replication.batch.render.renderer import Renderer
    from composer_replication.batch.site_view import IndexPair, SiteView

_FIRST, _LAST = 5, 3
_TOKEN_CELLS = 32
_THINKING = {
    "target": "the turn's own is learned with it (target)",
    "context": "the turn's own stands in the header (context)",
    "left_out": "the turn's own is left out",
    "not_shown": "the turn's own has no place in this template",
}


def site_page(
    view: SiteView,
    renderer: Renderer,
    *,
    tokenizer: str,
    asked: str,
    left_out: str = "",
    proof: str = "",
    num_context: int,
    all_pairs: bool,
    width: int,
    is_colour: bool,
) -> str:
    """The whole page as text.

    `asked` is the placement that was asked for, which a template may not allow. `left_out` says why a training drops
    the site, `proof` what its hint did in the last hint proof.
    """
    page = _Page(view, renderer, Canvas(width, is_colour=is_colour), num_context)
    page.head(tokenizer)
    page.student()
    if view.teacher is not None:
        page.teacher(view.teacher)
        page.alignment(all_pairs)
    page.summary(asked)
    if left_out:
        page.canvas.line(one_line(f"no window of this training holds it ({left_out})"), "bad")
    if proof:
        page.canvas.line(one_line(proof))
    return page.canvas.text()


class _Page:
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
            canvas.tokens([Token(word, style)], marks=marks)
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
        """What was done with the turn's thinking, where there was some or a block for it."""
        span = self.view.span
        remarks = [_THINKING[span.thinking]] if span.thinking in _THINKING else []
        remarks += (
            ["the header ends with an empty thought, as with thinking switched off"] if span.has_empty_thought else []
        )
        if remarks:
            self.canvas.line(f"  thinking: {'; '.join(remarks)}")

    def _target(self) -> None:
        """The turn whole, every token of it; the call is a part of it."""
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
        """The ends of the turn where the teacher has it."""
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

    def summary(self, asked: str) -> None:
        view, pairs, teacher = self.view, self.view.pairs, self.view.teacher
        call = f"{view.num_call:,}" if view.span.call_start is not None else "none"
        counts = f"target tokens: {view.num_target:,}, of which call: {call}"
        self.canvas.line()
        if view.span.no_target:
            self.canvas.line(f"{counts}; no channel learns this turn ({view.span.no_target})", "bad")
            return
        if teacher is None:
            why = one_line(view.site.reason)
            self.canvas.line(f"{counts}; no hint, so nothing will be taught here ({why})", "bad")
            return
        placed = teacher.placement
        if placed != asked:
            placed += f" (the template takes none {asked})"
        self.canvas.line(f"{counts}; hint {teacher.hint_end - teacher.hint_start:,} tokens placed {placed}", "good")
        first, last = pairs[0], pairs[-1]
        rows = f"student rows {first.student}..{last.student}, teacher rows {first.teacher}..{last.teacher}"
        same = f"every pair predicts the same token on both sides ({len(pairs):,} of {view.num_target:,})"
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

    def _tokens(self, ids: Sequence[int], style: str) -> list[Token]:
        from composer_replication.batch.render.encode import token_texts

        special = self._renderer.encoder.protected_ids
        texts = token_texts(self._renderer.tokenizer, ids)
        return [Token(text, style, index in special) for text, index in zip(texts, ids, strict=True)]

    def _looks_special(self, tokens: Sequence[Token]) -> bool:
        """Whether ordinary tokens here spell a special one: then their edges show that it is none."""
        spelled = "".join("\0" if token.is_special else token.text for token in tokens)
        return re.search(self._renderer.protected.pattern, spelled) is not None
