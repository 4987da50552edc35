"""The one reading of a chat message: the text of its content, its thinking, and its calls, in every shape they have.

Endpoints, trainers, logs and tables of records write the same message in different shapes; what a shape means is
decided here. What to do about an entry that is no call is the caller's: `message_calls` refuses it, and who reads
`written_calls` may count it and go on.
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


# A tool call as a record, whatever a model wrote for its arguments: what is no JSON object stays as text.

MAX_DEPTH = 50  # of values inside arguments; templates walk through them by recursion
_LEAVES = frozenset(
    (str, int, float, bool, type(None))
)  # every call of every log is looked at: nearly all of it is these
_LONG_INTEGER = re.compile(r"\d{19}")


def tool_call(identity: str, name: str, arguments: object) -> ToolCall:
    """A call with its arguments as a dict: keys in their written order, the last value of a key that is there twice.

    Text that is no JSON object goes to `raw_arguments` as it is, never an exception. So does text with what no artefact
    could hold: NaN, infinite floats, integers beyond 64 bits, half characters, values nested beyond `MAX_DEPTH`.
    """
    value, raw = arguments, None
    if isinstance(value, str):
        value, raw = _object_in(value)
    elif value is not None and not isinstance(value, Mapping):
        raw = json.dumps(value, ensure_ascii=False, default=str)
    table = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) and raw is None else {}
    if not _is_flat_enough(table):
        expected = f"values nested at most {MAX_DEPTH} deep"
        raise InputError(explain(f"arguments of a call of {name!r}", got="deeper ones", expected=expected))
    return ToolCall(id=identity, name=name, arguments=dict(table), raw_arguments=raw)


def json_value(text: str) -> object:
    """The value of strict JSON; ValueError for NaN, for what is nested beyond reason, and for what is no JSON."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not _is_flat_enough(value):
        raise ValueError("nested too deeply")
    return value


def _object_in(text: str) -> tuple[object, str | None]:
    if not text.strip():
        return {}, None
    try:
        value = orjson.loads(text)
        if _LONG_INTEGER.search(text):
            orjson.dumps(json_value(text))  # the reader makes a float of what the writer refuses
    except (ValueError, TypeError):
        return None, text
    return (value, None) if isinstance(value, dict) and _is_flat_enough(value) else (None, text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _is_flat_enough(value: object) -> bool:
    """Whether what is in a value is nested at most `MAX_DEPTH` deep; level by level, for this must not recurse."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer) if type(inner) not in _LEAVES]
        if not level:
            return True
    return False


def _inside(value: object) -> Iterable[object]:
    if type(value) is dict or isinstance(value, Mapping):
        return cast("Mapping[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list | tuple) else ()


# Tool schemas inferred from the calls that sessions show, since logs hold none.

_Tool = tuple[str, str]
"""The format of the logs, which says whose tool it is, and the tool's name: two agents may have tools of one name."""
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_KINDS = {kind: frozenset((name,)) for kind, name in _TYPES.items()}
_NULL = frozenset(("null",))


@dataclass(slots=True)
class _Calls:
    """The good calls of one tool: how many, and of each argument the types and how many calls had it."""

    number: int = 0
    kinds: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    present: Counter[str] = field(default_factory=Counter[str])

    def add(self, number: int, kinds: Mapping[str, frozenset[str]], present: Mapping[str, int]) -> None:
        self.number += number
        self.present.update(present)
        for name, theirs in kinds.items():
            ours = self.kinds.get(name, theirs)
            self.kinds[name] = ours if theirs <= ours else ours | theirs


class ToolSchemas:
    """What the good calls of conversations show about their tools."""

    def __init__(self) -> None:
        self._calls: dict[_Tool, _Calls] = {}

    def add_row(self, row: Mapping[str, Any]) -> None:
        """The good calls of a row of `conversations.jsonl`. A failed call teaches nothing about what is required."""
        turns = row["turns"]
        failed = {result["call_id"] for turn in turns for result in turn["results"] if result["is_error"] is True}
        for call in (call for turn in turns for call in turn["calls"]):
            if call["raw_arguments"] is None and call["id"] not in failed:
                kinds = {name: _KINDS.get(type(value), _NULL) for name, value in call["arguments"].items()}
                self._calls.setdefault((row["format"], call["name"]), _Calls()).add(1, kinds, dict.fromkeys(kinds, 1))

    def add(self, other: ToolSchemas) -> None:
        """Those of later conversations."""
        for tool, theirs in other._calls.items():
            self._calls.setdefault(tool, _Calls()).add(theirs.number, theirs.kinds, theirs.present)

    def num_calls(self) -> dict[_Tool, int]:
        return {tool: calls.number for tool, calls in sorted(self._calls.items())}

    def schemas(self) -> dict[_Tool, dict[str, Any]]:
        """Format and tool -> a JSON-schema object: every argument seen, its types, and as required what no call lacked.

        Arguments stand in the order in which calls first had them."""
        return {
            tool: {
                "type": "object",
                "properties": {name: _property(kinds) for name, kinds in calls.kinds.items()},
                "required": [name for name, number in calls.present.items() if number == calls.number],
            }
            for tool, calls in sorted(self._calls.items())
        }


def tool_rows(inferred: ToolSchemas, given: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    """Rows of `tools.jsonl`, by name: a given schema is every agent's, and goes before inferred ones of its name."""
    by_tool, num_calls = inferred.num_calls(), Counter[str]()
    for (_, name), number in by_tool.items():
        num_calls[name] += number
    rows = [_row(name, None, schema, num_calls[name]) for name, schema in given.items()]
    rows += [
        _row(name, format_name, schema, by_tool[format_name, name])
        for (format_name, name), schema in inferred.schemas().items()
        if name not in given
    ]
    return sorted(rows, key=lambda row: (str(row["name"]), str(row["format"])))


def _row(name: str, format_name: str | None, schema: Mapping[str, Any], num_calls: int) -> dict[str, object]:
    return {
        "name": name,
        "format": format_name,
        "parameters": dict(schema),
        "source": "file" if format_name is None else "inferred",
        "num_calls": num_calls,
    }


def _property(kinds: frozenset[str]) -> dict[str, Any]:
    ordered = sorted(kinds)
    return {"type": ordered[0] if len(ordered) == 1 else ordered}
