"""Replies that were paid for and what has been spent, in one SQLite file that several processes may use at once.

Before a request is sent, the most it can cost is reserved, in the same transaction that checks the cap; afterwards the
reservation becomes what it did cost. A process that dies leaves reservations behind: they stay counted as spent
(`unknown_billed`), because nobody can know. So the sum of what was ever billed never passes the cap, over all processes
and restarts of a store.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from composer_replication.errors import ArtefactCorruptError, InputError, RunError, explain
from composer_replication.runs import answer_owners
from composer_replication.teacher_replay.money import to_dollars
from composer_replication.teacher_replay.owners import Owner, dead_owners

_VERSION = 2  # 1 did not say whose a reply is
_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, teacher TEXT NOT NULL, reply BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS intents (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL, teacher TEXT NOT NULL, owner TEXT NOT NULL, started REAL NOT NULL,
    reserved INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS meter (
    one INTEGER PRIMARY KEY CHECK (one = 1), spent INTEGER NOT NULL, reserved INTEGER NOT NULL,
    unknown INTEGER NOT NULL, num_unknown INTEGER NOT NULL, halted TEXT
);
INSERT OR IGNORE INTO meter VALUES (1, 0, 0, 0, 0, NULL);
"""
_TABLES = _SCHEMA + answer_owners.TABLE


class Meter(NamedTuple):
    """Nano-dollars: settled, held by requests in flight, and of requests that may or may not have been billed."""

    spent: int
    reserved: int
    unknown: int
    num_unknown: int
    halted: str | None

    @property
    def committed(self) -> int:
        """What counts against a cap."""
        return self.spent + self.reserved + self.unknown


class Refused(NamedTuple):
    """Why a request may not be sent."""

    reason: str


class TeacherStore:
    """Opened with a path, or in memory for a single replay. Close it, or use it as a context manager."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(":memory:" if path is None else str(path), isolation_level=None, timeout=60)
        try:
            self._prepare()
        except sqlite3.OperationalError as error:  # busy, read-only, full: the file itself is well
            self._connection.close()
            raise RunError(explain(str(path), got=str(error), expected="a store that can be written")) from error
        except sqlite3.DatabaseError as error:
            self._connection.close()
            fix = "Move the file away; replies in it are lost, and so is the record of what was spent."
            expected = "a store of teachers' replies"
            raise ArtefactCorruptError(explain(str(path), got=str(error), expected=expected, fix=fix)) from error
        self._owner = None if self._path is None else Owner(self._path)
        self._owner_name = self._owner.name if self._owner else "memory"
        self._take_over_the_dead()

    def __enter__(self) -> TeacherStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        if self._owner is not None:
            self._owner.close()

    def reply(self, key: bytes) -> dict[str, Any] | None:
        """A reply that was paid for before."""
        row = self._connection.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else orjson.loads(row[0])

    def ascribe(self, key: bytes, session: str) -> None:
        """Write down that a reply is this session's, too: it is kept as long as one of its sessions is."""
        if session:
            answer_owners.ascribe(self._connection, key, session)

    def num_replies(self) -> int:
        return self._connection.execute("SELECT COUNT(*) FROM replies").fetchone()[0]

    def meter(self) -> Meter:
        row = self._connection.execute("SELECT spent, reserved, unknown, num_unknown, halted FROM meter").fetchone()
        return Meter(*row)

    def reserve(self, key: bytes, teacher: str, bound_nano: int, cap_nano: int) -> int | Refused:
        """The number of an intent to send, or why not. What is reserved, spent and unknown never passes the cap."""
        if bound_nano < 0:
            raise InputError(explain("bound of a request", got=bound_nano, expected="0 or more"))
        with self._transaction():
            meter = self.meter()
            if meter.halted is not None:
                return Refused(f"stopped: {meter.halted}")
            if meter.committed + bound_nano > cap_nano:
                left = to_dollars(max(0, cap_nano - meter.committed))
                return Refused(f"budget: up to ${to_dollars(bound_nano):.6f} needed, ${left:.6f} left of the cap")
            self._connection.execute("UPDATE meter SET reserved = reserved + ?", (bound_nano,))
            made = self._connection.execute(
                "INSERT INTO intents (key, teacher, owner, started, reserved) VALUES (?, ?, ?, ?, ?)",
                (key, teacher, self._owner_name, time.time(), bound_nano),
            )
            assert made.lastrowid is not None
            return made.lastrowid

    def settle(
        self,
        intent: int,
        cost_nano: int | None,
        *,
        reply: tuple[bytes, str, dict[str, Any]] | None,
        session: str = "",
    ) -> None:
        """What a request did cost (None: nobody can know), its reply and whose that is, in one transaction."""
        with self._transaction():
            held, teacher = self._drop(intent)
            if cost_nano is None:
                self._add_unknown(held or 0)
            else:
                self._connection.execute("UPDATE meter SET spent = spent + ?", (cost_nano,))
                if held is not None and cost_nano > held:
                    said = f"{teacher} took ${to_dollars(cost_nano):.6f} where at most ${to_dollars(held):.6f} was due"
                    self._connection.execute("UPDATE meter SET halted = COALESCE(halted, ?)", (said,))
            if reply is not None:
                key, slug, data = reply
                row = (key, slug, orjson.dumps(data))
                self._connection.execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", row)
                self.ascribe(key, session)

    def resume_after_overrun(self) -> None:
        """Let requests go out again after a teacher took more than its bound: a person has looked at it."""
        self._connection.execute("UPDATE meter SET halted = NULL")

    def _drop(self, intent: int) -> tuple[int | None, str]:
        row = self._connection.execute("SELECT reserved, teacher FROM intents WHERE id = ?", (intent,)).fetchone()
        if row is None:  # another process took us for dead and counted it; adding it again would only be careful
            return None, "a teacher"
        self._connection.execute("DELETE FROM intents WHERE id = ?", (intent,))
        self._connection.execute("UPDATE meter SET reserved = reserved - ?", (row[0],))
        return row[0], row[1]

    def _add_unknown(self, nano: int) -> None:
        self._connection.execute("UPDATE meter SET unknown = unknown + ?, num_unknown = num_unknown + 1", (nano,))

    def _take_over_the_dead(self) -> None:
        """Reservations of processes that are gone stay spent."""
        rows = self._connection.execute("SELECT DISTINCT owner FROM intents").fetchall()
        for owner in dead_owners(self._path, [row[0] for row in rows], self._owner_name):
            with self._transaction():
                left = self._connection.execute("SELECT id FROM intents WHERE owner = ?", (owner,)).fetchall()
                for (intent,) in left:
                    self._add_unknown(self._drop(intent)[0] or 0)

    def _prepare(self) -> None:
        if self._path is not None:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")  # survives a killed process, which is what we need
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in range(_VERSION + 1):
            raise sqlite3.DatabaseError(f"version {version} of the store, this program knows {_VERSION}")
        self._connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")  # writers wait for each other here, before they read
        end = "ROLLBACK"
        try:
            yield
            end = "COMMIT"
        finally:
            if self._connection.in_transaction:  # a full disk has ended it already
                self._connection.execute(end)
