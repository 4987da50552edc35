"""Why a run cannot learn, in plain words, from the metrics it logged.

A rule looks at the whole history it is given and answers with a sentence or nothing. It answers only where the metric
it needs was logged. Shares are means over the lines that have the metric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from composer_replication.trainer.watch.hint_rules import errors_rise, hints_not_compared, hints_not_heeded
from composer_replication.trainer.watch.logged_history import (
    ERROR_RATE,
    SDPO_LOSSES,
    History,
    last_of,
    mean_of,
    never_ran,
    values_of,
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


class Finding(NamedTuple):
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
) -> list[Finding]:
    """`diagnose` with the name of each rule."""
    causes = [Finding(name, text) for name, rule in _RULES.items() if (text := rule(history))]
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
    rates = values_of(history, "learning_rate")
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
    norms = values_of(history, "grad_norm")
    if not norms or any(norms):
        return ""
    return f"The gradient is 0 in all {len(norms):,} lines of metrics: no weight was changed."


def _unjudged(history: History) -> str:
    keys = dict.fromkeys(key for line in history for key in line)
    shares = {match[1]: mean_of(history, key) or 0.0 for key in keys if (match := _UNJUDGED.fullmatch(key))}
    rewarded = [line for line in history if "reward" in line]
    if rewarded and not values_of(rewarded, "reward"):  # TRL logs None where no rollout of a batch has a reward
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
    sizes = values_of(history, ADVANTAGE_SIZE)
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
    rates = values_of(history, ERROR_RATE)
    if not rates or any(rates) or not never_ran(history, SDPO_WEIGHT, SDPO_LOSSES):
        return ""
    rollouts = last_of(history, ROLLOUTS_TOTAL)
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
    is_of_rollouts = rule == "no_taught_sites" and bool(values_of(history, ERROR_RATE))
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
    calls = values_of(history, "tools/call_frequency")
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
