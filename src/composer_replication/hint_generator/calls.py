"""Hints about calls: the tool's name, its arguments, and calls that were made before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from composer_replication.hint_generator.context import HintContext, given, listed, quoted, text_fact


def hint_tool_not_found(ctx: HintContext | None = None) -> str:
    """The published example: a reminder of the tools there are."""
    name, tools = text_fact(ctx, "tool_name"), given(ctx, "available_tools")
    missing = f"There is no tool named {name}" if name else "There is no such tool"
    if not tools:
        return f"{missing}. Call only tools that this session offers, by their exact names."
    return f"{missing}. Reminder: available tools are {listed(tools)}."


def hint_json_decode(ctx: HintContext | None = None) -> str:
    """Arguments that are no JSON at all."""
    name, takes = text_fact(ctx, "tool_name"), _takes(ctx)
    rule = "Tool arguments must be one complete JSON object, with quotes, backslashes and newlines in strings escaped."
    return f"{rule} {name} takes {takes}." if name and takes else rule


def hint_type_error(ctx: HintContext | None = None) -> str:
    """Arguments that do not fit the schema: which are missing, which do not exist, which have the wrong type."""
    name = text_fact(ctx, "tool_name") or "the tool"
    slips = [
        f"{label} {listed(found)}"
        for key, label in (
            ("missing_parameters", "it needs"),
            ("unexpected_parameters", "it does not take"),
            ("wrong_types", "of another type must be"),
        )
        if (found := given(ctx, key))
    ]
    takes, seen = _takes(ctx), given(ctx, "seen_parameters")
    first = f"The arguments must fit the schema of {name}" + (f": {'; '.join(slips)}." if slips else ".")
    if takes:
        return f"{first} It takes {takes}."
    return f"{first} Calls that worked had {listed(seen)}." if seen else first


def hint_repeated_failure(ctx: HintContext | None = None) -> str:
    """The same call again."""
    name, times = text_fact(ctx, "tool_name"), given(ctx, "num_repeats")
    what = f"This call of {name}" if name else "This call"
    count = f"{times} time{'s' if times != 1 else ''}" if isinstance(times, int) else "before"
    message = text_fact(ctx, "error_message")
    because = f" with {message}" if message else ""
    rule = "Do not repeat a failed call unchanged: find out why, then change it."
    return f"{what} has already failed {count}{because}. {rule}"


def hint_runtime_error(ctx: HintContext | None = None) -> str:
    """The fallback for a failure that is the model's and has no template of its own."""
    name, message = text_fact(ctx, "tool_name"), text_fact(ctx, "error_message")
    what = f"This call of {name} fails" if name else "This call fails"
    return f"{what}{f' with {message}' if message else ''}. Check what it assumes before making it."


def _takes(ctx: HintContext | None) -> str:
    """The parameters of a schema in words: `a`, `b` (required), `c`."""
    schema = given(ctx, "tool_schema")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or not properties:
        return ""
    required = cast("Mapping[str, Any]", schema).get("required")
    needed = set(cast("list[str]", required)) if isinstance(required, list) else set[str]()
    names = sorted(cast("Mapping[str, Any]", properties), key=lambda each: (each not in needed, each))
    shown = [quoted(each) + (" (required)" if each in needed else "") for each in names[:12]]
    return ", ".join(shown)
