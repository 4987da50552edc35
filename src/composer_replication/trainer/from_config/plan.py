"""What `crf train` would do, without weights: what there is to train on, and whether a step fits."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composer_replication.config import CrfConfig
from composer_replication.runs.conversations import read_conversations
from composer_replication.sessions.dataset import LoggedSessions
from composer_replication.sessions.rendering import models_of
from composer_replication.trainer.from_config.inputs import (
    Inputs,
    beyond_context,
    learnt_context,
    model_config,
    prompts_of,
    read_inputs,
)
from composer_replication.trainer.from_config.offline import offline_data, offline_memory
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.from_config.renderer import unmatched_models
from composer_replication.trainer.from_config.results import metric_names
from composer_replication.trainer.same_start import launched_processes
from composer_replication.trainer.watch.memory_plan import MemoryPlan
from composer_replication.trainer.watch.step_memory import shape_of

_PASSES, _REACHED = 8, 0.3
"""Operations a weight and token of a step with a teacher; the share of a machine's speed that such a step reaches."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Operations a second, weights of the model, and tokens of a window: what a guess at a duration is made of."""

    speed: float
    weights: int
    tokens: float
    windows_a_step: int

    @property
    def tokens_a_step(self) -> float:
        return self.tokens * self.windows_a_step

    def seconds(self, passes: float) -> float:
        """For so many operations a weight: those a token, times tokens."""
        return passes * self.weights / (_REACHED * self.speed)


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
    pace: Pace | None = None
    seconds: float | None = None
    """What the steps may take on this machine, roughly; a warm-up and the proof come on top."""


def plan_training(config: CrfConfig) -> TrainingPlan:
    """What `run_training` would do, without weights; the resolved config is written unless a run's own is there."""
    inputs, folder = read_inputs(config), TrainingFolder.of(config)
    config = inputs.config
    plan_fields = _offline_plan(inputs) if config.train.mode == "offline" else _grpo_plan(inputs)
    newest, changed = folder.newest_checkpoint(), folder.changed_options(config)
    if not folder.has_begun:  # the options of a training that has begun are kept, for it to be compared with
        folder.write_config(config)
    return TrainingPlan(
        folder=folder,
        mode=config.train.mode,
        newest_checkpoint=None if newest is None else newest.name,
        changed=changed if folder.has_begun else (),
        **plan_fields,
    )


def _offline_plan(inputs: Inputs) -> dict[str, Any]:
    data = offline_data(inputs)
    data.train.require_items()
    pace, steps = pace_of(inputs, data.train), inputs.config.train.optimiser.steps
    return {
        "counts": metric_names(data.train.counts),
        "drops": metric_names(data.train.drops),
        "memory": offline_memory(inputs, data.train),
        "remarks": [*unmatched_models(inputs.config.render, data.models), *remarks_on(inputs, data.train)],
        "pace": pace,
        "seconds": pace.seconds(_PASSES * steps * pace.tokens_a_step),
    }


def remarks_on(inputs: Inputs, sessions: LoggedSessions) -> list[str]:
    """How often the steps see each window, whether most of them see no error at all, whether windows are too long."""
    config = inputs.config
    optimiser, channels = config.train.optimiser, config.train.channels
    a_step = optimiser.per_device * optimiser.accumulation * launched_processes()
    taught = sum(any(window.site_ids or window.state_ids for window in item.windows) for item in sessions.items)
    is_taught_alone = config.train.warmup.mode in ("steps", "until") and not channels.good_turns_after_warmup
    windows = taught if is_taught_alone and taught else len(sessions)
    remarks = [
        f"{optimiser.steps:,} steps see each of {windows:,} windows {optimiser.steps * a_step / windows:.2g} times:"
        f" once is train.optimiser.steps = {math.ceil(windows / a_step)}"
    ]
    if channels.good_turns and 0 < taught < windows / 2:
        remarks.append(
            f"only {taught:,} of {windows:,} windows hold an error or a pair: with train.channels.good_turns = false"
            " the steps are made on those alone"
        )
    beyond = beyond_context(config, learnt_context(config.train.model or "", inputs.tokenizer))
    return [*remarks, *([beyond] if beyond else [])]


def pace_of(inputs: Inputs, sessions: LoggedSessions) -> Pace:
    """How fast this machine multiplies right now, and how much there is to multiply."""
    optimiser, size, number = inputs.config.train.optimiser, 1024, 8
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16 if optimiser.bf16 else torch.float32)
    (matrix @ matrix).sum().item()  # the first one loads kernels
    began = time.monotonic()
    for _ in range(number):
        (matrix @ matrix).sum().item()
    return Pace(
        speed=number * 2 * size**3 / (time.monotonic() - began),
        weights=shape_of(model_config(inputs.config.train.model or "")).num_weights,
        tokens=sum(item.num_tokens for item in sessions.items) / len(sessions),
        windows_a_step=optimiser.per_device * optimiser.accumulation,
    )


def _grpo_plan(inputs: Inputs) -> dict[str, Any]:
    prompts, held_out = prompts_of(inputs)
    counts = {"prompts": len(prompts), "held_out_prompts": 0 if held_out is None else len(held_out)}
    if inputs.run is None or not inputs.config.render.student_models:
        return {"counts": counts}
    models = frozenset[str]().union(*map(models_of, read_conversations(inputs.run)))
    return {"counts": counts, "remarks": unmatched_models(inputs.config.render, models)}
