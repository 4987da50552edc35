"""Start the replicas of a launch, start dead ones again, say how all of them are doing, end them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from composer_replication.diloco.rounds.failures import GenerationRefused
from composer_replication.diloco.rounds.progress import Progress, read_progress
from composer_replication.diloco.serverless.executor import ENDED, Executor, ReplicaHandle, ReplicaJob
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import InputError, explain
from composer_replication.steps.replicas.launches import Launch, note_handle, read_handles

EXECUTORS = {"local": "local_process.LocalProcessExecutor", "modal": "modal.ModalExecutor"} | {
    "hf_jobs": "hf_jobs.HFJobsExecutor",
    "ray": "ray.RayExecutor",
}
UNREACHABLE = "unknown"


class Standing(NamedTuple):
    """How one replica is doing: what its service says, and what the bucket shows of it."""

    rank: int
    status: str
    attempt: int
    in_round: str  # waited for, offered, left; of the round that is open
    where: str


@dataclass(frozen=True)
class Sight:
    """A launch at one moment."""

    launch: Launch
    replicas: Sequence[Standing]
    progress: Progress | None  # None before the first replica has begun

    @property
    def is_over(self) -> bool:
        return all(each.status in ENDED for each in self.replicas)

    @property
    def eta_s(self) -> float | None:
        """By the mean time of a commit since the launch, start-up included."""
        total = self.launch.commits
        if self.progress is None or not self.progress.step or total is None:
            return None
        elapsed = max(0.0, time.time() - self.launch.started)
        return elapsed / self.progress.step * max(0, total - self.progress.step)


def make_executor(name: str, options: Mapping[str, Any]) -> Executor:
    """The executor that a launch names."""
    from importlib import import_module

    if name not in EXECUTORS:
        raise InputError(explain("--executor", got=repr(name), expected=f"one of {', '.join(EXECUTORS)}"))
    module, _, kind = EXECUTORS[name].partition(".")
    home = import_module(f"composer_replication.diloco.serverless.{module}")
    try:
        return getattr(home, kind)(**options)
    except TypeError as error:
        raise InputError(explain(f"options of {kind}", got=sorted(options), expected=str(error))) from error


def start(store: ObjectStore, launch: Launch, executor: Executor) -> list[ReplicaHandle]:
    """Start all replicas, and note who they are."""
    handles = executor.launch_replicas(
        launch.replicas, launch.entrypoint, launch.entrypoint_args(), gpu=launch.gpu, timeout=launch.timeout_s
    )
    for handle in handles:
        note_handle(store, launch, handle)
    return handles


def look(store: ObjectStore, launch: Launch, executor: Executor | None) -> Sight:
    """How a launch is doing; without its executor by what the bucket shows."""
    try:
        progress = read_progress(store, launch.number)
    except GenerationRefused:
        progress = None
    standings = []
    for handle in read_handles(store, launch):
        status = UNREACHABLE if executor is None or not executor.reaches(handle) else executor.poll(handle)
        names = {key: value for key, value in handle.metadata.items() if key in ("pid", "sandbox", "job", "actor")}
        standings.append(
            Standing(
                rank=handle.rank,
                status=status,
                attempt=int(handle.metadata.get("attempt", 0)),
                in_round=_in_round(handle.rank, progress),
                where=" ".join(f"{key} {value}" for key, value in names.items()),
            )
        )
    return Sight(launch, standings, progress)


def _in_round(rank: int, progress: Progress | None) -> str:
    if progress is None:
        return ""
    if rank in progress.left:
        return "left"
    if rank in progress.stragglers:
        return "waited for"
    return "offered" if rank in progress.offered else "training"


def tend(
    store: ObjectStore,
    launch: Launch,
    executor: Executor,
    *,
    relaunches: int,
    seen: Callable[[Sight], None] = lambda _sight: None,
    said: Callable[[str], None] = lambda _text: None,
    every_s: float = 2.0,
) -> Sight:
    """Watch until all have ended; one that failed is started again, `relaunches` times at most each."""
    while True:
        sight = look(store, launch, executor)
        seen(sight)
        handles = {each.rank: each for each in read_handles(store, launch)}
        again = [handles[each.rank] for each in sight.replicas if each.status == "failed" and each.attempt < relaunches]
        for handle in again:
            (outcome,) = executor.collect([handle], timeout=0)
            fresh = executor.relaunch(handle, _job_again(launch, executor, handle))
            note_handle(store, launch, fresh)
            said(f"rank {handle.rank}: {outcome['error']}; started again ({fresh.metadata['attempt']} of {relaunches})")
        if sight.is_over and not again:
            return sight
        time.sleep(every_s)


def _job_again(launch: Launch, executor: Executor, handle: ReplicaHandle) -> ReplicaJob:
    """The same job; its rank is free, which nobody but whoever saw it end can know."""
    args = launch.entrypoint_args(takeover=True)
    job = executor.job(launch.entrypoint, args, gpu=launch.gpu, timeout_s=launch.timeout_s)
    return replace(job, rank=handle.rank)


def cancel(store: ObjectStore, launch: Launch, executor: Executor) -> Sight:
    """End every replica that has not ended."""
    for handle in read_handles(store, launch):
        executor.cancel(handle)
    return look(store, launch, executor)
