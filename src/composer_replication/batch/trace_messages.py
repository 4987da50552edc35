"""Messages of a trace as the turns the renderer takes: one turn a message, calls and results linked.

A message is a `TraceTurn` (role, content, tool_call, tool_error, error_meta) or has the OpenAI shape (tool_calls,
tool_call_id). Turn `k` of the conversation is message `k`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.messages import message_calls, required_text, thinking_text
from composer_replication.types import (
    Conversation,
    Origin,
    Provenance,
    Role,
    ToolCall,
    ToolResult,
    Turn,
)

FORMAT = "trace_messages"
_WRITERS: dict[str, tuple[Role, Origin]] = {
    "system": ("system", "meta"),
    "developer": ("system", "meta"),
    "user": ("user", "human"),
    "assistant": ("assistant", "model"),
    "tool": ("tool", "tool"),
    "function": ("tool", "tool"),
}


def to_conversation(messages: Sequence[Mapping[str, Any]], *, conversation_id: str) -> Conversation:
    """A conversation with one turn a message; a result without an id answers the oldest open call before it."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        got = type(messages).__name__
        raise InputError(explain(f"messages of {conversation_id}", got=got, expected="a list of messages"))
    reader = _TraceReader(conversation_id)
    for message in messages:
        reader.add(message)
    return Conversation(id=conversation_id, format=FORMAT, turns=tuple(reader.turns))


def caller_of(turns: Sequence[Turn], index: int) -> int | None:
    """The assistant turn whose call a tool turn answers; without such a call, the one right before the results."""
    call_ids = {result.call_id for result in turns[index].results}
    earlier = range(index - 1, -1, -1)
    for at in earlier:  # from behind: some logs use an id again and again
        if any(call.id in call_ids for call in turns[at].calls):
            return at
    nearest = next((at for at in earlier if turns[at].role != "tool"), None)
    return nearest if nearest is not None and turns[nearest].role == "assistant" else None


class _TraceReader:
    def __init__(self, conversation_id: str) -> None:
        self.turns: list[Turn] = []
        self._id = conversation_id
        self._call_ids: set[str] = set()
        self._open: list[ToolCall] = []  # calls of the last assistant turn that nothing has answered
        self._made_up: set[str] = set()

    def add(self, message: Mapping[str, Any]) -> None:
        where = f"message {len(self.turns)} of {self._id}"
        if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(explain(where, got=type(message).__name__, expected="a message with a role"))
        role = message.get("role")
        if not isinstance(role, str) or role not in _WRITERS:
            raise InputError(explain(f"role of {where}", got=repr(role), expected=f"one of {', '.join(_WRITERS)}"))
        kind, origin = _WRITERS[role]
        text = required_text(message.get("content"), where)
        fields: dict[str, Any] = {"text": text}
        if kind == "assistant":
            model = message.get("model")
            fields |= {"calls": self._calls(message, where), "thinking": thinking_text(message, where)}
            fields |= {"model": model} if isinstance(model, str) else {}
        elif kind == "tool":
            fields = {"results": (self._result(message, text, where),)}
        provenance = Provenance(file=self._id, lines=(len(self.turns) + 1,))
        identity = f"{self._id}:{len(self.turns)}"
        self.turns.append(Turn(id=identity, role=kind, origin=origin, provenance=provenance, **fields))

    def _calls(self, message: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
        calls = message_calls(message, where, self._new_id)
        self._call_ids.update(call.id for call in calls)
        self._open = list(calls)
        return calls

    def _new_id(self, number: int) -> str:
        identity = f"call_{len(self.turns)}_{number}"
        while identity in self._call_ids:
            identity += "_"
        self._made_up.add(identity)
        return identity

    def _result(self, message: Mapping[str, Any], text: str, where: str) -> ToolResult:
        logged_id, name = message.get("tool_call_id"), message.get("name")
        if logged_id is not None and not isinstance(logged_id, str):
            raise InputError(explain(f"tool_call_id of {where}", got=type(logged_id).__name__, expected="text"))
        call_id = logged_id or ""
        if call_id not in self._call_ids:
            # Without an id, or with one that its call was not logged with, results come in the order of the calls.
            is_free = [call for call in self._open if not logged_id or call.id in self._made_up]
            candidates = [call for call in is_free if call.name == name] if name else is_free
            call_id = candidates[0].id if candidates else call_id
        self._open = [call for call in self._open if call.id != call_id]
        error = message.get("tool_error")
        return ToolResult(call_id=call_id, text=text, is_error=None if error is None else bool(error))
