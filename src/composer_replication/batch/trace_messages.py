"""Convert the messages of a trace to a conversation for the renderer: one turn per message, results linked to calls.

A message is a `TraceTurn` (role, content, tool_call, tool_error, error_meta) or has OpenAI's form (tool_calls,
tool_call_id). Turn k of the conversation is message k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.messages import message_calls, required_text, thinking_text
from composer_replication.types import Conversation, Origin, Provenance, Role, ToolCall, ToolResult, Turn

FORMAT = "trace_messages"
# OpenAI's API renamed "system" to "developer" and "function" to "tool"; traces contain the old and the new roles.
_ROLES: dict[str, tuple[Role, Origin]] = {
    "system": ("system", "meta"),
    "developer": ("system", "meta"),
    "user": ("user", "human"),
    "assistant": ("assistant", "model"),
    "tool": ("tool", "tool"),
    "function": ("tool", "tool"),
}


def to_conversation(messages: Sequence[Mapping[str, Any]], *, conversation_id: str) -> Conversation:
    """Convert messages to a conversation. A result without an id is matched to the oldest unanswered call before it."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        got = type(messages).__name__
        raise InputError(explain(f"messages of {conversation_id}", got=got, expected="a list of messages"))
    reader = _TraceReader(conversation_id)
    for message in messages:
        reader.add(message)
    return Conversation(id=conversation_id, format=FORMAT, turns=tuple(reader.turns))


class _TraceReader:
    """Reads messages one at a time, and keeps track of unanswered calls."""

    def __init__(self, conversation_id: str) -> None:
        self.turns: list[Turn] = []
        self._id = conversation_id
        self._call_ids: set[str] = set()
        self._unanswered: list[ToolCall] = []  # unanswered calls of the last assistant turn
        self._generated_ids: set[str] = set()  # ids of calls that were logged without one

    def add(self, message: Mapping[str, Any]) -> None:
        """Read the next message. Raises InputError for an unknown role or a field of the wrong type."""
        where = f"message {len(self.turns)} of {self._id}"
        if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(explain(where, got=type(message).__name__, expected="a message with a role"))
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InputError(explain(f"role of {where}", got=repr(role), expected=f"one of {', '.join(_ROLES)}"))
        turn_role, origin = _ROLES[role]
        text = required_text(message.get("content"), where)
        fields: dict[str, Any] = {"text": text}
        if turn_role == "assistant":
            model = message.get("model")
            fields |= {"calls": self._calls(message, where), "thinking": thinking_text(message, where)}
            fields |= {"model": model} if isinstance(model, str) else {}
        elif turn_role == "tool":
            fields = {"results": (self._result(message, text, where),)}
        provenance = Provenance(file=self._id, lines=(len(self.turns) + 1,))
        identity = f"{self._id}:{len(self.turns)}"
        self.turns.append(Turn(id=identity, role=turn_role, origin=origin, provenance=provenance, **fields))

    def _calls(self, message: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
        calls = message_calls(message, where, self._new_id)
        self._call_ids.update(call.id for call in calls)
        self._unanswered = list(calls)
        return calls

    def _new_id(self, number: int) -> str:
        """Return an unused id for a call that was logged without one."""
        identity = f"call_{len(self.turns)}_{number}"
        while identity in self._call_ids:
            identity += "_"
        self._generated_ids.add(identity)
        return identity

    def _result(self, message: Mapping[str, Any], text: str, where: str) -> ToolResult:
        logged_id, name = message.get("tool_call_id"), message.get("name")
        if logged_id is not None and not isinstance(logged_id, str):
            raise InputError(explain(f"tool_call_id of {where}", got=type(logged_id).__name__, expected="text"))
        call_id = logged_id or ""
        if call_id not in self._call_ids:
            # The result or its call was logged without an id. Then results come in the order of the calls.
            unanswered = [call for call in self._unanswered if not logged_id or call.id in self._generated_ids]
            candidates = [call for call in unanswered if call.name == name] if name else unanswered
            call_id = candidates[0].id if candidates else call_id
        self._unanswered = [call for call in self._unanswered if call.id != call_id]
        error = message.get("tool_error")
        return ToolResult(call_id=call_id, text=text, is_error=None if error is None else bool(error))
