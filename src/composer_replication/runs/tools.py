"""The one reader of `tools.jsonl`: which tools the sessions of an agent had, known by the format of their logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from composer_replication.actions.tool_schemas import ToolSchemas, tool_rows
from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.runs import conversations
from composer_replication.runs.directory import RunDir
from composer_replication.runs.split import held_out_of

SCHEMA, VERSION = "tool", 3
Schema = Mapping[str, Any]
Tool = dict[str, Any]


class ToolTable:
    """The tools of each agent in a run.

    `given` are schemas that a file gave, by name. They hold for every agent, and go before inferred ones of that name.
    `by_format` has the tools of each format in the shape of the OpenAI interface, by name; under None those of all
    other formats, which are the given ones alone.
    """

    def __init__(self, given: Mapping[str, Schema], inferred: Mapping[str, Mapping[str, Schema]]) -> None:
        self.given = dict(given)
        self.by_format: dict[str | None, list[Tool]] = {None: _as_requests_take_them(self.given)}
        for format_name, schemas in sorted(inferred.items()):
            self.by_format[format_name] = _as_requests_take_them({**schemas, **self.given})

    def of(self, format_name: str) -> list[Tool]:
        """The tools of sessions in this format: all of its agent's, since those that one session went on to call would
        tell what comes. The same list each time."""
        return self.by_format.get(format_name, self.by_format[None])

    def schemas(self, format_name: str) -> dict[str, Schema]:
        """The parameters of these tools, by name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.of(format_name)}


def read_tools(run: RunDir, *, with_test: bool = False) -> ToolTable:
    """The tools of a run, without what only the sessions of its test show: nothing may be learnt from those.

    `with_test` are those of all sessions, as `crf ingest` found them: what the agents had, for who judges their calls.
    """
    rows = list(run.read_jsonl("tools", schema=SCHEMA, version=VERSION))
    held_out = frozenset[str]() if with_test else held_out_of(run)
    if not held_out:
        return table_of(rows)
    inferred = ToolSchemas()
    for row in run.read_jsonl("conversations", schema=conversations.SCHEMA, version=conversations.VERSION):
        if row["id"] not in held_out:
            inferred.add_row(row)
    return table_of(tool_rows(inferred, table_of(rows).given))


def table_of(rows: Iterable[Mapping[str, Any]]) -> ToolTable:
    """Rows of `tools.jsonl` as a table."""
    declared: dict[str, Schema] = {}
    inferred: dict[str, dict[str, Schema]] = defaultdict(dict)
    for row in rows:
        try:
            of_one = declared if row["format"] is None else inferred[row["format"]]
            of_one[row["name"]] = row["parameters"]
        except KeyError as error:
            expected = f"the fields of {SCHEMA} {VERSION}"
            raise ArtefactCorruptError(explain("row of tools.jsonl", got=error, expected=expected)) from error
    return ToolTable(declared, inferred)


def _as_requests_take_them(schemas: Mapping[str, Schema]) -> list[Tool]:
    """Paid answers are kept under keys that are made of this, so nothing may be added to it."""
    return [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in sorted(schemas.items())
    ]
