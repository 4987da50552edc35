"""Runs tests in a process that can reach nothing, and says which kind of wall stands around it.

One server process lives behind the wall; a test run is a fork of it and costs a few milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from composer_replication.envs.workspace.in_sandbox import MAX_LINE, MAX_LINES
from composer_replication.envs.workspace.sandbox_server import RUNS, TMPFS_SIZE, wall_seconds
from composer_replication.envs.workspace.task import clean
from composer_replication.errors import InputError, SandboxError, explain

Wall = Literal["bubblewrap", "namespaces", "rlimits"]
PROGRAM = Path(__file__).with_name("sandbox_server.py")
START_SECONDS = 20.0
MAX_BYTES = 4 * 2**20
VARIABLE = "CRF_SANDBOX"
"""The environment variable that names a wall for runners that were given none."""
NO_WALL = "limits alone, and code under test sees your files, processes and network"
ENDED = "The tests did not end: the process was stopped."


@dataclass(frozen=True, kw_only=True)
class TestReport:
    """What a test run printed, without times and addresses; `ended` is false where it had to be stopped."""

    __test__ = False
    text: str
    passed: int = 0
    failed: int = 0
    ended: bool = True


class TestRunner:
    """Runs tests behind a wall: bubblewrap where it is installed, else namespaces (`kind` says which stands). Root has
    namespaces first: there it becomes nobody, and in bubblewrap stays a root that no limit of processes binds.

    Limits alone (`rlimits`) hide nothing, and are taken only by that name: `kind`, or the variable `CRF_SANDBOX`.

    A run may take `seconds` of processor time, and about twice that by the clock. A runner may be shared by workspaces
    and threads, and starts again in a process that was forked from its own.
    """

    __test__ = False

    def __init__(self, *, kind: Wall | None = None, seconds: int = 4) -> None:
        if seconds < 1:
            raise InputError(explain("seconds of a run", got=seconds, expected="1 or more"))
        requested_kind = kind or os.environ.get(VARIABLE) or None
        if requested_kind is not None and requested_kind not in get_args(Wall):
            raise InputError(explain("kind of wall", got=repr(requested_kind), expected=" or ".join(get_args(Wall))))
        self._wanted = _preferred() if requested_kind is None else (cast("Wall", requested_kind),)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._server: _SandboxProcess | None = None
        _RUNNERS.add(self)

    @property
    def kind(self) -> Wall:
        """The wall that stands; starts the server where none runs yet."""
        with self._lock:
            return self._running().kind

    def run_tests(self, files: Mapping[str, str], paths: Sequence[str]) -> TestReport:
        """Every test of the files named."""
        reply = self._ask({"files": dict(files), "paths": list(paths)})
        try:
            lines = [clean(str(line)[: 2 * MAX_LINE]) for line in reply["lines"]][:MAX_LINES]
            failed, passed = int(reply["failed"]), int(reply["passed"])
        except (TypeError, KeyError, ValueError, OverflowError):
            return TestReport(text=ENDED, ended=False)
        counts = [f"{failed} failed"] * bool(failed) + [f"{passed} passed"] * bool(passed)
        text = "\n".join([*lines, ", ".join(counts) or "no tests ran"])
        return TestReport(text=text, passed=passed, failed=failed)

    def values(self, files: Mapping[str, str], expressions: Sequence[tuple[str, str]]) -> list[str]:
        """The value of each (module, expression) as canonical text; none at all where the process gave no answer."""
        reply = self._ask({"files": dict(files), "expressions": [list(expression) for expression in expressions]})
        return (
            [clean(str(value)) for value in reply] if isinstance(reply, list) and len(reply) == len(expressions) else []
        )

    def close(self) -> None:
        """Stops the server; the next run starts another."""
        with self._lock:
            self._stop()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        with self._lock:
            server = self._running()
            try:
                server.send(request)
                answer = server.receive(wall_seconds(self._seconds) + START_SECONDS)
                if answer["ends"]:  # a run left something that it cannot take out
                    self._stop()
                return answer["reply"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                self._stop()  # it died, or no longer says what a server says: never trusted again
                return None

    def _running(self) -> _SandboxProcess:
        if self._server is not None and self._server.owner != os.getpid():
            self._server = None  # a fork of the process that owns it: its pipes are not ours to use
        if self._server is None or self._server.process.poll() is not None:
            self._stop()
            self._server = _start(self._wanted, self._seconds)
        return self._server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.end()
        self._server = None


_RUNNERS = weakref.WeakSet[TestRunner]()


def _renew_locks() -> None:
    """In a forked process: a thread that held a lock is not there to give it back."""
    for runner in list(_RUNNERS):
        runner._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


@functools.cache
def shared_runner() -> TestRunner:
    """The runner of workspaces that were given none."""
    return TestRunner()


class _SandboxProcess:
    """A server process and the two pipes to it."""

    def __init__(self, kind: Wall, seconds: int) -> None:
        self.kind: Wall = kind
        self.owner = os.getpid()
        self.scratch = tempfile.mkdtemp(prefix="workspace-")
        self.process = subprocess.Popen(  # noqa: S603 (the words are ours)
            _command(kind, self.scratch, seconds),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,
        )
        self.end = weakref.finalize(self, _end, self.process, self.scratch, self.owner)

    def send(self, value: Mapping[str, Any]) -> None:
        data = json.dumps(value).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack(">I", len(data)) + data)
        self.process.stdin.flush()

    def receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        (length,) = struct.unpack(">I", self._read(4, deadline))
        if length > MAX_BYTES:
            raise ValueError(length)
        return json.loads(self._read(length, deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        parts: list[bytes] = []
        while count > 0:
            if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(self.process.stdout.fileno(), count)
            if not part:
                raise ConnectionResetError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _end(process: subprocess.Popen[bytes], scratch: str, owner: int) -> None:
    if owner != os.getpid():
        return
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(scratch, ignore_errors=True)


def _preferred() -> tuple[Wall, ...]:
    return ("bubblewrap", "namespaces") if os.geteuid() != 0 else ("namespaces", "bubblewrap")


def _start(kinds: Sequence[Wall], seconds: int) -> _SandboxProcess:
    """The first wall of the list that stands."""
    reasons: list[str] = []
    for kind in kinds:
        if kind == "bubblewrap" and shutil.which("bwrap") is None:
            reasons.append("bubblewrap: not installed")
            continue
        server = _SandboxProcess(kind, seconds)
        try:
            hello = server.receive(START_SECONDS)
        except (OSError, ValueError) as error:
            hello = {"failed": f"{type(error).__name__}: no answer"}
        if hello.get("kind") == kind:
            return server
        server.end()
        reasons.append(f"{kind}: {hello.get('failed')}")
    what, fix = "sandbox for tests", f"Install bubblewrap or allow user namespaces. {VARIABLE}=rlimits: {NO_WALL}."
    raise SandboxError(explain(what, got="; ".join(reasons), expected="a wall that stands", fix=fix))


def _command(kind: Wall, scratch: str, seconds: int) -> list[str]:
    interpreter = str(Path(sys.executable).resolve())  # an environment's own is a link to it
    python = [interpreter, "-S", "-s", "-P", "-B", str(PROGRAM), kind, scratch, str(seconds)]
    if kind != "bubblewrap":
        return python
    needed = [interpreter, sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", str(PROGRAM.parent)]
    visible_paths = {path for path in (*needed, "/usr/lib", "/usr/lib64", "/lib", "/lib64") if Path(path).exists()}
    binds = [part for path in sorted(visible_paths) for part in ("--ro-bind", path, path)]
    walls = ["--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--uid", "65534", "--clearenv"]
    memory = ["--dev", "/dev", "--size", str(TMPFS_SIZE), "--tmpfs", RUNS, "--remount-ro", "/dev", "--remount-ro", "/"]
    rest = ["--setenv", "PYTHONHASHSEED", "0", *memory, "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *walls, *binds, *rest, *python]
