"""The program that a replica is, wherever it runs: `python -m composer_replication.diloco.serverless.replica_process`.

Two processes. The *keeper* starts the *body*, which calls the entrypoint, and does no more than watch it: it copies
what the body prints, a line at a time, with the values of named secrets masked; it ends the body and all processes that
came of it when the time is up, at SIGTERM (a spot machine is about to go) or when whoever launched it is gone; and
it ends with the body's own exit status, 128 + n for signal n. The body ends with 1 for an error, and with 78 for one
that another start would only repeat: a module or function that is missing; an argument, setting or artefact refused.

The job is JSON in CRF_DILOCO_REPLICA, the rank in the variable that the job names; secrets are variables, of which the
job holds the names. Nothing of it stands in a command line: arguments, where there are any, are the name of the start
and its folder, which nobody reads but whoever looks for the process.
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
REFUSED = 78  # EX_CONFIG of sysexits.h: what was asked cannot be done, however often it is tried
_POLL_S = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> NoReturn:
    """Keep one replica, and end as it ended."""
    job = json.loads(os.environ[JOB_VARIABLE])
    keeper = os.getpid()
    _linux_process_control(_PR_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe()
    body = os.fork()  # nothing but the standard library is loaded so far, and there is one thread
    if body == 0:
        os.close(reading)
        if alive := os.environ.pop(ALIVE_VARIABLE, None):  # a lock that is held as long as the keeper lives
            os.close(int(alive))
        _be_the_body(job, writing, keeper)
    os.close(writing)
    is_tied = os.environ.get(TIED_VARIABLE) == "1"
    with os.fdopen(reading, "rb", buffering=0) as output:
        status, reason = _Keeper(body, output, is_tied=is_tied, timeout_s=job["timeout_s"]).watch(
            secret_masks(job["secrets"], os.environ)
        )
    status = TIMED_OUT if reason == "timeout" else status
    if folder := os.environ.get(FOLDER_VARIABLE):
        _write_json(Path(folder) / END_FILE, {"status": status, "reason": reason})
    if os.environ.get(SAYS_END_VARIABLE) == "1":  # where a service keeps logs, and no exit status
        _say(f"{END_MARK}{status}\n")
    os._exit(128 - status if status < 0 else status)


# ---- the body


def _be_the_body(job: Mapping[str, Any], output: int, keeper: int) -> NoReturn:
    """Call the entrypoint; whatever it raises is a traceback and status 1, or 78."""
    status = 1
    try:
        os.setsid()  # a group that is ended as one
        _linux_process_control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died before we asked to be told
            os._exit(1)
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.setdefault("PYTHONUNBUFFERED", "1")  # of processes that it starts: who is killed has said it by then
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, "utf-8", "backslashreplace") for descriptor in (1, 2))
        _hand_back(_call(job))
        status = 0
    except SystemExit as end:
        status = _status_of(end.code)
    except BaseException as error:  # the boundary of a replica: its log is where this is told
        status = REFUSED if _cannot_get_better(error) else 1
        traceback.print_exc()
    with contextlib.suppress(OSError):  # whoever read it is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _call(job: Mapping[str, Any]) -> Any:
    sys.path[:0] = [entry for entry in job["path"] if entry not in sys.path]
    return _find_entrypoint(job["entrypoint"])(**job["args"])


def _cannot_get_better(error: BaseException) -> bool:
    from composer_replication import errors  # loaded by now, if it is one of them

    if isinstance(error, errors.MissingExtraError) and error.__cause__ is not None:  # there, and does not load
        return _cannot_get_better(error.__cause__)
    if isinstance(error, ImportError) and not isinstance(error, ModuleNotFoundError | errors.MissingExtraError):
        return str(error).startswith("cannot import name")  # not a library that this one machine lacks
    unfit = errors.InputError | errors.UnsupportedModelError | errors.ArtefactNotFoundError | errors.StaleArtefactError
    return isinstance(error, ImportError | unfit)


def _find_entrypoint(name: str) -> Callable[..., Any]:
    """The function of `module.function`, or the `main` of a module; `file.py::function` for a script's own."""
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


def _hand_back(value: Any) -> None:
    """The value as JSON, for whoever launched a process on its own machine."""
    if not (folder := os.environ.get(FOLDER_VARIABLE)):
        return
    try:
        _write_json(Path(folder) / RESULT_FILE, {"result": value})
    except (TypeError, ValueError) as error:
        print(f"the entrypoint's value ({type(value).__name__}) is not handed back: {error}", file=sys.stderr)


def _write_json(path: Path, value: object) -> None:
    whole = path.with_suffix(".tmp")
    whole.write_text(json.dumps(value), encoding="utf-8")
    whole.replace(path)


def _status_of(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF or (1 if code else 0)
    print(code, file=sys.stderr)
    return 1


# ---- the keeper


class _Keeper:
    """Watches a body until it and everything that came of it has ended."""

    def __init__(self, body: int, output: BinaryIO, *, is_tied: bool, timeout_s: float | None) -> None:
        self._body, self._output, self._is_tied = body, output, is_tied
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._reason: str | None = None
        self._kill_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def watch(self, masks: Mapping[str, str]) -> tuple[int, str | None]:
        """The body's status, negative for a signal, and why it was ended if it was."""
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
                status = self._ended()
        _end_all(self._body)
        os.set_blocking(self._output.fileno(), False)
        while self._copy(lines):
            pass
        _say(lines.rest())
        return status, self._reason

    def _copy(self, lines: _MaskedLines) -> bool:
        """Pass on what there is; False when nothing more will come, or nothing is there."""
        data = self._output.read(65_536)
        _say(lines.take(data or b""))
        return bool(data)

    def _ended(self) -> int | None:
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
        """Ask the body to end, which may want to save what it has; a while later, end it."""
        if self._reason is None:
            self._reason = reason
            self._kill_at = time.monotonic() + TERM_GRACE_S
            _signal_group(self._body, signal.SIGTERM)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _end_all(body: int) -> None:
    """Whatever is left of the body's group; on Linux also those that left it, which are our children by now."""
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


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more: the body goes on
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()


# A replica's log without its secrets: lines as they are passed on, with the values of named variables masked.
#
# The keeper of a replica loads this before it forks, so it needs the standard library alone.

MOST_LINE_BYTES, MOST_LINE_CHARACTERS = 65_536, 8_000
_SHORTEST_SECRET = 4


class _MaskedLines:
    """Bytes in, whole lines out: secrets masked, endless lines cut, what is no UTF-8 replaced."""

    def __init__(self, masks: Mapping[str, str]) -> None:
        self._masks, self._waiting, self._is_cut = masks, b"", False

    def take(self, data: bytes) -> str:
        *whole, self._waiting = re.split(rb"[\r\n]", self._waiting + data)
        text = "".join(self._shown(line) for line in whole)
        if len(self._waiting) > MOST_LINE_BYTES:
            text += self._shown(self._waiting)
            self._waiting, self._is_cut = b"", True
        return text

    def rest(self) -> str:
        return self.take(b"\n") if self._waiting else ""

    def _shown(self, line: bytes) -> str:
        if self._is_cut:  # the rest of a line whose beginning was shown
            self._is_cut = False
            return ""
        text = masked(line.decode("utf-8", "replace"), self._masks)
        if len(text) > MOST_LINE_CHARACTERS:
            text = f"{text[:MOST_LINE_CHARACTERS]} [cut: a line of {MOST_LINE_CHARACTERS:,} characters or more]"
        return text + "\n"


def masked(text: str, masks: Mapping[str, str]) -> str:
    """The text with `[NAME]` where the value of a secret stood."""
    for value, name in masks.items():
        text = text.replace(value, f"[{name}]")
    return text


def secret_masks(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Names by value, long values first: one may stand in another. A value of a few letters would mask half a log.

    Logs are masked a line at a time, so a key of several lines is masked by its lines.
    """
    values = {line: name for name in names for line in environment.get(name, "").splitlines()}
    return {value: values[value] for value in sorted(values, key=len, reverse=True) if len(value) >= _SHORTEST_SECRET}


if __name__ == "__main__":
    main()
