"""Figures with intervals, from results.json alone and without torch; `page` shows them.

A figure of an arm is R = times * sum of `of` / sum of `per`, over the units of all its seeds. An interval needs a
value of every unit and seed whose mean is the figure; to first order that is what each one moves it by:

    z = R + (times * of - R * per) / mean(per)
    difference to another arm   R - R' + (z - R) - (z' - R')       unit by unit and seed by seed: paired
    ratio, on the log scale     log(R / R') + (z - R) / R - (z' - R') / R'

`evaluation.statistics.repeated_interval` takes seeds as repeats and units as what is drawn: both levels count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_replication.ablation.job import Result
from composer_replication.ablation.jobs import Results
from composer_replication.ablation.plan import Metric
from composer_replication.evaluation.statistics import Interval, repeated_interval

Array = NDArray[np.float64]


class Figure(NamedTuple):
    """One metric of one arm, or of an arm against another; `ratio` where a ratio of the two has a meaning."""

    metric: str
    arm: str
    against: str | None
    seeds: int
    units: int
    value: Interval
    ratio: Interval | None = None
    verdict: str = ""
    """better, worse or no difference, where the metric has a better side; empty for an arm alone."""


class _Grid(NamedTuple):
    """Sums of one metric, seeds down and units across."""

    seeds: tuple[int, ...]
    units: tuple[str, ...]
    of: Array
    per: Array


def figures_of(found: Results, metrics: Mapping[str, Metric]) -> list[Figure]:
    """Every metric of every arm, then every comparison; what no job has a sum of is left out."""
    figures: list[Figure] = []
    for name, metric in metrics.items():
        grids = {arm: _grid(found.of_arm(arm), name, metric) for arm in found.frozen.arms}
        known_grids = {arm: grid for arm, grid in grids.items() if grid is not None}
        figures += [_alone(name, arm, grid) for arm, grid in known_grids.items()]
        pairs = [
            (arm, other_arm)
            for arm in known_grids
            for other_arm in found.frozen.compared_with(arm)
            if other_arm in known_grids
        ]
        figures += [
            figure
            for arm, other_arm in pairs
            if (figure := _against(name, metric, arm, other_arm, known_grids[arm], known_grids[other_arm]))
        ]
    return figures


def metrics_by_kind(found: Results) -> dict[str, Metric]:
    """For each metric the sums of single kinds that jobs give (`failing_calls:edit_no_match`), as metrics."""
    names = {name for result in found.results for unit in result.units for name in unit.metrics}
    by_kind: dict[str, Metric] = {}
    for name, metric in found.frozen.metrics.items():
        for sum_name in sorted(candidate for candidate in names if candidate.startswith(f"{metric.of or name}:")):
            kind = sum_name.partition(":")[2]
            per = f"{metric.per}:{kind}" if metric.per and f"{metric.per}:{kind}" in names else metric.per
            options = {"times": metric.times, "better": metric.better}
            by_kind[f"{name}:{kind}"] = Metric(of=sum_name, per=per, **options)
    return by_kind


def _grid(results: Sequence[Result], name: str, metric: Metric) -> _Grid | None:
    """None where there is no such sum, or units differ between the seeds: then nothing is a pair."""
    units = {tuple(sorted(unit.unit for unit in result.units)) for result in results}
    if len(units) != 1 or not any((metric.of or name) in unit.metrics for result in results for unit in result.units):
        return None
    ordered = [sorted(result.units) for result in results]
    of = np.array([[unit.metrics.get(metric.of or name, 0.0) for unit in row] for row in ordered], dtype=np.float64)
    per = np.ones_like(of)
    if metric.per is not None:
        per = np.array([[unit.metrics.get(metric.per, 0.0) for unit in row] for row in ordered], dtype=np.float64)
    if not per.sum():
        return None
    return _Grid(tuple(result.seed for result in results), next(iter(units)), metric.times * of, per)


def _ratio(grid: _Grid) -> float:
    return float(grid.of.sum() / grid.per.sum())


def _moves(grid: _Grid) -> Array:
    """What each unit and seed moves the figure by; their mean is 0."""
    return (grid.of - _ratio(grid) * grid.per) / grid.per.mean()


def _alone(name: str, arm: str, grid: _Grid) -> Figure:
    value = _interval(_ratio(grid), _moves(grid), grid.units)
    return Figure(name, arm, None, len(grid.seeds), len(grid.units), value)


def _against(name: str, metric: Metric, arm: str, other_arm: str, mine: _Grid, theirs: _Grid) -> Figure | None:
    """Paired by seed and unit, over the seeds that both have."""
    seeds = tuple(seed for seed in mine.seeds if seed in theirs.seeds)
    if not seeds or mine.units != theirs.units:
        return None
    one, two = (_only(grid, seeds) for grid in (mine, theirs))
    if not one.per.sum() or not two.per.sum():
        return None
    value = _interval(_ratio(one) - _ratio(two), _moves(one) - _moves(two), one.units)
    ratio = None
    if min(one.of.min(), two.of.min()) >= 0 and _ratio(one) > 0 and _ratio(two) > 0:
        moves = _moves(one) / _ratio(one) - _moves(two) / _ratio(two)
        ratio = _exponential(_interval(math.log(_ratio(one) / _ratio(two)), moves, one.units))
    return Figure(name, arm, other_arm, len(seeds), len(one.units), value, ratio, _word(value, metric))


def _only(grid: _Grid, seeds: Sequence[int]) -> _Grid:
    rows = [grid.seeds.index(seed) for seed in seeds]
    return _Grid(tuple(seeds), grid.units, grid.of[rows], grid.per[rows])


def _interval(estimate: float, moves: Array, units: Sequence[str]) -> Interval:
    """The mean of the moves is 0: what is around it is what is around the estimate."""
    around = repeated_interval((estimate + moves).tolist(), units)
    shift = estimate - around.estimate  # rounding
    low, high = (None if bound is None else bound + shift for bound in (around.low, around.high))
    return around._replace(estimate=estimate, low=low, high=high)


def _exponential(value: Interval) -> Interval:
    low, high = (None if bound is None else math.exp(bound) for bound in (value.low, value.high))
    return value._replace(estimate=math.exp(value.estimate), low=low, high=high)


def _word(value: Interval, metric: Metric) -> str:
    if value.low is None or metric.better is None:
        return "no interval" if value.low is None else ""
    if not value.excludes_zero:
        return "no difference"
    return "better" if (value.estimate > 0) == (metric.better == "up") else "worse"
