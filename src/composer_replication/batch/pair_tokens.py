"""Tokenize two answers to the same state: an identical context, followed by the tokens of each answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from composer_replication.action_text import has_text_after_call
from composer_replication.batch.render.pieces import common_prefix_length
from composer_replication.batch.render.renderer import TEXT_FOLLOWS_CALL, RenderedSequence, Renderer, TurnSpan
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.types import Conversation, Turn

FORMAT = "pair"
# Reasons why two answers cannot be compared, besides TEXT_FOLLOWS_CALL. Reports count them by these strings.
WITHOUT_ANSWER, EQUAL_ANSWERS = "pair_without_answer", "pair_of_equal_answers"
CONTEXTS_DIFFER = "pair_contexts_differ"


class ResponseIds(NamedTuple):
    """A context followed by an answer: ids[start:] are the answer's tokens, including the end-of-turn token."""

    ids: list[int]
    start: int


class PairIds(NamedTuple):
    """Two answers to the same state: chosen.ids[:chosen.start] equals rejected.ids[:rejected.start]."""

    chosen: ResponseIds
    rejected: ResponseIds


def _response_ids(
    renderer: Renderer, turns: Sequence[Turn], answer: Turn, *, conversation_id: str, format_name: str = FORMAT
) -> ResponseIds:
    """Return the token ids of a context followed by an assistant turn.

    `format_name` selects the tools in the context, so it should be the format of the session.
    """
    if answer.role != "assistant":
        raise InputError(explain(f"answer of {conversation_id}", got=f"role {answer.role}", expected="assistant"))
    conversation = Conversation(id=conversation_id, format=format_name, turns=(*turns, answer))
    # If the template rewrites history, the conversation becomes several sequences; the answer ends the last one.
    rendered = renderer.render(conversation)[-1]
    span = rendered.spans[-1]
    assert span.turn_id == answer.id
    assert span.end == len(rendered.ids)
    return ResponseIds(rendered.ids, span.start)


def comparable_ids(
    renderer: Renderer,
    turns: Sequence[Turn],
    chosen: Turn,
    rejected: Turn,
    *,
    conversation_id: str,
    format_name: str = FORMAT,
    logged: tuple[RenderedSequence, TurnSpan] | None = None,
) -> PairIds | str:
    """Tokenize both answers, or return the reason why they cannot be compared.

    `logged` is the rejected answer's rendered session and its span there. If the chosen answer has the same context,
    the rejected side uses the ids of the session, so that channels 2 and 3 see the same tokens.
    """
    if any(not answer.text.strip() and not answer.calls for answer in (chosen, rejected)):
        return WITHOUT_ANSWER
    if any(map(has_text_after_call, (chosen, rejected))):
        return TEXT_FOLLOWS_CALL
    options = {"conversation_id": conversation_id, "format_name": format_name}
    try:
        pair = None
        if logged is not None:
            pair = _pair_with_session_ids(renderer, turns, chosen, rejected, logged, options)
        if pair is None:
            pair = _pair_ids(renderer, turns, chosen, rejected, **options)
    # Some templates render the same state differently, depending on the answer.
    except AlignmentError:
        return CONTEXTS_DIFFER
    return EQUAL_ANSWERS if pair.chosen == pair.rejected else pair


def _pair_with_session_ids(
    renderer: Renderer,
    turns: Sequence[Turn],
    chosen: Turn,
    rejected: Turn,
    logged: tuple[RenderedSequence, TurnSpan],
    options: dict[str, str],
) -> PairIds | None:
    """Return the pair with the session's token ids as the rejected side; None if those ids contain thinking that the
    comparison drops, or if the answers' contexts differ.
    """
    rendered, span = logged
    chosen_turn, rejected_turn = renderer.thinking.align(chosen, rejected)
    # The comparison drops the rejected answer's thinking, but the session's ids contain it.
    if rejected_turn != rejected and span.thinking in ("target", "context"):
        return None
    answer = _response_ids(renderer, turns, chosen_turn, **options)
    if answer.start != span.start or answer.ids[: span.start] != rendered.ids[: span.start]:
        return None
    return PairIds(answer, ResponseIds(rendered.ids[: span.end], span.start))


def _pair_ids(
    renderer: Renderer,
    turns: Sequence[Turn],
    chosen: Turn,
    rejected: Turn,
    *,
    conversation_id: str,
    format_name: str = FORMAT,
) -> PairIds:
    """Tokenize two answers to the same turns, keeping or removing the thinking of both alike
    (`ThinkingRules.align`).

    Raises AlignmentError if their contexts differ by more than the answer's header.
    """
    answers = renderer.thinking.align(chosen, rejected)
    options = {"conversation_id": conversation_id, "format_name": format_name}
    sides = [_response_ids(renderer, turns, turn, **options) for turn in answers]
    # A template may repeat less of its header for one kind of turn; the shorter header is the context of both.
    start = min(side.start for side in sides)
    first, second = (side.ids[:start] for side in sides)
    # Only the header may be longer on one side: a context with another message would be another state.
    header_tokens = max(map(len, renderer.encoder.encode(renderer.dialect.headers)))
    if first != second or max(side.start for side in sides) - start > header_tokens:
        num_shared = common_prefix_length(first, second)
        got = f"{sides[0].start} and {sides[1].start} tokens, of which the first {num_shared} are equal"
        fix = "The template renders the messages before the two answers differently; leave the pair out."
        raise AlignmentError(explain(f"contexts of pair {conversation_id}", got=got, expected="the same ids", fix=fix))
    return PairIds(*(ResponseIds(side.ids, start) for side in sides))
