"""The small objects of a round: what a replica offers, which offers count, how the attempt ended."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from composer_replication.canonical_json import encode
from composer_replication.errors import ComposerError

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
    return hashlib.sha256(encode(plain(value), where="digest")).hexdigest()


def plain(value: Any) -> Any:
    """Named tuples as lists."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value
