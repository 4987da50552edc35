"""The small objects of a round: what a replica offers, which offers count, how the attempt ended; bytes and places.

A record is one line of JSON with its checksum, written three times into one object: a flipped bit or a cut-off tail is
read past. Where no line is left, the record is unreadable, and the protocol says what follows.

Everything lies below its generation: nothing of another one is listed or read.

    g000000/about                          what the run is: world, payload, shapes
    g000000/claims/RANK/N                  the N-th process that holds a rank; g000000/beats/RANK.N says that it lives
    g000000/left/RANK.N                    it said goodbye
    g000000/r/STEP/here/RANK               it was not in the round before and is back
    g000000/r/STEP/offer/RANK.N.TRIAL      a manifest; its shards are g000000/d/STEP/RANK.N.TRIAL/SHARD
    g000000/r/STEP/seal/ATTEMPT            which offers count
    g000000/r/STEP/mean/ATTEMPT/SHARD-SHA  a shard of the mean, named by its checksum
    g000000/r/STEP/out/ATTEMPT             how the attempt ended
    g000000/states/STEP.RANK.N             a published state; its chunks are g000000/statedata/STEP.RANK.N/CHUNK
    g000000/wanted/RANK                    somebody needs a newer state

Seals and outcomes are never deleted: whoever wakes up late finds that its round is over.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ComposerError, explain

FORMAT = 1
COPIES = 3
MOST_RECORD_BYTES = 16 * 2**20
_OFFER = re.compile(r"(\d{5})\.(\d{1,9})\.(\d{1,9})")
_MEAN = re.compile(r"(\d{1,6})/(\d{5})-([0-9a-f]{64})")
_STATE = re.compile(r"(\d{8})\.(\d{5})\.(\d{1,9})")

Result = Literal["commit", "abort", "void"]


class RecordError(ComposerError, ValueError):
    """A record of the protocol cannot be read."""


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
class Outcome:
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


def next_base(base: str, step: int, outcome: Outcome) -> str:
    """The history after a commit: equal at two replicas exactly when they followed the same commits."""
    return digest({"before": base, "step": step, "means": outcome.means, "members": outcome.members})


def digest(value: object) -> str:
    return hashlib.sha256(encode(_plain(value), where="digest")).hexdigest()


def pack(kind: str, content: dict[str, Any]) -> bytes:
    """The bytes of a record."""
    line = encode(_plain({"kind": kind, "format": FORMAT, **content}), where=kind)
    return COPIES * (hashlib.sha256(line).hexdigest().encode() + b" " + line + b"\n")


def unpack(kind: str, data: bytes) -> dict[str, Any]:
    """The content of a record, from the first of its lines that is whole."""
    for line in data.split(b"\n"):
        checksum, _, text = line.partition(b" ")
        if text and hashlib.sha256(text).hexdigest().encode() == checksum:
            content = decode_object(text)
            got = (content.pop("kind", None), content.pop("format", None))
            if got != (kind, FORMAT):
                raise RecordError(explain("record", got=got, expected=(kind, FORMAT)))
            return content
    raise RecordError(explain(f"record of a {kind}", got=f"{len(data)} bytes without a whole line", expected="one"))


def _plain(value: Any) -> Any:
    """Named tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def pack_manifest(manifest: Manifest) -> bytes:
    return pack("manifest", asdict(manifest))


def pack_seal(seal: Seal) -> bytes:
    return pack("seal", asdict(seal))


def pack_outcome(outcome: Outcome) -> bytes:
    return pack("outcome", asdict(outcome))


def unpack_manifest(data: bytes) -> Manifest:
    content = _fields(data, "manifest", "id", "base", "spec", "weight", "shards")
    with _refusing("manifest"):
        shards = tuple(Shard(int(each["bytes"]), str(each["sha256"])) for each in content["shards"])
        weight = float(content["weight"])
        if not (0 <= weight < float("inf")) or any(shard.bytes < 0 for shard in shards):
            raise ValueError(f"weight {weight} or a negative size")
        return Manifest(OfferId(*content["id"]), str(content["base"]), str(content["spec"]), weight, shards)


def unpack_seal(data: bytes) -> Seal:
    content = _fields(data, "seal", "base", "spec", "num_shards", "members")
    with _refusing("seal"):
        return Seal(content["base"], content["spec"], int(content["num_shards"]), _members(content["members"]))


def unpack_outcome(data: bytes) -> Outcome:
    content = _fields(
        data, "outcome", "result", "base", "spec", "members", "means", "bad", "reason", "seconds", "num_bytes"
    )
    with _refusing("outcome"):
        return Outcome(
            result=content["result"],
            base=content["base"],
            spec=content["spec"],
            members=_members(content["members"]),
            means=tuple(content["means"]),
            bad=tuple(OfferId(*each) for each in content["bad"]),
            reason=content["reason"],
            seconds=float(content["seconds"]),
            num_bytes=int(content["num_bytes"]),
        )


@contextmanager
def _refusing(kind: str) -> Iterator[None]:
    """A checksum says that somebody wrote the content, not that it is a record: its fields may have any type."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(explain(f"record of a {kind}", got=error, expected="its fields")) from error


def _members(content: list[Any]) -> tuple[Member, ...]:
    return tuple(Member(OfferId(*ident), str(manifest), float(weight)) for ident, manifest, weight in content)


def _fields(data: bytes, kind: str, *names: str) -> dict[str, Any]:
    content = unpack(kind, data)
    if set(content) != set(names):
        raise RecordError(explain(f"fields of a {kind}", got=sorted(content), expected=sorted(names)))
    return content


@dataclass(frozen=True)
class Layout:
    generation: int
    family: str = "g"  # all-reduces without a manager lie beside the runs, not among them

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

    def outcome(self, step: int, attempt: int) -> str:
        return self.round(step, "out", str(attempt))

    def mean(self, step: int, attempt: int, shard: int, sha256: str) -> str:
        return self.round(step, "mean", str(attempt), f"{shard:05d}-{sha256}")

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


def parse_mean(name: str) -> tuple[int, int, str] | None:
    """Attempt, shard and checksum."""
    match = _MEAN.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def parse_state(name: str) -> tuple[int, int, int] | None:
    """Step, rank and claim of its publisher."""
    match = _STATE.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
