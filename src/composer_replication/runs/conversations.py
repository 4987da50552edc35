"""Conversations as rows of `conversations.jsonl`, and back again: what every later stage reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.runs.directory import RunDir
from composer_replication.types import Conversation, Link, Provenance, ToolCall, ToolResult, Turn, Usage

SCHEMA, VERSION = "conversation", 2
KEYS = frozenset(field.name for field in fields(Conversation))
_CONVERSATION, _TURN, _LINK, _CALL, _RESULT, _USAGE = (
    tuple(field.name for field in fields(kind)) for kind in (Conversation, Turn, Link, ToolCall, ToolResult, Usage)
)


def to_row(conversation: Conversation) -> dict[str, object]:
    """Plain JSON with every field present, so that all rows of the file have the same keys.

    Arguments and extras are not copied: `dataclasses.asdict` would take longer than reading the log did.
    """
    row = _fields_of(conversation, _CONVERSATION)
    row["turns"] = [_turn_row(turn) for turn in conversation.turns]
    row["parent"] = None if conversation.parent is None else _fields_of(conversation.parent, _LINK)
    row["extra"] = dict(conversation.extra)
    return row


def from_row(row: Mapping[str, Any]) -> Conversation:
    """The inverse of `to_row`."""
    try:
        link = row["parent"]
        return Conversation(
            **_known(Conversation, row, skip=("turns", "parent")),
            turns=tuple(_turn(turn) for turn in row["turns"]),
            parent=None if link is None else Link(**link),
        )
    except (KeyError, TypeError) as error:
        raise ArtefactCorruptError(
            explain(f"conversation row {row.get('id')!r}", got=error, expected=f"the fields of {SCHEMA} {VERSION}")
        ) from error


def read_conversations(run: RunDir, *, verify: bool = True) -> Iterator[Conversation]:
    """The conversations of a run, in order, one at a time; `verify` as for `RunDir.read_jsonl`."""
    return (from_row(row) for row in run.read_jsonl("conversations", schema=SCHEMA, version=VERSION, verify=verify))


def _turn(row: Mapping[str, Any]) -> Turn:
    usage, token_ids, logprobs = row["usage"], row["token_ids"], row["logprobs"]
    provenance = row["provenance"]
    return Turn(
        **_known(Turn, row, skip=("calls", "results", "usage", "provenance", "token_ids", "logprobs")),
        calls=tuple(ToolCall(**call) for call in row["calls"]),
        results=tuple(ToolResult(**result) for result in row["results"]),
        usage=None if usage is None else Usage(**usage),
        provenance=Provenance(file=provenance["file"], lines=tuple(provenance["lines"])),
        token_ids=None if token_ids is None else tuple(token_ids),
        logprobs=None if logprobs is None else tuple(logprobs),
    )


def _known(kind: type, row: Mapping[str, Any], *, skip: tuple[str, ...]) -> dict[str, Any]:
    return {field.name: row[field.name] for field in fields(kind) if field.name not in skip}


def _turn_row(turn: Turn) -> dict[str, object]:
    row = _fields_of(turn, _TURN)
    row["calls"] = [_fields_of(call, _CALL) for call in turn.calls]
    row["results"] = [_fields_of(result, _RESULT) for result in turn.results]
    row["usage"] = None if turn.usage is None else _fields_of(turn.usage, _USAGE)
    row["provenance"] = {"file": turn.provenance.file, "lines": list(turn.provenance.lines)}
    row["token_ids"] = None if turn.token_ids is None else list(turn.token_ids)
    row["logprobs"] = None if turn.logprobs is None else list(turn.logprobs)
    return row


def _fields_of(value: object, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(value, name) for name in names}
