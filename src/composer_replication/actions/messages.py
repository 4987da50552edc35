"""The one reading of a chat message: the text of its content, its thinking, and its calls, in every shape they have.

Endpoints, trainers, logs and tables of records write the same message in different shapes; what a shape means is
decided here. What to do about an entry that is no call is the caller's: `message_calls` refuses it, and who reads
`written_calls` may count it and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from composer_replication.actions.calls import tool_call
from composer_replication.errors import InputError, explain
from composer_replication.types import ToolCall

THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CALL_KEYS = ("tool_call", "tool_calls", "function_call")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
_CALL_SHAPES = "{name, arguments or input, id?}, {id, function: {name, arguments}}, or a list of those"


class WrittenCall(NamedTuple):
    """An entry of a message's calls as it stands there; what is no call has None, or no text, for a name."""

    place: str  # "tool call 0"
    entry: object
    id: object = None
    name: object = None
    arguments: object = None


def written_calls(message: Mapping[str, Any]) -> list[WrittenCall]:
    """Every call that a message writes down, beside its content or in it, and every entry that should be one.

    A record of nothing but nulls, which is how a table shows a message without a call, is none of them.
    """
    calls: list[WrittenCall] = []
    for key in _CALL_KEYS:
        value = message.get(key)
        is_list = isinstance(value, list | tuple)
        for entry in cast("Sequence[object]", value) if is_list else (value,) if value or key == "tool_calls" else ():
            if not _is_null(entry):
                calls.append(_written(entry, f"tool call {len(calls)}" if is_list or key == "tool_call" else key))
    content = message.get("content")
    for number, part in enumerate(cast("Sequence[object]", content) if isinstance(content, list | tuple) else ()):
        if isinstance(part, Mapping) and part.get("type") == "tool_use":
            calls.append(_written(cast("object", part), f"block {number}"))
    return calls


def message_calls(
    message: Mapping[str, Any], where: str, new_id: Callable[[int], str] = "call_{}".format
) -> tuple[ToolCall, ...]:
    """The calls of a message; `new_id` names the one of a number that has no id, and what is no call is an error."""
    calls: list[ToolCall] = []
    for number, (position, entry, identity, name, arguments) in enumerate(written_calls(message)):
        if not isinstance(name, str):
            got = f"keys {sorted(map(str, entry))}" if isinstance(entry, Mapping) else type(entry).__name__
            raise InputError(explain(f"{position} of {where}", got=got, expected=_CALL_SHAPES))
        calls.append(tool_call(identity if isinstance(identity, str) and identity else new_id(number), name, arguments))
    return tuple(calls)


def call_entry(identity: str, name: str, arguments: object) -> dict[str, Any]:
    """A call as an entry of `tool_calls`; its arguments are text or an object, as the reader wants them."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def content_text(content: object, *, other: Callable[[Any], str | None] = lambda _: None, separator: str = "\n") -> str:
    """The text of a message's content: a string, or the text of a list's parts, joined.

    Thinking is left out. What has no text (an image, a result, a call) is what `other` makes of it; None leaves it out.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast("Sequence[object]", content) if isinstance(content, list | tuple) else (content,)
    texts = (_part_text(part, other) for part in parts)
    return separator.join(text for text in texts if text is not None)


def required_text(content: object, where: str) -> str:
    """`content_text` where all of it has to be text: an image or a call inside content is an error and not silence."""

    def refuse(part: object) -> str:
        kind = cast("Mapping[str, object]", part).get("type", "dict") if isinstance(part, Mapping) else None
        got = type(part).__name__ if kind is None else f"a part of type {kind!r}"
        fix = "Calls go into tool_calls, results into tool messages; images cannot be rendered."
        raise InputError(explain(f"content of {where}", got=got, expected="text or text parts", fix=fix))

    return content_text(content, other=refuse)


def thinking_text(message: Mapping[str, Any], where: str) -> str:
    """What a message keeps of the thinking before it, under any of its known keys."""
    return required_text(next((message[key] for key in THINKING_KEYS if message.get(key)), ""), where)


def _is_null(entry: object) -> bool:
    fields = cast("Mapping[str, object]", entry).values() if isinstance(entry, Mapping) else ()
    return entry is None or (bool(fields) and all(value is None for value in fields))


def _written(entry: object, location: str) -> WrittenCall:
    if not isinstance(entry, Mapping):
        return WrittenCall(location, entry)
    call = cast("Mapping[str, object]", entry)
    custom, function = call.get("custom"), call.get("function")
    if isinstance(custom, Mapping):  # a tool that takes one text
        fields = cast("Mapping[str, object]", custom)
        return WrittenCall(location, entry, call.get("id"), fields.get("name"), {"input": fields.get("input")})
    if isinstance(function, str):  # Inspect's flat shape
        return WrittenCall(location, entry, call.get("id"), function, call.get("arguments"))
    fields = cast("Mapping[str, object]", function) if isinstance(function, Mapping) else call
    arguments = fields.get("arguments")
    arguments = fields.get("input") if arguments is None else arguments
    return WrittenCall(location, entry, call.get("id"), fields.get("name"), arguments)


def _part_text(part: object, other: Callable[[Any], str | None]) -> str | None:
    if isinstance(part, str):
        return part
    fields = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
    if fields.get("type") in _THOUGHTS:
        return None
    text = fields.get("text", fields.get("refusal"))
    return text if isinstance(text, str) else other(part)
