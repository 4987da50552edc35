"""Rules of the diagnosis about hints on rollouts: whether the model heeds them, and whether channel 2 ran at all."""

from __future__ import annotations

from typing import NamedTuple

from composer_replication.rollouts.heeding import (
    COMPARED,
    DEVIATIONS,
    GATE,
    OTHER_DROP,
    OWN_DROP,
    in_words,
    mostly_own,
    shown,
)
from composer_replication.trainer.watch.logged_history import SDPO_LOSSES, History, last_of, values_of


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
    known = _known(history)
    if known is None:
        return ""
    does_more, is_its_own = shown(known.compared, known.deviations), mostly_own(known.own_drop, known.other_drop)
    is_open = last_of(history, GATE) == 1  # with a contrast the rest is taken off, and more is enough
    if does_more is None or (does_more and (is_its_own is not False or is_open)):
        return ""
    why = "more than any text in their place" if does_more else "by more than chance"
    rests = ", and never ran on rollouts" if _never_ran(history) else ""
    return (
        f"This model does not heed hints in its rollouts {why}: {known.words}. Channel 2 has little to teach with"
        f"{rests}: set loss.alpha_sdpo to 0, or teach the model to use hints first."
    )


def hints_not_compared(history: History) -> str:
    """Too little is known; behind a gate that has not opened, that is why channel 2 did nothing."""
    known, most = _known(history), max(values_of(history, COMPARED), default=0)
    if known is None or not values_of(history, SDPO_LOSSES[0]) or hints_not_heeded(history):
        return ""
    never_ran = _never_ran(history)
    rests = " So channel 2 never ran on rollouts; train.grpo.heed_gate = false teaches all the same."
    if shown(known.compared, known.deviations):
        if not never_ran or mostly_own(known.own_drop, known.other_drop):  # it ran, or the next step will
            return ""
        return f"Hints do more than others here, and less than twice as much: {known.words}.{rests}"
    if most and not never_ran:
        return ""
    return (
        f"Whether this model heeds hints cannot be told yet, of {known.compared:,.0f} comparisons of two kinds of "
        f"error, each after the other's hint.{rests if never_ran else ''}"
    )


def _known(history: History) -> _Known | None:
    names = (COMPARED, OWN_DROP, OTHER_DROP, DEVIATIONS)
    with_them = [line for line in history if all(values_of([line], name) for name in names)]
    return _Known(*(float(with_them[-1][name]) for name in names)) if with_them else None


def _never_ran(history: History) -> bool:
    """For its gate; without one it ran. A line's share of steps speaks for all of them, its gate for the last."""
    return bool(values_of(history, GATE)) and not any(values_of(history, "ran/sdpo_kl"))
