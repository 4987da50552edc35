"""Run replicas as processes on this machine: to try out a launch, to use several GPUs, and for tests.

Process ids are reused, so a process is only signaled after checking that it is the one that was started: its start time
as reported by the kernel, and the name of the start among its arguments, must match.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

from composer_replication.atomic import try_lock
from composer_replication.diloco.serverless.executor import (
    MODULE,
    Executor,
    ReplicaHandle,
    ReplicaJob,
    ReplicaStatus,
    start_name,
)
from composer_replication.diloco.serverless.replica_process import (
    ALIVE_VARIABLE,
    END_FILE,
    FOLDER_VARIABLE,
    RESULT_FILE,
    TERM_GRACE_S,
    TIED_VARIABLE,
)
from composer_replication.errors import InputError, RunError, explain

__all__ = ["LocalProcessExecutor"]


LOG_FILE, CANCELLED_FILE, ALIVE_FILE = "log.txt", "cancelled", "alive"
_MAX_LOG_BYTES = 4 << 20
_KILL_S = 5.0  # how long a killed process may take to disappear


class LocalProcessExecutor(Executor):
    """Runs each replica as a local process in its own session. The replicas end when this process ends.

    `folder` contains one folder per replica, with its log, a record of how it ended, and its result. With `tied=False`,
    replicas outlive this process, and another process that has their handles can poll them.
    """

    backend_name = "local_process"
    supports_inter_replica_network = True
    by_hand = "`pgrep -f {launch}` shows its processes on that machine, and `kill` ends one."
    takes_callables = True
    listed_s = 0.0  # a process is visible as soon as it exists
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
        # Only this process holds the write end, and never writes: when it ends, replicas see the end of the pipe.
        self._tie = os.pipe() if tied else None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        if job.gpu is not None:
            warnings.warn(
                f"gpu={job.gpu!r} is ignored by local processes, which see all GPUs of this machine. "
                "Assign them with CUDA_VISIBLE_DEVICES",
                UserWarning,
                stacklevel=4,
            )
        folder = self._new_folder(job)
        environment = {**os.environ, **self.env, **job.environment(), FOLDER_VARIABLE: str(folder)}
        environment[TIED_VARIABLE] = "0" if self._tie is None else "1"
        with (folder / LOG_FILE).open("ab") as log, (folder / ALIVE_FILE).open("wb") as alive:
            # The keeper inherits the lock, so that the lock is never free in between.
            try_lock(alive.fileno())
            environment[ALIVE_VARIABLE] = str(alive.fileno())
            process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
                # `find` recognizes the process by these arguments.
                [sys.executable, "-m", MODULE, job.name, str(folder)],
                stdin=subprocess.DEVNULL if self._tie is None else self._tie[0],
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[alive.fileno()],
                start_new_session=True,
            )
        self._processes[job.name] = process
        process_info = _look_up(process.pid)
        return self._metadata(job.name, process.pid, "" if process_info is None else process_info.began, folder)

    def _metadata(self, name: str, pid: int, began: str, folder: Path | str) -> dict[str, Any]:
        here = {"folder": str(folder), "host": socket.gethostname()}
        return {"name": name, "pid": pid, "began": began, "start_ts": time.time(), **here}

    def find(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle]:
        name = start_name(launch, rank, attempt)
        handles = []
        for process in _find_by_argument(name):
            if MODULE in process.arguments:
                folder = " ".join(process.arguments[process.arguments.index(name) + 1 :])
                handles.append(
                    self._handle(launch, rank, attempt, self._metadata(name, process.pid, process.began, folder))
                )
        return handles

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
            start = max(0, file.seek(0, os.SEEK_END) - _MAX_LOG_BYTES)
            file.seek(start)
            data = file.read(_MAX_LOG_BYTES)
        text = data.decode("utf-8", "replace")
        # The first line may be incomplete, so it is dropped.
        return self.shown(text.partition("\n")[2] if start else text, n_lines)

    def log_place(self, handle: ReplicaHandle) -> str:
        return str(_folder_of(handle) / LOG_FILE)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Send SIGTERM, so that a trainer can save its state, and after a grace period send SIGKILL."""
        if not self._is_alive(handle):
            return
        self._signal(handle, signal.SIGTERM, note=True)
        deadline, is_killed = time.monotonic() + TERM_GRACE_S + _KILL_S, False
        while self._is_alive(handle):
            if time.monotonic() > deadline:  # the keeper does not respond
                if is_killed:
                    got = f"process {handle.metadata['pid']}, which SIGKILL does not end"
                    raise RunError(explain(f"rank {handle.rank}", got=got, expected="an ended process"))
                self._signal(handle, signal.SIGKILL)
                deadline, is_killed = time.monotonic() + _KILL_S, True
            time.sleep(self.poll_interval_s)

    def _signal(self, handle: ReplicaHandle, number: int, *, note: bool = False) -> None:
        """Send a signal to the replica's process, after making sure that it is no other process. With `note`, mark
        the replica as canceled.
        """
        child, process = self._processes.get(handle.metadata.get("name", "")), _find_process(handle)
        if child is None and process is None:
            if not self._is_alive(handle):
                return
            got = f"process {handle.metadata.get('pid')}, which may not be the replica"
            expected = "a process with the start time and name in the handle"
            fix = f"No signal was sent. {self.by_hand_for(handle.metadata.get('launch', ''))}"
            raise RunError(explain(f"rank {handle.rank}", got=got, expected=expected, fix=fix))
        if note:
            (_folder_of(handle) / CANCELLED_FILE).touch()
        if child is not None:
            # The id of a child process cannot be reused before this process has waited for it.
            child.send_signal(number)
        elif process is not None:
            _send_signal(process, number)

    def exit_code(self, handle: ReplicaHandle) -> int | None:
        end = _read_json(_folder_of(handle) / END_FILE)
        if end is not None:
            return int(end["status"])
        process = self._processes.get(handle.metadata.get("name", ""))
        # The keeper did not record an end, so it was killed, and the body with it.
        return -signal.SIGKILL if process is None else process.poll()

    def reaches(self, handle: ReplicaHandle) -> bool:
        is_here = handle.metadata.get("host") == socket.gethostname()
        return super().reaches(handle) and is_here and _folder_of(handle).is_dir()

    def _collect_outcome(self, handle: ReplicaHandle) -> dict[str, Any]:
        value = _read_json(_folder_of(handle) / RESULT_FILE)
        return {**super()._collect_outcome(handle), "result": None if value is None else value["result"]}

    def _is_alive(self, handle: ReplicaHandle) -> bool:
        self._check_own(handle)
        if not self.reaches(handle):
            got = f"a process on host {handle.metadata.get('host')!r}, in {handle.metadata.get('folder')}"
            fix = "Run the command on the host of the process."
            raise RunError(
                explain(
                    f"rank {handle.rank}",
                    got=got,
                    expected=f"a process on this host, {socket.gethostname()!r}",
                    fix=fix,
                )
            )
        process = self._processes.get(handle.metadata.get("name", ""))
        if process is not None:
            return process.poll() is None
        # Some file systems have no locks, and processes in another container are not visible.
        return _is_held(_folder_of(handle) / ALIVE_FILE) or _find_process(handle) is not None


def _find_process(handle: ReplicaHandle) -> _Process | None:
    """Return the process that a handle refers to, or None if it does not exist or its start time or arguments do not
    match.
    """
    pid, began, name = (handle.metadata.get(key) for key in ("pid", "began", "name"))
    process = _look_up(pid) if isinstance(pid, int) else None
    is_it = process is not None and began and name and process.began == began and name in process.arguments
    return process if is_it else None


def _is_held(path: Path) -> bool:
    """Return whether a replica's keeper process holds the lock on this file, which proves that it is alive. A
    process id would prove nothing, because ids are reused.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _folder_of(handle: ReplicaHandle) -> Path:
    try:
        return Path(handle.metadata["folder"])
    except KeyError:
        raise InputError(
            explain("handle", got="a handle without a folder", expected="a handle of a local replica")
        ) from None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


# Identifying processes. On Linux, a pidfd ensures that a signal goes to the process that was checked, and not to one
# that got its id in between.

_PROC = Path("/proc")
_BOOT = _PROC / "sys" / "kernel" / "random" / "boot_id"
_START_FIELD = 19  # starttime, field 22 of /proc/PID/stat, counted after the name in parentheses
_EXEC_READS, _EXEC_PAUSE_S = 50, 0.001  # 3 of 400 processes had no visible arguments right after their start


class _Process(NamedTuple):
    """A process on this machine."""

    pid: int
    parent: int
    began: str
    arguments: tuple[str, ...]

    def is_still(self, process: _Process | None) -> bool:
        """Return whether `process` is the same process as this one. Parents are not compared, because a parent may
        have exited.
        """
        return process is not None and (process.began, process.arguments) == (self.began, self.arguments)


def _look_up(pid: int) -> _Process | None:
    """Return the process with this id, or None if it does not exist or is not visible to this user."""
    if pid <= 0:
        return None
    return _from_proc(pid) if sys.platform == "linux" else _from_ps(pid)


def _find_by_argument(argument: str) -> list[_Process]:
    """Return the processes on this machine that were started with this argument, excluding their forks."""
    everything = (_look_up(pid) for pid in _all_pids())
    # A forked process has the arguments of its parent until it calls exec.
    matching = {process.pid: process for process in everything if process is not None and argument in process.arguments}
    return [process for process in matching.values() if process.parent not in matching]


def _send_signal(process: _Process, number: int) -> bool:
    """Send a signal to a process. If its id no longer belongs to it, return False without sending anything."""
    if not hasattr(os, "pidfd_open"):
        if not process.is_still(_look_up(process.pid)):
            return False
        os.kill(process.pid, number)
        return True
    try:
        # A pidfd always refers to the same process, even if the id is reused.
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # Checked after the pidfd was opened, so that it cannot refer to a later process with this id.
        if not process.is_still(_look_up(process.pid)):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _from_proc(pid: int) -> _Process | None:
    try:
        arguments = _arguments(_PROC / str(pid))
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        boot = _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return None
    # The name in parentheses may itself contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":  # Z: a zombie, X: dead
        return None
    return _Process(pid, int(fields[1]), f"{boot} {fields[_START_FIELD]}", arguments)


def _arguments(folder: Path) -> tuple[str, ...]:
    """Return the arguments of a process. They are briefly empty during exec, so they are read up to several times."""
    for _ in range(_EXEC_READS):
        arguments = (folder / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        if arguments or not _is_program(folder):
            return tuple(arguments)
        time.sleep(_EXEC_PAUSE_S)
    return ()


def _is_program(folder: Path) -> bool:
    """Return whether a process is running an executable file. Kernel threads and ended processes are not, and have
    no arguments.
    """
    try:
        return bool((folder / "exe").readlink().parts)
    except OSError:
        return False


def _from_ps(pid: int) -> _Process | None:
    """Look up a process with POSIX `ps`. The output of `ps` is split at spaces, so the names of starts must not
    contain any.
    """
    words = _ps("-o", "stat=", "-o", "ppid=", "-o", "lstart=", "-o", "command=", "-ww", "-p", str(pid)).split()
    if len(words) < 8 or words[0].startswith("Z"):
        return None
    return _Process(pid, int(words[1]), " ".join(words[2:7]), tuple(words[7:]))


def _all_pids() -> list[int]:
    if sys.platform == "linux":
        return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    return [int(pid) for pid in _ps("-ax", "-o", "pid=").split()]


def _ps(*arguments: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(  # noqa: S603 (no shell, and only numbers as arguments)
        ["ps", *arguments],  # noqa: S607 (its path differs between systems)
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=30,
    ).stdout
