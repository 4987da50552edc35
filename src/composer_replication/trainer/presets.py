"""Load the recommended settings in recipes/presets/*.toml, as a config and as arguments for the trainers.

composer   Dr. GRPO with one pass over each rollout, a KL penalty in the advantage (k1) and a penalty for effort;
           channel 2 with KL(student || teacher) and a trust-region teacher
dapo       GRPO with a higher upper clip, a mean over all tokens, filtering and penalizing of overlong rollouts, and
           dynamic sampling
none       no preset: the defaults in code
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

from composer_replication.config import CrfConfig, TrainConfig, load
from composer_replication.config.presets import load_with_preset, preset_path
from composer_replication.optional import require
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.rollouts.effort import (
    EffortWeights,
    ErrorPenalty,
    TextTokenizer,
    effort_penalty_reward,
)
from composer_replication.trainer.rollouts.sites import RolloutOptions
from composer_replication.trainer.teacher_keeper import TeacherKeeper

PresetName = Literal["composer", "dapo", "none"]
# The GRPOConfig argument for each option in [train.grpo].
_TRL_NAMES = {
    "num_generations": "num_generations",
    "max_completion_length": "max_completion_length",
    "temperature": "temperature",
    "loss_type": "loss_type",
    "scale_rewards": "scale_rewards",
    "num_iterations": "num_iterations",
    "reference_kl": "beta",
    "epsilon": "epsilon",
    "epsilon_high": "epsilon_high",
    "mask_truncated": "mask_truncated_completions",
    "use_vllm": "use_vllm",
    "vllm_mode": "vllm_mode",
    "vllm_server_url": "vllm_server_base_url",
    "vllm_memory": "vllm_gpu_memory_utilization",
}


def _preset_config(name: PresetName) -> CrfConfig:
    """Return the default config after applying only this preset."""
    return load_with_preset(overrides=[f"train.preset={name}"])


def channel_settings(config: CrfConfig) -> ChannelSettings:
    """Return the settings for channels 2 and 3 that [loss] and [train.channels] contain."""
    knobs = {name: value for name, value in vars(config.loss).items() if name in ChannelSettings.__dataclass_fields__}
    channels = config.train.channels
    if config.loss.taid_t is not None:
        knobs["taid_start"] = config.loss.taid_t
    return ChannelSettings(
        **knobs,
        taid_end=channels.taid_end,
        taid_rate=channels.taid_rate,
        taid_momentum=channels.taid_momentum,
        sdpo_is_clip=channels.is_clip,
        anneal=channels.anneal,
        anneal_end=channels.anneal_end,
    )


def grpo_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the settings in [train.grpo] as arguments for `trl.GRPOConfig`."""
    return {trl_name: getattr(config.grpo, name) for name, trl_name in _TRL_NAMES.items()}


def composer_grpo_config(
    output_dir: str | os.PathLike[str], *, preset: Literal["composer", "dapo"] = "composer", **overrides: Any
) -> Any:
    """Return a `trl.GRPOConfig` with the preset's settings; `overrides` take precedence over the preset.

    By default TRL computes in bf16. If there is no GPU that supports bf16, and neither `use_cpu` nor `bf16` is set,
    this function chooses fp32.
    """
    trl = require("trl", extra="train")
    arguments = grpo_arguments(load(CrfConfig, preset_path(preset)).train)
    if not (overrides.get("use_cpu") or is_torch_bf16_gpu_available() or is_torch_xla_available()):
        # transformers would refuse TRL's default, bf16=True.
        arguments["bf16"] = False
    if not torch.cuda.is_available():
        # torch warns about pinned memory without a GPU.
        arguments["dataloader_pin_memory"] = False
    return trl.GRPOConfig(output_dir=os.fspath(output_dir), **{**arguments, **overrides})


def trainer_arguments(preset: PresetName = "composer") -> dict[str, Any]:
    """Return the settings of a preset that GRPOConfig does not have, as arguments for ComposerReplicationTrainer.

    `ComposerReplicationTrainer(..., args=composer_grpo_config("out"), **trainer_arguments())` applies the whole preset,
    except for the rewards that it adds (`preset_rewards`). Without logged data channel 3 is skipped, with a warning.
    """
    config = _preset_config(preset)
    return {
        "settings": channel_settings(config),
        "teacher": teacher_from_config(config),
        "rollouts": rollout_options(config),
        "heed_gate": config.train.grpo.heed_gate,
    }


def teacher_from_config(config: CrfConfig) -> TeacherKeeper:
    """Return the teacher configured in [train.teacher]."""
    teacher = config.train.teacher
    return TeacherKeeper(teacher.kind, ema_rate=teacher.ema_rate, live_share=teacher.live_share)


def rollout_options(config: CrfConfig) -> RolloutOptions:
    """Return the rollout options configured in [train.batch] and [train.grpo]."""
    batch, grpo = config.train.batch, config.train.grpo
    return RolloutOptions(
        placement=batch.placement,
        part=batch.part,
        max_resamples=grpo.max_resamples if grpo.dynamic_sampling else 0,
        hints=grpo.hints,
        unhinted_kinds=grpo.unhinted_kinds,
        k1_coefficient=grpo.k1_coefficient,
        fast_generation=grpo.fast_generation,
        generation_batch=grpo.generation_batch,
    )


def preset_rewards(config: TrainConfig, tokenizer: TextTokenizer) -> list[Callable[..., list[float]]]:
    """Return the reward functions that a config adds to the reward functions of the task."""
    rewards: list[Callable[..., list[float]]] = []
    grpo, effort = config.grpo, config.effort
    # The option is a fraction of the limit, but TRL takes a number of tokens.
    soft_length = round(grpo.soft_overlong * grpo.max_completion_length)
    if soft_length:
        # DAPO's soft overlong penalty: 0 up to `soft_length` tokens before the limit, then falling to -1.
        penalty = require("trl.rewards", extra="train").get_soft_overlong_punishment
        rewards.append(penalty(max_completion_len=grpo.max_completion_length, soft_punish_cache=soft_length))
    if grpo.error_penalty:
        rewards.append(ErrorPenalty(grpo.error_penalty))
    if effort.on:
        prices = {name: getattr(effort, name) for name in EffortWeights.__dataclass_fields__}
        rewards.append(effort_penalty_reward(tokenizer, weights=EffortWeights(**prices), k=effort.k, q=effort.q))
    return rewards
