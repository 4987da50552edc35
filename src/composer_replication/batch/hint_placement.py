"""Build the hinted teacher's context: the student's ids with a hint put in, so that both predict the same tokens.

Every placement splices the hint's ids into the student's ids and changes none of those. A hint that is a message of its
own is rendered by the chat template, with its header and end token. Where the template allows no message, the next
placement that works is used, and the result says which one that was.
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
Part = Literal["turn", "call"]
PARTS: tuple[Part, ...] = ("turn", "call")
# Reasons why a turn cannot be trained on. They are counted in summaries and reports, so they are data, not wording.
HINT_HAS_NO_PLACE = "hint_has_no_place"
HINT_MAKES_NO_TOKENS = "hint_makes_no_tokens"
NOTHING_BEFORE_IT = "nothing_before_it"
T = TypeVar("T")
_SEPARATOR = "\n\n"
# Stands for a message's text, so that the text can be located in a rendering. No template contains it.
_PROBE_WORD = "Zqword"


class TeacherContext(NamedTuple):
    """A hinted context and the turn after it: the turn is ids[start:], the hint is ids[hint_start:hint_end]."""

    ids: list[int]
    start: int
    placement: Placement
    hint_start: int
    hint_end: int


class _Splice(NamedTuple):
    """Ids to insert into the student's ids before `position`."""

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
    """Return the student's ids from `first` to the end of a turn, with a hint; an empty hint changes nothing.

    Placements: `before_turn` is a message of its own before the turn's header, `in_last_message` the end of the message
    before the turn, and `head` the place before the first user message. If the template does not allow one, the others
    are tried in this order. Raises InputError if none works or the hint has no tokens.
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
        splice = _SPLICES[candidate](_HintTarget(renderer, rendered, span, first), escaped)
        if splice is not None:
            return _apply_splice(rendered, span, splice, candidate, first)
    got = f"a template that allows no hint before turn {span.turn_id}"
    raise InputError(explain("hint placement", got=got, expected="a message to put it in", fix="Drop the site."))


def _apply_splice(
    rendered: RenderedSequence, span: TurnSpan, splice: _Splice, placement: Placement, first: int
) -> TeacherContext:
    before, after = rendered.ids[first : splice.position], rendered.ids[splice.position : span.end]
    hint_end = len(before) + len(splice.ids)
    start = hint_end + span.start - splice.position
    return TeacherContext(before + splice.ids + after, start, placement, len(before), hint_end)


class _HintTarget(NamedTuple):
    """The turn that gets a hint, and the template that decides where the hint may go."""

    renderer: Renderer
    rendered: RenderedSequence
    span: TurnSpan
    first: int

    def text(self, *messages: Message, prompt: bool = False) -> str | None:
        """Return the template's rendering, or None if it refuses the messages."""
        try:
            return self.renderer.template.render(messages, prompt=prompt)
        except InputError:
            return None

    def ids(self, text: str) -> list[int]:
        """Return the ids of escaped text."""
        return self.renderer.encoder.encode([text])[0]

    def before(self, last_text: str) -> list[Message] | None:
        """Return a short conversation whose last message has the role of the message before the turn."""
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
        return None  # the turn is the first one


def _before_turn(slot: _HintTarget, hint: str) -> _Splice | None:
    """Insert a message between the last one and the turn's header."""
    messages = slot.before("m")
    plain = slot.text(*messages) if messages else None
    if messages is None or plain is None:
        return None
    # A system message is preferred: a user message would read as if the user had said it.
    for message in (system(hint), user(hint)):
        hinted, prompted = (slot.text(*messages, message, prompt=prompt) for prompt in (False, True))
        # Some templates accept the hint and refuse only the answer after it.
        answered = slot.text(*messages, message, assistant("a"))
        if hinted is None or answered is None or prompted != hinted + slot.renderer.dialect.header:
            continue
        block = hinted[len(plain) :]
        if hinted.startswith(plain) and answered.startswith(hinted) and hint in block:
            return _Splice(slot.span.header_start, slot.ids(block))
    return None


def _in_last_message(slot: _HintTarget, hint: str) -> _Splice | None:
    """Insert into the message before the turn, between its text and what the template writes after a text."""
    messages = slot.before(_PROBE_WORD) if slot.span.previous_role != "assistant" else None
    text = slot.text(*messages) if messages else None
    if text is None or _PROBE_WORD not in text:
        return None
    closing = slot.ids(text.rpartition(_PROBE_WORD)[2])
    tokens = slot.renderer.encoder.protected_ids
    # The closing's text before its first special token may depend on the message: Mistral repeats the call's id there.
    from_token = next((closing[at:] for at, index in enumerate(closing) if index in tokens), closing)
    for closing_ids in (closing, from_token):
        position = slot.span.header_start - len(closing_ids)
        if position >= slot.first and slot.rendered.ids[position : slot.span.header_start] == closing_ids:
            return _Splice(position, slot.ids(_SEPARATOR + hint))
    return None


def _at_head(slot: _HintTarget, hint: str) -> _Splice | None:
    """Insert a message before the first user message, or else the hint at the beginning of that message."""
    with_question = slot.text(user("u"), assistant("a"), user(_PROBE_WORD))
    answered = slot.text(user("u"), assistant("a"))
    if with_question is None or answered is None or not with_question.startswith(answered):
        return None
    # What the template writes before a user's text; taken in mid-conversation, where no system prompt precedes it.
    opening = with_question[len(answered) :].partition(_PROBE_WORD)[0]
    first_message = _first_user_message(slot, opening)
    if first_message is None:
        return None
    position, opening_ids = first_message
    block = _head_block(slot, opening, hint)
    if block is not None:
        return _Splice(position, slot.ids(block))
    if position + len(opening_ids) > slot.span.header_start:
        return None
    return _Splice(position + len(opening_ids), slot.ids(hint + _SEPARATOR))


def _first_user_message(slot: _HintTarget, opening: str) -> tuple[int, list[int]] | None:
    """Return the position of the first user message, and the ids of its opening."""
    # The opening's last space may have become part of the text's first token, so it is also searched without.
    for text in (opening, opening.rstrip()):
        opening_ids = slot.ids(text)
        for position in range(slot.first, slot.span.header_start if opening_ids else 0):
            if slot.rendered.ids[position : position + len(opening_ids)] == opening_ids:
                return position, opening_ids
    return None


def _head_block(slot: _HintTarget, opening: str, hint: str) -> str | None:
    """Return the text of a hint message before the first user message; None if the template has no such message."""
    system_messages = [system("s")] if slot.renderer.dialect.system_first else []
    plain = slot.text(*system_messages, user(_PROBE_WORD))
    if plain is None or opening not in plain:
        return None
    head, rest = plain[: plain.index(opening)], plain[plain.index(opening) :]
    for message in (system(hint), user(hint)):
        hinted = slot.text(*system_messages, message, user(_PROBE_WORD))
        if hinted is not None and hinted.startswith(head) and hinted.endswith(rest):
            block = hinted[len(head) : len(hinted) - len(rest)]
            if hint in block:
                return block
    return None


_SPLICES: dict[Placement, Callable[[_HintTarget, str], _Splice | None]] = {
    "before_turn": _before_turn,
    "in_last_message": _in_last_message,
    "head": _at_head,
}


class HintedTurn(NamedTuple):
    """A hinted turn as training reads it: a target, and the context with the hint.

    The target is the tokens [start, end) of the student's sequence; in the context it starts at `teacher_start`.
    """

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
    """Return a turn with its hint, or the reason why it cannot be trained on.

    With `part="call"` only the turn's calls are the target, or the whole turn if it has none. With an empty hint the
    teacher's context equals the student's. See `teacher_context` for `placement` and `first`.
    """
    if reason := why_no_target(span):
        return reason
    if hint and not makes_tokens(renderer, hint):
        return HINT_MAKES_NO_TOKENS
    try:
        context = teacher_context(renderer, rendered, span, hint, placement=placement, first=first)
    # The hint was checked above and callers check the placement, so this is a template that allows no hint here.
    except InputError:
        return HINT_HAS_NO_PLACE
    start, end, is_whole = span.start, span.end, True
    if part == "call" and span.call_start is not None and span.call_end is not None:
        start, end, is_whole = span.call_start, span.call_end, False
    return HintedTurn(start, end, context, context.start + start - span.start, is_whole)


def why_no_target(span: TurnSpan) -> str:
    """Return why a turn's tokens cannot be trained on, or an empty string if they can."""
    # A turn at token 0 has no row before it that could predict its first token.
    return span.no_target or ("" if span.start else NOTHING_BEFORE_IT)


def makes_tokens(renderer: Renderer, hint: str) -> bool:
    """Return whether the hint's text has at least one token."""
    return bool(renderer.encoder.encode([renderer.protected.escape(hint.strip())])[0])


def wrong_hints(hints: Sequence[T], kinds: Sequence[str], *, seed: int | str = 0) -> list[T | None]:
    """Return for each site an unrelated hint, that is, one of a site of another kind; None if there is none.

    `kinds` are the sites' kinds of error. `hints` may be anything that represents a hint, such as its site. The choice
    depends only on the arguments.
    """
    if len(hints) != len(kinds):
        raise InputError(explain("hints and kinds", got=(len(hints), len(kinds)), expected="one of each per site"))
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    pools = {
        kind: [hint for hint, hint_kind in zip(hints, kinds, strict=True) if hint_kind != kind] for kind in set(kinds)
    }
    return [draw.choice(pools[kind]) if pools[kind] else None for kind in kinds]
