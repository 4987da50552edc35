"""Sessions one after the other: what the list says of each, and its conversations once all of them have been read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from composer_replication.errors import RunError
from composer_replication.report.findings import failures
from composer_replication.report.records import RunRecords
from composer_replication.runs.conventions import project_of
from composer_replication.runs.conversations import read_conversations
from composer_replication.types import Conversation

_MAX_NAME = 110


@dataclass(slots=True)
class Session:
    """A line of the list. `number` is its place in it, from 1; `kinds` are those of its failures."""

    id: str
    name: str
    project: str
    began: str
    side: str
    format: str
    conversations: list[str] = field(default_factory=list[str])
    num_turns: int = 0
    num_failures: int = 0
    num_taught: int = 0
    num_pairs: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])
    number: int = 0

    @property
    def key(self) -> str:
        return f"session-{self.number}"


class SessionList(NamedTuple):
    """All sessions, the earliest first; and by conversation, whose session and project it is."""

    sessions: list[Session]
    of_conversation: Mapping[str, Session]
    projects: Mapping[str, str]


def list_sessions(records: RunRecords) -> SessionList:
    """One pass over the conversations; of none where they cannot be read."""
    sessions: dict[str, Session] = {}
    home: dict[str, Session] = {}
    projects: dict[str, str] = {}
    for conversation in _read(records, verify=True):
        session = _session_of(conversation, records, sessions, home)
        home[conversation.id] = session
        projects[conversation.id] = project_of(conversation)
        session.conversations.append(conversation.id)
        session.num_turns += len(conversation.turns)
        began = next((turn.timestamp for turn in conversation.turns if turn.timestamp), "") or ""
        session.began = min(filter(None, (session.began, began)), default="")
    _count(records, home)
    ordered = sorted(sessions.values(), key=lambda session: (session.began, session.id))
    for number, session in enumerate(ordered, start=1):
        session.number = number
    return SessionList(ordered, home, projects)


def _session_of(
    conversation: Conversation, records: RunRecords, sessions: dict[str, Session], home: Mapping[str, Session]
) -> Session:
    """As the split says; without one, by the log's own id or the conversation that it hangs on."""
    row = records.sides.get(conversation.id)
    parent = home.get(conversation.parent.conversation_id) if conversation.parent else None
    identity = row["session"] if row else parent.id if parent else conversation.session_id or conversation.id
    if identity not in sessions:
        side = row["side"] if row else ""
        name = _name(conversation)
        sessions[identity] = Session(identity, name, project_of(conversation), "", side, conversation.format)
    return sessions[identity]


def _name(conversation: Conversation) -> str:
    """Its title, or what was asked for first."""
    prompts = (turn.text for turn in conversation.turns if turn.role == "user" and turn.origin == "human")
    text = " ".join((conversation.title or next(filter(str.strip, prompts), "") or conversation.id).split())
    return text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…"


def _count(records: RunRecords, home: Mapping[str, Session]) -> None:
    for site, hint in failures(records):
        if session := home.get(site.conversation_id):
            session.num_failures += 1
            session.num_taught += site.is_kept and hint is not None
            session.kinds[site.kind] += 1
    for row in records.pairs:
        if session := home.get(row["conversation_id"]):
            session.num_pairs += 1


def conversations_by_session(
    records: RunRecords, listed: SessionList
) -> Iterator[tuple[Session, Sequence[Conversation]]]:
    """Each session with its conversations, as soon as the last of them is read; no more than the open ones are held."""
    waiting: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in _read(records, verify=False):
        session = listed.of_conversation[conversation.id]
        waiting[session.id].append(conversation)
        if len(waiting[session.id]) == len(session.conversations):
            yield session, waiting.pop(session.id)


def _read(records: RunRecords, *, verify: bool) -> Iterator[Conversation]:
    if not records.has("conversations"):
        return
    try:
        yield from read_conversations(records.run, verify=verify)
    except RunError as error:
        records.unreadable["conversations"] = str(error)
