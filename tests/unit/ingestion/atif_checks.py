"""ATIF written and read back: what must be the same, and what the schema asks of a document."""

from __future__ import annotations

from dataclasses import replace

import orjson
from atif import Trajectory
from small_formats import read_bytes

from composer_replication.ingestion.formats import atif
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.types import Provenance


def written(conversation, tmp_path, subagents=()):
    data = orjson.dumps(to_atif(conversation, subagents=subagents))
    return read_bytes(atif, tmp_path, "out.json", data)


def _as_read(conversation):
    """The conversation as it comes back: the place it is read from is new, and the old one is in `extra`."""
    turns = [
        replace(
            turn,
            provenance=Provenance(file="out.json", lines=(1,)),
            extra={
                **turn.extra,
                "read_from": turn.extra.get(
                    "read_from", {"file": turn.provenance.file, "lines": list(turn.provenance.lines)}
                ),
            },
        )
        for turn in conversation.turns
    ]
    extra = dict(conversation.extra)
    if conversation.format != "atif":
        extra["source_format"] = conversation.format
    return replace(conversation, format="atif", turns=tuple(turns), extra=extra)


def assert_same(read, conversation):
    turns = tuple(replace(turn, provenance=Provenance(file="out.json", lines=(1,))) for turn in read.turns)
    assert replace(read, turns=turns) == _as_read(conversation)


def validate(document):
    """By the format's own models."""
    assert Trajectory.model_validate(document).schema_version == "ATIF-v1.8"
