"""Show one error site the way training sees it: the turn's tokens, the teacher's context, and the pairs of rows.

Ids and spans come from the renderer and from `teacher_context`; the pairs are derived a second time as a check. Let c
be the first token of the context, b the first token of the turn's header, and [s, e) the turn's own tokens. For j = 0
.. e - s - 1, both of these rows predict token s + j:

    student row = s - 1 + j
    teacher row = (b - c) + length of the hint + (s - b) - 1 + j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from composer_replication.batch.hint_placement import Placement, TeacherContext, teacher_context
from composer_replication.batch.render.renderer import (
    RenderedSequence,
    Renderer,
    TurnSpan,
    join_token_texts,
    token_texts,
)
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.types import Conversation, ErrorSite, Hint, Turn

_MAX_SHOWN_CHARS = 60


class IndexPair(NamedTuple):
    """A student row, the matching teacher row, and the token that both predict."""

    student: int
    teacher: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """The rows and tokens of one error site. A site without a hint has neither a teacher nor pairs.

    Student positions refer to `student_ids`, the whole sequence with the turn. The teacher's ids begin with the
    student's token `first`.
    """

    site: ErrorSite
    hint: Hint | None
    sequence: int
    num_sequences: int
    first: int
    student_ids: list[int]
    span: TurnSpan
    teacher: TeacherContext | None
    pairs: tuple[IndexPair, ...]
    end_token: int | None
    """The turn's last token if that is an end-of-turn token; None if a rollout was cut off before it."""

    @property
    def num_target_tokens(self) -> int:
        """The number of target tokens."""
        return self.span.end - self.span.start

    @property
    def num_call_tokens(self) -> int:
        """The number of tokens of the turn's calls."""
        return (self.span.call_end or 0) - (self.span.call_start or 0)

    def as_json(self) -> dict[str, Any]:
        """Return the view as JSON data; spans are [start, end), pairs [student row, teacher row, token]."""
        span, teacher = self.span, self.teacher
        student = {
            "ids": self.student_ids,
            "header": [span.header_start, span.start],
            "target": [span.start, span.end],
            "call": None if span.call_start is None else [span.call_start, span.call_end],
            "text": span.text,
            "is_verbatim": span.is_verbatim,
            "thinking": span.thinking,
            "has_empty_thought": span.has_empty_thought,
            "no_target": span.no_target,
            "end_token": self.end_token,
        }
        hinted = teacher and {
            "ids": teacher.ids,
            "first": self.first,
            "target": [teacher.start, len(teacher.ids)],
            "hint": [teacher.hint_start, teacher.hint_end],
            "placement": teacher.placement,
        }
        return {
            "site": asdict(self.site),
            "hint": self.hint and asdict(self.hint),
            "sequence": self.sequence,
            "num_sequences": self.num_sequences,
            "student": student,
            "teacher": hinted,
            "pairs": [list(pair) for pair in self.pairs],
            "counts": {
                "target": self.num_target_tokens,
                "call": self.num_call_tokens,
                "hint": teacher.hint_end - teacher.hint_start if teacher else 0,
                "pairs": len(self.pairs),
            },
        }


def view_site(
    renderer: Renderer,
    conversation: Conversation,
    site: ErrorSite,
    hint: Hint | None,
    *,
    placement: Placement = "before_turn",
    first: int = 0,
) -> SiteView:
    """Render a conversation and describe one of its sites. Raises AlignmentError if a span or pair is inconsistent.

    `first` is the first token of the teacher's context, as in `teacher_context`.
    """
    sequences = renderer.render(conversation)
    number, rendered, span = _find_turn(sequences, site)
    turn = next(candidate for candidate in conversation.turns if candidate.id == site.turn_id)
    _check_span(renderer, rendered, span, turn)
    teacher = pairs = None
    if hint is not None:
        teacher = teacher_context(renderer, rendered, span, hint.text, placement=placement, first=first)
        pairs = _index_pairs(rendered.ids, span, teacher, first=first)
    stops = {renderer.protected.ids[stop] for stop in renderer.dialect.stops}
    last = rendered.ids[span.end - 1]
    return SiteView(
        site=site,
        hint=hint,
        sequence=number,
        num_sequences=len(sequences),
        first=first,
        student_ids=rendered.ids,
        span=span,
        teacher=teacher,
        pairs=pairs or (),
        end_token=last if last in stops else None,
    )


def _index_pairs(
    student_ids: Sequence[int], span: TurnSpan, teacher: TeacherContext, *, first: int = 0
) -> tuple[IndexPair, ...]:
    """Pair the student's and the teacher's rows of a turn. Raises AlignmentError unless paired rows predict the same
    token.
    """
    num_hint, header_start = teacher.hint_end - teacher.hint_start, span.header_start
    # Computed from the spans alone, as in the module docstring, to check what `teacher_context` returned.
    student_row = span.start - 1
    teacher_row = (header_start - first) + num_hint + (span.start - header_start) - 1
    where = f"turn {span.turn_id}"
    if student_row < 0 or span.end > len(student_ids) or teacher_row + 1 != teacher.start:
        got = (
            f"tokens [{span.start}, {span.end}) of {len(student_ids)}, and [{teacher.start}, {len(teacher.ids)}) hinted"
        )
        expected = f"a row before each token, and the hinted tokens from {teacher_row + 1} on"
        raise AlignmentError(explain(f"positions of the tokens of {where}", got=got, expected=expected))
    targets, teacher_targets = student_ids[span.start : span.end], teacher.ids[teacher_row + 1 :]
    if list(targets) != list(teacher_targets):
        num_equal = sum(a == b for a, b in zip(targets, teacher_targets, strict=False))
        got = f"the same token in {num_equal} of {len(targets)} pairs, and {len(teacher_targets)} teacher tokens"
        raise AlignmentError(
            explain(f"student and teacher rows of {where}", got=got, expected="the same token in all pairs")
        )
    return tuple(IndexPair(student_row + j, teacher_row + j, token) for j, token in enumerate(targets))


def _check_span(renderer: Renderer, rendered: RenderedSequence, span: TurnSpan, turn: Turn) -> None:
    """Raise AlignmentError unless the span holds exactly the turn: its sampled ids, or the text that was rendered."""
    ids = rendered.ids[span.start : span.end]
    calls = (span.call_start, span.call_end) if span.call_start is not None else (span.start, span.end)
    if not 0 <= span.header_start <= span.start <= (calls[0] or 0) < (calls[1] or 0) <= span.end <= len(rendered.ids):
        got = f"header at {span.header_start}, call at {calls}, turn at {(span.start, span.end)}"
        raise AlignmentError(explain(f"turn {turn.id}", got=got, expected="the header, then the turn with its call"))
    if turn.token_ids:
        if list(turn.token_ids) != ids:
            got, expected = f"{ids[:5]}…", f"{list(turn.token_ids[:5])}…"
            raise AlignmentError(explain(f"tokens of turn {turn.id}", got=got, expected=f"the sampled ids {expected}"))
        return
    text = join_token_texts(token_texts(renderer.tokenizer, ids))
    # Some tokenizers normalize text or lack characters, so decoded text may differ from the text that was encoded.
    if text != span.text and text != _round_trip(renderer, span.text):
        got, expected = (
            f"{len(ids)} tokens with the text {_abbreviate(text)}",
            f"{_abbreviate(span.text)}, the rendered text",
        )
        raise AlignmentError(explain(f"target tokens of turn {turn.id}", got=got, expected=expected))


def _round_trip(renderer: Renderer, text: str) -> str:
    """Encode the text and decode the resulting ids."""
    ids = renderer.encoder.encode([renderer.protected.escape(text)])[0]
    return join_token_texts(token_texts(renderer.tokenizer, ids))


def _abbreviate(text: str) -> str:
    half = _MAX_SHOWN_CHARS // 2
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:half]} … {text[-half:]}")


def _find_turn(sequences: Sequence[RenderedSequence], site: ErrorSite) -> tuple[int, RenderedSequence, TurnSpan]:
    for number, rendered in enumerate(sequences):
        for span in rendered.spans:
            if span.turn_id == site.turn_id:
                return number, rendered, span
    got = f"turn {site.turn_id!r}, which is in none of the {len(sequences)} rendered sequences"
    expected = f"an assistant turn of conversation {site.conversation_id}"
    # A site that is not kept may have no assistant turn. If a kept one lacks its turn, the conversation has changed.
    fix = f"It is not trained on: {site.reason}."
    if site.is_kept:
        fix = "The conversation has changed since the sites were found. Run `crf sites RUN` again."
    raise InputError(explain(f"site {site.id}", got=got, expected=expected, fix=fix))
