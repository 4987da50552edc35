"""Single decisions of held-out sessions: what training did to the log-prob of each, by the role it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from composer_replication.report.records import Row


class Changes(NamedTuple):
    """Changes of log-prob a token by role of the decision, one value a decision."""

    after: Mapping[str, list[float]]
    control: Mapping[str, list[float]]


def changes(evaluated: Iterable[Sequence[Row]]) -> Changes:
    """What training did to single decisions of the held-out sessions."""
    after: dict[str, list[float]] = defaultdict(list)
    control: dict[str, list[float]] = defaultdict(list)
    for rows in evaluated:
        for row in rows:
            after[row["role"]].append(row["after"] - row["before"])
            if row["control"] is not None:
                control[row["role"]].append(row["control"] - row["before"])
    return Changes(after, control)


class Means(NamedTuple):
    """Mean log-probs a token of a site's decisions in one role."""

    before: float
    after: float
    control: float | None


def decision_of(rows: Sequence[Row], role: str) -> Means | None:
    """None where a site has no decision in this role."""
    chosen = [row for row in rows if row["role"] == role]
    if not chosen:
        return None
    control = [row["control"] for row in chosen if row["control"] is not None]
    before, after = (fmean(row[arm] for row in chosen) for arm in ("before", "after"))
    return Means(before, after, fmean(control) if control else None)
