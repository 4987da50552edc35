"""Train, validation and test: drawn by session, with all parts and sub-agents of a session on the same side.

A conversation is one context; a session is several of them after a compaction, a rewind or a call of a sub-agent. They
hold each other's text, so a split between them would ask about what was learnt by heart. The newest sessions are the
test, as a model is asked about work that comes after what it learnt from, and those before them the validation; by
project, whole projects are held out instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Literal, NamedTuple

from composer_replication.errors import InputError, explain
from composer_replication.types import Conversation

By = Literal["time", "project"]
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class Split(NamedTuple):
    """Ids of conversations; each stands on one side."""

    train: frozenset[str]
    validation: frozenset[str]
    test: frozenset[str]


@dataclass(slots=True)
class _Session:
    """Conversations that hang together, when the first of them began, and where it was held."""

    conversations: list[str]
    began: datetime
    project: str

    @property
    def draw(self) -> bytes:
        """An order of its own for what time does not tell apart: the same wherever and whenever it is asked for."""
        return sha256(min(self.conversations).encode()).digest()


def split_conversations(
    conversations: Iterable[Conversation], *, validation: float = 0.0, test: float = 0.0, by: By = "time"
) -> Split:
    """Shares of the sessions, at least one session (or project) for a share above 0, and one to train on."""
    units = _units(_sessions(conversations), by)
    num_sessions = sum(len(unit) for unit in units)
    sides: dict[str, list[_Session]] = {"test": [], "validation": []}
    for side, share in (("test", test), ("validation", validation)):
        wanted = math.ceil(num_sessions * share)
        while units and len(sides[side]) < wanted:
            sides[side] += units.pop()
    if num_sessions and not units:
        what = "sessions" if by == "time" else "projects"
        shares = (
            f"{1 - validation - test:.0%} of them to train on, {validation:.0%} for validation, {test:.0%} for test"
        )
        got = f"{num_sessions} session(s), and none left to train on"
        raise InputError(explain("split", got=got, expected=f"more {what}: {shares}", fix="Set both shares to 0."))
    left = [session for unit in units for session in unit]
    return Split(_ids(left), _ids(sides["validation"]), _ids(sides["test"]))


def _ids(sessions: Iterable[_Session]) -> frozenset[str]:
    return frozenset(identity for session in sessions for identity in session.conversations)


def _units(sessions: list[_Session], by: By) -> list[list[_Session]]:
    """What may not be parted, the first to be held out last."""
    if by == "time":
        return [[session] for session in sorted(sessions, key=lambda each: (each.began, each.draw))]
    projects: dict[str, list[_Session]] = {}
    for session in sessions:
        projects.setdefault(session.project, []).append(session)
    return [projects[name] for name in sorted(projects, key=lambda name: sha256(name.encode()).digest())]


def _sessions(conversations: Iterable[Conversation]) -> list[_Session]:
    """Conversations joined through links and session ids; a link to what is not there joins all that name it."""
    home: dict[str, str] = {}

    def find(name: str) -> str:
        while home.setdefault(name, name) != name:
            home[name] = home[home[name]]
            name = home[name]
        return name

    seen: dict[str, tuple[datetime, str]] = {}
    for each in conversations:
        seen[each.id] = (_began(each), each.cwd or "")
        for other in (
            each.parent and f"conversation {each.parent.conversation_id}",
            each.session_id and f"session {each.session_id}",
        ):
            if other:
                home[find(f"conversation {each.id}")] = find(other)
    found: dict[str, _Session] = {}
    for identity, (began, project) in seen.items():
        session = found.setdefault(find(f"conversation {identity}"), _Session([], began, project))
        session.conversations.append(identity)
        if began < session.began:
            session.began, session.project = began, project
    return list(found.values())


def _began(conversation: Conversation) -> datetime:
    for turn in conversation.turns:
        if turn.timestamp:
            try:
                found = datetime.fromisoformat(turn.timestamp)
            except ValueError:
                continue
            return found if found.tzinfo else found.replace(tzinfo=UTC)
    return _LONG_AGO
