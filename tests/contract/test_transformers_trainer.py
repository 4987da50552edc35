"""What checkpoints and the offline trainer rely on in `transformers.Trainer`: an upgrade that moves it fails here."""

from __future__ import annotations

import inspect

import pytest
from transformers import Trainer, TrainingArguments

PARAMETERS = {
    "_finalize_training": ["trial", "num_train_samples", "start_time"],
    "_load_best_model": [],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_load_rng_state": ["checkpoint"],
    "_load_scaler": ["checkpoint"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_save": ["output_dir", "state_dict"],
    "_save_checkpoint": ["model", "trial"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_save_rng_state": ["output_dir"],
    "_save_scaler": ["output_dir"],
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "save_model": ["output_dir", "_internal_call"],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_overridden_method_keeps_its_parameters(name):
    found = list(inspect.signature(getattr(Trainer, name)).parameters)[1:]
    assert found == PARAMETERS[name], f"Trainer.{name} moved: trainer/overrides.py overrides it"


def test_an_epoch_is_run_with_the_loader_and_the_steps_done_in_it():
    """`RunCheckpoints.run_epoch` reads these by name."""
    found = set(inspect.signature(Trainer._run_epoch).parameters)
    wanted = {"train_dataloader", "steps_trained_in_current_epoch", "epoch", "resume_from_checkpoint"}
    assert wanted <= found, f"Trainer._run_epoch lost {wanted - found}"


def test_a_model_that_is_sharded_already_is_not_wrapped_where_the_trainer_says_so(tmp_path):
    """Both trainers set this attribute for a model that was sharded by hand."""
    from kill_and_resume.small_runs import small_model

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert Trainer(model=small_model(), args=args).is_distributed_loading_by_transformers is False
    assert "self.is_distributed_loading_by_transformers" in inspect.getsource(Trainer._prepare_for_training)


def test_a_trainer_says_whether_its_loss_is_scaled_for_accumulation():
    assert hasattr(Trainer, "loss_is_scaled_for_ga"), (
        "OfflineTrainer sets it: every channel is divided by the step's items"
    )
