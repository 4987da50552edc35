"""The newest checkpoint is damaged: the one before it goes on, by its own name, with the figures of the whole run."""

from __future__ import annotations

import math
import shutil

import pytest

from composer_replication.trainer.checkpoints import newest_complete
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from kill_and_resume.small_runs import small_trainer, weights_of

STEPS = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = small_trainer(tmp_path_factory.mktemp("whole") / "checkpoints", max_steps=STEPS)
    return trainer, trainer.train()


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy of the run whose newest checkpoint has other bytes, as many as before."""
    shutil.copytree(whole[0].args.output_dir, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / f"checkpoint-{STEPS}" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    return tmp_path


def last_figures(trainer):
    return trainer.state.log_history[-1]


def test_the_mean_loss_is_that_of_a_run_that_was_never_interrupted(whole, damaged):
    trainer = small_trainer(damaged / "checkpoints", max_steps=STEPS)
    result = trainer.train(resume_from_checkpoint=True)
    assert weights_of(trainer.model) == weights_of(whole[0].model)
    lines = [line["loss"] for line in whole[0].state.log_history if "loss" in line]
    assert whole[1].training_loss == pytest.approx(sum(lines) / len(lines), rel=1e-6)
    assert result.training_loss == pytest.approx(whole[1].training_loss, rel=1e-6)
    assert last_figures(trainer)["train_loss"] == result.training_loss


@pytest.mark.parametrize("step", [4, 10])  # between two lines of the log, and beside one
def test_so_is_that_of_a_run_resumed_at_any_step(whole, tmp_path, step):
    shutil.copytree(f"{whole[0].args.output_dir}/checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    result = small_trainer(tmp_path, max_steps=STEPS).train(resume_from_checkpoint=True)
    assert result.training_loss == pytest.approx(whole[1].training_loss, rel=1e-6)


def test_a_run_that_is_whole_has_its_loss_and_not_0(whole, tmp_path):
    shutil.copytree(whole[0].args.output_dir, tmp_path / "checkpoints")
    trainer = small_trainer(tmp_path / "checkpoints", max_steps=STEPS)
    result = trainer.train(resume_from_checkpoint=True)
    assert trainer.was_finished
    assert result.training_loss == pytest.approx(whole[1].training_loss, rel=1e-6)
    assert result.metrics["train_loss"] == result.training_loss
    assert math.isfinite(result.training_loss)


def test_the_checkpoint_is_called_by_the_steps_it_has(damaged):
    output = damaged / "checkpoints"
    assert newest_complete(output).name == "checkpoint-10"
    assert TrainingFolder(damaged).newest_checkpoint().name == "checkpoint-10"
    small_trainer(output, max_steps=STEPS).train(resume_from_checkpoint=True)
    assert TrainingFolder(damaged).newest_checkpoint().name == f"checkpoint-{STEPS}"
    assert sorted(path.name for path in output.iterdir() if "." in path.name) == []
    set_aside = output / f"checkpoint-{STEPS}"
    set_aside.rename(output / f"checkpoint-{STEPS}.replaced")
    assert TrainingFolder(damaged).newest_checkpoint().name == f"checkpoint-{STEPS}.replaced"
