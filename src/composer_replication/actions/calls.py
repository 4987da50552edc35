"""A tool call as a record, whatever a model wrote for its arguments: what is no JSON object stays as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, cast

import orjson

from composer_replication.errors import InputError, explain
from composer_replication.types import ToolCall

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
    if not is_flat_enough(table):
        expected = f"values nested at most {MAX_DEPTH} deep"
        raise InputError(explain(f"arguments of a call of {name!r}", got="deeper ones", expected=expected))
    return ToolCall(id=identity, name=name, arguments=dict(table), raw_arguments=raw)


def json_value(text: str) -> object:
    """The value of strict JSON; ValueError for NaN, for what is nested beyond reason, and for what is no JSON."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not is_flat_enough(value):
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
    return (value, None) if isinstance(value, dict) and is_flat_enough(value) else (None, text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def is_flat_enough(value: object) -> bool:
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
