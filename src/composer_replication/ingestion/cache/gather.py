"""The rows of every planned family, new and old, as lines on disk: which of them stay is decided afterwards."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import orjson

from composer_replication.canonical_json import encode_as_written
from composer_replication.ingestion.cache.content_marks import RowFacts, facts_of
from composer_replication.ingestion.cache.family_reading import FamilyLines, read_families, workers_for
from composer_replication.ingestion.cache.last_ingest import Earlier
from composer_replication.ingestion.cache.planning import Planned
from composer_replication.ingestion.cache.session_sources import Row, SessionSource, with_rows, with_suffix
from composer_replication.ingestion.discovery import file_order
from composer_replication.ingestion.scrubbing import FamilyScrubber, ScrubSettings, shown
from composer_replication.runs.conversations import from_row, to_row


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
        reading = read_families(
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

    def beside(self, planned: Planned, read: FamilyLines) -> GatheredFamily:
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
            return source, [to_row(from_row(row)) for row in stored]
        scope = self._scrubber.scope()  # there is no file any more: all there is to scrub is what was kept
        scope.reserve(stored)
        scrubbed = [to_row(self._scrubber.scrub(from_row(row), scope)) for row in stored]
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
