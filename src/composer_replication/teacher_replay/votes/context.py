"""What the messages before a state had shown: the folder, the tools' schemas, and the files."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from composer_replication.actions.arguments import Tools, tool_schemas
from composer_replication.actions.equality import ActionContext
from composer_replication.actions.messages import content_text, message_calls
from composer_replication.actions.paths import normal_path
from composer_replication.actions.session_state import SessionState
from composer_replication.errors import InputError
from composer_replication.sites.classify import classify
from composer_replication.types import ToolCall, TraceState

_MAX_SESSIONS = 64  # as many as are asked about at one time


class ContextAlong:
    """What the messages before one state after the other show; those that the last state had are not read again."""

    def __init__(self, *, cwd: str | None = None, tools: Tools | None = None) -> None:
        self._cwd = normal_path(cwd, None) if cwd else None
        self._tools = tool_schemas(tools)
        self._read: list[Mapping[str, Any]] = []
        self._reader = _Reader(self._cwd)

    def at(self, messages: Sequence[Mapping[str, Any]]) -> ActionContext:
        num_read = len(self._read)
        if num_read > len(messages) or list(messages[:num_read]) != self._read:
            self._read, self._reader, num_read = [], _Reader(self._cwd), 0
        for message in messages[num_read:]:
            self._reader.take(message)
        self._read += messages[num_read:]
        state = self._reader.state
        return ActionContext(cwd=self._cwd, tools=self._tools, files=dict(state.files), shell_moved=state.shell_moved)


class StateContexts:
    """Contexts of states of any session: what an earlier state of one has shown is not read again for a later one."""

    def __init__(self, *, cwd: str | None = None, tools: Tools | None = None) -> None:
        self._cwd, self._tools = cwd, tools
        self._sessions: OrderedDict[str, tuple[object, object, ContextAlong]] = OrderedDict()

    def at(self, state: TraceState) -> ActionContext:
        state_fields = cast("Mapping[str, Any]", state)
        cwd, tools = state_fields.get("cwd", self._cwd), state_fields.get("tools", self._tools)
        session = state["state_id"].rpartition("::")[0]
        held = self._sessions.pop(session, None)
        if held is None or held[0] != cwd or held[1] != tools:
            held = (cwd, tools, ContextAlong(cwd=cwd, tools=tools))
        self._sessions[session] = held
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return held[2].at(state["messages"])


class _Reader:
    """Tells a session's state what its messages say."""

    def __init__(self, cwd: str | None) -> None:
        self.state = SessionState(cwd)
        self._calls: dict[str, ToolCall] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            with contextlib.suppress(InputError):  # a turn that cannot be read shows nothing
                self._calls |= {call.id: call for call in message_calls(message, "a turn")}
        elif role in ("tool", "function"):
            self._result(message.get("tool_call_id"), content, is_error=None)
        elif isinstance(content, list):
            for block in cast("list[object]", content):
                if isinstance(block, Mapping) and block.get("type") == "tool_result":
                    flag = block.get("is_error")
                    self._result(block.get("tool_use_id"), block.get("content"), is_error=True if flag else None)
        if role == "user":
            self.state.heard(content_text(content))

    def _result(self, call_id: object, content: object, *, is_error: bool | None) -> None:
        call = self._calls.get(call_id) if isinstance(call_id, str) else None
        if call is not None:
            text = content_text(content)
            failed = classify(call.name, call.arguments, text, is_error).is_failure
            self.state.add(call, text, failed=failed)
