"""What every executor does: start replicas in rank order, say how each is doing, end them, start a dead one again.

A start has a name before it is made, so that `find` gets back a replica whose handle was lost.
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
    """What the four have in common; each says how one replica is started, found, asked about and ended.

    `secrets` are names of environment variables: their values go to the replicas by the service's own way for secrets,
    and are masked in what replicas print. `env` are variables that anybody may see.
    """

    backend_name: str
    supports_inter_replica_network: bool
    by_hand: str  # how somebody looks after replicas of `{launch}` without us
    poll_interval_s = 0.2
    patience_s = 600.0  # with a service that gives no usable answer
    start_s = 300.0  # that a start is asked for at most
    listed_s = 60.0  # after a start was asked for, until a service that lists none of it has none; 0: at once
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
        """Start `n_replicas`, rank 0 first. Where one cannot be started, those before it are cancelled."""
        if isinstance(n_replicas, bool) or not isinstance(n_replicas, int) or n_replicas < 1:
            raise InputError(explain("n_replicas", got=repr(n_replicas), expected="a number from 1"))
        self.secret_values()  # what is missing is said before anything is started
        job = self.job(entrypoint, entrypoint_args, gpu=gpu, timeout_s=timeout)
        handles: list[ReplicaHandle] = []
        try:
            for rank in range(n_replicas):
                handles.append(self.start(replace(job, rank=rank)))
        finally:
            if (error := sys.exception()) is not None and len(handles) < n_replicas:
                # With the one whose answer was an error, which may run all the same unless it was refused.
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
        """What rank 0 is asked; InputError where no replica could be."""
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
        """InputError where the service would not take such a job; nobody is asked."""
        job.check()

    def start(self, job: ReplicaJob) -> ReplicaHandle:
        """Start one replica of a job. What raises may have started it: `find` says."""
        handle = self._handle(job.launch, job.rank, job.attempt, self._start(job))
        self._jobs[self._key(handle)] = job
        return handle

    def relaunch(self, handle: ReplicaHandle, job: ReplicaJob | None = None) -> ReplicaHandle:
        """Start a replica that has ended before its time once more, with its rank; `job` where another process launched
        it."""
        if (status := self.poll(handle)) not in ENDED:
            fix = "Cancel it first: two replicas with one rank would stand in each other's way."
            raise InputError(explain(f"rank {handle.rank}", got=status, expected="one that has ended", fix=fix))
        if status == "succeeded":
            raise InputError(explain(f"rank {handle.rank}", got=status, expected="one that has failed"))
        known_job = job or self._jobs.get(self._key(handle))
        if known_job is None:
            expected = "the job of a replica that another process launched: relaunch(handle, job)"
            raise InputError(explain(f"rank {handle.rank}", got="no job", expected=expected))
        return self.start(replace(known_job, rank=handle.rank, attempt=handle.attempt + 1))

    def secret_values(self) -> dict[str, str]:
        """The secrets' values here; a name without one is an error that names it."""
        if missing := [name for name in self.secrets if name not in os.environ]:
            got, fix = f"{', '.join(missing)}, which is not set", "Set it, or leave its name out."
            raise InputError(explain("secrets", got=got, expected="a value", fix=fix))
        return {name: os.environ[name] for name in self.secrets}

    # ---- ending

    def end_start(
        self, launch: str, rank: int, attempt: int, handle: ReplicaHandle | None = None, *, is_settled: bool = False
    ) -> Exception | None:
        """Cancel what a start has left, by its handle or by its name; the error where it may still run.

        One that is not listed may come yet, unless `is_settled` says that it was asked for long ago.
        """

        def end() -> None:
            handles = [handle] if handle is not None else self.find(launch, rank, attempt)
            for replica in handles:
                self.cancel(replica)
            if not handles and self.listed_s and not is_settled:
                got = "none in the service's list, and an answer that was lost: it may start yet"
                raise RunError(explain(f"rank {rank}", got=got, expected="its machine"))

        return tried(end)[1]

    def was_refused(self, error: BaseException) -> bool:
        """Whether what a start raised says that nothing was started."""
        return isinstance(error, InputError)  # before the service was asked

    def by_hand_for(self, launch: str) -> str:
        return self.by_hand.format(launch=launch)

    # ---- asking

    def ask(self, handle: ReplicaHandle) -> ReplicaStatus | None:
        """`poll`; None where the service gives no usable answer, which becomes an error after `patience_s`."""
        launch = handle.metadata.get("launch", "")
        return self._patiently(self._key(handle), handle.rank, launch, partial(self.poll, handle))

    def ask_for(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle] | None:
        """`find`, as patient as `ask` is with `poll`."""
        key = start_name(launch, rank, attempt)
        return self._patiently(key, rank, launch, partial(self.find, launch, rank, attempt))

    def _patiently(self, key: str, rank: int, launch: str, ask: Callable[[], Answer]) -> Answer | None:
        answer, error = tried(ask)
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
        raise RunError(explain(f"rank {rank}", got=got, expected="how it is doing", fix=fix)) from error

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait until all have ended, and say how; one that has not when the time is up is told as it stands."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = list(handles)
        while waiting := [handle for handle in waiting if self.ask(handle) not in ENDED]:
            pause = self.poll_interval_s if deadline is None else min(self.poll_interval_s, deadline - time.monotonic())
            if pause <= 0:
                break
            time.sleep(pause)
        return [self._outcome(handle) for handle in handles]

    def shown(self, text: str, n_lines: int) -> str:
        """The last lines of a log, without the secrets that are known here and what a terminal would act upon."""
        if n_lines < 0:
            raise InputError(explain("n_lines", got=n_lines, expected="0 or more"))
        lines = text.splitlines()[-n_lines:] if n_lines else []
        return harmless(masked("\n".join(lines), secret_masks(self.secrets, os.environ)))

    def reaches(self, handle: ReplicaHandle) -> bool:
        """Whether a handle that another process wrote down can be asked about from here."""
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
        return about_failure(code, self.stream_logs(handle, n_lines=_LINES_OF_A_FAILURE))

    def end_of(self, handle: ReplicaHandle) -> dict[str, Any]:
        """How a replica that has ended did, as `collect` says it; asked for once, as that does not change."""
        key = self._key(handle)
        if key not in self._ends:
            self._ends[key] = self._outcome(handle)
        return self._ends[key]

    def log_place(self, handle: ReplicaHandle) -> str:
        """Where somebody reads the log of a replica without us; nothing where the service has no such place."""
        self._check_own(handle)
        return ""

    # ---- what each says for itself

    @abstractmethod
    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """How a replica is doing."""

    @abstractmethod
    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last lines that a replica printed, so far."""

    @abstractmethod
    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica and every process that came of it; one that has ended stays as it is."""

    @abstractmethod
    def find(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle]:
        """The replicas that a start has left, by the name that it was given; none where the service has none."""

    @abstractmethod
    def exit_code(self, handle: ReplicaHandle) -> int | None:
        """The exit status of one that has ended, negative for a signal; None where the service does not say."""

    @abstractmethod
    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        """Start one replica, and say what it is known by."""

    def _handle(self, launch: str, rank: int, attempt: int, metadata: Mapping[str, Any]) -> ReplicaHandle:
        return ReplicaHandle(rank, self.backend_name, {**metadata, "launch": launch, "attempt": attempt})

    def _key(self, handle: ReplicaHandle) -> str:
        self._check_own(handle)
        return json.dumps({name: value for name, value in handle.metadata.items() if name != "attempt"}, sort_keys=True)

    def _check_own(self, handle: ReplicaHandle) -> None:
        if handle.backend_name != self.backend_name:
            got, expected = f"one of {handle.backend_name}", f"one of {self.backend_name}"
            raise InputError(explain("handle", got=got, expected=expected))


def __getattr__(name: str) -> Any:
    """Return `LocalProcessExecutor`, which users import from here too; its module builds on this one."""
    if name != "LocalProcessExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("composer_replication.diloco.serverless.local_process").LocalProcessExecutor


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A replica that was launched, how it is doing, and what every executor can be asked.
#
# A handle is JSON, holds no secret, and is enough for another process to ask about the replica where the service allows
# it. It says whom to ask about, never where: the address and the token of a service are those of whoever asks.

ReplicaStatus = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ENDED: frozenset[ReplicaStatus] = frozenset({"succeeded", "failed", "cancelled"})


@dataclass
class ReplicaHandle:
    """A replica that was launched: its rank, whose it is, and what the service knows it by."""

    rank: int
    backend_name: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        """How often its rank had been started before."""
        return int(self.metadata.get("attempt", 0))


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Where replicas run. `collect` gives a dict a replica: rank, status, exit_code, error, and locally its result."""

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


# What services say: in time or not at all, and as text that a terminal does not act upon.

Answer = TypeVar("Answer")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOST_WORDS, _MOST_WORDS_OF_AN_ERROR = 300, 600
_MODULES = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")  # before the name of an error
_TRACEBACK = "Traceback (most recent call last):"


def within(seconds: float, what: str, ask: Callable[[], Answer]) -> Answer:
    """What `ask` returns or raises; RunError where it says nothing for so long.

    Clients of services may wait for ever (huggingface_hub's has no time limit). The question is left to its thread,
    which ends with this process; whatever it asked for may have happened.
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
    """What `ask` returns, or the error it raises: those of services' clients have no class in common."""
    try:
        return ask(), None
    except Exception as error:
        return None, error


def harmless(text: str) -> str:
    """Lines of a log without what a terminal would act upon: a replica prints what it was sent, too."""
    plain_text = _COLOUR.sub("", text)
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in plain_text
    )


def in_brief(error: BaseException) -> str:
    """An error of somebody else's in one line."""
    lines = str(error).strip().splitlines()
    return harmless(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)[:_MOST_WORDS]


def how_it_ended(code: int | None) -> str:
    """An exit status in words; 128 + n is what shells and containers make of signal n."""
    if code is None:
        return "failed, with no exit status from the service"
    number = -code if code < 0 else code - 128
    if number in {known_signal.value for known_signal in signal.Signals}:
        name = signal.Signals(number).name
        return f"killed by signal {number} ({name})" + (", by hand or out of memory" if name == "SIGKILL" else "")
    if code == REFUSED:
        return f"refused (exit status {code})"
    return "out of time" if code == TIMED_OUT else f"exit status {code}"


def about_failure(code: int | None, log: str) -> str:
    """How a replica ended, and what it said last: the error of its last traceback, and its last line as no more than
    that, since one that was killed did not know it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    parts = [how_it_ended(code)]
    error = _error_in(log) if code in (None, 1, REFUSED) else None
    if error is not None:
        parts.append(_MODULES.sub("", error)[:_MOST_WORDS_OF_AN_ERROR])
    if lines and lines[-1] != error:
        parts.append(f"its last line: {lines[-1][:_MOST_WORDS]}")
    return "; ".join(parts)


def _error_in(log: str) -> str | None:
    """What the last traceback ends with; its message may have more lines."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else []
    return next((line.strip() for line in after if line.strip() and not line[0].isspace()), None)


# What one replica is asked to do, as JSON that says nothing it should not: entrypoints by name, secrets by name.

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_JOB_BYTES = 100_000  # an environment variable of Linux holds 131,072


@dataclass(frozen=True, kw_only=True)
class ReplicaJob:
    """What one replica is asked to do. All of it is JSON; of secrets it holds the names."""

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
        """This one start of this replica: known before a service is asked, so that a lost answer loses no replica."""
        return start_name(self.launch, self.rank, self.attempt)

    def environment(self) -> dict[str, str]:
        """The variables that tell `replica_process` what to do."""
        return {JOB_VARIABLE: self.as_json(), self.rank_env: str(self.rank), "PYTHONUNBUFFERED": "1"}

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def check(self) -> None:
        """InputError where a replica could not be started with this."""
        if not VARIABLE.fullmatch(self.rank_env):
            expected = "the name of an environment variable"
            raise InputError(explain("rank_env", got=repr(self.rank_env), expected=expected))
        for name, value in self.args.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                fix = "Put it into the bucket or a file, and hand over where it is."
                got = type(value).__name__
                raise InputError(explain(f"entrypoint_args[{name!r}]", got=got, expected="JSON", fix=fix)) from None
        if (size := len(self.as_json().encode())) > _MOST_JOB_BYTES:
            fix = "Put what is large into the bucket, and hand over its key."
            expected = f"{_MOST_JOB_BYTES:,} at most"
            raise InputError(explain("entrypoint_args", got=f"{size:,} bytes", expected=expected, fix=fix))


def _check_variables(secrets: Sequence[str], env: Mapping[str, str]) -> None:
    """InputError where a name is none, or a secret is also a variable that anybody may see."""
    for name in (*secrets, *env):
        if not VARIABLE.fullmatch(name):
            # Not what was got: it may be the value, put where its name belongs.
            expected = "names of environment variables, such as AWS_SECRET_ACCESS_KEY"
            raise InputError(explain("secrets and env", got="a name that is none", expected=expected))
    if twice := set(secrets) & env.keys():
        expected = "secrets by name alone, in `secrets`"
        raise InputError(explain("env", got=f"{', '.join(sorted(twice))}, a secret", expected=expected))


def start_name(launch: str, rank: int, attempt: int) -> str:
    """What a start is called in labels, tags, names of actors and command lines. It is no secret."""
    return f"{launch}.{rank}.{attempt}"


def _entrypoint_name(entrypoint: str | Callable[..., Any], *, backend: str, takes_callables: bool) -> str:
    """The name that another process finds an entrypoint by."""
    if isinstance(entrypoint, str):
        if not all(part.isidentifier() for part in entrypoint.split(".")):
            raise InputError(explain("entrypoint", got=repr(entrypoint), expected="a module, or module.function"))
        return entrypoint
    if not takes_callables:
        expected = "a module or module.function that the replica's machine has installed"
        raise InputError(explain(f"entrypoint of {backend}", got="a callable", expected=expected))
    name, module = getattr(entrypoint, "__qualname__", ""), getattr(entrypoint, "__module__", "")
    if not inspect.isfunction(entrypoint) or not name.isidentifier():
        expected = "a function at the top of a module: the replica imports it by its name"
        raise InputError(explain("entrypoint", got=repr(entrypoint), expected=expected))
    if module != "__main__":
        return f"{module}.{name}"
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return f"{spec.name}.{name}"
    return f"{Path(getattr(main, '__file__', '')).resolve()}::{name}"
