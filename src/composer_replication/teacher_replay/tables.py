"""The tables of a store, their upgrade from earlier versions, and the integrity check when a store is opened.

Every amount is stored twice: in an entry of `bills`, and in the totals of `meter`. Every paid reply has an entry in
`bills` with its digest. So a changed total, a missing reply and a replaced reply are detected. This guards against
damage and mistakes, not against somebody who changes both tables.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from pathlib import Path
from typing import Literal, NamedTuple

from composer_replication.atomic import staged
from composer_replication.errors import ArtefactCorruptError, RunError, explain
from composer_replication.teacher_replay.teachers import to_dollars

EXPECTED = "a store of teachers' replies"
VERSION = 3  # version 1 had no table of the sessions of a reply, version 2 had totals without bills
_REPLIES = "CREATE TABLE replies (key BLOB PRIMARY KEY, teacher TEXT NOT NULL, reply BLOB NOT NULL) WITHOUT ROWID;"
_AMOUNT = "INTEGER NOT NULL CHECK (typeof({0}) = 'integer' AND {0} >= 0)"
_MONEY = f"""
CREATE TABLE intents (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL, teacher TEXT NOT NULL, owner TEXT NOT NULL, started REAL NOT NULL,
    reserved {_AMOUNT.format("reserved")}
);
CREATE TABLE meter (
    one INTEGER PRIMARY KEY CHECK (one = 1), spent {_AMOUNT.format("spent")}, reserved {_AMOUNT.format("reserved")},
    unknown {_AMOUNT.format("unknown")}, num_unknown {_AMOUNT.format("num_unknown")}, halted TEXT
);
"""
_BILLS_AND_HOLDS = f"""
CREATE TABLE bills (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, teacher TEXT NOT NULL, amount {_AMOUNT.format("amount")},
    is_known INTEGER NOT NULL CHECK (is_known IN (0, 1)), key BLOB, digest BLOB
);
CREATE UNIQUE INDEX bills_of_replies ON bills (key) WHERE key IS NOT NULL;
CREATE TABLE holds (
    what TEXT PRIMARY KEY, owner TEXT NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL, since REAL NOT NULL
) WITHOUT ROWID;
"""
_TOTALS = "INSERT INTO meter VALUES (1, 0, 0, 0, 0, NULL);"
CREATE_REPLY_OWNERS = (
    "CREATE TABLE IF NOT EXISTS reply_owners (key BLOB NOT NULL, session TEXT NOT NULL, PRIMARY KEY (key, session)) "
    "WITHOUT ROWID;"
)
SCHEMA = "\n".join((_REPLIES, _MONEY, _BILLS_AND_HOLDS, CREATE_REPLY_OWNERS, _TOTALS))
_COLUMNS = {
    "replies": "key teacher reply",
    "intents": "id key teacher owner started reserved",
    "meter": "one spent reserved unknown num_unknown halted",
    "reply_owners": "key session",
    "bills": "id at teacher amount is_known key digest",
    "holds": "what owner pid host since",
}
# Version 2 added reply_owners, and version 3 the last two tables.
_TABLES_OF = {1: list(_COLUMNS)[:3], 2: list(_COLUMNS)[:4], 3: list(_COLUMNS)}
_NEWER_VERSION = f" of the store, this program knows {VERSION}"
_CARRIED_OVER = "carried over from a store of an earlier version"


class Meter(NamedTuple):
    """The money totals of a store, in nano-dollars: `spent` was billed, `reserved` belongs to requests in flight,
    and `unknown` to requests that may or may not have been billed.
    """

    spent: int
    reserved: int
    unknown: int
    num_unknown: int
    halted: str | None

    @property
    def committed(self) -> int:
        """The amount that counts toward a cap."""
        return self.spent + self.reserved + self.unknown


class RequestRefused(NamedTuple):
    """The reason why a request must not be sent: it does not fit into the cap, or the replay was stopped."""

    reason: str
    refusal: Literal["cap", "stop"]


class NoRoom(NamedTuple):
    """The reason why a request has to wait: it fits into the cap only if requests in flight cost less than they have
    reserved.
    """

    reason: str


class ClaimedElsewhere(NamedTuple):
    """Another process is requesting the same reply (`holder` describes it), or has just stored it (`holder` is None).

    The claim lasts as long as that process keeps `lock_file` locked.
    """

    holder: str | None
    lock_file: str = ""


def create_store_if_missing(path: Path) -> None:
    """Create a store atomically if none exists, so that no process sees an unfinished store. Raises
    ArtefactCorruptError if the file is empty.
    """
    if path.exists():
        if path.stat().st_size == 0:
            fix = "Restore an earlier copy, or remove the file if it never contained paid answers."
            raise ArtefactCorruptError(explain(str(path), got="an empty file", expected=EXPECTED, fix=fix))
        return
    _refuse_orphaned_log(path)
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    fresh.executescript(f"{SCHEMA} PRAGMA user_version = {VERSION};")
    data = bytearray(fresh.serialize())
    fresh.close()
    data[18:20] = b"\2\2"  # WAL mode from the start, so that processes that open a new store together need not wait
    try:
        with staged(path) as stage, contextlib.suppress(FileExistsError):  # another process was faster
            stage.file.write(data)
            stage.commit_new()
    except OSError as error:
        raise RunError(explain(str(path), got=str(error), expected="a writable folder")) from error


def _refuse_orphaned_log(path: Path) -> None:
    # A write-ahead log without its store: the store was moved away, and a new store would make the log useless.
    log = path.with_name(f"{path.name}-wal")
    try:
        is_orphaned = (
            log.stat().st_size > 0 and not path.exists()
        )  # checked last: another process may have just created it
    except FileNotFoundError:
        return
    if is_orphaned:
        fix = f"Move {path.name} back beside it, or move {log.name} and {path.name}-shm to its new folder."
        raise ArtefactCorruptError(explain(str(path), got=f"only its log {log.name}", expected=EXPECTED, fix=fix))


def reply_digest(key: bytes, teacher: str, reply: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join((key, teacher.encode(), reply)), digest_size=16).digest()


def read_version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def find_schema_fault(connection: sqlite3.Connection) -> str | None:
    """Return the reason why a database matches no known version of the store; None if it matches one."""
    version = read_version(connection)
    if version > VERSION:
        return f"version {version}{_NEWER_VERSION}"
    names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    if not names:
        return "a database without any table"
    if not set(names) & set(_COLUMNS):
        return f"another program's database (tables {', '.join(names)[:100]})"
    missing = [name for name in _TABLES_OF.get(version, _COLUMNS) if name not in names]
    if version not in _TABLES_OF or missing:
        return f"a store without {', '.join(missing) or 'a version'}"
    for name in _TABLES_OF[version]:
        columns = " ".join(row[1] for row in connection.execute(f"PRAGMA table_info({name})"))
        if columns != _COLUMNS[name]:
            return f"a table {name} with columns {columns!r:.100}"
    later = sorted(set(_COLUMNS) & set(names) - set(_TABLES_OF[version]))
    if version == 1 and later == ["bills", "holds"]:
        return None  # the version was set back by hand, to forget the sessions of answers; bills are checked as usual
    return f"version {version} with tables of a later one: {', '.join(later)}" if later else None


def is_newer_version(fault: str) -> bool:
    return fault.endswith(_NEWER_VERSION)


def find_content_fault(connection: sqlite3.Connection) -> str | None:
    """Read a whole store of the current version, and return a description of what is wrong with it; None if nothing
    is.
    """
    fault = _find_money_fault(connection) or _find_reply_fault(connection)
    finding = (
        fault or connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    )  # checks the pages and the CHECK constraints
    return fault or (None if finding == "ok" else f"a damaged file ({finding})")


def _find_money_fault(connection: sqlite3.Connection) -> str | None:
    rows = connection.execute("SELECT spent, reserved, unknown, num_unknown FROM meter").fetchall()
    if len(rows) != 1:
        return f"{len(rows)} rows of totals"
    bills = "SELECT COALESCE(SUM(amount), 0) FROM bills WHERE is_known ="
    expected_totals = {
        "spent": f"{bills} 1",
        "reserved": "SELECT COALESCE(SUM(reserved), 0) FROM intents",
        "unknown": f"{bills} 0",
        "num_unknown": "SELECT COUNT(*) FROM bills WHERE is_known = 0",
    }
    for (name, query), total in zip(expected_totals.items(), rows[0], strict=True):
        entries = connection.execute(query).fetchone()[0]
        if type(total) is not int or total < 0:
            return f"a total of {name} that is no amount ({total!r:.40})"
        if total != entries:
            in_dollars = name != "num_unknown" and isinstance(entries, int)
            amount_texts = [f"${to_dollars(amount):.6f}" if in_dollars else f"{amount}" for amount in (total, entries)]
            return f"a total of {name} of {amount_texts[0]}, whose entries add up to {amount_texts[1]}"
    return None


def _find_reply_fault(connection: sqlite3.Connection) -> str | None:
    lost = "SELECT COUNT(*) FROM bills WHERE key IS NOT NULL AND key NOT IN (SELECT key FROM replies)"
    if number := connection.execute(lost).fetchone()[0]:
        return f"{number} replies gone that were paid for"
    rows = connection.execute("SELECT key, replies.teacher, reply, digest FROM replies LEFT JOIN bills USING (key)")
    for key, teacher, reply, digest in rows:
        if not (isinstance(key, bytes) and isinstance(reply, bytes) and isinstance(teacher, str)):
            return "a reply that is none"
        if digest is None:
            return f"a reply of {teacher!r:.60} that no entry paid for ({key.hex()[:12]})"
        if digest != reply_digest(key, teacher, reply):
            return f"a reply of {teacher!r:.60} that is not the one that was paid for ({key.hex()[:12]})"
    return None


def upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade a store to the current version within the open transaction; the amounts are preserved."""
    version = read_version(connection)
    if version == VERSION:
        return
    connection.execute(CREATE_REPLY_OWNERS)
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'bills'").fetchone():
        _add_bills_and_holds(connection)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _add_bills_and_holds(connection: sqlite3.Connection) -> None:
    for statement in _statements(_BILLS_AND_HOLDS):
        connection.execute(statement)
    for name in ("intents", "meter"):
        connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
    for statement in _statements(_MONEY):
        connection.execute(statement)
    for name in ("intents", "meter"):  # an invalid amount raises an error that names the table
        connection.execute(f"INSERT INTO {name} SELECT * FROM old_{name}")  # noqa: S608
        connection.execute(f"DROP TABLE old_{name}")
    (spent, unknown, number), now = (
        connection.execute("SELECT spent, unknown, num_unknown FROM meter").fetchone(),
        time.time(),
    )
    add = "INSERT INTO bills (at, teacher, amount, is_known, key, digest) VALUES (?, ?, ?, ?, ?, ?)"
    connection.execute(add, (now, _CARRIED_OVER, spent, 1, None, None))
    for index in range(number):
        connection.execute(add, (now, _CARRIED_OVER, 0 if index else unknown, 0, None, None))
    for key, teacher, reply in connection.execute("SELECT key, teacher, reply FROM replies").fetchall():
        connection.execute(add, (now, teacher, 0, 1, key, reply_digest(key, teacher, reply)))


def _statements(script: str) -> list[str]:
    return [statement for part in script.split(";") if (statement := part.strip())]


def add_reply_session(connection: sqlite3.Connection, key: bytes, session: str) -> None:
    """Record, within the open transaction if there is one, that this session, too, uses a reply."""
    row = (key, session)
    existing_row = connection.execute("SELECT 1 FROM reply_owners WHERE key = ? AND session = ?", row).fetchone()
    if existing_row is None:  # checked first, because reading needs no write lock
        connection.execute("INSERT OR IGNORE INTO reply_owners VALUES (?, ?)", row)
