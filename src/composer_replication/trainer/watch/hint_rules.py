"""Rules of the diagnosis about hints on rollouts: whether the model heeds them, and whether channel 2 ran at all."""

from __future__ import annotations

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


def hints_not_heeded(history: History) -> str:
    names = (COMPARED, OWN_DROP, OTHER_DROP, DEVIATIONS)
    with_them = [line for line in history if all(values_of([line], name) for name in names)]
    if not with_them:
        return ""
    compared, own, other, deviations = (float(with_them[-1][name]) for name in names)
    does_more, is_its_own = shown(compared, deviations), mostly_own(own, other)
    if does_more is None or (does_more and is_its_own is not False):
        return ""
    why = "more than any text in their place" if does_more else "by more than chance"
    return (
        f"This model does not heed hints in its rollouts {why}: {in_words(compared, own, other, deviations)}. Channel "
        f"2 has little to teach with{_never_opened(history)}: set loss.alpha_sdpo to 0, or teach the model to use "
        "hints first."
    )


def hints_not_compared(history: History) -> str:
    """Too little is known; behind a gate that has not opened, that is why channel 2 did nothing."""
    compared, never_opened = last_of(history, COMPARED), _never_opened(history)
    if compared is None or not values_of(history, SDPO_LOSSES[0]) or hints_not_heeded(history):
        return ""
    if compared and not never_opened:
        return ""
    rests = " So channel 2 never ran on rollouts; train.grpo.heed_gate = false teaches all the same."
    rests = rests if never_opened else ""
    return (
        f"Whether this model heeds hints cannot be told yet, of {compared:,.0f} comparisons of two kinds of error, "
        f"each after the other's hint.{rests}"
    )


def _never_opened(history: History) -> str:
    opened = values_of(history, GATE)
    return ", and never ran on rollouts" if opened and not any(opened) else ""
