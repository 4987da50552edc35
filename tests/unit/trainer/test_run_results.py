"""What a training is said to have done, and what it holds out."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

from composer_replication.runs.lineage import channel_results, describe_channel
from composer_replication.trainer.from_config.grpo import _split_rows
from composer_replication.trainer.objective.channels import with_metric_names
from composer_replication.trainer.watch.diagnosis import _never_ran


def test_a_channels_steps_are_those_since_the_line_before():
    history = [
        {"step": 2, "loss": 1.0, "loss/grpo": 0.5},
        {"step": 4, "loss": 1.0, "loss/grpo": 0.4, "loss/sdpo_kl": 0.3},
        {"step": 5, "loss": 1.0, "loss/grpo": 0.2, "loss/sdpo_kl": 0.1},
    ]
    history[2]["ran/sdpo_kl"] = 0.0
    grpo, sdpo, pairs = channel_results(("grpo", "sdpo_kl", "trace_replay_dpo"), history, {"alpha_sdpo": 0.1})
    assert (grpo.steps, grpo.first_loss, grpo.last_loss, grpo.weight) == (5, 0.5, 0.2, 1.0)
    assert (sdpo.steps, sdpo.first_loss, sdpo.last_loss, sdpo.weight) == (2, 0.3, 0.1, 0.1)
    assert (pairs.never_ran, pairs.first_loss) == (True, None)


@pytest.mark.parametrize(
    ("lines", "alpha", "state", "pattern"),
    [
        (
            [{"loss/sdpo_kl": 0.2, "ran/sdpo_kl": 1.0}, {"loss/sdpo_kl": 0.1, "ran/sdpo_kl": 0.0}],
            0.1,
            "taught",
            r"\b1 of 2$",
        ),
        ([{"loss/sdpo_kl": 0.18, "ran/sdpo_kl": 0.0, "hints/gate": 0.0}] * 2, 0.1, "measured", r"\bgate\b"),
        ([{"loss/sdpo_kl": 0.0, "ran/sdpo_kl": 0.0}] * 2, 0.1, "measured", r"\bweight 0\b.*\bsteps\b"),
        ([{"loss/sdpo_kl": 0.18, "ran/sdpo_kl": 0.0}] * 2, 0.0, "measured", r"\bweight 0$"),
        ([{"eval_sdpo_kl": 0.3}, {}], 0.1, "measured", r"\bheld-out\b"),
        ([{"loss/sdpo_kl": None}, {"ran/sdpo_kl": 0.0}], 0.1, "never_ran", r"\bdata\b"),
        ([{"ran/sdpo_kl": 0.0}, {}], 0.0, "off", r"\bweight 0$"),
        ([{}, {"train_runtime": 1.0, "ran_steps/sdpo_kl": 2}], 0.1, "taught", r"\b2 of 2$"),
    ],
)
def test_a_channel_is_taught_or_measured_or_off_or_never_ran(lines, alpha, state, pattern):
    history = [{"step": at, "loss": 1.0, **line} for at, line in enumerate(lines, start=1)]
    [channel] = channel_results(("sdpo_kl",), history, {"alpha_sdpo": alpha})
    assert (channel.state, channel.never_ran) == (state, state == "never_ran")
    assert re.search(pattern, channel.in_words(2))
    assert describe_channel(asdict(channel), 2) == channel.in_words(2), "training.json says the same"
    if "ran_steps/sdpo_kl" in history[-1]:  # fewer steps than lie between two lines: the diagnosis says that
        return
    assert _never_ran([{**line, "w": alpha} for line in history], "w", ["loss/sdpo_kl"]) == (state == "never_ran")


def test_counts_and_drops_call_channels_as_metrics_do():
    assert with_metric_names({"sdpo_jsd": 3, "sites": 2}) == {"sdpo_kl": 3, "sites": 2}
    assert with_metric_names({"sdpo_jsd: hint: no": 1, "pairs: too long": 4}) == {
        "sdpo_kl: hint: no": 1,
        "pairs: too long": 4,
    }


def test_a_tenth_of_the_prompts_is_held_out_and_at_least_one():
    assert _split_rows(20) == ([each for each in range(20) if each not in (9, 19)], [9, 19])
    assert _split_rows(3) == ([0, 1], [2])
