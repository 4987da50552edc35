"""Measure DiLoCo rounds over a store: bytes per replica, time compared with plain put + get, and memory.

    python benchmarks/diloco_rounds.py bytes [MB]
    python benchmarks/diloco_rounds.py time [MB] [--speeds 50 200 0] [--worlds 2 4 8]
    python benchmarks/diloco_rounds.py threads [MB] [--speeds 50 200] [--worlds 2 4 8]
    python benchmarks/diloco_rounds.py memory [MB]

All replicas share this machine, so times are upper bounds; the ratio within one run is what counts. With `time` each
replica is a process and the store is a folder: in memory behind a simulated link of so many MB/s, or on disk if the
speed is 0. The round and put + get then copy the same data. With `threads` all replicas run in one interpreter and
share objects in its memory: only the replica that puts an object pays for it, and putting the same bytes again is free.
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
# Measured rounds, and warm-up rounds before them, after which retention deletes as much as a round writes.
ROUNDS, WARM = 7, 3


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


class Link:
    """A replica's simulated link to a store, with a bandwidth in each direction and a latency per call."""

    def __init__(self, store: Any, *, megabytes_per_s: float, delay_s: float) -> None:
        self.store, self.uri = store, store.uri
        self._bytes_per_s, self._delay_s = megabytes_per_s * 2**20, delay_s
        self._free = {"up": 0.0, "down": 0.0}  # when the last transfer in each direction ends
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
        """Wait for a transfer. Transfers are sequential, and a thread that wakes up late does not delay the link."""
        with self._lock:
            self._free[way] = max(time.perf_counter(), self._free[way]) + num_bytes / self._bytes_per_s
            arrives = self._free[way]
        time.sleep(max(0.0, arrives - time.perf_counter()))


def replica(
    store: Any, rank: int, world: int, elements: int, barrier: threading.Barrier, compare: bool
) -> dict[str, list[float]]:
    """Run rounds on a vector, each followed by a plain put and get of as many bytes, and return their seconds.

    Joining is not measured. `cpu` and `plain_cpu` are processor times of the whole process.
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
    """Measure until all replicas have put and got as many bytes as the round moved, in parts of 8 MB, four at once."""
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
        sent, received = (
            max(max(result[name]) for result in results) / (4 * elements) for name in ("sent", "received")
        )
        print(f"{world:3d} replicas: sent {sent:.3f}, received {received:.3f}")


def show_time(megabytes: float, speeds: list[float], worlds: list[int]) -> None:
    """Measure with each replica in a process of its own and a shared folder as the store."""
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
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join()
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
    """Measure with all replicas in this process and a store in its memory."""
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
    """A manager that exchanges nothing, to measure the memory of torchft's DiLoCo alone."""

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
    """Print the peak MB of this process after three outer steps; if `world` is 0, of torchft's DiLoCo alone."""
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
    """Measure the memory of replicas in processes of their own, which return freed memory to the system at once."""

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
