"""A reply as an action, whatever shape it comes in: text, calls written in text, OpenAI and Anthropic messages.

Thinking is left out. Arguments that are no JSON object stay raw. A call written in text counts only where there is
nothing else to the text but remarks: beside other code it may be an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from composer_replication.actions.calls import json_value, tool_call
from composer_replication.actions.messages import content_text, message_calls
from composer_replication.actions.parse import parse_action_text
from composer_replication.errors import InputError, explain
from composer_replication.types import Action, ToolCall

_THOUGHTS = ("think", "thinking")
_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_JSON_MARKS = ("", "json", "tool_call", "tool_use", "tool")
_NAME_KEYS = ("name", "tool", "tool_name", "function_name")
_ARGUMENT_KEYS = ("arguments", "input", "args", "parameters", "tool_input")
_AROUND = frozenset({*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type", "call_id", "recipient"})


def parse_reply(reply: str | Mapping[str, Any] | Sequence[Any]) -> Action:
    """The action of a reply: a text, a message, or a message's list of content blocks."""
    if isinstance(reply, str):
        return _of_text(reply)
    if isinstance(reply, Mapping):
        return _of_message(reply)
    if isinstance(reply, list | tuple):
        return _of_message({"content": reply})
    raise InputError(explain("reply", got=type(reply).__name__, expected="a text, a message or a list of blocks"))


def _of_text(text: str) -> Action:
    action = parse_action_text(without_thought(text)).action
    written = _written_calls(action.text) if not action.calls else None
    return written if written is not None else action


def without_thought(text: str) -> str:
    """Without the thinking that some models write in front of what they say.

    The opening tag may be missing, since some templates write it into the prompt; then the closing one ends a line.
    """
    for tag in _THOUGHTS:
        before, end, after = text.partition(f"</{tag}>")
        head, opening, _ = before.partition(f"<{tag}>")
        if end and (not head.strip() if opening else after.startswith("\n")):
            return after.lstrip()
    return text


def _written_calls(text: str) -> Action | None:
    """Calls in `<tool_call>` tags, in fences, or alone as JSON; None where the text holds anything more than that."""
    if _TAG in text:
        first, *parts = text.split(_TAG)
        bodies = [part.partition(_TAG_END) for part in parts]
        remarks = first + "".join(after for _, _, after in bodies)
        calls = _calls_in([body for body, _, _ in bodies]) if all(end for _, end, _ in bodies) else None
    elif "```" in text:
        fences, remarks = _fenced(text)
        is_json = bool(fences) and all(mark in _JSON_MARKS for mark, _ in fences)
        calls = _calls_in([body for _, body in fences]) if is_json else None
    else:
        remarks = ""
        calls = _calls_in([text]) if text.lstrip().startswith(("{", "[")) else None
    return Action(text=remarks.strip(), calls=calls) if calls is not None and "```" not in remarks else None


def _fenced(text: str) -> tuple[list[tuple[str, str]], str]:
    """(mark, body) of every fenced block, and what stands around them."""
    fences: list[tuple[str, str]] = []
    remarks: list[str] = []
    inside: list[str] | None = None
    mark = ""
    for line in text.split("\n"):
        is_fence = line.strip().startswith("```")
        if is_fence and inside is None:
            inside, mark = [], line.strip().removeprefix("```").strip().lower()
        elif line.strip() == "```" and inside is not None:
            fences.append((mark, "\n".join(inside)))
            inside = None
        else:
            (remarks if inside is None else inside).append(line)
    if inside is not None:
        remarks.append("```")  # one that does not end
    return fences, "\n".join(remarks)


def _calls_in(texts: list[str]) -> tuple[ToolCall, ...] | None:
    """Every text as a call, or as a list of them; None if one is neither."""
    calls: list[ToolCall] = []
    for text in texts:
        try:
            value = json_value(text)
        except ValueError:
            return None
        for entry in cast("list[object]", value) if isinstance(value, list) and value else [value]:
            call = _call_of_object(entry, len(calls))
            if call is None:
                return None
            calls.append(call)
    return tuple(calls)


def _call_of_object(value: object, number: int) -> ToolCall | None:
    """An object that is a call and nothing else: a name, arguments, and what goes around them."""
    body = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if isinstance(body.get("function"), dict) and body.keys() <= {"function", "id", "type"}:
        body = cast("dict[str, Any]", body["function"])
    names = [body[key] for key in _NAME_KEYS if isinstance(body.get(key), str) and body[key]]
    argument_values = [body[key] for key in _ARGUMENT_KEYS if key in body]
    if len(names) != 1 or len(argument_values) != 1 or not body.keys() <= _AROUND:
        return None
    arguments = argument_values[0]
    is_schema = isinstance(arguments, dict) and isinstance(arguments.get("properties"), dict) and "type" in arguments
    if is_schema or not isinstance(arguments, dict | str):
        return None
    return tool_call(f"call_{number}", names[0], arguments)


def _of_message(message: Mapping[str, Any]) -> Action:
    content = message.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise InputError(explain("content of a reply", got=type(content).__name__, expected="a text, a list or null"))
    calls, text = message_calls(message, "a reply"), content_text(cast("object", content))
    nameless = next((number for number, call in enumerate(calls) if not call.name), None)
    if nameless is not None:
        raise InputError(explain(f"tool call {nameless} of a reply", got="no name", expected="the name of a tool"))
    if calls:
        return Action(text=without_thought(text) if isinstance(content, str) else text, calls=calls)
    refusal = message.get("refusal")
    return _of_text(text or (refusal if isinstance(refusal, str) else ""))
