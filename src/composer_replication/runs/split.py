"""The split of a run's sessions into train, validation and test, with all conversations of a session in the same one.

A session has several conversations after a compaction, a rewind or a subagent call. They share text, so a split between
them would test what was memorized. The newest sessions are the test split, since a model is used for work that comes
after its training data, and those before them the validation split. With `by="project"`, whole projects are held out.

`crf split` writes the split. Every later step that trains or selects something reads it with `sides_of`.
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
    """The ids of conversations in each split."""

    train: frozenset[str]
    validation: frozenset[str]
    test: frozenset[str]


class PlacedConversation(NamedTuple):
    """A row of `split.jsonl`: a conversation's split and session, and when and in which project the session began.

    `near_duplicates` are turns of a test session whose context is nearly the same as one in a training session.
    """

    conversation_id: str
    session: str
    side: Side
    began: str | None
    project: str
    near_duplicates: tuple[str, ...] = ()


@dataclass(slots=True)
class _SplitSession:
    """The conversations of a session, when the first of them began, and in which project."""

    conversations: list[str]
    names: set[str]
    began: datetime
    project: str

    @property
    def name(self) -> str:
        return min(self.names or self.conversations)

    @property
    def draw(self) -> bytes:
        """A stable random order for sessions that began at the same time."""
        return sha256(min(self.conversations).encode()).digest()


def sides_of(run: RunDir) -> Split | None:
    """Return which conversations are trained on and which are held out; None for a run that was never split."""
    rows = read_split(run)
    return None if rows is None else _split_of(rows)


def held_out_of(run: RunDir) -> frozenset[str]:
    """Return the conversations of the test split; empty for a run that was never split."""
    sides = sides_of(run)
    return frozenset() if sides is None else sides.test


def read_split(run: RunDir) -> list[PlacedConversation] | None:
    """Return the rows of `split.jsonl`, in its order; None for a run that was never split."""
    if not run.path(NAME).exists():
        return None
    if not run.is_current(NAME):
        fix = f"Run `crf split {run.root}` again."
        got, expected = "a split of other conversations", "that of the run's own"
        raise StaleArtefactError(explain(str(run.path(NAME)), got=got, expected=expected, fix=fix))
    rows = cast("Iterable[dict[str, Any]]", run.read_jsonl(NAME, schema=SCHEMA, version=VERSION))
    placed = (PlacedConversation(**row) for row in rows)
    return [row._replace(near_duplicates=tuple(row.near_duplicates)) for row in placed]


def required_split(run: RunDir) -> list[PlacedConversation]:
    """Return the rows of `split.jsonl`. Raises InputError without one: training sessions cannot evaluate a model."""
    rows = read_split(run)
    if rows is None:
        fix = f"Run `crf split {run.root}` and train again; or, for models that never saw the run, only the first."
        raise InputError(explain(f"{run.root}", got="no split", expected="sessions that are held out", fix=fix))
    return rows


def _split_of(rows: Iterable[PlacedConversation]) -> Split:
    sides: dict[str, set[str]] = {side: set() for side in Split._fields}
    for row in rows:
        sides[row.side].add(row.conversation_id)
    return Split(**{side: frozenset(ids) for side, ids in sides.items()})


def split_conversations(
    conversations: Iterable[Conversation], *, validation: float = 0.0, test: float = 0.0, by: By = "time"
) -> Split:
    """Split sessions by shares. A share above 0 gets at least one session (or project), and so does training."""
    return _split_of(place_conversations(conversations, validation=validation, test=test, by=by))


def place_conversations(
    conversations: Iterable[Conversation], *, validation: float = 0.0, test: float = 0.0, by: By = "time"
) -> list[PlacedConversation]:
    """Return the same split as rows, session by session."""
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
        got = f"{number}, and none left to train on"
        fix = (
            "Read more logs. To learn from all there is, with nothing held out to judge by: "
            "`--set split.test=0 --set split.validation=0`."
        )
        raise InputError(explain("split", got=got, expected=f"more {what}: {shares_text}", fix=fix))
    sides["train"] = [session for unit in units for session in unit]
    return [
        PlacedConversation(identity, session.name, side, _shown(session.began), session.project)
        for side in ("train", "validation", "test")
        for session in sides[side]
        for identity in session.conversations
    ]


def _units(sessions: list[_SplitSession], by: By) -> list[list[_SplitSession]]:
    """Return groups of sessions that stay together; the last group is held out first."""
    if by == "time":
        return [[session] for session in sorted(sessions, key=lambda session: (session.began, session.draw))]
    projects: dict[str, list[_SplitSession]] = {}
    for session in sessions:
        projects.setdefault(session.project, []).append(session)
    return [projects[name] for name in sorted(projects, key=lambda name: sha256(name.encode()).digest())]


def _sessions(conversations: Iterable[Conversation]) -> list[_SplitSession]:
    """Join conversations by links and session ids. A link to a missing conversation joins all that name it."""
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
