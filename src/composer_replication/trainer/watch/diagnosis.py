"""Explain why a run cannot learn, from its logged metrics.

Each rule reads the whole history and returns a sentence, or "" if it does not apply. A rule applies only if the metric
that it needs was logged. Shares are means over the lines of metrics that contain the metric. `RunDiagnosis` runs the
rules during training and at its end.
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
from composer_replication.trainer.rollouts.hint_gate import (
    COMPARED,
    CONTRAST,
    DEVIATIONS,
    GATE,
    OTHER_DROP,
    OWN_DROP,
    HintEffect,
    describe_requirement,
)

# Our own metrics that the rules read; the other metrics come from TRL and transformers.
ROLLOUTS_TOTAL = "rollouts/total"
ADVANTAGE_SIZE = "advantages/mean_abs"
SDPO_WEIGHT, REPLAY_WEIGHT = "loss/alpha_sdpo", "loss/beta_replay"
REPLAY_LOSSES = ("loss/trace_replay_dpo",)
# "rewards/accuracy/unjudged" -> "accuracy"; not "rewards/accuracy/mean"
_MISSING_REWARD_KEY = re.compile(r"rewards/(.+)/unjudged")
# For rules about a channel that never ran: the key in `items`, its wording in a message, and the channel's number.
_ITEMS = {
    "no_taught_sites": ("sites", "error sites with a hint", 2),
    "no_pairs": ("pairs", "preference pairs", 3),
}
# Minimum shares for the findings "most" (equal groups, truncated or clipped completions) and "nearly all".
_MOST = 0.8
_NEARLY_ALL = 0.95


class _DiagnosisFinding(NamedTuple):
    """A finding of a rule: the rule's name, and a message, whose numbers may change from one finding to the next."""

    rule: str
    text: str


def diagnose(
    history: History, *, max_completion_length: int | None = None, items: Mapping[str, int] | None = None
) -> list[str]:
    """Return messages about what keeps this run from learning, worst first; an empty list if no rule applies.

    `items` has the numbers of `sites` and `pairs` in the logged sessions; a short run may not reach all of them.
    """
    causes = _findings(history, max_completion_length=max_completion_length, items=items)
    return [finding.text for finding in causes]


def _findings(
    history: History, *, max_completion_length: int | None = None, items: Mapping[str, int] | None = None
) -> list[_DiagnosisFinding]:
    """Return the findings from which `diagnose` takes its messages, with the names of their rules."""
    causes = [_DiagnosisFinding(name, text) for name, rule in _RULES.items() if (text := rule(history))]
    causes = [
        finding._replace(text=_channel_not_reached(finding.rule, history, items or {}) or finding.text)
        for finding in causes
    ]
    if max_completion_length is not None:
        # Rules do not know the limit, so it is inserted into their messages.
        limit = f"the length limit of {max_completion_length:,} tokens"
        causes = [finding._replace(text=finding.text.replace("the length limit", limit)) for finding in causes]
    return causes


def _nothing_logged(history: History) -> str:
    if any("loss" in line or "reward" in line for line in history):
        return ""
    return "No metrics were logged, so there is no diagnosis: the run had fewer steps than train.log_every."


def _learning_rate_zero(history: History) -> str:
    rates = _values_of(history, "learning_rate")
    # With a learning-rate warm-up, the first logged rate is 0 even in a healthy run.
    if len(rates) < 2 or any(rates):
        return ""
    return f"The learning rate is 0 in all {len(rates):,} lines of metrics: no weight changed."


def _not_a_number(history: History) -> str:
    for key, what in (("loss", "loss"), ("grad_norm", "gradient")):
        # Not `_values_of`, which drops values that are not finite.
        values = [line[key] for line in history if isinstance(line.get(key), int | float)]
        bad = sum(not math.isfinite(value) for value in values)
        if bad:
            return (
                f"The {what} was NaN or infinite in {bad:,} of {len(values):,} lines of metrics. Lower the learning "
                "rate or compute in fp32, and check the rewards."
            )
    return ""


def _gradient_zero(history: History) -> str:
    norms = _values_of(history, "grad_norm")
    if not norms or any(norms):
        return ""
    return f"The gradient is 0 in all {len(norms):,} lines of metrics: no weight changed."


def _missing_rewards(history: History) -> str:
    keys = dict.fromkeys(key for line in history for key in line)
    shares = {match[1]: _mean_of(history, key) or 0.0 for key in keys if (match := _MISSING_REWARD_KEY.fullmatch(key))}
    rewarded = [line for line in history if "reward" in line]
    # TRL logs None where no rollout of a batch has a reward.
    if rewarded and not _values_of(rewarded, "reward"):
        return "The reward function returned None or NaN for 100% of rollouts, so nothing is learned from them."
    if len(shares) == 1:
        [(name, share)] = shares.items()
        sentence = (
            f"The reward function {name} returned None or NaN for {share:.0%} of rollouts, so nothing is learned from "
            "them."
        )
        return sentence if share >= 0.01 else ""
    # A function may leave some rollouts to other functions, but a function that judges almost none is a mistake.
    idle = [f"{name} ({share:.0%})" for name, share in shares.items() if share >= _NEARLY_ALL]
    return f"Some reward functions returned None or NaN for nearly all rollouts: {', '.join(idle)}." if idle else ""


def _equal_rewards(history: History) -> str:
    shares = [_mean_of(history, key) for key in ("groups/equal_after", "frac_reward_zero_std")]
    share = next((mean for mean in shares if mean is not None), None)
    if share is None or share < _MOST:
        return ""
    reward = _mean_of(history, "reward")
    level = "" if reward is None else f" The mean reward is {reward:.3g}."
    return (
        f"{share:.0%} of groups had equal rewards, so their advantages are 0 and nothing is learned.{level} Use tasks "
        "that the model solves sometimes, a finer reward, more rollouts per prompt, or dynamic sampling."
    )


def _advantages_zero(history: History) -> str:
    sizes = _values_of(history, ADVANTAGE_SIZE)
    if not sizes or any(sizes):
        return ""
    return f"The advantages are 0 in all {len(sizes):,} lines of metrics: the policy gradient is 0."


def _length_limit(history: History) -> str:
    share = _mean_of(history, "completions/clipped_ratio")
    if share is None or share < _MOST:
        return ""
    amount = "All" if share >= 1 else f"{share:.0%} of"
    return (
        f"{amount} completions were cut off at the length limit. Raise it, or check that generation stops at the "
        "model's end-of-turn token."
    )


def _empty_completions(history: History) -> str:
    length = _mean_of(history, "completions/mean_length")
    if length is None or length > 2:
        return ""
    return f"Completions are {length:.1f} tokens long on average: the model ends its turn immediately."


def _no_entropy(history: History) -> str:
    entropy = _mean_of(history, "entropy")
    if entropy is None or entropy > 0.01:
        return ""
    return (
        f"The entropy of the policy is {entropy:.2g} nats/token: all rollouts for a prompt are the same. Start from "
        "a model that is less certain, or sample at a higher temperature."
    )


def _no_sites(history: History) -> str:
    rates = _values_of(history, ERROR_RATE)
    if not rates or any(rates) or not _never_ran(history, SDPO_WEIGHT, SDPO_LOSSES):
        return ""
    rollouts = _last_of(history, ROLLOUTS_TOTAL)
    searched = f"{len(rates):,} lines of metrics" if rollouts is None else f"{rollouts:,.0f} rollouts"
    return f"No error sites were found in {searched}: channel 2 never ran."


def _no_sites_trained_on(history: History) -> str:
    rate = _mean_of(history, ERROR_RATE)
    if rate == 0.0 or not _never_ran(history, SDPO_WEIGHT, SDPO_LOSSES):
        return ""
    if rate is None:
        return "No batch contained an error site with a hint: channel 2 never ran."
    return (
        f"{rate:.3g} error sites per 100 turns were found, but channel 2 never ran: none of them had a hint that "
        "fitted into the context and passed its check."
    )


def _no_pairs(history: History) -> str:
    is_silent = _never_ran(history, REPLAY_WEIGHT, REPLAY_LOSSES)
    return "No preference pairs were used: channel 3 never ran." if is_silent else ""


def _channel_not_reached(rule: str, history: History, items: Mapping[str, int]) -> str:
    """Return a message for a rule about a channel that has data but never ran because no step reached it, otherwise
    "".
    """
    is_of_rollouts = rule == "no_taught_sites" and bool(_values_of(history, ERROR_RATE))
    if rule not in _ITEMS or is_of_rollouts:
        return ""
    name, words, channel = _ITEMS[rule]
    number = items.get(name, 0)
    if not number:
        return ""
    return (
        f"No step reached any of the {number:,} {words} while the weight was above 0, so channel {channel} never "
        "ran. Raise train.optimiser.steps."
    )


def _no_calls(history: History) -> str:
    calls = _values_of(history, "tools/call_frequency")
    if not calls or any(calls):
        return ""
    return "No tool was called in any rollout: the model writes no calls that the parser of its chat template can read."


def _all_calls_fail(history: History) -> str:
    calls, failed = _mean_of(history, "tools/call_frequency"), _mean_of(history, "tools/failure_frequency")
    if not calls or failed is None or failed < _NEARLY_ALL:
        return ""
    return f"{failed:.0%} of tool calls failed. Check the environment first, then the model."


def _clipped_away(history: History) -> str:
    share = _mean_of(history, "clip_ratio/region_mean")
    if share is None or share < _MOST:
        return ""
    return (
        f"{share:.0%} of tokens were clipped: the policy is too far from the one that sampled the rollouts. Lower the "
        "learning rate or the number of passes over a batch."
    )


def _hints_without_effect(history: History) -> str:
    effect = _latest_hint_effect(history)
    if effect is None or effect.is_significant is None:
        return ""
    if effect.is_significant and _is_large_enough(history, effect) is not False:
        return ""
    limit = f"enough to learn from them ({describe_requirement()})" if effect.is_significant else "beyond chance"
    consequence = ", and it never ran on rollouts" if _was_always_gated(history) else ""
    return (
        f"The model does not react to hints in its rollouts {limit}: {effect}. Channel 2 has little to learn from"
        f"{consequence}. Set loss.alpha_sdpo = 0, or first train the model to follow hints."
    )


def _hints_not_compared(history: History) -> str:
    """Return a message if the effect of hints is still undecided, or is too small for the gate to open, otherwise
    "".
    """
    effect = _latest_hint_effect(history)
    if effect is None or not _values_of(history, SDPO_LOSSES[0]) or _hints_without_effect(history):
        return ""
    was_gated = _was_always_gated(history)
    advice = " So channel 2 never ran on rollouts. Set train.grpo.heed_gate = false to train on hints regardless."
    if effect.is_significant:
        # Channel 2 ran, or is on in the next step.
        if not was_gated or _is_large_enough(history, effect):
            return ""
        return f"The model reacts to hints, but not enough ({describe_requirement()}): {effect}.{advice}"
    # Old comparisons are down-weighted, so a run with few effective comparisons now may have had enough before.
    if max(_values_of(history, COMPARED), default=0) and not was_gated:
        return ""
    return (
        "Whether this model reacts to hints cannot be decided yet: there are only "
        f"{effect.num_comparisons:,.0f} comparisons of a hint with an unrelated hint.{advice if was_gated else ''}"
    )


def _errors_rise(history: History) -> str:
    """Return a message if erring turns became more frequent while channel 2 ran, otherwise ""."""
    # Only lines in which channel 2 ran, since other rises have other causes.
    ran = [line for line in history if _values_of([line], SDPO_LOSSES[0]) and _last_of([line], _RAN) != 0]
    rates = _values_of(ran, ERROR_RATE)
    if len(rates) < _MIN_RATES or max(rates) - min(rates) < _MIN_RISE:
        return ""
    slope, first = statistics.linear_regression(range(len(rates)), rates)
    last = first + slope * (len(rates) - 1)
    z_score = _slope_z_score([rate - first - slope * index for index, rate in enumerate(rates)], slope)
    if last - first < _MIN_RISE or z_score < _MIN_Z_SCORE:
        return ""
    # A fitted line may end outside 0 to 100, and z explodes for an almost perfect fit, so clamp both.
    return (
        f"Erring turns became more frequent while channel 2 ran: from {max(first, 0):.0f} to {min(last, 100):.0f} of "
        f"100 turns (linear fit to {len(rates):,} lines of metrics; z = {min(z_score, 99):.1f}). Channel 2 may be the "
        "cause: compare with a run that has loss.alpha_sdpo = 0."
    )


_RULES: Mapping[str, Callable[[History], str]] = {
    "nothing_logged": _nothing_logged,
    "learning_rate_zero": _learning_rate_zero,
    "not_a_number": _not_a_number,
    "gradient_zero": _gradient_zero,
    "unjudged": _missing_rewards,
    "equal_rewards": _equal_rewards,
    "advantages_zero": _advantages_zero,
    "length_limit": _length_limit,
    "empty_completions": _empty_completions,
    "no_entropy": _no_entropy,
    "no_sites": _no_sites,
    "no_taught_sites": _no_sites_trained_on,
    "hints_not_heeded": _hints_without_effect,
    "hints_not_compared": _hints_not_compared,
    "errors_rise": _errors_rise,
    "no_pairs": _no_pairs,
    "no_calls": _no_calls,
    "all_calls_fail": _all_calls_fail,
    "clipped_away": _clipped_away,
}


# ruff: noqa: ARG002  (transformers decides which arguments a callback gets)
_logger = logging.getLogger(__name__)


class RunDiagnosis(TrainerCallback):
    """A callback that runs the diagnosis during training and at its end.

    At intervals of `every` steps it logs new findings about the latest lines of metrics; a rule's finding is logged
    only once. At the end it logs the findings about the whole run (unless `says_summary` is False), and stores them in
    `final_messages`.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        max_completion_length: int | None = None,
        say: Callable[[str], None] | None = None,
        says_summary: bool = True,
    ) -> None:
        if every < 1:
            raise InputError(explain("every", got=every, expected="1 step or more"))
        self._every, self._length, self._says_summary = every, max_completion_length, says_summary
        self._say = _logger.warning if say is None else say
        self._reported: set[str] = set()
        self.final_messages: list[str] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every:
            return
        first = state.global_step - self._every
        lines = [line for line in state.log_history if line.get("step", 0) > first]
        # At least two lines, since a single line says little. A run without any lines is diagnosed at its end.
        if len(lines) < 2 or not state.is_world_process_zero:
            return
        for finding in _findings(lines, max_completion_length=self._length):
            if finding.rule not in self._reported:
                self._reported.add(finding.rule)
                self._say(f"Steps {first + 1} to {state.global_step}: {finding.text}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.final_messages = [
            finding.text for finding in _findings(state.log_history, max_completion_length=self._length)
        ]
        if self._says_summary and state.is_world_process_zero:
            for text in self.final_messages:
                self._say(f"The whole run: {text}")


_RAN = "ran/sdpo_kl"
# Thresholds for the linear fit to error rates: the number of lines of metrics, the rise from end to end in errors per
# 100 turns, and the z-score of the slope. Among the trainings with channel 2 in our tables, judged by the failed calls
# in their rollouts, this rule reports five of 24 with real weights (all of the 1.5B model's with unrelated hints, and
# two with the right hints) and none of 56 with the embedded student. It would also report plain GRPO runs that
# collapsed within 600 steps: a rise does not identify its cause.
_MIN_RATES, _MIN_RISE, _MIN_Z_SCORE = 8, 5.0, 3.0


def _slope_z_score(residuals: Sequence[float], slope: float) -> float:
    """Return a slope's z-score, with a larger standard error if neighboring residuals are correlated."""
    # At least 1e-9, so that a perfectly straight line does not divide by zero.
    total, number = max(math.fsum(residual**2 for residual in residuals), 1e-9), len(residuals)
    # With lag-1 autocorrelation r, the slope's variance is (1 + r) / (1 - r) times the variance for independent values.
    correlation = max(math.fsum(value * following for value, following in pairwise(residuals)) / total, 0.0)
    # The sum of squared deviations of 0, 1, ..., number - 1 from their mean.
    spread = number * (number**2 - 1) / 12
    return slope / math.sqrt(total / (number - 2) / spread * (1 + correlation) / (1 - correlation))


def _latest_hint_effect(history: History) -> HintEffect | None:
    """Return the effect of hints over all comparisons so far, from the latest line of metrics that contains it."""
    names = (COMPARED, OWN_DROP, OTHER_DROP, DEVIATIONS)
    lines = [line for line in history if all(_values_of([line], name) for name in names)]
    return HintEffect(*(float(lines[-1][name]) for name in names)) if lines else None


def _is_large_enough(history: History, effect: HintEffect) -> bool | None:
    """Return whether the effect of hints is large enough to learn from.

    A contrast subtracts the unrelated hint's effect, so with a contrast any significant effect is large enough.
    """
    return True if _last_of(history, CONTRAST) == 1 else effect.is_large


def _was_always_gated(history: History) -> bool:
    """Return whether a gate kept channel 2 off on rollouts during the whole run.

    This is read from `ran`, the share of steps in which the channel ran. The logged gate value would not be enough,
    because each line of metrics covers several steps, and the gate value is that of the last one.
    """
    return bool(_values_of(history, GATE)) and not any(_values_of(history, _RAN))


History = Sequence[Mapping[str, Any]]
# Logged only in steps in which the channel was computed, on rollouts or on logged sessions.
SDPO_LOSSES = ("loss/sdpo_kl", "loss/sdpo_kl_logged")
ERROR_RATE = "sites/per_100_turns"


def _values_of(history: History, key: str) -> list[float]:
    """Return the finite values of a metric, in the order in which they were logged."""
    values = [line.get(key) for line in history]
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _mean_of(history: History, key: str) -> float | None:
    values = _values_of(history, key)
    return math.fsum(values) / len(values) if values else None


def _last_of(history: History, key: str) -> float | None:
    values = _values_of(history, key)
    return values[-1] if values else None


def _never_ran(history: History, weight: str, losses: Sequence[str]) -> bool:
    """Return whether a channel had a weight above 0 at some point, but none of its losses was ever logged."""
    keys = [key for loss in losses for key in (loss, f"eval_{loss.removeprefix('loss/')}")]
    return any(_values_of(history, weight)) and not any(line.get(key) is not None for line in history for key in keys)
