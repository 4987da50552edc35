"""A task: what is asked, the files, the edits that solve it, and the checks that judge.

The tests among the files are there for the agent to read and run. The reward does not run them: it asks the workspace's
code for the values of expressions that the agent has not seen, and compares them outside the process that the code ran
in. A test that was edited, a runner that was replaced, a line that says OK: none of them is looked at.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Difficulty = Literal["easy", "medium", "hard"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Replace `old`, which stands exactly once in the file at that point, by `new`. An empty `old` writes the file."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """An expression over a module of the workspace, and the value it has once the task is solved, as canonical text.

    `test` is the name of the test it belongs to. A test passes when all of its checks hold.
    """

    test: str
    module: str
    expression: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """Same seed and difficulty, same task. `files` maps paths below the root to texts, tests included."""

    seed: int
    difficulty: Difficulty
    family: str
    prompt: str
    files: Mapping[str, str]
    solution: tuple[Edit, ...]
    checks: tuple[Check, ...]


# The tools' schemas, and what a harness says of arguments that do not fit them.

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


# The words that tasks are made of. Long enough lists that a held-out seed is a task nobody has seen.

THINGS = (
    *("price", "score", "length", "weight", "speed", "height", "depth", "width", "cost", "delay", "level", "size"),
    *("ticket", "parcel", "room", "table", "lamp", "wheel", "bottle", "letter", "bridge", "engine", "garden", "window"),
    *("order", "report", "signal", "packet", "ladder", "barrel", "bucket", "candle", "carpet", "jacket", "kettle"),
    *("needle", "pillow", "rocket", "saddle", "tunnel", "vessel", "wagon", "anchor", "basket", "cable", "drawer"),
    *("filter", "gauge", "handle", "island", "jewel", "marker", "number", "orbit", "panel", "record", "sheet"),
    *("token", "unit", "valve", "answer", "button", "client", "device", "event", "field", "guest", "hour", "image"),
)
PLACES = (
    *("shop", "game", "road", "bank", "farm", "lab", "ship", "park", "mine", "port", "city", "mill", "museum"),
    *("school", "library", "factory", "hotel", "market", "office", "station", "studio", "theatre", "tower", "village"),
    *("archive", "bakery", "camp", "clinic", "dock", "forest", "gallery", "harbour", "kitchen", "lodge", "plant"),
    *("quarry", "ranch", "stable", "temple", "vault", "yard", "arena", "depot", "garage"),
)
EXTRAS = (
    *("tax", "bonus", "margin", "offset", "fee", "gap", "step", "shift", "extra", "rest", "base", "toll", "refund"),
    *("discount", "penalty", "reserve", "credit", "buffer", "surcharge", "advance", "deposit", "excess", "handicap"),
    *("padding", "premium", "rebate", "share", "slack", "stake", "tip", "topping", "trim", "lead", "lag", "wage"),
)
COLOURS = (
    *("red", "blue", "green", "black", "white", "brown", "grey", "pink", "gold", "silver", "violet", "orange"),
    *("amber", "beige", "coral", "cream", "ivory", "khaki", "lime", "navy", "olive", "plum", "rose", "teal"),
)


# The edits that lead from one text to another, each of them clear: what it replaces stands there once.


def edits_between(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Edit, ...]:
    """Edits that make `after` of `before`, applied in their order; a file that is new is written whole."""
    edits: list[Edit] = []
    for path in sorted(after):
        if path not in before:
            edits.append(Edit(path=path, old="", new=after[path]))
        elif before[path] != after[path]:
            edits += _edits_of(path, before[path], after[path])
    return tuple(edits)


def _edits_of(path: str, before: str, after: str) -> list[Edit]:
    old_lines, new_lines = before.split("\n"), after.split("\n")
    blocks = difflib.SequenceMatcher(a=old_lines, b=new_lines, autojunk=False).get_opcodes()
    lines, shift, edits = old_lines, 0, list[Edit]()
    for tag, start, end, new_start, new_end in blocks:
        if tag == "equal":
            continue
        first, last = start + shift, end + shift
        put = new_lines[new_start:new_end]
        edits.append(_clear_edit(path, lines, first, last, put))
        lines = [*lines[:first], *put, *lines[last:]]
        shift += len(put) - (end - start)
    return edits


def _clear_edit(path: str, lines: list[str], first: int, last: int, put: list[str]) -> Edit:
    """Lines [first, last) replaced by `put`, with as many lines around them as it takes to be clear."""
    text = "\n".join(lines)
    is_pure = first == last or not put  # nothing to replace, or nothing to put there: a line of context says where
    begin, end = first, last
    while (is_pure and end - begin == last - first) or text.count("\n".join(lines[begin:end])) != 1:
        begin, end = (begin - 1, end) if begin > 0 else (begin, end + 1)
    return Edit(
        path=path,
        old="\n".join(lines[begin:end]),
        new="\n".join([*lines[begin:first], *put, *lines[last:end]]),
    )
