"""The protocol of `rounds/` as processes over a bucket: offer, seal, reduce, outcome, fetch.

What is the same for all is a formula (a transfer), what depends on who is there when is an event (seals, graces, kills,
returns). A dead member costs one grace, two where it dies between its offer and its reduction, and is then not expected
any more; what it had offered stays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from composer_replication.diloco.simulation.clock import Clock, Process, Signal
from composer_replication.diloco.simulation.result import SimulatedRun
from composer_replication.diloco.simulation.settings import HOUR_S, Scenario

_RECORD_BYTES = 110.0
"""A shard's line in a manifest, and its line in an outcome."""


@dataclass
class _Round:
    offers: set[int] = field(default_factory=set)
    members: frozenset[int] = frozenset()
    reduced: set[int] = field(default_factory=set)
    sealed: Signal = field(default_factory=Signal)
    committed: Signal = field(default_factory=Signal)
    grace_runs: bool = False


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.clock = scenario, Clock()
        self.outcome = SimulatedRun(scenario=scenario)
        self.random = random.Random(scenario.seed)  # noqa: S311 - draws of a simulation
        self.rounds = [_Round() for _ in range(scenario.work.num_rounds + 1)]
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
