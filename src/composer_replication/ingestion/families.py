"""The files of one session as a unit of work: read together, scrubbed with one numbering, ingested anywhere.

A family is a main log and the sub-agents in the folder of its name; any other file is a family of its own. Families do
not know each other, so they can be read in any order, in other processes, or not at all when nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from composer_replication.ingestion.cache.unplaced import unplaced_in
from composer_replication.ingestion.reading.source import IngestReport, SourceFile
from composer_replication.types import Conversation

_SUBAGENTS = "subagents"


class FileStamp(NamedTuple):
    """What says that a file is the same one, and unchanged."""

    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Family:
    """The files of one session below one root; `name` is that of its main log, whether or not the log is there."""

    name: str
    sources: tuple[SourceFile, ...]

    def stamp(self) -> tuple[FileStamp, ...]:
        """Of each file: a log that has not changed need not be read again."""
        return tuple(_stamp_of(source.path) for source in self.sources)

    def files(self) -> frozenset[str]:
        """The files themselves, however they were named."""
        return frozenset(str(source.path.resolve()) for source in self.sources)


def families(sources: Iterable[SourceFile]) -> list[Family]:
    """All families in the order of their names."""
    found: dict[str, list[SourceFile]] = {}
    for source in sources:
        folder, _, _ = source.name.rpartition("/")
        home = folder.removesuffix(f"/{_SUBAGENTS}") + ".jsonl" if source.path.parent.name == _SUBAGENTS else ""
        found.setdefault(home or source.name, []).append(source)
    return [Family(name, tuple(sorted(found[name], key=lambda each: file_order(each.name)))) for name in sorted(found)]


def file_order(name: str) -> tuple[bool, str]:
    """The main log first: its calls are what the others hang on."""
    return f"{_SUBAGENTS}/" in name, name


Reader = Callable[[SourceFile, IngestReport], Iterator[Conversation]]


def read_family(family: Family, report: IngestReport, read: Reader) -> Iterator[Conversation]:
    """Its conversations, each sub-agent with the very turn and call that started it where the main log names it."""
    return (conversation for conversation, _ in read_with_files(family, report, read))


def read_with_files(family: Family, report: IngestReport, read: Reader) -> Iterator[tuple[Conversation, str]]:
    """The same, each with the name of its file."""
    found = [(each, source.name) for source in family.sources for each in read(source, report)]
    conversations = [conversation for conversation, _ in found]
    started = {
        agent: (conversation.id, turn.id, call_id)
        for conversation in conversations
        for turn in conversation.turns
        for call_id, agent in turn.extra.get("agents", {}).items()
    }
    for conversation, file in found:
        link, agent = conversation.parent, conversation.extra.get("agent_id")
        if link is not None and agent in started:
            where, turn_id, call_id = started[agent]
            link = replace(link, conversation_id=where, turn_id=turn_id, call_id=call_id)
            conversation = replace(conversation, parent=link)
        yield conversation, file


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
    counts.update(unplaced_in(conversation))


def _stamp_of(path: Path) -> FileStamp:
    try:
        found = path.stat()
    except OSError:
        return FileStamp(0, 0, 0)
    return FileStamp(found.st_size, found.st_mtime_ns, found.st_ino)
