"""Run tests in a process that is isolated from files, the network and other processes.

A runner starts one isolated server process (`sandbox_server.py`). This process forks for every test run, which takes a
few milliseconds.
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

Isolation = Literal["bubblewrap", "namespaces", "rlimits"]
"""The kind of isolation; `rlimits` only limits resources and hides nothing."""
PROGRAM = Path(__file__).with_name("sandbox_server.py")
START_SECONDS = 20.0
MAX_BYTES = 4 * 2**20
ENV_VARIABLE = "CRF_SANDBOX"
"""The environment variable that sets the isolation of runners created without a `kind`."""
LIMITS_ONLY = "only resource limits apply; code under test can access your files, processes and network"
ENDED = "The tests did not end: the process was stopped."


@dataclass(frozen=True, kw_only=True)
class TestReport:
    """The output of a test run, without times and addresses. `ended` is False if the run had to be stopped."""

    __test__ = False
    text: str
    passed: int = 0
    failed: int = 0
    ended: bool = True


class TestRunner:
    """Runs tests in an isolated process, which it starts when it is first needed.

    Args:
        kind: The isolation method. By default, it is the value of the environment variable `CRF_SANDBOX`; if that is
            unset, bubblewrap if it is installed, else namespaces (root tries namespaces first). `rlimits` hides
            nothing and is used only if chosen explicitly.
        seconds: CPU time limit of a run. In wall-clock time, a run may take about twice as long.

    A runner may be shared by workspaces and threads. After a fork, the child process starts a new server. Raises
    InputError for an unknown kind; the first run raises SandboxError if no isolation is available.
    """

    __test__ = False

    def __init__(self, *, kind: Isolation | None = None, seconds: int = 4) -> None:
        if seconds < 1:
            raise InputError(explain("seconds", got=seconds, expected="1 or more"))
        requested_kind = kind or os.environ.get(ENV_VARIABLE) or None
        if requested_kind is not None and requested_kind not in get_args(Isolation):
            raise InputError(
                explain("kind of sandbox", got=repr(requested_kind), expected=" or ".join(get_args(Isolation)))
            )
        self._kinds = _default_kinds() if requested_kind is None else (cast("Isolation", requested_kind),)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._server: _SandboxProcess | None = None
        _RUNNERS.add(self)

    @property
    def kind(self) -> Isolation:
        """The isolation method in use. Reading this property starts the server if none is running."""
        with self._lock:
            return self._running().kind

    def run_tests(self, files: Mapping[str, str], paths: Sequence[str]) -> TestReport:
        """Run all tests of the files at `paths` and return the report."""
        reply = self._ask({"files": dict(files), "paths": list(paths)})
        # The code under test runs in the process that answers, so an answer may have any form.
        try:
            lines = [clean(str(line)[: 2 * MAX_LINE]) for line in reply["lines"]][:MAX_LINES]
            failed, passed = int(reply["failed"]), int(reply["passed"])
        except (TypeError, KeyError, ValueError, OverflowError):
            return TestReport(text=ENDED, ended=False)
        counts = [f"{failed} failed"] * bool(failed) + [f"{passed} passed"] * bool(passed)
        text = "\n".join([*lines, ", ".join(counts) or "no tests ran"])
        return TestReport(text=text, passed=passed, failed=failed)

    def values(self, files: Mapping[str, str], expressions: Sequence[tuple[str, str]]) -> list[str]:
        """Return the value of each (module, expression) as canonical text, or an empty list if the process gave no
        answer.
        """
        reply = self._ask({"files": dict(files), "expressions": [list(expression) for expression in expressions]})
        return (
            [clean(str(value)) for value in reply] if isinstance(reply, list) and len(reply) == len(expressions) else []
        )

    def close(self) -> None:
        """Stop the server. The next run starts a new one."""
        with self._lock:
            self._stop()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        with self._lock:
            server = self._running()
            try:
                server.send(request)
                answer = server.receive(wall_seconds(self._seconds) + START_SECONDS)
                if answer["ends"]:  # the server ends itself when it cannot remove what a run has written
                    self._stop()
                return answer["reply"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                self._stop()  # it died or broke the protocol, perhaps because of the code under test
                return None

    def _running(self) -> _SandboxProcess:
        if self._server is not None and self._server.owner != os.getpid():
            self._server = None  # this process is a fork, and the server's pipes belong to its parent
        if self._server is None or self._server.process.poll() is not None:
            self._stop()
            self._server = _start_server(self._kinds, self._seconds)
        return self._server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.end()
        self._server = None


# All runners of the process, for `_renew_locks`. References are weak, so that unused runners are closed.
_RUNNERS = weakref.WeakSet[TestRunner]()


def _renew_locks() -> None:
    """Replace the locks of all runners in a forked process.

    A lock that was held during the fork would never be released, because the thread that holds it does not exist in the
    child.
    """
    for runner in list(_RUNNERS):
        runner._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


@functools.cache
def shared_runner() -> TestRunner:
    """Return the runner shared by all workspaces that are created without a runner of their own."""
    return TestRunner()


class _SandboxProcess:
    """A server process and the pipes to it. Each message is JSON, preceded by its length in four bytes."""

    def __init__(self, kind: Isolation, seconds: int) -> None:
        self.kind: Isolation = kind
        self.owner = os.getpid()
        self.scratch = tempfile.mkdtemp(prefix="workspace-")
        self.process = subprocess.Popen(  # noqa: S603 (no part of the command comes from outside)
            _command(kind, self.scratch, seconds),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},  # no secrets, and the same order of sets in every run
            cwd="/",
            start_new_session=True,
        )
        # Runs once: when called, when the object is collected, or when the interpreter exits.
        self.end = weakref.finalize(self, _end_server, self.process, self.scratch, self.owner)

    def send(self, value: Mapping[str, Any]) -> None:
        data = json.dumps(value).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack(">I", len(data)) + data)
        self.process.stdin.flush()

    def receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        (length,) = struct.unpack(">I", self._read(4, deadline))
        # The length must not be trusted: it comes from a process that runs code of a model.
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


def _end_server(process: subprocess.Popen[bytes], scratch: str, owner: int) -> None:
    if owner != os.getpid():
        return  # a forked process must not kill its parent's server
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(scratch, ignore_errors=True)


def _default_kinds() -> tuple[Isolation, ...]:
    # Root prefers namespaces, in which the tests run as nobody. In bubblewrap they would run as root, which is exempt
    # from the limit on the number of processes.
    return ("bubblewrap", "namespaces") if os.geteuid() != 0 else ("namespaces", "bubblewrap")


def _start_server(kinds: Sequence[Isolation], seconds: int) -> _SandboxProcess:
    """Return a server with the first isolation method that works here.

    Raises SandboxError with the reasons if no method works.
    """
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
    fix = f"Install bubblewrap or allow user namespaces. Or set {ENV_VARIABLE}=rlimits: then {LIMITS_ONLY}."
    raise SandboxError(explain("sandbox for tests", got="; ".join(reasons), expected="a sandbox that starts", fix=fix))


def _command(kind: Isolation, scratch: str, seconds: int) -> list[str]:
    # The interpreter of a virtual environment is a link, and the sandbox does not contain its folder.
    interpreter = str(Path(sys.executable).resolve())
    python = [interpreter, "-S", "-s", "-P", "-B", str(PROGRAM), kind, scratch, str(seconds)]
    if kind != "bubblewrap":
        return python
    # The standard library and the shared libraries that the interpreter loads; nothing else of the file system.
    needed = [interpreter, sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", str(PROGRAM.parent)]
    visible_paths = {path for path in (*needed, "/usr/lib", "/usr/lib64", "/lib", "/lib64") if Path(path).exists()}
    binds = [part for path in sorted(visible_paths) for part in ("--ro-bind", path, path)]
    flags = ["--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--uid", "65534", "--clearenv"]
    memory = ["--dev", "/dev", "--size", str(TMPFS_SIZE), "--tmpfs", RUNS, "--remount-ro", "/dev", "--remount-ro", "/"]
    rest = ["--setenv", "PYTHONHASHSEED", "0", *memory, "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *flags, *binds, *rest, *python]
