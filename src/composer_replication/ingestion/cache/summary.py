"""What an ingest did, for a table or for a machine: numbers, kinds and places, never a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from composer_replication.ingestion.cache.gather import GatheredFamily
from composer_replication.ingestion.cache.planning import Plan
from composer_replication.ingestion.cache.session_sources import SessionSource, first_places
from composer_replication.ingestion.reading.counts import IMAGES, UNPLACED
from composer_replication.ingestion.reading.source import IngestReport
from composer_replication.privacy.numbering import NAME_KIND

_BESIDE = ("queued messages", "attachments ", IMAGES)
_COLUMNS = ("sessions", "conversations", "turns", "calls", "results", "errors")


@dataclass(frozen=True, slots=True)
class FormatCounts:
    """One row of the table."""

    format: str
    files: int
    sessions: int
    conversations: int
    turns: int
    calls: int
    results: int
    errors: int
    secrets: int
    names: int  # home directories and user names, which are no secrets


@dataclass(frozen=True, slots=True)
class Left:
    """Something that was left out: why, how often, and where first."""

    reason: str
    number: int
    first: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Calls or results of one format that have no counterpart: what, and how many."""

    format: str
    what: str
    number: int


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """The run as it is after an ingest; `num_read` files were read, `num_reused` taken over as they were.

    `beside` counts what logs hold beside messages: queued messages, attachments, images.
    """

    formats: tuple[FormatCounts, ...]
    total: FormatCounts
    redactions: Mapping[str, int]
    skipped: tuple[Left, ...]
    unplaced: tuple[Unplaced, ...]
    beside: Mapping[str, int]
    num_read: int
    num_reused: int
    is_scrubbed: bool
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @staticmethod
    def of(
        sources: Sequence[SessionSource],
        planned: Plan,
        gathered: Sequence[GatheredFamily],
        *,
        lost: str | None,
        is_scrubbed: bool,
    ) -> IngestSummary:
        by_format: dict[str, list[SessionSource]] = {}
        for source in sources:
            if source.format is not None and source.status == "kept":
                by_format.setdefault(source.format, []).append(source)
        formats = [_counts(name, by_format[name]) for name in sorted(by_format)]
        redactions: Counter[str] = Counter()
        for source in sources:
            redactions.update(source.redactions)
        first_skips = first_places([*sources, _account_of(planned.outside)])
        num_read = sum(len(family.source.sizes) for family in gathered if family.was_read)
        return IngestSummary(
            formats=tuple(formats),
            total=_counts("all", [source for group in by_format.values() for source in group]),
            redactions=dict(redactions.most_common()),
            skipped=tuple(Left(reason, *first_skips[reason]) for reason in sorted(first_skips)),
            unplaced=tuple(_unplaced(by_format)),
            beside=_beside([source for group in by_format.values() for source in group]),
            num_read=num_read,
            num_reused=sum(len(family.source.sizes) for family in gathered) - num_read,
            is_scrubbed=is_scrubbed,
            remarks=tuple(_remarks(planned, lost)),
        )


def _unplaced(by_format: Mapping[str, Sequence[SessionSource]]) -> Iterator[Unplaced]:
    for name in sorted(by_format):
        for what in UNPLACED:
            number = sum(source.counts.get(what, 0) for source in by_format[name])
            if number:
                yield Unplaced(name, what, number)


def _beside(sources: Sequence[SessionSource]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for source in sources:
        total.update({key: number for key, number in source.counts.items() if key.startswith(_BESIDE)})
    return {key: number for key, number in sorted(total.items()) if number}


def _remarks(planned: Plan, lost: str | None) -> Iterator[str]:
    if lost is not None:
        yield f"the earlier ingest could not be taken over, so everything was read again: {lost}"
    for pattern in planned.unused_patterns:
        yield f"--exclude {pattern!r} matched no file; patterns are tried on paths below the folder that was named"


def _counts(name: str, sources: Sequence[SessionSource]) -> FormatCounts:
    total, redactions = Counter[str](), Counter[str]()
    for source in sources:
        total.update(source.counts)
        redactions.update(source.redactions)
    return FormatCounts(
        format=name,
        files=sum(len(source.sizes) for source in sources),
        secrets=redactions.total() - redactions[NAME_KIND],
        names=redactions[NAME_KIND],
        **{column: total[column] for column in _COLUMNS},
    )


def _account_of(report: IngestReport) -> SessionSource:
    skips = [(skip.reason, skip.file, skip.line) for skip in report.skips]
    return SessionSource(path="", name="", skipped=dict(report.skipped), skips=skips)
