"""Write turns as messages for a chat template, following the design pages and independently of `batch/`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from composer_replication.types import Conversation, Message, ToolResult, Turn
from template_oracle import Manners, Shield, Student, call_fields

_BETWEEN = "\n\n"


class MessageWriter:
    """Writes turns as messages. Parts that a template does not support become text, in the documented forms."""

    def __init__(
        self, student: Student, manners: Manners, shield: Shield, keep_thinking: Callable[[Turn], bool]
    ) -> None:
        self._student, self._manners, self._shield = student, manners, shield
        self._keep_thinking = keep_thinking
        self._names: dict[str, str] = {}
        self.messages: list[Message] = []
        self.places: list[int] = []
        self.turns: list[Turn] = []

    def add_all(self, conversation: Conversation) -> None:
        tools = "" if self._manners.tools or not self._student.tools else self._tools_as_text()
        turns = conversation.turns
        if tools and not (turns and turns[0].role == "system"):
            self._add_system(tools)
            tools = ""
        for turn in turns:
            if turn.role == "system":
                self._add_system(self._shield.hide(turn.text) + (f"{_BETWEEN}{tools}" if tools else ""))
                tools = ""
            elif turn.role == "user":
                self._add_user(self._shield.hide(turn.text))
            elif turn.role == "tool":
                for result in turn.results:
                    self._add_result(result)
            else:
                self._add_assistant(turn)

    def assistant(self, turn: Turn) -> Message:
        hide, manners = self._shield.hide, self._manners
        message: Message = {"role": "assistant", "content": hide(turn.text)}
        if turn.thinking and manners.thinking and self._keep_thinking(turn):
            message["reasoning_content"] = hide(turn.thinking)
        if not turn.calls:
            return message
        if manners.calls and (len(turn.calls) == 1 or manners.parallel):
            calls = [call_fields(call, self._shield, takes_strings=manners.string_arguments) for call in turn.calls]
            return {**message, "tool_calls": calls}
        said = [message["content"]] if message["content"] else []
        return {**message, "content": "\n".join(map(str, [*said, *map(self._call_as_text, turn.calls)]))}

    def _add_assistant(self, turn: Turn) -> None:
        spoken = [str(message["role"]) for message in self.messages[-1:] if message["role"] != "system"]
        if spoken == ["assistant"] and not self._manners.assistants_in_a_row:
            self.messages.append({"role": "user", "content": ""})
        if not spoken and not self._manners.assistant_first:
            self.messages.append({"role": "user", "content": ""})
        for call in turn.calls:
            self._names[call.id] = self._shield.hide(call.name)
        self.places.append(len(self.messages))
        self.turns.append(turn)
        self.messages.append(self.assistant(turn))

    def _add_system(self, text: str) -> None:
        if self._manners.system_later if self.messages else self._manners.system_first:
            self.messages.append({"role": "system", "content": text})
        else:
            self._add_user(text)

    def _add_user(self, text: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "user" and not self._manners.users_in_a_row:
            self.messages[-1] = {"role": "user", "content": f"{last['content']}{_BETWEEN}{text}"}
        else:
            self.messages.append({"role": "user", "content": text})

    def _add_result(self, result: ToolResult) -> None:
        text = self._shield.hide(result.text)
        if self._manners.results:
            name = self._names.get(result.call_id, "")
            identity = self._shield.hide(result.call_id)
            self.messages.append({"role": "tool", "content": text, "tool_call_id": identity, "name": name})
        else:
            self._add_user(f"<tool_response>\n{text}\n</tool_response>")

    def _tools_as_text(self) -> str:
        return "\n".join(["# Tools", "", *(_json(self._shield.hide(tool)) for tool in self._student.tools)])

    def _call_as_text(self, call: Any) -> str:
        hidden = self._shield.hide
        arguments = _json(hidden(dict(call.arguments))) if call.raw_arguments is None else hidden(call.raw_arguments)
        return f'<tool_call>{{"name": {_json(hidden(call.name))}, "arguments": {arguments}}}</tool_call>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
