"""Read chat messages in every format: their text, thinking, and calls.

Endpoints, trainers, logs and tables write the same message in different formats, which are interpreted here. Callers
decide how to handle an invalid call: `message_calls` raises, while a reader of `written_calls` may count it and
continue. The last part of the module infers tool schemas from calls.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, cast

import orjson

from composer_replication.errors import InputError, explain
from composer_replication.types import ToolCall

# Keys for thinking that is stored outside the content: vLLM and DeepSeek, OpenRouter, and others. The first nonempty
# key counts.
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CALL_KEYS = ("tool_call", "tool_calls", "function_call")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
_CALL_FORMATS = "{name, arguments or input, id?}, {id, function: {name, arguments}}, or a list of such calls"


class WrittenCall(NamedTuple):
    """An unvalidated entry in the calls of a message. The name of an invalid entry may be None or another value that
    is not a string.
    """

    location: str  # "tool call 0"
    entry: object
    id: object = None
    name: object = None
    arguments: object = None


def written_calls(message: Mapping[str, Any]) -> list[WrittenCall]:
    """Return every entry in a message that is, or is meant to be, a call, inside or outside the message's content.

    An entry with only null values is skipped, because tables represent a message without a call that way.
    """
    calls: list[WrittenCall] = []
    for key in _CALL_KEYS:
        value = message.get(key)
        is_list = isinstance(value, list | tuple)
        for entry in cast("Sequence[object]", value) if is_list else (value,) if value or key == "tool_calls" else ():
            if not _is_null(entry):
                calls.append(_written_call(entry, f"tool call {len(calls)}" if is_list or key == "tool_call" else key))
    content = message.get("content")
    for number, part in enumerate(cast("Sequence[object]", content) if isinstance(content, list | tuple) else ()):
        # In the Anthropic format, calls are content blocks.
        if isinstance(part, Mapping) and part.get("type") == "tool_use":
            calls.append(_written_call(cast("object", part), f"block {number}"))
    return calls


def message_calls(
    message: Mapping[str, Any], where: str, new_id: Callable[[int], str] = "call_{}".format
) -> tuple[ToolCall, ...]:
    """Return the calls in a message. `new_id` generates ids for calls without an id, from their position.

    Raises InputError for an entry that is not a valid call.
    """
    calls: list[ToolCall] = []
    for number, (location, entry, identity, name, arguments) in enumerate(written_calls(message)):
        if not isinstance(name, str):
            got = f"keys {sorted(map(str, entry))}" if isinstance(entry, Mapping) else type(entry).__name__
            raise InputError(explain(f"{location} in {where}", got=got, expected=_CALL_FORMATS))
        calls.append(tool_call(identity if isinstance(identity, str) and identity else new_id(number), name, arguments))
    return tuple(calls)


def call_entry(identity: str, name: str, arguments: object) -> dict[str, Any]:
    """Return a call as an entry of `tool_calls`; its arguments are text or an object, depending on the recipient."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def content_text(
    content: object, *, fallback: Callable[[Any], str | None] = lambda _: None, separator: str = "\n"
) -> str:
    """Return the text of a message's content: a string, or the joined texts of a list of parts.

    Thinking is skipped. `fallback` returns the text for a part without text (an image, a result, a call), or None to
    skip the part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    # A single part need not be in a list.
    parts = cast("Sequence[object]", content) if isinstance(content, list | tuple) else (content,)
    texts = (_part_text(part, fallback) for part in parts)
    return separator.join(text for text in texts if text is not None)


def required_text(content: object, where: str) -> str:
    """Return `content_text` for content that must be text. Raises InputError if it contains an image or a call."""

    def refuse(part: object) -> str:
        kind = cast("Mapping[str, object]", part).get("type", "dict") if isinstance(part, Mapping) else None
        got = type(part).__name__ if kind is None else f"a part of type {kind!r}"
        fix = "Move calls to `tool_calls` and results to tool messages. Images are not supported."
        raise InputError(explain(f"content of {where}", got=got, expected="text or text parts", fix=fix))

    return content_text(content, fallback=refuse)


def thinking_text(message: Mapping[str, Any], where: str) -> str:
    """Return the thinking stored in a message, under any of the usual keys."""
    return required_text(next((message[key] for key in THINKING_KEYS if message.get(key)), ""), where)


def _is_null(entry: object) -> bool:
    fields = cast("Mapping[str, object]", entry).values() if isinstance(entry, Mapping) else ()
    return entry is None or (bool(fields) and all(value is None for value in fields))


def _written_call(entry: object, location: str) -> WrittenCall:
    if not isinstance(entry, Mapping):
        return WrittenCall(location, entry)
    call = cast("Mapping[str, object]", entry)
    custom, function = call.get("custom"), call.get("function")
    if isinstance(custom, Mapping):  # a tool that takes a single text
        fields = cast("Mapping[str, object]", custom)
        return WrittenCall(location, entry, call.get("id"), fields.get("name"), {"input": fields.get("input")})
    if isinstance(function, str):  # the flat format of Inspect
        return WrittenCall(location, entry, call.get("id"), function, call.get("arguments"))
    fields = cast("Mapping[str, object]", function) if isinstance(function, Mapping) else call
    arguments = fields.get("arguments")
    arguments = fields.get("input") if arguments is None else arguments
    return WrittenCall(location, entry, call.get("id"), fields.get("name"), arguments)


def _part_text(part: object, fallback: Callable[[Any], str | None]) -> str | None:
    if isinstance(part, str):
        return part
    fields = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
    if fields.get("type") in _THOUGHTS:
        return None
    text = fields.get("text", fields.get("refusal"))
    return text if isinstance(text, str) else fallback(part)


# Tool calls: arguments that are not a JSON object are kept as text.

MAX_DEPTH = 50  # of values in arguments; chat templates render them recursively
# Nearly all values have these types. Skipping them early matters, since every call in every log is checked.
_LEAVES = frozenset((str, int, float, bool, type(None)))
# '{"id": 12345678901234567890}', which may exceed 64 bits; not '{"id": 1234567890}'.
_LONG_INTEGER = re.compile(r"\d{19}")


def tool_call(identity: str, name: str, arguments: object) -> ToolCall:
    """Return a call with its arguments as a dict, in their original order; for a repeated key the last value counts.

    Text that is not a JSON object is stored in `raw_arguments` unchanged. The same applies to arguments with values
    that artefacts cannot represent: NaN, infinite floats, integers beyond 64 bits, lone surrogates, and values nested
    deeper than `MAX_DEPTH`.
    """
    value, raw = arguments, None
    if isinstance(value, str):
        value, raw = _parse_object(value)
    elif value is not None and not isinstance(value, Mapping):
        raw = json.dumps(value, ensure_ascii=False, default=str)
    table = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) and raw is None else {}
    if not _is_flat_enough(table):
        expected = f"values nested at most {MAX_DEPTH} levels deep"
        raise InputError(explain(f"arguments in a call to {name!r}", got="deeper nesting", expected=expected))
    return ToolCall(id=identity, name=name, arguments=dict(table), raw_arguments=raw)


def json_value(text: str) -> object:
    """Parse strict JSON. Raises ValueError for NaN, for values nested too deeply, and for invalid JSON."""
    try:
        value: object = json.loads(text, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not _is_flat_enough(value):
        raise ValueError("nested too deeply")
    return value


def _parse_object(text: str) -> tuple[object, str | None]:
    """Parse a call's arguments. Return (object, None), or (None, text) if the text is not a JSON object that
    artefacts can represent.
    """
    if not text.strip():
        return {}, None
    try:
        value = orjson.loads(text)
        if _LONG_INTEGER.search(text):
            orjson.dumps(
                json_value(text)
            )  # orjson parses an integer beyond 64 bits as a float, but refuses to write it
    except (ValueError, TypeError):
        return None, text
    return (value, None) if isinstance(value, dict) and _is_flat_enough(value) else (None, text)


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


def _is_flat_enough(value: object) -> bool:
    """Return whether values are nested at most `MAX_DEPTH` levels deep.

    The check proceeds level by level, because recursion would overflow on the very values that must be rejected.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _children(outer) if type(inner) not in _LEAVES]
        if not level:
            return True
    return False


def _children(value: object) -> Iterable[object]:
    if type(value) is dict or isinstance(value, Mapping):
        return cast("Mapping[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list | tuple) else ()


# Tool schemas are inferred from the calls in sessions, since logs do not contain them.

_Tool = tuple[str, str]
"""(log format, tool name), since two agents may have different tools with the same name."""
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_KINDS = {kind: frozenset((name,)) for kind, name in _TYPES.items()}
# The only other JSON type is null.
_NULL = frozenset(("null",))


@dataclass(slots=True)
class _CallStatistics:
    """Statistics on the successful calls of one tool: the number of calls, and the types and the frequency of each
    argument.
    """

    number: int = 0
    kinds: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    present: Counter[str] = field(default_factory=Counter[str])

    def add(self, number: int, kinds: Mapping[str, frozenset[str]], present: Mapping[str, int]) -> None:
        self.number += number
        self.present.update(present)
        for name, new_kinds in kinds.items():
            old_kinds = self.kinds.get(name, new_kinds)
            self.kinds[name] = old_kinds if new_kinds <= old_kinds else old_kinds | new_kinds


class ToolSchemas:
    """Infers the schemas of tools from the successful calls in conversations."""

    def __init__(self) -> None:
        self._calls: dict[_Tool, _CallStatistics] = {}

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the successful calls in a row of `conversations.jsonl`; failed calls may lack required arguments."""
        turns = row["turns"]
        failed = {result["call_id"] for turn in turns for result in turn["results"] if result["is_error"] is True}
        for call in (call for turn in turns for call in turn["calls"]):
            if call["raw_arguments"] is None and call["id"] not in failed:
                kinds = {name: _KINDS.get(type(value), _NULL) for name, value in call["arguments"].items()}
                self._calls.setdefault((row["format"], call["name"]), _CallStatistics()).add(
                    1, kinds, dict.fromkeys(kinds, 1)
                )

    def add(self, schemas: ToolSchemas) -> None:
        """Add the call statistics that another ToolSchemas collected from later conversations."""
        for tool, calls in schemas._calls.items():
            self._calls.setdefault(tool, _CallStatistics()).add(calls.number, calls.kinds, calls.present)

    def num_calls(self) -> dict[_Tool, int]:
        return {tool: calls.number for tool, calls in sorted(self._calls.items())}

    def schemas(self) -> dict[_Tool, dict[str, Any]]:
        """Return a dict that maps (format, tool) to a JSON schema with every argument and its types.

        Arguments that were present in all calls are required. Arguments are ordered by first appearance.
        """
        return {
            tool: {
                "type": "object",
                "properties": {name: _property_schema(kinds) for name, kinds in calls.kinds.items()},
                "required": [name for name, number in calls.present.items() if number == calls.number],
            }
            for tool, calls in sorted(self._calls.items())
        }


def tool_rows(inferred: ToolSchemas, user_schemas: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    """Return the rows of `tools.jsonl`, ordered by name.

    Schemas provided by the user apply to every agent, and replace inferred schemas with the same name.
    """
    by_tool, num_calls = inferred.num_calls(), Counter[str]()
    for (_, name), number in by_tool.items():
        num_calls[name] += number
    rows = [_tool_row(name, None, schema, num_calls[name]) for name, schema in user_schemas.items()]
    rows += [
        _tool_row(name, format_name, schema, by_tool[format_name, name])
        for (format_name, name), schema in inferred.schemas().items()
        if name not in user_schemas
    ]
    return sorted(rows, key=lambda row: (str(row["name"]), str(row["format"])))


def _tool_row(name: str, format_name: str | None, schema: Mapping[str, Any], num_calls: int) -> dict[str, object]:
    return {
        "name": name,
        "format": format_name,
        "parameters": dict(schema),
        "source": "file" if format_name is None else "inferred",
        "num_calls": num_calls,
    }


def _property_schema(kinds: frozenset[str]) -> dict[str, Any]:
    ordered = sorted(kinds)
    return {"type": ordered[0] if len(ordered) == 1 else ordered}
