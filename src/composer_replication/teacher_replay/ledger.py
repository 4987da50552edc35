"""The store of paid replies and of money spent: one SQLite file that several processes can use at once.

Before a request is sent, its maximum cost is reserved in the same transaction that checks the cap. Afterwards the
reservation is replaced by the actual cost. Reservations of a process that died count as spent (`unknown`), because
nobody knows whether they were billed. So the sum of all bills never exceeds the cap, over all processes and restarts. A
reservation is also a claim: while its process lives, no other process sends the same request.

The whole store is checked when it is opened (see `tables`). If it is damaged, an error is raised and nothing is
changed, so that no paid answer is lost silently.
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

from composer_replication.atomic import try_lock
from composer_replication.errors import ArtefactCorruptError, InputError, RunError, explain
from composer_replication.teacher_replay import tables
from composer_replication.teacher_replay.tables import ClaimedElsewhere, Meter, NoRoom, RequestRefused
from composer_replication.teacher_replay.teachers import to_dollars


class TeacherStore:
    """The store of replies and money spent, in a file or in memory. Close it after use, or use it as a context
    manager.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        # Links are resolved, as SQLite does: the lock files must be beside the actual file, which all processes share.
        self._path = None if path is None else Path(os.path.realpath(path))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            tables.create_store_if_missing(self._path)
        self._connection = sqlite3.connect(str(self._path or ":memory:"), isolation_level=None, timeout=60)
        self._owner: _ProcessLock | None = None
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close)
            with self._translate_errors():
                self._prepare()
            self._owner = self._lock_process()
            self._owner_name = self._owner.name if self._owner else "memory"
            self.recover_dead_reservations()
            cleanup.pop_all()

    def __enter__(self) -> TeacherStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._owner is not None:
            with contextlib.suppress(sqlite3.Error):  # a remaining hold ends with its process anyway
                self._connection.execute("DELETE FROM holds WHERE owner = ?", (self._owner_name,))
        self._connection.close()
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def hold(self, what: str) -> None:
        """Acquire exclusive use of the store for `what` until the store is closed. Raises RunError if another
        process holds it.
        """
        if self._path is None or self._owner is None:
            return
        with self._transaction():
            row = self._execute("SELECT owner, pid, host, since FROM holds WHERE what = ?", (what,)).fetchone()
            if row is not None and row[0] != self._owner_name and _is_owner_alive(self._path, row[0]):
                raise RunError(_holder_message(self._path, what, row[0], _Holder(*row[1:])))
            mine = (what, self._owner_name, *self._owner.holder)
            self._execute("INSERT OR REPLACE INTO holds VALUES (?, ?, ?, ?, ?)", mine)

    def reply(self, key: bytes) -> dict[str, Any] | None:
        """Return the stored reply for a request key, or None if the store has none."""
        row = self._execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        try:
            return None if row is None else orjson.loads(row[0])
        except orjson.JSONDecodeError as error:
            raise self._corrupt(f"a reply that cannot be read ({error})") from error

    def add_reply_session(self, key: bytes, session: str) -> None:
        """Record that this session, too, uses a reply. A reply is kept as long as one of its sessions is."""
        if session:
            with self._translate_errors():
                tables.add_reply_session(self._connection, key, session)

    def num_replies(self) -> int:
        return self._execute("SELECT COUNT(*) FROM replies").fetchone()[0]

    def meter(self) -> Meter:
        row = self._execute("SELECT spent, reserved, unknown, num_unknown, halted FROM meter").fetchone()
        return Meter(*row)

    def open_reservations(self) -> tuple[int, float]:
        """Return the number of all processes' unsettled reservations, and the time of the latest."""
        return self._execute("SELECT COUNT(*), COALESCE(MAX(started), 0) FROM intents").fetchone()

    def reserve(
        self, key: bytes, teacher: str, bound_nano: int, cap_nano: int
    ) -> int | NoRoom | RequestRefused | ClaimedElsewhere:
        """Reserve the maximum cost of a request; return the reservation's id, or the reason not to send the request.

        The sum of reserved, spent and unknown amounts never exceeds the cap. After NoRoom the request may fit once
        other requests are settled; RequestRefused is final.
        """
        _check_amount("bound of a request", bound_nano)
        _check_amount("cap", cap_nano)
        with self._transaction():
            elsewhere = self._find_claim(key)
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

    def _find_claim(self, key: bytes) -> ClaimedElsewhere | None:
        """Return the claim of another process that is requesting or has stored this reply, or None. Settles the
        claims of dead processes.
        """
        if self._execute("SELECT 1 FROM replies WHERE key = ?", (key,)).fetchone():
            return ClaimedElsewhere(None)
        claims = self._execute(
            "SELECT DISTINCT owner FROM intents WHERE key = ? AND owner <> ?", (key, self._owner_name)
        ).fetchall()
        for (owner,) in claims:
            if self._path is not None and _is_owner_alive(self._path, owner):
                return ClaimedElsewhere(
                    str(_read_holder(self._path, owner) or owner), str(_lock_path(self._path, owner))
                )
            self._recover_reservations(owner)
        return None

    def settle(
        self,
        intent: int,
        cost_nano: int | None,
        *,
        reply: tuple[bytes, str, dict[str, Any]] | None,
        session: str = "",
    ) -> None:
        """Record the cost of a request (None if unknown), its reply and the reply's session in one transaction."""
        _check_amount("cost of a request", cost_nano or 0)
        with self._transaction():
            held, teacher = self._remove_reservation(intent)
            stored_reply = None if reply is None else self._store_reply(reply, session)
            if cost_nano is None:
                self._add_bill(teacher, held or 0, is_known=False, reply=stored_reply)
                return
            if cost_nano or stored_reply:
                self._add_bill(teacher, cost_nano, is_known=True, reply=stored_reply)
            if held is not None and cost_nano > held:
                reason = f"{teacher} took ${to_dollars(cost_nano):.6f} where at most ${to_dollars(held):.6f} was due"
                self._execute("UPDATE meter SET halted = COALESCE(halted, ?)", (reason,))

    def resume_after_overrun(self) -> None:
        """Allow requests again after a teacher billed more than its maximum cost. Call this only after a person has
        agreed.
        """
        self._execute("UPDATE meter SET halted = NULL")

    def _store_reply(self, reply: tuple[bytes, str, dict[str, Any]], session: str) -> tuple[bytes, bytes] | None:
        """Store a reply and return its key and digest; return None if the reply is already stored."""
        key, slug, data = reply
        text = orjson.dumps(data)
        cursor = self._execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", (key, slug, text))
        self.add_reply_session(key, session)
        return (key, tables.reply_digest(key, slug, text)) if cursor.rowcount else None

    def _remove_reservation(self, reservation: int) -> tuple[int | None, str]:
        row = self._execute("SELECT reserved, teacher FROM intents WHERE id = ?", (reservation,)).fetchone()
        if row is None:  # another process considered this one dead and has recovered the reservation
            return None, "a teacher"
        self._execute("DELETE FROM intents WHERE id = ?", (reservation,))
        self._execute("UPDATE meter SET reserved = reserved - ?", (row[0],))
        return row[0], row[1]

    def _add_bill(self, teacher: str, nano: int, *, is_known: bool, reply: tuple[bytes, bytes] | None) -> None:
        """Insert a bill, and update the totals."""
        row = (time.time(), teacher, nano, is_known, *(reply or (None, None)))
        self._execute("INSERT INTO bills (at, teacher, amount, is_known, key, digest) VALUES (?, ?, ?, ?, ?, ?)", row)
        if is_known:
            self._execute("UPDATE meter SET spent = spent + ?", (nano,))
        else:
            self._execute("UPDATE meter SET unknown = unknown + ?, num_unknown = num_unknown + 1", (nano,))

    def _lock_process(self) -> _ProcessLock | None:
        try:
            return None if self._path is None else _ProcessLock(self._path)
        except OSError as error:
            raise RunError(explain(str(self._path), got=str(error), expected="a writable folder")) from error

    def recover_dead_reservations(self) -> None:
        """Count the reservations of dead processes as spent."""
        rows = self._execute("SELECT DISTINCT owner FROM intents").fetchall()
        for owner in _find_dead_owners(self._path, [row[0] for row in rows], self._owner_name):
            with self._transaction():
                self._recover_reservations(owner)

    def _recover_reservations(self, owner: str) -> None:
        for (reservation,) in self._execute("SELECT id FROM intents WHERE owner = ?", (owner,)).fetchall():
            reserved, teacher = self._remove_reservation(reservation)
            self._add_bill(teacher, reserved or 0, is_known=False, reply=None)

    def _prepare(self) -> None:
        if self._path is None:
            self._connection.executescript(tables.SCHEMA)
            return
        with self._read_transaction():
            self._raise_if_faulty(tables.find_schema_fault(self._connection))
            is_current = tables.read_version(self._connection) == tables.VERSION
        if not is_current:
            with self._transaction():  # checked again, because another process may have upgraded the store meanwhile
                self._raise_if_faulty(tables.find_schema_fault(self._connection))
                tables.upgrade(self._connection)
                self._raise_if_faulty(tables.find_content_fault(self._connection))
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")  # enough to survive a killed process
        with self._read_transaction():
            self._raise_if_faulty(tables.find_content_fault(self._connection))

    def _raise_if_faulty(self, fault: str | None) -> None:
        if fault is not None:
            raise self._corrupt(fault)

    @contextmanager
    def _read_transaction(self) -> Iterator[None]:
        """Open a transaction that reads all tables in one consistent snapshot, even while other processes write."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        with self._translate_errors():
            return self._connection.execute(statement, values)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:  # busy, read-only or full: the file itself is not damaged
            fix = "No paid answer is lost. Fix the cause, and run the same command again."
            message = explain(str(self._path), got=str(error), expected="a writable store", fix=fix)
            raise RunError(message) from error
        except sqlite3.DatabaseError as error:
            raise self._corrupt(str(error)) from error

    def _corrupt(self, fault: str) -> ArtefactCorruptError:
        if tables.is_newer_version(fault):
            fix = "Use the version of this program that wrote it."
            expected = f"version {tables.VERSION} or earlier"
            return ArtefactCorruptError(explain(str(self._path), got=fault, expected=expected, fix=fix))
        fix = (
            "Nothing was changed. Restore an earlier copy of the file, or continue without it: move it away together "
            "with its -wal and -shm files, if there are any. Without it, its answers are requested and paid for again, "
            "and the cap starts from zero."
        )
        return ArtefactCorruptError(explain(str(self._path), got=fault, expected=tables.EXPECTED, fix=fix))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")  # takes the write lock before the first read
        end = "ROLLBACK"
        try:
            yield
            end = "COMMIT"
        finally:
            if self._connection.in_transaction:  # an error such as a full disk may have ended it already
                self._execute(end)


def _check_amount(what: str, nano: int) -> None:
    if type(nano) is not int or nano < 0:
        raise InputError(explain(what, got=repr(nano), expected="whole nano-dollars, 0 or more"))


# ---- processes that reserved money or hold a run

# Each process has a small file beside the store and keeps it locked while it lives. The operating system releases the
# lock however the process ends, and a new process with the same id does not inherit it. On file systems without locks,
# process id and start time decide; processes on other machines then count as alive.

# An empty file younger than this belongs to a process that is still starting.
_STARTING_S = 5.0
_ATTEMPTS = 20


class _Holder(NamedTuple):
    """The process that holds a store; its text form tells a person where to find that process."""

    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} since {since}"


class _ProcessLock:
    """The lock file that this process keeps next to a store. `close` releases the lock and removes the file;
    otherwise the lock ends with the process.
    """

    def __init__(self, store: Path) -> None:
        self.holder = _Holder(os.getpid(), socket.gethostname(), time.time())
        for _ in range(_ATTEMPTS):
            self.name = f"{os.getpid()}-{secrets.token_hex(6)}"
            self._path = _lock_path(store, self.name)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            if self._acquire():
                return
            os.close(self._descriptor)
        raise OSError(f"{self._path}: the lock file of this process was removed {_ATTEMPTS} times")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _acquire(self) -> bool:
        """Lock and write the lock file; return whether it still exists, because another process may have removed it
        as stale.
        """
        if not try_lock(self._descriptor):
            return False
        record = self.holder._asdict() | {
            "start": _process_start(os.getpid()),
            "is_locked": self._excludes_second_lock(),
        }
        os.write(self._descriptor, json.dumps(record).encode())
        try:
            file_on_disk = self._path.stat()
        except FileNotFoundError:
            return False
        open_file = os.fstat(self._descriptor)
        return (open_file.st_dev, open_file.st_ino) == (file_on_disk.st_dev, file_on_disk.st_ino)

    def _excludes_second_lock(self) -> bool:
        # On a file system without locks, a second attempt succeeds too.
        try:
            descriptor = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)


def _is_owner_alive(store: Path, name: str) -> bool:
    """Whether the process that owns this lock file is alive. Removes a dead process's lock file if permitted."""
    path = _lock_path(store, name)
    try:
        descriptor = os.open(path, os.O_RDONLY)  # readable even if another user owns it
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        # The shared lock needs no permission to write, and any number of processes can hold it.
        if not try_lock(descriptor, exclusive=False) or _is_alive_without_lock(descriptor):
            return True
        with contextlib.suppress(PermissionError):
            path.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)


def _find_dead_owners(store: Path | None, names: Sequence[str], own_name: str = "") -> Iterator[str]:
    """Yield the names of dead processes, and remove their lock files."""
    if store is None:
        return
    lock_names = {path.name[len(store.name) + 1 : -len(".lock")] for path in store.parent.glob(f"{store.name}.*.lock")}
    for name in sorted({*names, *lock_names} - {own_name}):
        if not _is_owner_alive(store, name):
            yield name


def _read_holder(store: Path, name: str) -> _Holder | None:
    """Read the description of a process from its lock file."""
    try:
        record = _parse_record(_lock_path(store, name).read_bytes())
        return _Holder(record["pid"], record["host"], record["since"])
    except (OSError, KeyError):
        return None


def _holder_message(path: Path, what: str, owner: str, holder: _Holder) -> str:
    """Return the error message to show when a second process requests exclusive use of a store."""
    is_here = holder.host == socket.gethostname()
    where = "" if is_here else f" on {holder.host}"
    fix = (
        f"Wait for it, or stop it (`kill {holder.pid}`{where}) and run the same command again: answers so far are "
        "stored, and none is paid for twice."
    )
    if not is_here:
        fix += f" If that machine no longer exists, remove {path.name}.{owner}.lock beside the store."
    return explain(str(path), got=f"{what} by {holder}", expected="exclusive use of the store", fix=fix)


def _is_alive_without_lock(descriptor: int) -> bool:
    """Whether a process may be alive although its lock file is not locked, because some file systems do not support
    locks.
    """
    record = _parse_record(os.pread(descriptor, 4096, 0) if sys.platform != "win32" else os.read(descriptor, 4096))
    if not record:
        return time.time() - os.fstat(descriptor).st_mtime < _STARTING_S
    if record.get("is_locked", True):
        return False
    if record.get("host") != socket.gethostname():
        return True
    start = _process_start(record.get("pid"))
    return start is not None and start == record.get("start")


def _process_start(pid: Any) -> str | None:
    """Return a string that distinguishes a process from later processes with the same id; None if no process has the
    id.
    """
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


def _parse_record(data: bytes) -> dict[str, Any]:
    try:
        record: Any = json.loads(data)
    except ValueError:
        return {}
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {}


def _lock_path(store: Path, name: str) -> Path:
    """Return the path of a process's lock file."""
    return store.with_name(f"{store.name}.{name}.lock")
