"""Remove sessions from the store of paid answers and from the recorded tools of a replay.

`teacher_cache.sqlite` records the sessions of each answer, and an answer stays as long as one of them does. Stores of
earlier versions lack these records; the next replay that uses an answer adds them.
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
CLEANED_ARTEFACTS = frozenset({STORE, "asked_tools"})
"""The artefacts from which this module removes sessions."""
# A session that was compacted or renamed has a different id than when it was asked about, so its answers have no owner.
_NUM_UNOWNED = (
    "SELECT COUNT(*) FROM replies WHERE key NOT IN (SELECT key FROM reply_owners JOIN remaining USING (session)) "
    "AND key NOT IN (SELECT key FROM reply_owners JOIN forgotten USING (session))"
)
_NUM_REMAINING = (
    "SELECT COUNT(*) FROM replies WHERE key IN (SELECT key FROM reply_owners JOIN remaining USING (session))"
)
_DELETE_ANSWERS = "DELETE FROM replies WHERE key NOT IN (SELECT key FROM reply_owners JOIN remaining USING (session))"
# A bill with a key asserts that the reply exists.
_UNLINK_BILLS = "UPDATE bills SET key = NULL, digest = NULL WHERE key NOT IN (SELECT key FROM replies)"


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """The numbers of stored answers that stay because a remaining session uses them, that are removed with forgotten
    sessions, and that belong to no session.
    """

    num_kept: int
    num_removed: int
    num_unowned: int


def count_answers(run: RunDir, remaining: Set[str], forgotten_ids: Set[str]) -> AnswerCounts | None:
    """Count the answers that would stay or be removed, without changing anything; return None if the run has no store.

    A symbolic link does not count as a store: other runs may share its target, whose answers must not be deleted.
    """
    path = run.path(STORE)
    if path.is_symlink() or not path.exists():
        return None
    try:
        with _open_store(path, remaining, forgotten_ids) as connection:
            return _count(connection)
    except sqlite3.DatabaseError:
        return None


def forget(run: RunDir, forgotten_ids: Set[str], remaining: Set[str]) -> None:
    """Delete all answers without a remaining session, and the tools recorded for forgotten sessions.

    The amount spent is preserved, because the cap covers everything that the store ever spent.
    """
    if count_answers(run, remaining, forgotten_ids) is not None:
        _delete_answers(run.path(STORE), remaining)
    _forget_asked(run, forgotten_ids)


def _delete_answers(path: Path, remaining: Set[str]) -> None:
    with _open_store(path, remaining) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(tables.CREATE_REPLY_OWNERS)
        connection.execute(_DELETE_ANSWERS)
        connection.execute("DELETE FROM reply_owners WHERE session NOT IN (SELECT session FROM remaining)")
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'bills'").fetchone():
            connection.execute(_UNLINK_BILLS)
        connection.execute("COMMIT")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _count(connection: sqlite3.Connection) -> AnswerCounts:
    total = connection.execute("SELECT COUNT(*) FROM replies").fetchone()[0]
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'reply_owners'").fetchone():
        return AnswerCounts(0, 0, total)
    num_kept, unowned = (connection.execute(query).fetchone()[0] for query in (_NUM_REMAINING, _NUM_UNOWNED))
    return AnswerCounts(num_kept, total - num_kept - unowned, unowned)


@contextmanager
def _open_store(path: Path, remaining: Set[str], forgotten: Set[str] = frozenset()) -> Generator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=60)
    try:
        connection.execute("PRAGMA temp_store = MEMORY")
        for name, sessions in (("remaining", remaining), ("forgotten", forgotten)):
            connection.execute(f"CREATE TEMP TABLE {name} (session TEXT PRIMARY KEY)")
            connection.executemany(f"INSERT INTO {name} VALUES (?)", ((session,) for session in sorted(sessions)))  # noqa: S608
        yield connection
    finally:
        connection.close()


# ---- the tools that a session was asked about with

# A request contains the tools of the session's agent, which are inferred from all sessions of that agent. A new session
# may add a tool or change the order of arguments; then the cached answers for other sessions would not be found and be
# paid for again. So a session keeps the tools of its first replay as long as it calls no other tool.

_NAME = "asked_tools"
Tool = dict[str, Any]


class AskedTools:
    """A record of the tools that were sent to teachers with each session of a run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tools_by_digest: dict[str, list[Tool]] = {}
        self._digests: dict[str, str] = {}
        for row in _rows(run):
            digest, text = str(row["digest"]), row["tools"]
            if isinstance(text, str):
                self._tools_by_digest[digest] = cast("list[Tool]", decode(text.encode()))
            self._digests[str(row["conversation_id"])] = digest

    def tools_for(self, conversation: Conversation, current: list[Tool]) -> list[Tool]:
        """Return the tools to send with a session: the recorded tools if they suffice, otherwise the current ones."""
        first_tools = self._tools_by_digest.get(self._digests.get(conversation.id, ""))
        if first_tools is None:
            return current
        called = {call.name for turn in conversation.turns for call in turn.calls}
        return first_tools if called & _names(current) <= _names(first_tools) else current

    def record(self, conversation_id: str, tools: list[Tool]) -> None:
        """Record the tools of a session before teachers are asked about it."""
        text = encode_as_written(tools, where="tools").decode()
        digest = sha256(text.encode()).hexdigest()
        if self._digests.get(conversation_id) == digest:
            return
        is_new = digest not in self._tools_by_digest
        with self._run.append_jsonl(_NAME) as journal:
            journal.append({"conversation_id": conversation_id, "digest": digest, "tools": text if is_new else None})
        self._tools_by_digest[digest], self._digests[conversation_id] = tools, digest


def _forget_asked(run: RunDir, forgotten_ids: Iterable[str]) -> None:
    """Remove forgotten sessions from the recorded tools, and the tools that no remaining session uses."""
    forgotten_ids, rows = set(forgotten_ids), _rows(run)
    texts = {row["digest"]: row["tools"] for row in rows if row["tools"] is not None}
    last = {row["conversation_id"]: row["digest"] for row in rows if row["conversation_id"] not in forgotten_ids}
    path = run.path(_NAME)
    if not last:
        path.unlink(missing_ok=True)
        return
    # Replaced atomically, because a crash must not lose the tools of the remaining sessions.
    with staged_path(path) as unfinished, Journal(unfinished) as journal:
        for name, digest in last.items():
            journal.append({"conversation_id": name, "digest": digest, "tools": texts.pop(digest, None)})


def _rows(run: RunDir) -> list[dict[str, object]]:
    return run.read_journal(_NAME).rows if run.path(_NAME).exists() else []


def _names(tools: Iterable[Tool]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}
