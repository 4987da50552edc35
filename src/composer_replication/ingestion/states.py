"""Conversations as the states teachers are asked about: the messages so far, and what the student did next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import orjson

from composer_replication.types import Conversation, Message, ToolCall, TraceState, Turn

SYSTEM_PROMPT = (
    "You are a senior software engineer working as a coding agent in a terminal. You read and change files and run "
    "commands through the tools you are given, one step at a time, and you check your work."
)
# Text in these logs runs at about four bytes a token; the limit is on what is sent, so an estimate is enough.
_BYTES_PER_TOKEN = 4
_BLOCK_KINDS = ("thinking", "text", "call")


def action_text(turn: Turn) -> str:
    """What an assistant turn did, as one text: its blocks in order, joined by newlines."""
    blocks: Any = turn.extra.get("blocks")
    layout: list[Any] = blocks if _fits(blocks, turn) else _plain_layout(turn)
    texts, thoughts = _Pieces(turn.text), _Pieces(turn.thinking)
    parts: list[str] = []
    for kind, size in layout:
        if kind == "text":
            parts.append(texts.take(size))
        elif kind == "thinking":
            parts.append(f"[THINKING] {thoughts.take(size)}")
        else:
            parts.append(_call_text(turn.calls[size]))
    return "\n".join(parts)


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


class _Pieces:
    """Cuts a text that was joined by newlines back into its pieces."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def take(self, size: int) -> str:
        piece = self._text[self._at : self._at + size]
        self._at += size + 1
        return piece


def _fits(blocks: Any, turn: Turn) -> bool:
    """Whether a layout cuts this turn's texts where they were joined and names each call once: logs can be forged."""
    if not isinstance(blocks, list) or not all(_is_block(block) for block in cast("list[Any]", blocks)):
        return False
    sizes = {kind: [size for each, size in blocks if each == kind] for kind in _BLOCK_KINDS}
    return (
        _is_joined(turn.text, sizes["text"])
        and _is_joined(turn.thinking, sizes["thinking"])
        and sorted(sizes["call"]) == list(range(len(turn.calls)))
    )


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and isinstance(block[0], str)
        and block[0] in _BLOCK_KINDS
        and type(block[1]) is int
        and block[1] >= 0
    )


def _is_joined(text: str, sizes: list[int]) -> bool:
    end = -1
    for size in sizes:
        if end >= 0 and text[end : end + 1] != "\n":
            return False
        end += 1 + size
    return max(end, 0) == len(text)


def _plain_layout(turn: Turn) -> list[tuple[str, int]]:
    layout = [("thinking", len(turn.thinking))] if turn.thinking else []
    layout += [("text", len(turn.text))] if turn.text else []
    return layout + [("call", index) for index in range(len(turn.calls))]


def _call_text(call: ToolCall) -> str:
    return f"[TOOL_USE] name={call.name} input={_arguments_text(call)}"


def _arguments_text(call: ToolCall) -> str:
    return call.raw_arguments if call.raw_arguments is not None else orjson.dumps(dict(call.arguments)).decode()


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
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _arguments_text(c)}}
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
