"""How a launch is doing at one moment: its replicas by their service, its rounds by the bucket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from composer_replication.cli.replicas.launches import (
    EXECUTORS,
    Launch,
    LaunchFile,
    LaunchNotice,
    Record,
    Start,
    refuse_other_launch,
)
from composer_replication.diloco.rounds.claims import find_run
from composer_replication.diloco.rounds.patience import GenerationRefused, PatientStore, Traffic
from composer_replication.diloco.rounds.progress import RunProgress, read_progress
from composer_replication.diloco.rounds.reading import read_commit
from composer_replication.diloco.rounds.records import Layout
from composer_replication.diloco.serverless.executor import (
    ENDED,
    Executor,
    ReplicaHandle,
    in_brief,
    tried,
)
from composer_replication.diloco.store import ObjectStore
from composer_replication.diloco.store.objects import DatedStore
from composer_replication.errors import (
    ComposerError,
    InputError,
    RunError,
    explain,
)

UNREACHABLE = "unknown"
_HANDLE_KEYS = ("pid", "sandbox", "job", "actor")
_ROUNDS_FOR_TIMING, _STALL_FACTOR, _MIN_STALL_S = 20, 3.0, 10.0


class ReplicaStatus(NamedTuple):
    """How one replica is doing: what its service says, and what the bucket shows of it."""

    rank: int
    status: str
    attempt: int
    in_round: str  # waited for, offered, left; of the round that is open
    where: str
    exit_code: int | None = None
    error: str = ""  # how it failed; of one that was started again, how the start before it did
    log: str = ""  # where somebody reads what it printed, where its service has such a place


class RoundTiming(NamedTuple):
    """How long ago a round ended, and how long one takes, by the clock of the store."""

    since_s: float
    usual_s: float

    @property
    def is_stalled(self) -> bool:
        return self.since_s > max(_STALL_FACTOR * self.usual_s, _MIN_STALL_S)


@dataclass(frozen=True)
class LaunchStatus:
    """A launch at one moment."""

    launch: LaunchNotice
    replicas: Sequence[ReplicaStatus]
    progress: RunProgress | None  # None before the first replica has begun
    trouble: str | None = None  # why the rounds cannot be read
    timing: RoundTiming | None = (
        None  # None before the first round, and where a store does not say when objects were written
    )

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
        is_stalled = self.timing is not None and self.timing.is_stalled and not self.is_over and self.end is None
        return self.timing.since_s if self.timing is not None and is_stalled else None


def read_launch_status(store: ObjectStore | None, file: LaunchFile, executor: Executor | None) -> LaunchStatus:
    """How a launch is doing: replicas by the launch's file and their service, rounds by the bucket, where one is."""
    record = file.read()
    progress, trouble, timing = (None, None, None) if store is None else _read_rounds(store, record.launch)
    standings = []
    for start in record.latest_starts.values():
        handle, status = _query_replica(file, record.launch, start, executor)
        names = {
            key: value for key, value in ({} if handle is None else handle.metadata).items() if key in _HANDLE_KEYS
        }
        where = " ".join(f"{key} {value}" for key, value in names.items())
        standing = ReplicaStatus(start.rank, status, start.attempt, _round_state(start.rank, progress), where)
        standings.append(_add_outcome(standing, record, handle, executor))
    return LaunchStatus(record.launch, standings, progress, trouble, timing)


def _add_outcome(
    standing: ReplicaStatus, record: Record, handle: ReplicaHandle | None, executor: Executor | None
) -> ReplicaStatus:
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


def read_bucket_status(store: ObjectStore, notice: LaunchNotice) -> LaunchStatus:
    """How a launch is doing by what the bucket shows of it, to whoever has no file of it."""
    progress, trouble, timing = _read_rounds(store, notice)
    ranks = range(notice.replicas)
    standings = [ReplicaStatus(rank, UNREACHABLE, 0, _round_state(rank, progress), "") for rank in ranks]
    return LaunchStatus(notice, standings, progress, trouble, timing)


def _query_replica(
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


def _read_rounds(store: ObjectStore, launch: LaunchNotice) -> tuple[RunProgress | None, str | None, RoundTiming | None]:
    """The rounds, or why they cannot be read: a spoilt bucket keeps nobody from looking after the machines."""
    try:
        if isinstance(launch, Launch):
            refuse_other_launch(store, launch)
        layout, patient = Layout(launch.number), PatientStore(store, Traffic(), patience_s=30.0)
        run = find_run(patient, layout)
        if run is None and patient.size(layout.about(0)) is not None:
            return None, "what the rounds in the bucket are cannot be read", None
        if run is not None and run.world_size != launch.replicas:
            return None, "the bucket has rounds of another world", None
        progress = read_progress(store, launch.number)
        layout = layout if run is None else run.layout
        return progress, None, _read_timing(store, patient, layout, launch, progress)
    except GenerationRefused:
        return None, None, None
    except (ComposerError, TypeError, ValueError, KeyError) as error:  # what is there has the wrong fields
        return None, f"the rounds cannot be read: {in_brief(error)}", None


def _read_timing(
    store: ObjectStore, patient: PatientStore, layout: Layout, launch: LaunchNotice, progress: RunProgress
) -> RoundTiming | None:
    """By when outcomes were written: a watch that begins after the last of them sees a stall, too."""
    last = progress.step - 1
    if not isinstance(store, DatedStore) or last < 0 or (commit := read_commit(patient, layout, last)) is None:
        return None
    first = max(0, progress.step - _ROUNDS_FOR_TIMING)
    ended = store.written_at(layout.outcome(last, commit[0]))
    began = store.written_at(layout.outcome(first, 0)) if first < last else launch.started
    if ended is None or began is None:
        return None
    return RoundTiming(max(0.0, time.time() - ended), max(0.0, ended - began) / max(1, last - first))


def _round_state(rank: int, progress: RunProgress | None) -> str:
    if progress is None:
        return ""
    if rank in progress.left:
        return "left"
    if rank in progress.stragglers:
        return "waited for"
    return "offered" if rank in progress.offered else "training"


# Start replicas, each noted before it is asked for; end everything that a launch has begun.

# What an executor is told by this machine's environment and by nothing that is written down: where a token goes.
_ENVIRONMENT_ONLY_OPTIONS = {"endpoint": "HF_ENDPOINT", "token": "HF_TOKEN"}
_CANCEL_ATTEMPTS, _PAUSE_S, _MAX_WAIT_FOR_STARTER_S = 3, 1.0, 30.0
_MAX_LISTING_FACTOR = 5  # times an executor's `listed_s`


class Unended(NamedTuple):
    """A start that may still run, and why it could not be ended."""

    rank: int
    attempt: int
    why: str


def make_executor(name: str, options: Mapping[str, Any]) -> Executor:
    """The executor that a launch names."""
    if name not in EXECUTORS:
        raise InputError(explain("--executor", got=repr(name), expected=f"one of {', '.join(EXECUTORS)}"))
    if forbidden_options := [option for option in _ENVIRONMENT_ONLY_OPTIONS if option in options]:
        variables = ", ".join(_ENVIRONMENT_ONLY_OPTIONS[option] for option in forbidden_options)
        what = f"option {', '.join(forbidden_options)} of {name}"
        raise InputError(explain(what, got="a value", expected=f"{variables} in this machine's environment"))
    module, _, kind = EXECUTORS[name].partition(".")
    home = import_module(f"composer_replication.diloco.serverless.{module}")
    try:
        return getattr(home, kind)(**options)
    except TypeError as error:
        raise InputError(explain(f"options of {kind}", got=sorted(options), expected=str(error))) from error


def start_replicas(
    file: LaunchFile, executor: Executor, on_message: Callable[[str], None] = lambda _text: None
) -> None:
    """Start all replicas; where one cannot be, or somebody interrupts, what was started is cancelled."""
    launch, num_started, error, what_ended = file.read().launch, 0, None, ""
    try:
        while error is None and num_started < launch.replicas:
            _, error = tried(partial(start_replica, file, launch, executor, num_started, 0))
            num_started += error is None
    finally:
        what = f"launch {launch.number}, rank {num_started}"
        if num_started < launch.replicas:
            what_ended = describe_cancellation(cancel(file, executor), launch, executor)
            if error is None:
                on_message(f"{what}: interrupted. {what_ended}")
    if error is not None:
        why = str(error) if isinstance(error, ComposerError) else in_brief(error)
        raise RunError(explain(what, got=why, expected="its start", fix=what_ended)) from error


@dataclass(frozen=True)
class _StartAttempt:
    """Around the asking for a replica: notes in the file how an asking that failed came to its end."""

    file: LaunchFile
    executor: Executor
    rank: int
    attempt: int

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            return
        with contextlib.suppress(OSError, ComposerError):  # without a note it counts as one whose asker was killed
            if self.executor.was_refused(error):
                self.file.withdraw(self.rank, self.attempt)
            else:
                self.file.end_asking(self.rank, self.attempt, time.time())


def start_replica(
    file: LaunchFile, launch: Launch, executor: Executor, rank: int, attempt: int, **settings: Any
) -> ReplicaHandle:
    """Start one replica, for the first time or again; the file knows of it all the way."""
    args = launch.entrypoint_args(**settings)
    job = executor.job(launch.entrypoint, args, gpu=launch.gpu, timeout_s=launch.timeout_s, launch=launch.id)
    with file.starting():
        file.begin(rank, attempt)
        with _StartAttempt(file, executor, rank, attempt):
            handle = executor.start(replace(job, rank=rank, attempt=attempt))
        record = file.note(handle)
    if record.cancelled is not None:
        executor.cancel(handle)
        raise RunError(explain(f"rank {rank}", got="a cancel while it was started", expected="a launch that goes on"))
    return handle


def is_settled(file: LaunchFile | None, start: Start, executor: Executor) -> bool:
    """Whether a service that lists no replica of a start has none: so long after the end of its asking.

    A service that was slow to answer is slow to list, and gets as long again. Of one whose asker was killed it is known
    that the asking was over when somebody first looks, or earlier, as executors ask for `start_s` at most. The first
    look is noted in the file; who may write nothing names none.
    """
    if not executor.listed_s:
        return True
    end = start.asked_until
    if end is None:
        end = min(time.time(), start.begun + executor.start_s)
        if file is not None:
            with contextlib.suppress(OSError):
                file.end_asking(start.rank, start.attempt, end)
    wait_s = min(max(executor.listed_s, end - start.begun), _MAX_LISTING_FACTOR * executor.listed_s)
    return time.time() > end + wait_s


def cancel(file: LaunchFile, executor: Executor, *, pause_s: float = _PAUSE_S) -> list[Unended]:
    """End every start of a launch, each for itself; those that may still run are handed back with the reason."""
    try:
        launch = file.mark_cancelled().launch
    except OSError:  # a full disk does not keep machines running
        launch = file.read().launch
    deadline = time.monotonic() + _MAX_WAIT_FOR_STARTER_S
    while (is_starting := file.is_starting()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    starts = {(start.rank, start.attempt): start for start in file.read().starts}
    lost = {key: start for key, start in starts.items() if start.handle is None}
    settled_keys = {key for key, start in lost.items() if not is_starting and is_settled(file, start, executor)}
    errors: dict[tuple[int, int], Exception] = {}
    for number in range(_CANCEL_ATTEMPTS):
        time.sleep(pause_s * number)
        pending_starts = {key: starts[key] for key in errors} if number else starts
        ends = {
            key: executor.end_start(launch.id, *key, start.handle, is_settled=key in settled_keys)
            for key, start in pending_starts.items()
        }
        errors = {key: error for key, error in ends.items() if error is not None}
        if not errors:
            break
    reasons = {key: in_brief(error) for key, error in errors.items()}
    if is_starting:
        reasons |= dict.fromkeys(lost, "another process is starting it now")
    if not reasons:
        with contextlib.suppress(OSError):  # without the note it is asked about again
            file.mark_ended()
    return [Unended(*key, why) for key, why in reasons.items()]


def describe_cancellation(unended: Sequence[Unended], launch: Launch, executor: Executor) -> str:
    """What became of the replicas of a launch that was cancelled, and what to look after by hand."""
    if not unended:
        return "What had been started was cancelled."
    replicas = "; ".join(f"rank {one.rank} (start {one.attempt}): {one.why}" for one in unended)
    return (
        f"NOT cancelled, and maybe paid for: {replicas}. Repeat `crf diloco cancel`, or look by hand: "
        f"{executor.by_hand_for(launch.id)}"
    )
