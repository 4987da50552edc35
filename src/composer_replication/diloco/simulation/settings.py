"""The work, the machines, the bucket, the kills, and what they cost.

The defaults of `Bucket` are what object stores are known for, not what was measured here; docs/concepts/diloco-scale.md
says which figure is which, and a run may bring its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MB = 1e6
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a replica does in a round, and what it sends of it."""

    payload_bytes: float
    """Of one replica's offer; the mean has the same size."""
    state_bytes: float
    """Of the global state that a replica loads when it joins or comes back."""
    step_s: float = 6.0
    sync_every: int = 100
    spread: float = 0.01
    """How much replicas differ in the time of a round's training: the deviation as a share of it."""
    num_rounds: int = 20

    @property
    def train_s(self) -> float:
        return self.step_s * self.sync_every


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A replica's machine: its line, and how fast it turns numbers into checked bytes and back."""

    up_mb_s: float
    down_mb_s: float
    latency_s: float = 0.03
    codec_mb_s: float = 400.0
    dollars_per_hour: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """An object store as one client sees it, and the protocol's settings."""

    put_s: float = 0.05
    get_s: float = 0.03
    """Of one request, without its bytes."""
    connection_mb_s: float = 60.0
    total_mb_s: float = 100_000.0
    """Of all replicas together: what the store, or the disk behind it, gives."""
    connections: int = 4
    shard_bytes: int = 64 * 2**20
    poll_s: float = 1.0
    grace_s: float = 30.0
    quorum: float = 0.5
    dollars_per_million_puts: float = 5.0
    dollars_per_million_gets: float = 0.4
    dollars_per_gb_out: float = 0.0

    def num_shards(self, payload_bytes: float, parties: int) -> int:
        """A multiple of the parties; `rounds.vectors.cut` cuts large vectors finer, for the sake of memory."""
        least_shards = max(parties, -(-int(payload_bytes) // self.shard_bytes))
        return -(-least_shards // parties) * parties

    def transfer_s(self, num_bytes: float, *, requests_s: float, line_mb_s: float, parties: int) -> float:
        """So many bytes in requests that take so long one after the other, while all parties do the same."""
        speed = min(line_mb_s, self.connections * self.connection_mb_s, self.total_mb_s / parties)
        return num_bytes / MB / speed + requests_s / self.connections


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Machines that are taken away, and come back."""

    kills_per_hour: float = 0.0
    """Of one machine."""
    return_s: float = 180.0
    heartbeat_s: float = 5.0
    """How long a ring takes to see that a member is gone."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    replicas: int
    work: Work
    machine: Machine
    bucket: Bucket = field(default_factory=Bucket)
    spot: Spot = field(default_factory=Spot)
    seed: int = 0
