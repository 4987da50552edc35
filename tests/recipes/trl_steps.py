"""Our trainer in TRL, as it is recorded and as it is checked: the embedded student in the workspace, twenty steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig

from composer_replication.envs.student import load_student
from composer_replication.envs.trl_environment import task_rows
from composer_replication.evaluation.ablation.workspace import SCHEMAS, TaskEpisode, files_worth, play_all
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.rollouts.hint_distillation import ITEMS, SITES, ErringTurn
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from recipes.recorded_episodes import played
from recipes.recorded_steps import (
    GROUP,
    ITERATIONS,
    ROWS,
    SETTINGS,
    STEPS,
    Batch,
    Site,
    Step,
    start_weights,
    weight_sums,
)

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
FIRST_TASK = 20_000
MOST_TOKENS = 256
"""After a prompt, where the model has no turn more."""


def config_of(folder: Path) -> GRPOConfig:
    """A constant rate, AdamW, one micro-batch a step, each generation used twice."""
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        num_iterations=ITERATIONS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=SETTINGS["max_completion_length"],
        loss_type=SETTINGS["loss_type"],
        scale_rewards=SETTINGS["scale_rewards"],
        epsilon=SETTINGS["epsilon"],
        beta=0.0,
        temperature=SETTINGS["temperature"],
        learning_rate=SETTINGS["learning_rate"],
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_epsilon=SETTINGS["adam_epsilon"],
        weight_decay=SETTINGS["weight_decay"],
        max_grad_norm=SETTINGS["max_grad_norm"],
        seed=SETTINGS["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Recorder(TrainerCallback):
    """Keeps every batch that a loss is computed of, and what each step did to the weights."""

    def __init__(self, trainer: Any, most_steps: int) -> None:
        self.batches: list[Batch] = []
        self.steps: list[Step] = []
        self._trainer, self._most, self._start = trainer, most_steps, start_weights(trainer.model)
        self._sums: list[torch.Tensor] = []
        self._compute, self._score = trainer.channel_loss.compute, trainer.sampling.score
        self._rate, self._rewards = trainer.sampling.rewards, torch.empty(0)
        trainer.channel_loss.compute, trainer.sampling.score = self.compute, self.score
        trainer.sampling.rewards = self.rewards
        trainer.add_callback(self)

    def rewards(self, original: Any, *given: Any) -> torch.Tensor:
        """Those of the only reward function."""
        rewards = self._rate(original, *given)
        self._rewards = rewards[:, 0]
        return rewards

    def score(self, original: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """With the rewards and the groups, which TRL then shuffles with the rest."""
        batch = self._score(original, inputs)
        batch["rewards"] = self._rewards.clone()
        batch["group"] = torch.arange(ROWS) // GROUP
        batch["place"] = torch.arange(ROWS)
        batch["task_seeds"] = torch.tensor([each["seed"] for each in inputs])
        return batch

    def compute(self, original: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if self._trainer.state.global_step % ITERATIONS == 0:
            self.batches.append(batch_of(inputs))
        return self._compute(original, model, inputs)

    def on_step_end(self, _args: Any, state: Any, control: Any, **_named: Any) -> None:
        self._sums.append(weight_sums(self._trainer.model, self._start))
        control.should_training_stop |= state.global_step >= self._most

    def finish(self) -> None:
        lines = [each for each in self._trainer.state.log_history if "loss/grpo" in each]
        for line, sums in zip(lines, self._sums, strict=True):
            self.steps.append(
                Step(
                    alpha=line["loss/alpha_sdpo"],
                    grpo=line["loss/grpo"],
                    sdpo=line["loss/sdpo_kl"],
                    total=line["loss/total"],
                    grad_norm=float(line["grad_norm"]),
                    weights=sums,
                )
            )


def batch_of(inputs: dict[str, Any]) -> Batch:
    sites = [
        Site(row, turn.start, turn.end, turn.teacher_start, turn.teacher_ids, turn.kind, turn.hint)
        for row, turns in enumerate(inputs[SITES])
        for turn in turns
    ]
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "rewards", "advantages")
    tensors = {name: inputs[name].clone() for name in (*names, "group", "task_seeds", "place")}
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    old = torch.where(mask, inputs["old_per_token_logps"], 0.0)
    return Batch(**tensors, old_logprobs=old, sites=tuple(sites))


def trainer_of(folder: Path, rollout_function: Any = None) -> ComposerReplicationTrainer:
    model, tokenizer = load_student(dtype=torch.float32)
    settings = ChannelSettings(
        alpha_sdpo=SETTINGS["alpha_sdpo"],
        beta_replay=0.0,
        sdpo_jsd_beta=SETTINGS["sdpo_jsd_beta"],
        sdpo_is_clip=SETTINGS["is_clip"],
        anneal="linear",
    )
    tasks = range(FIRST_TASK, FIRST_TASK + STEPS // ITERATIONS * ROWS // GROUP)
    return ComposerReplicationTrainer(
        model=model,
        args=config_of(folder),
        reward_funcs=[files_worth],
        train_dataset=Dataset.from_list(task_rows(tasks)),
        processing_class=tokenizer,
        rollout_func=rollout_function or sampled_rollouts,
        settings=settings,
        teacher=TeacherKeeper("trust_region", live_share=SETTINGS["live_share"]),
    )


def run(folder: Path, *, most_steps: int = STEPS, rollout_function: Any = None) -> tuple[Recorder, list[str]]:
    """All steps, or the first of them; the names are those of the parameters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = trainer_of(folder, rollout_function)
        recorder = Recorder(trainer, most_steps)
        trainer.train()
        recorder.finish()
    finally:
        torch.set_num_threads(threads)
    return recorder, [name for name, _ in trainer.model.named_parameters()]


def sampled_rollouts(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """Rollouts of the model at hand. They end well before TRL would cut them: a record has whole turns alone."""
    seeds, tokenizer, step = _seeds(trainer), trainer.processing_class, trainer.state.global_step
    episodes = [
        TaskEpisode(tokenizer, seeds[prompt[-1]["content"]], f"{trainer.args.seed}:{step}:{place}")
        for place, prompt in enumerate(prompts)
    ]
    model = trainer.accelerator.unwrap_model(trainer.model)
    play_all(model, tokenizer, episodes, max_tokens=MOST_TOKENS, num_parallel=len(episodes))
    return _answers(episodes, trainer.max_completion_length)


def recorded_rollouts(batches: Sequence[Batch]) -> Any:
    """A rollout function that says in each episode what was recorded; the workspace answers and judges anew."""

    def play(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        batch, seeds = batches[trainer.state.global_step // ITERATIONS], _seeds(trainer)
        rows = batch.place.argsort().tolist()
        assert [seeds[prompt[-1]["content"]] for prompt in prompts] == batch.task_seeds[rows].tolist()
        episodes = [played(trainer.processing_class, batch, row) for row in rows]
        return _answers(episodes, trainer.max_completion_length)

    return play


def _seeds(trainer: Any) -> dict[str, int]:
    return {row["prompt"][-1]["content"]: int(row["seed"]) for row in trainer.train_dataset}


def _answers(episodes: Sequence[TaskEpisode], longest: int) -> dict[str, Any]:
    assert all(len(each.ids) <= longest for each in episodes)
    return {
        "prompt_ids": [each.prompt_ids for each in episodes],
        "completion_ids": [each.ids for each in episodes],
        "env_mask": [each.sampled for each in episodes],
        "logprobs": None,
        "messages": [each.messages for each in episodes],
        "tools": [SCHEMAS for _ in episodes],
        "files_worth": [each.workspace.reward().value for each in episodes],
    }


def trainer_values(folder: Path, batch: Batch, *, alpha: float) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Values of the channels and the gradient of their sum on one batch, by our trainer's own loss."""
    trainer = trainer_of(folder)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = inputs_of(batch)
    with torch.enable_grad():
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
    figures = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
    assert figures["loss/alpha_sdpo"] == alpha, "the first step's weight"
    means = trainer.channel_metrics.take("train")
    found = {"grpo": figures["loss/grpo"], "total": figures["loss/total"], "sdpo": means["loss/sdpo_kl"]}
    return found, {name: each.grad.clone() for name, each in trainer.model.named_parameters()}


def inputs_of(batch: Batch) -> dict[str, Any]:
    """A recorded batch as TRL's loss takes it, with our sites."""
    turns = [
        [
            ErringTurn(site.start, site.end, site.teacher_ids, site.teacher_start, site.kind, site.hint, f"{row}")
            for site in batch.sites
            if site.row == row
        ]
        for row in range(len(batch.prompt_ids))
    ]
    return {
        "prompt_ids": batch.prompt_ids,
        "prompt_mask": batch.prompt_mask,
        "completion_ids": batch.completion_ids,
        "completion_mask": batch.completion_mask,
        "tool_mask": batch.tool_mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs,
        "num_items_in_batch": batch.loss_mask.sum(),
        SITES: turns,
        ITEMS: torch.tensor(float(sum(site.end - site.start for site in batch.sites))),
    }
