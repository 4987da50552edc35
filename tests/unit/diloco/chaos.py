"""Scenarios drawn from a seed: replicas, faults, who dies or sleeps when, who comes late or back; and what must hold.

Most replicas are threads over one store in memory, each behind its own faults: a killed one raises out of its store
call and never makes another, which leaves the store exactly as kill -9 does. `test_chaos_processes.py` has real ones.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from faulty_stores import Faults, FaultyStore, Killed
from toy_replicas import ToyLoop, check_run, layout_of

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.patience import RoundError
from composer_replication.diloco.rounds.records import unpack
from composer_replication.diloco.store import MemoryStore, StoreUnavailable

LIMITS: dict[str, Any] = {"poll_s": 0.02, "grace_s": 0.6, "first_grace_s": 2.0, "timeout_s": 20.0, "lease_s": 0.4}
BOUND_S = 60.0  # a scenario of STEPS rounds: each costs a grace for each death at most, never a timeout
STEPS = 5
PAYLOADS = ("g000000/d/", "/mean/", "/statedata/")


@dataclass
class Scenario:
    """What will happen, from a seed alone."""

    seed: int
    world: int = 0
    num_fragments: int = 1
    faults: Faults = field(default_factory=Faults)
    kills: dict[int, int] = field(default_factory=dict)  # rank: its n-th call
    comes_back: dict[int, float] = field(default_factory=dict)  # rank: seconds after its death
    pauses: dict[int, tuple[int, float]] = field(default_factory=dict)  # rank: after its n-th call, for so long
    late: dict[int, float] = field(default_factory=dict)  # rank: seconds

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)
        self.world = dice.choice([2, 2, 3, 3, 4])
        self.num_fragments = dice.choice([1, 1, 2])
        kinds = dice.sample(["kill", "pause", "late", "errors", "reads", "writes", "slow"], k=dice.choice([1, 2, 2, 3]))
        self.faults = Faults(
            refused=0.05 if "errors" in kinds else 0.0,
            lost=0.05 if "errors" in kinds else 0.0,
            slow=0.2 if "slow" in kinds else 0.0,
            damaged_read=0.1 if "reads" in kinds else 0.0,
            damaged_write=0.02 if "writes" in kinds else 0.0,
        )
        victims = list(range(self.world))
        dice.shuffle(victims)
        if "kill" in kinds:
            rank = victims.pop()
            self.kills[rank] = dice.randrange(5, 160)
            if dice.random() < 0.7:
                self.comes_back[rank] = dice.random()
        if "pause" in kinds:
            self.pauses[victims.pop()] = (dice.randrange(5, 160), 0.2 + 2.0 * dice.random())
        if "late" in kinds and victims and victims[-1] != 0:
            self.late[victims.pop()] = 3.0 * dice.random()


class Run:
    """A scenario under way."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.store = MemoryStore()
        self.loops: list[ToyLoop] = []
        self.errors: list[tuple[int, BaseException]] = []
        self.deaths: list[int] = []
        self._lives = 0

    def play(self) -> None:
        """Play it to its end; AssertionError if a replica is not back in time."""
        began = time.monotonic()
        threads = [threading.Thread(target=self._replica, args=(rank,), daemon=True) for rank in self._ranks()]
        for thread in threads:
            thread.start()
        for rank, thread in zip(self._ranks(), threads, strict=True):
            thread.join(max(0.1, BOUND_S - (time.monotonic() - began)))
            assert not thread.is_alive(), f"rank {rank} is not back after {BOUND_S} s: {self.scenario}"

    def _ranks(self) -> range:
        return range(self.scenario.world)

    def _replica(self, rank: int) -> None:
        scenario = self.scenario
        time.sleep(scenario.late.get(rank, 0.0))
        self._live(rank, kill_at=scenario.kills.get(rank))
        if rank in self.deaths and rank in scenario.comes_back:
            time.sleep(scenario.comes_back[rank])
            self._live(rank, kill_at=None)

    def _live(self, rank: int, kill_at: int | None) -> None:
        scenario = self.scenario
        self._lives += 1
        store = FaultyStore(self.store, scenario.faults, scenario.seed * 1000 + self._lives, kill_at=kill_at)
        store.damage = lambda key: any(part in key for part in PAYLOADS)
        if rank in scenario.pauses:
            threading.Thread(target=self._pause, args=(store, *scenario.pauses[rank]), daemon=True).start()
        try:
            self.loops.append(self._train(store, rank))
        except (Killed, RoundError, StoreUnavailable) as error:
            if store.dead:
                self.deaths.append(rank)
            else:
                self.errors.append((rank, error))

    def _train(self, store: FaultyStore, rank: int) -> ToyLoop:
        scenario = self.scenario
        manager = ObjectStoreManager(
            store, rank=rank, world_size=scenario.world, min_replicas=1, state_every=2, shard_bytes=400, **LIMITS
        )
        loop = ToyLoop(manager, num_fragments=scenario.num_fragments, follows=scenario.seed % 3 != 0)
        while manager.current_step() < STEPS:
            loop.round()
        manager.close()
        return loop

    @staticmethod
    def _pause(store: FaultyStore, after: int, seconds: float) -> None:
        while store.calls < after and not store.dead:
            time.sleep(0.01)
        store.paused.set()
        time.sleep(seconds)
        store.paused.clear()

    def check(self) -> None:
        """Means worked out anew, survivors bit-equal, nobody failed who was not killed."""
        starter = self._starter()
        assert not self.errors, (self.errors, self.scenario)
        assert all(loop.manager.current_step() == STEPS for loop in self.loops), self.scenario
        history = check_run(self.store, self.loops, starter=starter, num_fragments=self.scenario.num_fragments)
        assert self.loops == [] or len(history) >= STEPS

    def _starter(self) -> int:
        """Whose weights the run began with: rank 0, unless it died before."""
        layout = layout_of(self.store)
        key = layout.genesis()
        genesis = unpack("genesis", layout.address(key), self.store.get(key, most_bytes=10_000))
        return int(genesis["name"].split(".")[1])
