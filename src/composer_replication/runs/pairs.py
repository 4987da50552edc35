"""The reader of `pairs.jsonl`: what should have been done, by others or by the session itself, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from composer_replication.runs.directory import RunDir
from composer_replication.types import Action, ToolCall

SCHEMA, VERSION = "dpo_pair", 4
TEACHERS, ACTED = "teachers", "acted_at_once"
"""Sources of pairs; the others are `correction` and `user`. Where acting at once was right, what was done is chosen."""


class LoggedPair(NamedTuple):
    """What should have been done at assistant turn `turn_number` (counted from 0) of a conversation.

    Without an `action`, it is read from the `chosen` text, which does not always say where thinking ends. Without a
    `rejected` one, that is the whole turn as it was logged.
    """

    state_id: str
    turn_number: int
    chosen: str
    action: Action | None = None
    rejected: Action | None = None
    source: str = TEACHERS

    @property
    def rejects_turn(self) -> bool:
        """Whether the logged turn is what is worse."""
        return self.source != ACTED


def read_pairs(run: RunDir) -> Iterator[tuple[str, LoggedPair]]:
    """Each pair with the id of its conversation, in order."""
    rows = cast("Iterator[dict[str, Any]]", run.read_jsonl("pairs", schema=SCHEMA, version=VERSION))
    for row in rows:
        chosen, rejected = (_action(row.get(f"{side}_action")) for side in ("chosen", "rejected"))
        source = row.get("source", TEACHERS)
        pair = LoggedPair(row["state_id"], row["turn_number"], row["chosen"], chosen, rejected, source)
        yield row["conversation_id"], pair


def _action(row: dict[str, Any] | None) -> Action | None:
    """None in older rows, and where the text holds thinking."""
    return None if row is None else Action(text=row["text"], calls=tuple(ToolCall(**call) for call in row["calls"]))
