"""Define tasks and tools: a task's prompt, files, solution and checks, and the schemas of the tools' arguments.

The agent can read and run the tests among the files. The reward does not depend on these tests: it evaluates
expressions, some of which the agent has not seen, and compares their values outside the process that runs the agent's
code. So an agent gains nothing by editing a test, replacing the test runner or printing "OK".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Difficulty = Literal["easy", "medium", "hard"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Replaces `old` with `new`.

    `old` occurs exactly once in the file at that point; if it is empty, `new` is the whole file.
    """

    path: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """An expression in a module of the workspace, and the value that it has in a solved task, as canonical text.

    `in_sandbox.canonical` defines the text. `test` is the name of the test that the check belongs to. A test passes if
    all of its checks hold.
    """

    test: str
    module: str
    expression: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, determined by its seed and difficulty.

    `files` maps paths below the root to texts, including tests. The edits in `solution` turn these texts into correct
    ones.
    """

    seed: int
    difficulty: Difficulty
    family: str
    prompt: str
    files: Mapping[str, str]
    solution: tuple[Edit, ...]
    checks: tuple[Check, ...]


MAX_ARGUMENTS = 2**20  # characters of JSON text


def _tool(name: str, about: str, required: str, **properties: tuple[str, str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()},
        "required": required.split(),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


# Names, descriptions and their order are data: they are part of every prompt of the embedded student.
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


def parse_arguments(arguments: object) -> dict[str, Any] | None:
    """Return a call's arguments as a mapping, or None if they are not a JSON object. JSON text is parsed."""
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
    """Return text with lone surrogates replaced by "?", because UTF-8 cannot encode them.

    Other values are returned unchanged.
    """
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def find_argument_problems(tool: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return a harness's messages about missing, unexpected and wrongly typed arguments, in this order."""
    properties = SCHEMAS[tool]["properties"]
    missing = [
        f"The required parameter `{name}` is missing" for name in SCHEMAS[tool]["required"] if name not in arguments
    ]
    unexpected = [f"An unexpected parameter `{name[:80]}` was provided" for name in arguments if name not in properties]
    wrong = [
        f"The parameter `{key}` type is expected as `{properties[key]['type']}` but provided as `{_json_type(value)}`"
        for key, value in arguments.items()
        if key in properties and not _has_type(value, properties[key]["type"])
    ]
    # A model can send any number of unexpected arguments, so only a few are listed.
    return [*missing, *unexpected[:5], *wrong]


def _has_type(value: object, kind: str) -> bool:
    if kind == "number":  # in Python a bool is an int; in JSON it is no number
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, bool if kind == "boolean" else str)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity"
    # bool before int, of which it is a subclass.
    names = (("boolean", bool), ("number", (int, float)), ("string", str), ("array", (list, tuple)))
    return next((name for name, types in names if isinstance(value, types)), "object")


# The nouns that tasks are made of, enough that tasks of held-out seeds are new to a model. Adding, removing or
# reordering nouns changes the tasks of all seeds.

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
COLORS = (
    *("red", "blue", "green", "black", "white", "brown", "grey", "pink", "gold", "silver", "violet", "orange"),
    *("amber", "beige", "coral", "cream", "ivory", "khaki", "lime", "navy", "olive", "plum", "rose", "teal"),
)
