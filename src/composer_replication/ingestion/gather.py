"""Plan an ingest and gather the rows of all families in a temporary file. `into_run` decides which rows are written.

A family is a session log with the files of its subagents. Its rows depend only on its files and the scrub settings, and
families are returned in the order of the plan, so any number of processes writes the same bytes.
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
    Family,
    discover,
    families,
    file_order,
    ignore_patterns,
    is_ignored,
    read_with_files,
)
from composer_replication.ingestion.scrubbing import FamilyScrubber, ScrubSettings, printable
from composer_replication.ingestion.session_sources import (
    EarlierIngest,
    Row,
    RowFacts,
    SessionSource,
    facts_of,
    with_rows,
    with_suffix,
)
from composer_replication.ingestion.source import IngestReport, Skip, counts_of
from composer_replication.runs.files import conversation_from_row, conversation_to_row
from composer_replication.runs.lineage import portable_name

if TYPE_CHECKING:
    from composer_replication.privacy import Scrubber


@dataclass(frozen=True, slots=True)
class GatheredFamily:
    """A family whose lines start at `offset` in a file; their ids have no suffix yet."""

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
def gather(
    folder: Path,
    planned: list[PlannedFamily],
    earlier: EarlierIngest,
    scrub: ScrubSettings | None,
    num_workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> Generator[list[GatheredFamily], None, None]:
    """Yield all families: new and changed ones are read, and the rows of the others are reused.

    Rows are stored in an unnamed temporary file, which disappears even if the process is killed.
    """
    total, done = sum(planned_family.num_bytes for planned_family in planned), 0
    families_to_read = (
        (planned_family.source, planned_family.family)
        for planned_family in planned
        if planned_family.family is not None
    )
    gathered: list[GatheredFamily] = []
    with tempfile.TemporaryFile(dir=folder) as spool:
        reuse = _RowReuse(earlier, spool, None if scrub is None else scrub.family_scrubber())
        read_families = _read_session_groups(
            families_to_read, scrub, earlier.forgotten, num_workers=num_workers or workers_for(total)
        )
        for planned_family in planned:
            gathered.append(
                reuse.reuse_rows(planned_family)
                if planned_family.family is None
                else reuse.merge_rows(planned_family, next(read_families))
            )
            done += planned_family.num_bytes
            if progress is not None:
                progress(done, total)
        yield gathered


class _RowReuse:
    """Reuses rows from the last ingest: in place, or scrubbed again if the settings have changed."""

    def __init__(self, earlier: EarlierIngest, spool: BinaryIO, scrubber: FamilyScrubber | None) -> None:
        self._earlier, self._spool, self._scrubber = earlier, spool, scrubber

    def reuse_rows(self, planned: PlannedFamily) -> GatheredFamily:
        """Return the rows that the last ingest stored for a family, without reading its logs."""
        # `source` may have a new path; `old` locates the stored rows.
        old, earlier = planned.old or planned.source, self._earlier
        if earlier.same_settings and not old.id_suffix:
            # Nothing has changed: the lines stay in the file of the last ingest.
            offset, rows = earlier.read_rows(old)
            facts = [facts_of(row, earlier.forgotten) for row in rows]
            return GatheredFamily(planned.source, False, facts, earlier.file or self._spool, offset)
        source, rows = self._rows(old)
        source = replace(planned.source, id_suffix="") if earlier.same_settings else source
        return self._spooled(source, *self._written(rows), was_read=False)

    def merge_rows(self, planned: PlannedFamily, read: _FamilyLines) -> GatheredFamily:
        """Return the newly read rows together with the stored rows from files that were deleted."""
        old = planned.old
        if old is None or not planned.deleted_files.intersection(old.file_of):
            return self._spooled(*read, was_read=True)
        account, rows = self._rows(old)
        lines, facts = self._written(rows)
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
        source = with_rows(source, [orjson.loads(line) for _, line, _ in merged])
        return self._spooled(source, [line for _, line, _ in merged], [fact for _, _, fact in merged], was_read=True)

    def _spooled(
        self, source: SessionSource, lines: Sequence[bytes], facts: Sequence[RowFacts], *, was_read: bool
    ) -> GatheredFamily:
        offset = self._spool.seek(0, io.SEEK_END)
        for line in lines:
            self._spool.write(line + b"\n")
        return GatheredFamily(source, was_read, facts, self._spool, offset)

    def _written(self, rows: Sequence[Row]) -> tuple[list[bytes], list[RowFacts]]:
        lines = [encode_as_written(row, where="conversation") for row in rows]
        return lines, [facts_of(row, self._earlier.forgotten) for row in rows]

    def _rows(self, source: SessionSource) -> tuple[SessionSource, list[Row]]:
        """Return a family's account and its rows without id suffixes, scrubbed again if the settings have changed."""
        stored = with_suffix(self._earlier.read_rows(source)[1], suffix="", remove=source.id_suffix)
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


# The plan decides which families are read, and which rows from the last ingest are reused.


@dataclass(frozen=True, slots=True)
class PlannedFamily:
    """A family to write: read if `family` is set, otherwise reused.

    `old` is its account from the last ingest. `deleted_files` lists files from the last ingest that no longer exist
    although the family is read again; their conversations stay.
    """

    source: SessionSource
    family: Family | None = None
    old: SessionSource | None = None
    deleted_files: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """The number of bytes to read."""
        return sum(self.source.sizes) if self.family is not None else 0


@dataclass
class IngestPlan:
    """All families in output order, everything that was skipped during discovery, and the paths without sessions."""

    families: list[PlannedFamily] = field(default_factory=list[PlannedFamily])
    discovery: IngestReport = field(default_factory=IngestReport)
    paths_of_root: dict[Path, set[str]] = field(default_factory=dict[Path, set[str]])
    all_ignored: set[Path] = field(default_factory=set[Path])
    unused_patterns: list[str] = field(default_factory=list[str])


def plan(
    run_root: Path,
    roots: Sequence[Path],
    earlier: EarlierIngest,
    *,
    scrub: ScrubSettings | None,
    exclude: Sequence[str],
    reread: bool,
    follow_links: bool = False,
) -> IngestPlan:
    """Find the files below `roots` and decide for every family, new or from an earlier ingest, whether to read it."""
    planning = _Planning(run_root, earlier, None if scrub is None else scrub.scrubber(), exclude, follow_links)
    for root in roots:
        planning.discover(root)
    return planning.finish(reread=reread or not earlier.same_settings)


class _Planning:
    """Collects the families below several roots and compares them with the last ingest."""

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
        self._families: dict[str, tuple[SessionSource, Family]] = {}
        """Path -> the account to complete and its family."""
        self._path_of_files: dict[frozenset[str], str] = {}
        """Set of resolved files -> path, so that a family below two roots is read only once."""
        self._paths: set[str] = set()
        self._num_alike: Counter[str] = Counter()
        self._ignored: list[str] = []
        self._ignored_inodes: set[int] = set()
        self._plan = IngestPlan()

    def discover(self, root: Path) -> None:
        """Add the families below a root directory."""
        folder = root if root.is_dir() else root.parent
        folder_name = portable_name(folder.resolve(), self._run_root)
        report, left_out, below = IngestReport(), list[str](), self._plan.paths_of_root.setdefault(root, set())
        files_below = discover(root, report, exclude=self._exclude, ignored=left_out, follow_links=self._follow_links)
        for family in families(files_below):
            files = family.files()
            if files not in self._path_of_files:
                self._path_of_files[files] = path = self._unique(self._printable(f"{folder_name}/{family.name}"))
                self._families[path] = (self._draft(path, family), family)
            below.add(self._path_of_files[files])
        if left_out and not below:
            self._plan.all_ignored.add(root)
        self._ignored += left_out
        # Inodes are needed as well: names in accounts may be redacted and no longer match the pattern.
        self._ignored_inodes |= {(folder / name).stat().st_ino for name in left_out if (folder / name).is_file()}
        self._patterns += ignore_patterns(folder) if root.is_dir() else []
        self._plan.discovery.skipped.update(report.skipped)
        self._plan.discovery.skips += [
            Skip(skip.reason, self._printable(skip.file), skip.line) for skip in report.skips
        ]

    def finish(self, *, reread: bool) -> IngestPlan:
        """Return the plan. With `reread`, every family whose files exist is read again."""
        matches = self._matches()
        claimed = {id(account) for account in matches.values()}
        lost_accounts = [
            account for account in self._earlier.sources if id(account) not in claimed and account.conversations
        ]
        kept_accounts = [account for account in lost_accounts if not self._is_left_out(account)]
        # If anything has changed, copies are read again: the original session may have been removed.
        is_unchanged = len(kept_accounts) == len(lost_accounts) and all(
            path in matches and _is_same(matches[path], draft) for path, (draft, _) in self._families.items()
        )
        planned = [
            _decide(draft, family, matches.get(path), reread, is_unchanged)
            for path, (draft, family) in self._families.items()
        ]
        for account in kept_accounts:  # a new file may have the path of a deleted one
            planned.append(PlannedFamily(replace(account, path=self._unique(account.path)), old=account))
        self._plan.families = sorted(planned, key=lambda planned_family: planned_family.source.path)
        # A pattern counts as used if it matched an existing file or an account from the last ingest.
        used = {pattern for pattern in self._exclude if any(is_ignored(name, [pattern]) for name in self._ignored)}
        used |= {p for p in self._exclude if any(is_ignored(account.name, [p]) for account in self._earlier.sources)}
        self._plan.unused_patterns = [pattern for pattern in self._exclude if pattern not in used]
        return self._plan

    def _matches(self) -> dict[str, SessionSource]:
        """Return path -> the account of the same family from the last ingest; each account is matched at most once.

        Matches by file have priority (a renamed folder keeps its rows), followed by matches by path.
        """
        matches: dict[str, SessionSource] = {}
        claimed: set[int] = set()
        # Two passes, so that a match by path never takes the account of a file that was only moved.
        for key_of in (self._file_key, lambda account: account.path):
            accounts = {key_of(account): account for account in self._earlier.sources if id(account) not in claimed}
            for path, (draft, _) in self._families.items():
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

    def _is_left_out(self, account: SessionSource) -> bool:
        """Return whether an account is excluded. Its file need not exist."""
        if self._ignored_inodes.intersection(account.inodes[:1]):  # the name in the account may be redacted
            return True
        names = [account.name, *account.files]
        return any(is_ignored(name, self._patterns) for name in names)

    def _draft(self, path: str, family: Family) -> SessionSource:
        """Return the account of a family that has not been read yet."""
        stamp, names = family.stamp(), [self._printable(source.name) for source in family.sources]
        return SessionSource(
            path=path,
            name=self._printable(family.name),
            files=names,
            sizes=[file_stamp.size for file_stamp in stamp],
            mtimes_ns=[file_stamp.mtime_ns for file_stamp in stamp],
            inodes=[file_stamp.inode for file_stamp in stamp],
        )

    def _printable(self, text: str) -> str:
        """Return a name in the form in which artifacts may contain it."""
        return printable(text, None if self._scrubber is None else self._scrubber.scope())

    def _unique(self, path: str) -> str:
        """Return the path, with a number if needed: the folders of two users may be identical after redaction."""
        unique = path
        while unique in self._paths:
            self._num_alike[path] += 1  # stored, so that many equal paths do not each count up from 1
            unique = f"{path}~{self._num_alike[path] + 1}"
        self._paths.add(unique)
        return unique


def _decide(
    draft: SessionSource, family: Family, old: SessionSource | None, reread: bool, is_unchanged: bool
) -> PlannedFamily:
    if old is None:
        return PlannedFamily(draft, family)
    if _is_same(old, draft) and (is_unchanged or old.status != "duplicate") and not reread:
        return PlannedFamily(replace(old, inodes=draft.inodes), old=old)
    # `files` lacks those deleted before the last ingest, which `file_of` still lists.
    return PlannedFamily(draft, family, old, frozenset([*old.files, *old.file_of]) - frozenset(draft.files))


def _is_same(old: SessionSource, draft: SessionSource) -> bool:
    return (old.stamp, old.name, old.path) == (draft.stamp, draft.name, draft.path)


# Families are converted into lines of `conversations.jsonl`, in this process or in several.

# How many results per process may wait for earlier ones. This keeps all processes busy and bounds memory use.
_MAX_AHEAD = 4
_MAX_WORKERS = 8
_BYTES_PER_WORKER = 1 << 20  # about what one process reads while another one starts


class _FamilyLines(NamedTuple):
    """A family after reading: its account, its conversations as JSON lines, and the facts about each conversation."""

    source: SessionSource
    lines: list[bytes]
    facts: list[RowFacts]


def workers_for(num_bytes: int) -> int:
    """Return the number of worker processes: one per core, or none if reading is faster than starting a process."""
    # In a container, fewer cores than os.cpu_count() may be usable.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_WORKERS, cores, 1 + num_bytes // _BYTES_PER_WORKER)


def _read_session_groups(
    drafts: Iterable[tuple[SessionSource, Family]],
    settings: ScrubSettings | None,
    forgotten: frozenset[str],
    *,
    num_workers: int,
) -> Iterator[_FamilyLines]:
    """Yield the lines of every family in order. `drafts` has the accounts to complete and their families."""
    if num_workers <= 1:
        scrubber = None if settings is None else settings.family_scrubber()
        for draft, family in drafts:
            yield read_lines(draft, family, scrubber, forgotten)
        return
    # Not fork: a lock held by another thread of the caller (for example a progress bar) would stay locked in the child.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(settings, forgotten)) as pool:
        waiting: deque[Future[_FamilyLines]] = deque()
        try:
            for draft, family in drafts:
                # Only a few are submitted at a time; otherwise the results for a large folder would accumulate in
                # memory.
                waiting.append(pool.submit(_read_in_worker, draft, family))
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


def read_lines(
    draft: SessionSource, family: Family, scrubber: FamilyScrubber | None, forgotten: frozenset[str]
) -> _FamilyLines:
    """Read, scrub and encode one family.

    A conversation that cannot be represented in JSON is skipped and counted, like an unreadable record.
    """
    report, scope = IngestReport(), None if scrubber is None else scrubber.scope()
    names = dict(zip((source.name for source in family.sources), draft.files, strict=True))
    lines, facts, file_of = list[bytes](), list[RowFacts](), list[str]()
    file_format: str | None = None
    for conversation, file in read_with_files(family, report):
        scrubbed = conversation if scrubber is None or scope is None else scrubber.scrub(conversation, scope)
        row = conversation_to_row(scrubbed)
        # For example, integers beyond 64 bits in an additional field of a log.
        try:
            lines.append(encode_as_written(row, where="conversation"))
        except InputError:
            report.skip("conversation that JSON cannot hold", family.name)
            continue
        report.counts.update(counts_of(conversation))
        file_format = file_format or conversation.format
        facts.append(facts_of(row, forgotten))
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
    return _FamilyLines(source, lines, facts)


_worker: tuple[FamilyScrubber | None, frozenset[str]] = (None, frozenset())


def _start_worker(settings: ScrubSettings | None, forgotten: frozenset[str]) -> None:
    global _worker  # noqa: PLW0603 (one per process: building the rules once is the point)
    _worker = None if settings is None else settings.family_scrubber(), forgotten


def _read_in_worker(draft: SessionSource, family: Family) -> _FamilyLines:
    return read_lines(draft, family, *_worker)
