"""Why a run cannot learn, in plain words, from the metrics it logged.

A rule looks at the whole history it is given and answers with a sentence or nothing. It answers only where the metric
it needs was logged. Shares are means over the lines that have the metric.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from composer_replication.errors import InputError, explain
from composer_replication.runs.lineage import has_figure
from composer_replication.trainer.composer.heeding import (
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

# Metrics of ours that the rules read; the others are those of TRL and transformers.
ROLLOUTS_TOTAL = "rollouts/total"
ADVANTAGE_SIZE = "advantages/mean_abs"
SDPO_WEIGHT, REPLAY_WEIGHT = "loss/alpha_sdpo", "loss/beta_replay"
REPLAY_LOSSES = ("loss/trace_replay_dpo",)
_UNJUDGED = re.compile(r"rewards/(.+)/unjudged")
# Rules about a channel that never ran -> what it is counted in, in words, and its number.
_ITEMS = {
    "no_taught_sites": ("sites", "error sites with a hint", 2),
    "no_pairs": ("pairs", "preference pairs", 3),
}
_MOST = 0.8
_ALL_BUT_FEW = 0.95


class DiagnosisFinding(NamedTuple):
    """A rule's name, which stays the same as figures change, and what it has to say."""

    rule: str
    text: str


def diagnose(
    history: History, *, max_completion_length: int | None = None, items: Mapping[str, int] | None = None
) -> list[str]:
    """What keeps this run from learning, worst first; nothing where no rule applies.

    `items` says how many `sites` and `pairs` the logged sessions have: steps may have been too few to meet them.
    """
    causes = findings(history, max_completion_length=max_completion_length, items=items)
    return [finding.text for finding in causes]


def findings(
    history: History, *, max_completion_length: int | None = None, items: Mapping[str, int] | None = None
) -> list[DiagnosisFinding]:
    """`diagnose` with the name of each rule."""
    causes = [DiagnosisFinding(name, text) for name, rule in _RULES.items() if (text := rule(history))]
    causes = [finding._replace(text=_not_met(finding.rule, history, items or {}) or finding.text) for finding in causes]
    if max_completion_length is not None:
        limit = f"the length limit of {max_completion_length:,} tokens"
        causes = [finding._replace(text=finding.text.replace("the length limit", limit)) for finding in causes]
    return causes


def _nothing_logged(history: History) -> str:
    if any("loss" in line or "reward" in line for line in history):
        return ""
    return "Nothing was logged, so nothing can be said: the run took fewer steps than lie between two lines of metrics."


def _learning_rate_zero(history: History) -> str:
    rates = _values_of(history, "learning_rate")
    if len(rates) < 2 or any(rates):  # the first line of a warm-up is 0 in healthy runs
        return ""
    return f"The learning rate is 0 in all {len(rates):,} lines of metrics: no weight was changed."


def _not_a_number(history: History) -> str:
    for key, what in (("loss", "loss"), ("grad_norm", "gradient")):
        values = [line[key] for line in history if isinstance(line.get(key), int | float)]
        bad = sum(not math.isfinite(value) for value in values)
        if bad:
            return (
                f"The {what} was NaN or infinite in {bad:,} of {len(values):,} lines of metrics. Lower the learning "
                "rate, or compute in fp32, and look at the rewards."
            )
    return ""


def _gradient_zero(history: History) -> str:
    norms = _values_of(history, "grad_norm")
    if not norms or any(norms):
        return ""
    return f"The gradient is 0 in all {len(norms):,} lines of metrics: no weight was changed."


def _unjudged(history: History) -> str:
    keys = dict.fromkeys(key for line in history for key in line)
    shares = {match[1]: mean_of(history, key) or 0.0 for key in keys if (match := _UNJUDGED.fullmatch(key))}
    rewarded = [line for line in history if "reward" in line]
    if rewarded and not _values_of(rewarded, "reward"):  # TRL logs None where no rollout of a batch has a reward
        return "The reward function returned None or NaN for 100% of rollouts, which teach nothing."
    if len(shares) == 1:
        [(name, share)] = shares.items()
        sentence = f"The reward function {name} returned None or NaN for {share:.0%} of rollouts, which teach nothing."
        return sentence if share >= 0.01 else ""
    # Each of several may leave rollouts to the others; one that judges hardly any is a mistake all the same.
    idle = [f"{name} ({share:.0%})" for name, share in shares.items() if share >= _ALL_BUT_FEW]
    return f"Of the reward functions, {', '.join(idle)} returned None or NaN for nearly all rollouts." if idle else ""


def _equal_rewards(history: History) -> str:
    shares = [mean_of(history, key) for key in ("groups/equal_after", "frac_reward_zero_std")]
    share = next((mean for mean in shares if mean is not None), None)
    if share is None or share < _MOST:
        return ""
    reward = mean_of(history, "reward")
    level = "" if reward is None else f" The mean reward is {reward:.3g}."
    return (
        f"{share:.0%} of groups had equal reward: their advantages are 0 and they teach nothing.{level} Use tasks that "
        "the model solves sometimes, a finer reward, more rollouts a prompt, or dynamic sampling."
    )


def _advantages_zero(history: History) -> str:
    sizes = _values_of(history, ADVANTAGE_SIZE)
    if not sizes or any(sizes):
        return ""
    return f"The advantages are 0 in all {len(sizes):,} lines of metrics: the policy gradient is 0."


def _length_limit(history: History) -> str:
    share = mean_of(history, "completions/clipped_ratio")
    if share is None or share < _MOST:
        return ""
    which = "All" if share >= 1 else f"{share:.0%} of"
    return (
        f"{which} completions hit the length limit without ending. Raise it, or check that the model's end-of-turn "
        "token is the one that generation stops at."
    )


def _empty_completions(history: History) -> str:
    length = mean_of(history, "completions/mean_length")
    if length is None or length > 2:
        return ""
    return f"Completions are {length:.1f} tokens long on average: the model ends its turn at once."


def _no_entropy(history: History) -> str:
    entropy = mean_of(history, "entropy")
    if entropy is None or entropy > 0.01:
        return ""
    return (
        f"The entropy of the policy is {entropy:.2g} nats a token: all rollouts of a prompt are the same. Start from "
        "weights that are less certain, or sample at a higher temperature."
    )


def _no_sites(history: History) -> str:
    rates = _values_of(history, ERROR_RATE)
    if not rates or any(rates) or not never_ran(history, SDPO_WEIGHT, SDPO_LOSSES):
        return ""
    rollouts = _last_of(history, ROLLOUTS_TOTAL)
    where = f"{len(rates):,} lines of metrics" if rollouts is None else f"{rollouts:,.0f} rollouts"
    return f"No error sites were found in {where}: channel 2 never ran."


def _no_taught_sites(history: History) -> str:
    rate = mean_of(history, ERROR_RATE)
    if rate == 0.0 or not never_ran(history, SDPO_WEIGHT, SDPO_LOSSES):
        return ""
    if rate is None:
        return "No batch held an error site with a hint: channel 2 never ran."
    return (
        f"{rate:.3g} error sites per 100 turns were found and none was taught, for want of a hint, of a place for it "
        "or of its proof: channel 2 never ran."
    )


def _no_pairs(history: History) -> str:
    is_silent = never_ran(history, REPLAY_WEIGHT, REPLAY_LOSSES)
    return "No preference pairs were used: channel 3 never ran." if is_silent else ""


def _not_met(rule: str, history: History, items: Mapping[str, int]) -> str:
    """What to say of a channel that never ran although there is something for it."""
    is_of_rollouts = rule == "no_taught_sites" and bool(_values_of(history, ERROR_RATE))
    if rule not in _ITEMS or is_of_rollouts:
        return ""
    name, words, channel = _ITEMS[rule]
    number = items.get(name, 0)
    if not number:
        return ""
    return (
        f"No step held any of the {number:,} {words} while their weight was above 0: channel {channel} never ran. "
        "More steps (train.optimiser.steps) reach them."
    )


def _no_calls(history: History) -> str:
    calls = _values_of(history, "tools/call_frequency")
    if not calls or any(calls):
        return ""
    return "No tool was called in any rollout: the model does not write calls that the parser of its template reads."


def _all_calls_fail(history: History) -> str:
    calls, failed = mean_of(history, "tools/call_frequency"), mean_of(history, "tools/failure_frequency")
    if not calls or failed is None or failed < _ALL_BUT_FEW:
        return ""
    return f"{failed:.0%} of tool calls failed: look at the environment before the model."


def _clipped_away(history: History) -> str:
    share = mean_of(history, "clip_ratio/region_mean")
    if share is None or share < _MOST:
        return ""
    return (
        f"{share:.0%} of tokens were clipped: the policy is too far from the one that made the rollouts. Lower the "
        "learning rate or the number of passes over a batch."
    )


# Rules of the diagnosis about hints on rollouts: whether the model heeds them, whether channel 2 ran, and whether the
# errors that it is about became more.


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
    figures, most = _known(history), max(_values_of(history, COMPARED), default=0)
    if figures is None or not _values_of(history, SDPO_LOSSES[0]) or hints_not_heeded(history):
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
    ran = [line for line in history if _values_of([line], SDPO_LOSSES[0]) and _last_of([line], _RAN) != 0]
    rates = _values_of(ran, ERROR_RATE)
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


_RULES: Mapping[str, Callable[[History], str]] = {
    "nothing_logged": _nothing_logged,
    "learning_rate_zero": _learning_rate_zero,
    "not_a_number": _not_a_number,
    "gradient_zero": _gradient_zero,
    "unjudged": _unjudged,
    "equal_rewards": _equal_rewards,
    "advantages_zero": _advantages_zero,
    "length_limit": _length_limit,
    "empty_completions": _empty_completions,
    "no_entropy": _no_entropy,
    "no_sites": _no_sites,
    "no_taught_sites": _no_taught_sites,
    "hints_not_heeded": hints_not_heeded,
    "hints_not_compared": hints_not_compared,
    "errors_rise": errors_rise,
    "no_pairs": _no_pairs,
    "no_calls": _no_calls,
    "all_calls_fail": _all_calls_fail,
    "clipped_away": _clipped_away,
}


# A diagnosis of the run while it runs: every so many steps over the latest lines of metrics, at the end over all.

# ruff: noqa: ARG002  (what a callback is called with is not its choice)
_logger = logging.getLogger(__name__)


class RunDiagnosis(TrainerCallback):
    """Says what `diagnose` finds: while the run goes on, each rule once; at the end, whatever holds for the whole run.

    `said` keeps the sentences of the end.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        max_completion_length: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if every < 1:
            raise InputError(explain("every", got=every, expected="1 step or more"))
        self._every, self._length = every, max_completion_length
        self._say = _logger.warning if say is None else say
        self._told: set[str] = set()
        self.said: list[str] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every:
            return
        first = state.global_step - self._every
        lines = [line for line in state.log_history if line.get("step", 0) > first]
        # Two lines at least: what the very first steps look like says little. None at all is for the end to judge.
        if len(lines) < 2 or not state.is_world_process_zero:
            return
        for finding in findings(lines, max_completion_length=self._length):
            if finding.rule not in self._told:
                self._told.add(finding.rule)
                self._say(f"Steps {first + 1} to {state.global_step}: {finding.text}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.said = [finding.text for finding in findings(state.log_history, max_completion_length=self._length)]
        if state.is_world_process_zero:
            for text in self.said:
                self._say(f"The whole run: {text}")


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


def _deviations(rests: Sequence[float], slope: float) -> float:
    """A slope in standard errors, which are wider where what is left of one line resembles the next one's."""
    total, number = max(math.fsum(rest**2 for rest in rests), 1e-9), len(rests)
    alike = max(math.fsum(one * following for one, following in pairwise(rests)) / total, 0.0)
    steps = number * (number**2 - 1) / 12  # the sum of squares of the places around their mean
    return slope / math.sqrt(total / (number - 2) / steps * (1 + alike) / (1 - alike))


def _known(history: History) -> _Known | None:
    names = (COMPARED, OWN_DROP, OTHER_DROP, DEVIATIONS)
    with_them = [line for line in history if all(_values_of([line], name) for name in names)]
    return _Known(*(float(with_them[-1][name]) for name in names)) if with_them else None


def _is_enough(history: History, figures: _Known) -> bool | None:
    """Of hints that do more than others; where a contrast takes off what others do, all of it is."""
    return True if _last_of(history, CONTRAST) == 1 else mostly_own(figures.own_drop, figures.other_drop)


def _never_taught(history: History) -> bool:
    """For its gate; without one it ran. A line's share of steps speaks for all of them, its gate for the last."""
    return bool(_values_of(history, GATE)) and not any(_values_of(history, _RAN))


# The lines of metrics that a run logged, and the figures in them.

History = Sequence[Mapping[str, Any]]
# Logged only on steps on which the channel was computed, of rollouts or of logged sessions.
SDPO_LOSSES = ("loss/sdpo_kl", "loss/sdpo_kl_logged")
ERROR_RATE = "sites/per_100_turns"


def _values_of(history: History, key: str) -> list[float]:
    """The finite values of a metric, in order."""
    values = [line.get(key) for line in history]
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def mean_of(history: History, key: str) -> float | None:
    values = _values_of(history, key)
    return math.fsum(values) / len(values) if values else None


def _last_of(history: History, key: str) -> float | None:
    values = _values_of(history, key)
    return values[-1] if values else None


def never_ran(history: History, weight: str, losses: Sequence[str]) -> bool:
    """Whether a channel had a weight above 0 at some time, and no loss was ever measured of it."""
    return any(_values_of(history, weight)) and not any(
        has_figure(history, key.removeprefix("loss/")) for key in losses
    )
