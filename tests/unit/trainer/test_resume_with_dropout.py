"""Dropout of an adapter is there from the first step on, so a resumed run has the teacher of the one that was not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_pieces import logged, sessions_of, tiny, trainer_of
from peft import LoraConfig

from composer_replication.batch.render.renderer import Renderer
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from rollouts.tiny_policy import load_tokenizer, save_policy
from rollouts.trainers import by_first_token, make, questions, quick_config

MADE = [logged(number) for number in range(4)]


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}


def cut(folder: Path, *later: int) -> None:
    """As if the process had died before these were saved."""
    for step in later:
        shutil.rmtree(folder / f"checkpoint-{step}")


def offline(folder: Path, kind: Any) -> Any:
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    settings = ChannelSettings(alpha_sdpo=1.0, beta_replay=0.0)
    options = {"model": tiny(), "peft_config": lora(), "settings": settings, "teacher": TeacherKeeper(kind)}
    return trainer_of(folder, sessions_of(made=MADE), arguments_changes=changes, **options)


@pytest.mark.parametrize("kind", ["live", "trust_region", "ema"])
def test_an_offline_run_ends_where_the_uninterrupted_one_does(tmp_path: Path, kind: Any) -> None:
    whole = offline(tmp_path / "run", kind)
    whole.train()
    cut(tmp_path / "run", 4)
    resumed = offline(tmp_path / "run", kind)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    ended = weights(resumed)
    assert all(torch.equal(ended[name], each) for name, each in weights(whole).items())


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def composer(policy: Path, folder: Path) -> Any:
    config = quick_config(
        folder,
        max_steps=4,
        per_device_train_batch_size=2,
        num_generations=2,
        learning_rate=0.01,
        save_strategy="steps",
        save_steps=2,
    )
    sessions = LoggedSessions.from_sessions(MADE, Renderer(load_tokenizer(policy)), budget=512)
    torch.manual_seed(0)
    return make(
        ComposerReplicationTrainer,
        policy,
        config,
        reward_funcs=by_first_token,
        train_dataset=questions(),
        alpha_sdpo=1.0,
        peft_config=lora(),
        logged_sessions=sessions,
    )


def test_a_run_with_rollouts_ends_where_the_uninterrupted_one_does(policy: Path, tmp_path: Path) -> None:
    whole = composer(policy, tmp_path / "run")
    whole.train()
    cut(tmp_path / "run", 4)
    resumed = composer(policy, tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert any("loss/sdpo_kl_logged" in line for line in resumed.state.log_history)
    ended = weights(resumed)
    assert all(torch.equal(ended[name], each) for name, each in weights(whole).items())
