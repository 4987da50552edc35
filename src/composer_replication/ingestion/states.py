"""Conversations as the states teachers are asked about: the messages so far, and what the student did next."""

from __future__ import annotations

from collections.abc import Iterator

from composer_replication.actions.write import action_text as action_text  # the known place of it
from composer_replication.actions.write import arguments_text
from composer_replication.ingestion.history import History
from composer_replication.types import Conversation, Message, TraceState, Turn

# The key of a user's message that says "tool" where a program wrote it. It is for us: no request holds it.
ORIGIN = "origin"
SYSTEM_PROMPT = (
    "You are a senior software engineer working as a coding agent in a terminal. You read and change files and run "
    "commands through the tools you are given, one step at a time, and you check your work."
)


def states(
    conversation: Conversation,
    *,
    system_prompt: str = SYSTEM_PROMPT,
    strip_thinking: bool = True,
    max_history_tokens: int | None = None,
) -> Iterator[tuple[list[Message], Turn]]:
    """(messages before it, turn) for every assistant turn; message objects are shared between states, not copied."""
    system: Message = {"role": "system", "content": system_prompt}
    history = History(max_history_tokens)
    for turn in conversation.turns:
        if turn.role == "assistant":
            yield [system, *history.messages()], turn
        history.add(turn, list(_messages(turn, strip_thinking)))


def trace_state(state_id: str, messages: list[Message], turn: Turn) -> TraceState:
    return TraceState(state_id=state_id, messages=messages, student_action=action_text(turn))


def _messages(turn: Turn, strip_thinking: bool) -> Iterator[Message]:
    if turn.role == "tool":
        for result in turn.results:
            yield {"role": "tool", "tool_call_id": result.call_id, "content": result.text}
        return
    message: Message = {"role": turn.role, "content": turn.text}
    if turn.role == "user" and turn.origin == "tool":  # what a program printed, in a user's message
        message[ORIGIN] = turn.origin
    if turn.thinking and not strip_thinking:
        message["reasoning_content"] = turn.thinking
    if turn.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": arguments_text(c)}}
            for c in turn.calls
        ]
    yield message
