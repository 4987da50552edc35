"""The rows of every planned family, new and old, spooled to disk in order: which of them stay is decided afterwards."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import orjson

from composer_replication.ingestion.cache.content_marks import mark_of
from composer_replication.ingestion.cache.earlier import Earlier
from composer_replication.ingestion.cache.family_reading import read_families, shown
from composer_replication.ingestion.cache.planning import Planned
from composer_replication.ingestion.cache.session_sources import Row, SessionSource, with_suffix
from composer_replication.ingestion.families import file_order
from composer_replication.ingestion.scrub_settings import FamilyScrubber, ScrubSettings
from composer_replication.runs.conversations import from_row, to_row


@dataclass(frozen=True, slots=True)
class GatheredFamily:
    """A family whose rows lie in the spool; `marks` are those of its conversations, whole."""

    source: SessionSource
    was_read: bool
    offset: int
    num_rows: int
    marks: tuple[str, ...]
    beginnings: tuple[str, ...]
    """The id of each conversation's first turn, where a log gave it one."""


class Gathered:
    """The families in order, and their rows for whoever asks."""

    def __init__(self, spool: BinaryIO) -> None:
        self._spool = spool
        self.families: list[GatheredFamily] = []

    def add(self, source: SessionSource, rows: list[Row], lines: list[bytes] | None, *, was_read: bool) -> None:
        """`lines` are the rows as text, where somebody has written them already."""
        offset = self._spool.tell()
        for line in (orjson.dumps(row) for row in rows) if lines is None else lines:
            self._spool.write(line + b"\n")
        marks = tuple(mark_of(row) for row in rows)
        beginnings = tuple(row["turns"][0]["id"] if row["turns"] else "" for row in rows)
        self.families.append(GatheredFamily(source, was_read, offset, len(rows), marks, beginnings))

    def rows_of(self, family: GatheredFamily) -> list[Row]:
        """Its rows, their ids without suffix."""
        self._spool.seek(family.offset)
        return [orjson.loads(self._spool.readline()) for _ in range(family.num_rows)]


@contextlib.contextmanager
def gather(
    folder: Path,
    planned: list[Planned],
    earlier: Earlier,
    scrub: ScrubSettings | None,
    num_workers: int,
    progress: Callable[[int, int], None] | None,
) -> Generator[Gathered, None, None]:
    """Read what is to be read, take over the rest. The spool has no name and is gone with the process."""
    total, done = sum(each.num_bytes for each in planned), 0
    asked = ((each.source, each.family) for each in planned if each.family is not None)
    again = None if earlier.same_settings or scrub is None else scrub.family_scrubber()
    with tempfile.TemporaryFile(dir=folder) as spool:
        gathered = Gathered(spool)
        reading = read_families(asked, scrub, num_workers=num_workers)
        for each in planned:
            lines: list[bytes] | None = None
            if each.family is None:
                source, rows = _taken_over(each.old or each.source, earlier, again)
                source = source if again is not None else replace(each.source, id_suffix="")
            else:
                read = next(reading)
                own = [orjson.loads(line) for line in read.lines]
                source, rows = _with_gone(each, read.source, own, earlier, again)
                lines = read.lines if rows is own else None
            gathered.add(source, rows, lines, was_read=each.family is not None)
            done += each.num_bytes
            if progress is not None:
                progress(done, total)
        yield gathered


def _with_gone(
    planned: Planned, source: SessionSource, rows: list[Row], earlier: Earlier, again: FamilyScrubber | None
) -> tuple[SessionSource, list[Row]]:
    """What was read, and the conversations of files of the family that are no longer there."""
    old = planned.old
    if old is None or not planned.gone.intersection(old.file_of):
        return source, rows
    account, stored = _taken_over(old, earlier, again)
    read, marks = {row["id"] for row in rows}, {mark_of(row) for row in rows}
    kept = [
        (row, file)
        for row, file, name in zip(stored, account.file_of, old.file_of, strict=True)
        if name in planned.gone and row["id"] not in read and mark_of(row) not in marks  # not just renamed
    ]
    together = sorted([*kept, *zip(rows, source.file_of, strict=True)], key=lambda each: file_order(each[1]))
    return replace(
        source,
        status="kept" if together else source.status,
        format=source.format or account.format,
        conversations=[row["id"] for row, _ in together],
        file_of=[file for _, file in together],
        redactions=dict(Counter(account.redactions) + Counter(source.redactions)),
    ), [row for row, _ in together]


def _taken_over(
    source: SessionSource, earlier: Earlier, again: FamilyScrubber | None
) -> tuple[SessionSource, list[Row]]:
    stored = with_suffix(earlier.take(source), suffix="", remove=source.id_suffix)
    source = replace(source, id_suffix="")
    if again is None:
        return source, stored
    scope = again.scope()  # there is no file any more: all there is to scrub is what was kept
    scope.reserve(stored)
    scrubbed = [to_row(again.scrub(from_row(row), scope)) for row in stored]
    return replace(
        source,
        path=shown(source.path, scope),
        name=shown(source.name, scope),
        files=[shown(each, scope) for each in source.files],
        file_of=[shown(each, scope) for each in source.file_of],
        conversations=[row["id"] for row in scrubbed],
        skipped={shown(reason, scope): number for reason, number in source.skipped.items()},
        skips=[(shown(str(reason), scope), shown(str(file), scope), line) for reason, file, line in source.skips],
        redactions=scope.report.to_dict() or source.redactions,
    ), scrubbed
