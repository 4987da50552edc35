"""Removes sessions from the files beside a replay's calls: the store of paid answers, and the tools of each session.

`teacher_cache.sqlite` records for which sessions each answer was asked, and an answer stays as long as one of them
does. Stores of earlier versions lack this; the next replay that finds an answer there records it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Set
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from composer_replication.atomic import staged_path
from composer_replication.canonical_json import decode, encode_as_written
from composer_replication.runs import RunDir
from composer_replication.runs.journal import Journal
from composer_replication.teacher_replay import tables
from composer_replication.types import Conversation

STORE = "teacher_cache"
OWN = frozenset({STORE, "asked_tools"})
"""The artefacts that are cleaned here."""
# A session that was compacted or renamed has other ids than when it was asked about; its answers have no owner.
_UNOWNED = (
    "SELECT COUNT(*) FROM replies WHERE key NOT IN (SELECT key FROM reply_owners JOIN alive USING (session)) "
    "AND key NOT IN (SELECT key FROM reply_owners JOIN forgotten USING (session))"
)
_KEPT = "SELECT COUNT(*) FROM replies WHERE key IN (SELECT key FROM reply_owners JOIN alive USING (session))"
_DROP = "DELETE FROM replies WHERE key NOT IN (SELECT key FROM reply_owners JOIN alive USING (session))"
# An entry of the books that names a reply promises that the reply exists.
_RELEASE = "UPDATE bills SET key = NULL, digest = NULL WHERE key NOT IN (SELECT key FROM replies)"


@dataclass(frozen=True, slots=True)
class AnswersOfRun:
    """How many answers stay with remaining sessions, are removed with forgotten ones, and have no known owner."""

    num_kept: int
    num_gone: int
    num_unowned: int


def count_answers(run: RunDir, alive: Set[str], forgotten_ids: Set[str]) -> AnswersOfRun | None:
    """Return how many answers would stay and go, without changing anything; None if there is no store.

    A link to a store does not count: other runs may share its target, and their answers are not ours to delete.
    """
    path = run.path(STORE)
    if path.is_symlink() or not path.exists():
        return None
    try:
        with _opened(path, alive, forgotten_ids) as connection:
            return _count(connection)
    except sqlite3.DatabaseError:
        return None


def forget(run: RunDir, forgotten_ids: Set[str], alive: Set[str]) -> None:
    """Delete all answers without a remaining session, and the tools recorded for forgotten sessions.

    The amount spent is preserved, since the cap covers all that the store ever spent.
    """
    if count_answers(run, alive, forgotten_ids) is not None:
        _keep_answers(run.path(STORE), alive)
    _forget_asked(run, forgotten_ids)


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


# ---- the tools that a session was asked about with

# A request holds the tools of the session's agent, which are inferred from all its sessions. Another session may add a
# tool or change the order of arguments; then cached answers to the other sessions would not be found, and would be paid
# for again. So a session keeps the tools of its first replay as long as it calls no other tool.

_NAME = "asked_tools"
Tool = dict[str, Any]


class AskedTools:
    """The recorded tools of a run; `keep` adds to them."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lists: dict[str, list[Tool]] = {}
        self._digest_of: dict[str, str] = {}
        for row in _rows(run):
            digest, text = str(row["digest"]), row["tools"]
            if isinstance(text, str):
                self._lists[digest] = cast("list[Tool]", decode(text.encode()))
            self._digest_of[str(row["conversation_id"])] = digest

    def of(self, conversation: Conversation, current: list[Tool]) -> list[Tool]:
        """Return the tools for asking about a session: those of the first time, or the current ones."""
        first_tools = self._lists.get(self._digest_of.get(conversation.id, ""))
        if first_tools is None:
            return current
        called = {call.name for turn in conversation.turns for call in turn.calls}
        return first_tools if called & _names(current) <= _names(first_tools) else current

    def keep(self, conversation_id: str, tools: list[Tool]) -> None:
        """Record the tools of a session, before it is asked about."""
        text = encode_as_written(tools, where="tools").decode()
        digest = sha256(text.encode()).hexdigest()
        if self._digest_of.get(conversation_id) == digest:
            return
        is_new = digest not in self._lists
        with self._run.append_jsonl(_NAME) as journal:
            journal.append({"conversation_id": conversation_id, "digest": digest, "tools": text if is_new else None})
        self._lists[digest], self._digest_of[conversation_id] = tools, digest


def _forget_asked(run: RunDir, forgotten_ids: Iterable[str]) -> None:
    """Remove sessions, and the tools that only they were asked about with."""
    forgotten_ids, rows = set(forgotten_ids), _rows(run)
    texts = {row["digest"]: row["tools"] for row in rows if row["tools"] is not None}
    last = {row["conversation_id"]: row["digest"] for row in rows if row["conversation_id"] not in forgotten_ids}
    path = run.path(_NAME)
    if not last:
        path.unlink(missing_ok=True)
        return
    # Replaced at once: a crash must not lose the tools of the remaining sessions.
    with staged_path(path) as unfinished, Journal(unfinished) as journal:
        for name, digest in last.items():
            journal.append({"conversation_id": name, "digest": digest, "tools": texts.pop(digest, None)})


def _rows(run: RunDir) -> list[dict[str, object]]:
    return run.read_journal(_NAME).rows if run.path(_NAME).exists() else []


def _names(tools: Iterable[Tool]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}
