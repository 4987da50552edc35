"""Build the hinted teacher's context by inserting a hint into the student's token ids.

Every placement only inserts ids and leaves the student's own ids unchanged, so student and teacher predict the same
tokens. A hint in a separate message is rendered by the chat template, with header and end token. Where the template
allows no message, another placement is used, and the result names it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from composer_replication.batch.render.dialect import assistant, system, user
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
# Replaces a message's text, so that the text can be located in a rendering. No template contains this word.
_PROBE_WORD = "Zqword"


class TeacherContext(NamedTuple):
    """A hinted context followed by its turn: the turn is ids[start:], the hint is ids[hint_start:hint_end]."""

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
    """Insert a hint into the student's ids from `first` to the end of a turn; an empty hint changes nothing.

    Placements: `before_turn` is a separate message before the turn's header, `in_last_message` the end of the message
    before the turn, and `head` the position before the first user message. If the template does not allow the requested
    placement, the others are tried in this order. Raises InputError if none works or the hint has no tokens.
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
        expected = "text with at least one token, or no hint"
        raise InputError(explain("hint", got=f"{hint!r}, which has no tokens", expected=expected))
    for candidate in dict.fromkeys((placement, *PLACEMENTS)):
        splice = _SPLICES[candidate](_HintTarget(renderer, rendered, span, first), escaped)
        if splice is not None:
            return _apply_splice(rendered, span, splice, candidate, first)
    got = f"a template that allows no hint before turn {span.turn_id}"
    expected = "a template that allows a hint somewhere in the context"
    raise InputError(explain("hint placement", got=got, expected=expected, fix="Drop the site."))


def _apply_splice(
    rendered: RenderedSequence, span: TurnSpan, splice: _Splice, placement: Placement, first: int
) -> TeacherContext:
    before, after = rendered.ids[first : splice.position], rendered.ids[splice.position : span.end]
    hint_end = len(before) + len(splice.ids)
    start = hint_end + span.start - splice.position
    return TeacherContext(before + splice.ids + after, start, placement, len(before), hint_end)


class _HintTarget(NamedTuple):
    """The turn that gets a hint, and the renderer whose template decides where a hint may go."""

    renderer: Renderer
    rendered: RenderedSequence
    span: TurnSpan
    first: int

    def text(self, *messages: Message, prompt: bool = False) -> str | None:
        """Return the template's rendering of the messages, or None if it rejects them."""
        try:
            return self.renderer.template.render(messages, prompt=prompt)
        except InputError:
            return None

    def ids(self, text: str) -> list[int]:
        """Encode escaped text as token ids."""
        return self.renderer.encoder.encode([text])[0]

    def before(self, last_text: str) -> list[Message] | None:
        """Return a short conversation that ends with `last_text` in the role of the message before the turn; None if
        the turn is the first message.
        """
        dialect, role = self.renderer.dialect, self.span.previous_role
        if role == "user":
            return [user(last_text)]
        if role == "system":
            return [system(last_text)]
        if role == "assistant":
            return [user("u"), assistant(last_text)]
        if role == "tool":
            return [user("u"), *dialect.call_and_result(last_text)]
        return None  # the turn is the first one


def _insert_before_turn(target: _HintTarget, hint: str) -> _Splice | None:
    """Insert the hint as a message of its own between the last message and the turn's header."""
    messages = target.before("m")
    plain = target.text(*messages) if messages else None
    if messages is None or plain is None:
        return None
    # A system message is preferred: a user message would read as if the user had said it.
    for message in (system(hint), user(hint)):
        hinted, prompted = (target.text(*messages, message, prompt=prompt) for prompt in (False, True))
        # Some templates accept the hint and refuse only the answer after it.
        answered = target.text(*messages, message, assistant("a"))
        if hinted is None or answered is None or prompted != hinted + target.renderer.dialect.header:
            continue
        block = hinted[len(plain) :]
        if hinted.startswith(plain) and answered.startswith(hinted) and hint in block:
            return _Splice(target.span.header_start, target.ids(block))
    return None


def _append_to_last_message(target: _HintTarget, hint: str) -> _Splice | None:
    """Append the hint to the text of the message before the turn."""
    messages = target.before(_PROBE_WORD) if target.span.previous_role != "assistant" else None
    text = target.text(*messages) if messages else None
    if text is None or _PROBE_WORD not in text:
        return None
    closing = target.ids(text.rpartition(_PROBE_WORD)[2])
    tokens = target.renderer.encoder.protected_ids
    # The closing's text before its first special token may depend on the message: Mistral repeats the call's id there.
    from_token = next((closing[at:] for at, index in enumerate(closing) if index in tokens), closing)
    for closing_ids in (closing, from_token):
        position = target.span.header_start - len(closing_ids)
        if position >= target.first and target.rendered.ids[position : target.span.header_start] == closing_ids:
            return _Splice(position, target.ids(_SEPARATOR + hint))
    return None


def _insert_at_head(target: _HintTarget, hint: str) -> _Splice | None:
    """Insert the hint as a message before the first user message; if the template allows no message there, prepend
    the hint to the text of the user message.
    """
    with_question = target.text(user("u"), assistant("a"), user(_PROBE_WORD))
    answered = target.text(user("u"), assistant("a"))
    if with_question is None or answered is None or not with_question.startswith(answered):
        return None
    # What the template writes before a user's text, taken from the middle of a conversation, without a system prompt.
    opening = with_question[len(answered) :].partition(_PROBE_WORD)[0]
    first_message = _first_user_message(target, opening)
    if first_message is None:
        return None
    position, opening_ids = first_message
    block = _head_block(target, opening, hint)
    if block is not None:
        return _Splice(position, target.ids(block))
    if position + len(opening_ids) > target.span.header_start:
        return None
    return _Splice(position + len(opening_ids), target.ids(hint + _SEPARATOR))


def _first_user_message(target: _HintTarget, opening: str) -> tuple[int, list[int]] | None:
    """Return the position of the first user message, and the ids that the template writes before its text."""
    # The opening's last space may have become part of the text's first token, so search without it as well.
    for text in (opening, opening.rstrip()):
        opening_ids = target.ids(text)
        for position in range(target.first, target.span.header_start if opening_ids else 0):
            if target.rendered.ids[position : position + len(opening_ids)] == opening_ids:
                return position, opening_ids
    return None


def _head_block(target: _HintTarget, opening: str, hint: str) -> str | None:
    """Render a hint message before the first user message; return None if the template allows no such message."""
    system_messages = [system("s")] if target.renderer.dialect.system_first else []
    plain = target.text(*system_messages, user(_PROBE_WORD))
    if plain is None or opening not in plain:
        return None
    head, rest = plain[: plain.index(opening)], plain[plain.index(opening) :]
    for message in (system(hint), user(hint)):
        hinted = target.text(*system_messages, message, user(_PROBE_WORD))
        if hinted is not None and hinted.startswith(head) and hinted.endswith(rest):
            block = hinted[len(head) : len(hinted) - len(rest)]
            if hint in block:
                return block
    return None


_SPLICES: dict[Placement, Callable[[_HintTarget, str], _Splice | None]] = {
    "before_turn": _insert_before_turn,
    "in_last_message": _append_to_last_message,
    "head": _insert_at_head,
}


class HintedTurn(NamedTuple):
    """A target of channel 2 (hint distillation): tokens [start, end) of the student's sequence, and the context with
    the hint.

    In that context, the target starts at `teacher_start`.
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
    """Place a hint at a turn; return the target, or the reason why the turn cannot be trained on.

    With `part="call"` only the turn's calls are the target, or the whole turn if it has none. If the hint is
    empty, the teacher's context equals the student's. See `teacher_context` for `placement` and `first`.
    """
    if reason := exclusion_reason(span):
        return reason
    if hint and not _has_tokens(renderer, hint):
        return HINT_MAKES_NO_TOKENS
    try:
        context = teacher_context(renderer, rendered, span, hint, placement=placement, first=first)
    # The hint was checked above and callers check the placement, so the template must be the cause.
    except InputError:
        return HINT_HAS_NO_PLACE
    start, end, is_whole = span.start, span.end, True
    if part == "call" and span.call_start is not None and span.call_end is not None:
        start, end, is_whole = span.call_start, span.call_end, False
    return HintedTurn(start, end, context, context.start + start - span.start, is_whole)


def exclusion_reason(span: TurnSpan) -> str:
    """Return the reason why a turn's tokens cannot be trained on; an empty string if they can."""
    # A turn at token 0 has no row before it that could predict its first token.
    return span.no_target or ("" if span.start else NOTHING_BEFORE_IT)


def _has_tokens(renderer: Renderer, hint: str) -> bool:
    """Whether the tokenizer encodes the text as at least one token."""
    return bool(renderer.encoder.encode([renderer.protected.escape(hint.strip())])[0])


def draw_unrelated_hints(hints: Sequence[T], kinds: Sequence[str], *, seed: int | str = 0) -> list[T | None]:
    """Draw for each site the hint of a random site with another kind of error; None if every site has the same kind.

    `kinds` are the sites' kinds of error. `hints` may be any objects that identify the hints, such as the sites
    themselves. The draw depends only on the arguments.
    """
    if len(hints) != len(kinds):
        raise InputError(
            explain("hints and kinds", got=(len(hints), len(kinds)), expected="one hint and one kind per site")
        )
    rng = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    pools = {
        kind: [hint for hint, hint_kind in zip(hints, kinds, strict=True) if hint_kind != kind] for kind in set(kinds)
    }
    return [rng.choice(pools[kind]) if pools[kind] else None for kind in kinds]
