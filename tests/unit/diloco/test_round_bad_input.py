"""What must end in a named error or in a recovered round: wrong worlds, two of one rank, damage, bad stores."""

from __future__ import annotations

import functools
import os
import re
import threading
import time

import pytest
import torch
from faulty_stores import Faults, FaultyStore
from toy_replicas import QUICK, ToyLoop, check_run, in_threads, run_replica

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.patience import (
    GenerationRefused,
    OfferUnreadable,
    RankTaken,
    Replaced,
    RoundTimeout,
)
from composer_replication.diloco.rounds.progress import read_progress
from composer_replication.diloco.rounds.records import Layout, pack
from composer_replication.diloco.rounds.shards import RoundVector
from composer_replication.diloco.store import MemoryStore, StoreDenied, StoreFull, StoreUnavailable
from composer_replication.errors import InputError, ShapeError
from refusals import refusal


def manager(store, rank=0, world=1, **options):
    return ObjectStoreManager(store, rank=rank, world_size=world, **{**QUICK, **options})


@pytest.mark.parametrize(
    "options",
    [{"rank": 2}, {"rank": -1}, {"min_replicas": 3}, {"min_replicas": 0}, {"state_every": 0}, {"rank": None}],
    ids=str,
)
def test_a_rank_or_a_quorum_outside_the_world_is_refused(options):
    with pytest.raises(InputError, match=r"rank|min_replicas|state_every"):
        ObjectStoreManager(MemoryStore(), **{"rank": 0, "world_size": 2, **options})


@pytest.mark.parametrize("other", [{"world": 3}, {"payload": "int8"}, {"shard_bytes": 1000}], ids=str)
def test_another_world_or_payload_in_one_generation_is_refused_with_what_to_do(other):
    store = MemoryStore()
    ToyLoop(manager(store))
    with pytest.raises(GenerationRefused, match=r"generation=1"):
        ToyLoop(manager(store, **other))


def test_another_model_in_one_generation_is_refused():
    store = MemoryStore()
    ToyLoop(manager(store))
    with pytest.raises(GenerationRefused, match="tensors"):
        ToyLoop(manager(store), num_fragments=2)


def test_without_registered_state_other_shapes_are_refused_in_the_round():
    store = MemoryStore()

    def run(rank):
        ours = manager(store, rank, 2, min_replicas=2)
        ours.allreduce(torch.ones(3 + rank))
        return ours.should_commit()

    assert [type(each) for each in in_threads([functools.partial(run, rank) for rank in range(2)])] == [ShapeError] * 2


def test_more_shards_than_there_are_names_for_are_refused_with_what_to_set():
    with refusal(InputError, got="203,125 shards", expected="50,000", fix="shard_bytes"):
        RoundVector([torch.zeros(2).expand(13_000_000, 2)], parties=1, shard_elements=1)


def test_a_generation_that_was_closed_is_refused():
    store = MemoryStore()
    run_replica(store, 0, 1, 1)
    store.put("g000000/closed", b"")
    with refusal(GenerationRefused, what="generation 0", fix="generation=1") as caught:
        run_replica(store, 0, 1, 2)
    assert "{" not in caught.value.got  # no setting that is another one


def test_the_second_living_process_of_a_rank_is_refused_and_the_first_goes_on():
    store = MemoryStore()
    first = ToyLoop(manager(store))
    with refusal(RankTaken, what="rank 0", got=f"pid {os.getpid()}"):
        ToyLoop(manager(store))
    assert first.round()


@pytest.mark.parametrize(
    ("holder", "shown"),
    [
        ({"pid": 7, "host": "\x1b]0;title\x07\x1b[2J"}, ["pid 7"]),
        ({"pid": "7\x1b[2J", "host": "node-1.example"}, ["node-1.example"]),
        ({"pid": True, "host": ["node"]}, []),
    ],
)
def test_whoever_is_said_to_hold_a_rank_is_named_without_what_a_terminal_acts_upon(holder, shown):
    store = MemoryStore()
    first = ToyLoop(manager(store))
    (claim,) = store.keys(Layout(0).claim(0))
    store.put(claim, pack("claim", first.manager._membership.layout.address(claim), {"nonce": "0", **holder}))
    with refusal(RankTaken, what="rank 0") as caught:
        ToyLoop(manager(store))
    assert re.findall(r"pid \d+|node\S*|title|True", caught.value.got) == shown
    assert str(caught.value).isprintable()
    assert first.round()


def test_one_that_was_replaced_while_it_slept_ends():
    store = MemoryStore()
    sleeper = ToyLoop(manager(store))
    assert sleeper.round()
    sleeper.manager._membership._heartbeat.stop()
    assert ToyLoop(manager(store)).round()
    with refusal(Replaced, what="rank 0", got="claim 1", expected="claim 0"):
        sleeper.round()


def test_foreign_objects_are_ignored_and_counted():
    store = MemoryStore()
    for key in ("notes.txt", "g000000/r/00000000/offer/mine", "g000000/r/00000000/offer/00009.0.0", "g000000/states/x"):
        store.put(key, b"hello")
    store.put("g000000/r/00000000/here/me", b"")
    loops = in_threads([functools.partial(run_replica, store, rank, 2, 2) for rank in range(2)])
    assert len(check_run(store, loops)) == 2
    assert loops[0].manager.traffic.foreign >= 2


@pytest.mark.parametrize("mark", ["", f"-{'0' * 16}"])
@pytest.mark.parametrize("shard", [0, 1, 7, 99_999])
def test_a_foreign_name_among_the_means_gets_into_no_commit(shard, mark):
    store = MemoryStore()
    for attempt, sha256 in ((0, "0" * 64), (0, "f" * 64), (1, "0" * 64)):
        store.put(f"g000000/r/00000000/mean/{attempt}/{shard:05d}-{sha256}{mark}", b"hello")
    loops = in_threads([functools.partial(run_replica, store, rank, 2, 2, timeout_s=5.0) for rank in range(2)])
    history = check_run(store, loops)
    assert len(history) == 2
    assert not {"0" * 64, "f" * 64} & set(history[0].means)
    assert loops[0].manager.traffic.foreign >= 2


def test_a_quorum_that_stays_away_is_a_timeout_that_names_who_is_missing():
    with refusal(RoundTimeout, what="round 0", got="[0]", expected="2", fix="min_replicas") as caught:
        run_replica(MemoryStore(), 0, 2, 1, min_replicas=2, timeout_s=0.5)
    assert caught.value.got.endswith(" 1")


class BrokenStore(FaultyStore):
    """Raises at every put, once `broken` is set."""

    broken: Exception | None = None

    def put(self, key, data):
        if self.broken is not None and "beats" not in key:
            raise self.broken
        super().put(key, data)


@pytest.mark.parametrize("kind", [StoreDenied, StoreFull, StoreUnavailable])
def test_a_store_that_refuses_is_named_within_the_time_of_a_round(kind):
    store = BrokenStore(MemoryStore(), Faults(), seed=0)
    loop = ToyLoop(manager(store, timeout_s=1.0))
    store.broken = kind("no", uri="memory://", key="x")
    began = time.monotonic()
    with pytest.raises(kind):
        loop.round()
    assert time.monotonic() - began < 5


class DamagingStore(FaultyStore):
    """Damages the first objects whose key holds `part`: a flipped bit, a cut, or something else altogether."""

    part, form, left = "", "", 1

    def _stored(self, key, data):
        if self.part not in key or not self.left:
            return data
        self.left -= 1
        at = len(data) // 3
        return {"flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "cut": data[:at], "other": b"{}"}[self.form]


@pytest.mark.parametrize("form", ["flip", "cut", "other"])
@pytest.mark.parametrize("part", ["/offer/", "/d/", "/seal/", "/mean/", "/out/", "/states/", "/statedata/", "/about"])
def test_a_damaged_object_is_read_past_mended_or_made_anew(part, form):
    """Each kind of object, damaged for good when it is written first."""
    store = MemoryStore()

    def run(rank):
        mine = DamagingStore(store, Faults(), seed=rank)
        mine.part, mine.form = part, form
        return run_replica(mine, rank, 2, 4, state_every=2, grace_s=0.3)

    history = check_run(store, in_threads([functools.partial(run, rank) for rank in range(2)]))
    assert len(history) == 4
    assert all(member.weight for outcome in history for member in outcome.members)


@pytest.mark.parametrize(("part", "error"), [("/offer/", OfferUnreadable), ("/claims/", RoundTimeout)])
def test_what_a_replica_writes_and_can_never_read_back_ends_by_name(part, error):
    objects = MemoryStore()
    store = DamagingStore(objects, Faults(), seed=0)
    store.part, store.form, store.left = part, "other", 10**9
    began = time.monotonic()
    with pytest.raises(error, match="rank 0"):
        run_replica(store, 0, 1, 1, timeout_s=3.0)
    assert time.monotonic() - began < (2.5 if part == "/offer/" else 5)
    assert len(objects.keys("g000000/r/00000000/offer")) <= 3


def test_one_whose_offers_can_never_be_read_takes_the_commits_of_the_others():
    store = MemoryStore()

    def run(rank):
        mine = DamagingStore(store, Faults(), seed=rank)
        mine.part, mine.form, mine.left = "/offer/00001", "other", 10**9
        return run_replica(mine, rank, 2, 2, grace_s=0.3, first_grace_s=0.3)

    history = check_run(store, in_threads([functools.partial(run, rank) for rank in range(2)]))
    assert [[member.id.rank for member in outcome.members] for outcome in history] == [[0], [0]]
    assert len(store.keys("g000000/r/00000000/offer")) <= 4


def test_what_a_run_is_cannot_be_read_and_that_is_said():
    store = MemoryStore()
    for copy in range(3):
        store.put(Layout(0).about(copy), b"{}")
    with refusal(GenerationRefused, what="generation 0", got="'tensors': None"):
        ToyLoop(manager(store))


def test_a_damaged_mean_is_computed_again_by_whoever_needs_it():
    store = MemoryStore()
    first = ToyLoop(manager(store, 0, 2, min_replicas=1, first_grace_s=0.1))
    assert first.round()
    for key in store.keys("g000000/r/00000000/mean"):
        store.put(key, b"gone")
    late = run_replica(store, 1, 2, 1, min_replicas=1)
    check_run(store, [first, late])
    assert late.manager.traffic.refused >= 1


def test_progress_is_read_from_the_store_alone():
    store = MemoryStore()
    with refusal(GenerationRefused, what="generation 0", got="run", expected="replica"):
        read_progress(store)
    in_threads([functools.partial(run_replica, store, rank, 2, 5, state_every=2) for rank in range(2)])
    half = manager(store, 0, 2, min_replicas=2)
    loop = ToyLoop(half)
    waiting = threading.Thread(target=lambda: in_threads([lambda: loop.round()]), daemon=True)
    waiting.start()
    until = time.monotonic() + 10
    while not (progress := read_progress(store)).offered and time.monotonic() < until:
        time.sleep(0.02)
    assert (progress.step, progress.world_size, progress.members, progress.offered) == (5, 2, (0, 1), (0,))
    assert (progress.departed, progress.state_step, progress.foreign) == ((1,), 5, 0)
    assert [each.step for each in progress.rounds] == [0, 1, 2, 3, 4]
    assert progress.num_bytes > 5 * 2 * 4 * 377
    assert all(0 < each.seconds < 30 for each in progress.rounds)
    in_threads([functools.partial(run_replica, store, 1, 2, 6, min_replicas=2)])
    waiting.join(20)
    assert read_progress(store).step == 6
