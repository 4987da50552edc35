"""Logged figures of a run with rollouts: the same however a step is cut, and none of what did not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_composer_channels import TRACE, scripted
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from rollouts.tiny_policy import load_tokenizer, save_policy
from rollouts.trainers import questions


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def cut(size: int, accumulation: int, **more: Any) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    return {**sizes, "steps_per_generation": accumulation, "optim": "sgd", **more}


def test_a_step_in_pieces_logs_the_figures_of_the_step_in_one(policy: Path, tmp_path: Path) -> None:
    """Two of four rollouts err, one in a longer turn: a mean of micro-batch means is another number."""
    names = ("loss/sdpo_kl", "items/sdpo_kl", "ran/sdpo_kl", "sites/per_100_turns", "sites/taught_per_rollout")
    lines = []
    for number, (size, accumulation) in enumerate(((4, 1), (2, 2), (1, 4))):
        trainer = scripted(policy, tmp_path / str(number), cut(size, accumulation), alpha_sdpo=2.0)
        trainer.train()
        (line,) = [each for each in trainer.state.log_history if "loss/total" in each]
        lines.append({name: line[name] for name in (*names, "advantages/mean_abs")})
    assert lines[0]["ran/sdpo_kl"] == 1.0
    assert lines[0]["items/sdpo_kl"] > 40
    for other in lines[1:]:
        assert other == pytest.approx(lines[0], rel=1e-4)


def logged_traces(policy: Path) -> dict[str, Any]:
    config = CollatorConfig(hint_generator=lambda kind, meta: "Use the tools.", pad_token_id=0)
    return {"trace_dataset": [TRACE], "data_collator": ComposerDataCollator(load_tokenizer(policy), config)}


def test_a_channel_whose_weight_has_fallen_to_0_logs_no_loss_of_logged_traces(policy: Path, tmp_path: Path) -> None:
    knobs = {"alpha_sdpo": 1.0, "beta_replay": 0.5, "anneal": "linear"}
    trainer = scripted(policy, tmp_path, {"max_steps": 3}, **knobs, **logged_traces(policy))
    trainer.train()
    lines = [each for each in trainer.state.log_history if "loss/total" in each]
    assert ["loss/sdpo_kl_logged" in each for each in lines] == [True, True, False]
    assert [each["ran/sdpo_kl_logged"] for each in lines] == [1.0, 1.0, 0.0]
    assert [each["ran/trace_replay_dpo"] for each in lines] == [1.0] * 3


def test_an_evaluation_after_the_end_has_channel_2(policy: Path, tmp_path: Path) -> None:
    trainer = scripted(policy, tmp_path, {"max_steps": 2, "learning_rate": 0.0}, alpha_sdpo=1.0, anneal="linear")
    trainer.train()
    assert trainer.channels.alpha(trainer.channel_loss.current_step()) == 0.0
    trainer.eval_dataset = questions(["Look"] * 4, case=["c"] * 4)
    trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_loss/sdpo_kl"] > 0


def test_figures_that_were_not_logged_yet_are_those_of_a_resumed_run_too(policy: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 3, "logging_steps": 3, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.0}
    whole = scripted(policy, tmp_path, settings, alpha_sdpo=1.0)
    whole.train()
    again = scripted(policy, tmp_path, settings, alpha_sdpo=1.0)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    wanted, got = (next(e for e in each.state.log_history if "loss/total" in e) for each in (whole, again))
    for name in ("loss/sdpo_kl", "ran/sdpo_kl", "items/sdpo_kl", "sites/per_100_turns", "advantages/mean_abs"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-6), name


def test_the_live_teacher_is_told_what_was_measured(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scripted(policy, tmp_path, {"optim": "adamw_torch"}, alpha_sdpo=1.0)
    warning = ("2.95", "train.teacher.kind")  # what was measured, and where another teacher is chosen
    assert [each in caplog.text for each in warning] == [True, True]
    caplog.clear()
    scripted(policy, tmp_path, {"optim": "adamw_torch"}, alpha_sdpo=1.0, teacher="trust_region")
    scripted(policy, tmp_path, {"optim": "sgd"}, alpha_sdpo=1.0)
    assert [each in caplog.text for each in warning] == [False, False]


def test_a_routers_auxiliary_loss_is_added_by_trl_beside_the_channels(policy: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(policy)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4}
    config = Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=16, num_experts_per_tok=2)
    experts = tmp_path / "experts"
    AutoModelForCausalLM.from_config(config).save_pretrained(experts)
    tokenizer.save_pretrained(experts)
    found = {}
    for weight in (0.0, 0.5):
        settings = {"router_aux_loss_coef": weight}
        trainer = scripted(experts, tmp_path / str(weight), settings, alpha_sdpo=1.0)
        trainer.train()
        found[weight] = trainer.state.log_history[0]
    assert "aux_loss" not in found[0.0]
    added = found[0.5]["loss/grpo"] - found[0.0]["loss/grpo"]
    assert added == pytest.approx(0.5 * found[0.5]["aux_loss"], rel=1e-4)
    assert found[0.5]["loss/sdpo_kl"] == pytest.approx(found[0.0]["loss/sdpo_kl"], rel=1e-4)
