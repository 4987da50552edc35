"""Rounds over a store: bytes of a replica for 2 to 16 of them, time against put + get of the same bytes, memory.

    python benchmarks/diloco_rounds.py bytes [MB]
    python benchmarks/diloco_rounds.py time [MB] [--speeds 50 200 0] [--worlds 2 4 8]
    python benchmarks/diloco_rounds.py threads [MB] [--speeds 50 200] [--worlds 2 4 8]
    python benchmarks/diloco_rounds.py memory [MB]

All replicas share this machine, so times are upper bounds; what counts is the ratio within one run. `time` gives each
replica a process, and its store is a folder: in memory behind a link of so many MB/s, or on the disk where the speed is
0. Round and put + get pay for the same copies then. `threads` has all replicas in one interpreter and the objects in
its own memory: what the bucket holds is paid for by whoever puts it, and a put of the same bytes again costs nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.store import MemoryStore, open_store

LIMITS: dict[str, Any] = {"poll_s": 0.05, "grace_s": 30.0, "timeout_s": 300.0, "lease_s": 5.0}
ROUNDS, WARM = 7, 3
"""What is measured, after rounds that are not: by then retention deletes as much as a round writes."""


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


class Link:
    """A replica's way to a store: so many bytes a second each way, and a delay for each call, as a bucket has."""

    def __init__(self, store: Any, *, megabytes_per_s: float, delay_s: float) -> None:
        self.store, self.uri = store, store.uri
        self._bytes_per_s, self._delay_s = megabytes_per_s * 2**20, delay_s
        self._free = {"up": 0.0, "down": 0.0}  # when what is under way has arrived
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ("put", "create", "get", "size", "keys", "delete"):
            raise AttributeError(name)

        def call(*values: Any, **named: Any) -> Any:
            time.sleep(self._delay_s)
            answer = getattr(self.store, name)(*values, **named)
            if name in ("put", "create"):
                self._travel("up", len(values[1]))
            elif name == "get":
                self._travel("down", len(answer))
            return answer

        return call

    def _travel(self, way: str, num_bytes: int) -> None:
        """One after the other, and a link loses no time to a sleeper that is woken late."""
        with self._lock:
            self._free[way] = max(time.perf_counter(), self._free[way]) + num_bytes / self._bytes_per_s
            arrives = self._free[way]
        time.sleep(max(0.0, arrives - time.perf_counter()))


def replica(
    store: Any, rank: int, world: int, elements: int, barrier: threading.Barrier, compare: bool
) -> dict[str, list[float]]:
    """Rounds of one vector, each beside a plain put and get of as many bytes; what each took, without joining.

    `cpu` and `plain_cpu` are of the process: of one replica where each has its own.
    """
    manager = ObjectStoreManager(store, rank=rank, world_size=world, **LIMITS)
    manager.register_state_dict_fn("none", lambda _state: None, dict)
    vector = torch.randn(elements)
    names = ("seconds", "cpu", "calls", "sent", "received", "plain", "plain_cpu")
    figures: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(WARM + ROUNDS if compare else ROUNDS):
        manager.start_quorum()
        before = replace(manager.traffic)
        barrier.wait()
        began, cpu = time.perf_counter(), time.process_time()
        manager.allreduce(vector).wait()
        barrier.wait()
        figures["seconds"].append(time.perf_counter() - began)
        figures["cpu"].append(time.process_time() - cpu)
        assert manager.should_commit()
        for name in ("calls", "sent", "received"):
            figures[name].append(getattr(manager.traffic, name) - getattr(before, name))
        if compare:
            put_and_get(store, rank, vector, figures, barrier)
    manager.close()
    return {name: each[-ROUNDS:] for name, each in figures.items()}


def put_and_get(
    store: Any, rank: int, vector: torch.Tensor, figures: dict[str, list[float]], barrier: threading.Barrier
) -> None:
    """How long until all have put and got as many bytes as the round moved, in pieces of 8 MB, four at once."""
    data = vector.numpy().tobytes()[: 8 * 2**20]
    pieces = {name: range(-(-int(figures[name][-1]) // len(data))) for name in ("sent", "received")}
    keys = [f"plain/{rank}/{at}" for at in pieces["sent"]]
    with ThreadPoolExecutor(4) as pool:
        barrier.wait()
        began, cpu = time.perf_counter(), time.process_time()
        list(pool.map(lambda key: store.put(key, data), keys))
        list(pool.map(lambda at: len(store.get(keys[at % len(keys)], most_bytes=2**40)), pieces["received"]))
        barrier.wait()
        figures["plain"].append(time.perf_counter() - began)
        figures["plain_cpu"].append(time.process_time() - cpu)


def hold_rounds(stores: list[Any], elements: int, *, compare: bool = False) -> list[dict[str, list[float]]]:
    barrier, world = threading.Barrier(len(stores)), len(stores)
    return together(
        [lambda rank=rank: replica(stores[rank], rank, world, elements, barrier, compare) for rank in range(world)]
    )


def show_bytes(megabytes: float) -> None:
    elements = int(megabytes * 2**20 / 4)
    print(f"payload {megabytes:g} MB, fp32; in payloads, the largest of all replicas and rounds")
    for world in (2, 3, 4, 8, 16):
        results = hold_rounds([MemoryStore()] * world, elements)
        sent, received = (max(max(each[name]) for each in results) / (4 * elements) for name in ("sent", "received"))
        print(f"{world:3d} replicas: sent {sent:.3f}, received {received:.3f}")


def show_time(megabytes: float, speeds: list[float], worlds: list[int]) -> None:
    """Each replica in a process of its own, over a folder that they share."""
    for world in worlds:
        for speed in speeds:
            place = "/dev/shm" if speed and Path("/dev/shm").is_dir() else os.environ.get("TMPDIR")
            with tempfile.TemporaryDirectory(dir=place) as folder:
                figures = _in_processes(folder, speed, world, megabytes)
            name = f"link of {speed:g} MB/s and 20 ms" if speed else "one folder on the disk"
            _show_ratio(f"{world} replicas, {name}", figures)


def _in_processes(folder: str, speed: float, world: int, megabytes: float) -> dict[str, list[float]]:
    context = multiprocessing.get_context("forkserver")
    barrier, answers = context.Barrier(world), context.SimpleQueue()
    common = (folder, speed, world, int(megabytes * 2**20 / 4), barrier, answers)
    replicas = [context.Process(target=_replica_process, args=(rank, *common)) for rank in range(world)]
    for each in replicas:
        each.start()
    for each in replicas:
        each.join()
    return answers.get()


def _replica_process(
    rank: int, folder: str, speed: float, world: int, elements: int, barrier: threading.Barrier, answers: Any
) -> None:
    torch.set_num_threads(1)
    store: Any = open_store(f"file://{folder}")
    if speed:
        store = Link(store, megabytes_per_s=speed, delay_s=0.02)
    figures = replica(store, rank, world, elements, barrier, True)
    if rank == 0:
        answers.put(figures)


def show_threads(megabytes: float, speeds: list[float], worlds: list[int]) -> None:
    """All replicas in this process, over a store in its memory."""
    for world in worlds:
        for speed in filter(None, speeds):
            shared = MemoryStore()
            links = [Link(shared, megabytes_per_s=speed, delay_s=0.02) for _ in range(world)]
            figures = hold_rounds(links, int(megabytes * 2**20 / 4), compare=True)[0]
            _show_ratio(f"{world} replicas as threads, link of {speed:g} MB/s and 20 ms", figures)


def _show_ratio(name: str, figures: dict[str, list[float]]) -> None:
    ratios = sorted(ours / plain for ours, plain in zip(figures["seconds"], figures["plain"], strict=True))
    seconds, cpu, calls, plain, plain_cpu = (
        median(figures[each]) for each in ("seconds", "cpu", "calls", "plain", "plain_cpu")
    )
    print(
        f"{name}: {seconds:.2f} s, put + get {plain:.2f} s, ratio {median(ratios):.2f} ({ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}); CPU of the process {cpu:.2f} s and {plain_cpu:.2f} s; {calls:.0f} calls",
        flush=True,
    )


class NoManager:
    """torchft's DiLoCo alone: what it keeps, without any exchange."""

    _use_async_quorum = False
    step = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def current_step(self) -> int:
        return self.step

    def should_commit(self) -> bool:
        self.step += 1
        return True


def show_peak(megabytes: float, folder: str = "", rank: int = 0, world: int = 0) -> None:
    """Peak MB of this process after three outer steps; without a world, of torchft's DiLoCo alone."""
    from torchft.local_sgd import DiLoCo

    torch.manual_seed(0)
    side = int((megabytes * 2**20 / 4 / 4) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(side, side, bias=False) for _ in range(4)])
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager: Any = NoManager()
    if world:
        manager = ObjectStoreManager(f"file://{folder}", rank=rank, world_size=world, state_every=100, **LIMITS)
    with DiLoCo(manager, [model], inner, outer, sync_every=1):
        while manager.current_step() < 3:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            inner.step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def show_memory(megabytes: float) -> None:
    """Each replica is a process whose freed memory goes back at once: what is left are numbers that are in use."""

    def peak(*arguments: Any) -> float:
        command = [sys.executable, __file__, "peak", *map(str, (megabytes, *arguments))]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
        return float(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)

    alone = peak()
    for world in (2, 4):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            peaks = together([partial(peak, folder, rank, world) for rank in range(world)])
        more, shard = max(peaks) - alone, megabytes / world
        print(
            f"{world} replicas, {megabytes:g} MB: torchft alone {alone:.0f} MB, with rounds {more:+.0f} MB, "
            f"which is {more / shard:.2f} shards of {shard:.0f} MB",
            flush=True,
        )


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "peak":
        folder, rank, world = sys.argv[3:] or ("", "0", "0")
        show_peak(float(sys.argv[2]), folder, int(rank), int(world))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "time", "threads", "memory"])
    parser.add_argument("megabytes", type=float, nargs="?", default=64.0)
    parser.add_argument("--speeds", type=float, nargs="+", default=[50.0, 200.0, 0.0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    given = parser.parse_args()
    if given.what in ("time", "threads"):
        {"time": show_time, "threads": show_threads}[given.what](given.megabytes, given.speeds, given.worlds)
    else:
        {"bytes": show_bytes, "memory": show_memory}[given.what](given.megabytes)


if __name__ == "__main__":
    main()
