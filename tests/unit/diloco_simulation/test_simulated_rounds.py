"""Rounds on paper: the arithmetic of a round, what a kill costs, and that one seed is one run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import diloco_simulation as bucket_rounds
from diloco_simulation import (
    Bucket,
    Machine,
    Scenario,
    Signal,
    SimulatedClock,
    Spot,
    Work,
    simulate_bucket,
    simulate_direct,
)

MACHINE = Machine(up_mb_s=100, down_mb_s=50, latency_s=0.0, codec_mb_s=1e12)
FREE = Bucket(put_s=0.0, get_s=0.0, connection_mb_s=1e9, total_mb_s=1e12, poll_s=0.0, grace_s=30.0)
WORK = Work(payload_bytes=100e6, state_bytes=0.0, step_s=1.0, sync_every=100, spread=0.0, num_rounds=5)


def scenario(replicas=4, **changes):
    return Scenario(replicas=replicas, work=WORK, machine=MACHINE, bucket=FREE, **changes)


def test_a_round_is_an_offer_a_reduction_and_a_fetch():
    offer, others, mean, fetch = 100 / 100, 75 / 50, 25 / 100, 100 / 50
    assert simulate_bucket(scenario()).waiting_s == pytest.approx(offer + others + mean + fetch, abs=1e-3)


def test_a_ring_is_two_payloads_through_the_slowest_line():
    assert simulate_direct(scenario()).waiting_s == pytest.approx(2 * 3 / 4 * 100 / 50, abs=1e-3)


@pytest.mark.parametrize("replicas", [2, 3, 8, 16])
def test_a_replica_moves_at_most_two_payloads_each_way(replicas):
    sent, received = simulate_bucket(scenario(replicas)).bytes_per_replica_and_round
    assert (sent / 100e6, received / 100e6) == (
        pytest.approx(1 + 1 / replicas, rel=1e-3),
        pytest.approx(2 - 1 / replicas, rel=1e-3),
    )


def killed_at(seconds, *, returns_after=None):
    run = bucket_rounds._Run(scenario())
    for rank in range(4):
        run.processes[rank] = run.clock.start(run.replica(rank, heals=False))

    def kill() -> None:
        run.clock.end(run.processes[3])
        run.alive.discard(3)
        run._take_over_from_dead(run.current)

    def bring_back() -> None:
        run.alive.add(3)
        run.processes[3] = run.clock.start(run.replica(3, heals=True))

    run.clock.at(seconds, kill)
    if returns_after is not None:
        run.clock.at(seconds + returns_after, bring_back)
    run.clock.run(run.finished)
    return run


@pytest.mark.parametrize(("seconds", "graces"), [(50.0, 1), (101.5, 2)])
def test_a_dead_replica_costs_one_grace_or_two_and_not_one_a_round(seconds, graces):
    """Two where it dies between its offer and its reduction: its shards are waited for, and then its next offer."""
    whole = simulate_bucket(scenario()).wall_s
    cost = killed_at(seconds).clock.now - whole
    assert 30 * graces - 3 < cost < 30 * graces + 3  # the rounds after it are a little quicker: there is less to fetch


def test_a_replica_that_comes_back_is_waited_for_and_counts_again():
    run = killed_at(50.0, returns_after=100.0)
    assert [len(each.members) for each in run.rounds[:5]] == [3, 3, 4, 4, 4]
    assert run.outcome.offers == 18


def test_a_kill_in_a_ring_voids_the_round_of_all():
    spot = Spot(kills_per_hour=3.0, return_s=10.0, heartbeat_s=5.0)
    slow = replace(scenario(16, spot=spot), machine=replace(MACHINE, down_mb_s=2))
    ring, bucket = simulate_direct(slow), simulate_bucket(slow)
    assert ring.lost_rounds > 0
    assert ring.useful_share < bucket.useful_share
    assert bucket.lost_rounds == 0


def test_requests_and_bytes_out_are_what_a_bucket_costs():
    paid = replace(FREE, dollars_per_gb_out=0.1)
    run = simulate_bucket(replace(scenario(), bucket=paid))
    requests = run.puts * 5.0 / 1e6 + run.gets * 0.4 / 1e6
    assert run.bucket_dollars == pytest.approx(run.received_bytes / 1e9 * 0.1 + requests)
    assert run.machine_dollars == pytest.approx(4 * run.wall_s / 3600 * 2.0)


def test_one_seed_is_one_run_and_another_is_another():
    drawn = replace(scenario(8, spot=Spot(kills_per_hour=2.0)), work=replace(WORK, spread=0.05))
    assert simulate_bucket(drawn) == simulate_bucket(drawn)
    assert simulate_bucket(drawn).wall_s != simulate_bucket(replace(drawn, seed=1)).wall_s


def test_shards_are_a_multiple_of_the_parties_and_no_finer_than_in_the_protocol():
    from composer_replication.diloco.rounds.shards import _shard_sizes

    for elements in (10_000_000, 50_000_000, 800_000_000):
        for parties in (2, 3, 8):
            shards = Bucket().num_shards(4 * elements, parties)
            assert shards % parties == 0
            assert shards <= _shard_sizes(elements, parties, 64 * 2**20 // 4)[1] + 1  # it cuts large vectors finer


def test_processes_sleep_wait_and_end_in_the_order_of_time():
    clock, signal, seen = SimulatedClock(), Signal(), []

    def process(name, seconds):
        yield seconds
        seen.append((clock.now, name))
        yield signal
        seen.append((clock.now, name))

    numbers = [clock.start(process(name, seconds)) for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 3.0))]
    clock.at(2.5, lambda: clock.end(numbers[2]))
    clock.at(4.0, lambda: clock.happen(signal))
    clock.run(lambda: False)
    assert seen == [(1.0, "b"), (2.0, "a"), (4.0, "b"), (4.0, "a")]
