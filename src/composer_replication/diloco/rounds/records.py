"""The records of a round, their bytes, and where they lie.

kinds    what a replica offers, which offers count, how the attempt ended
packing  a record as bytes and back, within bounds
layout   the keys of a run, and which names are the protocol's
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ComposerError, InputError, explain

# The small objects of a round: what a replica offers, which offers count, how the attempt ended.

Result = Literal["commit", "abort", "void"]


class RecordError(ComposerError, ValueError):
    """A record of the protocol cannot be read."""


class OldRecord(RecordError):
    """A record was written by an earlier version of this package, in a format that is not read any more."""


class OfferId(NamedTuple):
    """One contribution: of a rank, by the process that holds the rank's claim, the trial-th in its round."""

    rank: int
    claim: int
    trial: int

    def __str__(self) -> str:
        return f"{self.rank:05d}.{self.claim}.{self.trial}"


@dataclass(frozen=True)
class Shard:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a replica offers to a round. An offer without weight has no shards: its replica is there, and was healed."""

    id: OfferId
    base: str  # the history of commits that its weights come from
    spec: str  # digest of shapes, dtypes, payload and number of shards
    weight: float
    shards: tuple[Shard, ...] = ()
    largest: float = 0.0  # magnitude in its vector


class Member(NamedTuple):
    id: OfferId
    manifest: str  # sha256 of the manifest's record
    weight: float


@dataclass(frozen=True)
class Seal:
    """Which offers count in an attempt. Whoever creates it first has decided."""

    base: str
    spec: str
    num_shards: int
    members: tuple[Member, ...]  # by rank

    @property
    def weight(self) -> float:
        return sum(member.weight for member in self.members)


@dataclass(frozen=True)
class RoundOutcome:
    """How an attempt ended. Whoever creates it first has decided; a commit holds all that is needed to follow it."""

    result: Result
    base: str
    spec: str = ""
    members: tuple[Member, ...] = ()
    means: tuple[str, ...] = ()  # sha256 of each shard of the mean
    bad: tuple[OfferId, ...] = ()  # offers that could not be read
    reason: str = ""
    seconds: float = 0.0  # that its writer waited; for those who watch
    num_bytes: int = 0  # of the offers that count

    def spent(self) -> frozenset[OfferId]:
        """Offers that no later attempt of the round may take."""
        return frozenset(self.bad if self.result == "abort" else (member.id for member in self.members))


def next_base(base: str, step: int, outcome: RoundOutcome) -> str:
    """The history after a commit: equal at two replicas exactly when they followed the same commits."""
    return digest({"before": base, "step": step, "means": outcome.means, "members": outcome.members})


def digest(value: object) -> str:
    return hashlib.sha256(encode(plain(value), where="digest")).hexdigest()


def plain(value: Any) -> Any:
    """Named tuples as lists."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


# Where the objects of a run lie, and which names are the protocol's.
#
# Everything lies below its generation: nothing of another one is listed or read.
#
#     g000000/about, about.1, about.2        what the run is: its id, world, payload, shapes; most of the copies count
#     g000000/claims/RANK/N                  the N-th process that holds a rank; g000000/beats/RANK.N says that it lives
#     g000000/left/RANK.N                    it said goodbye: at which step, and whether it had finished
#     g000000/r/STEP/here/RANK               it was not in the round before and is back
#     g000000/r/STEP/offer/RANK.N.TRIAL      a manifest; its shards are g000000/d/STEP/RANK.N.TRIAL/SHARD
#     g000000/r/STEP/seal/ATTEMPT            which offers count
#     g000000/r/STEP/mean/ATTEMPT/SHARD-SHA-MARK  a shard of the mean: its checksum, and a mark of the offers it is of
#     g000000/r/STEP/out/ATTEMPT             how the attempt ended; ATTEMPT.1, ATTEMPT.2, ... where that is unreadable
#     g000000/genesis                        which state is the run's first; genesis.1, ... where that is unreadable
#     g000000/states/STEP.RANK.N             a published state; its chunks are g000000/statedata/STEP.RANK.N/CHUNK
#     g000000/sums/STEP                      a digest of the first member's weights at that step
#     g000000/wanted/RANK                    somebody needs a newer state
#
# A record holds its address: the id of its run and its own key. `wanted` is an empty mark, which costs a state that is
# published early. Shards, means and chunks are tensors, with checksums in the records that name them.
#
# Seals and outcomes are never deleted: whoever wakes up late finds that its round is over.

_OFFER = re.compile(r"(\d{5})\.(\d{1,9})\.(\d{1,9})")
_MEAN = re.compile(r"(\d{5})-([0-9a-f]{64})-[0-9a-f]{16}")
_MARK_CHARACTERS = 16
_STATE = re.compile(r"(\d{8})\.(\d{5})\.(\d{1,9})")
_OUTCOME = re.compile(r"(\d{1,9})(?:\.(\d{1,9}))?")  # "0", "0.1"


@dataclass(frozen=True)
class Layout:
    generation: int
    family: str = "g"  # all-reduces without a manager lie beside the runs, not among them
    run: str = ""  # the id of the run, which its first replica drew

    def address(self, key: str) -> str:
        """Return what a record at this key holds, so that a copy anywhere else is refused."""
        return f"{self.run}:{key}"

    def about(self, copy: int) -> str:
        return self.key(_slotted("about", copy))

    def key(self, *parts: str) -> str:
        return "/".join((f"{self.family}{self.generation:06d}", *parts))

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
        return self.round(step, "out", _slotted(str(attempt), slot))

    def genesis(self, slot: int = 0) -> str:
        return self.key(_slotted("genesis", slot))

    def mean(self, step: int, attempt: int, shard: int, sha256: str, mean_of: str) -> str:
        return self.round(step, "mean", str(attempt), _mean_name(shard, sha256, mean_of))

    def here(self, step: int, rank: int) -> str:
        return self.round(step, "here", f"{rank:05d}")

    def claim(self, rank: int, *number: int) -> str:
        return self.key("claims", f"{rank:05d}", *map(str, number))

    def beat(self, rank: int, claim: int) -> str:
        return self.key("beats", f"{rank:05d}.{claim}")

    def left(self, *rank_and_claim: int) -> str:
        return self.key("left", *([f"{rank_and_claim[0]:05d}.{rank_and_claim[1]}"] if rank_and_claim else []))


def parse_offer(name: str) -> OfferId | None:
    """The offer that a name stands for; None for a foreign object."""
    match = _OFFER.fullmatch(name)
    return OfferId(*map(int, match.groups())) if match else None


def parse_mean(name: str, mean_of: str) -> tuple[int, str] | None:
    """Shard and checksum of a mean of these offers; None for a foreign object."""
    match = _MEAN.fullmatch(name)
    if match is None or name != _mean_name(int(match[1]), match[2], mean_of):
        return None
    return int(match[1]), match[2]


def _mean_name(shard: int, sha256: str, mean_of: str) -> str:
    """A commit takes the names that it finds, so no name may come about but by averaging the offers of the seal."""
    mark = hashlib.sha256(f"{mean_of} {shard} {sha256}".encode()).hexdigest()[:_MARK_CHARACTERS]
    return f"{shard:05d}-{sha256}-{mark}"


def _slotted(name: str, slot: int) -> str:
    """Return where a record goes whose first `slot` places hold something unreadable."""
    return f"{name}.{slot}" if slot else name


def parse_outcome(name: str) -> tuple[int, int] | None:
    """Return attempt and slot of an outcome; None for a foreign object."""
    match = _OUTCOME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def parse_state(name: str) -> tuple[int, int, int] | None:
    """Step, rank and claim of its publisher."""
    match = _STATE.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


# The bytes of records, and their readers: whatever is not exactly such a record is a RecordError.
#
# A record is one line of JSON with its checksum, written three times into one object: a flipped bit or a cut-off tail
# is read past. Where no line is left, the record is unreadable, and the protocol says what follows.
#
# A record also holds the address that it was written for (`Layout.address`: its run and its key, and so its step,
# attempt, rank and claim). A copy at any other key, or in any other run, is as unreadable as damaged bytes.
#
# A checksum says that somebody wrote the line, not that it is a record: each field has a type and a bound of its own,
# so that nothing is counted up to, allocated or waited for on a writer's word.

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


def pack_outcome(at: str, outcome: RoundOutcome) -> bytes:
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


def unpack_outcome(at: str, data: bytes) -> RoundOutcome:
    names = ("result", "base", "spec", "members", "means", "bad", "reason", "seconds", "num_bytes")
    content = fields_of("outcome", at, data, *names)
    with refusing("outcome"):
        result = content["result"]
        if result not in get_args(Result):
            raise ValueError(f"the result {str(result)[:40]!r}, which is none of {', '.join(get_args(Result))}")
        members = _members(content["members"])
        if not members and result != "abort":
            raise ValueError(f"a {result} without members")
        return RoundOutcome(
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
