"""What a scrub did: counts by kind, never a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class ScrubReport:
    """How many replacements of each kind were made. Kinds are sorted, so equal work gives equal reports."""

    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", MappingProxyType(dict(sorted(self.counts.items()))))

    @property
    def total(self) -> int:
        """All replacements together."""
        return sum(self.counts.values())

    def merge(self, *others: ScrubReport) -> ScrubReport:
        """The sum of this report and others, in any order."""
        return ScrubReport.merge_all((self, *others))

    @staticmethod
    def merge_all(reports: Iterable[ScrubReport]) -> ScrubReport:
        """The sum of many reports."""
        total: dict[str, int] = {}
        for report in reports:
            for kind, count in report.counts.items():
                total[kind] = total.get(kind, 0) + count
        return ScrubReport(total)

    def to_dict(self) -> dict[str, int]:
        """A plain dict for JSON."""
        return dict(self.counts)

    def __reduce__(self) -> tuple[type[ScrubReport], tuple[dict[str, int]]]:
        # A mapping proxy cannot be pickled, and reports come back from worker processes.
        return (ScrubReport, (dict(self.counts),))
