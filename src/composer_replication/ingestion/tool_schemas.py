"""`tools.jsonl`: schemas inferred from the calls of sessions, or read from a file the user has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from composer_replication.actions.tool_schemas import ToolSchemas, tool_rows
from composer_replication.errors import InputError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.tools import SCHEMA, VERSION


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
    return dict(_named_schema(tool, f"{path}, tool {number}") for number, tool in enumerate(cast("list[Any]", tools)))


def write_tools(
    run: RunDir, inferred: ToolSchemas, given: Mapping[str, Mapping[str, Any]], *, is_scrubbed: bool
) -> None:
    """`tools.jsonl`, after the conversations it was inferred from."""
    rows, settings = tool_rows(inferred, given), {"scrubbed": is_scrubbed}
    run.write_jsonl("tools", rows, schema=SCHEMA, version=VERSION, sources=["conversations"], settings=settings)


def _named_schema(tool: Any, where: str) -> tuple[str, dict[str, Any]]:
    body = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = body.get("name") if isinstance(body, dict) else None
    keys = ("parameters", "input_schema", "inputSchema")
    schema = next((body[key] for key in keys if isinstance(body.get(key), dict)), None) if name else None
    if not isinstance(name, str) or schema is None:
        raise InputError(explain(where, got=f"{tool!r:.80}", expected=f"a name and one of {', '.join(keys)}"))
    return name, schema
