"""The rows of every planned family, new and old, as lines on disk: which of them stay is decided afterwards."""

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
from composer_replication.ingestion.scrubbing import FamilyScrubber, ScrubSettings, shown
from composer_replication.ingestion.session_sources import (
    Earlier,
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
    """A family whose lines lie in a file from `offset` on, their ids without suffix."""

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
    planned: list[Planned],
    earlier: Earlier,
    scrub: ScrubSettings | None,
    num_workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> Generator[list[GatheredFamily], None, None]:
    """Read what is to be read, take over the rest. The spool has no name and is gone with the process."""
    total, done = sum(planned_family.num_bytes for planned_family in planned), 0
    families_to_read = (
        (planned_family.source, planned_family.family)
        for planned_family in planned
        if planned_family.family is not None
    )
    gathered: list[GatheredFamily] = []
    with tempfile.TemporaryFile(dir=folder) as spool:
        taking = _TakingOver(earlier, spool, None if scrub is None else scrub.family_scrubber())
        reading = _read_families(
            families_to_read, scrub, earlier.forgotten, num_workers=num_workers or workers_for(total)
        )
        for planned_family in planned:
            gathered.append(
                taking.whole(planned_family)
                if planned_family.family is None
                else taking.beside(planned_family, next(reading))
            )
            done += planned_family.num_bytes
            if progress is not None:
                progress(done, total)
        yield gathered


class _TakingOver:
    """Rows of the last ingest: where they lie, or made anew where the settings are others."""

    def __init__(self, earlier: Earlier, spool: BinaryIO, scrubber: FamilyScrubber | None) -> None:
        self._earlier, self._spool, self._scrubber = earlier, spool, scrubber

    def whole(self, planned: Planned) -> GatheredFamily:
        """A family that is not read."""
        old, earlier = planned.old or planned.source, self._earlier
        if earlier.same_settings and not old.id_suffix:
            offset, rows = earlier.take(old)
            facts = [facts_of(row, earlier.forgotten) for row in rows]
            return GatheredFamily(planned.source, False, facts, earlier.file or self._spool, offset)
        source, rows = self._rows(old)
        source = replace(planned.source, id_suffix="") if earlier.same_settings else source
        return self._spooled(source, *self._written(rows), was_read=False)

    def beside(self, planned: Planned, read: _FamilyLines) -> GatheredFamily:
        """What was read, and the conversations of files of the family that are no longer there."""
        old = planned.old
        if old is None or not planned.gone.intersection(old.file_of):
            return self._spooled(*read, was_read=True)
        account, rows = self._rows(old)
        lines, facts = self._written(rows)
        ids, marks = {fact.id for fact in read.facts}, {fact.mark for fact in read.facts}
        kept_lines = [
            (file, line, fact)
            for name, file, line, fact in zip(old.file_of, account.file_of, lines, facts, strict=True)
            if name in planned.gone and fact.id not in ids and fact.mark not in marks  # not just renamed
        ]
        together = sorted(
            [*kept_lines, *zip(read.source.file_of, read.lines, read.facts, strict=True)],
            key=lambda entry: file_order(entry[0]),
        )
        source = replace(
            read.source,
            format=read.source.format or account.format,
            conversations=[fact.id for _, _, fact in together],
            file_of=[file for file, _, _ in together],
            redactions=dict(Counter(account.redactions) + Counter(read.source.redactions)),
        )
        source = with_rows(source, [orjson.loads(line) for _, line, _ in together])
        return self._spooled(
            source, [line for _, line, _ in together], [fact for _, _, fact in together], was_read=True
        )

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
        """Its account and rows, their ids without suffix; scrubbed once more where the settings are others."""
        stored = with_suffix(self._earlier.take(source)[1], suffix="", remove=source.id_suffix)
        source = replace(source, id_suffix="")
        if self._earlier.same_settings:
            return source, stored
        if self._scrubber is None:
            return source, [conversation_to_row(conversation_from_row(row)) for row in stored]
        scope = self._scrubber.scope()  # there is no file any more: all there is to scrub is what was kept
        scope.reserve(stored)
        scrubbed = [conversation_to_row(self._scrubber.scrub(conversation_from_row(row), scope)) for row in stored]
        return replace(
            source,
            path=shown(source.path, scope),
            name=shown(source.name, scope),
            files=[shown(file, scope) for file in source.files],
            file_of=[shown(file, scope) for file in source.file_of],
            conversations=[row["id"] for row in scrubbed],
            skipped={shown(reason, scope): number for reason, number in source.skipped.items()},
            skips=[(shown(str(reason), scope), shown(str(file), scope), line) for reason, file, line in source.skips],
            redactions=scope.report.to_dict() or source.redactions,
        ), scrubbed


# Which families have to be read, and which rows of an earlier ingest can be taken over.


@dataclass(frozen=True, slots=True)
class Planned:
    """One family of the artefact to be: to be read when `family` is there, else taken over.

    `old` is its account from the earlier ingest. Of a family that is read, `gone` names files that the earlier ingest
    had and that are no longer there: their conversations stay.
    """

    source: SessionSource
    family: Family | None = None
    old: SessionSource | None = None
    gone: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        return sum(self.source.sizes) if self.family is not None else 0


@dataclass
class IngestPlan:
    """All families in the order of the artefact, what was left out while looking for files, and the empty paths."""

    families: list[Planned] = field(default_factory=list[Planned])
    outside: IngestReport = field(default_factory=IngestReport)
    of_root: dict[Path, set[str]] = field(default_factory=dict[Path, set[str]])
    all_ignored: set[Path] = field(default_factory=set[Path])
    unused_patterns: list[str] = field(default_factory=list[str])


def plan(
    run_root: Path,
    roots: Sequence[Path],
    earlier: Earlier,
    *,
    scrub: ScrubSettings | None,
    exclude: Sequence[str],
    reread: bool,
    follow_links: bool = False,
) -> IngestPlan:
    """Look at the files below `roots` and decide what to do with each family, and with those of earlier ingests."""
    work = _Planning(run_root, earlier, None if scrub is None else scrub.scrubber(), exclude, follow_links)
    for root in roots:
        work.look_at(root)
    return work.settle(reread=reread or not earlier.same_settings)


class _Planning:
    def __init__(
        self,
        run_root: Path,
        earlier: Earlier,
        scrubber: Scrubber | None,
        exclude: Sequence[str],
        follow_links: bool,
    ) -> None:
        self._follow_links = follow_links
        self._run_root, self._earlier, self._scrubber = run_root, earlier, scrubber
        self._exclude = list(exclude)
        self._patterns = list(exclude)
        self._found: dict[str, tuple[SessionSource, Family]] = {}
        self._seen: dict[frozenset[str], str] = {}
        self._paths: set[str] = set()
        self._num_alike: Counter[str] = Counter()
        self._ignored: list[str] = []
        self._ignored_inodes: set[int] = set()
        self._plan = IngestPlan()

    def look_at(self, root: Path) -> None:
        folder = root if root.is_dir() else root.parent
        folder_name = portable_name(folder.resolve(), self._run_root)
        report, left_out, below = IngestReport(), list[str](), self._plan.of_root.setdefault(root, set())
        files_below = discover(root, report, exclude=self._exclude, ignored=left_out, follow_links=self._follow_links)
        for family in families(files_below):
            files = family.files()
            if files not in self._seen:
                self._seen[files] = path = self._unique(self._shown(f"{folder_name}/{family.name}"))
                self._found[path] = (self._draft(path, family), family)
            below.add(self._seen[files])
        if left_out and not below:
            self._plan.all_ignored.add(root)
        self._ignored += left_out
        self._ignored_inodes |= {(folder / name).stat().st_ino for name in left_out if (folder / name).is_file()}
        self._patterns += ignore_patterns(folder) if root.is_dir() else []
        self._plan.outside.skipped.update(report.skipped)
        self._plan.outside.skips += [Skip(skip.reason, self._shown(skip.file), skip.line) for skip in report.skips]

    def settle(self, *, reread: bool) -> IngestPlan:
        matches = self._matches()
        claimed = {id(account) for account in matches.values()}
        lost_accounts = [
            account for account in self._earlier.sources if id(account) not in claimed and account.conversations
        ]
        kept_accounts = [account for account in lost_accounts if not self._is_left_out(account)]
        # The session that a copy was a copy of may be gone, so copies are looked at again where anything has changed.
        is_still = len(kept_accounts) == len(lost_accounts) and all(
            path in matches and _is_same(matches[path], draft) for path, (draft, _) in self._found.items()
        )
        planned = [
            _decide(draft, family, matches.get(path), reread, is_still) for path, (draft, family) in self._found.items()
        ]
        for account in kept_accounts:  # somebody else's file may have the place of one that is gone
            planned.append(Planned(replace(account, path=self._unique(account.path)), old=account))
        self._plan.families = sorted(planned, key=lambda planned_family: planned_family.source.path)
        used = {pattern for pattern in self._exclude if any(is_ignored(name, [pattern]) for name in self._ignored)}
        used |= {p for p in self._exclude if any(is_ignored(account.name, [p]) for account in self._earlier.sources)}
        self._plan.unused_patterns = [pattern for pattern in self._exclude if pattern not in used]
        return self._plan

    def _matches(self) -> dict[str, SessionSource]:
        """Accounts of the families that are there: the same file first, then the same path; each is claimed once."""
        matches: dict[str, SessionSource] = {}
        claimed: set[int] = set()
        for key_of in (self._file_key, lambda account: account.path):
            accounts = {key_of(account): account for account in self._earlier.sources if id(account) not in claimed}
            for path, (draft, _) in self._found.items():
                same = accounts.get(key_of(draft))
                if path not in matches and same is not None and id(same) not in claimed:
                    matches[path] = same
                    claimed.add(id(same))
        return matches

    def _file_key(self, account: SessionSource) -> tuple[int, str]:
        """Inode and name: the inode of a deleted file is soon another's. Other settings may have scrubbed the name."""
        inode = account.inodes[0] if account.inodes else 0
        return inode, account.name.rpartition("/")[2] if self._earlier.same_settings else ""

    def _is_left_out(self, account: SessionSource) -> bool:
        """What is excluded goes, whether or not its file is still there."""
        if self._ignored_inodes.intersection(account.inodes[:1]):  # its name may be scrubbed here
            return True
        names = [account.name, *account.files]
        return any(is_ignored(name, self._patterns) for name in names)

    def _draft(self, path: str, family: Family) -> SessionSource:
        stamp, names = family.stamp(), [self._shown(source.name) for source in family.sources]
        return SessionSource(
            path=path,
            name=self._shown(family.name),
            files=names,
            sizes=[file_stamp.size for file_stamp in stamp],
            mtimes_ns=[file_stamp.mtime_ns for file_stamp in stamp],
            inodes=[file_stamp.inode for file_stamp in stamp],
        )

    def _shown(self, text: str) -> str:
        return shown(text, None if self._scrubber is None else self._scrubber.scope())

    def _unique(self, path: str) -> str:
        """Two people's folders may look the same scrubbed: the second gets a number."""
        unique = path
        while unique in self._paths:
            self._num_alike[path] += 1  # the numbers up to here are taken: many may look the same
            unique = f"{path}~{self._num_alike[path] + 1}"
        self._paths.add(unique)
        return unique


def _decide(draft: SessionSource, family: Family, old: SessionSource | None, reread: bool, is_still: bool) -> Planned:
    if old is None:
        return Planned(draft, family)
    if _is_same(old, draft) and (is_still or old.status != "duplicate") and not reread:
        return Planned(replace(old, inodes=draft.inodes), old=old)
    # Of a family that was partly gone before, `files` has only what was left of it.
    return Planned(draft, family, old, frozenset([*old.files, *old.file_of]) - frozenset(draft.files))


def _is_same(old: SessionSource, draft: SessionSource) -> bool:
    return (old.stamp, old.name, old.path) == (draft.stamp, draft.name, draft.path)


# Families to finished lines of `conversations.jsonl`, one after the other or in several processes.
#
# The lines of a family depend on nothing but its files and the settings, and come back in the order they were asked
# for: one process or many, the artefact has the same bytes.

# How many results may wait for the one before them, per process: enough to keep all busy, and memory flat.
_AHEAD = 4
_MOST_WORKERS = 8
_BYTES_PER_WORKER = 1 << 20  # what one process reads while another one starts


class _FamilyLines(NamedTuple):
    """What a family gave: its conversations as lines of JSON, what is to be known of each, and the account of it."""

    source: SessionSource
    lines: list[bytes]
    facts: list[RowFacts]


def workers_for(num_bytes: int) -> int:
    """How many processes pay off: one per core, but none for so little that it is read before they have begun."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_WORKERS, cores, 1 + num_bytes // _BYTES_PER_WORKER)


def _read_families(
    asked: Iterable[tuple[SessionSource, Family]],
    settings: ScrubSettings | None,
    forgotten: frozenset[str],
    *,
    num_workers: int,
) -> Iterator[_FamilyLines]:
    """The lines of every family, in order; `asked` brings the account to complete."""
    if num_workers <= 1:
        scrubber = None if settings is None else settings.family_scrubber()
        for draft, family in asked:
            yield read_lines(draft, family, scrubber, forgotten)
        return
    # Not fork: the caller may have threads, a progress bar's for one, and a lock that one of them holds stays held.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(settings, forgotten)) as pool:
        waiting: deque[Future[_FamilyLines]] = deque()
        try:
            for draft, family in asked:
                waiting.append(pool.submit(_read_in_worker, draft, family))
                if len(waiting) > num_workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except (BrokenProcessPool, BrokenPipeError) as error:  # a pipe to a worker that never began, not one of ours
            died = "a worker process could not start or died, perhaps for lack of memory: try `--workers 1`"
            raise RunError(died) from error
        finally:
            for future in waiting:
                future.cancel()


def read_lines(
    draft: SessionSource, family: Family, scrubber: FamilyScrubber | None, forgotten: frozenset[str]
) -> _FamilyLines:
    """Read, scrub and encode one family. What cannot be written is counted and named like what cannot be read."""
    report, scope = IngestReport(), None if scrubber is None else scrubber.scope()
    names = dict(zip((source.name for source in family.sources), draft.files, strict=True))
    lines, facts, file_of = list[bytes](), list[RowFacts](), list[str]()
    file_format: str | None = None
    for conversation, file in read_with_files(family, report):
        scrubbed = conversation if scrubber is None or scope is None else scrubber.scrub(conversation, scope)
        row = conversation_to_row(scrubbed)
        try:
            lines.append(encode_as_written(row, where="conversation"))
        except InputError:
            report.skip("conversation that JSON cannot hold", family.name)
            continue
        report.counts.update(counts_of(conversation))
        file_format = file_format or conversation.format
        facts.append(facts_of(row, forgotten))
        file_of.append(names[file])
    skipped: Counter[str] = Counter()
    for reason, number in report.skipped.items():
        skipped[shown(reason, scope)] += number
    source = replace(
        draft,
        status="kept" if lines else "empty",
        format=file_format,
        conversations=tuple(row_facts.id for row_facts in facts),
        file_of=tuple(file_of),
        counts=dict(sorted(report.counts.items())),
        skipped=dict(sorted(skipped.items())),
        skips=tuple((shown(skip.reason, scope), shown(skip.file, scope), skip.line) for skip in report.skips),
        redactions={} if scope is None or not lines else scope.report.to_dict(),
    )
    return _FamilyLines(source, lines, facts)


_worker: tuple[FamilyScrubber | None, frozenset[str]] = (None, frozenset())


def _start_worker(settings: ScrubSettings | None, forgotten: frozenset[str]) -> None:
    global _worker  # noqa: PLW0603 (one per process: building the rules once is the point)
    _worker = None if settings is None else settings.family_scrubber(), forgotten


def _read_in_worker(draft: SessionSource, family: Family) -> _FamilyLines:
    return read_lines(draft, family, *_worker)
