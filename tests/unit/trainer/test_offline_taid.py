"""TAID's schedule in an offline run: over the steps of that run, whatever is evaluated before or during it."""

from __future__ import annotations

import pytest
from offline_pieces import sessions_of, trainer_of
from transformers import TrainerCallback

from composer_replication.trainer.objective.channels import ChannelSettings

SETTINGS = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.0, sdpo_wrapper="taid")


class Noted(TrainerCallback):
    def __init__(self, trainer):
        self.trainer, self.found = trainer, []

    def on_step_end(self, *_, **__):
        self.found.append(self.trainer.taid.state_dict())


def noting(folder, **changes):
    trainer = trainer_of(
        folder,
        sessions_of(0, 1, 2, 3),
        settings=SETTINGS,
        eval_sessions=sessions_of(4, 5),
        arguments_changes={"max_steps": 4} | changes,
    )
    noted = Noted(trainer)
    trainer.add_callback(noted)
    return trainer, noted.found


def test_an_evaluation_before_or_during_a_run_leaves_its_schedule_alone(tmp_path):
    trainer, wanted = noting(tmp_path / "a")
    trainer.train()
    assert [each["t"] for each in wanted] == pytest.approx([0.4, 0.7, 0.85, 1.0], abs=1e-3)
    trainer, found = noting(tmp_path / "b", eval_strategy="steps", eval_steps=1)
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first["eval_sdpo_kl"] == again["eval_sdpo_kl"]
    assert trainer.taid.state_dict() == {"t": pytest.approx(0.4), "previous_loss": None, "momentum": 0.0}
    trainer.train()
    assert found == wanted


def test_an_evaluation_sees_the_t_of_its_step(tmp_path):
    trainer, _ = noting(tmp_path)
    before = trainer.evaluate()["eval_sdpo_kl"]
    trainer.args.learning_rate = 0.0
    trainer.train()
    assert trainer.taid.t == 1.0
    assert abs(trainer.evaluate()["eval_sdpo_kl"] - before) > 1e-3


def test_a_second_run_has_a_schedule_of_its_own(tmp_path):
    trainer, found = noting(tmp_path, learning_rate=0.0)
    trainer.train()
    trainer.train()
    assert found[:4] == found[4:]
