"""Each rule of the diagnosis has a history that it speaks about and one that it does not."""

from __future__ import annotations

import math
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.trainer.watch.diagnosis import _findings, diagnose

HEALTHY = [
    {
        "step": step,
        "loss": 1e-8,
        "grad_norm": 0.9,
        "learning_rate": 1e-6,
        "reward": 0.3 + 0.01 * step,
        "frac_reward_zero_std": 0.4,
        "groups/equal_after": 0.3,
        "advantages/mean_abs": 0.2,
        "completions/clipped_ratio": 0.1,
        "completions/mean_length": 120.0,
        "entropy": 0.6,
        "rewards/judge/unjudged": 0.0,
        "rollouts/total": 64.0 * step,
        "sites/per_100_turns": 9.0,
        "loss/sdpo_kl": 0.1,
        "loss/trace_replay_dpo": 0.6,
        "loss/alpha_sdpo": 0.1,
        "loss/beta_replay": 0.05,
        "tools/call_frequency": 1.5,
        "tools/failure_frequency": 0.3,
        "clip_ratio/region_mean": 0.01,
        "hints/compared": 20.0 * step,
        "hints/own_drop": 0.3,
        "hints/other_drop": 0.03,
        "hints/deviations": 6.0,
    }
    for step in range(1, 17)
]


ABSENT = object()


def changed(**metrics: object) -> list[dict[str, Any]]:
    """The healthy history with other values, or none; a function is called with the step."""
    names = {name.replace("__", "/"): value for name, value in metrics.items()}
    lines = [
        {**line, **{name: value(line["step"]) if callable(value) else value for name, value in names.items()}}
        for line in HEALTHY
    ]
    return [{name: value for name, value in line.items() if value is not ABSENT} for line in lines]


# A history, and patterns of what the rule says of it: figures and the names of what they are about.
SPEAKS: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "nothing_logged": ([{"train_runtime": 3.0, "step": 4}], (r"\bmetrics\b",)),
    "learning_rate_zero": (changed(learning_rate=0.0), (r"\blearning rate\b.*\b0\b", r"\b16\b")),
    "not_a_number": (
        changed(grad_norm=lambda step: math.nan if step > 12 else 1.0),
        (r"\bgradient\b.*\b4\b.*\b16\b",),
    ),
    "gradient_zero": (changed(grad_norm=0.0), (r"\bgradient\b.*\b0\b", r"\b16\b")),
    "unjudged": (
        changed(rewards__judge__unjudged=lambda step: 0.24 * (step % 2)),
        (r"\bjudge\b", r"\b12% of rollouts\b"),
    ),
    "equal_rewards": (changed(groups__equal_after=0.93, reward=0.25), (r"\b93% of groups\b", r"\breward\b.*\b0\.25\b")),
    "advantages_zero": (changed(advantages__mean_abs=0.0), (r"(?i)\badvantages\b.*\b0\b", r"\b16\b")),
    "length_limit": (changed(completions__clipped_ratio=1.0), (r"\b(?:All|100% of) completions\b", r"\blength\b")),
    "empty_completions": (changed(completions__mean_length=1.0), (r"\b1\.0 tokens\b",)),
    "no_entropy": (changed(entropy=0.001), (r"\bentropy\b.*\b0\.001\b",)),
    "no_sites": (
        changed(sites__per_100_turns=0.0, loss__sdpo_kl=ABSENT),
        (r"\b1,024 rollouts\b", r"\bchannel 2\b"),
    ),
    "no_taught_sites": (changed(loss__sdpo_kl=ABSENT), (r"\b9\b.*\b100 turns\b", r"\bchannel 2\b")),
    "hints_not_heeded": (
        changed(hints__deviations=0.9, hints__own_drop=0.051, hints__other_drop=0.049),
        (r"\b320 comparisons\b", r"\+0\.051\b.*\+0\.049\b", r"\+0\.9\b"),
    ),
    "hints_not_compared": (changed(hints__compared=0.0), (r"\b0 comparisons\b",)),
    "errors_rise": (
        changed(sites__per_100_turns=lambda step: 20.0 + step + step % 3),
        (r"\bchannel 2\b", r"\b22\b\D+\b37\b\D+\b100\b"),
    ),
    "no_pairs": (changed(loss__trace_replay_dpo=ABSENT), (r"\bpairs\b", r"\bchannel 3\b")),
    "no_calls": (changed(tools__call_frequency=0.0), (r"\btool\b",)),
    "all_calls_fail": (changed(tools__failure_frequency=0.98), (r"\b98%",)),
    "clipped_away": (changed(clip_ratio__region_mean=0.9), (r"\b90% of tokens\b",)),
}
# As near as a healthy run comes to each.
SILENT: dict[str, list[dict[str, Any]]] = {
    "nothing_logged": [{"loss": 1.0}],
    "learning_rate_zero": changed(learning_rate=lambda step: 1e-6 if step == 16 else 0.0),
    "not_a_number": changed(loss=-1e-9),
    "gradient_zero": changed(grad_norm=lambda step: 1e-9 if step == 3 else 0.0),
    "unjudged": changed(rewards__judge__unjudged=0.005),
    "equal_rewards": changed(groups__equal_after=0.7, frac_reward_zero_std=0.9),
    "advantages_zero": changed(advantages__mean_abs=lambda step: 0.1 * (step == 2)),
    "length_limit": changed(completions__clipped_ratio=0.6),
    "empty_completions": changed(completions__mean_length=4.0),
    "no_entropy": changed(entropy=0.02),
    "no_sites": changed(sites__per_100_turns=0.0, loss__sdpo_kl=ABSENT, loss__sdpo_kl_logged=0.2),
    "no_taught_sites": changed(loss__sdpo_kl=lambda step: 0.1 if step == 7 else ABSENT),
    "hints_not_heeded": changed(hints__deviations=2.6),
    "hints_not_compared": changed(hints__compared=0.0, loss__sdpo_kl=ABSENT, loss__sdpo_kl_logged=0.1),
    "errors_rise": changed(sites__per_100_turns=lambda step: 20.0 + 0.3 * step + step % 3),
    "no_pairs": changed(loss__trace_replay_dpo=lambda step: 0.6 if step == 7 else ABSENT),
    "no_calls": changed(tools__call_frequency=lambda step: 0.1 * (step == 9)),
    "all_calls_fail": changed(tools__failure_frequency=0.8),
    "clipped_away": changed(clip_ratio__region_mean=0.4),
}


def test_a_healthy_run_has_no_diagnosis() -> None:
    assert diagnose(HEALTHY) == []


def test_every_rule_has_both_histories() -> None:
    from composer_replication.trainer.watch import diagnosis

    assert list(SPEAKS) == list(SILENT) == list(diagnosis._RULES)


@pytest.mark.parametrize("rule", SPEAKS)
def test_a_rule_speaks_where_it_applies_and_no_other_does(rule: str) -> None:
    history, patterns = SPEAKS[rule]
    [finding] = _findings(history)
    assert finding.rule == rule
    assert [each for each in patterns if not re.search(each, finding.text)] == []
    assert diagnose(history) == [finding.text]


@pytest.mark.parametrize("rule", SILENT)
def test_a_rule_is_silent_where_it_does_not_apply(rule: str) -> None:
    assert rule not in [finding.rule for finding in _findings(SILENT[rule])]


def test_few_comparisons_say_little_about_hints() -> None:
    for compared, deviations, speaks in ((19, -3.0, False), (99, 0.4, True), (99, 0.6, False), (100, 0.9, True)):
        history = changed(hints__compared=float(compared), hints__deviations=deviations)
        assert [each.rule for each in _findings(history)] == ["hints_not_heeded"] * speaks
    assert not _findings(changed(hints__deviations=ABSENT))
    for own, other in ((0.07, 0.03), (0.04, 0.0)):
        [finding] = _findings(changed(hints__own_drop=own, hints__other_drop=other))
        assert finding.rule == "hints_not_heeded"
        assert re.search(r"\b5\b.*\b0\.1\b", finding.text)  # what would be enough
        assert re.search(rf"\b320 comparisons\b.*\+{own:.3f}\b", finding.text)


@pytest.mark.parametrize(
    ("gate", "ran", "is_closed"), [(0.0, 0.0, True), (ABSENT, 1.0, False), (0.0, lambda step: 0.3 * (step == 7), False)]
)
def test_a_gate_that_never_opened_is_said_to_be_why_channel_2_did_not_run(gate: Any, ran: Any, is_closed: bool) -> None:
    """The last: lines of several steps each, of which one had it open for a while."""
    run = {"hints__gate": gate, "ran__sdpo_kl": ran}
    doubtful = diagnose(changed(hints__compared=50.0, hints__deviations=1.5, **run))
    assert len(doubtful) == is_closed
    assert all("train.grpo.heed_gate" in each for each in doubtful)
    near = _findings(changed(hints__deviations=20.0, hints__own_drop=0.3, hints__other_drop=0.08, **run))
    assert [each.rule for each in near] == ["hints_not_compared"] * is_closed
    assert all(re.search(r"\b5\b.*\+0\.300\b.*\+0\.080\b.*train\.grpo\.heed_gate\b", each.text) for each in near)
    [deaf], [ungated] = (diagnose(changed(hints__deviations=0.1, **each)) for each in (run, {}))
    assert (deaf != ungated) is is_closed
    [unknown] = diagnose(changed(hints__compared=0.0, **run))
    assert ("train.grpo.heed_gate" in unknown) is is_closed


def test_a_gate_that_opens_or_was_open_is_no_riddle() -> None:
    assert not diagnose(changed(hints__gate=0.0, ran__sdpo_kl=0.0)), "shown by the last step, and open in the next"
    faded = changed(hints__compared=lambda step: 0.0 if step > 12 else 190.0, hints__gate=1.0, ran__sdpo_kl=1.0)
    assert not diagnose(faded)
    contrast = changed(hints__deviations=5.0, hints__own_drop=0.3, hints__other_drop=0.25, ran__sdpo_kl=1.0)
    contrasted = [{**line, "hints/contrast": 1.0} for line in contrast]
    assert not diagnose(contrasted), "with a gate or without"
    assert not diagnose([{**line, "hints/gate": 0.0, "ran/sdpo_kl": 0.0} for line in contrasted]), "open in the next"
    assert len(diagnose(contrast)) == 1


@pytest.mark.parametrize(
    ("rates", "speaks"),
    [
        ([36, 30, 38, 48, 49, 59, 63, 72, 62], True),
        ([28, 39, 39, 31, 43, 37, 50, 56, 46], True),
        ([36, 32, 31, 33, 35, 38, 34, 56, 42], False),  # a rise of 14, at 2.2 standard errors
        ([37, 28, 31, 25, 27, 40, 22, 23, 27], False),
    ],
)
def test_errors_that_rise_as_they_did_with_real_weights(rates: list[int], speaks: bool) -> None:
    """Hints of another kind, right hints (two), right hints behind the gate: Qwen2.5-Coder-1.5B in the workspace."""
    history = [{**line, "sites/per_100_turns": float(rate)} for line, rate in zip(HEALTHY, rates, strict=False)]
    assert [each.rule for each in _findings(history)] == ["errors_rise"] * speaks
    assert not _findings([{**line, "ran/sdpo_kl": 0.0, "hints/gate": 0.0} for line in history]), "it never ran"
    opened = [{**line, "ran/sdpo_kl": float(line["step"] > 4)} for line in history]
    assert not _findings(opened), "five lines in which it ran"


def test_what_rises_after_channel_2_has_ended_is_not_said_to_rise_while_it_ran() -> None:
    rising = changed(sites__per_100_turns=lambda step: 9.0 + 3 * step, ran__sdpo_kl=lambda step: float(step < 4))
    assert not _findings(rising)
    assert _findings([{**line, "ran/sdpo_kl": 1.0} for line in rising])


def test_rates_that_wander_are_seldom_said_to_rise() -> None:
    """Each line's rate resembles the one before: standard errors of independent ones would be passed by one of five."""
    told = 0
    for seed in range(200):
        draw, at, rates = random.Random(seed), 0.0, []
        for _ in range(100):
            at = 0.9 * at + draw.gauss(0, 2)
            rates.append(30 + at)
        told += bool(diagnose([{**HEALTHY[0], "sites/per_100_turns": rate} for rate in rates]))
    assert told <= 10


def test_the_ends_of_a_line_are_shares_and_a_straight_line_is_no_wonder() -> None:
    bent, straight = (lambda step: max(0.0, 12.0 * step - 90)), (lambda step: 2.0 * step)
    [finding], [steep] = (_findings(changed(sites__per_100_turns=each)) for each in (bent, straight))
    assert finding.rule == steep.rule == "errors_rise"
    assert re.search(r"\b0\b\D+\b84\b\D+\b100\b", finding.text)
    assert re.search(r"\b99\.0\b", steep.text)


def test_one_line_with_a_learning_rate_of_0_is_the_start_of_a_warm_up() -> None:
    assert diagnose([{"loss": 1.0, "learning_rate": 0.0}]) == []


def test_a_channel_without_weight_is_not_missed() -> None:
    silent = changed(loss__sdpo_kl=ABSENT, loss__alpha_sdpo=0.0, loss__trace_replay_dpo=ABSENT, loss__beta_replay=0.0)
    assert diagnose(silent) == []
    annealed = changed(loss__sdpo_kl=ABSENT, loss__alpha_sdpo=lambda step: 0.1 * (16 - step))
    assert [finding.rule for finding in _findings(annealed)] == ["no_taught_sites"]


def test_a_run_without_rollouts_is_told_that_its_sessions_held_nothing_to_teach() -> None:
    lines = [{"loss": 1.0, "loss/alpha_sdpo": 0.1, "loss/beta_replay": 0.0}] * 3
    [finding] = _findings(lines)
    assert finding.rule == "no_taught_sites"
    assert re.findall(r"channel 2|\d+", finding.text) == ["channel 2"]  # no rate of errors was measured


def test_steps_that_were_too_few_are_not_said_to_lack_what_there_is() -> None:
    lines = [{"loss": 1.0, "loss/alpha_sdpo": 0.1, "loss/beta_replay": 0.05}] * 2
    sites, pairs = diagnose(lines, items={"sites": 1_200, "pairs": 7})
    assert re.search(r"\b1,200\b.*\bsites\b.*\bchannel 2\b.*\btrain\.optimiser\.steps\b", sites)
    assert re.search(r"\b7\b.*\bpairs\b.*\bchannel 3\b.*\btrain\.optimiser\.steps\b", pairs)
    assert diagnose(lines, items={"sites": 0, "pairs": 0}) == diagnose(lines)
    # Sites of rollouts are not those of the sessions beside them.
    assert diagnose(changed(loss__sdpo_kl=ABSENT), items={"sites": 3}) == diagnose(changed(loss__sdpo_kl=ABSENT))


def test_one_of_several_reward_functions_may_leave_rollouts_to_the_others() -> None:
    assert diagnose(changed(rewards__judge__unjudged=0.5, rewards__tests__unjudged=0.5)) == []
    [finding] = _findings(changed(rewards__tests__unjudged=1.0))
    assert finding.rule == "unjudged"
    assert re.search(r"\btests\b.*\b100%", finding.text)
    assert "judge" not in finding.text


def test_rewards_that_trl_logs_as_none_are_a_reward_function_that_answers_nothing() -> None:
    [finding] = _findings([{"loss": 0.0, "reward": None}, {"loss": 0.0, "reward": None}])
    assert finding.rule == "unjudged"
    assert re.search(r"\b100% of rollouts\b", finding.text)


def test_trls_own_share_of_equal_groups_is_read_where_ours_is_not_logged() -> None:
    finding = _findings([{"loss": 0.0, "frac_reward_zero_std": 1.0}])[0]
    assert finding.rule == "equal_rewards"
    assert re.search(r"\b100% of groups\b", finding.text)


def test_the_length_limit_is_named_where_it_is_known() -> None:
    [finding] = _findings(changed(completions__clipped_ratio=0.97), max_completion_length=2048)
    assert finding.rule == "length_limit"
    assert re.search(r"\b97% of completions\b.*\b2,048 tokens\b", finding.text)


def test_a_metric_that_was_not_logged_says_nothing() -> None:
    assert diagnose([{"loss": 1.0}] * 5) == []


def test_a_running_run_is_told_each_reason_once_and_the_end_sums_up() -> None:
    from composer_replication.trainer.watch.diagnosis import RunDiagnosis

    told: list[str] = []
    callback = RunDiagnosis(every=4, say=told.append)
    history = changed(groups__equal_after=lambda step: 0.9 if step <= 8 else 0.2)
    for line in history:
        step = line["step"]
        state: Any = SimpleNamespace(global_step=step, log_history=history[:step], is_world_process_zero=True)
        callback.on_step_end(None, state, None)  # pyright: ignore[reportArgumentType]
    assert len(told) == 1
    assert re.match(r"\D*\b1\b\D+\b4\b\D+\b90% of groups\b", told[0])
    callback.on_train_end(None, state, None)  # pyright: ignore[reportArgumentType]
    assert callback.final_messages == []  # over all 16 lines it is 55%
