"""The program of a replica on any service: `python -m composer_replication.diloco.serverless.replica_process`.

It consists of two processes. The *keeper* starts the *body*, which calls the entrypoint, and watches it. It copies the
body's output line by line, with the values of secrets masked. It ends the body and all of its descendants when the time
limit is reached, at SIGTERM (a spot machine is about to be reclaimed), or when the launcher has ended. It exits with
the body's exit status, or 128 + n for signal n. The body exits with 1 for an error, and with 78 for an error that would
recur after a restart: a missing module or function, or a refused argument, setting or artifact.

The job is JSON in CRF_DILOCO_REPLICA, and the rank is in an environment variable that the job names. Secrets are
environment variables; the job contains only their names. Command-line arguments (the name of the start and its folder)
only serve to find the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

JOB_VARIABLE = "CRF_DILOCO_REPLICA"
TIED_VARIABLE = "CRF_DILOCO_TIED"
FOLDER_VARIABLE = "CRF_DILOCO_FOLDER"
ALIVE_VARIABLE = "CRF_DILOCO_ALIVE"
SAYS_END_VARIABLE, END_MARK = "CRF_DILOCO_SAYS_END", "crf: the replica ended with status "
END_FILE, RESULT_FILE = "end.json", "result.json"
TIMED_OUT, TERM_GRACE_S = 124, 10.0
REFUSED = 78  # EX_CONFIG in sysexits.h: a restart would fail in the same way
_POLL_S = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> NoReturn:
    """Start and watch a replica, and exit with its exit status."""
    job = json.loads(os.environ[JOB_VARIABLE])
    keeper = os.getpid()
    _linux_process_control(_PR_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe()
    # It is safe to fork: only the standard library is loaded, and there is a single thread.
    body = os.fork()
    if body == 0:
        os.close(reading)
        # This lock must be held only while the keeper lives, so the body must not inherit it.
        if alive := os.environ.pop(ALIVE_VARIABLE, None):
            os.close(int(alive))
        _run_body(job, writing, keeper)
    os.close(writing)
    is_tied = os.environ.get(TIED_VARIABLE) == "1"
    with os.fdopen(reading, "rb", buffering=0) as output:
        status, reason = _Keeper(body, output, is_tied=is_tied, timeout_s=job["timeout_s"]).watch(
            secret_masks(job["secrets"], os.environ)
        )
    status = TIMED_OUT if reason == "timeout" else status
    if folder := os.environ.get(FOLDER_VARIABLE):
        _write_json(Path(folder) / END_FILE, {"status": status, "reason": reason})
    # For services that store logs, but no exit status.
    if os.environ.get(SAYS_END_VARIABLE) == "1":
        _print(f"{END_MARK}{status}\n")
    os._exit(128 - status if status < 0 else status)


# ---- the body


def _run_body(job: Mapping[str, Any], output: int, keeper: int) -> NoReturn:
    """Call the entrypoint, and exit. An exception is printed as a traceback and leads to exit status 1 or 78."""
    status = 1
    try:
        # Its own process group, so that the whole group can be ended.
        os.setsid()
        _linux_process_control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The keeper died before the previous line.
        if os.getppid() != keeper:
            os._exit(1)
        with Path(os.devnull).open("rb") as null_device:
            os.dup2(null_device.fileno(), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # So that the output of Python child processes is not lost if they are killed.
        os.environ.setdefault("PYTHONUNBUFFERED", "1")
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, "utf-8", "backslashreplace") for descriptor in (1, 2))
        _write_result(_call(job))
        status = 0
    except SystemExit as end:
        status = _exit_status(end.code)
    except BaseException as error:
        # This is the outermost frame of a replica, so the error can only be reported in the log.
        status = REFUSED if _would_recur(error) else 1
        traceback.print_exc()
    with contextlib.suppress(OSError):  # the reader has ended
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _call(job: Mapping[str, Any]) -> Any:
    sys.path[:0] = [entry for entry in job["path"] if entry not in sys.path]
    return _find_entrypoint(job["entrypoint"])(**job["args"])


def _would_recur(error: BaseException) -> bool:
    """Return whether the same error would occur again after a restart."""
    # The module is loaded if the error is of one of its classes.
    from composer_replication import errors

    # The package is installed, but fails to import.
    if isinstance(error, errors.MissingExtraError) and error.__cause__ is not None:
        return _would_recur(error.__cause__)
    if isinstance(error, ImportError) and not isinstance(error, ModuleNotFoundError | errors.MissingExtraError):
        # Other import errors may be caused by a library that only this machine lacks.
        return str(error).startswith("cannot import name")
    recurring_errors = (
        errors.InputError | errors.UnsupportedModelError | errors.ArtefactNotFoundError | errors.StaleArtefactError
    )
    return isinstance(error, ImportError | recurring_errors)


def _find_entrypoint(name: str) -> Callable[..., Any]:
    """Return the entrypoint function with this name: `module.function`, a module that has a function `main`, or
    `file.py::function` for a script.
    """
    if "::" in name:
        import runpy

        file, _, function = name.partition("::")
        return runpy.run_path(file, run_name="__mp_main__")[function]
    module, _, function = name.rpartition(".")
    try:
        home, function = importlib.import_module(name), "main"
    except ModuleNotFoundError as error:
        if not module or error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        home = importlib.import_module(module)
    if not hasattr(home, function):
        raise ImportError(f"cannot import name {function!r} from {home.__name__!r}")
    return getattr(home, function)


def _write_result(value: Any) -> None:
    """Write the result as JSON, for a launcher on the same machine."""
    if not (folder := os.environ.get(FOLDER_VARIABLE)):
        return
    try:
        _write_json(Path(folder) / RESULT_FILE, {"result": value})
    except (TypeError, ValueError) as error:
        print(
            f"the return value of the entrypoint ({type(value).__name__}) is dropped, because it is not JSON: {error}",
            file=sys.stderr,
        )


def _write_json(path: Path, value: object) -> None:
    # Renamed once it is complete, so that no reader sees a partial file.
    whole = path.with_suffix(".tmp")
    whole.write_text(json.dumps(value), encoding="utf-8")
    whole.replace(path)


def _exit_status(code: object) -> int:
    """Return the exit status of a Python process that raises SystemExit with this code."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF or (1 if code else 0)
    print(code, file=sys.stderr)
    return 1


# ---- the keeper


class _Keeper:
    """Watches the body until it and all of its descendants have ended."""

    def __init__(self, body: int, output: BinaryIO, *, is_tied: bool, timeout_s: float | None) -> None:
        self._body, self._output, self._is_tied = body, output, is_tied
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._reason: str | None = None
        self._kill_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def watch(self, masks: Mapping[str, str]) -> tuple[int, str | None]:
        """Watch the body until it and its descendants have ended. Returns its exit status (negative for a signal),
        and the reason why the keeper ended it, or None.
        """
        lines, status = _MaskedLines(masks), None
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            if self._is_tied:
                selector.register(0, selectors.EVENT_READ)
            while status is None:
                for key, _ in selector.select(timeout=_POLL_S):
                    if key.fileobj == 0 and not os.read(0, 4096):
                        selector.unregister(0)
                        self._end("launcher gone")
                    elif key.fileobj is self._output and not self._copy(lines):
                        selector.unregister(self._output)
                status = self._enforce_deadline_and_poll()
        _end_all(self._body)
        os.set_blocking(self._output.fileno(), False)
        while self._copy(lines):
            pass
        _print(lines.rest())
        return status, self._reason

    def _copy(self, lines: _MaskedLines) -> bool:
        """Copy the output of the body that is available now. Returns False if there is none."""
        data = self._output.read(65_536)
        _print(lines.take(data or b""))
        return bool(data)

    def _enforce_deadline_and_poll(self) -> int | None:
        """Return the exit status of the body, or None if it is still running. If its time limit is reached, begin to
        end it.
        """
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            self._end("timeout")
        if self._kill_at is not None and now > self._kill_at:
            _signal_group(self._body, signal.SIGKILL)
        pid, status = os.waitpid(self._body, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._end(signal.Signals(number).name)

    def _end(self, reason: str) -> None:
        """Send SIGTERM to the body, so that it can save its state, and set the time at which it will be killed."""
        if self._reason is None:
            self._reason = reason
            self._kill_at = time.monotonic() + TERM_GRACE_S
            _signal_group(self._body, signal.SIGTERM)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _end_all(body: int) -> None:
    """Kill the remaining processes in the body's process group and, on Linux, all other descendants, which become
    children of this process (a subreaper) when their parents exit.
    """
    # The children of a killed child become ours, so this is repeated until there are none.
    _signal_group(body, signal.SIGKILL)
    while children := list(_children()):
        for child in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _children() -> Iterator[int]:
    for path in Path("/proc/self/task").glob("*/children"):
        yield from map(int, path.read_text(encoding="ascii").split())


def _linux_process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _print(text: str) -> None:
    # The log has no reader any more, but the body continues.
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()


# Masking secrets in logs. The keeper uses this before it forks, so it only imports the standard library.

MAX_LINE_BYTES, MAX_LINE_CHARACTERS = 65_536, 8_000
_SHORTEST_SECRET = 4


class _MaskedLines:
    """Splits a stream of bytes into lines, masks secrets, cuts very long lines, and replaces invalid UTF-8."""

    def __init__(self, masks: Mapping[str, str]) -> None:
        self._masks, self._waiting, self._is_cut = masks, b"", False

    def take(self, data: bytes) -> str:
        """Add bytes to the stream, and return the lines that are now complete."""
        # "\r" also ends a line, because progress bars use it to update their line.
        *whole, self._waiting = re.split(rb"[\r\n]", self._waiting + data)
        text = "".join(self._shown(line) for line in whole)
        if len(self._waiting) > MAX_LINE_BYTES:
            text += self._shown(self._waiting)
            self._waiting, self._is_cut = b"", True
        return text

    def rest(self) -> str:
        """Return the last line if it is incomplete, and "" otherwise."""
        return self.take(b"\n") if self._waiting else ""

    def _shown(self, line: bytes) -> str:
        # The rest of a line whose beginning was printed already.
        if self._is_cut:
            self._is_cut = False
            return ""
        text = masked(line.decode("utf-8", "replace"), self._masks)
        if len(text) > MAX_LINE_CHARACTERS:
            text = f"{text[:MAX_LINE_CHARACTERS]} [cut: a line of {MAX_LINE_CHARACTERS:,} characters or more]"
        return text + "\n"


def masked(text: str, masks: Mapping[str, str]) -> str:
    """Return the text with the value of each secret replaced by `[NAME]`."""
    for value, name in masks.items():
        text = text.replace(value, f"[{name}]")
    return text


def secret_masks(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping from secret values to secret names, longest values first, because one value may contain another.

    Logs are masked line by line, so each line of a multi-line value is masked separately. Values of fewer than four
    characters are not masked, because they would match too much.
    """
    values = {line: name for name in names for line in environment.get(name, "").splitlines()}
    return {value: values[value] for value in sorted(values, key=len, reverse=True) if len(value) >= _SHORTEST_SECRET}


if __name__ == "__main__":
    main()
