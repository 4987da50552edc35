"""Messages as chat templates take them: text content, calls with their arguments as an object or as JSON text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from composer_replication.actions.messages import call_entry, message_calls, required_text, thinking_text
from composer_replication.actions.parse import parse_action_text
from composer_replication.actions.reply import without_thought
from composer_replication.errors import InputError, explain
from composer_replication.types import Message, ToolCall

Arguments = Literal["object", "text"]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Readers of a JSON column keep 10 decimals and 64 bits; a number that means something else after that goes as text.
_DECIMALS, _MAX_ERROR = 10, 1e-9
_INTEGERS = range(-(1 << 63), 1 << 64)


def answer_message(action: str, arguments: Arguments) -> Message:
    """The assistant message that does what the text of an action says."""
    parsed = parse_action_text(action)
    return _assistant(parsed.action.text, parsed.thinking, parsed.action.calls, arguments)


def answer_messages(actions: Sequence[str], arguments: Arguments) -> list[Message]:
    """The messages of answers that are compared: all with their thinking, or none, as only the student's is logged."""
    messages = [answer_message(action, arguments) for action in actions]
    if not all("reasoning_content" in message for message in messages):
        for message in messages:
            message.pop("reasoning_content", None)
            message["content"] = without_thought(str(message["content"]))
    return messages


def prompt_messages(messages: Sequence[Mapping[str, Any]], arguments: Arguments, where: str) -> list[Message]:
    """The messages of a state; a tool's result carries the name of the tool that its call had."""
    names: dict[str, str] = {}
    made: list[Message] = []
    for number, message in enumerate(messages):
        place = f"message {number} of {where}"
        role = _ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if role is None:
            got = repr(message.get("role")) if isinstance(message, Mapping) else type(message).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(explain(f"role of {place}", got=got, expected=f"one of {', '.join(_ROLES)}"))
        text = required_text(message.get("content"), place)
        if role == "assistant":
            calls = message_calls(message, place)
            names |= {call.id: call.name for call in calls}
            made.append(_assistant(text, thinking_text(message, place), calls, arguments))
        elif role == "tool":
            identity = str(message.get("tool_call_id") or "")
            name = str(message.get("name") or names.get(identity, ""))
            made.append({"role": role, "content": text, "tool_call_id": identity, "name": name})
        else:
            made.append({"role": role, "content": text})
    return made


def _assistant(text: str, thinking: str, calls: Iterable[ToolCall], arguments: Arguments) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    written = [call_entry(call.id, call.name, _arguments(call, arguments)) for call in calls]
    # Templates ask whether the key is there as often as whether the list is empty.
    return message | {"tool_calls": written} if written else message


def _arguments(call: ToolCall, form: Arguments) -> object:
    if call.raw_arguments is not None:
        return call.raw_arguments
    if form == "object" and _reads_back(call.arguments):
        return dict(call.arguments)
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _reads_back(value: object) -> bool:
    """Whether the numbers in it mean the same after `datasets` has read them."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            waiting.extend(cast("Mapping[str, object]", each).values())
        elif isinstance(each, list | tuple):
            waiting.extend(cast("list[object]", each))
        elif isinstance(each, int | float) and not _is_kept(each):
            return False
    return True


def _is_kept(number: float) -> bool:
    if isinstance(number, int):
        return number in _INTEGERS
    return math.isclose(round(number, _DECIMALS), number, rel_tol=_MAX_ERROR)
