"""What every executor does: start replicas in rank order, say how each is doing, end them, start a dead one again.

A start has a name before it is made, so that `find` gets back a replica whose handle was lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from composer_replication.diloco.serverless.answers import Answer, about_failure, harmless, in_brief, tried
from composer_replication.diloco.serverless.handles import ENDED, ReplicaHandle, ReplicaStatus, ServerlessExecutor
from composer_replication.diloco.serverless.jobs import ReplicaJob, check_variables, entrypoint_name, start_name
from composer_replication.diloco.serverless.masked_lines import masked, secret_masks
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
        check_variables(self.secrets, self.env)
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
            entrypoint=entrypoint_name(entrypoint, backend=self.backend_name, takes_callables=self.takes_callables),
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
