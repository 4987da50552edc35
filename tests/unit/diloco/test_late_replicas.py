"""Replicas that wake, come back or join when the others have finished: they end at once, and wait for nobody."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from faulty_stores import Faults, FaultyStore
from replica_host import ReplicaHost
from test_chaos_processes import wait_for
from toy_replicas import QUICK, Final, ToyLoop, check_run, commits, in_threads, run_replica

from composer_replication.diloco.rounds import settings
from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.patience import QuorumLeft, RoundTimeout, StateUnreadable
from composer_replication.diloco.rounds.progress import read_progress
from composer_replication.diloco.serverless import ObjectStoreAllReduce
from composer_replication.diloco.store import MemoryStore, open_store

WITHIN_S, TIMEOUT_S = 5.0, 300.0
NUM_QUICK, NUM_FULL = 1, 10
WORLD, STEPS = 4, 12
LIMITS = {"grace_s": 0.5, "first_grace_s": 10.0, "timeout_s": TIMEOUT_S, "lease_s": 1.0, "min_replicas": 2}
IN_THREADS = {**QUICK, "timeout_s": TIMEOUT_S, "grace_s": 0.2}


@pytest.fixture(scope="module")
def host():
    host = ReplicaHost()
    yield host
    host.close()


@pytest.fixture
def short_grace(monkeypatch):
    """Let a replica that does not know its number of commits wait 0.1 s for those that have finished."""
    monkeypatch.setattr(settings, "_MAX_RETURN_S", 0.1)


def wake_one_after_the_end(host, folder, seed: int) -> float:
    """Pause a process at a random moment until the others have ended; return how long it takes to end then."""
    (folder / "store").mkdir()
    dice, run = random.Random(seed), {"folder": str(folder), "world": WORLD, "steps": STEPS, "clock_off_s": 0.0}
    pids = [host.start(**run, rank=rank, state_every=3, **LIMITS) for rank in range(WORLD)]
    sleeper = dice.randrange(WORLD)
    started = folder / "store" / "g000000" / "claims" / f"{sleeper:05d}"
    until = time.monotonic() + 60
    while not started.exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(1.5 * dice.random())
    os.kill(pids[sleeper], signal.SIGSTOP)
    codes = [wait_for(host, pid, until) for rank, pid in enumerate(pids) if rank != sleeper]
    assert codes == [0] * (WORLD - 1)
    began = time.monotonic()
    os.kill(pids[sleeper], signal.SIGCONT)
    code = wait_for(host, pids[sleeper], began + 60)
    seconds = time.monotonic() - began
    assert code == 0, [path.read_text() for path in folder.glob("error-*.txt")]
    ends = [Final(rank, STEPS, list(torch.from_numpy(np.load(folder / f"{rank}.npy")))) for rank in range(WORLD)]
    assert len(check_run(open_store(f"file://{folder}/store"), ends)) == STEPS
    return seconds


@pytest.mark.parametrize("seed", range(NUM_QUICK))
def test_a_process_that_wakes_after_the_end_ends(host, tmp_path, seed):
    assert wake_one_after_the_end(host, tmp_path, seed) < WITHIN_S


@pytest.mark.full
@pytest.mark.parametrize("seed", range(NUM_QUICK, NUM_QUICK + NUM_FULL))
def test_more_processes_that_wake_after_the_end_end(host, tmp_path, seed, note):
    seconds = wake_one_after_the_end(host, tmp_path, seed)
    note(f"a late process ended {seconds:.1f} s after it woke")
    assert seconds < WITHIN_S


def sleep_at(call: int, *, steps: int = 3) -> None:
    """Let rank 2 of 3 sleep at one of its requests until the others have finished."""
    store = MemoryStore()
    slow = FaultyStore(store, Faults(), seed=0)
    options = {**IN_THREADS, "min_replicas": 2, "first_grace_s": 0.4, "state_every": 2}
    requests = slow._call

    def pausing(request):
        if threading.current_thread().name == "sleeper" and slow.calls + 1 >= call:
            others_ended.wait(60)
        return requests(request)

    others_ended = threading.Event()
    slow._call = pausing
    ended: list[ToyLoop | Exception] = []

    def sleeper():
        try:
            ended.append(run_replica(slow, 2, 3, steps, **options))
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=sleeper, name="sleeper", daemon=True)
    thread.start()
    loops = in_threads([functools.partial(run_replica, store, rank, 3, steps, **options) for rank in range(2)])
    others_ended.set()
    began = time.monotonic()
    thread.join(60)
    assert time.monotonic() - began < WITHIN_S, f"call {call}"
    assert len(check_run(store, [*loops, *ended])) == steps


@pytest.mark.parametrize("call", [3, 24, 40])
def test_one_that_sleeps_at_a_request_ends_when_it_wakes(call):
    sleep_at(call)


@pytest.mark.full
@pytest.mark.parametrize("call", range(1, 120))
def test_one_that_sleeps_at_any_request_ends_when_it_wakes(call):
    sleep_at(call)


def finished(store, world, steps, *, ranks, **options):
    """Some replicas of a world, which make so many exchanges and leave."""
    options = {**IN_THREADS, "first_grace_s": 0.2, **options}
    return in_threads([functools.partial(run_replica, store, rank, world, steps, **options) for rank in ranks])


def test_one_that_never_took_part_has_the_last_state_and_adds_nothing():
    store = MemoryStore()
    loops = finished(store, 3, 3, ranks=(0, 1), min_replicas=2)
    began = time.monotonic()
    late = run_replica(store, 2, 3, 3, **{**IN_THREADS, "min_replicas": 2})
    assert time.monotonic() - began < WITHIN_S
    assert len(check_run(store, [*loops, late])) == 3


@pytest.mark.parametrize("failed", [False, True], ids=["finished", "failed"])
@pytest.mark.usefixtures("short_grace")
def test_a_quorum_that_cannot_come_is_not_waited_for(failed):
    """One that failed may be started again: it is waited for."""
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError) if failed else pytest.MonkeyPatch.context():
        manager = ObjectStoreManager(store, rank=0, world_size=2, **{**IN_THREADS, "first_grace_s": 0.1})
        with manager:
            assert ToyLoop(manager).round()
            if failed:
                raise ZeroDivisionError
    limits = {**IN_THREADS, "min_replicas": 2, "timeout_s": 0.5 if failed else TIMEOUT_S}
    began = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run_replica(store, 1, 2, 5, **limits)
    assert isinstance(caught.value, QuorumLeft) == (not failed)
    assert time.monotonic() - began < WITHIN_S


@pytest.mark.usefixtures("short_grace")
def test_a_goodbye_that_comes_while_a_replica_waits_ends_the_wait():
    store = MemoryStore()
    options = {**IN_THREADS, "min_replicas": 2}
    first, second = in_threads(
        [lambda rank=rank: ToyLoop(ObjectStoreManager(store, rank=rank, world_size=2, **options)) for rank in range(2)]
    )
    threading.Timer(0.3, first.manager.close).start()
    began = time.monotonic()
    with pytest.raises(QuorumLeft):
        second.round()
    assert time.monotonic() - began < WITHIN_S


@pytest.mark.usefixtures("short_grace")
def test_a_state_that_nobody_can_publish_any_more_is_not_waited_for():
    store = MemoryStore()
    manager = ObjectStoreManager(store, rank=0, world_size=2, **{**IN_THREADS, "min_replicas": 1})
    late = ToyLoop(manager)
    finished(store, 2, 3, ranks=(1,), min_replicas=1, state_every=100)
    for key in [*store.keys("g000000/states"), *store.keys("g000000/d"), *store.keys("g000000/r/00000000/mean")]:
        store.delete([key])
    began = time.monotonic()
    with pytest.raises(StateUnreadable):
        late.round()
    assert time.monotonic() - began < WITHIN_S


@pytest.mark.parametrize("says_when", [True, False], ids=["commits are known", "the others have left"])
def test_a_round_that_learns_of_the_end_is_not_held(says_when):
    """With a quorum of one it would add an exchange that no other replica has."""
    store = MemoryStore()
    options = {**IN_THREADS, "min_replicas": 1, "state_every": 2}
    manager = ObjectStoreManager(store, rank=0, world_size=2, **options)
    late = ToyLoop(manager)
    if says_when:
        manager.end_after(4)
    finished(store, 2, 4, ranks=(1,), min_replicas=1)
    began = time.monotonic()
    assert not late.round()
    assert manager.current_step() == 4
    assert len(list(commits(store))) == 4
    went_on = [late.round(), late.round()]  # whoever does not say when the run ends may go on, once it was healed
    assert went_on == [False, not says_when]
    manager.close()
    assert time.monotonic() - began < WITHIN_S
    check_run(store, [late])


@pytest.mark.usefixtures("short_grace")
def test_a_late_process_of_an_all_reduce_does_not_wait_for_those_who_gave_up():
    store = MemoryStore()
    gave_up = ObjectStoreAllReduce(store, 0, 2, timeout_s=0.2, poll_interval_s=0.02)
    with pytest.raises(TimeoutError):
        gave_up.allreduce(torch.ones(2))
    late = ObjectStoreAllReduce(store, 1, 2, timeout_s=TIMEOUT_S, poll_interval_s=0.02)
    began, vector = time.monotonic(), torch.zeros(2)
    assert torch.equal(late.allreduce(vector), torch.full((2,), 0.5))  # both offers of this round are there
    with pytest.raises(QuorumLeft):
        late.allreduce(vector)
    assert time.monotonic() - began < WITHIN_S


def train_to(store, rank: int, steps: int, *, says_when: bool, after_s: float = 0.0, **options) -> ToyLoop:
    """One of two replicas that need each other, which starts after a while and is closed at a step."""
    time.sleep(after_s)
    manager = ObjectStoreManager(store, rank=rank, world_size=2, **{**IN_THREADS, "min_replicas": 2, **options})
    if says_when:
        manager.end_after(steps)
    loop = ToyLoop(manager)
    while manager.current_step() < steps:
        loop.round()
    manager.close()
    return loop


@pytest.mark.parametrize("says_when", [True, False], ids=["commits are known", "commits are not known"])
def test_replicas_that_extend_a_run_wait_for_one_another(says_when):
    store = MemoryStore()
    for steps, after_s in ((2, 0.0), (4, 0.5)):
        replica = functools.partial(train_to, store, steps=steps, says_when=says_when, timeout_s=20.0)
        loops = in_threads([functools.partial(replica, 0), functools.partial(replica, 1, after_s=after_s)])
        assert len(check_run(store, loops)) == steps


@pytest.mark.parametrize("cause", ["preempted", "an exception", "closed before its last commit"])
def test_a_replica_that_was_closed_and_is_started_again_is_waited_for(cause, monkeypatch):
    """Only the first looks as if it had finished: the grace is for that one."""
    store = MemoryStore()
    if cause != "preempted":
        monkeypatch.setattr(settings, "_MAX_RETURN_S", 0.0)

    def interrupted():
        manager = ObjectStoreManager(store, rank=1, world_size=2, **{**IN_THREADS, "min_replicas": 2})
        if cause == "closed before its last commit":
            manager.end_after(4)
        loop = ToyLoop(manager)
        try:
            while manager.current_step() < 2:
                loop.round()
            if cause == "an exception":
                raise ZeroDivisionError
        except ZeroDivisionError:
            manager.close()
        else:
            manager.close()
        return train_to(store, 1, 4, says_when=False, after_s=0.5)

    loops = in_threads([lambda: train_to(store, 0, 4, says_when=False, timeout_s=20.0), interrupted])
    assert len(check_run(store, loops)) == 4


@pytest.mark.usefixtures("short_grace")
def test_nobody_waits_for_one_that_gave_up_and_was_not_closed():
    """Its offer counts in the round in which it gave up, as that of any process that died; then nobody waits for it."""
    store = MemoryStore()
    loops = in_threads([functools.partial(train_to, store, rank, 2, says_when=False) for rank in range(2)])
    check_run(store, loops)
    for rank in range(2):
        began = time.monotonic()
        with pytest.raises(QuorumLeft):
            train_to(store, rank, 6, says_when=False)
        assert time.monotonic() - began < WITHIN_S
    assert len(check_run(store, [])) == 3


def test_one_whose_round_timed_out_has_left_and_may_go_on():
    store = MemoryStore()
    options = {**IN_THREADS, "min_replicas": 2, "timeout_s": 1.0}
    first = ToyLoop(ObjectStoreManager(store, rank=0, world_size=2, **options))
    with pytest.raises(RoundTimeout):
        first.round()
    assert read_progress(store).departed == (0,)
    second = ToyLoop(ObjectStoreManager(store, rank=1, world_size=2, **options))
    for _ in range(2):
        assert in_threads([first.round, second.round]) == [True, True]
    assert read_progress(store).departed == ()
    check_run(store, [first, second])


def test_a_late_replica_that_waits_for_the_others_ends_in_time():
    manager = ObjectStoreManager(MemoryStore(), rank=0, world_size=2)
    assert 0 < manager._settings.return_grace_s(None) < WITHIN_S
    assert manager._settings.return_grace_s(4) == 0
