"""Tool schemas inferred from the calls that sessions show, since logs hold none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
