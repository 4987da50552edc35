"""Two answers to one state as token ids: the same context on both sides, then each answer's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from composer_replication.action_text import text_follows_call
from composer_replication.batch.render.renderer import (
    TEXT_FOLLOWS_CALL,
    RenderedSequence,
    Renderer,
    TurnSpan,
)
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.types import Conversation, Turn

FORMAT = "pair"
# Why two answers cannot be compared, besides that one is written in another order (TEXT_FOLLOWS_CALL).
WITHOUT_ANSWER, EQUAL_ANSWERS = "pair_without_answer", "pair_of_equal_answers"
CONTEXTS_DIFFER = "pair_contexts_differ"


class ResponseIds(NamedTuple):
    """A context and an answer to it: the answer's own tokens, its end-of-turn token with them, are ids[start:]."""

    ids: list[int]
    start: int


class PairIds(NamedTuple):
    """Both answers to one state; chosen.ids[:chosen.start] and rejected.ids[:rejected.start] are the same."""

    chosen: ResponseIds
    rejected: ResponseIds


def response_ids(
    renderer: Renderer, turns: Sequence[Turn], answer: Turn, *, conversation_id: str, format_name: str = FORMAT
) -> ResponseIds:
    """Ids of the turns and of the assistant turn that answers them, with the tools of `format_name`, their session's.

    Where the template rewrites history the conversation is several sequences; the answer is the end of the last.
    """
    if answer.role != "assistant":
        raise InputError(explain(f"answer of {conversation_id}", got=f"role {answer.role}", expected="assistant"))
    conversation = Conversation(id=conversation_id, format=format_name, turns=(*turns, answer))
    rendered = renderer.render(conversation)[-1]
    span = rendered.spans[-1]
    assert span.turn_id == answer.id
    assert span.end == len(rendered.ids)
    return ResponseIds(rendered.ids, span.start)


def compared_ids(
    renderer: Renderer,
    turns: Sequence[Turn],
    chosen: Turn,
    rejected: Turn,
    *,
    conversation_id: str,
    format_name: str = FORMAT,
    logged: tuple[RenderedSequence, TurnSpan] | None = None,
) -> PairIds | str:
    """Both answers as ids, or the reason why they cannot be compared.

    `logged` says where the rejected answer stands in its rendered session: where the contexts agree, that is its side.
    """
    if any(not answer.text.strip() and not answer.calls for answer in (chosen, rejected)):
        return WITHOUT_ANSWER
    if any(map(text_follows_call, (chosen, rejected))):
        return TEXT_FOLLOWS_CALL
    options = {"conversation_id": conversation_id, "format_name": format_name}
    try:
        pair = None
        if logged is not None:
            pair = _against_session(renderer, turns, chosen, rejected, logged, options)
        if pair is None:
            pair = pair_ids(renderer, turns, chosen, rejected, **options)
    except AlignmentError:  # a template may show one state in two ways; there is nothing to compare then
        return CONTEXTS_DIFFER
    return EQUAL_ANSWERS if pair.chosen == pair.rejected else pair


def _against_session(
    renderer: Renderer,
    turns: Sequence[Turn],
    chosen: Turn,
    rejected: Turn,
    logged: tuple[RenderedSequence, TurnSpan],
    options: dict[str, str],
) -> PairIds | None:
    """The rejected answer as its session has it; None where the chosen one has another context."""
    rendered, span = logged
    chosen_alike, rejected_alike = renderer.thinking.alike(chosen, rejected)
    if rejected_alike != rejected and span.thinking in ("target", "context"):
        return None
    answer = response_ids(renderer, turns, chosen_alike, **options)
    if answer.start != span.start or answer.ids[: span.start] != rendered.ids[: span.start]:
        return None
    return PairIds(answer, ResponseIds(rendered.ids[: span.end], span.start))


def pair_ids(
    renderer: Renderer,
    turns: Sequence[Turn],
    chosen: Turn,
    rejected: Turn,
    *,
    conversation_id: str,
    format_name: str = FORMAT,
) -> PairIds:
    """Both answers after the same turns, their thinking treated alike (`ThinkingRules.alike`).

    A template may repeat less of its header for one kind of turn than for another. Then the shorter header is the
    context on both sides. Contexts that differ in any other way cannot be compared: AlignmentError.
    """
    answers = renderer.thinking.alike(chosen, rejected)
    options = {"conversation_id": conversation_id, "format_name": format_name}
    sides = [response_ids(renderer, turns, turn, **options) for turn in answers]
    start = min(side.start for side in sides)
    first, second = (side.ids[:start] for side in sides)
    # Only the header may be longer on one side: a message more would be another state.
    header_tokens = max(map(len, renderer.encoder.encode(renderer.dialect.headers)))
    if first != second or max(side.start for side in sides) - start > header_tokens:
        same = next((at for at, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), start)
        got = f"{sides[0].start} and {sides[1].start} tokens, the same up to {same}"
        fix = "The template shows the messages before an answer in another way for each of the two; leave the pair out."
        raise AlignmentError(explain(f"contexts of pair {conversation_id}", got=got, expected="the same ids", fix=fix))
    return PairIds(*(ResponseIds(side.ids, start) for side in sides))
