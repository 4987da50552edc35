"""The record of twenty steps as the numbered batches of a run, and the settings that make the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_replication.envs.student import student_folder
from composer_replication.recipes.monarch.policy_trainer import LossSettings, TrainerSettings
from composer_replication.recipes.monarch.tensor_file import StepBatch
from composer_replication.trainer.objective.channels import LossKnobs
from composer_replication.trainer.rollouts.hint_distillation import ErringTurn
from recipes.recorded_steps import ITERATIONS, SETTINGS, STEPS, Batch, recorded_batches

LOSS = LossSettings(
    knobs=LossKnobs(alpha_sdpo=SETTINGS["alpha_sdpo"], beta_replay=0.0, sdpo_jsd_beta=SETTINGS["sdpo_jsd_beta"]),
    loss_type=SETTINGS["loss_type"],
    epsilon=SETTINGS["epsilon"],
    max_completion_length=SETTINGS["max_completion_length"],
    temperature=SETTINGS["temperature"],
    is_clip=SETTINGS["is_clip"],
)

_OPTIMISER = ("learning_rate", "betas", "adam_epsilon", "weight_decay", "max_grad_norm")


def step_batch(batch: Batch) -> StepBatch:
    rows: list[list[ErringTurn]] = [[] for _ in batch.prompt_ids]
    for site in batch.sites:
        turn = ErringTurn(
            site.start, site.end, site.teacher_ids, site.teacher_start, site.kind, site.hint, f"turn at {site.start}"
        )
        rows[site.row].append(turn)
    return StepBatch(
        prompt_ids=batch.prompt_ids,
        prompt_mask=batch.prompt_mask,
        completion_ids=batch.completion_ids,
        completion_mask=batch.completion_mask,
        sampled_mask=batch.tool_mask,
        advantages=batch.advantages,
        old_logprobs=batch.old_logprobs,
        sites=tuple(map(tuple, rows)),
    )


def save_recorded(folder: Path) -> None:
    for number, batch in enumerate(recorded_batches()):
        step_batch(batch).save(folder / "batches", number)


def recorded_settings(folder: Path, **changes: Any) -> TrainerSettings:
    named = {
        "model": str(student_folder()),
        "folder": str(folder),
        "weights": str(folder / "shared"),
        "total_steps": STEPS,
        "num_iterations": ITERATIONS,
        "loss": LOSS,
        "live_share": SETTINGS["live_share"],
        **{
            name: SETTINGS[name] for name in ("learning_rate", "betas", "adam_epsilon", "weight_decay", "max_grad_norm")
        },
    }
    return TrainerSettings(**{**named, **changes})
