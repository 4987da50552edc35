"""Conversations as the states teachers are asked about: the messages so far, and what the student did next."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from composer_replication.actions.write import action_text as action_text  # the known place of it
from composer_replication.actions.write import arguments_text
from composer_replication.types import Conversation, Message, TraceState, Turn

SYSTEM_PROMPT = (
    "You are a senior software engineer working as a coding agent in a terminal. You read and change files and run "
    "commands through the tools you are given, one step at a time, and you check your work."
)
# Text in these logs runs at about four bytes a token; the limit is on what is sent, so an estimate is enough.
_BYTES_PER_TOKEN = 4


def states(
    conversation: Conversation,
    *,
    system_prompt: str = SYSTEM_PROMPT,
    strip_thinking: bool = True,
    max_history_tokens: int | None = None,
) -> Iterator[tuple[list[Message], Turn]]:
    """(messages before it, turn) for every assistant turn; message objects are shared between states, not copied."""
    system: Message = {"role": "system", "content": system_prompt}
    # A unit is what may not be torn apart: an assistant turn with the results of its calls, or one other message.
    units: list[list[Message]] = []
    for turn in conversation.turns:
        if turn.role == "assistant":
            yield [system, *_fitting(units, max_history_tokens)], turn
        messages = list(_messages(turn, strip_thinking))
        if turn.role == "tool" and units and units[-1][0]["role"] == "assistant":
            units[-1].extend(messages)
        else:
            units.append(messages)


def trace_state(state_id: str, messages: list[Message], turn: Turn) -> TraceState:
    return TraceState(state_id=state_id, messages=messages, student_action=action_text(turn))


def _messages(turn: Turn, strip_thinking: bool) -> Iterator[Message]:
    if turn.role == "tool":
        for result in turn.results:
            yield {"role": "tool", "tool_call_id": result.call_id, "content": result.text}
        return
    message: Message = {"role": turn.role, "content": turn.text}
    if turn.thinking and not strip_thinking:
        message["reasoning_content"] = turn.thinking
    if turn.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": arguments_text(c)}}
            for c in turn.calls
        ]
    yield message


def _fitting(units: list[list[Message]], max_history_tokens: int | None) -> Iterator[Message]:
    """The newest units that fit; the oldest go first, and never a result without its call."""
    first = 0
    if max_history_tokens is not None:
        room, first = max_history_tokens * _BYTES_PER_TOKEN, len(units)
        while first > 0 and (room := room - len(orjson.dumps(units[first - 1]))) >= 0:
            first -= 1
    for unit in units[first:]:
        yield from unit
