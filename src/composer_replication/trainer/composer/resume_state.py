"""What a GRPO run needs to go on as if nothing had happened, besides weights, optimiser and random numbers.

The rollouts that wait for their micro-step and the place among them, the channels' schedules and teacher, environments
that have a state, the alarm, figures not yet logged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from composer_replication.errors import StaleArtefactError, explain
from composer_replication.objective.fingerprint import weights_digest
from composer_replication.trainer.composer.logged_batches import digest_of


def run_geometry(trainer: Any) -> dict[str, Any]:
    """What a saved rollout buffer depends on: it holds sites, and logged batches are drawn beside it, or not."""
    logged = trainer.channels.logged
    is_stream = not hasattr(trainer.train_dataset, "__len__")
    return {
        "sites": trainer.wants_sites,
        "logged": None if logged is None else logged.digest,
        "prompts": None if is_stream else digest_of(trainer.train_dataset),
    }


def run_state(trainer: Any) -> dict[str, Any]:
    sampling, start = trainer.sampling, trainer.sampling.start_model
    return {
        "micro_step": trainer._step,
        "rollouts": trainer._buffered_inputs,
        "channels": trainer.channels.state(),
        "entropy": [trainer.entropy_coef, trainer._last_world_entropy] if trainer._entropy_bonus_enabled else None,
        "metrics": {mode: dict(values) for mode, values in trainer._metrics.items()},
        "figures": trainer.figures.state(),
        "site_counts": dict(sampling.site_counts),
        "num_rollouts": sampling.num_rollouts,
        "known_hints": dict(sampling.known_hints),
        "alarm": trainer.alarm.state(),
        "start_digest": None if start is None else weights_digest(start),
        "environments": _environment_states(trainer),
    }


def load_run_state(trainer: Any, tree: dict[str, Any]) -> None:
    """The inverse of `run_state`."""
    sampling, start, buffer = trainer.sampling, trainer.sampling.start_model, tree["rollouts"]
    trainer._step = tree["micro_step"]
    device = trainer.accelerator.device
    trainer._buffered_inputs = None if buffer is None else [_on_device(batch, device) for batch in buffer]
    trainer.channels.load_state(tree["channels"], trainer.state.max_steps)
    if tree["entropy"] is not None:
        trainer.entropy_coef, trainer._last_world_entropy = tree["entropy"]
    for mode, values in tree["metrics"].items():
        trainer._metrics[mode].update({name: list(series) for name, series in values.items()})
    trainer.figures.load_state(tree["figures"])
    sampling.site_counts, sampling.num_rollouts = Counter(tree["site_counts"]), tree["num_rollouts"]
    sampling.known_hints = dict(tree.get("known_hints", {}))  # an earlier version has none
    trainer.alarm.load_state(tree["alarm"])
    # An earlier version kept a digest of some values, under another name: it is not compared.
    if start is not None and "start_digest" in tree and tree["start_digest"] != weights_digest(start):
        fix = "Make the trainer with the model the run began with; the checkpoint's weights are loaded into it."
        raise StaleArtefactError(explain("start weights of k1", got="others", expected="the run's", fix=fix))
    _load_environment_states(trainer, tree["environments"])


def _environment_states(trainer: Any) -> list[list[Any]]:
    """Of each pool of environments: `_state()` of those that have one gives plain values."""
    pools: dict[Any, list[Any]] = getattr(trainer, "_environment_pool", {})
    return [
        [environment._state() if hasattr(environment, "_state") else None for environment in pool]
        for pool in pools.values()
    ]


def _load_environment_states(trainer: Any, states: list[list[Any]]) -> None:
    """Into as many environments as there were; `_load_state(...)` takes back what `_state()` gave."""
    pools: dict[Any, list[Any]] = getattr(trainer, "_environment_pool", {})
    for (name, pool), saved in zip(pools.items(), states, strict=True):
        pool.extend(trainer.environment_factories[name]() for _ in range(len(saved) - len(pool)))
        for environment, state in zip(pool, saved, strict=False):
            if state is not None:
                environment._load_state(state)


def _on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
