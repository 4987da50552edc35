"""Rounds over a store: bytes of a replica for 2 to 16 of them, time against put + get of the same bytes, memory.

    python benchmarks/diloco_rounds.py bytes [MB]
    python benchmarks/diloco_rounds.py time [MB]
    python benchmarks/diloco_rounds.py memory [MB]

All replicas share this machine, so times are upper bounds; what counts is the ratio within one run.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import torch

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.store import MemoryStore, open_store

LIMITS: dict[str, Any] = {"poll_s": 0.05, "grace_s": 30.0, "timeout_s": 300.0, "lease_s": 5.0}
ROUNDS = 5


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


class Link:
    """A replica's way to a store: so many bytes a second each way, and a delay for each call, as a bucket has."""

    def __init__(self, store: Any, *, megabytes_per_s: float, delay_s: float) -> None:
        self.store, self.uri = store, store.uri
        self._bytes_per_s, self._delay_s = megabytes_per_s * 2**20, delay_s
        self._up, self._down = threading.Lock(), threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ("put", "create", "get", "size", "keys", "delete"):
            raise AttributeError(name)

        def call(*values: Any, **named: Any) -> Any:
            time.sleep(self._delay_s)
            answer = getattr(self.store, name)(*values, **named)
            if name in ("put", "create"):
                self._travel(self._up, len(values[1]))
            elif name == "get":
                self._travel(self._down, len(answer))
            return answer

        return call

    def _travel(self, way: threading.Lock, num_bytes: int) -> None:
        with way:
            time.sleep(num_bytes / self._bytes_per_s)


def replica(
    store: Any, rank: int, world: int, elements: int, barrier: threading.Barrier, compare: bool
) -> dict[str, list[float]]:
    """Rounds of one vector, each beside a plain put and get of as many bytes; what each took, without joining."""
    manager = ObjectStoreManager(store, rank=rank, world_size=world, **LIMITS)
    manager.register_state_dict_fn("none", lambda _state: None, dict)
    vector = torch.randn(elements)
    figures: dict[str, list[float]] = {"seconds": [], "sent": [], "received": [], "plain": []}
    for _ in range(ROUNDS):
        manager.start_quorum()
        before = (manager.traffic.sent, manager.traffic.received)
        barrier.wait()
        began = time.perf_counter()
        manager.allreduce(vector).wait()
        barrier.wait()
        figures["seconds"].append(time.perf_counter() - began)
        assert manager.should_commit()
        figures["sent"].append(manager.traffic.sent - before[0])
        figures["received"].append(manager.traffic.received - before[1])
        if compare:
            figures["plain"].append(put_and_get(store, rank, vector, figures, barrier))
    manager.close()
    return figures


def put_and_get(
    store: Any, rank: int, vector: torch.Tensor, figures: dict[str, list[float]], barrier: threading.Barrier
) -> float:
    """Seconds until all have put and got as many bytes as the round moved, in pieces of 8 MB, four at once."""
    data = vector.numpy().tobytes()[: 8 * 2**20]
    pieces = {name: range(-(-int(figures[name][-1]) // len(data))) for name in ("sent", "received")}
    keys = [f"plain/{rank}/{at}" for at in pieces["sent"]]
    with ThreadPoolExecutor(4) as pool:
        barrier.wait()
        began = time.perf_counter()
        list(pool.map(lambda key: store.put(key, data), keys))
        list(pool.map(lambda at: store.get(keys[at % len(keys)], most_bytes=2**40), pieces["received"]))
        barrier.wait()
    return time.perf_counter() - began


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


def show_time(megabytes: float) -> None:
    for world in (2, 4, 8):
        shared = MemoryStore()
        for speed in (50, 200):
            links = [Link(shared, megabytes_per_s=speed, delay_s=0.02) for _ in range(world)]
            _show_ratio(f"{world} replicas, link of {speed} MB/s and 20 ms", links, megabytes)
            shared.delete(shared.keys(""))
    for world in (2, 4):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            _show_ratio(f"{world} replicas, one folder", [open_store(f"file://{folder}")] * world, megabytes)


def _show_ratio(name: str, stores: list[Any], megabytes: float) -> None:
    figures = hold_rounds(stores, int(megabytes * 2**20 / 4), compare=True)[0]
    ratios = sorted(ours / plain for ours, plain in zip(figures["seconds"], figures["plain"], strict=True))
    seconds, plain = median(figures["seconds"]), median(figures["plain"])
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    print(f"{name}: {seconds:.2f} s, put + get {plain:.2f} s, ratio {median(ratios):.2f} ({spread})", flush=True)


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, size = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 64.0
    if what == "peak":
        folder, rank, world = sys.argv[3:] or ("", "0", "0")
        show_peak(size, folder, int(rank), int(world))
    else:
        {"bytes": show_bytes, "time": show_time, "memory": show_memory}[what](size)
