"""The lines of metrics that a run logged, and the figures in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.runs.lineage import has_figure

History = Sequence[Mapping[str, Any]]
# Logged only on steps on which the channel was computed, of rollouts or of logged sessions.
SDPO_LOSSES = ("loss/sdpo_kl", "loss/sdpo_kl_logged")
ERROR_RATE = "sites/per_100_turns"


def values_of(history: History, key: str) -> list[float]:
    """The finite values of a metric, in order."""
    values = [line.get(key) for line in history]
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def mean_of(history: History, key: str) -> float | None:
    values = values_of(history, key)
    return math.fsum(values) / len(values) if values else None


def last_of(history: History, key: str) -> float | None:
    values = values_of(history, key)
    return values[-1] if values else None


def never_ran(history: History, weight: str, losses: Sequence[str]) -> bool:
    """Whether a channel had a weight above 0 at some time, and no loss was ever measured of it."""
    return any(values_of(history, weight)) and not any(has_figure(history, key.removeprefix("loss/")) for key in losses)
