"""What a training is said to have done, and what it holds out."""

from __future__ import annotations

from composer_replication.trainer.from_config.inputs import held_out_rows
from composer_replication.trainer.from_config.results import channel_results, metric_names


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


def test_counts_and_drops_call_channels_as_metrics_do():
    assert metric_names({"sdpo_jsd": 3, "sites": 2}) == {"sdpo_kl": 3, "sites": 2}
    assert metric_names({"sdpo_jsd: hint: no": 1, "pairs: too long": 4}) == {
        "sdpo_kl: hint: no": 1,
        "pairs: too long": 4,
    }


def test_a_tenth_of_the_prompts_is_held_out_and_at_least_one():
    assert held_out_rows(20) == ([each for each in range(20) if each not in (9, 19)], [9, 19])
    assert held_out_rows(3) == ([0, 1], [2])
