"""The bytes of records, and their readers: whatever is not exactly such a record is a RecordError.

A record is one line of JSON with its checksum, written three times into one object: a flipped bit or a cut-off tail is
read past. Where no line is left, the record is unreadable, and the protocol says what follows.

A record also holds the address that it was written for (`Layout.address`: its run and its key, and so its step,
attempt, rank and claim). A copy at any other key, or in any other run, is as unreadable as damaged bytes.

A checksum says that somebody wrote the line, not that it is a record: each field has a type and a bound of its own, so
that nothing is counted up to, allocated or waited for on a writer's word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, get_args

from composer_replication.canonical_json import decode_object, encode
from composer_replication.diloco.rounds.records.kinds import (
    Manifest,
    Member,
    OfferId,
    OldRecord,
    Outcome,
    RecordError,
    Result,
    Seal,
    Shard,
    plain,
)
from composer_replication.errors import InputError, explain

FORMAT = 3  # 2: without an address
COPIES = 3
MOST_RECORD_BYTES = 16 * 2**20
# Names have five digits for ranks and shards. A manifest has up to 103 bytes for a shard; an outcome has 67 for one,
# and 120 and 27 for a rank that is a member and bad: at these bounds both fit into a record, three times over.
MOST_RANKS, MOST_SHARDS = 10**4, 5 * 10**4
MOST_TRIALS = 10**9  # nine digits for claims and trials
MOST_WEIGHT = 1e18
MOST_MAGNITUDE = 2.0**100  # in an offered vector: a sum of 2**27 of them is still a number in fp32
_MOST_BYTES = 2**50
_MOST_TEXT = 500
_SHA256 = re.compile(r"[0-9a-f]{64}")


def pack(kind: str, at: str, content: dict[str, Any]) -> bytes:
    """Return the bytes of a record for an address. Raises InputError if they are more than its readers accept."""
    line = encode(plain({"kind": kind, "format": FORMAT, "at": at, **content}), where=kind)
    record = COPIES * (hashlib.sha256(line).hexdigest().encode() + b" " + line + b"\n")
    if len(record) > MOST_RECORD_BYTES:
        got, expected = f"{len(record):,} bytes", f"at most {MOST_RECORD_BYTES:,}"
        fix = "A record grows with tensors, shards and replicas: have fewer of them."
        raise InputError(explain(f"record of a {kind}", got=got, expected=expected, fix=fix))
    return record


def unpack(kind: str, at: str, data: bytes) -> dict[str, Any]:
    """Return the content of a record, from the first of its lines that is whole.

    Raises OldRecord for a record of an earlier format, and RecordError for any other one that is not of this address.
    """
    for line in data.split(b"\n"):
        checksum, _, text = line.partition(b" ")
        if text and hashlib.sha256(text).hexdigest().encode() == checksum:
            with refusing(kind):
                content = decode_object(text)
                got = (content.pop("kind", None), content.pop("format", None))
                if got != (kind, FORMAT):
                    problem = f"a {str(got[0])[:40]!r} of format {str(got[1])[:40]!r}"
                    raise OldRecord(problem) if got == (kind, 2) else ValueError(problem)
                if (written_for := content.pop("at", None)) != at:
                    raise ValueError(f"one that was written for {str(written_for)[:120]!r}, at {at!r}")
                return content
    raise RecordError(explain(f"record of a {kind}", got=f"{len(data)} bytes without a whole line", expected="one"))


def pack_manifest(at: str, manifest: Manifest) -> bytes:
    return pack("manifest", at, asdict(manifest))


def pack_seal(at: str, seal: Seal) -> bytes:
    return pack("seal", at, asdict(seal))


def pack_outcome(at: str, outcome: Outcome) -> bytes:
    return pack("outcome", at, asdict(outcome))


def unpack_manifest(at: str, data: bytes) -> Manifest:
    content = fields_of("manifest", at, data, "id", "base", "spec", "weight", "shards", "largest")
    with refusing("manifest"):
        return Manifest(
            id=_offer_id(content["id"]),
            base=text(content["base"]),
            spec=text(content["spec"]),
            weight=_amount(content["weight"]),
            shards=tuple(_shard(shard) for shard in items(content["shards"], MOST_SHARDS)),
            largest=_amount(content["largest"], most=MOST_MAGNITUDE),
        )


def unpack_seal(at: str, data: bytes) -> Seal:
    content = fields_of("seal", at, data, "base", "spec", "num_shards", "members")
    with refusing("seal"):
        members = _members(content["members"])
        if not members:
            raise ValueError("no members")
        num_shards = whole(content["num_shards"], below=MOST_SHARDS)
        return Seal(text(content["base"]), text(content["spec"]), num_shards, members)


def unpack_outcome(at: str, data: bytes) -> Outcome:
    names = ("result", "base", "spec", "members", "means", "bad", "reason", "seconds", "num_bytes")
    content = fields_of("outcome", at, data, *names)
    with refusing("outcome"):
        result = content["result"]
        if result not in get_args(Result):
            raise ValueError(f"the result {str(result)[:40]!r}, which is none of {', '.join(get_args(Result))}")
        members = _members(content["members"])
        if not members and result != "abort":
            raise ValueError(f"a {result} without members")
        return Outcome(
            result=result,
            base=text(content["base"]),
            spec=text(content["spec"]),
            members=members,
            means=tuple(sha256_of(checksum) for checksum in items(content["means"], MOST_SHARDS)),
            bad=tuple(_offer_id(offer_id) for offer_id in items(content["bad"], MOST_RANKS)),
            reason=text(content["reason"]),
            seconds=_amount(content["seconds"]),
            num_bytes=whole(content["num_bytes"], below=_MOST_BYTES),
        )


@contextmanager
def refusing(kind: str) -> Iterator[None]:
    """What the block finds wrong with a record, as a RecordError that names the record."""
    try:
        yield
    except RecordError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(explain(f"record of a {kind}", got=str(error)[:200], expected="its fields")) from error


def fields_of(kind: str, at: str, data: bytes, *names: str) -> dict[str, Any]:
    """Return the content of a record that has these fields and no others."""
    content = unpack(kind, at, data)
    if set(content) != set(names):
        got = str(sorted(content))[:200]
        raise RecordError(explain(f"fields of a {kind}", got=got, expected=sorted(names)))
    return content


def whole(value: object, *, below: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise ValueError(f"{str(value)[:40]} where a whole number from 0 to {below - 1} belongs")
    return value


def text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError(f"{str(value)[:40]!r} where a text of {_MOST_TEXT} characters at most belongs")
    return value


def sha256_of(value: object) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} where a sha256 belongs")
    return value


def _amount(value: object, *, most: float = MOST_WEIGHT) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]} where a number from 0 to {most:g} belongs")
    return float(value)


def items(value: object, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{str(value)[:40]!r} where a list of {most} at most belongs")
    return value


def _offer_id(value: object) -> OfferId:
    rank, claim, trial = items(value, 3)
    return OfferId(whole(rank, below=MOST_RANKS), *(whole(number, below=MOST_TRIALS) for number in (claim, trial)))


def _shard(value: Any) -> Shard:
    if not isinstance(value, dict) or set(value) != {"bytes", "sha256"}:
        raise ValueError(f"{str(value)[:40]!r} where a shard belongs")
    return Shard(whole(value["bytes"], below=_MOST_BYTES), sha256_of(value["sha256"]))


def _members(value: object) -> tuple[Member, ...]:
    """By rank, each rank once: two of one rank would count it twice."""
    members: list[Member] = []
    for ident, manifest, weight in (items(entry, 3) for entry in items(value, MOST_RANKS)):
        members.append(Member(_offer_id(ident), sha256_of(manifest), _amount(weight)))
        if len(members) > 1 and members[-2].id.rank >= members[-1].id.rank:
            raise ValueError(f"rank {members[-1].id.rank} after rank {members[-2].id.rank}")
    return tuple(members)
