"""Tool schemas inferred from the calls a session shows, since logs hold none; or read from a file the user has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from composer_replication.errors import InputError, explain
from composer_replication.types import Conversation

_Tool = tuple[str, str]
"""The format of the logs, which says whose tool it is, and the tool's name: two agents may have tools of one name."""
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class ToolSchemas:
    """What the good calls of many conversations show about their tools."""

    def __init__(self) -> None:
        self._kinds: dict[_Tool, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._present: dict[_Tool, Counter[str]] = defaultdict(Counter)
        self.num_calls: Counter[_Tool] = Counter()

    def add(self, format_name: str, name_of_tool: str, arguments: Mapping[str, Any]) -> None:
        """One call that worked, in a session of this format."""
        tool = (format_name, name_of_tool)
        self.num_calls[tool] += 1
        kinds, present = self._kinds[tool], self._present[tool]
        for name, value in arguments.items():
            kinds[name].add(_TYPES.get(type(value), "null"))
            present[name] += 1

    def add_row(self, row: Mapping[str, Any]) -> None:
        """The good calls of a row of `conversations.jsonl`. A failed call teaches nothing about what is required."""
        turns = row["turns"]
        failed = {result["call_id"] for turn in turns for result in turn["results"] if result["is_error"] is True}
        for call in (call for turn in turns for call in turn["calls"]):
            if call["raw_arguments"] is None and call["id"] not in failed:
                self.add(row["format"], call["name"], call["arguments"])

    def schemas(self) -> dict[_Tool, dict[str, Any]]:
        """Format and tool -> a JSON-schema object: every argument seen, its types, and as required what no call lacked.

        Arguments stand in the order in which calls first had them."""
        return {
            tool: {
                "type": "object",
                "properties": {name: _property(kinds) for name, kinds in self._kinds[tool].items()},
                "required": [name for name, number in self._present[tool].items() if number == num_calls],
            }
            for tool, num_calls in sorted(self.num_calls.items())
        }


def infer_tool_schemas(conversations: Iterable[Conversation]) -> dict[_Tool, dict[str, Any]]:
    """Format and tool -> schema. Calls that failed, or whose arguments were no object, are left out."""
    found = ToolSchemas()
    for conversation in conversations:
        failed = {r.call_id for turn in conversation.turns for r in turn.results if r.is_error is True}
        for call in (call for turn in conversation.turns for call in turn.calls):
            if call.raw_arguments is None and call.id not in failed:
                found.add(conversation.format, call.name, call.arguments)
    return found.schemas()


def load_tool_schemas(path: Path) -> dict[str, dict[str, Any]]:
    """Tool name -> schema from a JSON list of tools, as the OpenAI, Anthropic or MCP interfaces write them."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError(explain(str(path), got=error, expected="a JSON file with a list of tools")) from error
    tools = cast("dict[str, Any]", value).get("tools") if isinstance(value, dict) else value
    if not isinstance(tools, list) or not tools:
        got = "an empty list" if isinstance(tools, list) else "no list" if tools is None else type(tools).__name__
        fix = 'Write the schemas of the tools: [{"name": ..., "parameters": ...}], or leave --tools out.'
        expected = "a list with tools in it, or an object with one"
        raise InputError(explain(str(path), got=got, expected=expected, fix=fix))
    return dict(_named_schema(each, f"{path}, tool {number}") for number, each in enumerate(cast("list[Any]", tools)))


def tool_rows(found: ToolSchemas, given: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    """Rows of `tools.jsonl`, by name: a given schema is every agent's, and goes before inferred ones of its name."""
    num_calls = Counter[str]()
    for (_, name), number in found.num_calls.items():
        num_calls[name] += number
    rows = [_row(name, None, schema, num_calls[name]) for name, schema in given.items()]
    rows += [
        _row(name, format_name, schema, found.num_calls[format_name, name])
        for (format_name, name), schema in found.schemas().items()
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


def _named_schema(tool: Any, where: str) -> tuple[str, dict[str, Any]]:
    body = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = body.get("name") if isinstance(body, dict) else None
    keys = ("parameters", "input_schema", "inputSchema")
    schema = next((body[key] for key in keys if isinstance(body.get(key), dict)), None) if name else None
    if not isinstance(name, str) or schema is None:
        raise InputError(explain(where, got=f"{tool!r:.80}", expected=f"a name and one of {', '.join(keys)}"))
    return name, schema


def _property(kinds: set[str]) -> dict[str, Any]:
    ordered = sorted(kinds)
    return {"type": ordered[0] if len(ordered) == 1 else ordered}
