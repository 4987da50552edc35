"""What a hint may be made of, and how text from a session is put into one: short, on one line, and quoted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

_MAX_QUOTED = 120
_MAX_LISTED = 24


class HintContext(TypedDict, total=False):
    """Facts about one failure; a template uses those it finds and says less without the others."""

    error_kind: str
    error_message: str
    available_tools: list[str]
    tool_name: str
    tool_schema: Mapping[str, Any]
    intent: str
    path: str
    similar_path: str
    was_read: bool
    closest_line: str
    missing_parameters: list[str]
    unexpected_parameters: list[str]
    wrong_types: list[str]
    command: str
    program: str
    num_repeats: int
    git_advice: str
    seen_parameters: list[str]
    only_whitespace: bool
    reader_tool: str
    finder_tool: str


def quoted(text: object) -> str:
    """Text of a session as it stands in a hint: one line, bounded, in backticks that it cannot leave."""
    line = " ".join(str(text).split())
    kept = "".join(each for each in line if each.isprintable()).replace("`", "'")
    if len(kept) > _MAX_QUOTED:
        kept = kept[: _MAX_QUOTED - 1] + "…"
    return f"`{kept}`" if kept else ""


def listed(names: Iterable[object]) -> str:
    """Names one after the other, each quoted; a long list is cut and says so."""
    shown = [name for each in names if (name := quoted(each))]
    more = f" and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return ", ".join(shown[:_MAX_LISTED]) + more


def given(context: HintContext | None, key: str) -> Any:
    """A fact, or None where it is missing or empty."""
    value: Any = (context or {}).get(key)
    return value or None


def text_fact(context: HintContext | None, key: str) -> str:
    """A fact as quoted text; empty where it is missing."""
    value = given(context, key)
    return "" if value is None else quoted(value)
