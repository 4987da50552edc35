"""Every format in one table: which one a file is, which files a path holds, and their conversations."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from composer_replication.errors import InputError, explain
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.ingestion.source import IngestReport, SourceFile
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
IGNORE_FILE = ".crfignore"
_SUFFIXES = frozenset({".jsonl", ".json", ".traj", ".eval"})
_HEAD_BYTES = 64 * 1024


class Ingester(Protocol):
    """What every format's module offers."""

    FORMAT: str

    def sniff(self, head: bytes, path: Path) -> bool: ...

    def read(self, source: SourceFile, report: IngestReport) -> Iterator[Conversation]: ...


def ingester(name: str) -> Ingester:
    if name not in FORMATS:
        raise InputError(explain("format", got=repr(name), expected=f"one of {', '.join(FORMATS)}"))
    return cast("Ingester", import_module(f"composer_replication.ingestion.{name}"))


def detect(path: Path) -> Ingester | None:
    """The format of a file by its content, or None."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return next((each for each in map(ingester, FORMATS) if each.sniff(head, path)), None)


def discover(path: Path, report: IngestReport, *, exclude: Sequence[str] = ()) -> Iterator[SourceFile]:
    """The files below `path` that may be sessions, in a fixed order; links to folders are not followed."""
    if path.is_file():
        yield SourceFile(path, path.name)
        return
    patterns = [*exclude, *_ignore_patterns(path)]
    for folder, folders, files in os.walk(path, onerror=lambda error: report.skip(f"unreadable: {error.strerror}", "")):
        folders.sort()
        for name in sorted(files):
            file = Path(folder) / name
            relative = file.relative_to(path).as_posix()
            if file.suffix in _SUFFIXES and not _is_ignored(relative, patterns):
                yield SourceFile(file, relative)


def ingest(
    paths: Iterable[str | Path],
    report: IngestReport,
    *,
    scrubber: Scrubber | None,
    exclude: Sequence[str] = (),
) -> Iterator[Conversation]:
    """Conversations of all sessions below `paths`, scrubbed, sub-agents linked to the call that started them.

    `scrubber=None` leaves secrets in: the caller has said so. A path without any session is an error.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise InputError(explain(str(path), got="no such file or folder", expected="session logs"))
        found = False
        for family in _families(discover(path, report, exclude=exclude)):
            scope = None if scrubber is None else scrubber.scope()
            for conversation in _linked(list(_read_family(family, report))):
                found = True
                _count(conversation, report)
                yield conversation if scope is None else scrub_conversation(conversation, scope)
        if not found:
            tried = ", ".join(FORMATS)
            raise InputError(explain(str(path), got="no session in any known format", expected=f"one of {tried}"))


def _families(sources: Iterable[SourceFile]) -> list[list[SourceFile]]:
    """Files of one session together: a main log, and the sub-agents in the folder of its name."""
    families: dict[str, list[SourceFile]] = {}
    for source in sources:
        folder = source.path.parent
        home = folder.parent if folder.name == "subagents" else source.path.with_suffix("")
        families.setdefault(str(home), []).append(source)
    # The main log first: its calls are what the others hang on.
    return [
        sorted(each, key=lambda source: (source.path.parent.name == "subagents", source.name))
        for each in families.values()
    ]


def _read_family(family: list[SourceFile], report: IngestReport) -> Iterator[Conversation]:
    for source in family:
        try:
            module = detect(source.path)
        except OSError as error:
            report.skip(f"unreadable file: {error.strerror}", source.name)
            continue
        if module is None:
            report.skip("no known format", source.name)
            continue
        report.counts[f"files: {module.FORMAT}"] += 1
        yield from module.read(source, report)


def _linked(family: list[Conversation]) -> Iterator[Conversation]:
    """Sub-agents with the very turn and call that started them, where the main log names them."""
    started = {
        agent: (conversation.id, turn.id, call_id)
        for conversation in family
        for turn in conversation.turns
        for call_id, agent in turn.extra.get("agents", {}).items()
    }
    for conversation in family:
        link, agent = conversation.parent, conversation.extra.get("agent_id")
        if link is not None and agent in started:
            where, turn_id, call_id = started[agent]
            link = replace(link, conversation_id=where, turn_id=turn_id, call_id=call_id)
            conversation = replace(conversation, parent=link)
        yield conversation


def _count(conversation: Conversation, report: IngestReport) -> None:
    counts = report.counts
    counts["conversations"] += 1
    counts["turns"] += len(conversation.turns)
    for turn in conversation.turns:
        counts["assistant turns"] += turn.role == "assistant"
        counts["calls"] += len(turn.calls)
        counts["results"] += len(turn.results)
        counts["errors"] += sum(result.is_error is True for result in turn.results)


def _ignore_patterns(folder: Path) -> list[str]:
    try:
        lines = (folder / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _is_ignored(relative: str, patterns: Sequence[str]) -> bool:
    """A pattern matches a whole path, a file name, or any folder above the file."""
    parts = relative.split("/")
    candidates = [relative, parts[-1], *("/".join(parts[:n]) for n in range(1, len(parts))), *parts[:-1]]
    return any(fnmatch.fnmatchcase(each, pattern.rstrip("/")) for pattern in patterns for each in candidates)
