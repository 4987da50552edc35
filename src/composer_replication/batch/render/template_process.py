"""Renders chat templates in a process of their own, which the system stops at limits of memory and time.

A template is a stranger's program. Jinja's sandbox keeps it from files and from Python, not from `'a' * 10**10`, and a
list of the operators, filters, methods and loops to watch would never be complete: a limit of the process is.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from composer_replication.batch.render import template_server as server
from composer_replication.errors import SandboxError, explain

ENDED = b"E"
_PROGRAM = Path(server.__file__)
# Loading transformers takes a second; a busy machine, or one that swaps, may take far longer for anything.
_WALL_SECONDS, _WALL_PER_SECOND = 120.0, 20.0
# What Python needs to start and a date to be written; above all no keys and tokens.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR", "TZ")


class TemplateProcess:
    """One process that renders for all threads; it starts when it is first needed, and again after it was stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_in_fork)

    def render(self, common: bytes, messages: bytes, seconds: float) -> tuple[bytes, str, float]:
        """Return the kind of the answer, its text, and the processor seconds it took, which are at most `seconds`.

        `common` and `messages` are JSON. The kind is ENDED where the process ended, or was ended, without an answer.
        """
        with self._lock:
            process, is_answered = self._running(), False
            try:
                answer = self._ask(process, common, messages, seconds)
                is_answered = answer[0] != server.TOO_LARGE  # whose memory may not all come back
                return answer
            except (OSError, EOFError):
                return ENDED, "", seconds
            finally:
                if not is_answered:  # also after Ctrl-C: the next answer would be that of this request
                    self._stop()

    def _ask(
        self, process: subprocess.Popen[bytes], common: bytes, messages: bytes, seconds: float
    ) -> tuple[bytes, str, float]:
        assert process.stdin is not None
        deadline = time.monotonic() + _WALL_SECONDS + _WALL_PER_SECOND * seconds
        process.stdin.write(server.REQUEST.pack(len(common), len(messages), seconds) + common + messages)
        process.stdin.flush()
        kind, length, used = server.ANSWER.unpack(_read(process, server.ANSWER.size, deadline))
        return kind, _read(process, length, deadline).decode("utf-8", "surrogatepass"), used

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start()
        return self._process

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        with self._lock:
            self._stop()

    def _begin_in_fork(self) -> None:
        """Let the process be that of the one that was forked: it has its own use for those pipes."""
        self._lock = threading.Lock()  # a thread that held it is not there to give it back
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self._process = None

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            self._process.wait()
        self._process = None


def _start() -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(  # noqa: S603 (the words are ours)
            [sys.executable, "-P", "-B", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        got = f"no process of its own for chat templates ({error})"
        raise SandboxError(explain("rendering", got=got, expected="one", fix="Look at `ulimit -u`.")) from error


def _read(process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
    assert process.stdout is not None
    descriptor, parts = process.stdout.fileno(), list[bytes]()
    while count > 0:
        if not _is_readable(descriptor, deadline - time.monotonic()):
            raise TimeoutError
        part = os.read(descriptor, min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _is_readable(descriptor: int, seconds: float) -> bool:
    """Wait for something to read; where a pipe cannot be waited for (Windows), reading it waits."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


PROCESS = TemplateProcess()
