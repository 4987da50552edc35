"""A hinted turn as training reads it: its target tokens, and the same tokens in the context with a hint.

Sessions, rollouts, the collator and the hint proof ask here, and have the same words for why a turn cannot be taught.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from composer_replication.batch.hint_placement import Placement, TeacherContext, teacher_context
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.errors import InputError, explain

T = TypeVar("T")
Part = Literal["turn", "call"]
PARTS: tuple[Part, ...] = ("turn", "call")
HINT_HAS_NO_PLACE = "hint_has_no_place"
HINT_MAKES_NO_TOKENS = "hint_makes_no_tokens"
NOTHING_BEFORE_IT = "nothing_before_it"


class HintedTurn(NamedTuple):
    """Target tokens [start, end) of a sequence, and the context that has the same tokens from `teacher_start` on."""

    start: int
    end: int
    context: TeacherContext
    teacher_start: int
    is_whole: bool
    """Whether the whole turn is the target."""

    @property
    def ids(self) -> list[int]:
        """The hinted context up to the end of the target."""
        return self.context.ids[: self.teacher_start + self.end - self.start]


def hinted_turn(
    renderer: Renderer,
    rendered: RenderedSequence,
    span: TurnSpan,
    hint: str,
    *,
    placement: Placement = "before_turn",
    part: Part = "turn",
    first: int = 0,
) -> HintedTurn | str:
    """A turn with its hint, or the reason why it cannot be taught; see `teacher_context` for `placement` and `first`.

    `part="call"` makes the calls alone the target, the whole turn where it has none. An empty hint makes the teacher's
    context the student's own.
    """
    if reason := why_no_target(span):
        return reason
    if hint and not makes_tokens(renderer, hint):
        return HINT_MAKES_NO_TOKENS
    try:
        context = teacher_context(renderer, rendered, span, hint, placement=placement, first=first)
    except InputError:  # no template takes it; what is wrong with a hint or a placement itself came out before
        return HINT_HAS_NO_PLACE
    start, end, is_whole = span.start, span.end, True
    if part == "call" and span.call_start is not None and span.call_end is not None:
        start, end, is_whole = span.call_start, span.call_end, False
    return HintedTurn(start, end, context, context.start + start - span.start, is_whole)


def why_no_target(span: TurnSpan) -> str:
    """Why a turn's tokens cannot be learned; empty where they can."""
    return span.no_target or ("" if span.start else NOTHING_BEFORE_IT)


def makes_tokens(renderer: Renderer, hint: str) -> bool:
    return bool(renderer.encoder.encode([renderer.protected.escape(hint.strip())])[0])


def wrong_hints(hints: Sequence[T], kinds: Sequence[str], *, seed: int | str = 0) -> list[T | None]:
    """For each site the hint of one of another kind, drawn once and the same in every run; None where there is none.

    `kinds` are the sites' kinds of error. A hint may be anything that stands for one, such as its site.
    """
    if len(hints) != len(kinds):
        raise InputError(explain("hints and kinds", got=(len(hints), len(kinds)), expected="one of each for a site"))
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    other_hints = {kind: [hint for hint, its in zip(hints, kinds, strict=True) if its != kind] for kind in set(kinds)}
    return [draw.choice(other_hints[kind]) if other_hints[kind] else None for kind in kinds]
