"""A tool call as a record, whatever a model wrote for its arguments: what is no JSON object stays as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, cast

from composer_replication.errors import InputError, explain
from composer_replication.types import ToolCall

_MAX_DEPTH = 100  # templates walk through arguments by recursion


def tool_call(identity: str, name: str, arguments: object) -> ToolCall:
    """A call with its arguments as a dict; text that is no JSON object goes to `raw_arguments`, never an exception."""
    given, raw = arguments, None
    if isinstance(given, str):
        given, raw = _object_in(given)
    elif given is not None and not isinstance(given, Mapping):
        raw = json.dumps(given, ensure_ascii=False, default=str)
    found = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) and raw is None else {}
    if not _is_flat_enough(found):
        expected = f"values nested at most {_MAX_DEPTH} deep"
        raise InputError(explain(f"arguments of a call of {name!r}", got="deeper ones", expected=expected))
    return ToolCall(id=identity, name=name, arguments=dict(found), raw_arguments=raw)


def json_value(text: str) -> object:
    """The value of strict JSON; ValueError for NaN, for what is nested beyond reason, and for what is no JSON."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not _is_flat_enough(value):
        raise ValueError("nested too deeply")
    return value


def _object_in(text: str) -> tuple[object, str | None]:
    if not text.strip():
        return {}, None
    try:
        value = json_value(text)
    except ValueError:
        return None, text
    return (cast("dict[str, Any]", value), None) if isinstance(value, dict) else (None, text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _is_flat_enough(value: object) -> bool:
    """Level by level: this must not itself recurse."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [each for outer in level for each in _inside(outer)]
        if not level:
            return True
    return False


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list | tuple) else ()
