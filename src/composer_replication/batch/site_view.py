"""One error site as training reads it: the turn's tokens, the teacher's context, and the rows that predict the same.

Ids and spans are the renderer's and `teacher_context`'s own; nothing is worked out a second time except to check it.
With c the first token of the context, b where the turn's header begins and [s, e) the turn's own tokens, for
j = 0 .. e - s - 1

    student row = s - 1 + j
    teacher row = (b - c) + length of the hint + (s - b) - 1 + j

and both rows predict token s + j.
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
    joined_text,
    token_texts,
)
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.types import (
    Conversation,
    ErrorSite,
    Hint,
    Turn,
)

_MAX_SHOWN = 60


class IndexPair(NamedTuple):
    """A row of the student, the row of the teacher that belongs to it, and the token that both predict."""

    student: int
    teacher: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """What will be trained for a site. Without a hint there is no teacher and there are no pairs.

    Positions are those of `student_ids`, the whole sequence that holds the turn, and of the teacher's ids, which begin
    at the student's token `first`.
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
    """The turn's last token where that ends a turn; None where a rollout was cut off before it."""

    @property
    def num_target(self) -> int:
        return self.span.end - self.span.start

    @property
    def num_call(self) -> int:
        return (self.span.call_end or 0) - (self.span.call_start or 0)

    def as_json(self) -> dict[str, Any]:
        """Plain data: ids, spans as [start, end), pairs as [student row, teacher row, token], counts."""
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
                "target": self.num_target,
                "call": self.num_call,
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
    """Render the conversation and look at the site's turn; AlignmentError where a span or a pair is not what it says.

    `first` is the left cut of the teacher's context, as in `teacher_context`.
    """
    sequences = renderer.render(conversation)
    number, rendered, span = _find_turn(sequences, site)
    turn = next(candidate for candidate in conversation.turns if candidate.id == site.turn_id)
    check_span(renderer, rendered, span, turn)
    teacher = pairs = None
    if hint is not None:
        teacher = teacher_context(renderer, rendered, span, hint.text, placement=placement, first=first)
        pairs = index_pairs(rendered.ids, span, teacher, first=first)
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


def index_pairs(
    student_ids: Sequence[int], span: TurnSpan, teacher: TeacherContext, *, first: int = 0
) -> tuple[IndexPair, ...]:
    """The pairs of a turn, each checked: both rows must predict the token that stands in the student's ids."""
    num_hint, header_start = teacher.hint_end - teacher.hint_start, span.header_start
    student_row = span.start - 1
    teacher_row = (header_start - first) + num_hint + (span.start - header_start) - 1
    where = f"turn {span.turn_id}"
    if student_row < 0 or span.end > len(student_ids) or teacher_row + 1 != teacher.start:
        got = (
            f"tokens [{span.start}, {span.end}) of {len(student_ids)}, and [{teacher.start}, {len(teacher.ids)}) hinted"
        )
        expected = f"a row before each of them, and the hinted ones from {teacher_row + 1} on"
        raise AlignmentError(explain(f"{where}: where its tokens stand", got=got, expected=expected))
    targets, offered = student_ids[span.start : span.end], teacher.ids[teacher_row + 1 :]
    if list(targets) != list(offered):
        num_same = sum(a == b for a, b in zip(targets, offered, strict=False))
        got = f"the same token in {num_same} of {len(targets)} pairs, with {len(offered)} tokens on the teacher's side"
        raise AlignmentError(explain(f"{where}: student and teacher rows", got=got, expected="the same token in all"))
    return tuple(IndexPair(student_row + j, teacher_row + j, token) for j, token in enumerate(targets))


def check_span(renderer: Renderer, rendered: RenderedSequence, span: TurnSpan, turn: Turn) -> None:
    """The span's tokens must be the turn: the ids that were sampled, or else the text that the template wrote."""
    ids = rendered.ids[span.start : span.end]
    calls = (span.call_start, span.call_end) if span.call_start is not None else (span.start, span.end)
    if not 0 <= span.header_start <= span.start <= (calls[0] or 0) < (calls[1] or 0) <= span.end <= len(rendered.ids):
        got = f"header at {span.header_start}, call at {calls}, turn at {(span.start, span.end)}"
        raise AlignmentError(explain(f"turn {turn.id}", got=got, expected="the header, then the turn, the call in it"))
    if turn.token_ids:
        if list(turn.token_ids) != ids:
            got, expected = f"{ids[:5]}…", f"{list(turn.token_ids[:5])}…"
            raise AlignmentError(
                explain(f"turn {turn.id}: its tokens against those sampled", got=got, expected=expected)
            )
        return
    text = joined_text(token_texts(renderer.tokenizer, ids))
    if text != span.text and text != _round_trip(renderer, span.text):
        got, expected = f"{len(ids)} tokens that read {_ends(text)}", f"{_ends(span.text)}, as the template wrote it"
        raise AlignmentError(explain(f"turn {turn.id}: its target tokens", got=got, expected=expected))


def _round_trip(renderer: Renderer, text: str) -> str:
    """What the tokenizer makes of a text: some normalise it, or do not know every character."""
    ids = renderer.encoder.encode([renderer.protected.escape(text)])[0]
    return joined_text(token_texts(renderer.tokenizer, ids))


def _ends(text: str) -> str:
    half = _MAX_SHOWN // 2
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:half]} … {text[-half:]}")


def _find_turn(sequences: Sequence[RenderedSequence], site: ErrorSite) -> tuple[int, RenderedSequence, TurnSpan]:
    for number, rendered in enumerate(sequences):
        for span in rendered.spans:
            if span.turn_id == site.turn_id:
                return number, rendered, span
    got = f"turn {site.turn_id!r}, which is in none of {len(sequences)} rendered sequences"
    expected = f"an assistant turn of conversation {site.conversation_id}"
    fix = f"Nothing is taught there: {site.reason}."
    if site.is_kept:
        fix = "Sites older than their conversations are found anew by `crf sites RUN`."
    raise InputError(explain(f"site {site.id}", got=got, expected=expected, fix=fix))
