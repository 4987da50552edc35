"""The same work over machines that reach each other: a ring of all members, as torchft's manager makes one.

Nothing of a round outlives its members: one that dies in a ring breaks it, and what all had trained is void.
"""

from __future__ import annotations

import random

from composer_replication.diloco.simulation.result import SimulatedRun
from composer_replication.diloco.simulation.settings import HOUR_S, MB, Scenario

_GIVEN_UP = 10


def ring_s(scenario: Scenario, members: int) -> float:
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
        ring = ring_s(scenario, len(members))
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
