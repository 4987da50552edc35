"""Replicas over a store: means worked out anew, weights bit-equal, whoever comes, goes, sleeps or comes back."""

from __future__ import annotations

import functools
import gc
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from faulty_stores import Faults, FaultyStore
from toy_replicas import QUICK, ToyLoop, check_run, in_threads, run_replica

from composer_replication.diloco.payload import ErrorFeedback
from composer_replication.diloco.rounds import shards
from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.reading import Offer
from composer_replication.diloco.rounds.records import MAX_MAGNITUDE, OfferId
from composer_replication.diloco.rounds.round import _outliers
from composer_replication.diloco.rounds.shards import RoundVector, _scaled_weights, _weighted_mean, largest_magnitude
from composer_replication.diloco.store import MemoryStore


@pytest.mark.parametrize(("world", "num_fragments"), [(1, 1), (2, 1), (4, 2)])
def test_all_replicas_end_with_the_weights_that_the_commits_say(world, num_fragments):
    store = MemoryStore()
    runs = [functools.partial(run_replica, store, rank, world, 5, num_fragments=num_fragments) for rank in range(world)]
    loops = in_threads(runs)
    history = check_run(store, loops, num_fragments=num_fragments)
    assert [len(outcome.members) for outcome in history] == [world] * 5


def test_without_a_follower_a_replica_with_other_weights_has_none_until_each_fragment_was_restored():
    store = MemoryStore()
    runs = [functools.partial(run_replica, store, rank, 2, 5, num_fragments=2, follows=False) for rank in range(2)]
    history = check_run(store, in_threads(runs), num_fragments=2)
    assert [[member.weight for member in outcome.members] for outcome in history] == [[3, 0], [3, 0], *[[3, 4]] * 3]


def alone(store, rank, world, steps, **options):
    """Rounds of one replica, which is not closed at the end."""
    manager = ObjectStoreManager(store, rank=rank, world_size=world, **{**QUICK, "min_replicas": 1, **options})
    loop = ToyLoop(manager)
    go_on(loop, steps)
    return loop


def go_on(loop, steps):
    while loop.manager.current_step() < steps:
        loop.round()


def go_on_until_all_are_in(loop, world):
    """At most two hundred rounds: on a busy machine some pass before one that comes late is there."""
    while loop.manager.num_participants < world and loop.manager.current_step() < 200:
        loop.round()


def test_a_dead_peer_costs_one_grace():
    store = MemoryStore()
    both = in_threads([functools.partial(alone, store, rank, 2, 2, grace_s=0.5) for rank in range(2)])
    go_on(both[0], 5)
    seconds = [ended.seconds for ended in both[0].manager.history]
    assert [each >= 0.5 for each in seconds[2:]] == [True, False, False]
    assert [len(outcome.members) for outcome in check_run(store, both)] == [2, 2, 1, 1, 1]


def test_who_says_goodbye_costs_nothing():
    store = MemoryStore()
    both = in_threads([functools.partial(alone, store, rank, 2, 2, grace_s=5.0) for rank in range(2)])
    both[1].manager.close()
    go_on(both[0], 4)
    assert all(ended.seconds < 5.0 for ended in both[0].manager.history)


@pytest.mark.parametrize("follows", [True, False])
def test_one_that_sleeps_through_many_rounds_is_healed_and_comes_back(follows):
    store = MemoryStore()
    options = {"min_replicas": 1, "grace_s": 0.1, "state_every": 3, "keep_rounds": 1}
    managers = [ObjectStoreManager(store, rank=rank, world_size=2, **{**QUICK, **options}) for rank in range(2)]
    loops = in_threads([functools.partial(ToyLoop, each, follows=follows) for each in managers])
    in_threads([functools.partial(go_on, each, 2) for each in loops])
    go_on(loops[0], 12)
    assert not store.keys("g000000/d/00000003")  # what it missed is gone
    go_on(loops[1], 12)
    managers[0]._membership.settings = replace(managers[0]._settings, grace_s=5.0)
    in_threads([functools.partial(go_on, each, 16) for each in loops])
    history = check_run(store, loops)
    assert [member.id.rank for member in history[-1].members if member.weight] == [0, 1]
    assert [len(outcome.members) for outcome in history[2:]] == [1] * 10 + [2] * 4


def test_a_late_one_joins_with_the_weights_of_the_others():
    store = MemoryStore()
    first = in_threads([functools.partial(alone, store, rank, 3, 3, first_grace_s=0.3) for rank in range(2)])
    third = alone(store, 2, 3, 0)
    in_threads([functools.partial(go_on_until_all_are_in, each, 3) for each in (third, *first)])
    history = check_run(store, [*first, third])
    assert [len(outcome.members) for outcome in history[:3]] == [2, 2, 2]
    assert len(history[-1].members) == 3


def test_all_of_them_restarted_go_on_where_the_last_commit_left_them():
    store = MemoryStore()
    options = {"state_every": 2, "lease_s": 0.2}
    before = in_threads([functools.partial(alone, store, rank, 2, 5, **options) for rank in range(2)])
    for loop in before:  # their hearts stop, without a goodbye
        loop.manager._membership._heartbeat.stop()
    after = in_threads([functools.partial(alone, store, rank, 2, 8, **options) for rank in range(2)])
    history = check_run(store, [*before, *after])
    assert [[member.id.claim for member in outcome.members] for outcome in history] == [[0, 0]] * 5 + [[1, 1]] * 3
    assert [ended.result for ended in after[0].manager.history] == ["commit"] * 3


def test_a_round_that_is_over_holds_none_of_its_tensors():
    """Without waiting for a collection of cycles, which may come many rounds later."""
    manager = ObjectStoreManager(MemoryStore(), rank=0, world_size=1, **QUICK)
    membership, gone = manager._membership, []
    new_round = membership.new_round

    def watched(*values, **named):
        round = new_round(*values, **named)
        gone.append(weakref.ref(round))
        return round

    membership.new_round = watched
    gc.collect()
    gc.disable()
    try:
        manager.allreduce(torch.ones(5000)).wait()
        assert manager.should_commit()
        assert [each() for each in gone] == [None]
    finally:
        gc.enable()
        manager.close()


def test_nothing_of_another_generation_is_read():
    store = MemoryStore()
    in_threads([functools.partial(run_replica, store, rank, 2, 3) for rank in range(2)])
    watched = FaultyStore(store, Faults(), seed=0)
    touched = []
    watched._call = lambda call: call()
    for name in ("get", "put", "create", "size", "keys"):
        inner = getattr(watched, name)
        setattr(
            watched, name, lambda key, *rest, inner=inner, **named: touched.append(key) or inner(key, *rest, **named)
        )
    loop = run_replica(watched, 0, 1, 3, generation=1)
    assert loop.manager.current_step() == 3
    assert {key.split("/")[0] for key in touched} == {"g000001"}


@pytest.mark.parametrize("payload", ["bf16", "int8", "int4"])
def test_rounded_payloads_leave_replicas_equal_and_near_the_exact_mean(payload):
    store = MemoryStore()
    loops = in_threads([functools.partial(run_replica, store, rank, 2, 4, payload=payload) for rank in range(2)])
    exact = MemoryStore()
    plain = in_threads([functools.partial(run_replica, exact, rank, 2, 4) for rank in range(2)])
    assert torch.equal(loops[0].globals[0], loops[1].globals[0])
    away = (loops[0].globals[0] - plain[0].globals[0]).square().mean().sqrt() / plain[0].globals[
        0
    ].square().mean().sqrt()
    assert away < {"bf16": 0.01, "int8": 0.02, "int4": 0.3}[payload]
    # Which replica writes the mean differs from run to run, so compare what both have sent.
    assert sum(loop.manager.traffic.sent for loop in loops) < sum(loop.manager.traffic.sent for loop in plain)


@pytest.mark.parametrize("payload", ["int8", "int4"])
def test_what_is_small_beside_its_block_is_late_and_not_lost(payload):
    """Beside a 1.0 it rounds to nothing in every offer; feedback sends it later, and the mean must let it through."""
    store, rounds = MemoryStore(), 24
    quantum = 1 / {"int8": 127, "int4": 7}[payload]
    small = [0.4 * quantum, 0.15 * quantum]

    def total(rank):
        manager = ObjectStoreManager(store, rank=rank, world_size=2, payload=payload, **QUICK)
        moved = torch.zeros(4)
        for _ in range(rounds):
            given = torch.tensor([1.0, small[rank], -small[rank], 0.0])
            manager.start_quorum()
            manager.allreduce(given)
            assert manager.should_commit()
            moved += given
        manager.close()
        return moved

    both = in_threads([functools.partial(total, rank) for rank in range(2)])
    exact = rounds * sum(small) / 2
    assert torch.equal(both[0], both[1])
    assert (both[0] - torch.tensor([rounds, exact, -exact, 0.0])).abs().max() < quantum


def test_a_vector_that_is_not_finite_has_no_weight_and_its_replica_takes_the_mean_of_the_others():
    store = MemoryStore()

    def run(rank):
        loop = alone(store, rank, 2, 1)
        if rank == 1:
            loop.training[0][5] = float("nan")
        go_on(loop, 3)
        return loop

    history = check_run(store, in_threads([functools.partial(run, rank) for rank in range(2)]))
    assert [[member.weight for member in outcome.members] for outcome in history] == [[3, 4], [3, 0], [3, 4]]


@pytest.mark.parametrize("wild", [0, 1, 2])
@pytest.mark.parametrize("value", [3.4e38, -3.4e38, 1e25, 5e4])
def test_a_vector_that_is_far_larger_than_the_others_has_no_weight_in_its_round(wild, value, caplog):
    store = MemoryStore()

    def run(rank):
        loop = alone(store, rank, 3, 1)
        if rank == wild:
            loop.training[0][5] = value
        go_on(loop, 3)
        return loop

    history = check_run(store, in_threads([functools.partial(run, rank) for rank in range(3)]))
    given = [[0 if step == 1 and rank == wild else 3 + rank for rank in range(3)] for step in range(3)]
    assert [[member.weight for member in outcome.members] for outcome in history] == given
    assert re.search(rf"\bround 1\b.*\brank {wild}\b", caplog.text)


@pytest.mark.parametrize(
    ("sizes", "left_out"),
    [
        ((4e-8, 9e-3), ()),
        ((1e-12, 1e-12, 9e-3, 9e-3), ()),
        ((1e-12, 10.0), ()),
        ((1e-3, 1e-3, 5e4), (2,)),
        ((1e-3, 11.0), (1,)),
        ((20.0, 30.0, 19_000.0), ()),
    ],
)
def test_beside_replicas_that_stand_still_what_moved_as_usual_counts(sizes, left_out):
    offers = [Offer(OfferId(rank, 0, 0), "m", "base", "spec", 1.0, 1, size) for rank, size in enumerate(sizes)]
    assert _outliers(offers) == {OfferId(rank, 0, 0) for rank in left_out}


@pytest.mark.parametrize("payload", ["bf16", "int8", "int4"])
def test_a_vector_of_many_numbers_is_cut_the_same_in_every_payload(payload):
    vector = RoundVector([torch.zeros(13_000_000)], parties=2, shard_elements=2**19)
    assert vector.num_shards == 26
    sent, _ = ErrorFeedback().compress(vector.tensors[0], payload)
    other = vector.like(sent)
    assert (other.num_shards, other.size(25)) == (26, vector.size(25))


@pytest.mark.parametrize("payload", ["int8", "int4"])
def test_a_last_shard_of_one_number_is_read_in_few_bits(payload):
    store = MemoryStore()

    def run(rank):
        with ObjectStoreManager(store, rank=rank, world_size=2, payload=payload, **QUICK) as manager:
            tensor = torch.full((129,), float(1 + 2 * rank))
            manager.start_quorum()
            manager.allreduce(tensor).wait()
            assert manager.should_commit()
            return tensor

    for tensor in in_threads([functools.partial(run, rank) for rank in range(2)]):
        torch.testing.assert_close(tensor, torch.full((129,), 2.0), rtol=0.01, atol=0)


def test_a_vector_that_would_overflow_alone_leaves_the_weights_and_the_run_goes_on():
    store = MemoryStore()
    loop = alone(store, 0, 1, 1)
    loop.training[0][5] = -3.4e38
    assert [loop.round() for _ in range(3)] == [False, True, True]
    check_run(store, [loop])


@pytest.mark.parametrize("weights", [(3.0, 4.0, 5.0), (1e18, 1e-18, 7.0), (1e-30, 2e-30, 1e-31), (1e18, 1e18, 1e18)])
def test_no_mean_overflows_whatever_the_weights(weights):
    vectors = [torch.tensor([MAX_MAGNITUDE, -MAX_MAGNITUDE, 1.0, index / 3]) for index in range(3)]
    shares = [weight / sum(weights) for weight in weights]
    exact = sum(share * vector.double() for share, vector in zip(shares, vectors, strict=True))
    mean = _weighted_mean(zip(_scaled_weights(weights), vectors, strict=True), 4)
    torch.testing.assert_close(mean.double(), exact, rtol=1e-6, atol=1e-12)


def test_an_offer_that_holds_more_than_its_manifest_says_counts_for_nothing(monkeypatch):
    store = MemoryStore()

    def modest(values):
        return 1e-3 if threading.current_thread().name.startswith("liar") else largest_magnitude(values)

    monkeypatch.setattr(shards, "largest_magnitude", modest)

    def run(rank):
        options = {**QUICK, "min_replicas": 1, "first_grace_s": 3.0}  # all of it is waited for
        loop = ToyLoop(ObjectStoreManager(store, rank=rank, world_size=2, **options))
        if rank == 1:
            loop.manager._pool = loop.manager._membership.pool = ThreadPoolExecutor(2, thread_name_prefix="liar")
        go_on(loop, 1)
        return loop

    history = check_run(store, in_threads([functools.partial(run, rank) for rank in range(2)]))
    assert [member.id.rank for member in history[0].members] == [0]


def test_without_state_one_that_slept_takes_the_step_of_the_others():
    store = MemoryStore()
    managers = [
        ObjectStoreManager(store, rank=rank, world_size=2, **{**QUICK, "min_replicas": 1, "grace_s": 0.1})
        for rank in range(2)
    ]

    def mean_of(manager):
        tensor = torch.full((4,), float(manager.rank))
        manager.start_quorum()
        manager.allreduce(tensor)
        return tensor if manager.should_commit() else None

    both = in_threads([functools.partial(mean_of, each) for each in managers])
    assert all(torch.equal(each, torch.full((4,), 0.5)) for each in both)
    for _ in range(6):
        assert torch.equal(mean_of(managers[0]), torch.zeros(4))
    while managers[1].current_step() < managers[0].current_step():
        mean_of(managers[1])
    both = in_threads([functools.partial(mean_of, each) for each in managers])
    assert managers[0].current_step() == managers[1].current_step() == 8
