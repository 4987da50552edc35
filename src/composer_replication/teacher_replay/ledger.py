"""The store: paid replies and money spent, in one SQLite file that several processes may use at once.

Before a request is sent, its highest cost is reserved in the transaction that checks the cap; afterwards the
reservation is replaced by the real cost. Reservations of a process that died stay counted as spent (`unknown`), since
nobody can know. So the sum of all bills never exceeds the cap, over all processes and restarts. A reservation is also a
claim: as long as its process lives, no other process sends that request.

The whole store is checked when it is opened (see `tables`). Damage raises an error; nothing is changed and no paid
answer is silently lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from composer_replication.atomic import is_lock_free, try_lock
from composer_replication.errors import ArtefactCorruptError, InputError, RunError, explain
from composer_replication.teacher_replay import tables
from composer_replication.teacher_replay.tables import Elsewhere, Meter, NoRoom, RequestRefused
from composer_replication.teacher_replay.teachers import to_dollars


class TeacherStore:
    """The store in a file, or in memory for a single replay. Close it, or use it as a context manager."""

    def __init__(self, path: str | Path | None = None) -> None:
        # Resolved here: SQLite follows links too, and the lock files must be next to the file that all processes use.
        self._path = None if path is None else Path(os.path.realpath(path))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            tables.make_if_new(self._path)
        self._connection = sqlite3.connect(str(self._path or ":memory:"), isolation_level=None, timeout=60)
        self._owner: Owner | None = None
        with contextlib.ExitStack() as unless_all_is_well:
            unless_all_is_well.callback(self.close)
            with self._named_errors():
                self._prepare()
            self._owner = self._new_owner()
            self._owner_name = self._owner.name if self._owner else "memory"
            self.take_over_the_dead()
            unless_all_is_well.pop_all()

    def __enter__(self) -> TeacherStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._owner is not None:
            with contextlib.suppress(sqlite3.Error):  # whatever remains of a hold ends with its owner anyway
                self._connection.execute("DELETE FROM holds WHERE owner = ?", (self._owner_name,))
        self._connection.close()
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def hold(self, what: str) -> None:
        """Make this process the only one to do `what` with the store until it is closed. Raises RunError if another
        does.
        """
        if self._path is None or self._owner is None:
            return
        with self._transaction():
            row = self._execute("SELECT owner, pid, host, since FROM holds WHERE what = ?", (what,)).fetchone()
            if row is not None and row[0] != self._owner_name and is_alive(self._path, row[0]):
                raise RunError(_said_of_holder(self._path, what, row[0], _Holder(*row[1:])))
            mine = (what, self._owner_name, *self._owner.holder)
            self._execute("INSERT OR REPLACE INTO holds VALUES (?, ?, ?, ?, ?)", mine)

    def reply(self, key: bytes) -> dict[str, Any] | None:
        """Return a reply that was paid for before, or None."""
        row = self._execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        try:
            return None if row is None else orjson.loads(row[0])
        except orjson.JSONDecodeError as error:
            raise self._corrupt(f"a reply that cannot be read ({error})") from error

    def ascribe(self, key: bytes, session: str) -> None:
        """Record that a reply is also for this session: it is stored as long as one of its sessions is."""
        if session:
            with self._named_errors():
                tables.ascribe(self._connection, key, session)

    def num_replies(self) -> int:
        return self._execute("SELECT COUNT(*) FROM replies").fetchone()[0]

    def meter(self) -> Meter:
        row = self._execute("SELECT spent, reserved, unknown, num_unknown, halted FROM meter").fetchone()
        return Meter(*row)

    def under_way(self) -> tuple[int, float]:
        """Return the number of reservations that are not settled, of all processes, and the time of the latest."""
        return self._execute("SELECT COUNT(*), COALESCE(MAX(started), 0) FROM intents").fetchone()

    def reserve(
        self, key: bytes, teacher: str, bound_nano: int, cap_nano: int
    ) -> int | NoRoom | RequestRefused | Elsewhere:
        """Reserve a request's highest cost and return its number, or why it may not be sent.

        Reserved, spent and unknown amounts never exceed the cap. NoRoom may change when other requests are settled;
        RequestRefused is final.
        """
        _check_amount("bound of a request", bound_nano)
        _check_amount("cap", cap_nano)
        with self._transaction():
            elsewhere = self._elsewhere(key)
            if elsewhere is not None:
                return elsewhere
            meter = self.meter()
            if meter.halted is not None:
                return RequestRefused(f"stopped: {meter.halted}", refusal="stop")
            remaining_nano = cap_nano - meter.spent - meter.unknown
            if bound_nano > remaining_nano - meter.reserved:
                remaining_text = f"${to_dollars(max(0, remaining_nano)):.6f}"
                reason = f"budget: up to ${to_dollars(bound_nano):.6f} needed, {remaining_text} left of the cap"
                return RequestRefused(reason, refusal="cap") if bound_nano > remaining_nano else NoRoom(reason)
            self._execute("UPDATE meter SET reserved = reserved + ?", (bound_nano,))
            cursor = self._execute(
                "INSERT INTO intents (key, teacher, owner, started, reserved) VALUES (?, ?, ?, ?, ?)",
                (key, teacher, self._owner_name, time.time(), bound_nano),
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def _elsewhere(self, key: bytes) -> Elsewhere | None:
        """Return who else has this reply or is asking for it, if anyone. Claims of dead processes are taken over."""
        if self._execute("SELECT 1 FROM replies WHERE key = ?", (key,)).fetchone():
            return Elsewhere(None)
        claims = self._execute(
            "SELECT DISTINCT owner FROM intents WHERE key = ? AND owner <> ?", (key, self._owner_name)
        ).fetchall()
        for (owner,) in claims:
            if self._path is not None and is_alive(self._path, owner):
                return Elsewhere(str(_holder_of(self._path, owner) or owner), str(_lock_path(self._path, owner)))
            self._take_over(owner)
        return None

    def settle(
        self,
        intent: int,
        cost_nano: int | None,
        *,
        reply: tuple[bytes, str, dict[str, Any]] | None,
        session: str = "",
    ) -> None:
        """Record the cost of a request (None: unknown), its reply and the session of the reply, in one transaction."""
        _check_amount("cost of a request", cost_nano or 0)
        with self._transaction():
            held, teacher = self._drop(intent)
            kept_reply = None if reply is None else self._keep(reply, session)
            if cost_nano is None:
                self._add_bill(teacher, held or 0, is_known=False, reply=kept_reply)
                return
            if cost_nano or kept_reply:
                self._add_bill(teacher, cost_nano, is_known=True, reply=kept_reply)
            if held is not None and cost_nano > held:
                reason = f"{teacher} took ${to_dollars(cost_nano):.6f} where at most ${to_dollars(held):.6f} was due"
                self._execute("UPDATE meter SET halted = COALESCE(halted, ?)", (reason,))

    def resume_after_overrun(self) -> None:
        """Allow requests again after a teacher billed more than its bound, once a person has looked at it."""
        self._execute("UPDATE meter SET halted = NULL")

    def _keep(self, reply: tuple[bytes, str, dict[str, Any]], session: str) -> tuple[bytes, bytes] | None:
        """Store a reply and return its key and digest; None if it is stored already."""
        key, slug, data = reply
        text = orjson.dumps(data)
        cursor = self._execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", (key, slug, text))
        self.ascribe(key, session)
        return (key, tables.digest_of(key, slug, text)) if cursor.rowcount else None

    def _drop(self, intent: int) -> tuple[int | None, str]:
        row = self._execute("SELECT reserved, teacher FROM intents WHERE id = ?", (intent,)).fetchone()
        if row is None:  # another process took us for dead and counted it already
            return None, "a teacher"
        self._execute("DELETE FROM intents WHERE id = ?", (intent,))
        self._execute("UPDATE meter SET reserved = reserved - ?", (row[0],))
        return row[0], row[1]

    def _add_bill(self, teacher: str, nano: int, *, is_known: bool, reply: tuple[bytes, bytes] | None) -> None:
        """Add a bill and update the totals."""
        row = (time.time(), teacher, nano, is_known, *(reply or (None, None)))
        self._execute("INSERT INTO bills (at, teacher, amount, is_known, key, digest) VALUES (?, ?, ?, ?, ?, ?)", row)
        if is_known:
            self._execute("UPDATE meter SET spent = spent + ?", (nano,))
        else:
            self._execute("UPDATE meter SET unknown = unknown + ?, num_unknown = num_unknown + 1", (nano,))

    def _new_owner(self) -> Owner | None:
        try:
            return None if self._path is None else Owner(self._path)
        except OSError as error:
            raise RunError(explain(str(self._path), got=str(error), expected="a folder that can be written")) from error

    def take_over_the_dead(self) -> None:
        """Count reservations of dead processes as spent."""
        rows = self._execute("SELECT DISTINCT owner FROM intents").fetchall()
        for owner in dead_owners(self._path, [row[0] for row in rows], self._owner_name):
            with self._transaction():
                self._take_over(owner)

    def _take_over(self, owner: str) -> None:
        for (intent,) in self._execute("SELECT id FROM intents WHERE owner = ?", (owner,)).fetchall():
            held, teacher = self._drop(intent)
            self._add_bill(teacher, held or 0, is_known=False, reply=None)

    def _prepare(self) -> None:
        if self._path is None:
            self._connection.executescript(tables.NEW)
            return
        with self._view():
            self._refuse(tables.fault_of_shape(self._connection))
            is_current = tables.version_of(self._connection) == tables.VERSION
        if not is_current:
            with self._transaction():  # another process may have upgraded it meanwhile; a damaged store is not upgraded
                self._refuse(tables.fault_of_shape(self._connection))
                tables.upgrade(self._connection)
                self._refuse(tables.fault_of_content(self._connection))
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")  # survives a killed process, which is all we need
        with self._view():
            self._refuse(tables.fault_of_content(self._connection))

    def _refuse(self, fault: str | None) -> None:
        if fault is not None:
            raise self._corrupt(fault)

    @contextmanager
    def _view(self) -> Iterator[None]:
        """Read all tables in one consistent view while others write."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        with self._named_errors():
            return self._connection.execute(statement, values)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:  # busy, read-only, full: the file itself is not damaged
            fix = "Nothing that was paid for is lost; the same command goes on when that is mended."
            message = explain(str(self._path), got=str(error), expected="a store that can be written", fix=fix)
            raise RunError(message) from error
        except sqlite3.DatabaseError as error:
            raise self._corrupt(str(error)) from error

    def _corrupt(self, fault: str) -> ArtefactCorruptError:
        if tables.is_of_later_version(fault):
            fix = "Use the version of this program that wrote it."
            return ArtefactCorruptError(explain(str(self._path), got=fault, expected="one it knows", fix=fix))
        fix = (
            "Nothing was changed. Put an earlier copy of the file back, or go on without: first move this one away, "
            "together with its -wal and -shm, if they lie beside it. Without it what it holds is asked and paid for "
            "again, and the cap begins anew."
        )
        return ArtefactCorruptError(explain(str(self._path), got=fault, expected=tables.EXPECTED, fix=fix))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")  # writers wait for each other here, before they read
        end = "ROLLBACK"
        try:
            yield
            end = "COMMIT"
        finally:
            if self._connection.in_transaction:  # a full disk has already ended it
                self._execute(end)


def _check_amount(what: str, nano: int) -> None:
    if type(nano) is not int or nano < 0:
        raise InputError(explain(what, got=repr(nano), expected="whole nano-dollars, 0 or more"))


# ---- processes that reserved money or hold a run

# Each process has a small file beside the store and holds its lock while it lives. The system releases the lock however
# the process ends, and a new process with the same number does not get it. On file systems without locks, the number
# and start time of the process decide; processes of other machines then count as alive.

# An empty file that is this young belongs to a process that is just starting.
_STARTING_S = 5.0
_ATTEMPTS = 20


class _Holder(NamedTuple):
    """The process that holds a store, as a person would look for it."""

    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} since {since}"


class Owner:
    """This process's lock file beside a store. `close` removes it; the lock ends with the process."""

    def __init__(self, store: Path) -> None:
        self.holder = _Holder(os.getpid(), socket.gethostname(), time.time())
        for _ in range(_ATTEMPTS):
            self.name = f"{os.getpid()}-{secrets.token_hex(6)}"
            self._path = _lock_path(store, self.name)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            if self._has_settled():
                return
            os.close(self._descriptor)
        raise OSError(f"{self._path}: the lock file of this process was removed {_ATTEMPTS} times")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _has_settled(self) -> bool:
        """Return whether the file is locked, written and still ours: another process may have removed it as stale."""
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
        # Without working locks, everybody gets the lock.
        try:
            again = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(again)
        finally:
            os.close(again)


def is_alive(store: Path, name: str) -> bool:
    """Return whether the process of this name is alive; removes the lock file of a dead one if permitted."""
    path = _lock_path(store, name)
    try:
        descriptor = os.open(path, os.O_RDONLY)  # another user's file can be read, too
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


def dead_owners(store: Path | None, names: Sequence[str], own_name: str = "") -> Iterator[str]:
    """Yield the names of dead processes, and remove the lock files of all dead ones."""
    if store is None:
        return
    lock_names = {path.name[len(store.name) + 1 : -len(".lock")] for path in store.parent.glob(f"{store.name}.*.lock")}
    for name in sorted({*names, *lock_names} - {own_name}):
        if not is_alive(store, name):
            yield name


def _holder_of(store: Path, name: str) -> _Holder | None:
    """Return what the lock file of a process says about it."""
    try:
        record = _read(_lock_path(store, name).read_bytes())
        return _Holder(record["pid"], record["host"], record["since"])
    except (OSError, KeyError):
        return None


def _said_of_holder(path: Path, what: str, owner: str, holder: _Holder) -> str:
    """Return the message for a second process."""
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
    """Return whether the process may live although we got its lock: the file system may have no locks."""
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
    """Return what tells a process from a later one with its number; None if the process is gone."""
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


def _lock_path(store: Path, name: str) -> Path:
    """Return the path of the lock file of a process."""
    return store.with_name(f"{store.name}.{name}.lock")
