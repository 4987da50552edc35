"""Equal budgets: whether every job spent what the plan says, and all of them on the same units from the same weights.

Rollouts and optimiser steps have to be those of the plan exactly, and the same in all arms. Tokens depend on what a
model says: an arm's mean may differ from the plan's number, or from the median arm, by a stated share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from composer_replication.ablation.job import Result
from composer_replication.ablation.jobs import Results

Breaches = dict[str, list[str]]
"""By arm, what was not equal, a sentence each."""
_EXACT = ("rollouts", "steps")


def breaches_of(found: Results) -> Breaches:
    """What makes arms incomparable; an arm that the plan exempts is compared in its units alone."""
    breaches: Breaches = defaultdict(list)
    spending = [result for result in found.results if found.frozen.arms[result.arm].exempt is None]
    for result in found.results:
        breaches[result.arm] += _of_units(result, found.results)
    for result in spending:
        breaches[result.arm] += _of_exact(result, found, spending)
        breaches[result.arm] += _of_start(result, spending)
    for arm, sentence in _of_tokens(found, spending):
        breaches[arm].append(sentence)
    return {arm: breaches[arm] for arm in found.frozen.arms if breaches[arm]}


def spent_by(results: Sequence[Result], name: str) -> list[float]:
    """What each of these jobs spent of one thing."""
    return [getattr(result.spent, name) for result in results]


def _of_exact(result: Result, study: Results, spending: Sequence[Result]) -> Iterator[str]:
    for name in _EXACT:
        spent, planned = getattr(result.spent, name), getattr(study.frozen.experiment.budget, name)
        usual = _usual(spent_by(spending, name)) if planned is None else planned
        if spent != usual:
            whose = "the plan's" if planned is not None else "the others'"
            yield f"seed {result.seed}: {spent:,} {name}, {whose} are {usual:,}"


def _of_units(result: Result, all_results: Sequence[Result]) -> Iterator[str]:
    units = _usual([tuple(unit.unit for unit in other_result.units) for other_result in all_results])
    own_units = tuple(unit.unit for unit in result.units)
    if own_units != units:
        yield f"seed {result.seed}: other units than most jobs, {len(set(own_units) ^ set(units))} of them not in both"


def _of_start(result: Result, spending: Sequence[Result]) -> Iterator[str]:
    start_digests = [other_result.digests["start"] for other_result in spending if "start" in other_result.digests]
    if start_digests and result.digests.get("start") != _usual(start_digests):
        yield f"seed {result.seed}: begins with other weights than most jobs"


def _of_tokens(study: Results, spending: Sequence[Result]) -> Iterator[tuple[str, str]]:
    budget = study.frozen.experiment.budget
    means = {
        arm: fmean(spent_by(arm_results, "tokens"))
        for arm in study.frozen.arms
        if (arm_results := [result for result in spending if result.arm == arm])
    }
    usual = median(means.values()) if budget.tokens is None and means else budget.tokens
    for arm, mean in means.items():
        if usual and abs(mean / usual - 1) > budget.tokens_within:
            whose = "the plan's" if budget.tokens is not None else "the median arm's"
            within = f"allowed: {budget.tokens_within:.0%}"
            yield arm, f"{mean:,.0f} tokens a job, {mean / usual - 1:+.0%} of {whose} {usual:,.0f} ({within})"


def _usual(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
