"""Find session files, detect their formats, and read their conversations with linked subagents."""

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
from composer_replication.ingestion.source_files import IngestReport, SourceFile, count_contents
from composer_replication.runs.directory import MARKER as RUN_MARKER
from composer_replication.types import Conversation

if TYPE_CHECKING:
    from composer_replication.privacy import Scrubber

# Formats in the order in which they are tried, the most specific first.
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
# How much of a file is read to detect its format.
_HEAD_BYTES = 64 * 1024


SUFFIXES = frozenset({".jsonl", ".json", ".traj", ".eval"})
IGNORE_FILE = ".crfignore"
# Reasons for skipping a file, which sidecars of runs store.
LEADS_OUT = "link that leads out of the folder (--follow-links follows it)"
TO_A_FOLDER = "link to a folder"  # its files are found at their real location; following it could loop
_SUBAGENT_FOLDER = "subagents"


class _Ingester(Protocol):
    """The interface of a format module."""

    FORMAT: str

    def sniff(self, head: bytes, path: Path) -> bool: ...

    def read(self, source: SourceFile, report: IngestReport) -> Iterator[Conversation]: ...


def _format_module(name: str) -> _Ingester:
    """Return the module for a format. Raises InputError for an unknown format."""
    if name not in FORMATS:
        raise InputError(explain("log format", got=repr(name), expected=f"one of {', '.join(FORMATS)}"))
    return cast("_Ingester", import_module(f"composer_replication.ingestion.formats.{name}"))


def detect(path: Path) -> _Ingester | None:
    """Return the module for the format detected in a file, or None."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return next((candidate for candidate in map(_format_module, FORMATS) if candidate.sniff(head, path)), None)


def ingest(
    paths: Iterable[str | Path],
    report: IngestReport,
    *,
    scrubber: Scrubber | None,
    exclude: Sequence[str] = (),
    follow_links: bool = False,
) -> Iterator[Conversation]:
    """Yield the conversations from all sessions below `paths`, scrubbed and with subagents linked to their calls.

    With `scrubber=None` secrets are not redacted. Raises InputError for a path without any session.
    """
    for path in map(Path, paths):
        has_session = False
        for session in group_by_session(discover(path, report, exclude=exclude, follow_links=follow_links)):
            # One scope per session: linked conversations use the same placeholder for the same secret.
            scope = None if scrubber is None else scrubber.scope()
            for conversation, _ in read_group(session, report):
                has_session = True
                report.counts.update(count_contents(conversation))
                yield conversation if scope is None else scrub_conversation(conversation, scope)
        if not has_session:
            raise no_session_error(path, report.skipped)


def _read_file(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the conversations from a file in any format. A file in an unknown format is counted as skipped."""
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


def read_group(session: SessionGroup, report: IngestReport) -> Iterator[tuple[Conversation, str]]:
    """Yield the conversations of a session, each with the name of its file.

    A subagent is linked to the turn and the call that started it if the main log contains its id.
    """
    read_conversations = [
        (conversation, source.name) for source in session.sources for conversation in _read_file(source, report)
    ]
    conversations = [conversation for conversation, _ in read_conversations]
    # The turns in the main log map call ids to agent ids; the subagent's own file has only its agent id.
    started = {
        agent: (conversation.id, turn.id, call_id)
        for conversation in conversations
        for turn in conversation.turns
        for call_id, agent in turn.extra.get("agents", {}).items()
    }
    for conversation, file in read_conversations:
        link, agent = conversation.parent, conversation.extra.get("agent_id")
        if link is not None and agent in started:
            where, turn_id, call_id = started[agent]
            link = replace(link, conversation_id=where, turn_id=turn_id, call_id=call_id)
            conversation = replace(conversation, parent=link)
        yield conversation, file


def no_session_error(path: Path, reasons: Mapping[str, int]) -> InputError:
    """Return the error for a path that contains no session."""
    why = "; ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items()))
    why = why or f"no {' or '.join(sorted(SUFFIXES))} file"
    got = f"no session in any known format ({why})"
    fix = f"Supported formats: {', '.join(FORMATS)}."
    return InputError(explain(str(path), got=got, expected="at least one session log", fix=fix))


class _FileStamp(NamedTuple):
    """The size, modification time and inode of a file. Equal stamps mean that the file is unchanged."""

    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class SessionGroup:
    """The files of one session below a root: a main log and the subagents in the folder with the same name.

    `name` is the name of the main log, which may not exist. Any other file is a session by itself. Sessions are
    independent: they can be read in any order, in other processes, or not at all if nothing has changed.
    """

    name: str
    sources: tuple[SourceFile, ...]

    def stamp(self) -> tuple[_FileStamp, ...]:
        """Return the stamps of all files. If none of them has changed, the session need not be reread."""
        return tuple(_read_stamp(source.path) for source in self.sources)

    def files(self) -> frozenset[str]:
        """Return the resolved paths, which do not depend on the path by which the files were found."""
        return frozenset(str(source.path.resolve()) for source in self.sources)


def group_by_session(sources: Iterable[SourceFile]) -> list[SessionGroup]:
    """Group files into sessions, ordered by name."""
    files_of: dict[str, list[SourceFile]] = {}
    for source in sources:
        folder, _, _ = source.name.rpartition("/")
        home = (
            folder.removesuffix(f"/{_SUBAGENT_FOLDER}") + ".jsonl"
            if source.path.parent.name == _SUBAGENT_FOLDER
            else ""
        )
        files_of.setdefault(home or source.name, []).append(source)
    return [
        SessionGroup(name, tuple(sorted(files_of[name], key=lambda file: file_order(file.name))))
        for name in sorted(files_of)
    ]


def file_order(name: str) -> tuple[bool, str]:
    """Return the sort key for a file in its session: the main log first, since its calls start the subagents."""
    return f"{_SUBAGENT_FOLDER}/" in name, name


def discover(
    path: Path,
    report: IngestReport,
    *,
    exclude: Sequence[str] = (),
    ignored: list[str] | None = None,
    follow_links: bool = False,
) -> Iterator[SourceFile]:
    """Yield the files below `path` that may be sessions, in a fixed order.

    Symbolic links out of `path` are counted, and followed only with `follow_links`; `path` itself may be a link. A link
    to a folder inside `path` is never followed, since its files are found at their real location. `ignored` collects
    the names of files that a pattern excluded.
    """
    if not path.exists():
        fix = "Claude Code stores its logs in ~/.claude/projects, Codex in ~/.codex/sessions."
        raise InputError(explain(str(path), got="no such file or folder", expected="the path of session logs", fix=fix))
    if not path.is_dir():
        yield SourceFile(path, path.name)
        return
    patterns, links = [*exclude, *ignore_patterns(path)], _LinkRules(path, follow=follow_links)

    def unreadable(error: OSError) -> None:
        where = Path(error.filename).relative_to(path).as_posix() if error.filename else ""
        report.skip(f"unreadable folder: {error.strerror}", where)

    for folder, folders, files in os.walk(path, onerror=unreadable, followlinks=follow_links):
        # Changed in place: os.walk descends into the folders that remain in its list.
        folders[:] = _folders_to_enter(Path(folder), folders, links, report, path)
        for name in sorted(files):
            file = Path(folder) / name
            relative = file.relative_to(path).as_posix()
            if file.suffix.lower() not in SUFFIXES:
                continue
            if is_ignored(relative, patterns):
                (ignored if ignored is not None else []).append(relative)
            elif reason := links.reason_not_to_read(file):
                report.skip(reason, relative)
            elif file.is_file():
                yield SourceFile(file, relative)
            else:  # reading a pipe would block, and a link may be broken
                report.skip("not a regular file", relative)


def _folders_to_enter(
    folder: Path, names: Sequence[str], links: _LinkRules, report: IngestReport, root: Path
) -> Iterator[str]:
    """Yield the subfolders to search, excluding run directories and links that must not be followed."""
    for name in sorted(names):
        reason = links.reason_not_to_enter(folder / name) if (folder / name).is_symlink() else ""
        # Not Path.is_file: it raises if the folder is not readable, which os.walk reports itself.
        if not reason and os.path.isfile(folder / name / RUN_MARKER):  # noqa: PTH113
            reason = "run directory"
        if reason:
            report.skip(reason, (folder / name).relative_to(root).as_posix())
        else:
            yield name


def ignore_patterns(folder: Path) -> list[str]:
    """Return the patterns from the `.crfignore` file in the folder."""
    try:
        lines = (folder / IGNORE_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def is_ignored(relative: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the whole path, the file name, or a parent folder of the file."""
    parts = relative.split("/")
    # "build" matches a file or folder at any depth, "a/b" only one below the root.
    candidates = [relative, parts[-1], *("/".join(parts[:n]) for n in range(1, len(parts))), *parts[:-1]]
    return any(fnmatch.fnmatchcase(candidate, pattern.rstrip("/")) for pattern in patterns for candidate in candidates)


class _LinkRules:
    """The rules for following symbolic links: links out of the folder only if `follow` is set, and no folder twice.

    A link out of the folder may lead to files that its owner did not mean to ingest.
    """

    def __init__(self, root: Path, *, follow: bool) -> None:
        self._root, self._follow = _resolve(root), follow
        self._entered = [self._root]

    def reason_not_to_read(self, file: Path) -> str:
        """Return why a linked file is not read, or "" if it is read. A file that is not a link is always read."""
        if self._follow or not file.is_symlink():
            return ""
        return "" if _resolve(file).is_relative_to(self._root) else LEADS_OUT

    def reason_not_to_enter(self, folder: Path) -> str:
        """Return why a link to a folder is not followed, or "" if it is followed."""
        target = _resolve(folder)
        if any(target.is_relative_to(entered_folder) for entered_folder in self._entered) or self._root.is_relative_to(
            target
        ):
            return TO_A_FOLDER
        if not self._follow:
            return LEADS_OUT
        # Two links may lead to the same folder.
        self._entered.append(target)
        return ""


def _resolve(path: Path) -> Path:
    """Return the path with symbolic links resolved. A circular link is returned unchanged."""
    return Path(os.path.realpath(path))


def _read_stamp(path: Path) -> _FileStamp:
    try:
        status = path.stat()
    except OSError:
        return _FileStamp(0, 0, 0)
    return _FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)
