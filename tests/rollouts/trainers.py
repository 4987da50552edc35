"""Trainers on the tiny policy, with settings that take a second a step on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rollouts.tiny_policy import load_tokenizer

# Read when a trainer with an environment or a rollout function is made; TRL warns without it, and warnings are errors.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

PROMPTS = ("The sky is", "A file holds", "Run the tests", "It is not")
TRAINERS = ("GRPOTrainer", "ComposerReplicationTrainer")


def trainer_named(name: str) -> type[GRPOTrainer]:
    """Ours is imported on use, so that TRL's own behaviour can be looked at without it."""
    if name == "GRPOTrainer":
        return GRPOTrainer
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer

    return ComposerReplicationTrainer


@contextmanager
def light_process() -> Iterator[None]:
    """One thread, also where the environment asks for more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def quick_config(folder: Path, **settings: Any) -> GRPOConfig:
    """Two prompts of three completions, one step; `folder` takes what the trainer writes."""
    chosen = {
        "per_device_train_batch_size": 3,
        "num_generations": 3,
        "max_completion_length": 8,
        "max_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    return GRPOConfig(output_dir=str(folder), **{**chosen, **settings})


def prompts(texts: Sequence[str] = PROMPTS, **columns: Sequence[Any]) -> Dataset:
    return Dataset.from_dict({"prompt": list(texts), **{name: list(values) for name, values in columns.items()}})


def questions(texts: Sequence[str] = PROMPTS, **columns: Sequence[Any]) -> Dataset:
    """The same as conversations."""
    return prompts([[{"role": "user", "content": text}] for text in texts], **columns)  # type: ignore[arg-type]


def by_first_token(completion_ids: Sequence[Sequence[int]], **_columns: Any) -> list[float]:
    """A reward that differs within a group as long as the samples do, and does not depend on their order."""
    return [float(ids[0] % 17) + len(ids) / 100 for ids in completion_ids]


def make(
    trainer_class: type[GRPOTrainer],
    policy: Path,
    config: GRPOConfig,
    *,
    reward_funcs: Any = by_first_token,
    train_dataset: Any = None,
    **named: Any,
) -> GRPOTrainer:
    """The model is loaded here and carries the policy's path, as a reference model is loaded by it."""
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=prompts() if train_dataset is None else train_dataset,
        processing_class=load_tokenizer(policy),
        **named,
    )


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def changed(before: dict[str, torch.Tensor], trainer: GRPOTrainer) -> set[str]:
    return {name for name, value in trainer.model.named_parameters() if not torch.equal(before[name], value)}


def spy(trainer: GRPOTrainer, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Records each call of a method on this instance: its arguments and what it returned."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    original: Callable[..., Any] = getattr(trainer, name)

    def recorded(*positional: Any, **named: Any) -> Any:
        calls.append((positional, named, result := original(*positional, **named)))
        return result

    setattr(trainer, name, recorded)
    return calls
