"""What a turn or a pair says, as a page shows it: an argument a line, and cut where it is long."""

from __future__ import annotations

from typing import Any, NamedTuple

from composer_replication.actions.parse import parse_action_text
from composer_replication.canonical_json import encode_as_written
from composer_replication.report.records import Row
from composer_replication.types import ToolCall

MAX_NEAR_SITE = 4000
"""Characters that are shown of a text at a failure, or in a pair."""


class Cut(NamedTuple):
    """A text, and how many of its characters are not shown."""

    text: str
    num_left_out: int


class PairView(NamedTuple):
    source: str
    chosen_by: str
    how: str
    chosen: Cut
    rejected: Cut


def cut(text: str, most: int) -> Cut:
    text = text.strip("\n")
    return Cut(text[:most], max(len(text) - most, 0))


def pair_view(row: Row) -> PairView:
    metadata = row.get("metadata") or {}
    return PairView(
        source=str(row.get("source") or "teachers"),
        chosen_by=str(row.get("chosen_by") or ""),
        how=str(metadata.get("how") or "").replace("_", " "),
        chosen=cut(_readable(str(row["chosen"])), MAX_NEAR_SITE),
        rejected=cut(_readable(str(row["rejected"])), MAX_NEAR_SITE),
    )


def _readable(text: str) -> str:
    """An action as a turn shows it: its words, then each call by its name with an argument a line."""
    action = parse_action_text(text).action
    calls = [f"{call.name}\n{arguments_of(call)}" for call in action.calls]
    return "\n\n".join(filter(None, [action.text, *calls])) if calls else text


def arguments_of(call: ToolCall) -> str:
    """Texts of arguments as they are, below their names; other values as JSON."""
    if call.raw_arguments is not None:
        return call.raw_arguments
    return "\n".join(f"{name}: {_value(value)}" for name, value in call.arguments.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else encode_as_written(value, where="argument").decode()
