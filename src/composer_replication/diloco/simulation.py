"""The work, the machines, the bucket, the kills, and what they cost.

The defaults of `Bucket` are what object stores are known for, not what was measured here; docs/concepts/diloco-scale.md
says which figure is which, and a run may bring its own.
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


# What came of a simulated run.

GB = 1e9


@dataclass(kw_only=True)
class SimulatedRun:
    """Sums over all replicas and rounds."""

    scenario: Scenario
    wall_s: float = 0.0
    rounds: int = 0
    offers: int = 0
    """Rounds of training of one replica that got into a committed mean."""
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
        """Of a round: everything that is not training."""
        return self.round_s - self.scenario.work.train_s

    @property
    def useful_share(self) -> float:
        """Training that counted, of the time that all machines were paid for."""
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


# Events in the order of their time, and processes that wait for a time or for a signal.
#
# A process is a generator: it yields seconds to sleep, or a Signal to wait for. Equal times run in the order they were
# asked for, so that a run with one seed is one run.

Process = Generator["float | Signal", None, None]


class Signal:
    """Something that happens once; who waits for it goes on when it does."""

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
        """Do something at a time; never before now."""
        heapq.heappush(self._events, (max(seconds, self.now), next(self._order), event))

    def start(self, process: Process) -> int:
        """Run a process; the number is for `end`."""
        number = next(self._order)

        def step() -> None:
            if number in self._ended:
                return
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
        """A process that does nothing any more, wherever it waits."""
        self._ended.add(number)

    def happen(self, signal: Signal) -> None:
        signal.happened = True
        for step in signal.waiting:
            self.at(self.now, step)
        signal.waiting.clear()

    def run(self, until: Callable[[], bool]) -> None:
        """Until something is so, or nothing is left to happen."""
        while self._events and not until():
            self.now, _, event = heapq.heappop(self._events)
            event()


# The same work over machines that reach each other: a ring of all members, as torchft's manager makes one.
#
# Nothing of a round outlives its members: one that dies in a ring breaks it, and what all had trained is void.

_GIVEN_UP = 10


def _ring_s(scenario: Scenario, members: int) -> float:
    """A reduce-scatter and an all-gather: two payloads through every line, two messages for each member."""
    work, machine = scenario.work, scenario.machine
    line = min(machine.up_mb_s, machine.down_mb_s)
    share = 2 * (members - 1) / members
    codec_s = 2 * work.payload_bytes / MB / machine.codec_mb_s
    return share * work.payload_bytes / MB / line + 2 * (members - 1) * machine.latency_s + codec_s


def simulate_direct(scenario: Scenario) -> SimulatedRun:
    """A run of `num_rounds` rounds over a ring; it is given up when ten times as many were lost."""
    drawn = random.Random(scenario.seed)  # noqa: S311 - draws of a simulation
    outcome = SimulatedRun(scenario=scenario)
    work, spot = scenario.work, scenario.spot
    now, back = 0.0, [0.0] * scenario.replicas  # when each one is there again
    fails = [_next_kill(drawn, scenario, 0.0) for _ in back]
    while outcome.rounds < work.num_rounds and outcome.lost_rounds < _GIVEN_UP * work.num_rounds:
        slowest = max(max(0.0, drawn.gauss(work.train_s, work.spread * work.train_s)) for _ in back)
        here = _reap(drawn, outcome, back, fails, until=now + slowest)
        now += slowest
        members = [rank for rank in here if back[rank] <= now - slowest]
        if not members:
            now = min(back)
            continue
        ring = _ring_s(scenario, len(members))
        broken = any(fails[rank] < now + ring for rank in members)
        _reap(drawn, outcome, back, fails, until=now + ring)
        share = 2 * (len(members) - 1) * work.payload_bytes
        outcome.sent_bytes += share
        outcome.received_bytes += share
        now += ring + (spot.heartbeat_s if broken else 0.0)
        if broken:
            outcome.lost_rounds += 1
        else:
            outcome.rounds += 1
            outcome.offers += len(members)
    outcome.wall_s = now
    return outcome


def _reap(drawn: random.Random, run: SimulatedRun, back: list[float], fails: list[float], *, until: float) -> list[int]:
    """Kill whose time has come; who is there at the end. A heal is a copy of the state from a peer."""
    scenario = run.scenario
    heal_s = scenario.work.state_bytes / MB / min(scenario.machine.up_mb_s, scenario.machine.down_mb_s)
    for rank, fails_at in enumerate(fails):
        if fails_at < until:
            run.kills += 1
            run.received_bytes += scenario.work.state_bytes
            back[rank] = fails_at + scenario.spot.return_s + heal_s
            fails[rank] = _next_kill(drawn, scenario, back[rank])
    return [rank for rank, there in enumerate(back) if there <= until]


def _next_kill(drawn: random.Random, scenario: Scenario, after: float) -> float:
    rate = scenario.spot.kills_per_hour / HOUR_S
    return after + drawn.expovariate(rate) if rate else float("inf")


# The protocol of `rounds/` as processes over a bucket: offer, seal, reduce, outcome, fetch.
#
# What is the same for all is a formula (a transfer), what depends on who is there when is an event (seals, graces,
# kills, returns). A dead member costs one grace, two where it dies between its offer and its reduction, and is then
# not expected any more; what it had offered stays.

_RECORD_BYTES = 110.0
"""A shard's line in a manifest, and its line in an outcome."""


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
        self.random = random.Random(scenario.seed)  # noqa: S311 - draws of a simulation
        self.rounds = [_SimulatedRound() for _ in range(scenario.work.num_rounds + 1)]
        self.current = 0
        self.alive = set(range(scenario.replicas))
        self.expected = set(self.alive)
        self.processes: dict[int, int] = {}
        work, bucket = scenario.work, scenario.bucket
        self.num_shards = bucket.num_shards(work.payload_bytes, scenario.replicas)

    def finished(self) -> bool:
        return self.current >= self.scenario.work.num_rounds

    # A replica.

    def replica(self, rank: int, *, heals: bool) -> Process:
        work, clock = self.scenario.work, self.clock
        if heals:
            yield self._fetched(work.state_bytes, work.state_bytes / self.scenario.bucket.shard_bytes)
            self.expected.add(rank)
            joined = self.current  # it waits for the others' round, without weight, and begins the next one with them
            yield self.rounds[joined].committed
            yield self._fetched(work.payload_bytes, self.num_shards + 2)
            self._advance(joined)
        while not self.finished():
            step = self.current
            yield max(0.0, self.random.gauss(work.train_s, work.spread * work.train_s))
            if step == self.current:  # else the others committed without us, and what we trained is void
                yield self._sent(work.payload_bytes, self.num_shards + 1)
                self._offer(rank, step)
            taking = self.rounds[step]
            yield taking.sealed
            yield self._noticed()
            if rank in taking.members:
                yield self._reduce_s(len(taking.members))
                taking.reduced.add(rank)
                self._commit_if_whole(step)
            else:  # late: it follows the commit, and says that it is there
                self.expected.add(rank)
            yield taking.committed
            yield self._noticed()
            yield self._fetched(work.payload_bytes, self.num_shards + 2)
            clock.at(clock.now, lambda step=step: self._advance(step))
            yield 0.0

    def _offer(self, rank: int, step: int) -> None:
        taking = self.rounds[step]
        if taking.sealed.happened:
            return
        taking.offers.add(rank)
        if taking.offers >= self.expected:
            self._seal(step)
        elif len(taking.offers) >= self.scenario.bucket.quorum * self.scenario.replicas and not taking.grace_runs:
            taking.grace_runs = True
            self.clock.at(self.clock.now + self.scenario.bucket.grace_s, lambda: self._seal(step))

    def _seal(self, step: int) -> None:
        taking = self.rounds[step]
        if not taking.sealed.happened:
            taking.members = frozenset(taking.offers)
            self.expected = set(taking.offers) & self.alive
            self._count(puts=1)
            self.clock.happen(taking.sealed)
            self._mind_the_dead(step)

    def _commit_if_whole(self, step: int) -> None:
        taking = self.rounds[step]
        if taking.reduced >= taking.members and not taking.committed.happened:
            self._count(puts=1)
            self.outcome.offers += len(taking.members)
            self.outcome.rounds += 1
            self.clock.happen(taking.committed)

    def _mind_the_dead(self, step: int) -> None:
        """Members that die before they have reduced: after a grace the others do their shards."""
        taking = self.rounds[step]
        dead = taking.members - self.alive - taking.reduced
        if taking.sealed.happened and not taking.committed.happened and dead:
            own_s = self._reduce_s(len(taking.members))

            def others_did() -> None:
                taking.reduced.update(dead)
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
            self._mind_the_dead(self.current)
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
        """One's own shards of all others, their mean back."""
        payload = self.scenario.work.payload_bytes
        other_bytes = payload * (members - 1) / members
        mine = self.num_shards / members
        return self._fetched(other_bytes, mine * (members - 1)) + self._sent(payload / members, mine)

    def _noticed(self) -> float:
        """Until a poll sees what has happened: a listing, and what it names that is new. Pauses grow to `poll_s`."""
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
    """A run of `num_rounds` rounds over a bucket."""
    run = _Run(scenario)
    for rank in range(scenario.replicas):
        run.processes[rank] = run.clock.start(run.replica(rank, heals=False))
        run.clock.start(run.reaper(rank))
    run.clock.run(run.finished)
    run.outcome.wall_s = run.clock.now
    return run.outcome
