"""The files of one session as a unit of work: read together, scrubbed with one numbering, ingested anywhere.

A family is a main log and the sub-agents in the folder of its name; any other file is a family of its own. Families do
not know each other, so they can be read in any order, in other processes, or not at all when nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from composer_replication.ingestion.source import IngestReport, SourceFile
from composer_replication.types import Conversation

_SUBAGENTS = "subagents"


@dataclass(frozen=True, slots=True)
class Family:
    """The files of one session below one root; `name` is that of its main log, whether or not the log is there."""

    name: str
    sources: tuple[SourceFile, ...]

    @property
    def num_bytes(self) -> int:
        """What the files hold now; a file that is gone holds nothing."""
        return sum(size for size, _ in self.stamp())

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Size and modification time of each file: a log that has not changed need not be read again."""
        return tuple(_size_and_time(source.path) for source in self.sources)


def families(sources: Iterable[SourceFile]) -> list[Family]:
    """All families in the order of their names."""
    found: dict[str, list[SourceFile]] = {}
    for source in sources:
        folder, _, _ = source.name.rpartition("/")
        home = folder.removesuffix(f"/{_SUBAGENTS}") + ".jsonl" if source.path.parent.name == _SUBAGENTS else ""
        found.setdefault(home or source.name, []).append(source)
    # The main log first: its calls are what the others hang on.
    return [
        Family(name, tuple(sorted(found[name], key=lambda each: (each.path.parent.name == _SUBAGENTS, each.name))))
        for name in sorted(found)
    ]


Reader = Callable[[SourceFile, IngestReport], Iterator[Conversation]]


def read_family(family: Family, report: IngestReport, read: Reader) -> Iterator[Conversation]:
    """Its conversations, each sub-agent with the very turn and call that started it where the main log names it."""
    conversations = [each for source in family.sources for each in read(source, report)]
    started = {
        agent: (conversation.id, turn.id, call_id)
        for conversation in conversations
        for turn in conversation.turns
        for call_id, agent in turn.extra.get("agents", {}).items()
    }
    for conversation in conversations:
        link, agent = conversation.parent, conversation.extra.get("agent_id")
        if link is not None and agent in started:
            where, turn_id, call_id = started[agent]
            link = replace(link, conversation_id=where, turn_id=turn_id, call_id=call_id)
            conversation = replace(conversation, parent=link)
        yield conversation


def count(conversation: Conversation, report: IngestReport) -> None:
    """Add what a conversation holds to the counts of a report."""
    counts = report.counts
    counts["conversations"] += 1
    counts["sessions"] += conversation.parent is None
    counts["turns"] += len(conversation.turns)
    for turn in conversation.turns:
        counts["assistant turns"] += turn.role == "assistant"
        counts["calls"] += len(turn.calls)
        counts["results"] += len(turn.results)
        counts["errors"] += sum(result.is_error is True for result in turn.results)


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
