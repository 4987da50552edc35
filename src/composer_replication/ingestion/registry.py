"""Every format in one table: which one a file is, and its conversations, those of a family linked."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from composer_replication.errors import InputError, explain
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.ingestion.source import IngestReport, SourceFile, counts_of
from composer_replication.runs.directory import MARKER as RUN_MARKER
from composer_replication.types import Conversation

if TYPE_CHECKING:
    from composer_replication.privacy import Scrubber

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


# Which files below a path may be sessions, and which of them belong together.
#
# A family is a main log and the sub-agents in the folder of its name; any other file is a family of its own. Families
# do not know each other, so they can be read in any order, in other processes, or not at all when nothing changed.
#
# A symbolic link that leads out of the folder may lead to anybody's files.

SUFFIXES = frozenset({".jsonl", ".json", ".traj", ".eval"})


_KINDS = " or ".join(sorted(SUFFIXES))


class _Ingester(Protocol):
    """What every format's module offers."""

    FORMAT: str

    def sniff(self, head: bytes, path: Path) -> bool: ...

    def read(self, source: SourceFile, report: IngestReport) -> Iterator[Conversation]: ...


def ingester(name: str) -> _Ingester:
    if name not in FORMATS:
        raise InputError(explain("format", got=repr(name), expected=f"one of {', '.join(FORMATS)}"))
    return cast("_Ingester", import_module(f"composer_replication.ingestion.formats.{name}"))


def detect(path: Path) -> _Ingester | None:
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
            for conversation in _read_family(family, report):
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


def _read_family(family: Family, report: IngestReport) -> Iterator[Conversation]:
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


IGNORE_FILE = ".crfignore"


LEADS_OUT = "link that leads out of the folder (--follow-links follows it)"
TO_A_FOLDER = "link to a folder"  # that is read at its own place, or it would lead round in circles
_SUBAGENTS = "subagents"


class _FileStamp(NamedTuple):
    """What says that a file is the same one, and unchanged."""

    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Family:
    """The files of one session below one root; `name` is that of its main log, whether or not the log is there."""

    name: str
    sources: tuple[SourceFile, ...]

    def stamp(self) -> tuple[_FileStamp, ...]:
        """Of each file: a log that has not changed need not be read again."""
        return tuple(_stamp_of(source.path) for source in self.sources)

    def files(self) -> frozenset[str]:
        """The files themselves, however they were named."""
        return frozenset(str(source.path.resolve()) for source in self.sources)


def families(sources: Iterable[SourceFile]) -> list[Family]:
    """All families in the order of their names."""
    files_of: dict[str, list[SourceFile]] = {}
    for source in sources:
        folder, _, _ = source.name.rpartition("/")
        home = folder.removesuffix(f"/{_SUBAGENTS}") + ".jsonl" if source.path.parent.name == _SUBAGENTS else ""
        files_of.setdefault(home or source.name, []).append(source)
    return [
        Family(name, tuple(sorted(files_of[name], key=lambda file: file_order(file.name)))) for name in sorted(files_of)
    ]


def file_order(name: str) -> tuple[bool, str]:
    """The main log first: its calls are what the others hang on."""
    return f"{_SUBAGENTS}/" in name, name


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
        fix = "Claude Code keeps its logs in ~/.claude/projects, Codex in ~/.codex/sessions."
        raise InputError(explain(str(path), got="no such file or folder", expected="session logs", fix=fix))
    if not path.is_dir():
        yield SourceFile(path, path.name)
        return
    patterns, links = [*exclude, *ignore_patterns(path)], _LinkRules(path, follow=follow_links)

    def unreadable(error: OSError) -> None:
        where = Path(error.filename).relative_to(path).as_posix() if error.filename else ""
        report.skip(f"unreadable folder: {error.strerror}", where)

    for folder, folders, files in os.walk(path, onerror=unreadable, followlinks=follow_links):
        folders[:] = _entered(Path(folder), folders, links, report, path)
        for name in sorted(files):
            file = Path(folder) / name
            relative = file.relative_to(path).as_posix()
            if file.suffix.lower() not in SUFFIXES:
                continue
            if is_ignored(relative, patterns):
                (ignored if ignored is not None else []).append(relative)
            elif reason := links.why_not_read(file):
                report.skip(reason, relative)
            elif file.is_file():
                yield SourceFile(file, relative)
            else:  # a pipe would be waited for, a link may lead nowhere
                report.skip("not a regular file", relative)


def _entered(folder: Path, names: Sequence[str], links: _LinkRules, report: IngestReport, root: Path) -> Iterator[str]:
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
    return any(fnmatch.fnmatchcase(candidate, pattern.rstrip("/")) for pattern in patterns for candidate in candidates)


class _LinkRules:
    """Which links below a folder are followed: none that leads out of it, unless asked; no folder twice."""

    def __init__(self, root: Path, *, follow: bool) -> None:
        self._root, self._follow = _real(root), follow
        self._entered = [self._root]

    def why_not_read(self, file: Path) -> str:
        """Why a file is not read; empty where it is no link, or one that is followed."""
        if self._follow or not file.is_symlink():
            return ""
        return "" if _real(file).is_relative_to(self._root) else LEADS_OUT

    def why_not_entered(self, folder: Path) -> str:
        """Why a link to a folder is not followed; empty where it is."""
        target = _real(folder)
        if any(target.is_relative_to(entered_folder) for entered_folder in self._entered) or self._root.is_relative_to(
            target
        ):
            return TO_A_FOLDER
        if not self._follow:
            return LEADS_OUT
        self._entered.append(target)
        return ""


def _real(path: Path) -> Path:
    """Without links; one that leads round in circles stays as it is."""
    return Path(os.path.realpath(path))


def _stamp_of(path: Path) -> _FileStamp:
    try:
        status = path.stat()
    except OSError:
        return _FileStamp(0, 0, 0)
    return _FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)
