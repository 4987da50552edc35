"""Processes of their own that need not import everything first: forked from one that has, and has run nothing.

`crf_command` and `python_command` are what a test or a shell runs in place of `python -m composer_replication` and
`python`; `WarmCall` is a function in such a process. Working folder, environment and the three streams are the
caller's, and the process ends as any other does. What is not tested this way is that a fresh process comes as far as
`main`: `make test-full` starts a fresh one for each command, as do the tests of imports, signals and terminals.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"
IS_WARM = os.environ.get("CRF_TEST_PROFILE") != "full" and hasattr(os, "fork")
_SHARED = "CRF_WARM_SERVERS"  # the folder of the servers that the processes of one run of pytest share
_STEPS = ("ingest", "sites", "replay", "pairs", "judge", "forget")
_LIGHT = (
    "composer_replication.cli.main",
    *(f"composer_replication.cli.{name}" for name in _STEPS),
    "httpx",
    "rich.table",
    "rich.progress",
)
_HEAVY = (
    *_LIGHT,
    "composer_replication.cli.inspect",
    "composer_replication.trainer.from_config.train_run",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "trl.trainer.grpo_trainer",
    "composer_replication.trainer.offline_trainer",
)
_WEIGHTS = {"light": _LIGHT, "heavy": _HEAVY}  # two servers: to fork one that holds torch takes 80 ms more
_LOOK_AGAIN_S = 2.0


def crf_command() -> list[str]:
    """What stands before the arguments of `crf`."""
    return _asking("crf") if IS_WARM else [sys.executable, "-m", "composer_replication"]


def python_command() -> list[str]:
    """What stands before `-c CODE` or a script and its arguments; torch and its friends are imported already."""
    return _asking("python") if IS_WARM else [sys.executable]


def _asking(program: str) -> list[str]:
    return [sys.executable, "-S", "-E", str(Path(__file__).with_name("ask_warm.py")), servers(), program]


@functools.cache
def servers() -> str:
    """The folder with the sockets of servers that end with the process that started them; they import when asked."""
    if _SHARED in os.environ:
        return os.environ[_SHARED]
    folder = tempfile.mkdtemp(prefix="crf")
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR") if name in os.environ}
    environment = {**kept, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HOME": folder, "HF_HUB_OFFLINE": "1"}
    environment["TRL_EXPERIMENTAL_SILENCE"] = "1"
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    started = [
        subprocess.Popen([sys.executable, __file__, folder, weight], env=environment, **pipes) for weight in _WEIGHTS
    ]
    atexit.register(_stop, started, folder)
    assert [server.stdout.read(1) for server in started] == [b".", b"."]  # they listen
    return folder


def share_servers() -> None:
    """Let the processes that this one starts ask its servers: one set of imports for all of them."""
    if IS_WARM:
        os.environ[_SHARED] = servers()


def shared_folder() -> Path | None:
    """Where the processes of one run of pytest leave what is made once for all of them; None for a single process."""
    return Path(os.environ[_SHARED]) if _SHARED in os.environ else None


class WarmCall:
    """`module:function` called with arguments that JSON can hold, in a process that may be killed and waited for.

    The module is looked for in the folder of this file, and in those that `beside` names.
    """

    def __init__(self, function: str, *arguments: Any, beside: Sequence[Path] = ()) -> None:
        path = os.pathsep.join(map(str, (Path(__file__).parent, *beside)))
        environment = {**os.environ, "PYTHONPATH": path}
        request = json.dumps(["call", [function, *arguments], str(Path.cwd()), environment]).encode()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(f"{servers()}/heavy")
        socket.send_fds(self._connection, [len(request).to_bytes(4)], [0, 1, 2])
        self._connection.sendall(request)
        self._answers = self._connection.makefile()
        self.pid, self._code = int(self._answers.readline()), None

    def wait(self, timeout: float) -> int | None:
        """How it ended, below 0 by a signal; None where it has not."""
        if self._code is None and select.select([self._connection], [], [], timeout)[0]:
            self._code = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self._code

    def kill(self) -> None:
        if self.wait(0) is None:
            os.kill(self.pid, signal.SIGKILL)


def _stop(started: list[subprocess.Popen[bytes]], folder: str) -> None:
    for server in started:
        server.kill()
        server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _serve(folder: str, weight: str) -> int:
    parent = os.getppid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/{weight}")
    listener.listen(16)
    listener.settimeout(_LOOK_AGAIN_S)
    os.write(1, b".")
    while os.getppid() == parent:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        size, streams, _, _ = socket.recv_fds(connection, 4, 3)
        request = connection.recv(int.from_bytes(size), socket.MSG_WAITALL)
        program, arguments, working_folder, environment = json.loads(request)
        _import_all(_WEIGHTS[weight])
        if os.fork() == 0:
            listener.close()
            _handle(connection, streams, program, arguments, working_folder, environment)
        for descriptor in (connection.detach(), *streams):
            os.close(descriptor)
    return 0


@functools.cache
def _import_all(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that no collection writes to stay shared with the processes to come


def _handle(connection, streams, program, arguments, folder, environment):
    """In a process between: it waits for the command's process and tells how that ended."""
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):  # nobody waits any more
            connection.sendall(b"%d\n" % child)
            _, status = os.waitpid(child, 0)
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    connection.close()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _end_with(_status_of({"crf": _crf, "python": _python, "call": _call}[program], arguments))


def _crf(arguments):
    from composer_replication.cli.main import main

    sys.argv = ["crf", *arguments]
    return main()


def _python(arguments):
    """`-c CODE` or `SCRIPT`, each with arguments, in a module of its own that is the main one."""
    if arguments[0] == "-c":
        name, text, beside, sys.argv = "<string>", arguments[1], "", ["-c", *arguments[2:]]
    else:
        name, text, sys.argv = arguments[0], Path(arguments[0]).read_text(encoding="utf-8"), arguments
        beside = str(Path(name).resolve().parent)
    _look_beside(beside)
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = name
    sys.modules["__main__"] = main
    exec(compile(text, name, "exec"), main.__dict__)
    return 0


def _call(arguments):
    _look_beside("")
    module, _, function = arguments[0].partition(":")
    getattr(importlib.import_module(module), function)(*arguments[1:])
    return 0


def _look_beside(folder):
    """The path begins as that of a fresh process would: not with this file's own folder."""
    asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [folder, *(path for path in asked if path and path not in sys.path[1:])]


def _status_of(program, arguments):
    try:
        return program(arguments)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _end_with(status):
    """As the interpreter ends, but for taking every module apart, which would copy all the pages that are shared."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(_serve(*sys.argv[1:]))
