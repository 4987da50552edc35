"""Replicas of a small model in the threads of one process: over one replica alone, and over torchft's own manager."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_replication.diloco.training import OuterLoop, train_replica

# Raised as errors they would end a round inside of torchft: one when it meets peers, one when it heals.
TORCHFTS_OWN_WARNINGS = [
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]
AVERAGING = OuterLoop(outer_lr=1.0, outer_momentum=0.0, nesterov=False, sync_every=4)


class OneReplica:
    """A manager of one: the mean is the replica's own, and every round commits but those in `aborted`."""

    _use_async_quorum = False

    def __init__(self, *, aborted: Sequence[int] = ()) -> None:
        self.state: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self.rounds = self.step = 0
        self.aborted = frozenset(aborted)

    def register_state_dict_fn(self, key: str, load_fn: Any, save_fn: Any) -> None:
        self.state[key] = (load_fn, save_fn)

    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def start_quorum(self) -> None: ...

    def current_step(self) -> int:
        return self.step

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Any:
        from torchft.work import _DummyWork

        return _DummyWork(tensor)

    def should_commit(self) -> bool:
        self.rounds += 1
        commits = self.rounds - 1 not in self.aborted
        self.step += commits
        return commits


def small_model(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / 3)
    return model


def batches(rank: int, number: int, seed: int = 11) -> Iterator[tuple[Tensor, Tensor]]:
    """A replica's own data; what is to be learnt is the same for all."""
    teacher, generator = small_model(99), torch.Generator().manual_seed(seed * 1000 + rank)
    for _ in range(number):
        rows = torch.randn(16, 6, generator=generator)
        yield rows, teacher(rows).detach()


def inner_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> Iterator[float]:
    for rows, wanted in batches(rank, number):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rows), wanted)
        loss.backward()
        optimizer.step()
        yield loss.item()


def vector(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()]).clone()


def run_replica(
    manager: Any, *, rank: int = 0, steps: int = 12, settings: OuterLoop = AVERAGING, seed: int = 0
) -> list[Tensor]:
    """The weights after each inner step, and those that the replica ends with."""
    model = small_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with train_replica(manager, model, optimizer, settings):
        history = [vector(model) for _ in inner_steps(model, optimizer, rank, steps)]
    return [*history, vector(model)]


@contextlib.contextmanager
def lighthouse(replicas: int) -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    # A replica that is heard of and has not asked yet is waited for; one that is gone is missed after its heartbeat.
    server = LighthouseServer(bind="[::]:0", min_replicas=replicas, join_timeout_ms=60_000, heartbeat_timeout_ms=4000)
    try:
        yield server.address()
    finally:
        server.shutdown()


@contextlib.contextmanager
def torchft_manager(address: str, rank: int, replicas: int, *, seconds: float = 20.0) -> Iterator[Any]:
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=seconds)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=replicas,
        use_async_quorum=False,
        timeout=timedelta(seconds=seconds),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica{rank}",
    )
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)


def in_threads(number: int, replica: Callable[[int], Any]) -> list[Any]:
    """One result per rank. The first error is raised; the others' waits have bounds of their own."""
    barrier = threading.Barrier(number)

    def begin(rank: int) -> Any:
        barrier.wait(60)
        return replica(rank)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(begin, range(number)))


def _announce(address: str, manager: Any) -> None:
    """Lets the Lighthouse hear of a replica before any asks for a quorum: on a busy machine two would begin alone."""
    from torchft.coordination import LighthouseClient
    from torchft.manager import REPLICA_ID_KEY

    client = LighthouseClient(address, connect_timeout=timedelta(seconds=20))
    client.heartbeat(manager._store.get(REPLICA_ID_KEY).decode())


def torchft_replicas(
    number: int, *, steps: Sequence[int] | int = 12, quorum: int | None = None, **options: Any
) -> list[list[Tensor]]:
    """What each of `number` replicas saw, over torchft's own manager and Lighthouse on loopback.

    `steps` may differ: a replica with fewer is gone for the rest.
    """
    with lighthouse(quorum or number) as address:
        all_heard_of = threading.Barrier(number)

        def replica(rank: int) -> list[Tensor]:
            with torchft_manager(address, rank, quorum or number) as manager:
                _announce(address, manager)
                all_heard_of.wait(60)
                return run_replica(manager, rank=rank, steps=_steps_of(steps, rank), **options)

        return in_threads(number, replica)


def store_replicas(
    number: int, store: Any, *, steps: Sequence[int] | int = 12, manager: Any = None, **options: Any
) -> list[list[Tensor]]:
    """The same over one object store; `manager` are options of the managers."""
    from composer_replication.diloco.rounds.manager import ObjectStoreManager

    quick = {"poll_s": 0.005, "grace_s": 1.0, "first_grace_s": 20.0, "timeout_s": 60.0, **(manager or {})}

    def replica(rank: int) -> list[Tensor]:
        with ObjectStoreManager(store, rank=rank, world_size=number, **quick) as mine:
            return run_replica(mine, rank=rank, steps=_steps_of(steps, rank), **options)

    return in_threads(number, replica)


def largest_gap(histories: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> float:
    """The largest difference of any weight of any replica after any step."""
    pairs = [pair for both in zip(histories, others, strict=True) for pair in zip(*both, strict=True)]
    return max((mine - other).abs().max().item() for mine, other in pairs)


def _steps_of(steps: Sequence[int] | int, rank: int) -> int:
    return steps if isinstance(steps, int) else steps[rank]
