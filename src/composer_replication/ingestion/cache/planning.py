"""Which families have to be read, and which rows of an earlier ingest can be taken over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_replication.ingestion.cache.last_ingest import Earlier
from composer_replication.ingestion.cache.session_sources import SessionSource
from composer_replication.ingestion.discovery import Family, discover, families, ignore_patterns, is_ignored
from composer_replication.ingestion.reading.source import IngestReport, Skip
from composer_replication.ingestion.scrubbing import ScrubSettings, shown
from composer_replication.privacy import Scrubber
from composer_replication.runs.source_paths import portable_name


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
class Plan:
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
) -> Plan:
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
        self._plan = Plan()

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

    def settle(self, *, reread: bool) -> Plan:
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
