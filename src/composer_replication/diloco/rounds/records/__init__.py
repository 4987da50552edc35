"""The records of a round, their bytes, and where they lie.

kinds    what a replica offers, which offers count, how the attempt ended
packing  a record as bytes and back, within bounds
layout   the keys of a run, and which names are the protocol's
"""

from composer_replication.diloco.rounds.records.kinds import (
    Manifest,
    Member,
    OfferId,
    Outcome,
    RecordError,
    Result,
    Seal,
    Shard,
    digest,
    next_base,
)
from composer_replication.diloco.rounds.records.layout import Layout, parse_mean, parse_offer, parse_state
from composer_replication.diloco.rounds.records.packing import (
    MOST_MAGNITUDE,
    MOST_RANKS,
    MOST_RECORD_BYTES,
    MOST_SHARDS,
    MOST_TRIALS,
    MOST_WEIGHT,
    fields_of,
    items,
    pack,
    pack_manifest,
    pack_outcome,
    pack_seal,
    refusing,
    sha256_of,
    text,
    unpack,
    unpack_manifest,
    unpack_outcome,
    unpack_seal,
    whole,
)

__all__ = [
    "MOST_MAGNITUDE",
    "MOST_RANKS",
    "MOST_RECORD_BYTES",
    "MOST_SHARDS",
    "MOST_TRIALS",
    "MOST_WEIGHT",
    "Layout",
    "Manifest",
    "Member",
    "OfferId",
    "Outcome",
    "RecordError",
    "Result",
    "Seal",
    "Shard",
    "digest",
    "fields_of",
    "items",
    "next_base",
    "pack",
    "pack_manifest",
    "pack_outcome",
    "pack_seal",
    "parse_mean",
    "parse_offer",
    "parse_state",
    "refusing",
    "sha256_of",
    "text",
    "unpack",
    "unpack_manifest",
    "unpack_outcome",
    "unpack_seal",
    "whole",
]
