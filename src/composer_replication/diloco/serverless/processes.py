"""Whether a process of this machine is the one that was started: process ids are given out again.

The proof is when it began, as the kernel says, and a name among its arguments. A signal goes to the process that gave
that proof, and to none that took its number in between, where the platform can say so (Linux).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_BOOT = _PROC / "sys" / "kernel" / "random" / "boot_id"
_START_FIELD = 19  # of those behind the name in parentheses: the 22nd of /proc/PID/stat
_EXEC_LOOKS, _EXEC_PAUSE_S = 50, 0.001  # 3 of 400 processes looked up right after their start showed no arguments yet


class Process(NamedTuple):
    """One process: its number, its parent's, when it began, and what it was started with."""

    pid: int
    parent: int
    began: str
    arguments: tuple[str, ...]

    def is_still(self, other: Process | None) -> bool:
        """Whether that is this process; its parent may have gone meanwhile."""
        return other is not None and (other.began, other.arguments) == (self.began, self.arguments)


def look_up(pid: int) -> Process | None:
    """The process that has this number now; None where there is none, or it is not ours to see."""
    if pid <= 0:
        return None
    return _from_proc(pid) if sys.platform == "linux" else _from_ps(pid)


def with_argument(argument: str) -> list[Process]:
    """The processes of this machine that were started with this argument, without those that they forked."""
    everything = (look_up(pid) for pid in _all_pids())
    matching = {process.pid: process for process in everything if process is not None and argument in process.arguments}
    return [process for process in matching.values() if process.parent not in matching]


def send_signal(process: Process, number: int) -> bool:
    """Signal this very process; False, and nothing is sent, where another or none has its number."""
    if not hasattr(os, "pidfd_open"):
        if not process.is_still(look_up(process.pid)):
            return False
        os.kill(process.pid, number)
        return True
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not process.is_still(
            look_up(process.pid)
        ):  # looked at after it was opened: a later owner of the number is not meant
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _from_proc(pid: int) -> Process | None:
    try:
        arguments = _arguments(_PROC / str(pid))
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        boot = _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":  # it has ended, and nobody has asked how
        return None
    return Process(pid, int(fields[1]), f"{boot} {fields[_START_FIELD]}", arguments)


def _arguments(folder: Path) -> tuple[str, ...]:
    """What it was started with; in the midst of exec the kernel shows a program without any, so one looks again."""
    for _ in range(_EXEC_LOOKS):
        arguments = (folder / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        if arguments or not _is_program(folder):
            return tuple(arguments)
        time.sleep(_EXEC_PAUSE_S)
    return ()


def _is_program(folder: Path) -> bool:
    """Whether a file is run there: threads of the kernel, and what has ended, have none and never have arguments."""
    try:
        return bool((folder / "exe").readlink().parts)
    except OSError:
        return False


def _from_ps(pid: int) -> Process | None:
    """By what POSIX has everywhere; arguments with spaces come apart, so names that are looked for have none."""
    words = _ps("-o", "stat=", "-o", "ppid=", "-o", "lstart=", "-o", "command=", "-ww", "-p", str(pid)).split()
    if len(words) < 8 or words[0].startswith("Z"):
        return None
    return Process(pid, int(words[1]), " ".join(words[2:7]), tuple(words[7:]))


def _all_pids() -> list[int]:
    if sys.platform == "linux":
        return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    return [int(pid) for pid in _ps("-ax", "-o", "pid=").split()]


def _ps(*arguments: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(  # noqa: S603 (no shell, and numbers alone)
        ["ps", *arguments],  # noqa: S607 (where it lies differs)
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=30,
    ).stdout
