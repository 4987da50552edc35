"""Channels of `ComposerReplicationTrainer` with a weight and no data are skipped with one message each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_composer_channels import TRACE, channels_on, scripted
from test_composer_channels import policy as policy_fixture

from composer_replication.envs.student import student_folder
from composer_replication.errors import InputError
from composer_replication.trainer import ComposerReplicationTrainer, composer_grpo_config, trainer_arguments
from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from rollouts.tiny_policy import load_tokenizer
from rollouts.trainers import questions, quick_config

policy = policy_fixture
WITHOUT_PAIRS = {name: value for name, value in TRACE.items() if name != "dpo_pairs"}
WITHOUT_SITES = {**TRACE, "turns": [turn | {"tool_error": None} for turn in TRACE["turns"]]}


def skipped(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The channels that a message names together with their weight, a name for each message."""
    weights = {"sdpo_jsd": "alpha_sdpo", "trace_replay_dpo": "beta_replay"}
    told = [record.getMessage() for record in caplog.records]
    return [name for each in told for name, weight in weights.items() if name in each and weight in each]


def collator(policy: Path, **options: Any) -> ComposerDataCollator:
    config = CollatorConfig(hint_generator=lambda kind, meta: "Use the tools.", pad_token_id=0, **options)
    return ComposerDataCollator(load_tokenizer(policy), config)


@pytest.mark.parametrize("weights", [{"beta_replay": 1.0}, {"settings": trainer_arguments()["settings"]}])
def test_channel_3_is_skipped_with_one_message_where_nothing_is_logged(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: dict[str, Any]
) -> None:
    trainer = scripted(policy, tmp_path, **weights)
    assert skipped(caplog) == ["trace_replay_dpo"]
    assert "trace_replay_dpo" not in trainer.channels_on()
    assert trainer.settings.beta_replay == 0
    trainer.train()
    assert skipped(caplog) == ["trace_replay_dpo"]
    (step,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert step["ran/trace_replay_dpo"] == 0
    assert "loss/trace_replay_dpo" not in step


def test_channels_that_logged_traces_do_not_feed_are_skipped_and_the_others_run(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"beta_replay": 1.0, "alpha_sdpo": 0.1}
    made = collator(policy)
    trainer = scripted(policy, tmp_path, **weights, trace_dataset=[WITHOUT_PAIRS], data_collator=made)
    assert skipped(caplog) == ["trace_replay_dpo"]
    assert channels_on(trainer) == ["grpo", "sdpo rollouts", "sdpo logged"]
    assert not made.counts  # a look at the data counts nothing
    caplog.clear()
    trainer = scripted(policy, tmp_path, **weights, trace_dataset=[WITHOUT_SITES], data_collator=collator(policy))
    assert skipped(caplog) == ["sdpo_jsd"]
    assert channels_on(trainer) == ["grpo", "sdpo rollouts", "trace_replay_dpo"]
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss/trace_replay_dpo" in entry]
    assert [entry["ran/sdpo_kl_logged"] for entry in steps] == [0]


def test_no_traces_at_all_are_no_data(policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = {"beta_replay": 1.0, "alpha_sdpo": 0.1}
    trainer = scripted(policy, tmp_path, **weights, trace_dataset=[], data_collator=collator(policy))
    assert skipped(caplog) == ["sdpo_jsd", "trace_replay_dpo"]
    assert channels_on(trainer) == ["grpo", "sdpo rollouts"]


@pytest.mark.parametrize("dpo_pairs", ["no list", [{"chosen": "a"}]])
def test_malformed_pairs_are_an_error_and_not_skipped(policy: Path, tmp_path: Path, dpo_pairs: Any) -> None:
    traces = [WITHOUT_PAIRS, {**TRACE, "dpo_pairs": dpo_pairs}]
    with pytest.raises(InputError):
        scripted(policy, tmp_path, beta_replay=1.0, trace_dataset=traces, data_collator=collator(policy))


@pytest.mark.parametrize("is_positional", [True, False])
def test_the_student_is_a_model_by_its_name(tmp_path: Path, is_positional: bool) -> None:
    config = quick_config(tmp_path)
    model = {} if is_positional else {"model": "student"}
    trainer = ComposerReplicationTrainer(
        *["student"] * is_positional,
        **model,
        args=config,
        reward_funcs=lambda completion_ids, **_: [float(len(each)) for each in completion_ids],
        train_dataset=questions(),
    )
    assert Path(trainer.model.config._name_or_path) == student_folder()


def test_the_presets_arguments_are_accepted_on_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from composer_replication.trainer import presets

    monkeypatch.setattr(presets, "is_torch_bf16_gpu_available", lambda: False)
    assert composer_grpo_config(tmp_path).bf16 is False
    assert composer_grpo_config(tmp_path, use_cpu=True, bf16=True).bf16 is True
