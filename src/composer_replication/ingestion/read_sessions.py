"""Plan an ingest and gather the rows of all sessions in a temporary file. `ingest_run` decides which rows are written.

A session consists of a main log and those of its subagents. Its rows depend only on its files and the scrub settings,
and sessions are returned in the order of the plan, so any number of processes writes the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import orjson

from composer_replication.canonical_json import encode_as_written
from composer_replication.errors import InputError, RunError
from composer_replication.ingestion.registry import (
    SessionGroup,
    discover,
    file_order,
    group_by_session,
    ignore_patterns,
    is_ignored,
    read_group,
)
from composer_replication.ingestion.scrubbing import ScrubSettings, SessionScrubber, printable
from composer_replication.ingestion.session_sources import (
    EarlierIngest,
    Row,
    RowFacts,
    SessionSource,
    extract_facts,
    replace_id_suffix,
    replace_rows,
)
from composer_replication.ingestion.source_files import IngestReport, Skip, count_contents
from composer_replication.runs.files import conversation_from_row, conversation_to_row
from composer_replication.runs.lineage import portable_name

if TYPE_CHECKING:
    from composer_replication.privacy import Scrubber


@dataclass(frozen=True, slots=True)
class GatheredSession:
    """A session whose lines begin at `offset` in `file`.

    No suffix has been added to their ids to make them unique.
    """

    source: SessionSource
    was_read: bool
    facts: Sequence[RowFacts]
    file: BinaryIO
    offset: int

    def lines(self) -> list[bytes]:
        self.file.seek(self.offset)
        return [self.file.readline()[:-1] for _ in self.facts]

    def rows(self) -> list[Row]:
        return [orjson.loads(line) for line in self.lines()]


@contextlib.contextmanager
def gather_sessions(
    folder: Path,
    planned: list[PlannedSession],
    earlier: EarlierIngest,
    scrub: ScrubSettings | None,
    num_workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> Generator[list[GatheredSession], None, None]:
    """Yield all sessions: new and changed ones are read, and the rows of the others are reused.

    Rows are stored in an unnamed temporary file, which disappears even if the process is killed.
    """
    total, done = sum(planned_session.num_bytes for planned_session in planned), 0
    sessions_to_read = (
        (planned_session.source, planned_session.session)
        for planned_session in planned
        if planned_session.session is not None
    )
    gathered: list[GatheredSession] = []
    with tempfile.TemporaryFile(dir=folder) as spool:
        reuse = _RowReuse(earlier, spool, None if scrub is None else scrub.session_scrubber())
        newly_read = _read_session_groups(
            sessions_to_read, scrub, earlier.forgotten, num_workers=num_workers or _choose_num_workers(total)
        )
        for planned_session in planned:
            gathered.append(
                reuse.reuse_rows(planned_session)
                if planned_session.session is None
                else reuse.merge_rows(planned_session, next(newly_read))
            )
            done += planned_session.num_bytes
            if progress is not None:
                progress(done, total)
        yield gathered


class _RowReuse:
    """A source of rows from the last ingest: unchanged ones, or ones scrubbed again if the settings have changed."""

    def __init__(self, earlier: EarlierIngest, spool: BinaryIO, scrubber: SessionScrubber | None) -> None:
        self._earlier, self._spool, self._scrubber = earlier, spool, scrubber

    def reuse_rows(self, planned: PlannedSession) -> GatheredSession:
        """Return the rows that the last ingest stored for a session, without reading its logs."""
        # `source` may have a new path; `old` locates the stored rows.
        old, earlier = planned.old or planned.source, self._earlier
        if earlier.same_settings and not old.id_suffix:
            # Nothing has changed: the lines stay in the file of the last ingest.
            offset, rows = earlier.read_rows(old)
            facts = [extract_facts(row, earlier.forgotten) for row in rows]
            return GatheredSession(planned.source, False, facts, earlier.file or self._spool, offset)
        source, rows = self._read_old_rows(old)
        source = replace(planned.source, id_suffix="") if earlier.same_settings else source
        return self._spool_lines(source, *self._encode_rows(rows), was_read=False)

    def merge_rows(self, planned: PlannedSession, read: _SessionLines) -> GatheredSession:
        """Return the newly read rows together with the stored rows from files that were deleted."""
        old = planned.old
        if old is None or not planned.deleted_files.intersection(old.file_of):
            return self._spool_lines(*read, was_read=True)
        account, rows = self._read_old_rows(old)
        lines, facts = self._encode_rows(rows)
        ids, marks = {fact.id for fact in read.facts}, {fact.mark for fact in read.facts}
        kept_lines = [
            (file, line, fact)
            for name, file, line, fact in zip(old.file_of, account.file_of, lines, facts, strict=True)
            if name in planned.deleted_files
            and fact.id not in ids
            and fact.mark not in marks  # otherwise the file was only renamed
        ]
        merged = sorted(
            [*kept_lines, *zip(read.source.file_of, read.lines, read.facts, strict=True)],
            key=lambda entry: file_order(entry[0]),
        )
        source = replace(
            read.source,
            format=read.source.format or account.format,
            conversations=[fact.id for _, _, fact in merged],
            file_of=[file for file, _, _ in merged],
            redactions=dict(Counter(account.redactions) + Counter(read.source.redactions)),
        )
        source = replace_rows(source, [orjson.loads(line) for _, line, _ in merged])
        return self._spool_lines(
            source, [line for _, line, _ in merged], [fact for _, _, fact in merged], was_read=True
        )

    def _spool_lines(
        self, source: SessionSource, lines: Sequence[bytes], facts: Sequence[RowFacts], *, was_read: bool
    ) -> GatheredSession:
        offset = self._spool.seek(0, io.SEEK_END)
        for line in lines:
            self._spool.write(line + b"\n")
        return GatheredSession(source, was_read, facts, self._spool, offset)

    def _encode_rows(self, rows: Sequence[Row]) -> tuple[list[bytes], list[RowFacts]]:
        lines = [encode_as_written(row, where="conversation") for row in rows]
        return lines, [extract_facts(row, self._earlier.forgotten) for row in rows]

    def _read_old_rows(self, source: SessionSource) -> tuple[SessionSource, list[Row]]:
        """Return a session's account and its rows without id suffixes, scrubbed again if the settings have changed."""
        stored = replace_id_suffix(self._earlier.read_rows(source)[1], suffix="", remove=source.id_suffix)
        source = replace(source, id_suffix="")
        if self._earlier.same_settings:
            return source, stored
        if self._scrubber is None:
            return source, [conversation_to_row(conversation_from_row(row)) for row in stored]
        # The log no longer exists, so the stored text is scrubbed again. It already has placeholders, whose numbers
        # must not be reused for other values.
        scope = self._scrubber.scope()
        scope.reserve(stored)
        scrubbed = [conversation_to_row(self._scrubber.scrub(conversation_from_row(row), scope)) for row in stored]
        return replace(
            source,
            path=printable(source.path, scope),
            name=printable(source.name, scope),
            files=[printable(file, scope) for file in source.files],
            file_of=[printable(file, scope) for file in source.file_of],
            conversations=[row["id"] for row in scrubbed],
            skipped={printable(reason, scope): number for reason, number in source.skipped.items()},
            skips=[
                (printable(str(reason), scope), printable(str(file), scope), line)
                for reason, file, line in source.skips
            ],
            redactions=scope.report.to_dict() or source.redactions,
        ), scrubbed


# The plan decides which sessions are read, and which rows from the last ingest are reused.


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A session to write: read if `session` is set, otherwise reused.

    `old` is its account from the last ingest. `deleted_files` lists files from the last ingest that no longer exist
    although the session is read again; their conversations stay.
    """

    source: SessionSource
    session: SessionGroup | None = None
    old: SessionSource | None = None
    deleted_files: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """The number of bytes to read."""
        return sum(self.source.sizes) if self.session is not None else 0


@dataclass
class IngestPlan:
    """All sessions in output order, everything that was skipped during discovery, and the paths without sessions."""

    sessions: list[PlannedSession] = field(default_factory=list[PlannedSession])
    discovery: IngestReport = field(default_factory=IngestReport)
    paths_of_root: dict[Path, set[str]] = field(default_factory=dict[Path, set[str]])
    all_ignored: set[Path] = field(default_factory=set[Path])
    unused_patterns: list[str] = field(default_factory=list[str])


def plan_ingest(
    run_root: Path,
    roots: Sequence[Path],
    earlier: EarlierIngest,
    *,
    scrub: ScrubSettings | None,
    exclude: Sequence[str],
    reread: bool,
    follow_links: bool = False,
) -> IngestPlan:
    """Find the files below `roots` and decide for every session, new or from an earlier ingest, whether to read it."""
    planning = _Planning(run_root, earlier, None if scrub is None else scrub.scrubber(), exclude, follow_links)
    for root in roots:
        planning.discover(root)
    return planning.finish(reread=reread or not earlier.same_settings)


class _Planning:
    """A plan under construction, which collects sessions and compares them with the last ingest."""

    def __init__(
        self,
        run_root: Path,
        earlier: EarlierIngest,
        scrubber: Scrubber | None,
        exclude: Sequence[str],
        follow_links: bool,
    ) -> None:
        self._follow_links = follow_links
        self._run_root, self._earlier, self._scrubber = run_root, earlier, scrubber
        self._exclude = list(exclude)
        self._patterns = list(exclude)
        self._sessions: dict[str, tuple[SessionSource, SessionGroup]] = {}
        """Path -> the account to complete and its session."""
        self._path_of_files: dict[frozenset[str], str] = {}
        """Set of resolved files -> path, so that a session below two roots is read only once."""
        self._paths: set[str] = set()
        self._num_alike: Counter[str] = Counter()
        self._ignored: list[str] = []
        self._ignored_inodes: set[int] = set()
        self._plan = IngestPlan()

    def discover(self, root: Path) -> None:
        """Add the sessions below a root directory."""
        folder = root if root.is_dir() else root.parent
        folder_name = portable_name(folder.resolve(), self._run_root)
        report, left_out, below = IngestReport(), list[str](), self._plan.paths_of_root.setdefault(root, set())
        files_below = discover(root, report, exclude=self._exclude, ignored=left_out, follow_links=self._follow_links)
        for session in group_by_session(files_below):
            files = session.files()
            if files not in self._path_of_files:
                self._path_of_files[files] = path = self._make_unique_path(
                    self._scrub_name(f"{folder_name}/{session.name}")
                )
                self._sessions[path] = (self._draft(path, session), session)
            below.add(self._path_of_files[files])
        if left_out and not below:
            self._plan.all_ignored.add(root)
        self._ignored += left_out
        # Inodes are needed as well: names in accounts may be redacted and no longer match the pattern.
        self._ignored_inodes |= {(folder / name).stat().st_ino for name in left_out if (folder / name).is_file()}
        self._patterns += ignore_patterns(folder) if root.is_dir() else []
        self._plan.discovery.skipped.update(report.skipped)
        self._plan.discovery.skips += [
            Skip(skip.reason, self._scrub_name(skip.file), skip.line) for skip in report.skips
        ]

    def finish(self, *, reread: bool) -> IngestPlan:
        """Return the plan. With `reread`, every session whose files exist is read again."""
        matches = self._matches()
        claimed = {id(account) for account in matches.values()}
        lost_accounts = [
            account for account in self._earlier.sources if id(account) not in claimed and account.conversations
        ]
        kept_accounts = [account for account in lost_accounts if not self._is_deselected(account)]
        # If anything has changed, copies are read again: the original session may have been removed.
        is_unchanged = len(kept_accounts) == len(lost_accounts) and all(
            path in matches and _is_unchanged(matches[path], draft) for path, (draft, _) in self._sessions.items()
        )
        planned = [
            _plan_session(draft, session, matches.get(path), reread, is_unchanged)
            for path, (draft, session) in self._sessions.items()
        ]
        for account in kept_accounts:  # a new file may have the path of a deleted one
            planned.append(PlannedSession(replace(account, path=self._make_unique_path(account.path)), old=account))
        self._plan.sessions = sorted(planned, key=lambda planned_session: planned_session.source.path)
        # A pattern counts as used if it matched an existing file or an account from the last ingest.
        used = {pattern for pattern in self._exclude if any(is_ignored(name, [pattern]) for name in self._ignored)}
        used |= {p for p in self._exclude if any(is_ignored(account.name, [p]) for account in self._earlier.sources)}
        self._plan.unused_patterns = [pattern for pattern in self._exclude if pattern not in used]
        return self._plan

    def _matches(self) -> dict[str, SessionSource]:
        """Return the row that the last ingest stored for each session, by the session's path.

        Each row is matched at most once. Matches by file have priority, so that a renamed folder keeps its rows; they
        are followed by matches by path.
        """
        matches: dict[str, SessionSource] = {}
        claimed: set[int] = set()
        # Two passes, so that a match by path never takes the account of a file that was only moved.
        for key_of in (self._file_key, lambda account: account.path):
            accounts = {key_of(account): account for account in self._earlier.sources if id(account) not in claimed}
            for path, (draft, _) in self._sessions.items():
                same = accounts.get(key_of(draft))
                if path not in matches and same is not None and id(same) not in claimed:
                    matches[path] = same
                    claimed.add(id(same))
        return matches

    def _file_key(self, account: SessionSource) -> tuple[int, str]:
        """Return the inode and the name, since file systems reuse the inodes of deleted files.

        With different scrub settings the name may be redacted differently, so only the inode is returned.
        """
        inode = account.inodes[0] if account.inodes else 0
        return inode, account.name.rpartition("/")[2] if self._earlier.same_settings else ""

    def _is_deselected(self, account: SessionSource) -> bool:
        """Return whether an account is excluded. Its file need not exist."""
        if self._ignored_inodes.intersection(account.inodes[:1]):  # the name in the account may be redacted
            return True
        names = [account.name, *account.files]
        return any(is_ignored(name, self._patterns) for name in names)

    def _draft(self, path: str, session: SessionGroup) -> SessionSource:
        """Return the `session_sources.jsonl` row of a session that has not been read yet.

        It has no counts and no conversations.
        """
        stamp, names = session.stamp(), [self._scrub_name(source.name) for source in session.sources]
        return SessionSource(
            path=path,
            name=self._scrub_name(session.name),
            files=names,
            sizes=[file_stamp.size for file_stamp in stamp],
            mtimes_ns=[file_stamp.mtime_ns for file_stamp in stamp],
            inodes=[file_stamp.inode for file_stamp in stamp],
        )

    def _scrub_name(self, text: str) -> str:
        """Return a name scrubbed of secrets, as it may appear in artifacts."""
        return printable(text, None if self._scrubber is None else self._scrubber.scope())

    def _make_unique_path(self, path: str) -> str:
        """Return the path, with a number if needed: the folders of two users may be identical after redaction."""
        unique_name = path
        while unique_name in self._paths:
            self._num_alike[path] += 1  # stored, so that many equal paths do not each count up from 1
            unique_name = f"{path}~{self._num_alike[path] + 1}"
        self._paths.add(unique_name)
        return unique_name


def _plan_session(
    draft: SessionSource, session: SessionGroup, old: SessionSource | None, reread: bool, is_unchanged: bool
) -> PlannedSession:
    if old is None:
        return PlannedSession(draft, session)
    if _is_unchanged(old, draft) and (is_unchanged or old.status != "duplicate") and not reread:
        return PlannedSession(replace(old, inodes=draft.inodes), old=old)
    # `files` lacks those deleted before the last ingest, which `file_of` still lists.
    return PlannedSession(draft, session, old, frozenset([*old.files, *old.file_of]) - frozenset(draft.files))


def _is_unchanged(old: SessionSource, draft: SessionSource) -> bool:
    return (old.stamp, old.name, old.path) == (draft.stamp, draft.name, draft.path)


# Sessions are converted into lines of `conversations.jsonl`, in this process or in several.

# How many results per process may wait for earlier ones. This keeps all processes busy and bounds memory use.
_MAX_AHEAD = 4
_MAX_WORKERS = 8
_BYTES_PER_WORKER = 1 << 20  # about what one process reads while another one starts


class _SessionLines(NamedTuple):
    """A session after reading: its account, its conversations as JSON lines, and the facts about each conversation."""

    source: SessionSource
    lines: list[bytes]
    facts: list[RowFacts]


def _choose_num_workers(num_bytes: int) -> int:
    """Return the number of worker processes: one per core, or none if reading is faster than starting a process."""
    # In a container, fewer cores than os.cpu_count() may be usable.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_WORKERS, cores, 1 + num_bytes // _BYTES_PER_WORKER)


def _read_session_groups(
    drafts: Iterable[tuple[SessionSource, SessionGroup]],
    settings: ScrubSettings | None,
    forgotten: frozenset[str],
    *,
    num_workers: int,
) -> Iterator[_SessionLines]:
    """Yield the lines of every session in order. `drafts` pairs each session with its incomplete row."""
    if num_workers <= 1:
        scrubber = None if settings is None else settings.session_scrubber()
        for draft, session in drafts:
            yield _read_session_lines(draft, session, scrubber, forgotten)
        return
    # Not fork: a lock held by another thread of the caller (for example a progress bar) would stay locked in the child.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(settings, forgotten)) as pool:
        waiting: deque[Future[_SessionLines]] = deque()
        try:
            for draft, session in drafts:
                # Only a few are submitted at a time; otherwise the results for a large folder would accumulate in
                # memory.
                waiting.append(pool.submit(_read_in_worker, draft, session))
                if len(waiting) > num_workers * _MAX_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except (BrokenProcessPool, BrokenPipeError) as error:  # the pipe leads to a worker that never started
            raise RunError(
                "A worker process died or failed to start, possibly because it ran out of memory. Try `--workers 1`."
            ) from error
        finally:
            for future in waiting:
                future.cancel()


def _read_session_lines(
    draft: SessionSource, session: SessionGroup, scrubber: SessionScrubber | None, forgotten: frozenset[str]
) -> _SessionLines:
    """Read, scrub and encode one session.

    A conversation that cannot be represented in JSON is skipped and counted, like an unreadable record.
    """
    report, scope = IngestReport(), None if scrubber is None else scrubber.scope()
    names = dict(zip((source.name for source in session.sources), draft.files, strict=True))
    lines, facts, file_of = list[bytes](), list[RowFacts](), list[str]()
    file_format: str | None = None
    for conversation, file in read_group(session, report):
        scrubbed = conversation if scrubber is None or scope is None else scrubber.scrub(conversation, scope)
        row = conversation_to_row(scrubbed)
        # For example, integers beyond 64 bits in an additional field of a log.
        try:
            lines.append(encode_as_written(row, where="conversation"))
        except InputError:
            report.skip("conversation that JSON cannot hold", session.name)
            continue
        report.counts.update(count_contents(conversation))
        file_format = file_format or conversation.format
        facts.append(extract_facts(row, forgotten))
        file_of.append(names[file])
    # Reasons may quote the log, and may become equal after scrubbing.
    skipped: Counter[str] = Counter()
    for reason, number in report.skipped.items():
        skipped[printable(reason, scope)] += number
    source = replace(
        draft,
        status="kept" if lines else "empty",
        format=file_format,
        conversations=tuple(row_facts.id for row_facts in facts),
        file_of=tuple(file_of),
        counts=dict(sorted(report.counts.items())),
        skipped=dict(sorted(skipped.items())),
        skips=tuple((printable(skip.reason, scope), printable(skip.file, scope), skip.line) for skip in report.skips),
        redactions={} if scope is None or not lines else scope.report.to_dict(),
    )
    return _SessionLines(source, lines, facts)


_worker: tuple[SessionScrubber | None, frozenset[str]] = (None, frozenset())


def _start_worker(settings: ScrubSettings | None, forgotten: frozenset[str]) -> None:
    global _worker  # noqa: PLW0603 (one per process: building the rules once is the point)
    _worker = None if settings is None else settings.session_scrubber(), forgotten


def _read_in_worker(draft: SessionSource, session: SessionGroup) -> _SessionLines:
    return _read_session_lines(draft, session, *_worker)
