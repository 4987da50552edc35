"""Every format in one table: which one a file is, and its conversations, those of a family linked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from composer_replication.errors import InputError, explain
from composer_replication.ingestion.discovery import SUFFIXES, Family, discover, families
from composer_replication.ingestion.reading.counts import counts_of
from composer_replication.ingestion.reading.source import IngestReport, SourceFile
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.privacy import Scrubber
from composer_replication.types import Conversation

# In the order they are tried: the most particular first.
FORMATS = (
    "claude_code",
    "codex",
    "inspect_eval",
    "atif",
    "opencode",
    "gemini",
    "openhands",
    "sweagent",
    "mini_sweagent",
    "openai_messages",
)
_HEAD_BYTES = 64 * 1024
_KINDS = " or ".join(sorted(SUFFIXES))


class Ingester(Protocol):
    """What every format's module offers."""

    FORMAT: str

    def sniff(self, head: bytes, path: Path) -> bool: ...

    def read(self, source: SourceFile, report: IngestReport) -> Iterator[Conversation]: ...


def ingester(name: str) -> Ingester:
    if name not in FORMATS:
        raise InputError(explain("format", got=repr(name), expected=f"one of {', '.join(FORMATS)}"))
    return cast("Ingester", import_module(f"composer_replication.ingestion.formats.{name}"))


def detect(path: Path) -> Ingester | None:
    """The format of a file by its content, or None."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return next((candidate for candidate in map(ingester, FORMATS) if candidate.sniff(head, path)), None)


def ingest(
    paths: Iterable[str | Path],
    report: IngestReport,
    *,
    scrubber: Scrubber | None,
    exclude: Sequence[str] = (),
    follow_links: bool = False,
) -> Iterator[Conversation]:
    """Conversations of all sessions below `paths`, scrubbed, sub-agents linked to the call that started them.

    `scrubber=None` leaves secrets in: the caller has said so. A path without any session is an error.
    """
    for path in map(Path, paths):
        has_session = False
        for family in families(discover(path, report, exclude=exclude, follow_links=follow_links)):
            scope = None if scrubber is None else scrubber.scope()
            for conversation in read_family(family, report):
                has_session = True
                report.counts.update(counts_of(conversation))
                yield conversation if scope is None else scrub_conversation(conversation, scope)
        if not has_session:
            raise no_session(path, report.skipped)


def read_any(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """The conversations of a file in whatever format it is; a file in none is counted."""
    try:
        module = detect(source.path)
    except OSError as error:
        report.skip(f"unreadable file: {error.strerror}", source.name)
        return
    if module is None:
        report.skip("no known format", source.name)
        return
    report.counts[f"files: {module.FORMAT}"] += 1
    yield from module.read(source, report)


def read_family(family: Family, report: IngestReport) -> Iterator[Conversation]:
    """Its conversations, each sub-agent with the very turn and call that started it where the main log names it."""
    return (conversation for conversation, _ in read_with_files(family, report))


def read_with_files(family: Family, report: IngestReport) -> Iterator[tuple[Conversation, str]]:
    """The same, each with the name of its file."""
    read = [(conversation, source.name) for source in family.sources for conversation in read_any(source, report)]
    conversations = [conversation for conversation, _ in read]
    started = {
        agent: (conversation.id, turn.id, call_id)
        for conversation in conversations
        for turn in conversation.turns
        for call_id, agent in turn.extra.get("agents", {}).items()
    }
    for conversation, file in read:
        link, agent = conversation.parent, conversation.extra.get("agent_id")
        if link is not None and agent in started:
            where, turn_id, call_id = started[agent]
            link = replace(link, conversation_id=where, turn_id=turn_id, call_id=call_id)
            conversation = replace(conversation, parent=link)
        yield conversation, file


def no_session(path: Path, reasons: Mapping[str, int]) -> InputError:
    """The error for a path below which no file is a session."""
    why = "; ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items()))
    got = f"no session in any known format ({why or f'no {_KINDS} file'})"
    fix = f"Formats that were tried: {', '.join(FORMATS)}"
    return InputError(explain(str(path), got=got, expected="session logs", fix=fix))
