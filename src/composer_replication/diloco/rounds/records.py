"""Define the records of a round: their fields, their keys in the store, and their bytes.

Replicas communicate through records: a manifest describes an offer, a seal lists the offers that count, and an outcome
says how an attempt ended. `Layout` builds the keys of a run. `pack` turns a record into bytes, and `unpack` turns the
bytes into a record; it raises RecordError for bytes that are not exactly such a record.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ComposerError, InputError, explain

Result = Literal["commit", "abort", "void"]


class RecordError(ComposerError, ValueError):
    """Raised for bytes that are not a valid record."""


class OldRecord(RecordError):
    """Raised for a record in the format of an earlier version of this package, which is no longer supported."""


class OfferId(NamedTuple):
    """The identity of an offer: its rank, the claim of the process that made it, and its number in the round."""

    rank: int
    claim: int
    trial: int

    def __str__(self) -> str:
        return f"{self.rank:05d}.{self.claim}.{self.trial}"


@dataclass(frozen=True)
class Shard:
    """The size and digest of one shard of an offer."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of a replica's offer to a round. An offer with weight 0 has no shards."""

    id: OfferId
    base: str  # digest of the history of commits that the replica's weights come from
    spec: str  # digest of shapes, dtypes, payload and number of shards
    weight: float
    shards: tuple[Shard, ...] = ()
    largest: float = 0.0  # largest absolute value in the vector


class Member(NamedTuple):
    """An offer that counts in a sealed attempt."""

    id: OfferId
    manifest: str  # sha256 of the manifest
    weight: float


@dataclass(frozen=True)
class Seal:
    """The record that lists the offers that count in an attempt. Only the first replica that tries to create it
    succeeds.
    """

    base: str
    spec: str
    num_shards: int
    members: tuple[Member, ...]  # sorted by rank

    @property
    def weight(self) -> float:
        return sum(member.weight for member in self.members)


@dataclass(frozen=True)
class RoundOutcome:
    """The record that says how an attempt ended. Only the first replica that tries to create it succeeds. A commit
    contains all the information needed to apply it.
    """

    result: Result
    base: str
    spec: str = ""
    members: tuple[Member, ...] = ()
    means: tuple[str, ...] = ()  # sha256 of each shard of the mean
    bad: tuple[OfferId, ...] = ()  # offers that could not be read
    reason: str = ""
    seconds: float = 0.0  # how long its writer spent in the round; shown by `crf diloco`
    num_bytes: int = 0  # total size of the offers that count

    def spent(self) -> frozenset[OfferId]:
        """Return the offers that later attempts of the round may not use."""
        return frozenset(self.bad if self.result == "abort" else (member.id for member in self.members))


def digest(value: object) -> str:
    """Return the sha256 of a value in canonical JSON."""
    return hashlib.sha256(encode(_plain(value), where="digest")).hexdigest()


def _plain(value: Any) -> Any:
    """Return the value with its tuples replaced by lists, for JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


# The keys of a run. All are below its generation, so that objects of other generations are never listed or read.
#
#     g000000/about, about.1, about.2        identity of the run: id, world size, payload, shapes; the majority counts
#     g000000/claims/RANK/N                  the N-th process that holds a rank; g000000/beats/RANK.N: its heartbeat
#     g000000/left/RANK.N                    the goodbye of that process: its last step, and whether it had finished
#     g000000/r/STEP/here/RANK               this replica missed the previous round and has returned
#     g000000/r/STEP/offer/RANK.N.TRIAL      a manifest; its shards are g000000/d/STEP/RANK.N.TRIAL/SHARD
#     g000000/r/STEP/seal/ATTEMPT            the offers that count
#     g000000/r/STEP/mean/ATTEMPT/SHARD-SHA-MARK  a shard of the mean, with its checksum and a mark of its offers
#     g000000/r/STEP/out/ATTEMPT             the outcome of an attempt; ATTEMPT.1, ATTEMPT.2, ... if it is unreadable
#     g000000/genesis                        the name of the run's first state; genesis.1, ... if it is unreadable
#     g000000/states/STEP.RANK.N             a published state; its chunks are g000000/statedata/STEP.RANK.N/CHUNK
#     g000000/sums/STEP                      a digest of the first member's weights at that step
#     g000000/wanted/RANK                    this replica needs a newer state
#
# A record holds its address: the id of its run and its own key. `wanted` is an empty object without an address; a stray
# one only causes a state to be published early. Shards, means and chunks are tensors, whose checksums are in the
# records that name them. Seals and outcomes are never deleted, so that a replica that wakes up late learns that its
# round is over.

# "00003.0.1": rank 3, claim 0, trial 1; not "3.0.1"
_OFFER = re.compile(r"(\d{5})\.(\d{1,9})\.(\d{1,9})")
# "00002-", a sha256, "-" and 16 hexadecimal digits, such as "9f86d081884c7d65": shard, checksum and mark
_MEAN = re.compile(r"(\d{5})-([0-9a-f]{64})-[0-9a-f]{16}")
_MARK_CHARACTERS = 16
# "00000010.00000.0": step 10, published by rank 0 with claim 0; not "10.0.0"
_STATE = re.compile(r"(\d{8})\.(\d{5})\.(\d{1,9})")
# "0", and "0.1" for the next slot of the same attempt; not "0."
_OUTCOME = re.compile(r"(\d{1,9})(?:\.(\d{1,9}))?")


@dataclass(frozen=True)
class Layout:
    """Builds the keys of a run's objects."""

    generation: int
    prefix: str = "g"  # all-reduces without a manager have another prefix
    run: str = ""  # the id of the run, chosen by its first replica

    def address(self, key: str) -> str:
        """Return the address that a record at this key must contain. A record that was copied from another key is
        refused.
        """
        return f"{self.run}:{key}"

    def about(self, copy: int) -> str:
        return self.key(_slot_name("about", copy))

    def key(self, *parts: str) -> str:
        return "/".join((f"{self.prefix}{self.generation:06d}", *parts))

    def round(self, step: int, *parts: str) -> str:
        return self.key("r", f"{step:08d}", *parts)

    def offer(self, step: int, offer: OfferId) -> str:
        return self.round(step, "offer", str(offer))

    def shards(self, step: int, *parts: str) -> str:
        return self.key("d", f"{step:08d}", *parts)

    def shard(self, step: int, offer: OfferId, shard: int) -> str:
        return self.shards(step, str(offer), f"{shard:05d}")

    def seal(self, step: int, attempt: int) -> str:
        return self.round(step, "seal", str(attempt))

    def outcome(self, step: int, attempt: int, slot: int = 0) -> str:
        return self.round(step, "out", _slot_name(str(attempt), slot))

    def genesis(self, slot: int = 0) -> str:
        return self.key(_slot_name("genesis", slot))

    def mean(self, step: int, attempt: int, shard: int, sha256: str, mean_of: str) -> str:
        return self.round(step, "mean", str(attempt), _mean_name(shard, sha256, mean_of))

    def here(self, step: int, rank: int) -> str:
        return self.round(step, "here", f"{rank:05d}")

    def claim(self, rank: int, *number: int) -> str:
        return self.key("claims", f"{rank:05d}", *map(str, number))

    def beat(self, rank: int, claim: int) -> str:
        return self.key("beats", f"{rank:05d}.{claim}")

    def goodbye(self, *rank_and_claim: int) -> str:
        return self.key("left", *([f"{rank_and_claim[0]:05d}.{rank_and_claim[1]}"] if rank_and_claim else []))


def parse_offer(name: str) -> OfferId | None:
    """Return the offer identified by an object's name, or None if the name is not that of an offer."""
    match = _OFFER.fullmatch(name)
    return OfferId(*map(int, match.groups())) if match else None


def parse_mean(name: str, mean_of: str) -> tuple[int, str] | None:
    """Return the shard and checksum in the name of a mean of the offers `mean_of`, or None if the name is not that
    of such a mean.
    """
    match = _MEAN.fullmatch(name)
    if match is None or name != _mean_name(int(match[1]), match[2], mean_of):
        return None
    return int(match[1]), match[2]


def _mean_name(shard: int, sha256: str, mean_of: str) -> str:
    """Return the name of a shard of the mean. It ends with a mark derived from the offers from which the mean was
    computed.

    Replicas trust the names listed in a commit, so the mean of any other offers must not have a valid name.
    """
    mark = hashlib.sha256(f"{mean_of} {shard} {sha256}".encode()).hexdigest()[:_MARK_CHARACTERS]
    return f"{shard:05d}-{sha256}-{mark}"


def _slot_name(name: str, slot: int) -> str:
    """Return the name of one slot of a record. Later slots are used if the records in earlier slots are unreadable."""
    return f"{name}.{slot}" if slot else name


def parse_outcome(name: str) -> tuple[int, int] | None:
    """Return the attempt and slot in the name of an outcome, or None if the name has another format."""
    match = _OUTCOME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def parse_state(name: str) -> tuple[int, int, int] | None:
    """Return the step, rank and claim in the name of a published state, or None if the name has another format."""
    match = _STATE.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


# A record is one line of JSON with its checksum, written three times into one object, so that a flipped bit or a
# truncated object does no harm. If no line is intact, the record is unreadable, which the protocol tolerates.
#
# A record also holds the address that it was written for (`Layout.address`). A copy at another key, or in another run,
# counts as unreadable.
#
# A checksum proves that a line is intact, not that its content is valid: every field has a type and a bound, so that
# no loop, allocation or wait depends on what a writer claims.

FORMAT = 3  # format 2 had no address
COPIES = 3
MAX_RECORD_BYTES = 16 * 2**20
# Names have five digits for ranks and shards. A manifest has up to 103 bytes per shard; an outcome has up to 67 per
# shard, 120 per member and 27 per bad offer. So at these bounds three copies of either fit into MAX_RECORD_BYTES.
MAX_RANKS, MAX_SHARDS = 10**4, 5 * 10**4
MAX_COUNTER = 10**9  # claims and trials have up to nine digits in names
MAX_WEIGHT = 1e18
MAX_MAGNITUDE = 2.0**100  # in an offered vector; the sum of 2**27 such numbers is still finite in fp32
_MAX_BYTES = 2**50
_MAX_TEXT = 500
# "9f86d081..." with 64 digits; not in upper case
_SHA256 = re.compile(r"[0-9a-f]{64}")


def pack(kind: str, at: str, content: dict[str, Any]) -> bytes:
    """Return a record as bytes that are valid only at this address. Raises InputError if the record is larger than
    readers accept.
    """
    line = encode(_plain({"kind": kind, "format": FORMAT, "at": at, **content}), where=kind)
    record = COPIES * (hashlib.sha256(line).hexdigest().encode() + b" " + line + b"\n")
    if len(record) > MAX_RECORD_BYTES:
        got, expected = f"{len(record):,} bytes", f"at most {MAX_RECORD_BYTES:,}"
        fix = "Use fewer tensors, shards or replicas."
        raise InputError(explain(f"record of a {kind}", got=got, expected=expected, fix=fix))
    return record


def unpack(kind: str, at: str, data: bytes) -> dict[str, Any]:
    """Return the content of a record, taken from the first of its copies that is intact.

    Raises OldRecord for a record in the previous format, and RecordError if the bytes are not a record of this kind
    written for this address.
    """
    for line in data.split(b"\n"):
        checksum, _, text = line.partition(b" ")
        if text and hashlib.sha256(text).hexdigest().encode() == checksum:
            with as_record_error(kind):
                content = decode_object(text)
                got = (content.pop("kind", None), content.pop("format", None))
                if got != (kind, FORMAT):
                    problem = f"a {str(got[0])[:40]!r} of format {str(got[1])[:40]!r}"
                    raise OldRecord(problem) if got == (kind, 2) else ValueError(problem)
                if (written_for := content.pop("at", None)) != at:
                    raise ValueError(f"a record of {str(written_for)[:120]!r} at {at!r}")
                return content
    raise RecordError(
        explain(f"record of a {kind}", got=f"{len(data)} bytes without an intact line", expected="at least one")
    )


def unpack_manifest(at: str, data: bytes) -> Manifest:
    content = unpack_fields("manifest", at, data, "id", "base", "spec", "weight", "shards", "largest")
    with as_record_error("manifest"):
        return Manifest(
            id=_parse_offer_id(content["id"]),
            base=checked_text(content["base"]),
            spec=checked_text(content["spec"]),
            weight=_checked_number(content["weight"]),
            shards=tuple(_parse_shard(shard) for shard in checked_list(content["shards"], MAX_SHARDS)),
            largest=_checked_number(content["largest"], most=MAX_MAGNITUDE),
        )


def unpack_seal(at: str, data: bytes) -> Seal:
    content = unpack_fields("seal", at, data, "base", "spec", "num_shards", "members")
    with as_record_error("seal"):
        members = _parse_members(content["members"])
        if not members:
            raise ValueError("no members")
        num_shards = checked_int(content["num_shards"], below=MAX_SHARDS)
        return Seal(checked_text(content["base"]), checked_text(content["spec"]), num_shards, members)


def unpack_outcome(at: str, data: bytes) -> RoundOutcome:
    names = ("result", "base", "spec", "members", "means", "bad", "reason", "seconds", "num_bytes")
    content = unpack_fields("outcome", at, data, *names)
    with as_record_error("outcome"):
        result = content["result"]
        if result not in get_args(Result):
            raise ValueError(f"the result {str(result)[:40]!r}, expected one of {', '.join(get_args(Result))}")
        members = _parse_members(content["members"])
        if not members and result != "abort":
            raise ValueError(f"a {result} without members")
        return RoundOutcome(
            result=result,
            base=checked_text(content["base"]),
            spec=checked_text(content["spec"]),
            members=members,
            means=tuple(checked_sha256(checksum) for checksum in checked_list(content["means"], MAX_SHARDS)),
            bad=tuple(_parse_offer_id(offer_id) for offer_id in checked_list(content["bad"], MAX_RANKS)),
            reason=checked_text(content["reason"]),
            seconds=_checked_number(content["seconds"]),
            num_bytes=checked_int(content["num_bytes"], below=_MAX_BYTES),
        )


@contextmanager
def as_record_error(kind: str) -> Iterator[None]:
    """Convert a TypeError, ValueError or KeyError raised in the block into a RecordError that names the kind of
    record.
    """
    try:
        yield
    except RecordError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(explain(f"record of a {kind}", got=str(error)[:200], expected="valid fields")) from error


def unpack_fields(kind: str, at: str, data: bytes, *names: str) -> dict[str, Any]:
    """Return the content of a record. Raises RecordError if the record does not have exactly these fields."""
    content = unpack(kind, at, data)
    if set(content) != set(names):
        got = str(sorted(content))[:200]
        raise RecordError(explain(f"fields of a {kind}", got=got, expected=sorted(names)))
    return content


def checked_int(value: object, *, below: int) -> int:
    """Return the value. Raises ValueError unless it is an int from 0 to `below` - 1."""
    # bool is a subclass of int, so True would pass as 1.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise ValueError(f"{str(value)[:40]} instead of an integer from 0 to {below - 1}")
    return value


def checked_text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{str(value)[:40]!r} instead of a text of up to {_MAX_TEXT} characters")
    return value


def checked_sha256(value: object) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} instead of a sha256")
    return value


def _checked_number(value: object, *, most: float = MAX_WEIGHT) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]} instead of a number from 0 to {most:g}")
    return float(value)


def checked_list(value: object, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{str(value)[:40]!r} instead of a list of up to {most} items")
    return value


def _parse_offer_id(value: object) -> OfferId:
    rank, claim, trial = checked_list(value, 3)
    return OfferId(
        checked_int(rank, below=MAX_RANKS), *(checked_int(number, below=MAX_COUNTER) for number in (claim, trial))
    )


def _parse_shard(value: Any) -> Shard:
    if not isinstance(value, dict) or set(value) != {"bytes", "sha256"}:
        raise ValueError(f"{str(value)[:40]!r} instead of a shard")
    return Shard(checked_int(value["bytes"], below=_MAX_BYTES), checked_sha256(value["sha256"]))


def _parse_members(value: object) -> tuple[Member, ...]:
    """Return the members of a seal or outcome.

    Raises ValueError unless they are sorted by rank and each rank occurs only once, because an offer could otherwise be
    counted twice.
    """
    members: list[Member] = []
    for offer_id, manifest, weight in (checked_list(entry, 3) for entry in checked_list(value, MAX_RANKS)):
        members.append(Member(_parse_offer_id(offer_id), checked_sha256(manifest), _checked_number(weight)))
        if len(members) > 1 and members[-2].id.rank >= members[-1].id.rank:
            raise ValueError(f"rank {members[-1].id.rank} after rank {members[-2].id.rank}")
    return tuple(members)
