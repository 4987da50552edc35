"""The reader of `pairs.jsonl`: what others would have done, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from composer_replication.runs.directory import RunDir
from composer_replication.types import Action, ToolCall

SCHEMA, VERSION = "dpo_pair", 3


class LoggedPair(NamedTuple):
    """What the teachers would have done instead of assistant turn `turn_number` (counted from 0) of a conversation.

    Without an `action`, it is read from the `chosen` text, which does not always say where thinking ends.
    """

    state_id: str
    turn_number: int
    chosen: str
    action: Action | None = None


def read_pairs(run: RunDir) -> Iterator[tuple[str, LoggedPair]]:
    """Each pair with the id of its conversation, in order."""
    rows = cast("Iterator[dict[str, Any]]", run.read_jsonl("pairs", schema=SCHEMA, version=VERSION))
    for row in rows:
        action = _action(row.get("chosen_action"))
        yield row["conversation_id"], LoggedPair(row["state_id"], row["turn_number"], row["chosen"], action)


def _action(row: dict[str, Any] | None) -> Action | None:
    """None in rows of version 2, and where the text holds thinking."""
    return None if row is None else Action(text=row["text"], calls=tuple(ToolCall(**call) for call in row["calls"]))
