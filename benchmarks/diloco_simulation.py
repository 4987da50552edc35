"""Simulate a run of many replicas: its time, its traffic, the cost of killed machines, and the price of it all.

`simulate_bucket` simulates the protocol of `composer_replication.diloco.rounds` over an object store, and
`simulate_direct` a ring of machines that reach each other, as with torchft's manager. The defaults of `Bucket` are
typical values for object stores, not measured here; docs/concepts/diloco-scale.md says which value comes from where.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count

__all__ = ["Bucket", "Machine", "Scenario", "SimulatedRun", "Spot", "Work", "simulate_bucket", "simulate_direct"]


MB = 1e6
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a replica does in a round, and how much it sends."""

    payload_bytes: float
    """Bytes of one replica's offer; the mean has the same size."""
    state_bytes: float
    """Bytes of the global state that a replica loads when it joins or comes back."""
    step_s: float = 6.0
    sync_every: int = 100
    spread: float = 0.01
    """Variation between replicas in the training time of a round: standard deviation as a share of the mean."""
    num_rounds: int = 20

    @property
    def train_s(self) -> float:
        return self.step_s * self.sync_every


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A replica's machine: its network, and how fast it encodes and decodes payloads."""

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
    """Latency of one request, without its bytes."""
    connection_mb_s: float = 60.0
    total_mb_s: float = 100_000.0
    """For all replicas together: what the store, or the disk behind it, can deliver."""
    connections: int = 4
    shard_bytes: int = 64 * 2**20
    poll_s: float = 1.0
    grace_s: float = 30.0
    quorum: float = 0.5
    dollars_per_million_puts: float = 5.0
    dollars_per_million_gets: float = 0.4
    dollars_per_gb_out: float = 0.0

    def num_shards(self, payload_bytes: float, parties: int) -> int:
        """Return a multiple of the parties. `rounds.shards.shard_sizes` makes smaller shards, to save memory."""
        least_shards = max(parties, -(-int(payload_bytes) // self.shard_bytes))
        return -(-least_shards // parties) * parties

    def transfer_s(self, num_bytes: float, *, requests_s: float, line_mb_s: float, parties: int) -> float:
        """Return the seconds of a transfer and its requests, while all parties make the same transfer."""
        speed = min(line_mb_s, self.connections * self.connection_mb_s, self.total_mb_s / parties)
        return num_bytes / MB / speed + requests_s / self.connections


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Machines that are taken away and come back."""

    kills_per_hour: float = 0.0
    """Of one machine."""
    return_s: float = 180.0
    heartbeat_s: float = 5.0
    """How long a ring takes to notice that a member is gone."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that a simulation needs."""

    replicas: int
    work: Work
    machine: Machine
    bucket: Bucket = field(default_factory=Bucket)
    spot: Spot = field(default_factory=Spot)
    seed: int = 0


GB = 1e9


@dataclass(kw_only=True)
class SimulatedRun:
    """The result of a simulation: sums over all replicas and rounds."""

    scenario: Scenario
    wall_s: float = 0.0
    rounds: int = 0
    offers: int = 0
    """Replicas' training rounds that went into a committed mean."""
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    puts: float = 0.0
    gets: float = 0.0
    kills: int = 0
    lost_rounds: int = 0
    """Rounds that all replicas trained for and that were not committed."""

    @property
    def round_s(self) -> float:
        return self.wall_s / max(1, self.rounds)

    @property
    def waiting_s(self) -> float:
        """Seconds per round that are not training."""
        return self.round_s - self.scenario.work.train_s

    @property
    def useful_share(self) -> float:
        """Training that counted, as a share of the paid time of all machines."""
        return self.offers * self.scenario.work.train_s / (self.scenario.replicas * self.wall_s)

    @property
    def bytes_per_replica_and_round(self) -> tuple[float, float]:
        parts = self.scenario.replicas * max(1, self.rounds)
        return self.sent_bytes / parts, self.received_bytes / parts

    @property
    def machine_dollars(self) -> float:
        return self.scenario.replicas * self.wall_s / HOUR_S * self.scenario.machine.dollars_per_hour

    @property
    def bucket_dollars(self) -> float:
        bucket = self.scenario.bucket
        requests = self.puts * bucket.dollars_per_million_puts + self.gets * bucket.dollars_per_million_gets
        return requests / 1e6 + self.received_bytes / GB * bucket.dollars_per_gb_out


# Events in the order of their time, and processes that wait for a time or a signal. A process is a generator: it yields
# seconds to sleep, or a Signal to wait for. Events at the same time run in the order in which they were scheduled, so
# that a seed determines the run.

Process = Generator["float | Signal", None, None]


class Signal:
    """Something that happens once; processes that wait for it continue when it does."""

    def __init__(self) -> None:
        self.happened = False
        self.waiting: list[Callable[[], None]] = []


class SimulatedClock:
    """The time of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ended: set[int] = set()

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event; never before now."""
        heapq.heappush(self._events, (max(seconds, self.now), next(self._order), event))

    def start(self, process: Process) -> int:
        """Start a process and return its number, for `end`."""
        number = next(self._order)

        def step() -> None:
            if number in self._ended:
                return
            # None: the process has returned, so it is not scheduled again.
            wait = next(process, None)
            if isinstance(wait, Signal):
                if wait.happened:
                    self.at(self.now, step)
                else:
                    wait.waiting.append(step)
            elif wait is not None:
                self.at(self.now + wait, step)

        self.at(self.now, step)
        return number

    def end(self, number: int) -> None:
        """End a process, wherever it waits."""
        self._ended.add(number)

    def happen(self, signal: Signal) -> None:
        signal.happened = True
        for step in signal.waiting:
            self.at(self.now, step)
        signal.waiting.clear()

    def run(self, until: Callable[[], bool]) -> None:
        """Run events until `until` returns True, or none is left."""
        while self._events and not until():
            self.now, _, event = heapq.heappop(self._events)
            event()


# The same work over machines that reach each other. Nothing of a round outlives its members: one that dies breaks the
# ring, and the training of all of them in that round is lost.

_MAX_LOST_RATIO = 10


def _ring_s(scenario: Scenario, members: int) -> float:
    """Return the seconds of a reduce-scatter and an all-gather: two payloads and two messages per member."""
    work, machine = scenario.work, scenario.machine
    line = min(machine.up_mb_s, machine.down_mb_s)
    share = 2 * (members - 1) / members
    codec_s = 2 * work.payload_bytes / MB / machine.codec_mb_s
    return share * work.payload_bytes / MB / line + 2 * (members - 1) * machine.latency_s + codec_s


def simulate_direct(scenario: Scenario) -> SimulatedRun:
    """Simulate `num_rounds` rounds over a ring. It gives up when ten times as many rounds were lost."""
    random_numbers = random.Random(scenario.seed)
    outcome = SimulatedRun(scenario=scenario)
    work, spot = scenario.work, scenario.spot
    # When each replica is available again.
    now, available_at = 0.0, [0.0] * scenario.replicas
    kill_at = [_next_kill(random_numbers, scenario, 0.0) for _ in available_at]
    while outcome.rounds < work.num_rounds and outcome.lost_rounds < _MAX_LOST_RATIO * work.num_rounds:
        slowest = max(max(0.0, random_numbers.gauss(work.train_s, work.spread * work.train_s)) for _ in available_at)
        present = _reap(random_numbers, outcome, available_at, kill_at, until=now + slowest)
        now += slowest
        members = [rank for rank in present if available_at[rank] <= now - slowest]
        if not members:
            now = min(available_at)
            continue
        ring_s = _ring_s(scenario, len(members))
        broken = any(kill_at[rank] < now + ring_s for rank in members)
        _reap(random_numbers, outcome, available_at, kill_at, until=now + ring_s)
        share = 2 * (len(members) - 1) * work.payload_bytes
        outcome.sent_bytes += share
        outcome.received_bytes += share
        now += ring_s + (spot.heartbeat_s if broken else 0.0)
        if broken:
            outcome.lost_rounds += 1
        else:
            outcome.rounds += 1
            outcome.offers += len(members)
    outcome.wall_s = now
    return outcome


def _reap(
    random_numbers: random.Random, run: SimulatedRun, available_at: list[float], kill_at: list[float], *, until: float
) -> list[int]:
    """Kill replicas whose time has come, and return those available at the end. A heal copies the state from a peer."""
    scenario = run.scenario
    heal_s = scenario.work.state_bytes / MB / min(scenario.machine.up_mb_s, scenario.machine.down_mb_s)
    for rank, killed_at in enumerate(kill_at):
        if killed_at < until:
            run.kills += 1
            run.received_bytes += scenario.work.state_bytes
            available_at[rank] = killed_at + scenario.spot.return_s + heal_s
            kill_at[rank] = _next_kill(random_numbers, scenario, available_at[rank])
    return [rank for rank, available in enumerate(available_at) if available <= until]


def _next_kill(random_numbers: random.Random, scenario: Scenario, after: float) -> float:
    rate = scenario.spot.kills_per_hour / HOUR_S
    return after + random_numbers.expovariate(rate) if rate else float("inf")


# The protocol of `rounds/` as processes over a bucket: offer, seal, reduce, outcome, fetch. What is the same for all
# replicas is a formula (a transfer); what depends on who is available when is an event (seals, graces, kills, returns).
# A dead member costs one grace, or two if it dies between its offer and its reduction, and is not expected afterwards;
# its offer still counts.

_RECORD_BYTES = 110.0
"""Bytes of a shard's entry in a manifest and in an outcome."""


@dataclass
class _SimulatedRound:
    offers: set[int] = field(default_factory=set)
    members: frozenset[int] = frozenset()
    reduced: set[int] = field(default_factory=set)
    sealed: Signal = field(default_factory=Signal)
    committed: Signal = field(default_factory=Signal)
    grace_runs: bool = False


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.clock = scenario, SimulatedClock()
        self.outcome = SimulatedRun(scenario=scenario)
        self.random = random.Random(scenario.seed)
        self.rounds = [_SimulatedRound() for _ in range(scenario.work.num_rounds + 1)]
        self.current = 0
        self.alive = set(range(scenario.replicas))
        self.expected = set(self.alive)
        self.processes: dict[int, int] = {}
        work, bucket = scenario.work, scenario.bucket
        self.num_shards = bucket.num_shards(work.payload_bytes, scenario.replicas)

    def finished(self) -> bool:
        return self.current >= self.scenario.work.num_rounds

    # What a replica does.

    def replica(self, rank: int, *, heals: bool) -> Process:
        work, clock = self.scenario.work, self.clock
        if heals:
            yield self._fetched(work.state_bytes, work.state_bytes / self.scenario.bucket.shard_bytes)
            self.expected.add(rank)
            # The replica joins the others' round without weight, and begins the next one with them.
            joined = self.current
            yield self.rounds[joined].committed
            yield self._fetched(work.payload_bytes, self.num_shards + 2)
            self._advance(joined)
        while not self.finished():
            step = self.current
            yield max(0.0, self.random.gauss(work.train_s, work.spread * work.train_s))
            # If the step has moved, the others committed without this replica, and its training is lost.
            if step == self.current:
                yield self._sent(work.payload_bytes, self.num_shards + 1)
                self._offer(rank, step)
            round = self.rounds[step]
            yield round.sealed
            yield self._noticed()
            if rank in round.members:
                yield self._reduce_s(len(round.members))
                round.reduced.add(rank)
                self._commit_if_whole(step)
            else:
                # Late: it follows the commit, and announces that it is back.
                self.expected.add(rank)
            yield round.committed
            yield self._noticed()
            yield self._fetched(work.payload_bytes, self.num_shards + 2)
            # Scheduled instead of called, so that events at the same time that are already scheduled come first.
            clock.at(clock.now, lambda step=step: self._advance(step))
            yield 0.0

    def _offer(self, rank: int, step: int) -> None:
        round = self.rounds[step]
        if round.sealed.happened:
            return
        round.offers.add(rank)
        if round.offers >= self.expected:
            self._seal(step)
        elif len(round.offers) >= self.scenario.bucket.quorum * self.scenario.replicas and not round.grace_runs:
            round.grace_runs = True
            self.clock.at(self.clock.now + self.scenario.bucket.grace_s, lambda: self._seal(step))

    def _seal(self, step: int) -> None:
        round = self.rounds[step]
        if not round.sealed.happened:
            round.members = frozenset(round.offers)
            self.expected = set(round.offers) & self.alive
            self._count(puts=1)
            self.clock.happen(round.sealed)
            self._take_over_from_dead(step)

    def _commit_if_whole(self, step: int) -> None:
        round = self.rounds[step]
        if round.reduced >= round.members and not round.committed.happened:
            self._count(puts=1)
            self.outcome.offers += len(round.members)
            self.outcome.rounds += 1
            self.clock.happen(round.committed)

    def _take_over_from_dead(self, step: int) -> None:
        """Let the other members do the shards of members that died before they reduced theirs, after a grace."""
        round = self.rounds[step]
        dead = round.members - self.alive - round.reduced
        if round.sealed.happened and not round.committed.happened and dead:
            own_s = self._reduce_s(len(round.members))

            def others_did() -> None:
                round.reduced.update(dead)
                self._commit_if_whole(step)

            self.clock.at(self.clock.now + self.scenario.bucket.grace_s + own_s, others_did)

    def _advance(self, step: int) -> None:
        self.current = max(self.current, step + 1)

    # Kills and returns.

    def reaper(self, rank: int) -> Process:
        spot = self.scenario.spot
        while spot.kills_per_hour:
            yield self.random.expovariate(spot.kills_per_hour / HOUR_S)
            self.clock.end(self.processes[rank])
            self.alive.discard(rank)
            self.outcome.kills += 1
            self._take_over_from_dead(self.current)
            yield spot.return_s
            self.alive.add(rank)
            self.processes[rank] = self.clock.start(self.replica(rank, heals=True))

    # Time, bytes and requests.

    def _sent(self, num_bytes: float, requests: float) -> float:
        self._count(sent=num_bytes, puts=requests)
        machine = self.scenario.machine
        requests_s = requests * self.scenario.bucket.put_s
        return self._codec_s(num_bytes) + self._transfer_s(num_bytes, requests_s, machine.up_mb_s)

    def _fetched(self, num_bytes: float, requests: float) -> float:
        self._count(received=num_bytes, gets=requests)
        machine = self.scenario.machine
        requests_s = requests * self.scenario.bucket.get_s
        return self._codec_s(num_bytes) + self._transfer_s(num_bytes, requests_s, machine.down_mb_s)

    def _reduce_s(self, members: int) -> float:
        """Return the seconds to read my shards of all other offers, and to write their mean."""
        payload = self.scenario.work.payload_bytes
        other_bytes = payload * (members - 1) / members
        mine = self.num_shards / members
        return self._fetched(other_bytes, mine * (members - 1)) + self._sent(payload / members, mine)

    def _noticed(self) -> float:
        """Return the seconds until a poll notices a change and has read it. Pauses grow to `poll_s`."""
        bucket, replicas = self.scenario.bucket, self.scenario.replicas
        manifests = replicas * self.num_shards * _RECORD_BYTES
        self._count(received=manifests / 2, gets=replicas / 2 + 2)
        read_s = self._transfer_s(manifests / 2, (replicas / 2 + 2) * bucket.get_s, self.scenario.machine.down_mb_s)
        return self.random.uniform(0.0, bucket.poll_s / 2) + read_s

    def _transfer_s(self, num_bytes: float, requests_s: float, line_mb_s: float) -> float:
        parties = max(1, len(self.alive))
        bucket = self.scenario.bucket
        return bucket.transfer_s(num_bytes, requests_s=requests_s, line_mb_s=line_mb_s, parties=parties)

    def _codec_s(self, num_bytes: float) -> float:
        return num_bytes / 1e6 / self.scenario.machine.codec_mb_s

    def _count(self, *, sent: float = 0, received: float = 0, puts: float = 0, gets: float = 0) -> None:
        self.outcome.sent_bytes += sent
        self.outcome.received_bytes += received
        self.outcome.puts += puts
        self.outcome.gets += gets


def simulate_bucket(scenario: Scenario) -> SimulatedRun:
    """Simulate `num_rounds` rounds over a bucket."""
    run = _Run(scenario)
    for rank in range(scenario.replicas):
        run.processes[rank] = run.clock.start(run.replica(rank, heals=False))
        run.clock.start(run.reaper(rank))
    run.clock.run(run.finished)
    run.outcome.wall_s = run.clock.now
    return run.outcome
