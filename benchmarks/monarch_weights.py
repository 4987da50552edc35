"""Measure ways to send weights between actors: shared memory, an argument, or Monarch's RDMA buffers.

    python benchmarks/monarch_weights.py --mib 512

The actors are two processes on one host. Without ibverbs the buffers use TCP. Needs the extra `monarch`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_replication.optional import require
from composer_replication.recipes.monarch.tensor_file import SharedWeights, shared_memory_folder

monarch: Any = require("monarch.actor", extra="monarch")
rdma: Any = require("monarch.rdma", extra="monarch")


def weights_of(mib: int) -> nn.Module:
    """Return a module with sixteen fp32 matrices of `mib` MiB in total."""
    return nn.ModuleList([nn.Linear(1024, mib * 16, bias=False) for _ in range(16)])


class Writer(monarch.Actor):
    def __init__(self, mib: int, folder: str) -> None:
        self._model, self._shared = weights_of(mib), SharedWeights(folder)
        self._flat = torch.cat([parameter.detach().reshape(-1) for parameter in self._model.parameters()]).view(
            torch.uint8
        )

    @monarch.endpoint
    async def publish(self, version: int) -> float:
        begin = time.perf_counter()
        self._shared.publish(self._model, version)
        return time.perf_counter() - begin

    @monarch.endpoint
    async def as_an_answer(self) -> Any:
        return self._flat

    @monarch.endpoint
    async def as_a_buffer(self) -> Any:
        return rdma.RDMABuffer(self._flat)


class Reader(monarch.Actor):
    def __init__(self, mib: int, folder: str) -> None:
        self._model, self._shared = weights_of(mib), SharedWeights(folder)
        self._flat = torch.zeros(mib << 20, dtype=torch.uint8)

    @monarch.endpoint
    async def load(self, version: int) -> float:
        begin = time.perf_counter()
        self._shared.load_into(self._model, version)
        return time.perf_counter() - begin

    @monarch.endpoint
    async def read(self, buffer: Any) -> float:
        begin = time.perf_counter()
        await buffer.read_into(self._flat)
        return time.perf_counter() - begin


async def measure(mib: int, rounds: int, folder: str) -> None:
    meshes = [monarch.this_host().spawn_procs(per_host={"gpus": 1}, name=name) for name in ("writer", "reader")]
    writer, reader = (
        mesh.spawn(kind.__name__.lower(), kind, mib, folder)
        for mesh, kind in zip(meshes, (Writer, Reader), strict=True)
    )
    rows: dict[str, list[float]] = {"shared memory, written": [], "shared memory, read": [], "argument": [], "RDMA": []}
    buffer = await writer.as_a_buffer.call_one()
    for version in range(rounds):
        rows["shared memory, written"].append(await writer.publish.call_one(version))
        rows["shared memory, read"].append(await reader.load.call_one(version))
        begin = time.perf_counter()
        await writer.as_an_answer.call_one()
        rows["argument"].append(time.perf_counter() - begin)
        rows["RDMA"].append(await reader.read.call_one(buffer))
    print(f"{mib} MiB, best of {rounds}, RDMA by {rdma.get_rdma_backend()}")
    for name, seconds in rows.items():
        print(f"{name:24} {mib * 1.048576 / min(seconds):8.0f} MB/s")
    for mesh in meshes:
        await mesh.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as run:
        folder = shared_memory_folder(Path(run))
        try:
            asyncio.run(measure(options.mib, options.rounds, str(folder)))
        finally:
            SharedWeights(folder).remove()


if __name__ == "__main__":
    main()
