"""Split the sessions of a run into train, validation and test. All conversations of a session are in the same split.

After a compaction, a rewind or a subagent call, a session has several conversations. They share text, so a split
between them would measure memorization. The newest sessions are the test split, since a model is used for work that
comes after its training data, and those before them the validation split. With `by="project"`, whole projects are held
out.

`crf split` writes the split, and every later step that trains or selects reads it with `read_split`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Literal, NamedTuple, cast

from composer_replication.errors import InputError, StaleArtefactError, explain
from composer_replication.runs.directory import RunDir
from composer_replication.types import Conversation

SCHEMA, VERSION = "split", 1
NAME = "split"
By = Literal["time", "project"]
Side = Literal["train", "validation", "test"]
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class Split(NamedTuple):
    """The ids of the conversations in each split."""

    train: frozenset[str]
    validation: frozenset[str]
    test: frozenset[str]


class SplitRow(NamedTuple):
    """A row of `split.jsonl`: a conversation with its split, its session, and the time and project in which the session
    began.

    `near_duplicates` are turns of a test session whose context is nearly the same as that of a turn in a training run
    session.
    """

    conversation_id: str
    session: str
    side: Side
    began: str | None
    project: str
    near_duplicates: tuple[str, ...] = ()


@dataclass(slots=True)
class _SplitSession:
    """The conversations of a session, with the time and project in which the earliest of them began."""

    conversations: list[str]
    names: set[str]
    began: datetime
    project: str

    @property
    def name(self) -> str:
        return min(self.names or self.conversations)

    @property
    def draw(self) -> bytes:
        """A hash that puts sessions that began at the same time into a random but reproducible order."""
        return sha256(min(self.conversations).encode()).digest()


def read_split(run: RunDir) -> Split | None:
    """Return the ids of the conversations in each split; None if the run has no split."""
    rows = read_split_rows(run)
    return None if rows is None else _split_of(rows)


def read_test_ids(run: RunDir) -> frozenset[str]:
    """Return the ids of the conversations in the test split; empty if the run has no split."""
    sides = read_split(run)
    return frozenset() if sides is None else sides.test


def read_split_rows(run: RunDir) -> list[SplitRow] | None:
    """Return the rows of `split.jsonl` in order; None if the run has no split."""
    if not run.path(NAME).exists():
        return None
    if not run.is_current(NAME):
        fix = f"Run `crf split {run.root}` again."
        got, expected = "a split of other conversations", "a split of the run's conversations"
        raise StaleArtefactError(explain(str(run.path(NAME)), got=got, expected=expected, fix=fix))
    rows = cast("Iterable[dict[str, Any]]", run.read_jsonl(NAME, schema=SCHEMA, version=VERSION))
    placed = (SplitRow(**row) for row in rows)
    return [row._replace(near_duplicates=tuple(row.near_duplicates)) for row in placed]


def require_split_rows(run: RunDir) -> list[SplitRow]:
    """Return the rows of `split.jsonl`. Raises InputError if the run has no split."""
    rows = read_split_rows(run)
    if rows is None:
        fix = f"Run `crf split {run.root}` and train again. Models that never saw the run need not be trained again."
        raise InputError(explain(f"{run.root}", got="no split", expected="a split with held-out sessions", fix=fix))
    return rows


def _split_of(rows: Iterable[SplitRow]) -> Split:
    sides: dict[str, set[str]] = {side: set() for side in Split._fields}
    for row in rows:
        sides[row.side].add(row.conversation_id)
    return Split(**{side: frozenset(ids) for side, ids in sides.items()})


def split_conversations(
    conversations: Iterable[Conversation], *, validation: float = 0.0, test: float = 0.0, by: By = "time"
) -> Split:
    """Split sessions by fractions. Each split with a fraction above 0 gets at least one session (or project), and so
    does training.
    """
    return _split_of(split_into_rows(conversations, validation=validation, test=test, by=by))


def split_into_rows(
    conversations: Iterable[Conversation], *, validation: float = 0.0, test: float = 0.0, by: By = "time"
) -> list[SplitRow]:
    """Split sessions as `split_conversations` does, and return the rows of `split.jsonl`, grouped by session."""
    units = _units(_sessions(conversations), by)
    num_sessions = sum(len(unit) for unit in units)
    sides: dict[Side, list[_SplitSession]] = {"test": [], "validation": []}
    shares: dict[Side, float] = {"test": test, "validation": validation}
    for side, share in shares.items():
        quota = math.ceil(num_sessions * share)
        while units and len(sides[side]) < quota:
            sides[side] += units.pop()
    if num_sessions and not units:
        what = "sessions" if by == "time" else "projects"
        shares_text = (
            f"{1 - validation - test:.0%} of them to train on, {validation:.0%} for validation, {test:.0%} for test"
        )
        number = f"{num_sessions} session" + ("" if num_sessions == 1 else "s")
        got = f"{number}, of which none is left to train on"
        fix = (
            "Ingest more logs. To train on everything and evaluate nothing, use "
            "`--set split.test=0 --set split.validation=0`."
        )
        raise InputError(explain("split", got=got, expected=f"more {what}: {shares_text}", fix=fix))
    sides["train"] = [session for unit in units for session in unit]
    return [
        SplitRow(identity, session.name, side, _shown(session.began), session.project)
        for side in ("train", "validation", "test")
        for session in sides[side]
        for identity in session.conversations
    ]


def _units(sessions: list[_SplitSession], by: By) -> list[list[_SplitSession]]:
    """Return groups of sessions that must stay in one split. The last group is the first to be held out."""
    if by == "time":
        return [[session] for session in sorted(sessions, key=lambda session: (session.began, session.draw))]
    projects: dict[str, list[_SplitSession]] = {}
    for session in sessions:
        projects.setdefault(session.project, []).append(session)
    return [projects[name] for name in sorted(projects, key=lambda name: sha256(name.encode()).digest())]


def _sessions(conversations: Iterable[Conversation]) -> list[_SplitSession]:
    """Group conversations into sessions. Conversations with the same parent, even a missing one, or the same session
    id belong together.
    """
    home: dict[str, str] = {}

    def find(name: str) -> str:
        while home.setdefault(name, name) != name:
            home[name] = home[home[name]]
            name = home[name]
        return name

    facts_by_id: dict[str, tuple[datetime, str, str | None]] = {}
    for conversation in conversations:
        facts_by_id[conversation.id] = (_began(conversation), conversation.cwd or "", conversation.session_id)
        for linked_name in (
            conversation.parent and f"conversation {conversation.parent.conversation_id}",
            conversation.session_id and f"session {conversation.session_id}",
        ):
            if linked_name:
                home[find(f"conversation {conversation.id}")] = find(linked_name)
    sessions: dict[str, _SplitSession] = {}
    for identity, (began, project, name) in facts_by_id.items():
        session = sessions.setdefault(find(f"conversation {identity}"), _SplitSession([], set(), began, project))
        session.conversations.append(identity)
        session.names |= {name} if name else set()
        if began < session.began:
            session.began, session.project = began, project
    return list(sessions.values())


def _began(conversation: Conversation) -> datetime:
    for turn in conversation.turns:
        if turn.timestamp:
            try:
                timestamp = datetime.fromisoformat(turn.timestamp)
            except ValueError:
                continue
            return timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)
    return _LONG_AGO


def _shown(began: datetime) -> str | None:
    return None if began == _LONG_AGO else began.isoformat()
