"""Which families have to be read, and which rows of an earlier ingest can be taken over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from composer_replication.ingestion.earlier import Earlier
from composer_replication.ingestion.families import Family, families
from composer_replication.ingestion.registry import discover
from composer_replication.ingestion.scrub_settings import ScrubSettings
from composer_replication.ingestion.session_sources import SessionSource
from composer_replication.ingestion.source import IngestReport
from composer_replication.privacy import Scrubber
from composer_replication.runs.source_paths import portable_name


@dataclass(frozen=True, slots=True)
class Planned:
    """One family of the artefact to be: to be read when `family` is there, else taken over from the earlier ingest."""

    source: SessionSource
    family: Family | None = None
    root: Path | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self.source.sizes) if self.family is not None else 0


def plan(
    run_root: Path,
    roots: Sequence[Path],
    earlier: Earlier,
    *,
    scrub: ScrubSettings | None,
    exclude: Sequence[str],
    reread: bool,
) -> tuple[list[Planned], IngestReport]:
    """Every family in the order of the artefact, and what was left out while looking for files."""
    report, found, ignored = IngestReport(), dict[str, Planned](), set[str]()
    scrubber = None if scrub is None else scrub.scrubber()
    known = {each.path: each for each in earlier.sources}
    for root in roots:
        folder = root if root.is_dir() else root.parent
        place = _Place(portable_name(folder.resolve(), run_root), scrubber)
        left_out: list[str] = []
        for family in families(discover(root, report, exclude=exclude, ignored=left_out)):
            path = place.shown(family.name, taken=found)
            if path not in found:
                draft = _draft(path, place.scrub(family.name), family)
                found[path] = _settle(draft, family, root, known.get(path), reread or not earlier.same_settings)
        ignored |= {place.shown(name) for name in left_out}
    gone = [each for path, each in known.items() if path not in found]
    kept = [_without_rows(each) if each.path in ignored else each for each in gone]
    planned = [*found.values(), *(Planned(each) for each in kept if each.conversations or each.forgotten)]
    return sorted(planned, key=lambda each: each.source.path), report


def _settle(draft: SessionSource, family: Family, root: Path, old: SessionSource | None, reread: bool) -> Planned:
    if old is not None:
        draft = replace(draft, forgotten=old.forgotten)
        is_same = (old.stamp, old.name) == (draft.stamp, draft.name)
        # The session that a copy was a copy of may be gone, so copies are looked at again.
        if is_same and old.status != "duplicate" and not reread:
            return Planned(old, root=root)
    return Planned(draft, family, root)


def _draft(path: str, name: str, family: Family) -> SessionSource:
    stamp = family.stamp()
    return SessionSource(path=path, name=name, sizes=[s for s, _ in stamp], mtimes_ns=[t for _, t in stamp])


def _without_rows(source: SessionSource) -> SessionSource:
    """An excluded family keeps nothing but what must stay forgotten."""
    return SessionSource(path=source.path, name=source.name, status="forgotten", forgotten=source.forgotten)


class _Place:
    """Names files below one folder as artefacts may show them."""

    def __init__(self, folder: str, scrubber: Scrubber | None) -> None:
        self._folder, self._scrubber = folder, scrubber

    def scrub(self, text: str) -> str:
        return text if self._scrubber is None else self._scrubber.scope().text(text)

    def shown(self, name: str, taken: dict[str, Planned] | None = None) -> str:
        """The scrubbed path. Two people's folders may look the same scrubbed: the second gets a number."""
        path = self.scrub(f"{self._folder}/{name}")
        number, unique = 2, path
        while taken and unique in taken and taken[unique].source.name != name:
            unique, number = f"{path}~{number}", number + 1
        return unique
