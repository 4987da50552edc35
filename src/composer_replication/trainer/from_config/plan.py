"""What `crf train` would do, without weights: what there is to train on, and whether a step fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.config import CrfConfig
from composer_replication.runs.conversations import read_conversations
from composer_replication.sessions.rendering import models_of
from composer_replication.trainer.from_config.inputs import Inputs, prompts_of, read_inputs
from composer_replication.trainer.from_config.offline import offline_data, offline_memory
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.from_config.renderer import unmatched_models
from composer_replication.trainer.from_config.results import metric_names
from composer_replication.trainer.watch.memory_plan import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a run would be: where, with how much of what, and whether it fits. `memory` is known offline alone.

    `newest_checkpoint` is the folder that it would go on from, past those that are damaged.
    """

    folder: TrainingFolder
    mode: str
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    drops: Mapping[str, int] = field(default_factory=dict[str, int])
    memory: MemoryPlan | None = None
    newest_checkpoint: str | None = None
    changed: Sequence[str] = ()
    remarks: Sequence[str] = ()


def plan_training(config: CrfConfig) -> TrainingPlan:
    """What `run_training` would do, without weights; the resolved config is written unless a run's own is there."""
    inputs, folder = read_inputs(config), TrainingFolder.of(config)
    known = _offline_plan(inputs) if config.train.mode == "offline" else _grpo_plan(inputs)
    newest, changed = folder.newest_checkpoint(), folder.changed_options(config)
    if newest is None:
        folder.write_config(config)
    return TrainingPlan(
        folder=folder,
        mode=config.train.mode,
        newest_checkpoint=None if newest is None else newest.name,
        changed=changed if newest is not None else (),
        **known,
    )


def _offline_plan(inputs: Inputs) -> dict[str, Any]:
    data = offline_data(inputs)
    data.train.require_items()
    return {
        "counts": metric_names(data.train.counts),
        "drops": metric_names(data.train.drops),
        "memory": offline_memory(inputs, data.train),
        "remarks": unmatched_models(inputs.config.render, data.models),
    }


def _grpo_plan(inputs: Inputs) -> dict[str, Any]:
    prompts, held_out = prompts_of(inputs)
    counts = {"prompts": len(prompts), "held_out_prompts": 0 if held_out is None else len(held_out)}
    if inputs.run is None or not inputs.config.render.student_models:
        return {"counts": counts}
    models = frozenset[str]().union(*map(models_of, read_conversations(inputs.run)))
    return {"counts": counts, "remarks": unmatched_models(inputs.config.render, models)}
