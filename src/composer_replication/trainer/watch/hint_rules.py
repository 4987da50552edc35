"""Rules of the diagnosis about hints on rollouts: whether the model heeds them, whether channel 2 ran, and whether the
errors that it is about became more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from composer_replication.rollouts.heeding import (
    COMPARED,
    CONTRAST,
    DEVIATIONS,
    GATE,
    OTHER_DROP,
    OWN_DROP,
    enough_in_words,
    in_words,
    mostly_own,
    shown,
)
from composer_replication.trainer.watch.logged_history import ERROR_RATE, SDPO_LOSSES, History, last_of, values_of

_RAN = "ran/sdpo_kl"
# A straight line through the rates: over how many, how far up from end to end, and how sure. Of our tables' trainings
# with channel 2, judged by the failing calls of their rollouts, it speaks of five of 24 with real weights (all of the
# 1.5B model's with hints of another kind, and two with right ones) and of none of 56 with the embedded student. GRPO
# alone would be told too, where it came apart in 600 steps: a rise does not say why.
_FEWEST_RATES, _LEAST_RISE, _SURE = 8, 5.0, 3.0


class _Known(NamedTuple):
    """The latest figures, over all comparisons so far."""

    compared: float
    own_drop: float
    other_drop: float
    deviations: float

    @property
    def words(self) -> str:
        return in_words(*self)


def hints_not_heeded(history: History) -> str:
    figures = _known(history)
    if figures is None:
        return ""
    does_more = shown(figures.compared, figures.deviations)
    if does_more is None or (does_more and _is_enough(history, figures) is not False):
        return ""
    why = f"enough to learn from them ({enough_in_words()})" if does_more else "by more than chance"
    rests = ", and was never taught on rollouts" if _never_taught(history) else ""
    return (
        f"This model does not heed hints in its rollouts {why}: {figures.words}. Channel 2 has little to teach with"
        f"{rests}: set loss.alpha_sdpo to 0, or teach the model to use hints first."
    )


def hints_not_compared(history: History) -> str:
    """Too little is known; behind a gate that has not opened, that is why channel 2 did nothing."""
    figures, most = _known(history), max(values_of(history, COMPARED), default=0)
    if figures is None or not values_of(history, SDPO_LOSSES[0]) or hints_not_heeded(history):
        return ""
    never_taught = _never_taught(history)
    rests = " So channel 2 was never taught on rollouts; train.grpo.heed_gate = false teaches all the same."
    if shown(figures.compared, figures.deviations):
        if not never_taught or _is_enough(history, figures):  # it ran, or the next step will
            return ""
        return f"Hints do more than others here, and not enough ({enough_in_words()}): {figures.words}.{rests}"
    if most and not never_taught:
        return ""
    return (
        f"Whether this model heeds hints cannot be told yet, of {figures.compared:,.0f} comparisons of two kinds of "
        f"error, each after the other's hint.{rests if never_taught else ''}"
    )


def errors_rise(history: History) -> str:
    """The errors that channel 2 is about, more of them the longer it runs, as happened to a real model."""
    ran = [line for line in history if values_of([line], SDPO_LOSSES[0]) and last_of([line], _RAN) != 0]
    rates = values_of(ran, ERROR_RATE)
    if len(rates) < _FEWEST_RATES or max(rates) - min(rates) < _LEAST_RISE:
        return ""
    slope, first = statistics.linear_regression(range(len(rates)), rates)
    last = first + slope * (len(rates) - 1)
    deviations = _deviations([rate - first - slope * at for at, rate in enumerate(rates)], slope)
    if last - first < _LEAST_RISE or deviations < _SURE:
        return ""
    return (
        f"Erring turns became more frequent while channel 2 ran: from {max(first, 0):.0f} to {min(last, 100):.0f} of "
        f"100 turns, by a line through {len(rates):,} lines of metrics; its rise is {min(deviations, 99):.1f} standard "
        "errors. Channel 2 may be why: compare a run with loss.alpha_sdpo = 0."
    )


def _deviations(rests: Sequence[float], slope: float) -> float:
    """A slope in standard errors, which are wider where what is left of one line resembles the next one's."""
    total, number = max(math.fsum(rest**2 for rest in rests), 1e-9), len(rests)
    alike = max(math.fsum(one * following for one, following in pairwise(rests)) / total, 0.0)
    steps = number * (number**2 - 1) / 12  # the sum of squares of the places around their mean
    return slope / math.sqrt(total / (number - 2) / steps * (1 + alike) / (1 - alike))


def _known(history: History) -> _Known | None:
    names = (COMPARED, OWN_DROP, OTHER_DROP, DEVIATIONS)
    with_them = [line for line in history if all(values_of([line], name) for name in names)]
    return _Known(*(float(with_them[-1][name]) for name in names)) if with_them else None


def _is_enough(history: History, figures: _Known) -> bool | None:
    """Of hints that do more than others; where a contrast takes off what others do, all of it is."""
    return True if last_of(history, CONTRAST) == 1 else mostly_own(figures.own_drop, figures.other_drop)


def _never_taught(history: History) -> bool:
    """For its gate; without one it ran. A line's share of steps speaks for all of them, its gate for the last."""
    return bool(values_of(history, GATE)) and not any(values_of(history, _RAN))
