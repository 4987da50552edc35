"""Sessions out of what a replay keeps beside its calls: the store of paid answers, and the tools they were asked with.

`teacher_cache.sqlite` says for which sessions each answer was asked, and an answer stays as long as one of them does.
Stores of earlier versions do not say whose an answer is; the next replay that finds one there writes it down.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_replication.runs import RunDir
from composer_replication.teacher_replay.asked_tools import forget_asked
from composer_replication.teacher_replay.store import tables

STORE = "teacher_cache"
OWN = frozenset({STORE, "asked_tools"})
"""Artefacts that are cleaned here."""

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


def count_answers(run: RunDir, alive: Set[str], gone: Set[str]) -> AnswersOfRun | None:
    """What would stay without the sessions that go; None where there is no store. Nothing is changed.

    A link to a store is none: other runs may share what it leads to, and their answers are not ours to delete.
    """
    path = run.path(STORE)
    if path.is_symlink() or not path.exists():
        return None
    try:
        with _opened(path, alive, gone) as connection:
            return _count(connection)
    except sqlite3.DatabaseError:
        return None


def forget(run: RunDir, gone: Set[str], alive: Set[str]) -> None:
    """Take every answer out that no living session owns, for good, and what the others were not asked with.

    What was spent stays, or a cap would begin anew.
    """
    if count_answers(run, alive, gone) is not None:
        _keep_answers(run.path(STORE), alive)
    forget_asked(run, gone)


def _keep_answers(path: Path, alive: Set[str]) -> None:
    with _opened(path, alive) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(tables.OWNERS)
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
    num_kept, unowned = (connection.execute(query).fetchone()[0] for query in (_KEPT, _UNOWNED))
    return AnswersOfRun(num_kept, total - num_kept - unowned, unowned)


@contextmanager
def _opened(path: Path, alive: Set[str], forgotten: Set[str] = frozenset()) -> Generator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=60)
    try:
        connection.execute("PRAGMA temp_store = MEMORY")
        for name, sessions in (("alive", alive), ("forgotten", forgotten)):
            connection.execute(f"CREATE TEMP TABLE {name} (session TEXT PRIMARY KEY)")
            connection.executemany(f"INSERT INTO {name} VALUES (?)", ((session,) for session in sorted(sessions)))  # noqa: S608
        yield connection
    finally:
        connection.close()
