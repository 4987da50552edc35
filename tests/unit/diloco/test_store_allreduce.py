"""The all-reduce of a fixed world: a mean, in place, numbered rounds; old rounds and other shapes are refused."""

from __future__ import annotations

import functools

import pytest
import torch
from toy_replicas import in_threads

from composer_replication.diloco.rounds.patience import StaleRound
from composer_replication.diloco.serverless import MockManager, ObjectStoreAllReduce
from composer_replication.diloco.serverless.allreduce import _ImmediateWork
from composer_replication.diloco.store import MemoryStore
from composer_replication.errors import InputError, NonFiniteError, ShapeError
from refusals import refusal


def process(store, rank, world, **options):
    return ObjectStoreAllReduce(store, rank, world, timeout_s=10, poll_interval_s=0.02, **options)


def reduce_all(store, vectors, *, calls=1, names=None):
    """Each process gives its vector, once or several times; what each has at the end."""
    world = len(vectors)

    def run(rank):
        ours = process(store, rank, world)
        for _ in range(calls):
            assert ours.allreduce(vectors[rank], name=names[rank] if names else None) is vectors[rank]
        return ours.round_id, vectors[rank]

    return in_threads([functools.partial(run, rank) for rank in range(world)])


def test_the_mean_is_in_place_and_the_counter_advances():
    vectors = [torch.full((2, 3), float(rank)) for rank in range(3)]
    for round_id, vector in reduce_all(MemoryStore(), vectors, calls=3):
        assert round_id == 3
        assert torch.equal(vector, torch.ones(2, 3))


@pytest.mark.parametrize("given", [(0.001, 10.0), (0.001, 0.002, 10.0, 20.0), (1e-20, 1e20)])
def test_the_mean_is_that_of_all_however_far_apart_they_are(given):
    results = reduce_all(MemoryStore(), [torch.tensor([value, 1.0]) for value in given])
    for _, vector in results:
        torch.testing.assert_close(vector, torch.tensor([sum(given) / len(given), 1.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_cannot_be_summed_up_is_refused_where_it_comes_from(value):
    ours = process(MemoryStore(), 0, 2)
    with refusal(NonFiniteError, got="rank 0"):
        ours.allreduce(torch.tensor([1.0, value]))


def test_one_process_alone_has_its_own_tensor():
    ours = process(MemoryStore(), 0, 1)
    vector = torch.arange(3.0)
    assert torch.equal(ours.allreduce(vector), torch.arange(3.0))
    assert ours.round_id == 1


def test_other_shapes_and_other_names_are_refused_by_all():
    for results in (
        reduce_all(MemoryStore(), [torch.ones(3), torch.ones(4)]),
        reduce_all(MemoryStore(), [torch.ones(3), torch.ones(3)], names=["loss", "grads"]),
    ):
        assert [type(each) for each in results] == [ShapeError, ShapeError]


def test_a_round_of_an_earlier_run_is_not_read():
    store = MemoryStore()
    reduce_all(store, [torch.ones(3), torch.ones(3)])
    with refusal(StaleRound, got="rank 0", fix="round_id"):
        process(store, 0, 2).allreduce(torch.zeros(3))
    later = [process(store, rank, 2, round_id=1) for rank in range(2)]
    vectors = [torch.zeros(3), torch.full((3,), 4.0)]
    for vector in in_threads([functools.partial(each.allreduce, vectors[each.rank]) for each in later]):
        assert torch.equal(vector, torch.full((3,), 2.0))


def test_peers_that_stay_away_are_a_timeout_that_names_them():
    alone = ObjectStoreAllReduce(MemoryStore(), 1, 3, timeout_s=0.3, poll_interval_s=0.02)
    with pytest.raises(TimeoutError, match=r"\[1\].*\b0, 2\b"):
        alone.allreduce(torch.ones(2))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank):
    with refusal(InputError, what="rank", got=str(rank)) as caught:
        process(MemoryStore(), rank, 2)
    assert isinstance(caught.value, ValueError)


def test_the_known_manager_takes_rank_world_and_limits_from_the_known_store():
    manager = MockManager(process(MemoryStore(), 0, 1))
    assert (manager.rank, int(manager.num_participants), manager.num_participants()) == (0, 1, 1)
    assert (manager._step, manager._use_async_quorum, manager.is_leader()) == (0, False, True)
    manager.start_quorum()
    manager.wait_quorum()
    tensor = torch.arange(4.0)
    work = manager.allreduce(tensor, should_quantize=False)
    assert isinstance(work, _ImmediateWork)
    future = work.get_future()
    assert work.wait()
    assert future.done()
    assert manager.should_commit()
    assert torch.equal(tensor, torch.arange(4.0))
    assert manager.current_step() == 1
