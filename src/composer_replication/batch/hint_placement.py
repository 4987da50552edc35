"""A teacher's context: the student's own ids with a hint put in, so that both sides predict the same tokens.

Every placement splices the hint's ids into ids that stay as they are. A hint that is a message of its own comes out of
the template, header and end token with it; where the template allows no message at a place, the next legal placement
is used, and the result says which.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from composer_replication.batch.render.dialect import (
    PLAIN_ID,
    SHORT_ID,
    assistant,
    calling,
    example_arguments,
    result,
    system,
    user,
)
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.errors import InputError, explain
from composer_replication.types import Message

Placement = Literal["before_turn", "in_last_message", "head"]
PLACEMENTS: tuple[Placement, ...] = ("before_turn", "in_last_message", "head")
_BETWEEN = "\n\n"
_WORD = "Zqword"


class TeacherContext(NamedTuple):
    """Ids that end where the turn ends: its tokens are [start, end of the ids), the hint's [hint_start, hint_end)."""

    ids: list[int]
    start: int
    placement: Placement
    hint_start: int
    hint_end: int


class _Splice(NamedTuple):
    position: int
    ids: list[int]


def teacher_context(
    renderer: Renderer,
    rendered: RenderedSequence,
    span: TurnSpan,
    hint: str,
    *,
    placement: Placement = "before_turn",
    first: int = 0,
) -> TeacherContext:
    """The student's ids from `first` to the end of a turn, with a hint; an empty hint leaves them as they are.

    `before_turn`: a message of its own before the turn's header. `in_last_message`: at the end of the message before
    the turn. `head`: before the first user message. The next legal placement is tried where one is not.
    """
    if placement not in PLACEMENTS:
        raise InputError(explain("placement", got=repr(placement), expected=f"one of {PLACEMENTS}"))
    if not 0 <= first <= span.header_start:
        expected = f"0 to {span.header_start}, where the turn's header begins"
        raise InputError(explain("first token of the context", got=first, expected=expected))
    if not hint:
        start = span.start - first
        position = span.header_start - first
        return TeacherContext(rendered.ids[first : span.end], start, placement, position, position)
    escaped = renderer.protected.escape(hint.strip())
    if not renderer.encoder.encode([escaped])[0]:
        expected = "text that makes at least one token, or no hint"
        raise InputError(explain("hint", got=f"{hint!r}, which makes none", expected=expected))
    for candidate in dict.fromkeys((placement, *PLACEMENTS)):
        splice = _SPLICES[candidate](_HintSlot(renderer, rendered, span, first), escaped)
        if splice is not None:
            return _spliced(rendered, span, splice, candidate, first)
    got = f"a template that takes a hint nowhere before turn {span.turn_id}"
    raise InputError(explain("hint placement", got=got, expected="a message it can stand in", fix="Drop the site."))


def _spliced(
    rendered: RenderedSequence, span: TurnSpan, splice: _Splice, placement: Placement, first: int
) -> TeacherContext:
    before, after = rendered.ids[first : splice.position], rendered.ids[splice.position : span.end]
    hint_end = len(before) + len(splice.ids)
    start = hint_end + span.start - splice.position
    return TeacherContext(before + splice.ids + after, start, placement, len(before), hint_end)


class _HintSlot(NamedTuple):
    renderer: Renderer
    rendered: RenderedSequence
    span: TurnSpan
    first: int

    def text(self, *messages: Message, prompt: bool = False) -> str | None:
        try:
            return self.renderer.template.render(messages, prompt=prompt)
        except InputError:
            return None

    def ids(self, text: str) -> list[int]:
        return self.renderer.encoder.encode([text])[0]

    def before(self, last_text: str) -> list[Message] | None:
        """A short conversation that stops where the turn does, with the same role last."""
        dialect, role = self.renderer.dialect, self.span.previous_role
        if role == "user":
            return [user(last_text)]
        if role == "system":
            return [system(last_text)]
        if role == "assistant":
            return [user("u"), assistant(last_text)]
        if role == "tool":
            identity = SHORT_ID if dialect.short_ids else PLAIN_ID
            call = calling(example_arguments(dialect.arguments), identity=identity)
            return [user("u"), call, result(last_text, identity=identity)]
        return None  # nothing stands before the turn


def _before_turn(site: _HintSlot, hint: str) -> _Splice | None:
    """A message between the last one and the header: what the template adds for it."""
    messages = site.before("m")
    plain = site.text(*messages) if messages else None
    if messages is None or plain is None:
        return None
    for message in (system(hint), user(hint)):
        hinted, prompted = (site.text(*messages, message, prompt=prompt) for prompt in (False, True))
        answered = site.text(*messages, message, assistant("a"))  # some refuse only what comes after
        if hinted is None or answered is None or prompted != hinted + site.renderer.dialect.header:
            continue
        block = hinted[len(plain) :]
        if hinted.startswith(plain) and answered.startswith(hinted) and hint in block:
            return _Splice(site.span.header_start, site.ids(block))
    return None


def _in_last_message(site: _HintSlot, hint: str) -> _Splice | None:
    """Inside the message before the turn, after its text: where what the template writes after a text begins."""
    messages = site.before(_WORD) if site.span.previous_role != "assistant" else None
    text = site.text(*messages) if messages else None
    if text is None or _WORD not in text:
        return None
    closing = site.ids(text.rpartition(_WORD)[2])
    tokens = site.renderer.encoder.protected_ids
    # What comes before its first token may depend on the message: Mistral repeats the call's id there.
    from_token = next((closing[at:] for at, index in enumerate(closing) if index in tokens), closing)
    for closing_ids in (closing, from_token):
        position = site.span.header_start - len(closing_ids)
        if position >= site.first and site.rendered.ids[position : site.span.header_start] == closing_ids:
            return _Splice(position, site.ids(_BETWEEN + hint))
    return None


def _at_head(site: _HintSlot, hint: str) -> _Splice | None:
    """Before the first user message as one of its own, or else as the beginning of that message."""
    with_question = site.text(user("u"), assistant("a"), user(_WORD))
    answered = site.text(user("u"), assistant("a"))
    if with_question is None or answered is None or not with_question.startswith(answered):
        return None
    opening = with_question[len(answered) :].partition(_WORD)[0]
    first_message = _first_user_message(site, opening)
    if first_message is None:
        return None
    position, opening_ids = first_message
    block = _head_block(site, opening, hint)
    if block is not None:
        return _Splice(position, site.ids(block))
    if position + len(opening_ids) > site.span.header_start:
        return None
    return _Splice(position + len(opening_ids), site.ids(hint + _BETWEEN))


def _first_user_message(site: _HintSlot, opening: str) -> tuple[int, list[int]] | None:
    """Where it begins, and its opening; an opening's last space may have become part of the text's first token."""
    for text in (opening, opening.rstrip()):
        opening_ids = site.ids(text)
        for position in range(site.first, site.span.header_start if opening_ids else 0):
            if site.rendered.ids[position : position + len(opening_ids)] == opening_ids:
                return position, opening_ids
    return None


def _head_block(site: _HintSlot, opening: str, hint: str) -> str | None:
    rules = [system("s")] if site.renderer.dialect.system_first else []
    plain = site.text(*rules, user(_WORD))
    if plain is None or opening not in plain:
        return None
    head, rest = plain[: plain.index(opening)], plain[plain.index(opening) :]
    for message in (system(hint), user(hint)):
        hinted = site.text(*rules, message, user(_WORD))
        if hinted is not None and hinted.startswith(head) and hinted.endswith(rest):
            block = hinted[len(head) : len(hinted) - len(rest)]
            if hint in block:
                return block
    return None


_SPLICES: dict[Placement, Callable[[_HintSlot, str], _Splice | None]] = {
    "before_turn": _before_turn,
    "in_last_message": _in_last_message,
    "head": _at_head,
}


# A hinted turn as training reads it: its target tokens, and the same tokens in the context with a hint.
#
# Sessions, rollouts, the collator and the hint proof ask here, and have the same words for why a turn cannot be taught.

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
