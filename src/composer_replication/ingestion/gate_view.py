"""What the last gate looks at in a part of something that goes out: plain JSON data, with what its shape would hide.

Names say what fields hold, so a part is looked at as data, not as text. But data hides some things: ids are random by
nature; arguments are text that means data, in which a name may stand twice; the texts of a message may be one text in
pieces; a schema names a field in one place and shows its values in another; and what is nested very deeply cannot be
walked at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

# Ids are random and most of them mean nothing: only rules that know a kind of key look at them, as at ingest.
_IDS = {"id", "parent_id", "state_id", "tool_call_id", "source_call_id", "call_id", "turn_id", "session_id"}
_IDS |= {"trajectory_id", "conversation_id", "timestamp"}
_AS_GIVEN = frozenset(("arguments", "parameters"))  # a tool's own fields, whatever they are called
_SHOWN_VALUES = frozenset(("enum", "const", "examples", "example", "default"))
_NUMBERS = (int, float)
_JSON_SCALAR = re.compile(r'"(?:[^"\\]|\\.)*+"|(?<![\w.-])-?\d++(?![\w.])')  # `"a \"b\""`, `4821`


@dataclass
class View:
    """A part without ids and numbers; its ids; texts that stand there in pieces; values that a schema shows."""

    value: Any = None
    ids: list[str] = field(default_factory=list[str])
    joined: list[str] = field(default_factory=list[str])
    shown: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def view_of(part: Any) -> View:
    """RecursionError where a part is nested too deeply; `flat_text` is for that one."""
    view = View()
    view.value = _seen(part, view)
    return view


def bytes_of(part: Any) -> bytes:
    """What tells a part from another one."""
    try:
        return orjson.dumps(part)
    except orjson.JSONEncodeError:  # nested too deeply
        return flat_text(part).encode("utf-8", "surrogatepass")


def flat_text(part: Any) -> str:
    """All names and values of a part, a line each, however deeply they are nested."""
    lines, pending = list[str](), [("", part)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(str(key), child) for key, child in cast("dict[Any, Any]", value).items()]
        elif isinstance(value, list):
            pending += [(name, child) for child in cast("list[Any]", value)]
        else:
            lines.append(f"{json.dumps(name)}: {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines)


def _seen(value: Any, view: View) -> Any:
    if isinstance(value, list):
        items = cast("list[Any]", value)
        texts = [text for block in items if isinstance(block, dict) and isinstance(text := block.get("text"), str)]
        if len(texts) > 1:
            view.joined.append("".join(texts))
        return [_seen(child, view) for child in items]
    if not isinstance(value, dict):
        return value
    return dict(_fields(cast("dict[str, Any]", value), view))


def _fields(record: dict[str, Any], view: View) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if key in _IDS and isinstance(value, str):
            view.ids.append(value)
        elif key in _AS_GIVEN:
            arguments = arguments_as_data(value)
            view.shown += _shown_values(arguments)
            yield key, arguments
        elif not ((key == "logprobs" or key.endswith("_token_ids")) and _is_numbers(value)):
            yield key, _seen(value, view)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(number, _NUMBERS) for number in cast("list[Any]", value))


def arguments_as_data(arguments: Any) -> Any:
    """Return arguments that are written as JSON text as what they mean, where a name that is written twice has both
    values; anything else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        orjson.loads(arguments)
        return json.loads(arguments, object_pairs_hook=_with_all_values)
    except (orjson.JSONDecodeError, ValueError, RecursionError):
        return arguments


def rewritten(text: str, data: Any, clean: Any) -> str:
    """Return JSON text in which the strings and numbers that differ between `data` and `clean` are replaced."""
    changes = dict(_changes(data, clean))

    def replaced(match: re.Match[str]) -> str:
        new = changes.get(json.loads(match[0]))
        return match[0] if new is None else json.dumps(new, ensure_ascii=text.isascii())

    return _JSON_SCALAR.sub(replaced, text)


def _changes(data: Any, clean: Any) -> Iterator[tuple[str | int, str]]:
    if isinstance(data, str | int) and isinstance(clean, str):
        if data != clean:
            yield data, clean
    elif isinstance(data, dict) and isinstance(clean, dict):
        for (old_name, old), (new_name, new) in zip(data.items(), clean.items(), strict=True):
            yield from _changes(old_name, new_name)
            yield from _changes(old, new)
    elif isinstance(data, list) and isinstance(clean, list):
        for old, new in zip(data, clean, strict=True):
            yield from _changes(old, new)


def _with_all_values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    values: dict[str, list[Any]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {name: several[0] if len(several) == 1 else several for name, several in values.items()}


def _shown_values(schema: Any) -> Iterator[dict[str, Any]]:
    """Of every property of a JSON schema that shows values: its name, with them."""
    if isinstance(schema, list):
        for inner_schema in cast("list[Any]", schema):
            yield from _shown_values(inner_schema)
    elif isinstance(schema, dict):
        record = cast("dict[str, Any]", schema)
        properties: Any = record.get("properties")
        for name, property_schema in properties.items() if isinstance(properties, dict) else ():
            values = list(_values_in(property_schema))
            if values:
                yield {name: values}
        for inner_schema in record.values():
            yield from _shown_values(inner_schema)


def _values_in(schema: Any) -> Iterator[Any]:
    """The values that a property's schema shows, also in its alternatives and items; those of inner properties not."""
    if isinstance(schema, list):
        for inner_schema in cast("list[Any]", schema):
            yield from _values_in(inner_schema)
    elif isinstance(schema, dict):
        for key, value in cast("dict[str, Any]", schema).items():
            if key in _SHOWN_VALUES:
                yield from cast("list[Any]", value) if isinstance(value, list) else (value,)
            elif key != "properties":
                yield from _values_in(value)
