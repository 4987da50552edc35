"""Replicas as processes over a folder: kill -9, SIGSTOP beyond a lease, restarts, clocks that are hours off."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from replica_host import ReplicaHost
from toy_replicas import Final, check_run

from composer_replication.diloco.store import open_store

NUM_QUICK, NUM_FULL = 2, 20
STEPS, WORLD, BOUND_S = 12, 3, 120.0
# Wide enough for a machine on which other tests run: what is tested is who comes and goes, not how fast.
LIMITS = {"grace_s": 1.5, "first_grace_s": 6.0, "timeout_s": 60.0, "lease_s": 1.0, "min_replicas": 1, "state_every": 3}


@pytest.fixture(scope="module")
def host():
    host = ReplicaHost()
    yield host
    host.close()


def wait_for(host: ReplicaHost, pid: int, until: float) -> int:
    while time.monotonic() < until:
        code = host.exit_code(pid)
        if code is not None:
            return code
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} is not back after {BOUND_S} s")


def play(host: ReplicaHost, folder, seed: int) -> None:
    (folder / "store").mkdir()
    dice = random.Random(seed)
    until = time.monotonic() + BOUND_S
    clocks = [dice.choice([-7200.0, 0.0, 3600.0]) for _ in range(WORLD)]

    def start(rank: int) -> int:
        run = {"folder": str(folder), "rank": rank, "world": WORLD, "steps": STEPS}
        return host.start(**run, clock_off_s=clocks[rank], **LIMITS)

    pids = [start(rank) for rank in range(WORLD)]
    time.sleep(0.3 + 1.2 * dice.random())
    victim, sleeper = dice.sample(range(WORLD), 2)
    os.kill(pids[victim], signal.SIGKILL)
    os.kill(pids[sleeper], signal.SIGSTOP)
    time.sleep(0.1 + 1.5 * dice.random())
    again = start(victim)
    time.sleep(0.5 * dice.random())
    os.kill(pids[sleeper], signal.SIGCONT)
    codes = {rank: wait_for(host, pid, until) for rank, pid in enumerate(pids)}
    assert codes.pop(victim) in (-signal.SIGKILL, 0)  # 0: it had ended before
    codes[victim] = wait_for(host, again, until)
    said = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    assert {*codes.values()} == {0}, "\n".join([f"ended with {codes}", *said])
    store = open_store(f"file://{folder}/store")
    ends = [Final(rank, STEPS, list(torch.from_numpy(np.load(folder / f"{rank}.npy")))) for rank in range(WORLD)]
    check_run(store, ends)


@pytest.mark.parametrize("seed", range(NUM_QUICK))
def test_chaos_of_processes(host, tmp_path, seed):
    play(host, tmp_path, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(NUM_QUICK, NUM_FULL))
def test_more_chaos_of_processes(host, tmp_path, seed):
    play(host, tmp_path, seed)
