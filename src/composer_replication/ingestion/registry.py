"""Every format in one table: which one a file is, which files a path holds, and their conversations."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from composer_replication.errors import InputError, explain
from composer_replication.ingestion.families import count, families, read_family
from composer_replication.ingestion.links import Links
from composer_replication.ingestion.reading.source import IngestReport, SourceFile
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.privacy import Scrubber
from composer_replication.runs.directory import MARKER as RUN_MARKER
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
    return cast("Ingester", import_module(f"composer_replication.ingestion.formats.{name}"))


def detect(path: Path) -> Ingester | None:
    """The format of a file by its content, or None."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return next((each for each in map(ingester, FORMATS) if each.sniff(head, path)), None)


def discover(
    path: Path,
    report: IngestReport,
    *,
    exclude: Sequence[str] = (),
    ignored: list[str] | None = None,
    follow_links: bool = False,
) -> Iterator[SourceFile]:
    """The files below `path` that may be sessions, in a fixed order.

    Links that lead out of `path` are counted, and followed with `follow_links`; `path` itself may be one. A link to a
    folder below it never is: what is there is read at its own place. `ignored` takes names that a pattern left out.
    """
    if not path.exists():
        raise InputError(explain(str(path), got="no such file or folder", expected="session logs"))
    if not path.is_dir():
        yield SourceFile(path, path.name)
        return
    patterns, links = [*exclude, *ignore_patterns(path)], Links(path, follow=follow_links)

    def unreadable(error: OSError) -> None:
        where = Path(error.filename).relative_to(path).as_posix() if error.filename else ""
        report.skip(f"unreadable folder: {error.strerror}", where)

    for folder, folders, files in os.walk(path, onerror=unreadable, followlinks=follow_links):
        folders[:] = _entered(Path(folder), folders, links, report, path)
        for name in sorted(files):
            file = Path(folder) / name
            relative = file.relative_to(path).as_posix()
            if file.suffix.lower() not in _SUFFIXES:
                continue
            if is_ignored(relative, patterns):
                (ignored if ignored is not None else []).append(relative)
            elif reason := links.why_not_read(file):
                report.skip(reason, relative)
            elif file.is_file():
                yield SourceFile(file, relative)
            else:  # a pipe would be waited for, a link may lead nowhere
                report.skip("not a regular file", relative)


def _entered(folder: Path, names: Sequence[str], links: Links, report: IngestReport, root: Path) -> Iterator[str]:
    """The folders below that are looked into: not all links, and no run of our own."""
    for name in sorted(names):
        reason = links.why_not_entered(folder / name) if (folder / name).is_symlink() else ""
        # Not Path.is_file: it raises where the folder is closed to us, which the walk itself counts.
        if not reason and os.path.isfile(folder / name / RUN_MARKER):  # noqa: PTH113
            reason = "run directory"
        if reason:
            report.skip(reason, (folder / name).relative_to(root).as_posix())
        else:
            yield name


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
        found = False
        for family in families(discover(path, report, exclude=exclude, follow_links=follow_links)):
            scope = None if scrubber is None else scrubber.scope()
            for conversation in read_family(family, report, read_any):
                found = True
                count(conversation, report)
                yield conversation if scope is None else scrub_conversation(conversation, scope)
        if not found:
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


def no_session(path: Path, reasons: Mapping[str, int]) -> InputError:
    """The error for a path below which no file is a session."""
    why = "; ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items()))
    got = f"no session in any known format ({why or f'no {_kinds_of_files()} file'})"
    fix = f"Formats that were tried: {', '.join(FORMATS)}"
    return InputError(explain(str(path), got=got, expected="session logs", fix=fix))


def _kinds_of_files() -> str:
    return " or ".join(sorted(_SUFFIXES))


def ignore_patterns(folder: Path) -> list[str]:
    """What the folder's own file says to leave out."""
    try:
        lines = (folder / IGNORE_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def is_ignored(relative: str, patterns: Sequence[str]) -> bool:
    """A pattern matches a whole path, a file name, or any folder above the file."""
    parts = relative.split("/")
    candidates = [relative, parts[-1], *("/".join(parts[:n]) for n in range(1, len(parts))), *parts[:-1]]
    return any(fnmatch.fnmatchcase(each, pattern.rstrip("/")) for pattern in patterns for each in candidates)
