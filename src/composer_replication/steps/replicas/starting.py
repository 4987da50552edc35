"""Start replicas, each noted before it is asked for; end everything that a launch has begun."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from composer_replication.diloco.serverless.answers import in_brief, tried
from composer_replication.diloco.serverless.executor import Executor, ReplicaHandle
from composer_replication.errors import ComposerError, InputError, RunError, explain
from composer_replication.steps.replicas.launch_file import LaunchFile, Start
from composer_replication.steps.replicas.launches import EXECUTORS, Launch

# What an executor is told by this machine's environment and by nothing that is written down: where a token goes.
_BY_ENVIRONMENT = {"endpoint": "HF_ENDPOINT", "token": "HF_TOKEN"}
_TRIES, _PAUSE_S, _OTHERS_S = 3, 1.0, 30.0
_LONGEST_LISTING = 5  # times an executor's `listed_s`


class Unended(NamedTuple):
    """A start that may still run, and why it could not be ended."""

    rank: int
    attempt: int
    why: str


def make_executor(name: str, options: Mapping[str, Any]) -> Executor:
    """The executor that a launch names."""
    if name not in EXECUTORS:
        raise InputError(explain("--executor", got=repr(name), expected=f"one of {', '.join(EXECUTORS)}"))
    if forbidden_options := [option for option in _BY_ENVIRONMENT if option in options]:
        variables = ", ".join(_BY_ENVIRONMENT[option] for option in forbidden_options)
        what = f"option {', '.join(forbidden_options)} of {name}"
        raise InputError(explain(what, got="a value", expected=f"{variables} in this machine's environment"))
    module, _, kind = EXECUTORS[name].partition(".")
    home = import_module(f"composer_replication.diloco.serverless.{module}")
    try:
        return getattr(home, kind)(**options)
    except TypeError as error:
        raise InputError(explain(f"options of {kind}", got=sorted(options), expected=str(error))) from error


def start(file: LaunchFile, executor: Executor, said: Callable[[str], None] = lambda _text: None) -> None:
    """Start all replicas; where one cannot be, or somebody interrupts, what was started is cancelled."""
    launch, num_started, error, what_ended = file.read().launch, 0, None, ""
    try:
        while error is None and num_started < launch.replicas:
            _, error = tried(partial(start_one, file, launch, executor, num_started, 0))
            num_started += error is None
    finally:
        what = f"launch {launch.number}, rank {num_started}"
        if num_started < launch.replicas:
            what_ended = about_ends(cancel(file, executor), launch, executor)
            if error is None:
                said(f"{what}: interrupted. {what_ended}")
    if error is not None:
        why = str(error) if isinstance(error, ComposerError) else in_brief(error)
        raise RunError(explain(what, got=why, expected="its start", fix=what_ended)) from error


@dataclass(frozen=True)
class _Asking:
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


def start_one(
    file: LaunchFile, launch: Launch, executor: Executor, rank: int, attempt: int, **settings: Any
) -> ReplicaHandle:
    """Start one replica, for the first time or again; the file knows of it all the way."""
    args = launch.entrypoint_args(**settings)
    job = executor.job(launch.entrypoint, args, gpu=launch.gpu, timeout_s=launch.timeout_s, launch=launch.id)
    with file.starting():
        file.begin(rank, attempt)
        with _Asking(file, executor, rank, attempt):
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
    wait_s = min(max(executor.listed_s, end - start.begun), _LONGEST_LISTING * executor.listed_s)
    return time.time() > end + wait_s


def cancel(file: LaunchFile, executor: Executor, *, pause_s: float = _PAUSE_S) -> list[Unended]:
    """End every start of a launch, each for itself; those that may still run are handed back with the reason."""
    try:
        launch = file.mark_cancelled().launch
    except OSError:  # a full disk does not keep machines running
        launch = file.read().launch
    deadline = time.monotonic() + _OTHERS_S
    while (is_starting := file.is_starting()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    starts = {(start.rank, start.attempt): start for start in file.read().starts}
    lost = {key: start for key, start in starts.items() if start.handle is None}
    settled_keys = {key for key, start in lost.items() if not is_starting and is_settled(file, start, executor)}
    errors: dict[tuple[int, int], Exception] = {}
    for number in range(_TRIES):
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


def about_ends(unended: Sequence[Unended], launch: Launch, executor: Executor) -> str:
    """What became of the replicas of a launch that was cancelled, and what to look after by hand."""
    if not unended:
        return "What had been started was cancelled."
    replicas = "; ".join(f"rank {one.rank} (start {one.attempt}): {one.why}" for one in unended)
    return (
        f"NOT cancelled, and maybe paid for: {replicas}. Repeat `crf diloco cancel`, or look by hand: "
        f"{executor.by_hand_for(launch.id)}"
    )
