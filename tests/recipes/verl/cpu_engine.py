"""verl's fsdp2 engine on the CPU with the embedded student, and recorded rollouts as its batches."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from composer_replication.envs.student import student_folder
from composer_replication.recipes.verl import cpu_platform, registered
from composer_replication.recipes.verl import engine as _registers_the_engine
from composer_replication.recipes.verl.channel_loss import EngineChannels
from composer_replication.recipes.verl.columns import write_sites
from composer_replication.trainer.rollouts.hint_distillation import SITES, ErringTurn
from recipes.recorded_steps import SETTINGS, STEPS, Batch

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
assert _registers_the_engine
assert os.environ["VERL_PLATFORM"] == cpu_platform.NAME, "set the variables of cpu_platform.ENVIRONMENT first"


def join_group(folder: Path, rank: int = 0, world_size: int = 1) -> None:
    if not torch.distributed.is_initialized():
        where = f"file://{folder}/processes"
        torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)


def model_config(folder: Path | None = None, **options: Any) -> HFModelConfig:
    return HFModelConfig(
        path=str(folder or student_folder()),
        load_tokenizer=False,
        use_remove_padding=options.pop("use_remove_padding", False),
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
        **options,
    )


def engine_config(**options: Any) -> FSDPEngineConfig:
    return FSDPEngineConfig(
        strategy="fsdp2", use_torch_compile=False, mixed_precision=FP32, model_dtype="fp32", **options
    )


def optimizer_config() -> FSDPOptimizerConfig:
    return FSDPOptimizerConfig(
        lr=SETTINGS["learning_rate"],
        betas=SETTINGS["betas"],
        weight_decay=SETTINGS["weight_decay"],
        clip_grad=SETTINGS["max_grad_norm"],
        total_training_steps=STEPS,
    )


def actor_config(rows: int, **options: Any) -> FSDPActorConfig:
    """TRL's dr_grpo in verl's words."""
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=rows,
        ppo_micro_batch_size_per_gpu=rows,
        clip_ratio=SETTINGS["epsilon"],
        clip_ratio_low=SETTINGS["epsilon"],
        clip_ratio_high=SETTINGS["epsilon"],
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=SETTINGS["max_completion_length"],
        policy_loss=PolicyLossConfig(loss_mode=registered.POLICY_LOSS),
        **options,
    )


def new_engine(vendor: str = "composer", *, is_reference: bool = False, **options: Any) -> Any:
    """Initialised, with the student's start weights."""
    before = os.environ.get("VERL_ENGINE_VENDOR")
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    try:
        engine = EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model_config=model_config(**options),
            engine_config=engine_config(forward_only=is_reference),
            optimizer_config=optimizer_config(),
            checkpoint_config=CheckpointConfig(),
        )
    finally:
        os.environ.pop("VERL_ENGINE_VENDOR")
        if before is not None:
            os.environ["VERL_ENGINE_VENDOR"] = before
    engine.initialize()
    return engine


def site_column(batch: Batch) -> np.ndarray:
    turns: dict[int, list[ErringTurn]] = defaultdict(list)
    for number, site in enumerate(batch.sites):
        turns[site.row].append(
            ErringTurn(
                site.start, site.end, site.teacher_ids, site.teacher_start, site.kind, site.hint, f"site-{number}"
            )
        )
    rows = len(batch.rewards)
    return np.array([write_sites(turns[row], batch.row_ids(row)) for row in range(rows)], dtype=object)


def data_proto(batch: Batch, *, with_sites: bool = True) -> DataProto:
    """Recorded rollouts as verl's trainer has them after its advantages."""
    mask = batch.loss_mask.long()
    tensors = {
        "prompts": batch.prompt_ids,
        "responses": batch.completion_ids,
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": (batch.attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
        "old_log_probs": batch.old_logprobs,
        "advantages": batch.advantages[:, None] * mask,
    }
    columns = {"uid": np.array([str(each) for each in batch.group.tolist()], dtype=object)}
    if with_sites:
        columns[SITES] = site_column(batch)
    meta = {"temperature": SETTINGS["temperature"]}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info=meta)


def step_data(proto: DataProto, *, micro_batch: int | None = None, **settings: Any) -> Any:
    """As verl's trainer sends it to the actor."""
    data = left_right_2_no_padding(proto.to_tensordict())
    rows = len(proto)
    tensordict_utils.assign_non_tensor(
        data,
        global_batch_size=rows,
        micro_batch_size_per_gpu=micro_batch or rows,
        use_fused_kernels=False,
        calculate_entropy=False,
        **{"use_remove_padding": False, "use_dynamic_bsz": False} | settings,
    )
    return data


def queue_data(batch: Batch, **settings: Any) -> Any:
    """As the actor gets it from verl's queue: every column nested, and what an agent loop adds in one mapping a row."""
    lengths = [batch.prompt_length(row) for row in range(len(batch.rewards))]
    rows = [torch.tensor(batch.row_ids(row)) for row in range(len(lengths))]
    answers = [row[length:] for row, length in zip(rows, lengths, strict=True)]
    columns = {
        "prompts": [row[:length] for row, length in zip(rows, lengths, strict=True)],
        "responses": answers,
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "response_mask": [batch.loss_mask[at, : len(each)].long() for at, each in enumerate(answers)],
        "old_log_probs": [batch.old_logprobs[at, : len(each)] for at, each in enumerate(answers)],
        "advantages": [batch.advantages[at].expand(len(each)).clone() for at, each in enumerate(answers)],
    }
    nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in columns.items()}
    data = tensordict_utils.get_tensordict(nested | {"loss_mask": nested["response_mask"]})
    added = [{SITES: text, "turn_scores": []} for text in site_column(batch)]
    tensordict_utils.assign_non_tensor_stack(data, "extra_fields", added)
    tensordict_utils.assign_non_tensor(
        data,
        temperature=SETTINGS["temperature"],
        global_batch_size=len(rows),
        use_dynamic_bsz=False,
        use_fused_kernels=False,
        calculate_entropy=False,
        use_remove_padding=False,
        **settings,
    )
    return data


def policy_loss(rows: int, **options: Any) -> Any:
    return partial(ppo_loss, config=actor_config(rows, **options))


def channels(**changes: Any) -> EngineChannels:
    """As recorded, without the annealing."""
    given = {
        "alpha_sdpo": SETTINGS["alpha_sdpo"],
        "beta_replay": 0.0,
        "sdpo_jsd_beta": SETTINGS["sdpo_jsd_beta"],
        "sdpo_is_clip": SETTINGS["is_clip"],
        "live_share": SETTINGS["live_share"],
    }
    return EngineChannels(**given | changes)
