"""A policy of a few thousand weights, and batches for it: what is looked at is the bookkeeping, not the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from composer_replication.batch.model_folder import load_model
from composer_replication.recipes.monarch.policy_trainer import LossSettings, TrainerSettings
from composer_replication.recipes.monarch.tensor_file import StepBatch
from composer_replication.trainer.objective.channels import LossKnobs
from tiny_models import VOCAB, build


def save_tiny(folder: Path) -> None:
    build("qwen2-tied").save_pretrained(folder)


def save_scaled(source: Path, folder: Path) -> None:
    """Another model of the same shapes."""
    model: Any = load_model(str(source), what="model")
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.5)
    model.save_pretrained(folder)


def tiny_batch(number: int, *, weights_version: int | None = None) -> StepBatch:
    draw = torch.Generator().manual_seed(number)
    ones = torch.ones(4, 6, dtype=torch.int64)
    return StepBatch(
        prompt_ids=torch.randint(3, VOCAB, (4, 5), generator=draw),
        prompt_mask=torch.ones(4, 5, dtype=torch.int64),
        completion_ids=torch.randint(3, VOCAB, (4, 6), generator=draw),
        completion_mask=ones,
        sampled_mask=ones.clone(),
        advantages=torch.randn(4, generator=draw),
        sites=((), (), (), ()),
        weights_version=number if weights_version is None else weights_version,
    )


def tiny_settings(run: Path, *, folder_name: str = "run", **changes: Any) -> TrainerSettings:
    """A run of its own in `run / folder_name`, on the batches of `run`."""
    folder = run / folder_name
    folder.mkdir(exist_ok=True)
    if not (folder / "batches").exists():
        (folder / "batches").symlink_to(run / "batches")
    named: dict[str, Any] = {
        "model": str(run / "model"),
        "folder": str(folder),
        "weights": str(folder / "shared"),
        "total_steps": 10,
        "num_iterations": 2,
        "learning_rate": 1e-3,
        "loss": LossSettings(knobs=LossKnobs(alpha_sdpo=0.0, beta_replay=0.0), max_completion_length=6),
    }
    return TrainerSettings(**{**named, **changes})
