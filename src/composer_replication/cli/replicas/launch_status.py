"""Read the state of a launch: its replicas, as the executor reports them, and its rounds, as recorded in the bucket.

This module also starts and cancels replicas. Every start is recorded in the launch file before it is requested, so that
its replica can be found and stopped even if this process is killed in between.
"""

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
from composer_replication.diloco.serverless.executor import ENDED, Executor, ReplicaHandle, in_brief, tried
from composer_replication.diloco.store import ObjectStore
from composer_replication.diloco.store.objects import DatedStore
from composer_replication.errors import ComposerError, InputError, RunError, explain

UNREACHABLE = "unknown"
_HANDLE_KEYS = ("pid", "sandbox", "job", "actor")
_ROUNDS_FOR_TIMING, _STALL_FACTOR, _MIN_STALL_S = 20, 3.0, 10.0


class ReplicaStatus(NamedTuple):
    """The state of one replica, as reported by its executor and the bucket. The field names are the same in the
    output of `--json`.
    """

    rank: int
    status: str
    attempt: int
    in_round: str  # its state in the open round: training, waited for, offered or left
    where: str  # its process, sandbox or job id
    exit_code: int | None = None
    error: str = ""  # how it failed; for a restarted replica that runs, how its earlier start failed
    log: str = ""  # the URL or path of its log, if the executor has one


class _RoundTiming(NamedTuple):
    """The seconds since the last round ended, and the usual duration of a round, measured by the store's clock."""

    since_s: float
    usual_s: float

    @property
    def is_stalled(self) -> bool:
        return self.since_s > max(_STALL_FACTOR * self.usual_s, _MIN_STALL_S)


@dataclass(frozen=True)
class LaunchStatus:
    """The state of a launch at one point in time."""

    launch: LaunchNotice
    replicas: Sequence[ReplicaStatus]
    progress: RunProgress | None  # None before the first replica has started
    trouble: str | None = None  # why the rounds cannot be read, if so
    # None before the first round, and for a store that does not report when objects were written
    timing: _RoundTiming | None = None

    @property
    def is_over(self) -> bool:
        return all(replica.status in ENDED for replica in self.replicas)

    @property
    def end(self) -> str | None:
        """A description of how the run has ended, or None while it is active."""
        if finished := [replica.rank for replica in self.replicas if replica.status == "succeeded"]:
            return f"rank {finished[0]} has finished"
        total = self.launch.commits
        is_at_end = total is not None and self.progress is not None and self.progress.step >= total
        return f"all {total} exchanges are done" if is_at_end else None

    @property
    def eta_s(self) -> float | None:
        """The estimated number of seconds until the run ends, based on the mean time per commit so far. None if it
        is unknown or the run is stalled.
        """
        total = self.launch.commits
        if self.progress is None or not self.progress.step or total is None or self.stalled_s is not None:
            return None
        elapsed = max(0.0, time.time() - self.launch.started)
        return elapsed / self.progress.step * max(0, total - self.progress.step)

    @property
    def stalled_s(self) -> float | None:
        """The number of seconds since the last round ended, if this is unusually long for an active run; None
        otherwise.
        """
        is_stalled = self.timing is not None and self.timing.is_stalled and not self.is_over and self.end is None
        return self.timing.since_s if self.timing is not None and is_stalled else None


def read_launch_status(store: ObjectStore | None, file: LaunchFile, executor: Executor | None) -> LaunchStatus:
    """Return the state of a launch. If `store` is None, the state of the rounds is unknown; if `executor` is None,
    the state of the replicas is.
    """
    record = file.read()
    progress, trouble, timing = (None, None, None) if store is None else _read_rounds(store, record.launch)
    replicas = []
    for start in record.latest_starts.values():
        handle, status = _query_replica(file, record.launch, start, executor)
        names = {
            key: value for key, value in ({} if handle is None else handle.metadata).items() if key in _HANDLE_KEYS
        }
        where = " ".join(f"{key} {value}" for key, value in names.items())
        replica = ReplicaStatus(start.rank, status, start.attempt, _round_state(start.rank, progress), where)
        replicas.append(_add_outcome(replica, record, handle, executor))
    return LaunchStatus(record.launch, replicas, progress, trouble, timing)


def _add_outcome(
    replica: ReplicaStatus, record: Record, handle: ReplicaHandle | None, executor: Executor | None
) -> ReplicaStatus:
    """Return the replica's status, extended by how it ended. For a running replica that was restarted, add how its
    previous start ended.
    """
    if executor is None or (handle is None and replica.status != "failed"):
        return replica
    if handle is None:
        return replica._replace(error="it was never started")
    log = executor.log_place(handle)
    if replica.status in ENDED:
        end, error = tried(lambda: executor.end_of(handle))
        if end is None:  # the executor reports that it has ended, but not how
            return replica._replace(error="" if error is None else in_brief(error), log=log)
        is_failed = replica.status == "failed"
        return replica._replace(exit_code=end["exit_code"], error=str(end["error"]) if is_failed else "", log=log)
    key = (replica.rank, replica.attempt - 1)
    earlier = next((start.handle for start in record.starts if (start.rank, start.attempt) == key), None)
    if earlier is not None and executor.reaches(earlier):
        end, _ = tried(lambda: executor.end_of(earlier))
        return replica._replace(error="" if end is None else f"started again after: {end['error']}", log=log)
    return replica._replace(log=log)


def read_bucket_status(store: ObjectStore, notice: LaunchNotice) -> LaunchStatus:
    """Return the state of a launch from the bucket alone, for machines without its launch file."""
    progress, trouble, timing = _read_rounds(store, notice)
    ranks = range(notice.replicas)
    replicas = [ReplicaStatus(rank, UNREACHABLE, 0, _round_state(rank, progress), "") for rank in ranks]
    return LaunchStatus(notice, replicas, progress, trouble, timing)


def _query_replica(
    file: LaunchFile, launch: Launch, start: Start, executor: Executor | None
) -> tuple[ReplicaHandle | None, str]:
    """Return the handle and status of the replica that belongs to a start. If its handle was lost, find the replica
    by the name of the start.
    """
    if executor is None:
        return start.handle, UNREACHABLE
    if start.handle is not None:
        status = executor.ask(start.handle) if executor.reaches(start.handle) else None
        return start.handle, status or UNREACHABLE
    if file.is_starting():
        return None, "pending"
    # Decide this before searching, so that a replica that appears in between is found.
    may_come = not is_settled(file, start, executor)
    handles = executor.ask_for(launch.id, start.rank, start.attempt)
    if handles is None:  # the executor did not answer
        return None, UNREACHABLE
    if handles:
        file.note(handles[0])
        return handles[0], executor.ask(handles[0]) or UNREACHABLE
    return None, UNREACHABLE if may_come else "failed"


def _read_rounds(
    store: ObjectStore, launch: LaunchNotice
) -> tuple[RunProgress | None, str | None, _RoundTiming | None]:
    """Return the progress and timing of the rounds, or the reason why they cannot be read.

    No error is raised, because the replicas have to be shown and stopped even if the bucket is corrupt.
    """
    try:
        if isinstance(launch, Launch):
            refuse_other_launch(store, launch)
        layout, patient = Layout(launch.number), PatientStore(store, Traffic(), patience_s=30.0)
        run = find_run(patient, layout)
        if run is None and patient.size(layout.about(0)) is not None:
            return None, "the description of the rounds in the bucket cannot be read", None
        if run is not None and run.world_size != launch.replicas:
            return None, f"the rounds in the bucket are of {run.world_size} replicas, not {launch.replicas}", None
        progress = read_progress(store, launch.number)
        layout = layout if run is None else run.layout
        return progress, None, _read_timing(store, patient, layout, launch, progress)
    except GenerationRefused:
        return None, None, None
    except (ComposerError, TypeError, ValueError, KeyError) as error:  # records with wrong fields
        return None, f"the rounds cannot be read: {in_brief(error)}", None


def _read_timing(
    store: ObjectStore, patient: PatientStore, layout: Layout, launch: LaunchNotice, progress: RunProgress
) -> _RoundTiming | None:
    """Return the timing of the rounds, computed from the times at which their outcomes were written.

    These times come from the store, so `watch` also recognizes a stall that began before `watch` was started.
    """
    last = progress.step - 1
    if not isinstance(store, DatedStore) or last < 0 or (commit := read_commit(patient, layout, last)) is None:
        return None
    first = max(0, progress.step - _ROUNDS_FOR_TIMING)
    ended = store.written_at(layout.outcome(last, commit[0]))
    began = store.written_at(layout.outcome(first, 0)) if first < last else launch.started
    if ended is None or began is None:
        return None
    return _RoundTiming(max(0.0, time.time() - ended), max(0.0, ended - began) / max(1, last - first))


def _round_state(rank: int, progress: RunProgress | None) -> str:
    if progress is None:
        return ""
    if rank in progress.departed:
        return "left"
    if rank in progress.stragglers:
        return "waited for"
    return "offered" if rank in progress.offered else "training"


# Starting and canceling replicas.

# These options decide where a token is sent, so they are only read from the environment and never stored in a file.
_ENVIRONMENT_ONLY_OPTIONS = {"endpoint": "HF_ENDPOINT", "token": "HF_TOKEN"}
_CANCEL_ATTEMPTS, _PAUSE_S, _MAX_WAIT_FOR_STARTER_S = 3, 1.0, 30.0
_MAX_LISTING_FACTOR = 5  # times an executor's `listed_s`


class _Unended(NamedTuple):
    """A start whose replica may still be running, and the reason why it could not be stopped."""

    rank: int
    attempt: int
    why: str


def make_executor(name: str, options: Mapping[str, Any]) -> Executor:
    """Create the executor with this name. Raises InputError for unknown names and options."""
    if name not in EXECUTORS:
        raise InputError(explain("--executor", got=repr(name), expected=f"one of {', '.join(EXECUTORS)}"))
    if forbidden_options := [option for option in _ENVIRONMENT_ONLY_OPTIONS if option in options]:
        variables = ", ".join(_ENVIRONMENT_ONLY_OPTIONS[option] for option in forbidden_options)
        what = f"option {', '.join(forbidden_options)} of {name}"
        raise InputError(
            explain(what, got="a value", expected=f"the value in {variables} of this machine's environment")
        )
    module, _, kind = EXECUTORS[name].partition(".")
    executor_module = import_module(f"composer_replication.diloco.serverless.{module}")
    try:
        return getattr(executor_module, kind)(**options)
    except TypeError as error:
        raise InputError(explain(f"options of {kind}", got=sorted(options), expected=str(error))) from error


def start_replicas(
    file: LaunchFile, executor: Executor, on_message: Callable[[str], None] = lambda _text: None
) -> None:
    """Start all replicas. If one cannot be started, or the user interrupts, cancel those that have been started."""
    launch, num_started, error, outcome = file.read().launch, 0, None, ""
    try:
        while error is None and num_started < launch.replicas:
            _, error = tried(partial(start_replica, file, launch, executor, num_started, 0))
            num_started += error is None
    finally:
        what = f"launch {launch.number}, rank {num_started}"
        if num_started < launch.replicas:
            outcome = describe_cancellation(cancel(file, executor), launch, executor)
            if error is None:
                on_message(f"{what}: interrupted. {outcome}")
    if error is not None:
        why = str(error) if isinstance(error, ComposerError) else in_brief(error)
        raise RunError(explain(what, got=why, expected="a started replica", fix=outcome)) from error


@dataclass(frozen=True)
class _StartAttempt:
    """A context manager for a request to start a replica. If the request fails, it records in the launch file when
    the request ended.
    """

    file: LaunchFile
    executor: Executor
    rank: int
    attempt: int

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            return
        # If this cannot be recorded, the start is treated as one whose requesting process was killed.
        with contextlib.suppress(OSError, ComposerError):
            if self.executor.was_refused(error):
                self.file.withdraw(self.rank, self.attempt)
            else:
                self.file.end_asking(self.rank, self.attempt, time.time())


def start_replica(
    file: LaunchFile, launch: Launch, executor: Executor, rank: int, attempt: int, **settings: Any
) -> ReplicaHandle:
    """Start or restart a replica. The start is recorded in the launch file before the request, and the handle after
    it.
    """
    args = launch.entrypoint_args(**settings)
    job = executor.job(launch.entrypoint, args, gpu=launch.gpu, timeout_s=launch.timeout_s, launch=launch.id)
    with file.starting():
        file.begin(rank, attempt)
        with _StartAttempt(file, executor, rank, attempt):
            handle = executor.start(replace(job, rank=rank, attempt=attempt))
        record = file.note(handle)
    # A cancel in another process may have missed this replica, because its handle was not in the file yet.
    if record.cancelled is not None:
        executor.cancel(handle)
        raise RunError(explain(f"rank {rank}", got="a launch that was canceled meanwhile", expected="an active launch"))
    return handle


def is_settled(file: LaunchFile | None, start: Start, executor: Executor) -> bool:
    """Return whether enough time has passed to be certain that a start has no replica if the executor lists none.

    A new replica may take up to `listed_s` seconds to appear in an executor's list, or longer if the executor took
    longer to answer the request. If the requesting process was killed, it is unknown when its request ended. The time
    of the first call of this function is then used, which the launch file records, but at most `start_s` seconds after
    the start of the request.
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


def cancel(file: LaunchFile, executor: Executor, *, pause_s: float = _PAUSE_S) -> list[_Unended]:
    """Stop all replicas of a launch, and return those that may still be running."""
    try:
        launch = file.mark_cancelled().launch
    except OSError:  # the disk is full; machines have to be stopped nevertheless
        launch = file.read().launch
    # Another process may be starting a replica now, so wait for its handle.
    deadline = time.monotonic() + _MAX_WAIT_FOR_STARTER_S
    while (is_starting := file.is_starting()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    starts = {(start.rank, start.attempt): start for start in file.read().starts}
    starts_without_handle = {key: start for key, start in starts.items() if start.handle is None}
    settled_keys = {
        key for key, start in starts_without_handle.items() if not is_starting and is_settled(file, start, executor)
    }
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
        reasons |= dict.fromkeys(starts_without_handle, "another process is starting it now")
    if not reasons:
        with contextlib.suppress(OSError):  # if this is not recorded, the executor is queried again the next time
            file.mark_ended()
    return [_Unended(*key, why) for key, why in reasons.items()]


def describe_cancellation(unended: Sequence[_Unended], launch: Launch, executor: Executor) -> str:
    """Describe whether all replicas of a canceled launch were stopped, or which ones the user has to check."""
    if not unended:
        return "All replicas that had been started were canceled."
    replicas = "; ".join(f"rank {start.rank} (start {start.attempt}): {start.why}" for start in unended)
    return (
        f"NOT canceled, and possibly still billed: {replicas}. Run `crf diloco cancel` again, or check by hand: "
        f"{executor.by_hand_for(launch.id)}"
    )
