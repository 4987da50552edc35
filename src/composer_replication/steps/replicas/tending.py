"""Say how the replicas of a launch are doing, and start those again that died before the run's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer_replication.diloco.rounds.failures import GenerationRefused
from composer_replication.diloco.rounds.patience import PatientStore, Traffic
from composer_replication.diloco.rounds.progress import Progress, read_progress
from composer_replication.diloco.rounds.reading import read_record
from composer_replication.diloco.rounds.records import Layout, unpack
from composer_replication.diloco.serverless.answers import in_brief, tried
from composer_replication.diloco.serverless.executor import ENDED, Executor, ReplicaHandle
from composer_replication.diloco.store import ObjectStore, StoreError
from composer_replication.errors import ComposerError, InputError
from composer_replication.steps.replicas.launch_file import LaunchFile, Start
from composer_replication.steps.replicas.launches import Launch, Notice, refuse_another
from composer_replication.steps.replicas.replica import DONE
from composer_replication.steps.replicas.starting import is_settled, start_one

UNREACHABLE = "unknown"
_KNOWN_AS = ("pid", "sandbox", "job", "actor")
_NOT_NOW = "the bucket cannot be read"
_LATE_S = 60.0  # between two looks for machines that came after their rank was started again


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

    launch: Notice
    replicas: Sequence[Standing]
    progress: Progress | None  # None before the first replica has begun
    trouble: str | None = None  # why the rounds cannot be read

    @property
    def is_over(self) -> bool:
        return all(each.status in ENDED for each in self.replicas)

    @property
    def end(self) -> str | None:
        """By what the run has ended; None while it goes on."""
        if finished := [each.rank for each in self.replicas if each.status == "succeeded"]:
            return f"rank {finished[0]} has finished"
        total = self.launch.commits
        is_at_end = total is not None and self.progress is not None and self.progress.step >= total
        return f"all {total} exchanges are made" if is_at_end else None

    @property
    def eta_s(self) -> float | None:
        """By the mean time of a commit since the launch, start-up included."""
        total = self.launch.commits
        if self.progress is None or not self.progress.step or total is None:
            return None
        elapsed = max(0.0, time.time() - self.launch.started)
        return elapsed / self.progress.step * max(0, total - self.progress.step)


def look(store: ObjectStore | None, file: LaunchFile, executor: Executor | None) -> Sight:
    """How a launch is doing: replicas by the launch's file and their service, rounds by the bucket, where one is."""
    record = file.read()
    progress, trouble = (None, None) if store is None else _read_rounds(store, record.launch)
    standings = []
    for start in record.newest.values():
        handle, status = _asked(file, record.launch, start, executor)
        names = {key: value for key, value in ({} if handle is None else handle.metadata).items() if key in _KNOWN_AS}
        where = " ".join(f"{key} {value}" for key, value in names.items())
        in_round = _in_round(start.rank, progress)
        standings.append(Standing(start.rank, status, start.attempt, in_round, where))
    return Sight(record.launch, standings, progress, trouble)


def look_at_bucket(store: ObjectStore, notice: Notice) -> Sight:
    """How a launch is doing by what the bucket shows of it, to whoever has no file of it."""
    progress, trouble = _read_rounds(store, notice)
    ranks = range(notice.replicas)
    standings = [Standing(rank, UNREACHABLE, 0, _in_round(rank, progress), "") for rank in ranks]
    return Sight(notice, standings, progress, trouble)


def _asked(
    file: LaunchFile, launch: Launch, start: Start, executor: Executor | None
) -> tuple[ReplicaHandle | None, str]:
    """Who a start is and how it is doing; one whose handle was lost is looked for by its name."""
    if executor is None:
        return start.handle, UNREACHABLE
    if start.handle is not None:
        status = executor.ask(start.handle) if executor.reaches(start.handle) else None
        return start.handle, status or UNREACHABLE
    if file.is_starting():
        return None, "pending"
    may_come = not is_settled(file, start, executor)  # before it is looked for: what comes in between is seen
    handles = executor.ask_for(launch.id, start.rank, start.attempt)
    if handles is None:  # no answer is none: it is asked again the next time
        return None, UNREACHABLE
    if handles:
        file.note(handles[0])
        return handles[0], executor.ask(handles[0]) or UNREACHABLE
    return None, UNREACHABLE if may_come else "failed"


def _end_late_ones(file: LaunchFile, executor: Executor) -> list[str]:
    """End machines that came after their start was given up and their rank was started again; a line for each."""
    record, lines = file.read(), []
    for start in record.starts:
        if start.handle is not None or start == record.newest[start.rank]:
            continue
        what = f"rank {start.rank}: start {start.attempt}, which had been given up, has come after all"
        handles, _ = tried(lambda start=start: executor.find(record.launch.id, start.rank, start.attempt))
        for handle in handles or ():
            _, error = tried(lambda handle=handle: executor.cancel(handle))
            if error is None:
                file.note(handle)  # not before: what has no handle is looked for again
            ended = "; it was cancelled" if error is None else f", and could NOT be cancelled: {in_brief(error)}"
            lines.append(what + ended)
    return lines


def _read_rounds(store: ObjectStore, launch: Notice) -> tuple[Progress | None, str | None]:
    """The rounds, or why they cannot be read: a spoilt bucket keeps nobody from looking after the machines."""
    try:
        if isinstance(launch, Launch):
            refuse_another(store, launch)
        layout, patient = Layout(launch.number), PatientStore(store, Traffic(), patience_s=30.0)
        about = read_record(patient, layout.key("about"), lambda data: unpack("about", data))
        if about is not None and about.get("world_size") != launch.replicas:
            return None, "the bucket has rounds of another world"
        return read_progress(store, launch.number), None
    except GenerationRefused:
        return None, None
    except (ComposerError, TypeError, ValueError, KeyError) as error:  # what is there has the wrong fields
        return None, f"the rounds cannot be read: {in_brief(error)}"


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
    file: LaunchFile,
    executor: Executor,
    *,
    relaunches: int,
    seen: Callable[[Sight], None] = lambda _sight: None,
    said: Callable[[str], None] = lambda _text: None,
    every_s: float = 2.0,
) -> Sight:
    """Watch until all have ended; one that failed is started again, `relaunches` times at most each.

    One is not started again when the run has ended without it, or it has left what it ended with: it would train on
    alone. Nor while the bucket, by which that is known and without which it cannot train, is not to be read.
    """
    explained, troubled_since, next_late = set[str](), time.monotonic(), 0.0
    while True:
        sight = look(store, file, executor)
        seen(sight)
        if sight.is_over or time.monotonic() >= next_late:
            next_late = time.monotonic() + _LATE_S
            for text in _end_late_ones(file, executor):
                said(text)
        troubled_since = troubled_since if sight.trouble else time.monotonic()
        is_pending = False
        for each in sight.replicas:
            if each.status != "failed" or each.attempt >= relaunches:
                continue
            why = _why_it_stays(store, file, sight, each.rank)
            if why is None:
                said(_start_again(file, executor, each, relaunches))
            elif (text := f"rank {each.rank}: not started again: {why}") not in explained:
                explained.add(text)
                said(text)
            is_pending |= why in (None, _NOT_NOW)
        if sight.is_over and not (is_pending and time.monotonic() - troubled_since < executor.patience_s):
            return sight
        time.sleep(every_s)


def _why_it_stays(store: ObjectStore, file: LaunchFile, sight: Sight, rank: int) -> str | None:
    """Why a replica that failed is not started again; None where it is."""
    if file.read().cancelled is not None:
        return "the launch was cancelled"
    if sight.end is not None:
        return f"the run has ended ({sight.end})"
    if sight.trouble is not None:
        return _NOT_NOW
    try:
        is_done = store.size(sight.launch.key("output", f"{rank:03d}", DONE)) is not None
    except StoreError:
        return _NOT_NOW
    return "what it ended with is in the bucket" if is_done else None


def _start_again(file: LaunchFile, executor: Executor, standing: Standing, relaunches: int) -> str:
    """Start a replica again, and say how that went; its rank is free, as nobody but who saw it end can know."""
    record, attempt = file.read(), standing.attempt + 1
    why = _why_it_failed(executor, record.newest[standing.rank].handle)
    _, error = tried(lambda: start_one(file, record.launch, executor, standing.rank, attempt, takeover=True))
    if isinstance(error, InputError):
        raise error
    if error is not None:  # the others go on; this start is looked for by its name, and made again if there is none
        return f"rank {standing.rank}: {why}; could not be started again: {in_brief(error)}"
    return f"rank {standing.rank}: {why}; started again ({attempt} of {relaunches})"


def _why_it_failed(executor: Executor, handle: ReplicaHandle | None) -> str:
    if handle is None:
        return "it was never started"
    outcomes, error = tried(lambda: executor.collect([handle], timeout=0))
    if outcomes is None:
        return "failed" if error is None else f"failed ({in_brief(error)})"
    return str(outcomes[0]["error"])
