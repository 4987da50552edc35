"""The base class of executors, which start replicas in rank order, report their status, and cancel or relaunch them.

`Executor` has a subclass for each service, which implements how a single replica is started, found, polled and ended.
Every start is named before it is requested, so that `find` can find a replica whose handle was lost. `ReplicaJob`
describes what a replica should do, and `ReplicaHandle` identifies a launched replica.
"""

from __future__ import annotations

import inspect
import json
import os
import queue
import re
import signal
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from composer_replication.diloco.serverless.replica_process import (
    JOB_VARIABLE,
    REFUSED,
    TIMED_OUT,
    masked,
    secret_masks,
)
from composer_replication.errors import InputError, RunError, explain

if TYPE_CHECKING:
    from composer_replication.diloco.serverless.local_process import LocalProcessExecutor

__all__ = ["LocalProcessExecutor", "ReplicaHandle", "ReplicaJob", "ReplicaStatus", "ServerlessExecutor"]


_LINES_OF_A_FAILURE = 200
MODULE = "composer_replication.diloco.serverless.replica_process"


class Executor(ABC):
    """Starts and manages replicas. Subclasses implement how a single replica is started, found, polled and ended.

    `secrets` are names of environment variables. Their values are passed to the replicas through the service's own
    mechanism for secrets, and masked in the replicas' output. `env` are public variables.
    """

    backend_name: str
    supports_inter_replica_network: bool
    by_hand: str  # manual instructions to find and end the replicas of `{launch}`
    poll_interval_s = 0.2
    patience_s = 600.0  # how long a service may be without a usable answer
    start_s = 300.0  # the timeout of a request to start a replica
    listed_s = 60.0  # how long a new replica may be missing from the service's list
    takes_callables = False

    def __init__(self, *, secrets: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self.secrets, self.env = tuple(secrets), dict(env or {})
        _check_variables(self.secrets, self.env)
        self._jobs: dict[str, ReplicaJob] = {}
        self._silent_since: dict[str, float] = {}
        self._ends: dict[str, dict[str, Any]] = {}

    # ---- starting

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]:
        """Start `n_replicas` replicas, beginning with rank 0. If one cannot be started, cancel those that have been
        started.
        """
        if isinstance(n_replicas, bool) or not isinstance(n_replicas, int) or n_replicas < 1:
            raise InputError(explain("n_replicas", got=repr(n_replicas), expected="an integer of at least 1"))
        # Raises an error for a missing secret before anything is started.
        self.secret_values()
        job = self.job(entrypoint, entrypoint_args, gpu=gpu, timeout_s=timeout)
        handles: list[ReplicaHandle] = []
        try:
            for rank in range(n_replicas):
                handles.append(self.start(replace(job, rank=rank)))
        finally:
            if (error := sys.exception()) is not None and len(handles) < n_replicas:
                # Includes the replica whose start failed, because it may run unless its start was refused.
                for rank in range(len(handles) + (not self.was_refused(error))):
                    if (fault := self.end_start(job.launch, rank, 0, *handles[rank : rank + 1])) is not None:
                        error.add_note(f"rank {rank} may still run ({in_brief(fault)}): {self.by_hand_for(job.launch)}")
        return handles

    def job(
        self,
        entrypoint: str | Callable[..., Any],
        args: Mapping[str, Any],
        *,
        gpu: str | None,
        timeout_s: float | None,
        launch: str | None = None,
    ) -> ReplicaJob:
        """Return the job of rank 0. Raises InputError if the job is invalid or the service would refuse it."""
        if timeout_s is not None and not timeout_s > 0:
            raise InputError(explain("timeout", got=timeout_s, expected="seconds above 0, or None"))
        job = ReplicaJob(
            entrypoint=_entrypoint_name(entrypoint, backend=self.backend_name, takes_callables=self.takes_callables),
            args={name: value for name, value in args.items() if name != "rank_env"},
            rank=0,
            launch=launch or uuid.uuid4().hex,
            rank_env=args.get("rank_env", "REPLICA_RANK"),
            gpu=gpu,
            timeout_s=timeout_s,
            secrets=self.secrets,
            path=[entry for entry in sys.path if entry] if self.takes_callables else [],
        )
        self.check(job)
        return job

    def check(self, job: ReplicaJob) -> None:
        """Raise InputError if the service would refuse this job. The service is not contacted."""
        job.check()

    def start(self, job: ReplicaJob) -> ReplicaHandle:
        """Start the replica of a job. If this raises an error, the replica may run nevertheless; use `find` to look
        for it.
        """
        handle = self._handle(job.launch, job.rank, job.attempt, self._start(job))
        self._jobs[self._key(handle)] = job
        return handle

    def relaunch(self, handle: ReplicaHandle, job: ReplicaJob | None = None) -> ReplicaHandle:
        """Restart a failed or canceled replica with the same rank.

        `job` is required if another process launched the replica. Raises InputError if the replica is running or has
        succeeded.
        """
        if (status := self.poll(handle)) not in ENDED:
            fix = "Cancel it first: two replicas must not share a rank."
            raise InputError(explain(f"rank {handle.rank}", got=status, expected="an ended replica", fix=fix))
        if status == "succeeded":
            raise InputError(explain(f"rank {handle.rank}", got=status, expected="a failed or canceled replica"))
        launched_job = job or self._jobs.get(self._key(handle))
        if launched_job is None:
            expected = "the job of a replica that another process launched: relaunch(handle, job)"
            raise InputError(explain(f"rank {handle.rank}", got="no job", expected=expected))
        return self.start(replace(launched_job, rank=handle.rank, attempt=handle.attempt + 1))

    def secret_values(self) -> dict[str, str]:
        """Return the values of the secrets, read from this machine's environment. Raises InputError that names the
        secrets that are not set.
        """
        if missing := [name for name in self.secrets if name not in os.environ]:
            got, fix = f"{', '.join(missing)}, which is not set", "Set it, or remove its name."
            raise InputError(explain("secrets", got=got, expected="a value", fix=fix))
        return {name: os.environ[name] for name in self.secrets}

    # ---- ending

    def end_start(
        self, launch: str, rank: int, attempt: int, handle: ReplicaHandle | None = None, *, is_settled: bool = False
    ) -> Exception | None:
        """Cancel the replica that belongs to a start, found by its handle or by name. Returns an error if the replica
        may still be running, and None otherwise.

        A replica that the service does not list may still appear later, unless `is_settled` is true, which means that
        the start was long ago.
        """

        def end() -> None:
            handles = [handle] if handle is not None else self.find(launch, rank, attempt)
            for replica in handles:
                self.cancel(replica)
            if not handles and self.listed_s and not is_settled:
                got, fix = "no reply to its start request", "The replica may still appear: try again in a few minutes."
                raise RunError(explain(f"rank {rank}", got=got, expected="a replica in the service's list", fix=fix))

        return tried(end)[1]

    def was_refused(self, error: BaseException) -> bool:
        """Return whether this error, raised by a start, means that no replica was started."""
        # An InputError is raised before the request is sent.
        return isinstance(error, InputError)

    def by_hand_for(self, launch: str) -> str:
        """Return instructions for finding and ending the replicas of a launch manually."""
        return self.by_hand.format(launch=launch)

    # ---- asking

    def ask(self, handle: ReplicaHandle) -> ReplicaStatus | None:
        """Return the status of a replica, or None if the service gives no usable answer. After `patience_s` seconds
        without a usable answer, raise the error instead.
        """
        launch = handle.metadata.get("launch", "")
        return self._patiently(self._key(handle), handle.rank, launch, partial(self.poll, handle))

    def ask_for(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle] | None:
        """Return the result of `find`, or None if the service gives no usable answer; `patience_s` applies as in
        `ask`.
        """
        key = start_name(launch, rank, attempt)
        return self._patiently(key, rank, launch, partial(self.find, launch, rank, attempt))

    def _patiently(self, key: str, rank: int, launch: str, ask: Callable[[], Answer]) -> Answer | None:
        answer, error = tried(ask)
        # An invalid request stays invalid, so it is not retried.
        if isinstance(error, InputError):
            raise error
        if error is None:
            self._silent_since.pop(key, None)
            return answer
        since = self._silent_since.setdefault(key, time.monotonic())
        if time.monotonic() - since < self.patience_s:
            return None
        got = f"no usable answer for {self.patience_s:g} s ({in_brief(error)})"
        fix = f"The replica may still run. {self.by_hand_for(launch)}"
        raise RunError(explain(f"status of rank {rank}", got=got, expected="an answer", fix=fix)) from error

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait until all replicas have ended or the time is up. Returns how each replica ended, or its status if it
        is still running.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = list(handles)
        while waiting := [handle for handle in waiting if self.ask(handle) not in ENDED]:
            pause = self.poll_interval_s if deadline is None else min(self.poll_interval_s, deadline - time.monotonic())
            if pause <= 0:
                break
            time.sleep(pause)
        return [self._collect_outcome(handle) for handle in handles]

    def shown(self, text: str, n_lines: int) -> str:
        """Return the last lines of a log in a form that is safe to display: the secrets of this machine are masked,
        and control characters are removed.
        """
        if n_lines < 0:
            raise InputError(explain("n_lines", got=n_lines, expected="0 or more"))
        lines = text.splitlines()[-n_lines:] if n_lines else []
        return _without_control_characters(masked("\n".join(lines), secret_masks(self.secrets, os.environ)))

    def reaches(self, handle: ReplicaHandle) -> bool:
        """Return whether this process can poll the replica of a handle, even if another process launched it."""
        return handle.backend_name == self.backend_name

    def _collect_outcome(self, handle: ReplicaHandle) -> dict[str, Any]:
        status = self.poll(handle)
        code = self.exit_code(handle) if status in ENDED else None
        return {"rank": handle.rank, "status": status, "exit_code": code, "error": self._error(handle, status, code)}

    def _error(self, handle: ReplicaHandle, status: ReplicaStatus, code: int | None) -> str | None:
        if status == "succeeded":
            return None
        if status != "failed":
            return "cancelled" if status == "cancelled" else f"still {status} when the time was up"
        return _describe_failure(code, self.stream_logs(handle, n_lines=_LINES_OF_A_FAILURE))

    def end_of(self, handle: ReplicaHandle) -> dict[str, Any]:
        """Return how a replica ended, in the format of `collect`. The answer is cached, because it cannot change."""
        key = self._key(handle)
        if key not in self._ends:
            self._ends[key] = self._collect_outcome(handle)
        return self._ends[key]

    def log_place(self, handle: ReplicaHandle) -> str:
        """Return the URL or path of the replica's log, or "" if the service provides none."""
        self._check_own(handle)
        return ""

    # ---- what a subclass implements

    @abstractmethod
    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the status of a replica."""

    @abstractmethod
    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the output that a replica has written so far."""

    @abstractmethod
    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica and all of its processes. Does nothing if the replica has already ended."""

    @abstractmethod
    def find(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle]:
        """Return the replicas that belong to a start, found by the name of the start; an empty list if the service
        lists none.
        """

    @abstractmethod
    def exit_code(self, handle: ReplicaHandle) -> int | None:
        """Return the exit status of a replica that has ended (negative for a signal), or None if the service does
        not report it.
        """

    @abstractmethod
    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        """Start a replica, and return the metadata that identifies it."""

    def _handle(self, launch: str, rank: int, attempt: int, metadata: Mapping[str, Any]) -> ReplicaHandle:
        return ReplicaHandle(rank, self.backend_name, {**metadata, "launch": launch, "attempt": attempt})

    def _key(self, handle: ReplicaHandle) -> str:
        """Return a key that identifies one start of a replica within this process."""
        self._check_own(handle)
        return json.dumps({name: value for name, value in handle.metadata.items() if name != "attempt"}, sort_keys=True)

    def _check_own(self, handle: ReplicaHandle) -> None:
        if handle.backend_name != self.backend_name:
            got, expected = f"a handle of {handle.backend_name}", f"a handle of {self.backend_name}"
            raise InputError(explain("handle", got=got, expected=expected))


def __getattr__(name: str) -> Any:
    """Return `LocalProcessExecutor`, so that it can also be imported from this module. It is imported lazily,
    because its module imports this one.
    """
    if name != "LocalProcessExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("composer_replication.diloco.serverless.local_process").LocalProcessExecutor


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A handle is JSON without secrets. With it, another process can poll the replica if the service allows that. It never
# contains the address or token of a service: the polling process uses its own.

ReplicaStatus = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ENDED: frozenset[ReplicaStatus] = frozenset({"succeeded", "failed", "cancelled"})


@dataclass
class ReplicaHandle:
    """The identity of a launched replica: its rank, its executor, and the service's identifiers for it."""

    rank: int
    backend_name: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        """The number of earlier starts of this rank."""
        return int(self.metadata.get("attempt", 0))


@runtime_checkable
class ServerlessExecutor(Protocol):
    """The interface of an executor. For each replica, `collect` returns the rank, status, exit code and error, and
    for local processes also the result.
    """

    backend_name: str
    supports_inter_replica_network: bool

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]: ...

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus: ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str: ...

    def cancel(self, handle: ReplicaHandle) -> None: ...

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]: ...


# Calls of services with a time limit, and their answers as text that is safe to print.

Answer = TypeVar("Answer")
# "\x1b[31m" and "\x1b[0m"; other control characters are replaced individually
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_MAX_WORDS, _MAX_WORDS_OF_AN_ERROR = 300, 600
# "torch.cuda." in "torch.cuda.OutOfMemoryError: ..."; not "a.b" in "see a.b for help"
_MODULES = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")
_TRACEBACK = "Traceback (most recent call last):"


def within(seconds: float, what: str, ask: Callable[[], Answer]) -> Answer:
    """Call `ask` with a time limit. Raises RunError if the call takes longer than `seconds`.

    The client libraries of some services may wait forever (huggingface_hub has no timeout). After the time limit, the
    call continues in its thread, so its request may still take effect.
    """
    answers: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def asking() -> None:
        answers.put(tried(ask))

    threading.Thread(target=asking, name="crf-asks", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise RunError(explain(what, got=f"no answer within {seconds:g} s", expected="an answer")) from None
    if error is not None:
        raise error
    return answer  # pyright: ignore[reportReturnType] (None only if `ask` returns it)


def tried(ask: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    """Call `ask`, and return either (result, None) or (None, exception). It catches every Exception, because the
    clients of the services have no common exception class.
    """
    try:
        return ask(), None
    except Exception as error:
        return None, error


def _without_control_characters(text: str) -> str:
    """Remove control characters from log lines, because a replica may print untrusted text."""
    plain_text = _COLOR.sub("", text)
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in plain_text
    )


def in_brief(error: BaseException) -> str:
    """Return an exception raised by a third-party client as one short line of text."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return _without_control_characters(text)[:_MAX_WORDS]


def _describe_exit(code: int | None) -> str:
    """Describe an exit status. Shells and containers report signal n as 128 + n."""
    if code is None:
        return "failed, with no exit status from the service"
    number = -code if code < 0 else code - 128
    if number in {known_signal.value for known_signal in signal.Signals}:
        name = signal.Signals(number).name
        return f"killed by signal {number} ({name})" + (", by hand or out of memory" if name == "SIGKILL" else "")
    if code == REFUSED:
        return f"refused (exit status {code})"
    return "out of time" if code == TIMED_OUT else f"exit status {code}"


def _describe_failure(code: int | None, log: str) -> str:
    """Describe how a replica ended: its exit status, the error of its last traceback, and the last line of its log.

    The last line is not presented as the reason, because a killed replica cannot report one.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    parts = [_describe_exit(code)]
    error = _error_in(log) if code in (None, 1, REFUSED) else None
    if error is not None:
        parts.append(_MODULES.sub("", error)[:_MAX_WORDS_OF_AN_ERROR])
    if lines and lines[-1] != error:
        parts.append(f"its last line: {lines[-1][:_MAX_WORDS]}")
    return "; ".join(parts)


def _error_in(log: str) -> str | None:
    """Return the first line of the error in the last traceback of a log."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else []
    return next((line.strip() for line in after if line.strip() and not line[0].isspace()), None)


# A job is JSON without secrets: it contains the names of entrypoints and secrets.

# "AWS_SECRET_ACCESS_KEY"; not "2ND_KEY"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_JOB_BYTES = 100_000  # the limit for a Linux environment variable is 131,072


@dataclass(frozen=True, kw_only=True)
class ReplicaJob:
    """A description of what a replica should do. It is passed as JSON, and contains secrets only by name."""

    entrypoint: str
    args: Mapping[str, Any]
    rank: int
    launch: str
    attempt: int = 0
    rank_env: str = "REPLICA_RANK"
    gpu: str | None = None
    timeout_s: float | None = None
    secrets: Sequence[str] = ()
    path: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of this start of the replica. It is known before the request, so that the replica can be found
        even if the answer is lost.
        """
        return start_name(self.launch, self.rank, self.attempt)

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which `replica_process` reads the job and the rank."""
        return {JOB_VARIABLE: self.as_json(), self.rank_env: str(self.rank), "PYTHONUNBUFFERED": "1"}

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def check(self) -> None:
        """Raise InputError if the job is invalid."""
        if not VARIABLE.fullmatch(self.rank_env):
            expected = "the name of an environment variable"
            raise InputError(explain("rank_env", got=repr(self.rank_env), expected=expected))
        for name, value in self.args.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                fix = "Put it into the bucket or a file, and pass its path."
                got = type(value).__name__
                raise InputError(explain(f"entrypoint_args[{name!r}]", got=got, expected="JSON", fix=fix)) from None
        if (size := len(self.as_json().encode())) > _MAX_JOB_BYTES:
            fix = "Put large values into the bucket, and pass their keys."
            expected = f"at most {_MAX_JOB_BYTES:,} bytes"
            raise InputError(explain("entrypoint_args", got=f"{size:,} bytes", expected=expected, fix=fix))


def _check_variables(secrets: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise InputError for an invalid variable name, or for a secret that is also passed as a public variable."""
    for name in (*secrets, *env):
        if not VARIABLE.fullmatch(name):
            # The message does not contain the name, because it may be the value of a secret by mistake.
            expected = "names of environment variables, such as AWS_SECRET_ACCESS_KEY"
            raise InputError(explain("secrets and env", got="an invalid name", expected=expected))
    if public_secrets := set(secrets) & env.keys():
        expected = "only its name, in `secrets`"
        raise InputError(explain("env", got=f"{', '.join(sorted(public_secrets))}, a secret", expected=expected))


def start_name(launch: str, rank: int, attempt: int) -> str:
    """Return the name that identifies one start of a replica in labels, tags, actor names and command lines."""
    return f"{launch}.{rank}.{attempt}"


def _entrypoint_name(entrypoint: str | Callable[..., Any], *, backend: str, takes_callables: bool) -> str:
    """Return the name under which another process can import an entrypoint."""
    if isinstance(entrypoint, str):
        if not all(part.isidentifier() for part in entrypoint.split(".")):
            raise InputError(explain("entrypoint", got=repr(entrypoint), expected="a module, or module.function"))
        return entrypoint
    if not takes_callables:
        expected = "a module or module.function that the replica's machine has installed"
        raise InputError(explain(f"entrypoint of {backend}", got="a callable", expected=expected))
    name, module = getattr(entrypoint, "__qualname__", ""), getattr(entrypoint, "__module__", "")
    if not inspect.isfunction(entrypoint) or not name.isidentifier():
        expected = "a top-level function of a module, because the replica imports it by name"
        raise InputError(explain("entrypoint", got=repr(entrypoint), expected=expected))
    if module != "__main__":
        return f"{module}.{name}"
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return f"{spec.name}.{name}"
    return f"{Path(getattr(main, '__file__', '')).resolve()}::{name}"
