"""Sessions out of what a replay keeps beside its calls: the store of paid answers, and the tools they were asked with.

`teacher_cache.sqlite` says for which sessions each answer was asked, and an answer stays as long as one of them does.
Stores of earlier versions do not say whose an answer is; the next replay that finds one there writes it down.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Set
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from composer_replication.canonical_json import decode, encode_as_written
from composer_replication.runs import RunDir
from composer_replication.runs.journal import Journal
from composer_replication.teacher_replay import tables
from composer_replication.types import Conversation

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
    _forget_asked(run, gone)


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


# With which tools teachers were asked about a session, so that what was paid for once is found again.
#
# A request holds the tools of the session's agent, and these are inferred from all its sessions: one more session may
# add a tool, or see an argument first that came second before. The answers to the others' requests would then be
# found no more, and paid for anew. So a session is asked about with the tools of its first time, as long as it calls
# no other.

_NAME = "asked_tools"
Tool = dict[str, Any]


class AskedTools:
    """Those of a run; `keep` adds to them."""

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
        """The tools to ask about a session with: those of the first time, or the current ones."""
        first_tools = self._lists.get(self._digest_of.get(conversation.id, ""))
        if first_tools is None:
            return current
        called = {call.name for turn in conversation.turns for call in turn.calls}
        return first_tools if called & _names(current) <= _names(first_tools) else current

    def keep(self, conversation_id: str, tools: list[Tool]) -> None:
        """Write down what a session is asked about with, before it is."""
        text = encode_as_written(tools, where="tools").decode()
        digest = sha256(text.encode()).hexdigest()
        if self._digest_of.get(conversation_id) == digest:
            return
        is_new = digest not in self._lists
        with self._run.append_jsonl(_NAME) as journal:
            journal.append({"conversation_id": conversation_id, "digest": digest, "tools": text if is_new else None})
        self._lists[digest], self._digest_of[conversation_id] = tools, digest


def _forget_asked(run: RunDir, gone: Iterable[str]) -> None:
    """Take sessions out, and the tools that no other was asked about with."""
    gone, rows = set(gone), _rows(run)
    texts = {row["digest"]: row["tools"] for row in rows if row["tools"] is not None}
    last = {row["conversation_id"]: row["digest"] for row in rows if row["conversation_id"] not in gone}
    path = run.path(_NAME)
    if not last:
        path.unlink(missing_ok=True)
        return
    # Beside it and then over it: a crash between the two must not cost the answers of those who stay.
    beside = path.with_name(f".{path.name}.tmp")
    beside.unlink(missing_ok=True)
    with Journal(beside) as journal:
        for name, digest in last.items():
            journal.append({"conversation_id": name, "digest": digest, "tools": texts.pop(digest, None)})
    beside.replace(path)


def _rows(run: RunDir) -> list[dict[str, object]]:
    return run.read_journal(_NAME).rows if run.path(_NAME).exists() else []


def _names(tools: Iterable[Tool]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}
