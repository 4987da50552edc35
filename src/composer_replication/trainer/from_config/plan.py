"""Plan a training without loading weights (amount of data, memory of a step, duration), and record its result."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composer_replication.atomic import atomic_write_json
from composer_replication.config import CrfConfig
from composer_replication.config.values import config_hash
from composer_replication.optional import is_object_name
from composer_replication.runs import RunDir
from composer_replication.runs.artefacts import Source, now, sha256_of_file
from composer_replication.runs.files import read_conversations
from composer_replication.runs.lineage import RECORD, ChannelResult, hash_source
from composer_replication.trainer.from_config.inputs import (
    Inputs,
    beyond_context,
    max_context,
    model_config,
    prompts_of,
    read_inputs,
    unmatched_models,
)
from composer_replication.trainer.from_config.offline import offline_data, offline_memory
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.offline_checks import NAMES
from composer_replication.trainer.rollouts.worlds.openenv import address_without_login, is_address
from composer_replication.trainer.rollouts.worlds.verifiers import is_verifiers
from composer_replication.trainer.same_start import launched_processes
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.rendering import models_of
from composer_replication.trainer.watch.memory_plan import MemoryPlan, shape_of
from composer_replication.version import __version__

_OPERATIONS_PER_WEIGHT, _UTILIZATION = 8, 0.3
"""Operations per weight and token in a step with a teacher, and the fraction of the measured speed that the step
reaches."""


@dataclass(frozen=True, kw_only=True)
class TrainingPace:
    """The measurements from which a training's duration is estimated.

    `speed` is in operations per second, `weights` is the model's number of weights, and `tokens` is the mean size of a
    window.
    """

    speed: float
    weights: int
    tokens: float
    windows_a_step: int

    @property
    def tokens_a_step(self) -> float:
        return self.tokens * self.windows_a_step

    def seconds(self, passes: float) -> float:
        """Return the estimated duration in seconds of `passes` operations per weight.

        `passes` is the number of operations per weight and token, times the number of tokens.
        """
        return passes * self.weights / (_UTILIZATION * self.speed)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a training would do: its folder, its data, and whether a step fits. `memory` is known only offline.

    `newest_checkpoint` is the folder from which it would resume; damaged checkpoints are skipped.
    """

    folder: TrainingFolder
    mode: str
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    drops: Mapping[str, int] = field(default_factory=dict[str, int])
    memory: MemoryPlan | None = None
    newest_checkpoint: str | None = None
    changed: Sequence[str] = ()
    remarks: Sequence[str] = ()
    pace: TrainingPace | None = None
    seconds: float | None = None
    """A rough estimate of the steps' duration on this machine, without warm-up and hint check."""


def plan_training(config: CrfConfig) -> TrainingPlan:
    """Return what `run_training` would do, without loading weights.

    The resolved config is written unless a training has already begun in this folder.
    """
    inputs, folder = read_inputs(config), TrainingFolder.of(config)
    config = inputs.config
    plan_fields = _offline_plan(inputs) if config.train.mode == "offline" else _grpo_plan(inputs)
    newest, changed = folder.newest_checkpoint(), folder.changed_options(config)
    # If a training has begun, keep its original options for comparison.
    if not folder.has_begun:
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
    pace, steps = _pace_of(inputs, data.train), inputs.config.train.optimiser.steps
    return {
        "counts": metric_names(data.train.counts),
        "drops": metric_names(data.train.drops),
        "memory": offline_memory(inputs, data.train),
        "remarks": [*unmatched_models(inputs.config.render, data.models), *remarks_on(inputs, data.train)],
        "pace": pace,
        "seconds": pace.seconds(_OPERATIONS_PER_WEIGHT * steps * pace.tokens_a_step),
    }


def remarks_on(inputs: Inputs, sessions: LoggedSessions) -> list[str]:
    """Return remarks about passes over the windows, windows without errors, and windows that are too long."""
    config = inputs.config
    optimiser, channels = config.train.optimiser, config.train.channels
    windows_per_step = optimiser.per_device * optimiser.accumulation * launched_processes()
    num_with_errors = sum(
        any(window.site_ids or window.state_ids for window in item.windows) for item in sessions.items
    )
    # If only the warm-up trains on good turns, the other steps skip windows without an error or a pair.
    skips_good_turns = config.train.warmup.mode in ("steps", "until") and not channels.good_turns_after_warmup
    windows = num_with_errors if skips_good_turns and num_with_errors else len(sessions)
    remarks = [
        f"{optimiser.steps:,} steps see each of {windows:,} windows "
        f"{optimiser.steps * windows_per_step / windows:.2g} times"
        f" on average; for one pass, set train.optimiser.steps = {math.ceil(windows / windows_per_step)}"
    ]
    if channels.good_turns and 0 < num_with_errors < windows / 2:
        remarks.append(
            f"only {num_with_errors:,} of {windows:,} windows contain an error or a pair; to train on these only,"
            " set train.channels.good_turns = false"
        )
    too_long = beyond_context(config, max_context(config.train.model or "", inputs.tokenizer))
    return [*remarks, *([too_long] if too_long else [])]


def _pace_of(inputs: Inputs, sessions: LoggedSessions) -> TrainingPace:
    """Measure how fast this machine multiplies matrices, and count the weights and tokens of a training."""
    optimiser, size, number = inputs.config.train.optimiser, 1024, 8
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16 if optimiser.bf16 else torch.float32)
    # The first multiplication loads kernels and is not timed.
    (matrix @ matrix).sum().item()
    start_time = time.monotonic()
    for _ in range(number):
        (matrix @ matrix).sum().item()
    return TrainingPace(
        speed=number * 2 * size**3 / (time.monotonic() - start_time),
        weights=shape_of(model_config(inputs.config.train.model or "")).num_weights,
        tokens=sum(item.num_tokens for item in sessions.items) / len(sessions),
        windows_a_step=optimiser.per_device * optimiser.accumulation,
    )


def _grpo_plan(inputs: Inputs) -> dict[str, Any]:
    prompts, held_out = prompts_of(inputs)
    counts = {"prompts": len(prompts), "held_out_prompts": 0 if held_out is None else len(held_out)}
    if inputs.run is None or not inputs.config.render.student_models:
        return {"counts": counts}
    # Prompts name no models, so only logged sessions can be checked against `student_models`.
    models = frozenset[str]().union(*map(models_of, read_conversations(inputs.run)))
    return {"counts": counts, "remarks": unmatched_models(inputs.config.render, models)}


_SCHEMA, _VERSION = "composer_replication.training", 2
# The channels that a run may have, by its mode, under their names in metrics.
OFFLINE_CHANNELS = ("lm_ce", "sdpo_kl", "trace_replay_dpo")
GRPO_CHANNELS = ("grpo", "sdpo_kl", "sdpo_kl_logged", "trace_replay_dpo")


class NamedSource(NamedTuple):
    """A source that a training with rollouts reads, as named in its config."""

    kind: str
    name: str
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of `run_training`, with the paths of its files.

    `saved` is the folder with the weights once all steps are done.
    """

    steps: int
    total_steps: int
    stopped_by: str
    saved: Path | None
    checkpoints: Path
    metrics: Path
    channels: tuple[ChannelResult, ...]
    diagnosis: tuple[str, ...]
    alarms: tuple[str, ...]
    counts: Mapping[str, int]
    drops: Mapping[str, int]
    warmup_steps: int = 0
    """The number of steps of the warm-up before the first step."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """The duration of each phase before the first step (warm-up, hint check, reference log-probs)."""

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}


def sources_of(run: RunDir | None, names: Iterable[str]) -> list[Source]:
    """Return the artifacts that a training reads, with their current hashes."""
    return [] if run is None else [hash_source(run.root, name) for name in names if run.path(name).exists()]


def named_sources(config: CrfConfig) -> list[NamedSource]:
    """Return the prompts, rewards and environment for a training with rollouts, each with the hash of its file.

    Sources that are not a single file, such as folders and hub names, have no hash.
    """
    grpo = config.train.grpo
    if config.train.mode != "grpo":
        return []
    kinds_and_names = [
        ("dataset", grpo.dataset),
        *(("reward", reward) for reward in grpo.rewards),
        ("environment", grpo.environment),
    ]
    return [
        NamedSource(kind, _display_name(name), _hash_of_named(name))
        for kind, name in kinds_and_names
        if name is not None
    ]


def metric_names(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return counts, or drops (`channel: reason`), with channels renamed as in metrics."""
    parts = ((name.partition(":"), number) for name, number in numbers.items())
    return {NAMES.get(channel, channel) + colon + reason: number for (channel, colon, reason), number in parts}


def write_record(
    folder: Path,
    config: CrfConfig,
    result: TrainingResult,
    sources: Sequence[Source | NamedSource],
    start_digest: str,
) -> None:
    """Write `training.json` for the weights in this folder: their sources and settings, and what each channel did.

    `start_digest` is the `weights_digest` of the model before its first step: a digest of all base weights.
    """
    record = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "tool_version": __version__,
        "created": now(),
        "config_hash": config_hash(config),
        "start_weights": config.train.model,
        "start_digest": start_digest,
        "mode": config.train.mode,
        "sources": [{"kind": source.kind, "name": source.name, "sha256": source.sha256} for source in sources],
        "warmup_steps": result.warmup_steps,
        "steps": result.steps,
        "channels": [asdict(channel) for channel in result.channels],
        "diagnosis": list(result.diagnosis),
        "alarms": list(result.alarms),
        "counts": dict(result.counts),
        "drops": dict(result.drops),
        "seconds": dict(result.seconds),
    }
    atomic_write_json(folder / RECORD, record)


def _display_name(name: str) -> str:
    return address_without_login(name) if is_address(name) else name


def _hash_of_named(name: str) -> str | None:
    """Return the hash of the file that a path or an already imported `module:name` refers to."""
    path = Path(name)
    # A verifiers id looks like `module:name`, but does not name a module.
    if is_verifiers(name):
        return None
    if is_object_name(name) and not path.exists():
        module = sys.modules.get(name.partition(":")[0])
        # A module that was defined interactively has no file.
        path = Path(getattr(module, "__file__", None) or "")
    return sha256_of_file(path) if path.is_file() else None
