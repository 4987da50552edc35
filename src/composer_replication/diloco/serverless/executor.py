"""What every executor does: start replicas in rank order, report their status, end them, and relaunch a dead one.

`Executor` is the base class; a subclass per service says how one replica is started, found, polled and ended. Every
start has a name before it is made, so that `find` can return a replica whose handle was lost. `ReplicaJob` says what a
replica is asked to do, `ReplicaHandle` identifies one that was launched.
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
    """What all executors have in common. Subclasses say how one replica is started, found, polled and ended.

    `secrets` are names of environment variables: their values reach the replicas in the service's own way for secrets,
    and are masked in what replicas print. `env` are variables that anybody may see.
    """

    backend_name: str
    supports_inter_replica_network: bool
    by_hand: str  # how to find and end the replicas of `{launch}` without this package
    poll_interval_s = 0.2
    patience_s = 600.0  # how long a service may give no usable answer
    start_s = 300.0  # the maximum time that a start is requested for
    listed_s = 60.0  # how long after its request a start may be missing in the list of the service; 0: not at all
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
        """Start `n_replicas`, rank 0 first. If one cannot be started, those before it are canceled."""
        if isinstance(n_replicas, bool) or not isinstance(n_replicas, int) or n_replicas < 1:
            raise InputError(explain("n_replicas", got=repr(n_replicas), expected="an integer of at least 1"))
        # Raises for a missing secret before anything is started.
        self.secret_values()
        job = self.job(entrypoint, entrypoint_args, gpu=gpu, timeout_s=timeout)
        handles: list[ReplicaHandle] = []
        try:
            for rank in range(n_replicas):
                handles.append(self.start(replace(job, rank=rank)))
        finally:
            if (error := sys.exception()) is not None and len(handles) < n_replicas:
                # Includes the one whose start raised an error: unless it was refused, it may run all the same.
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
        """Return the job of rank 0. Raises InputError if no replica could run it."""
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
        """Raise InputError if the service would refuse such a job; does not contact it."""
        job.check()

    def start(self, job: ReplicaJob) -> ReplicaHandle:
        """Start one replica of a job. If it raises, the replica may run all the same; `find` tells."""
        handle = self._handle(job.launch, job.rank, job.attempt, self._start(job))
        self._jobs[self._key(handle)] = job
        return handle

    def relaunch(self, handle: ReplicaHandle, job: ReplicaJob | None = None) -> ReplicaHandle:
        """Start a replica again that ended before its time, with the same rank.

        `job` is needed if another process launched it. Raises InputError for a replica that runs or has succeeded.
        """
        if (status := self.poll(handle)) not in ENDED:
            fix = "Cancel it first: two replicas must not share a rank."
            raise InputError(explain(f"rank {handle.rank}", got=status, expected="an ended replica", fix=fix))
        if status == "succeeded":
            raise InputError(explain(f"rank {handle.rank}", got=status, expected="a failed or canceled replica"))
        known_job = job or self._jobs.get(self._key(handle))
        if known_job is None:
            expected = "the job of a replica that another process launched: relaunch(handle, job)"
            raise InputError(explain(f"rank {handle.rank}", got="no job", expected=expected))
        return self.start(replace(known_job, rank=handle.rank, attempt=handle.attempt + 1))

    def secret_values(self) -> dict[str, str]:
        """Return the secrets' values on this machine. Raises InputError that names those without a value."""
        if missing := [name for name in self.secrets if name not in os.environ]:
            got, fix = f"{', '.join(missing)}, which is not set", "Set it, or remove its name."
            raise InputError(explain("secrets", got=got, expected="a value", fix=fix))
        return {name: os.environ[name] for name in self.secrets}

    # ---- ending

    def end_start(
        self, launch: str, rank: int, attempt: int, handle: ReplicaHandle | None = None, *, is_settled: bool = False
    ) -> Exception | None:
        """Cancel what a start has left, by its handle or its name. Returns the error if it may still run.

        A replica that is not listed yet may still appear, unless `is_settled` says that its start was long ago.
        """

        def end() -> None:
            handles = [handle] if handle is not None else self.find(launch, rank, attempt)
            for replica in handles:
                self.cancel(replica)
            if not handles and self.listed_s and not is_settled:
                got = "none in the service's list, and a lost answer: it may still start"
                raise RunError(explain(f"rank {rank}", got=got, expected="its machine"))

        return tried(end)[1]

    def was_refused(self, error: BaseException) -> bool:
        """Return whether the error of a start means that nothing was started."""
        # An InputError is raised before the service is asked.
        return isinstance(error, InputError)

    def by_hand_for(self, launch: str) -> str:
        """Return how to find and end the replicas of a launch without this package."""
        return self.by_hand.format(launch=launch)

    # ---- asking

    def ask(self, handle: ReplicaHandle) -> ReplicaStatus | None:
        """Return the status of a replica; None without a usable answer, which raises after `patience_s`."""
        launch = handle.metadata.get("launch", "")
        return self._patiently(self._key(handle), handle.rank, launch, partial(self.poll, handle))

    def ask_for(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle] | None:
        """Return what `find` does, with the patience of `ask`."""
        key = start_name(launch, rank, attempt)
        return self._patiently(key, rank, launch, partial(self.find, launch, rank, attempt))

    def _patiently(self, key: str, rank: int, launch: str, ask: Callable[[], Answer]) -> Answer | None:
        answer, error = tried(ask)
        # Wrong input does not get better by asking again.
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
        raise RunError(explain(f"rank {rank}", got=got, expected="its status", fix=fix)) from error

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait until all have ended or the time is up, and return how each ended or its status."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = list(handles)
        while waiting := [handle for handle in waiting if self.ask(handle) not in ENDED]:
            pause = self.poll_interval_s if deadline is None else min(self.poll_interval_s, deadline - time.monotonic())
            if pause <= 0:
                break
            time.sleep(pause)
        return [self._outcome(handle) for handle in handles]

    def shown(self, text: str, n_lines: int) -> str:
        """Return the last lines of a log, without secrets known here and without control characters."""
        if n_lines < 0:
            raise InputError(explain("n_lines", got=n_lines, expected="0 or more"))
        lines = text.splitlines()[-n_lines:] if n_lines else []
        return _without_control_characters(masked("\n".join(lines), secret_masks(self.secrets, os.environ)))

    def reaches(self, handle: ReplicaHandle) -> bool:
        """Return whether a handle that another process has stored can be polled from here."""
        return handle.backend_name == self.backend_name

    def _outcome(self, handle: ReplicaHandle) -> dict[str, Any]:
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
        """Return how an ended replica ended, as `collect` does; cached, because that does not change."""
        key = self._key(handle)
        if key not in self._ends:
            self._ends[key] = self._outcome(handle)
        return self._ends[key]

    def log_place(self, handle: ReplicaHandle) -> str:
        """Return where to read the log of a replica without this package; "" if the service has no such place."""
        self._check_own(handle)
        return ""

    # ---- what a subclass implements

    @abstractmethod
    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the status of a replica."""

    @abstractmethod
    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines that a replica has printed so far."""

    @abstractmethod
    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica and all its processes; does nothing to one that has ended."""

    @abstractmethod
    def find(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle]:
        """Return the replicas of a start by its name; an empty list if the service has none."""

    @abstractmethod
    def exit_code(self, handle: ReplicaHandle) -> int | None:
        """Return the exit status of an ended replica, negative for a signal; None if the service does not know."""

    @abstractmethod
    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        """Start one replica, and return the metadata that identifies it."""

    def _handle(self, launch: str, rank: int, attempt: int, metadata: Mapping[str, Any]) -> ReplicaHandle:
        return ReplicaHandle(rank, self.backend_name, {**metadata, "launch": launch, "attempt": attempt})

    def _key(self, handle: ReplicaHandle) -> str:
        """Return what identifies a start of a replica within this process."""
        self._check_own(handle)
        return json.dumps({name: value for name, value in handle.metadata.items() if name != "attempt"}, sort_keys=True)

    def _check_own(self, handle: ReplicaHandle) -> None:
        if handle.backend_name != self.backend_name:
            got, expected = f"one of {handle.backend_name}", f"one of {self.backend_name}"
            raise InputError(explain("handle", got=got, expected=expected))


def __getattr__(name: str) -> Any:
    """Return `LocalProcessExecutor`, which users also import from here. Its module imports this one, hence lazily."""
    if name != "LocalProcessExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("composer_replication.diloco.serverless.local_process").LocalProcessExecutor


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A handle is JSON and holds no secret. It is enough for another process to ask about the replica, if the service allows
# that. It says which replica, never where: address and token of a service are those of the process that asks.

ReplicaStatus = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ENDED: frozenset[ReplicaStatus] = frozenset({"succeeded", "failed", "cancelled"})


@dataclass
class ReplicaHandle:
    """A launched replica: its rank, its executor, and what the service knows it by."""

    rank: int
    backend_name: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        """How often its rank had been started before."""
        return int(self.metadata.get("attempt", 0))


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Runs replicas. `collect` returns per replica: rank, status, exit_code, error, and locally the result."""

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


# Answers of services: within a time limit, and as text that is safe to print.

Answer = TypeVar("Answer")
# "\x1b[31m" and "\x1b[0m"; other control characters are replaced one by one
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_MAX_WORDS, _MAX_WORDS_OF_AN_ERROR = 300, 600
# "torch.cuda." of "torch.cuda.OutOfMemoryError: ..."; not "a.b" in "see a.b for help"
_MODULES = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")
_TRACEBACK = "Traceback (most recent call last):"


def within(seconds: float, what: str, ask: Callable[[], Answer]) -> Answer:
    """Return what `ask` returns, or raise what it raises. Raises RunError if that takes longer.

    Clients of services may wait forever (huggingface_hub's has no time limit). The call is left to its thread, which
    ends with this process, so what it requested may still happen.
    """
    answers: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def asking() -> None:
        answers.put(tried(ask))

    threading.Thread(target=asking, name="crf-asks", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise RunError(explain(what, got=f"no answer within {seconds:g} s", expected="one")) from None
    if error is not None:
        raise error
    return answer  # pyright: ignore[reportReturnType] (None only where `ask` returns it)


def tried(ask: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    """Return the result of `ask` and its error, one of them None: errors of services' clients have no common class."""
    try:
        return ask(), None
    except Exception as error:
        return None, error


def _without_control_characters(text: str) -> str:
    """Return log lines without control characters: a replica may print text that others have sent."""
    plain_text = _COLOR.sub("", text)
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in plain_text
    )


def in_brief(error: BaseException) -> str:
    """Return an error of other code in one line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return _without_control_characters(text)[:_MAX_WORDS]


def _describe_exit(code: int | None) -> str:
    """Describe an exit status; shells and containers report signal n as 128 + n."""
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
    """Describe how a replica ended: its exit status, the error of its last traceback, and its last line.

    The last line is called no more than that: a replica that was killed could not say why.
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
    """Return the first line of the error that ends the last traceback."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else []
    return next((line.strip() for line in after if line.strip() and not line[0].isspace()), None)


# What a replica is asked to do, as JSON without secrets: entrypoints and secrets are named.

# "AWS_SECRET_ACCESS_KEY"; not "2ND_KEY"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_JOB_BYTES = 100_000  # an environment variable of Linux holds 131,072


@dataclass(frozen=True, kw_only=True)
class ReplicaJob:
    """What one replica is asked to do, as JSON; secrets only by name."""

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
        """The name of this start, known before the service is asked, so that a lost answer loses no replica."""
        return start_name(self.launch, self.rank, self.attempt)

    def environment(self) -> dict[str, str]:
        """Return the variables that tell `replica_process` what to do."""
        return {JOB_VARIABLE: self.as_json(), self.rank_env: str(self.rank), "PYTHONUNBUFFERED": "1"}

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def check(self) -> None:
        """Raise InputError if no replica could be started with this job."""
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
            expected = f"{_MAX_JOB_BYTES:,} at most"
            raise InputError(explain("entrypoint_args", got=f"{size:,} bytes", expected=expected, fix=fix))


def _check_variables(secrets: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise InputError for an invalid name, or for a secret that is also a public variable."""
    for name in (*secrets, *env):
        if not VARIABLE.fullmatch(name):
            # The message does not quote it: it may be the value of a secret instead of its name.
            expected = "names of environment variables, such as AWS_SECRET_ACCESS_KEY"
            raise InputError(explain("secrets and env", got="an invalid name", expected=expected))
    if twice := set(secrets) & env.keys():
        expected = "only its name, in `secrets`"
        raise InputError(explain("env", got=f"{', '.join(sorted(twice))}, a secret", expected=expected))


def start_name(launch: str, rank: int, attempt: int) -> str:
    """Return the name of a start for labels, tags, actor names and command lines. It is not secret."""
    return f"{launch}.{rank}.{attempt}"


def _entrypoint_name(entrypoint: str | Callable[..., Any], *, backend: str, takes_callables: bool) -> str:
    """Return the name by which another process can import an entrypoint."""
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
