"""Whose the paid answers of a run are: `teacher_cache.sqlite` says for which sessions each was asked.

An answer stays as long as one of its sessions does. Stores of earlier versions do not say whose an answer is; the next
replay that finds one there writes it down.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TABLE = (
    "CREATE TABLE IF NOT EXISTS reply_owners (key BLOB NOT NULL, session TEXT NOT NULL, PRIMARY KEY (key, session)) "
    "WITHOUT ROWID;"
)
# A session that was compacted or went on under another name has other ids than when it was asked for: nobody's, too.
_UNOWNED = (
    "SELECT COUNT(*) FROM replies WHERE key NOT IN (SELECT key FROM reply_owners JOIN alive USING (session)) "
    "AND key NOT IN (SELECT key FROM reply_owners JOIN forgotten USING (session))"
)
_KEPT = "SELECT COUNT(*) FROM replies WHERE key IN (SELECT key FROM reply_owners JOIN alive USING (session))"
_DROP = "DELETE FROM replies WHERE key NOT IN (SELECT key FROM reply_owners JOIN alive USING (session))"

# An entry of the books that names a reply promises that it is there.
_RELEASE = "UPDATE bills SET key = NULL, digest = NULL WHERE key NOT IN (SELECT key FROM replies)"


@dataclass(frozen=True, slots=True)
class AnswersOfRun:
    """How many answers stay with the sessions that stay, go with those that go, and belong to nobody known."""

    num_kept: int
    num_gone: int
    num_unowned: int


def ascribe(connection: sqlite3.Connection, key: bytes, session: str) -> None:
    """Write down that an answer is this session's too; within whatever transaction is open."""
    row = (key, session)
    known = connection.execute("SELECT 1 FROM reply_owners WHERE key = ? AND session = ?", row).fetchone()
    if known is None:  # looked up first: reading takes no lock
        connection.execute("INSERT OR IGNORE INTO reply_owners VALUES (?, ?)", row)


def count_answers(path: Path, alive: Set[str], forgotten: Set[str]) -> AnswersOfRun | None:
    """What would stay without the forgotten sessions; None where the file is no store. Nothing is changed."""
    try:
        with _opened(path, alive, forgotten) as connection:
            return _count(connection)
    except sqlite3.DatabaseError:
        return None


def keep_answers(path: Path, alive: Set[str]) -> None:
    """Take every answer out that no living session owns, for good. What was spent stays, or a cap would begin anew."""
    with _opened(path, alive) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(TABLE)
        connection.execute(_DROP)
        connection.execute("DELETE FROM reply_owners WHERE session NOT IN (SELECT session FROM alive)")
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'bills'").fetchone():
            connection.execute(_RELEASE)
        connection.execute("COMMIT")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _count(connection: sqlite3.Connection) -> AnswersOfRun:
    total = connection.execute("SELECT COUNT(*) FROM replies").fetchone()[0]
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'reply_owners'").fetchone():
        return AnswersOfRun(0, 0, total)
    kept, unowned = (connection.execute(query).fetchone()[0] for query in (_KEPT, _UNOWNED))
    return AnswersOfRun(kept, total - kept - unowned, unowned)


@contextmanager
def _opened(path: Path, alive: Set[str], forgotten: Set[str] = frozenset()) -> Generator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=60)
    try:
        connection.execute("PRAGMA temp_store = MEMORY")
        for name, sessions in (("alive", alive), ("forgotten", forgotten)):
            connection.execute(f"CREATE TEMP TABLE {name} (session TEXT PRIMARY KEY)")
            connection.executemany(f"INSERT INTO {name} VALUES (?)", ((each,) for each in sorted(sessions)))  # noqa: S608
        yield connection
    finally:
        connection.close()
