"""How a launch is doing at one moment: its replicas by their service, its rounds by the bucket."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer_replication.diloco.rounds.failures import GenerationRefused
from composer_replication.diloco.rounds.identity import find_run
from composer_replication.diloco.rounds.patience import PatientStore, Traffic
from composer_replication.diloco.rounds.progress import Progress, read_progress
from composer_replication.diloco.rounds.reading import read_commit
from composer_replication.diloco.rounds.records import Layout
from composer_replication.diloco.serverless.answers import in_brief, tried
from composer_replication.diloco.serverless.executor import Executor
from composer_replication.diloco.serverless.handles import ENDED, ReplicaHandle
from composer_replication.diloco.store import ObjectStore
from composer_replication.diloco.store.objects import DatedStore
from composer_replication.errors import ComposerError
from composer_replication.steps.replicas.launch_file import LaunchFile, Record, Start
from composer_replication.steps.replicas.launches import Launch, Notice, refuse_another
from composer_replication.steps.replicas.starting import is_settled

UNREACHABLE = "unknown"
_KNOWN_AS = ("pid", "sandbox", "job", "actor")
_ROUNDS_OF_A_PACE, _STALL, _SHORTEST_STALL_S = 20, 3.0, 10.0


class Standing(NamedTuple):
    """How one replica is doing: what its service says, and what the bucket shows of it."""

    rank: int
    status: str
    attempt: int
    in_round: str  # waited for, offered, left; of the round that is open
    where: str
    exit_code: int | None = None
    error: str = ""  # how it failed; of one that was started again, how the start before it did
    log: str = ""  # where somebody reads what it printed, where its service has such a place


class Pace(NamedTuple):
    """How long ago a round ended, and how long one takes, by the clock of the store."""

    since_s: float
    usual_s: float

    @property
    def is_stalled(self) -> bool:
        return self.since_s > max(_STALL * self.usual_s, _SHORTEST_STALL_S)


@dataclass(frozen=True)
class Sight:
    """A launch at one moment."""

    launch: Notice
    replicas: Sequence[Standing]
    progress: Progress | None  # None before the first replica has begun
    trouble: str | None = None  # why the rounds cannot be read
    pace: Pace | None = None  # None before the first round, and where a store does not say when objects were written

    @property
    def is_over(self) -> bool:
        return all(replica.status in ENDED for replica in self.replicas)

    @property
    def end(self) -> str | None:
        """By what the run has ended; None while it goes on."""
        if finished := [replica.rank for replica in self.replicas if replica.status == "succeeded"]:
            return f"rank {finished[0]} has finished"
        total = self.launch.commits
        is_at_end = total is not None and self.progress is not None and self.progress.step >= total
        return f"all {total} exchanges are made" if is_at_end else None

    @property
    def eta_s(self) -> float | None:
        """By the mean time of a commit since the launch, start-up included; None while rounds stall."""
        total = self.launch.commits
        if self.progress is None or not self.progress.step or total is None or self.stalled_s is not None:
            return None
        elapsed = max(0.0, time.time() - self.launch.started)
        return elapsed / self.progress.step * max(0, total - self.progress.step)

    @property
    def stalled_s(self) -> float | None:
        """For how long no round has ended, where that is far longer than one takes and the run goes on."""
        is_stalled = self.pace is not None and self.pace.is_stalled and not self.is_over and self.end is None
        return self.pace.since_s if self.pace is not None and is_stalled else None


def look(store: ObjectStore | None, file: LaunchFile, executor: Executor | None) -> Sight:
    """How a launch is doing: replicas by the launch's file and their service, rounds by the bucket, where one is."""
    record = file.read()
    progress, trouble, pace = (None, None, None) if store is None else _read_rounds(store, record.launch)
    standings = []
    for start in record.newest.values():
        handle, status = _asked(file, record.launch, start, executor)
        names = {key: value for key, value in ({} if handle is None else handle.metadata).items() if key in _KNOWN_AS}
        where = " ".join(f"{key} {value}" for key, value in names.items())
        standing = Standing(start.rank, status, start.attempt, _in_round(start.rank, progress), where)
        standings.append(_with_end(standing, record, handle, executor))
    return Sight(record.launch, standings, progress, trouble, pace)


def _with_end(standing: Standing, record: Record, handle: ReplicaHandle | None, executor: Executor | None) -> Standing:
    """With how it ended; of one that was started again and runs, with how the start before it did."""
    if executor is None or (handle is None and standing.status != "failed"):
        return standing
    if handle is None:
        return standing._replace(error="it was never started")
    log = executor.log_place(handle)
    if standing.status in ENDED:
        end, error = tried(lambda: executor.end_of(handle))
        if end is None:  # the service said that it has ended, and no more
            return standing._replace(error="" if error is None else in_brief(error), log=log)
        is_failed = standing.status == "failed"
        return standing._replace(exit_code=end["exit_code"], error=str(end["error"]) if is_failed else "", log=log)
    mine = (standing.rank, standing.attempt - 1)
    before = [start.handle for start in record.starts if (start.rank, start.attempt) == mine]
    if before and (earlier := before[0]) is not None and executor.reaches(earlier):
        end, _ = tried(lambda: executor.end_of(earlier))
        return standing._replace(error="" if end is None else f"started again after: {end['error']}", log=log)
    return standing._replace(log=log)


def look_at_bucket(store: ObjectStore, notice: Notice) -> Sight:
    """How a launch is doing by what the bucket shows of it, to whoever has no file of it."""
    progress, trouble, pace = _read_rounds(store, notice)
    ranks = range(notice.replicas)
    standings = [Standing(rank, UNREACHABLE, 0, _in_round(rank, progress), "") for rank in ranks]
    return Sight(notice, standings, progress, trouble, pace)


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


def _read_rounds(store: ObjectStore, launch: Notice) -> tuple[Progress | None, str | None, Pace | None]:
    """The rounds, or why they cannot be read: a spoilt bucket keeps nobody from looking after the machines."""
    try:
        if isinstance(launch, Launch):
            refuse_another(store, launch)
        layout, patient = Layout(launch.number), PatientStore(store, Traffic(), patience_s=30.0)
        run = find_run(patient, layout)
        if run is None and patient.size(layout.about(0)) is not None:
            return None, "what the rounds in the bucket are cannot be read", None
        if run is not None and run.world_size != launch.replicas:
            return None, "the bucket has rounds of another world", None
        progress = read_progress(store, launch.number)
        layout = layout if run is None else run.layout
        return progress, None, _read_pace(store, patient, layout, launch, progress)
    except GenerationRefused:
        return None, None, None
    except (ComposerError, TypeError, ValueError, KeyError) as error:  # what is there has the wrong fields
        return None, f"the rounds cannot be read: {in_brief(error)}", None


def _read_pace(
    store: ObjectStore, patient: PatientStore, layout: Layout, launch: Notice, progress: Progress
) -> Pace | None:
    """By when outcomes were written: a watch that begins after the last of them sees a stall, too."""
    last = progress.step - 1
    if not isinstance(store, DatedStore) or last < 0 or (commit := read_commit(patient, layout, last)) is None:
        return None
    first = max(0, progress.step - _ROUNDS_OF_A_PACE)
    ended = store.written_at(layout.outcome(last, commit[0]))
    began = store.written_at(layout.outcome(first, 0)) if first < last else launch.started
    if ended is None or began is None:
        return None
    return Pace(max(0.0, time.time() - ended), max(0.0, ended - began) / max(1, last - first))


def _in_round(rank: int, progress: Progress | None) -> str:
    if progress is None:
        return ""
    if rank in progress.left:
        return "left"
    if rank in progress.stragglers:
        return "waited for"
    return "offered" if rank in progress.offered else "training"
