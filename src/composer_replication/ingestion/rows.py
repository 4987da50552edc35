"""Conversations as rows of `conversations.jsonl`, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, cast

from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.types import Conversation, Link, Provenance, ToolCall, ToolResult, Turn, Usage

SCHEMA, VERSION = "conversation", 1


def to_row(conversation: Conversation) -> dict[str, object]:
    """Plain JSON with every field present, so that all rows of the file have the same keys."""
    return cast("dict[str, object]", _plain(asdict(conversation)))


def from_row(row: Mapping[str, Any]) -> Conversation:
    """The inverse of `to_row`."""
    try:
        link = row["parent"]
        return Conversation(
            **_known(Conversation, row, skip=("turns", "parent")),
            turns=tuple(_turn(each) for each in row["turns"]),
            parent=None if link is None else Link(**link),
        )
    except (KeyError, TypeError) as error:
        raise ArtefactCorruptError(
            explain(f"conversation row {row.get('id')!r}", got=error, expected=f"the fields of {SCHEMA} {VERSION}")
        ) from error


def _turn(row: Mapping[str, Any]) -> Turn:
    usage, token_ids, logprobs = row["usage"], row["token_ids"], row["logprobs"]
    provenance = row["provenance"]
    return Turn(
        **_known(Turn, row, skip=("calls", "results", "usage", "provenance", "token_ids", "logprobs")),
        calls=tuple(ToolCall(**each) for each in row["calls"]),
        results=tuple(ToolResult(**each) for each in row["results"]),
        usage=None if usage is None else Usage(**usage),
        provenance=Provenance(file=provenance["file"], lines=tuple(provenance["lines"])),
        token_ids=None if token_ids is None else tuple(token_ids),
        logprobs=None if logprobs is None else tuple(logprobs),
    )


def _known(kind: type, row: Mapping[str, Any], *, skip: tuple[str, ...]) -> dict[str, Any]:
    return {each.name: row[each.name] for each in fields(kind) if each.name not in skip}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("list[Any]", value)]
    return value
