"""Which processes that reserved money, or hold a run, are still alive: each has a small file beside the store.

The file says who it is, and the process holds its lock as long as it lives: the lock goes with the process, however
that ends, and does not come back with another one of the same number. Where a file system has no locks, the number and
the start of the process decide; of another machine nobody can know then, and its processes count as alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer_replication.atomic import is_lock_free, try_lock
from composer_replication.errors import explain

# A file that says nothing yet, and is this young, is of a process that is just starting.
_STARTING_S = 5.0
_ATTEMPTS = 20


class Holder(NamedTuple):
    """Who it is, for a person to find."""

    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} since {since}"


class Owner:
    """This process's lock file beside a store; it goes away with `close`, and its lock with the process."""

    def __init__(self, store: Path) -> None:
        self.holder = Holder(os.getpid(), socket.gethostname(), time.time())
        for _ in range(_ATTEMPTS):
            self.name = f"{os.getpid()}-{secrets.token_hex(6)}"
            self._path = lock_path(store, self.name)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            if self._has_settled():
                return
            os.close(self._descriptor)
        raise OSError(f"{self._path}: the lock file of this process was removed {_ATTEMPTS} times")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _has_settled(self) -> bool:
        """Whether the file is locked, written and still ours: another process may have taken it for a dead one's."""
        if not try_lock(self._descriptor):
            return False
        record = self.holder._asdict() | {"start": _start_of(os.getpid()), "is_locked": self._is_really_locked()}
        os.write(self._descriptor, json.dumps(record).encode())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        here = os.fstat(self._descriptor)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def _is_really_locked(self) -> bool:
        """Where there are no locks, everybody gets them."""
        try:
            again = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(again)
        finally:
            os.close(again)


def is_alive(store: Path, name: str) -> bool:
    """Whether the process of this name lives; the lock file of one that does not is removed, where it may be."""
    path = lock_path(store, name)
    try:
        descriptor = os.open(path, os.O_RDONLY)  # another user's can be looked into, too
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        if not is_lock_free(descriptor) or _lives_without_lock(descriptor):
            return True
        with contextlib.suppress(PermissionError):
            path.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)


def dead_owners(store: Path | None, names: Sequence[str], own: str = "") -> Iterator[str]:
    """Of these, the processes that are gone. Lock files of all that are gone are removed."""
    if store is None:
        return
    lock_names = {path.name[len(store.name) + 1 : -len(".lock")] for path in store.parent.glob(f"{store.name}.*.lock")}
    for name in sorted({*names, *lock_names} - {own}):
        if not is_alive(store, name):
            yield name


def holder_of(store: Path, name: str) -> Holder | None:
    """What the lock file of a process says about it."""
    try:
        record = _read(lock_path(store, name).read_bytes())
        return Holder(record["pid"], record["host"], record["since"])
    except (OSError, KeyError):
        return None


def said_of_holder(path: Path, what: str, owner: str, holder: Holder) -> str:
    """What a second process is told."""
    is_here = holder.host == socket.gethostname()
    where = "" if is_here else f" on {holder.host}"
    fix = (
        f"Wait for it, or stop it (`kill {holder.pid}`{where}) and run the same command again: answers so far are "
        "kept, and none is paid for twice."
    )
    if not is_here:
        fix += f" If that machine is gone, remove {path.name}.{owner}.lock beside the store."
    return explain(str(path), got=f"{what} by {holder}", expected="one at a time", fix=fix)


def _lives_without_lock(descriptor: int) -> bool:
    """For a lock that we got: there may be none on this file system, and the process may live all the same."""
    record = _read(os.pread(descriptor, 4096, 0) if sys.platform != "win32" else os.read(descriptor, 4096))
    if not record:
        return time.time() - os.fstat(descriptor).st_mtime < _STARTING_S
    if record.get("is_locked", True):
        return False
    if record.get("host") != socket.gethostname():
        return True
    start = _start_of(record.get("pid"))
    return start is not None and start == record.get("start")


def _start_of(pid: Any) -> str | None:
    """What tells a process from a later one with its number; None where it is gone."""
    if type(pid) is not int or pid <= 0:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return f"{boot} {fields[19]}"
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists() or sys.platform == "win32":
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"


def _read(data: bytes) -> dict[str, Any]:
    try:
        record: Any = json.loads(data)
    except ValueError:
        return {}
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {}


def lock_path(store: Path, name: str) -> Path:
    """The lock file of a process of this name."""
    return store.with_name(f"{store.name}.{name}.lock")
