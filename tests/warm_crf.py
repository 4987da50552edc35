"""`crf` in a process of its own that need not import everything first: forked from one that has.

A test asks `warm_crf(...)`; a shell runs this file with the address in `WARM_CRF`. Working folder, environment and the
three streams are the caller's, and the process ends as any other does. What is not tested this way is that a fresh
process comes as far as `main`: `make test-full` starts a fresh one for each command, as do the tests of imports,
signals and terminals.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
IS_WARM = os.environ.get("CRF_TEST_PROFILE") != "full" and hasattr(os, "fork")
_HEAVY_VERBS = ("inspect", "train")
_STEPS = ("ingest", "sites", "judge", "replay", "pairs", "export", "forget")
_LIGHT = ("composer_replication.cli.main", *(f"composer_replication.steps.{name}" for name in _STEPS))
_HEAVY = tuple(f"composer_replication.steps.{name}" for name in _HEAVY_VERBS)
_HEAVY += ("transformers.models.auto.modeling_auto",)
_LOOK_AGAIN_S = 2.0


def warm_crf(arguments, *, cwd, env, given="", timeout=240):
    """As `subprocess.run` of `python -m composer_replication`, with its output as text."""
    command = [sys.executable, "-S", "-E", __file__, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**env, "WARM_CRF": server_address()},
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@functools.cache
def server_address():
    """The socket of this process's own server, which ends with it."""
    folder = tempfile.mkdtemp(prefix="crf")
    address = f"{folder}/s"
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR") if name in os.environ}
    environment = {**kept, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HOME": folder}
    command = [sys.executable, __file__, "--serve", address]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.read(1) == b"."  # it listens
    atexit.register(_stop, server, folder)
    return address


def _stop(server, folder):
    server.kill()
    server.wait()
    with contextlib.suppress(OSError):
        Path(folder, "s").unlink()
        Path(folder).rmdir()


def _ask(address, arguments):
    """Hand over what this process was started with; the status with which the command ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        environment = {name: value for name, value in os.environ.items() if name != "WARM_CRF"}
        request = json.dumps([arguments, str(Path.cwd()), environment]).encode()
        socket.send_fds(connection, [len(request).to_bytes(4)], [0, 1, 2])
        connection.sendall(request)
        return int(connection.recv(16) or b"70")


def _serve(address):
    parent = os.getppid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    listener.settimeout(_LOOK_AGAIN_S)
    os.write(1, b".")
    while os.getppid() == parent:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        size, streams, _, _ = socket.recv_fds(connection, 4, 3)
        request = connection.recv(int.from_bytes(size), socket.MSG_WAITALL)
        arguments, folder, environment = json.loads(request)
        _import_for("heavy" if arguments[:1] and arguments[0] in _HEAVY_VERBS else "light")
        if os.fork() == 0:
            listener.close()
            _handle(connection, streams, arguments, folder, environment)
        for descriptor in (connection.detach(), *streams):
            os.close(descriptor)
    return 0


@functools.cache
def _import_for(weight):
    for name in _LIGHT if weight == "light" else (*_LIGHT, *_HEAVY):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that no collection writes to stay shared with the processes to come


def _handle(connection, streams, arguments, folder, environment):
    """In a process between: it waits for the command's process and tells how that ended."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
        os._exit(0)
    connection.close()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["crf", *arguments]
    _end_with(_status_of_main())


def _status_of_main():
    from composer_replication.cli.main import main

    try:
        return main()
    except SystemExit as end:
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
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(_serve(sys.argv[2]))
    sys.exit(_ask(os.environ["WARM_CRF"], sys.argv[1:]))
