"""What every executor does: start replicas in rank order, say how each is doing, end them, start a dead one again.

A handle is JSON, holds no secret, and is enough for another process to ask about the replica where the service allows
it. Entrypoints are names and their arguments JSON: nothing is pickled on its way to another machine.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from composer_replication.diloco.serverless.replica_process import JOB_VARIABLE, masked, secret_masks
from composer_replication.errors import InputError, explain

__all__ = ["ReplicaHandle", "ReplicaJob", "ReplicaStatus", "ServerlessExecutor"]

ReplicaStatus = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ENDED: frozenset[ReplicaStatus] = frozenset({"succeeded", "failed", "cancelled"})
MODULE = "composer_replication.diloco.serverless.replica_process"
_MOST_JOB_BYTES = 100_000  # an environment variable of Linux holds 131,072
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class ReplicaHandle:
    """A replica that was launched: its rank, whose it is, and what the service knows it by."""

    rank: int
    backend_name: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReplicaJob:
    """What one replica is asked to do. All of it is JSON; of secrets it holds the names."""

    entrypoint: str
    args: Mapping[str, Any]
    rank: int
    launch: str
    rank_env: str = "REPLICA_RANK"
    gpu: str | None = None
    timeout_s: float | None = None
    secrets: Sequence[str] = ()
    path: Sequence[str] = ()

    def environment(self) -> dict[str, str]:
        """The variables that tell `replica_process` what to do."""
        return {JOB_VARIABLE: self.as_json(), self.rank_env: str(self.rank), "PYTHONUNBUFFERED": "1"}

    def as_json(self) -> str:
        return json.dumps(asdict(self))


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


class Executor(ABC):
    """What the four have in common; each says how one replica is started, asked about and ended.

    `secrets` are names of environment variables: their values go to the replicas by the service's own way for secrets,
    and are masked in what replicas print. `env` are variables that anybody may see.
    """

    backend_name: str
    supports_inter_replica_network: bool
    poll_interval_s = 0.2
    takes_callables = False

    def __init__(self, *, secrets: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self.secrets, self.env = tuple(secrets), dict(env or {})
        for name in (*self.secrets, *self.env):
            if not _VARIABLE.fullmatch(name):
                # Not what was got: it may be the value, put where its name belongs.
                expected = "names of environment variables, such as AWS_SECRET_ACCESS_KEY"
                raise InputError(explain("secrets and env", got="a name that is none", expected=expected))
        if twice := set(self.secrets) & self.env.keys():
            expected = "secrets by name alone, in `secrets`"
            raise InputError(explain("env", got=f"{', '.join(sorted(twice))}, a secret", expected=expected))
        self._jobs: dict[str, ReplicaJob] = {}

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
        if timeout is not None and not timeout > 0:
            raise InputError(explain("timeout", got=timeout, expected="seconds above 0, or None"))
        self.secret_values()  # what is missing is said before anything is started
        job = self.job(entrypoint, entrypoint_args, gpu=gpu, timeout_s=timeout)
        handles: list[ReplicaHandle] = []
        try:
            for rank in range(n_replicas):
                handles.append(self.start(replace(job, rank=rank)))
        finally:
            if len(handles) < n_replicas:
                for each in handles:
                    self.cancel(each)
        return handles

    def start(self, job: ReplicaJob, *, attempt: int = 0) -> ReplicaHandle:
        """Start one replica of a job."""
        metadata = self._start(job)
        handle = ReplicaHandle(job.rank, self.backend_name, {**metadata, "attempt": attempt})
        self._jobs[self._key(handle)] = job
        return handle

    def relaunch(self, handle: ReplicaHandle, job: ReplicaJob | None = None) -> ReplicaHandle:
        """Start a replica that has ended once more, with its rank; `job` where another process launched it."""
        if (status := self.poll(handle)) not in ENDED:
            fix = "Cancel it first: two replicas with one rank would stand in each other's way."
            raise InputError(explain(f"rank {handle.rank}", got=status, expected="one that has ended", fix=fix))
        known = job or self._jobs.get(self._key(handle))
        if known is None:
            expected = "the job of a replica that another process launched: relaunch(handle, job)"
            raise InputError(explain(f"rank {handle.rank}", got="no job", expected=expected))
        return self.start(known, attempt=int(handle.metadata.get("attempt", 0)) + 1)

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait until all have ended, and say how; one that has not when the time is up is told as it stands."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = list(handles)
        while waiting := [each for each in waiting if self.poll(each) not in ENDED]:
            left = self.poll_interval_s if deadline is None else min(self.poll_interval_s, deadline - time.monotonic())
            if left <= 0:
                break
            time.sleep(left)
        return [self._outcome(each) for each in handles]

    def secret_values(self) -> dict[str, str]:
        """The secrets' values here; a name without one is an error that names it."""
        if missing := [name for name in self.secrets if name not in os.environ]:
            fix = "Set it, or leave its name out."
            raise InputError(
                explain("secrets", got=f"{', '.join(missing)}, which is not set", expected="a value", fix=fix)
            )
        return {name: os.environ[name] for name in self.secrets}

    def shown(self, text: str, n_lines: int) -> str:
        """The last lines of a log, without the secrets that are known here."""
        if n_lines < 0:
            raise InputError(explain("n_lines", got=n_lines, expected="0 or more"))
        lines = text.splitlines()[-n_lines:] if n_lines else []
        return masked("\n".join(lines), secret_masks(self.secrets, os.environ))

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
    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        """Start one replica, and say what it is known by."""

    @abstractmethod
    def exit_code(self, handle: ReplicaHandle) -> int | None:
        """The exit status of one that has ended, negative for a signal; None where the service does not say."""

    def reaches(self, handle: ReplicaHandle) -> bool:
        """Whether a handle that another process wrote down can be asked about from here."""
        return handle.backend_name == self.backend_name

    def _key(self, handle: ReplicaHandle) -> str:
        self._check_own(handle)
        return json.dumps({name: value for name, value in handle.metadata.items() if name != "attempt"}, sort_keys=True)

    def _check_own(self, handle: ReplicaHandle) -> None:
        if handle.backend_name != self.backend_name:
            raise InputError(
                explain("handle", got=f"one of {handle.backend_name}", expected=f"one of {self.backend_name}")
            )

    def _outcome(self, handle: ReplicaHandle) -> dict[str, Any]:
        status = self.poll(handle)
        code = self.exit_code(handle) if status in ENDED else None
        return {"rank": handle.rank, "status": status, "exit_code": code, "error": self._error(handle, status, code)}

    def _error(self, handle: ReplicaHandle, status: ReplicaStatus, code: int | None) -> str | None:
        if status == "succeeded":
            return None
        if status != "failed":
            return "cancelled" if status == "cancelled" else f"still {status} when the time was up"
        lines = [line for line in self.stream_logs(handle, n_lines=20).splitlines() if line.strip()]
        return f"{how_it_ended(code)}; last line: {lines[-1].strip()}" if lines else how_it_ended(code)

    def job(
        self, entrypoint: str | Callable[..., Any], args: Mapping[str, Any], *, gpu: str | None, timeout_s: float | None
    ) -> ReplicaJob:
        kept = {name: value for name, value in args.items() if name != "rank_env"}
        job = ReplicaJob(
            entrypoint=entrypoint if isinstance(entrypoint, str) else self._name_of(entrypoint),
            args=kept,
            rank=0,
            launch=uuid.uuid4().hex,
            rank_env=args.get("rank_env", "REPLICA_RANK"),
            gpu=gpu,
            timeout_s=timeout_s,
            secrets=self.secrets,
            path=[each for each in sys.path if each] if self.takes_callables else [],
        )
        if not _VARIABLE.fullmatch(job.rank_env):
            raise InputError(
                explain("rank_env", got=repr(job.rank_env), expected="the name of an environment variable")
            )
        if isinstance(entrypoint, str) and not all(part.isidentifier() for part in entrypoint.split(".")):
            raise InputError(explain("entrypoint", got=repr(entrypoint), expected="a module, or module.function"))
        self._check_size(kept, job)
        return job

    def _check_size(self, args: Mapping[str, Any], job: ReplicaJob) -> None:
        for name, value in args.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                fix = "Put it into the bucket or a file, and hand over where it is."
                got = type(value).__name__
                raise InputError(explain(f"entrypoint_args[{name!r}]", got=got, expected="JSON", fix=fix)) from None
        if (size := len(job.as_json().encode())) > _MOST_JOB_BYTES:
            fix = "Put what is large into the bucket, and hand over its key."
            raise InputError(
                explain("entrypoint_args", got=f"{size:,} bytes", expected=f"{_MOST_JOB_BYTES:,} at most", fix=fix)
            )

    def _name_of(self, function: Callable[..., Any]) -> str:
        """The name that another process finds a function by."""
        if not self.takes_callables:
            expected = "a module or module.function that the replica's machine has installed"
            raise InputError(explain(f"entrypoint of {self.backend_name}", got="a callable", expected=expected))
        name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
        if not inspect.isfunction(function) or not name.isidentifier():
            expected = "a function at the top of a module: the replica imports it by its name"
            raise InputError(explain("entrypoint", got=repr(function), expected=expected))
        main = sys.modules["__main__"]
        if module != "__main__":
            return f"{module}.{name}"
        if (spec := getattr(main, "__spec__", None)) is not None:
            return f"{spec.name}.{name}"
        return f"{Path(getattr(main, '__file__', '')).resolve()}::{name}"


def how_it_ended(code: int | None) -> str:
    """An exit status in words; 128 + n is what shells and containers make of signal n."""
    if code is None:
        return "failed, with no exit status from the service"
    number = -code if code < 0 else code - 128
    if number in {each.value for each in signal.Signals}:
        name = signal.Signals(number).name
        return f"ended by {name}" + (" (killed, or out of memory)" if name == "SIGKILL" else "")
    return "out of time" if code == 124 else f"exit status {code}"
