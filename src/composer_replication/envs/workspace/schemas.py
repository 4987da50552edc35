"""The tools' schemas, and what a harness says of arguments that do not fit them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

MAX_ARGUMENTS = 2**20


def _tool(name: str, about: str, required: str, **properties: tuple[str, str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()},
        "required": required.split(),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


_FILE = ("string", "The absolute path of the file")
_FOLDER = ("string", "The absolute path to search in; the whole workspace if left out")
TOOLS: tuple[dict[str, Any], ...] = (
    _tool("LS", "Lists a folder.", "path", path=("string", "The absolute path of the folder")),
    _tool("Glob", "Finds files by name.", "pattern", pattern=("string", "A pattern such as **/*.py"), path=_FOLDER),
    _tool("Grep", "Finds lines in files.", "pattern", pattern=("string", "A regular expression"), path=_FOLDER),
    _tool(
        "Read",
        "Reads a file, with line numbers.",
        "file_path",
        file_path=_FILE,
        offset=("number", "The line to start at"),
        limit=("number", "How many lines to read"),
    ),
    _tool(
        "Edit",
        "Replaces an exact string in a file that has been read.",
        "file_path old_string new_string",
        file_path=_FILE,
        old_string=("string", "The text to replace"),
        new_string=("string", "The text to put there"),
        replace_all=("boolean", "Replace every occurrence"),
    ),
    _tool("Write", "Writes a file.", "file_path content", file_path=_FILE, content=("string", "The whole text")),
    _tool("RunTests", "Formats the code, then runs all tests.", ""),
    _tool("Finish", "Ends the work.", ""),
)
SCHEMAS: dict[str, dict[str, Any]] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def as_mapping(arguments: object) -> dict[str, Any] | None:
    """Arguments as a mapping with names for keys; text is read as JSON. None where that cannot be done."""
    if isinstance(arguments, str) and len(arguments) <= MAX_ARGUMENTS:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, Mapping):
        return None
    mapping = cast("Mapping[object, Any]", arguments)
    return {clean(key): clean(value) for key, value in mapping.items() if isinstance(key, str)}


def clean(value: Any) -> Any:
    """Text as UTF-8 can hold it: half of a surrogate pair is no character."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def issues(tool: str, given: Mapping[str, Any]) -> list[str]:
    """What does not fit, one line each, in the order of missing, unexpected, wrong."""
    properties = SCHEMAS[tool]["properties"]
    missing = [f"The required parameter `{name}` is missing" for name in SCHEMAS[tool]["required"] if name not in given]
    unexpected = [f"An unexpected parameter `{name[:80]}` was provided" for name in given if name not in properties]
    wrong = [
        f"The parameter `{key}` type is expected as `{properties[key]['type']}` but provided as `{_type_of(value)}`"
        for key, value in given.items()
        if key in properties and not _fits(value, properties[key]["type"])
    ]
    return [*missing, *unexpected[:5], *wrong]


def _fits(value: object, kind: str) -> bool:
    if kind == "number":
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, bool if kind == "boolean" else str)


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity"
    names = (("boolean", bool), ("number", (int, float)), ("string", str), ("array", (list, tuple)))
    return next((name for name, types in names if isinstance(value, types)), "object")
