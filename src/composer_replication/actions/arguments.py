"""Arguments of a call in one spelling: defaults filled in, numbers by value, paths normalised, labels left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from composer_replication.actions.paths import is_path_parameter, normal_path
from composer_replication.actions.tools import is_label, known_defaults, null_is_absent

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema] | Sequence[Mapping[str, Any]]
"""Tool name -> JSON schema of its arguments, or a list of tools as the OpenAI, Anthropic and MCP interfaces have it."""

_SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema")
_WIDE = 2**64
_EXACT = 2**53  # beyond it a JSON number is no longer one integer


def canonical_arguments(
    tool: str, arguments: Mapping[str, Any], schema: Schema | None, cwd: str | None
) -> dict[str, object]:
    """Arguments that are equal exactly where the calls do the same, as far as schema and tables can tell."""
    described = properties_of(schema)
    tool_defaults = {name: value for name, value in known_defaults(tool).items() if schema is None or name in described}
    given_values = {
        name: value
        for name, value in arguments.items()
        if not is_label(tool, name) and not (value is None and _null_is_absent(tool, name, schema))
    }
    defaults = {**tool_defaults, **{name: entry["default"] for name, entry in described.items() if "default" in entry}}
    full = {**defaults, **given_values}
    values = {
        name: _canonical_parameter(tool, name, value, described.get(name, {}), cwd) for name, value in full.items()
    }
    if tool == "Read" and values.get("offset") == 0:
        values["offset"] = 1  # lines are counted from one, and nought is taken for the first
    return values


def properties_of(schema: Schema | None) -> dict[str, Schema]:
    """Parameter -> what the schema says of it; what is no object is left out."""
    properties = schema.get("properties") if schema is not None else None
    if not isinstance(properties, Mapping):
        return {}
    entries = cast("Mapping[str, Any]", properties).items()
    return {name: cast("Schema", entry) for name, entry in entries if isinstance(entry, Mapping)}


def tool_schemas(tools: Tools | None) -> dict[str, Schema]:
    """Tool name -> schema; entries of no known shape are left out, since a schema only helps."""
    if tools is None:
        return {}
    if isinstance(tools, Mapping):
        return {name: schema for name, schema in tools.items() if isinstance(schema, Mapping)}
    schemas: dict[str, Schema] = {}
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        body = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {}
        schema = next((body[key] for key in _SCHEMA_KEYS if isinstance(body.get(key), Mapping)), None)
        if isinstance(body.get("name"), str) and schema is not None:
            schemas[body["name"]] = schema
    return schemas


def canonical_value(value: object, schema: Schema | None = None) -> object:
    """A JSON value with numbers by value and, where a schema describes an object, its defaults filled in."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, int) and abs(value) >= _WIDE:
        return {"\0integer": hex(value)}  # Python refuses to print an integer of thousands of digits
    if isinstance(value, Mapping):
        described = properties_of(schema)
        members = cast("Mapping[str, object]", value)
        filled = {name: entry["default"] for name, entry in described.items() if "default" in entry}
        return {name: canonical_value(member, described.get(name)) for name, member in {**filled, **members}.items()}
    if isinstance(value, list | tuple):
        items = schema.get("items") if schema is not None else None
        inner = cast("Schema", items) if isinstance(items, Mapping) else None
        return [canonical_value(element, inner) for element in cast("list[object]", value)]
    return value


def _canonical_parameter(tool: str, name: str, value: object, described: Schema, cwd: str | None) -> object:
    if is_path_parameter(tool, name, described):
        if isinstance(value, str):
            return normal_path(value, cwd)
        if isinstance(value, list) and all(isinstance(element, str) for element in cast("list[object]", value)):
            return [normal_path(path, cwd) for path in cast("list[str]", value)]
    return canonical_value(value, described)


def _null_is_absent(tool: str, name: str, schema: Schema | None) -> bool:
    """A null that the schema does not allow, for a parameter that may be missing, says that it is missing."""
    if schema is None:
        return null_is_absent(tool)
    described = properties_of(schema).get(name)
    if described is None or name in _listed(schema.get("required")):
        return False
    kinds = _listed(described.get("type"))
    return bool(kinds) and "null" not in kinds and None not in _listed(described.get("enum"))


def _listed(value: object) -> list[object]:
    """The entries of what a schema lists; a single name is a list of one."""
    if isinstance(value, str):
        return [value]
    return cast("list[object]", value) if isinstance(value, list) else []
