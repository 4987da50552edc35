"""verl's worker group under Ray on two processes, without rollouts: `python -m recipes.verl.two_workers FOLDER`.

Two recorded steps through the calls that verl's trainer makes, one with pairs on rows of the first process alone, one
with copies of pairs on all rollouts of their prompts, and a checkpoint; what came out is in `found.json`. The variables
of `cpu_platform.ENVIRONMENT` must be set.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils

from composer_replication.envs.student import student_folder
from composer_replication.recipes.verl.trainer import ComposerWorker
from recipes.recorded_steps import ITERATIONS, SETTINGS, STEPS, recorded_batches
from recipes.verl.cpu_engine import data_proto, step_data
from recipes.verl.recorded_pairs import on_all_rollouts, pairs_of, with_pairs
from recipes.verl.scripted_server import load_config

FP32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
# verl's reference offloads to pinned memory, which only a GPU has. Without `forward_only` it stays where it is, and has
# an optimiser that never steps.
OVERRIDES = (
    f"actor_rollout_ref.model.path={student_folder()}",
    "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    f"actor_rollout_ref.actor.optim.lr={SETTINGS['learning_rate']}",
    f"actor_rollout_ref.actor.optim.total_training_steps={STEPS}",
    f"data.max_response_length={SETTINGS['max_completion_length']}",
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.composer.teacher_top_k=null",
    "actor_rollout_ref.composer.teacher_batch=2",
    "actor_rollout_ref.composer.beta_replay=0.05",
    "actor_rollout_ref.ref.fsdp_config.forward_only=false",
    "++actor_rollout_ref.ref.optim={_target_: verl.workers.config.FSDPOptimizerConfig, lr: 0.0}",
    *(
        f"++actor_rollout_ref.{role}.fsdp_config.{setting}"
        for role in ("actor", "ref")
        for setting in ("param_offload=false", "model_dtype=fp32", "use_torch_compile=false", f"mixed_precision={FP32}")
    ),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
)


class PolicyAndReference(ComposerWorker):
    """The hybrid worker without its rollout server, which needs a GPU."""

    def __init__(self, config: Any, role: str, **named: Any) -> None:
        super().__init__(config, role, **named)
        self.role = "actor_ref"
        # verl itself would ask for a backend of the CPU and one of the device, which here are the same.
        torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_norms(self) -> dict[str, float]:
        named = self.actor.engine.module.named_parameters()
        return {name: float(value.detach().full_tensor().double().norm()) for name, value in named}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whereabouts(self) -> dict[str, Any]:
        engine = self.actor.engine
        shards = [value.to_local().numel() for value in engine.module.parameters()]
        whole = [value.numel() for value in engine.module.parameters()]
        return {"pid": os.getpid(), "engine": type(engine).__name__, "share": sum(shards) / sum(whole)}


NUM_STEPS = 4


def batch_of(number: int) -> Any:
    """The recorded batches of the first two steps, and then the same again with pairs on its first rows, or on all."""
    batch = recorded_batches()[0]
    if number < ITERATIONS:
        return data_proto(batch)
    pairs = pairs_of(batch)
    return with_pairs(batch, pairs, rows=(1, 2, 2)) if number == ITERATIONS else on_all_rollouts(batch, pairs)


def update_data(number: int) -> Any:
    """As verl's trainer sends a batch to `update_actor`."""
    data = step_data(batch_of(number), micro_batch=2)
    settings = {"mini_batch_size": 8, "epochs": 1, "seed": 42, "dataloader_kwargs": {"shuffle": False}}
    tensordict_utils.assign_non_tensor(data, distillation_use_topk=False, compute_loss=True, **settings)
    return data


def main(folder: Path) -> None:
    config = load_config("composer_1_gpu", *OVERRIDES)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    try:
        pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        worker = RayClassWithInitArgs(
            cls=ray.remote(PolicyAndReference), config=config.actor_rollout_ref, role="actor_rollout_ref"
        )
        group = RayWorkerGroup(pool, worker, device_name="cpu")
        group.init_model()
        steps = []
        for number in range(NUM_STEPS):
            metrics = tensordict_utils.get(group.update_actor(update_data(number)), "metrics")
            steps.append({name: _figure(value) for name, value in metrics.items()})
        group.save_checkpoint(str(folder / "checkpoint"))
        found = {"workers": group.whereabouts(), "steps": steps, "norms": group.weight_norms()}
    finally:
        ray.shutdown()
    (folder / "found.json").write_text(json.dumps(found))


def _figure(value: Any) -> Any:
    value = value.aggregate() if hasattr(value, "aggregate") else value
    value = value[0] if isinstance(value, list) else value
    return float(value) if isinstance(value, int | float | torch.Tensor) or hasattr(value, "item") else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
