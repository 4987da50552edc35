"""Replicas as processes of this machine: to try a launch out, to use several GPUs of one machine, and for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_replication.atomic import try_lock
from composer_replication.diloco.serverless.executor import MODULE, Executor, ReplicaHandle, ReplicaJob, ReplicaStatus
from composer_replication.diloco.serverless.replica_process import (
    ALIVE_VARIABLE,
    END_FILE,
    FOLDER_VARIABLE,
    RESULT_FILE,
    TERM_GRACE_S,
    TIED_VARIABLE,
)
from composer_replication.errors import InputError, explain

__all__ = ["LocalProcessExecutor"]

LOG_FILE, CANCELLED_FILE, ALIVE_FILE = "log.txt", "cancelled", "alive"
_MOST_LOG_BYTES = 4 << 20


class LocalProcessExecutor(Executor):
    """A process a replica, in a session of its own, that ends when this process does.

    `folder` holds a folder a replica: its log, how it ended, what it returned. With `tied=False` replicas outlive this
    process, and another one that has the handles can go on asking about them.
    """

    backend_name = "local_process"
    supports_inter_replica_network = True
    takes_callables = True
    poll_interval_s = 0.05

    def __init__(
        self,
        *,
        secrets: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        folder: Path | str | None = None,
        tied: bool = True,
    ) -> None:
        super().__init__(secrets=secrets, env=env)
        if not hasattr(os, "fork"):
            raise RuntimeError(explain("LocalProcessExecutor", got=sys.platform, expected="Linux or macOS"))
        self._folder = None if folder is None else Path(folder).absolute()
        # Only we hold the writing end, and nothing is written: replicas that read its end know that we are gone.
        self._tie = os.pipe() if tied else None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        if job.gpu is not None:
            warnings.warn(
                f"gpu={job.gpu!r} is not followed by processes of this machine: they see the GPUs that it has. "
                "Give each its own with CUDA_VISIBLE_DEVICES",
                UserWarning,
                stacklevel=4,
            )
        folder = self._new_folder(job)
        environment = {**os.environ, **self.env, **job.environment(), FOLDER_VARIABLE: str(folder)}
        environment[TIED_VARIABLE] = "0" if self._tie is None else "1"
        with (folder / LOG_FILE).open("ab") as log, (folder / ALIVE_FILE).open("wb") as alive:
            try_lock(alive.fileno())  # the keeper has it from us, so that there is no moment without
            environment[ALIVE_VARIABLE] = str(alive.fileno())
            process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
                [sys.executable, "-m", MODULE],
                stdin=subprocess.DEVNULL if self._tie is None else self._tie[0],
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[alive.fileno()],
                start_new_session=True,
            )
        self._processes[process.pid] = process
        return {"pid": process.pid, "start_ts": time.time(), "folder": str(folder), "host": socket.gethostname()}

    def _new_folder(self, job: ReplicaJob) -> Path:
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="crf-replicas-"))
        attempt = 0
        while True:
            folder = self._folder / job.launch[:12] / f"rank-{job.rank:03d}.{attempt}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                attempt += 1
            else:
                return folder

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        if self._is_alive(handle):
            return "running"
        end = _read_json(_folder_of(handle) / END_FILE) or {"reason": "killed"}
        if end["reason"] is not None and (_folder_of(handle) / CANCELLED_FILE).exists():
            return "cancelled"
        return "succeeded" if self.exit_code(handle) == 0 else "failed"

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        self._check_own(handle)
        with (_folder_of(handle) / LOG_FILE).open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _MOST_LOG_BYTES)
            file.seek(start)
            data = file.read(_MOST_LOG_BYTES)
        text = data.decode("utf-8", "replace")
        return self.shown(text.partition("\n")[2] if start else text, n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        """SIGTERM, so that a trainer can save what it has; after a grace SIGKILL."""
        self._check_own(handle)
        if not self._is_alive(handle):
            return
        (_folder_of(handle) / CANCELLED_FILE).touch()
        _signal_process(handle, signal.SIGTERM)
        deadline = time.monotonic() + TERM_GRACE_S + 5
        while self._is_alive(handle):
            if time.monotonic() > deadline:  # the keeper itself is stopped, or stuck
                _signal_process(handle, signal.SIGKILL)
            time.sleep(self.poll_interval_s)

    def exit_code(self, handle: ReplicaHandle) -> int | None:
        end = _read_json(_folder_of(handle) / END_FILE)
        if end is not None:
            return int(end["status"])
        process = self._processes.get(handle.metadata["pid"])
        # No word from the keeper: it was killed itself, and took the body with it.
        return -signal.SIGKILL if process is None else process.poll()

    def reaches(self, handle: ReplicaHandle) -> bool:
        return super().reaches(handle) and handle.metadata["host"] == socket.gethostname()

    def _outcome(self, handle: ReplicaHandle) -> dict[str, Any]:
        value = _read_json(_folder_of(handle) / RESULT_FILE)
        return {**super()._outcome(handle), "result": None if value is None else value["result"]}

    def _is_alive(self, handle: ReplicaHandle) -> bool:
        self._check_own(handle)
        process = self._processes.get(handle.metadata["pid"])
        if process is not None:
            return process.poll() is None
        return _is_held(_folder_of(handle) / ALIVE_FILE)


def _is_held(path: Path) -> bool:
    """Whether a keeper holds its file: a process id alone may be another process's by now."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _signal_process(handle: ReplicaHandle, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(handle.metadata["pid"], number)


def _folder_of(handle: ReplicaHandle) -> Path:
    try:
        return Path(handle.metadata["folder"])
    except KeyError:
        raise InputError(explain("handle", got="one without a folder", expected="one that was launched here")) from None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
