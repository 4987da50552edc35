"""What a GRPO run needs to go on as if nothing had happened, besides weights, optimiser and random numbers.

The rollouts that wait for their micro-step and the place among them, the channels' schedules and teacher, environments
that have a state, the alarm, figures not yet logged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.errors import StaleArtefactError, explain
from composer_replication.trainer.checkpoints import weights_digest
from composer_replication.trainer.composer.channels import ComposerChannels, ComposerFigures
from composer_replication.trainer.composer.logged import digest_of
from composer_replication.trainer.watch.alarm import CollapseAlarm

# The class that uses this names its trainer after it in its bases, so every `super()` below means that one.
_Trainer: Any = object


class RememberedRollouts(_Trainer):
    """Saves and restores; see `checkpoints.SafeCheckpoints`."""

    channels: ComposerChannels
    alarm: CollapseAlarm
    figures: ComposerFigures
    site_counts: Counter[str]
    num_rollouts: int
    _wants_sites: bool
    _start_model: nn.Module | None

    def resume_geometry(self) -> dict[str, Any]:
        """What a saved rollout buffer depends on: it holds sites, and logged batches are drawn beside it, or not."""
        logged = self.channels.logged
        mine = {"sites": self._wants_sites, "logged": None if logged is None else logged.digest}
        is_stream = not hasattr(self.train_dataset, "__len__")
        prompts = None if is_stream else digest_of(self.train_dataset)
        return {**super().resume_geometry(), **mine, "prompts": prompts}

    def extra_state(self) -> dict[str, Any]:
        mine = {
            "micro_step": self._step,
            "rollouts": self._buffered_inputs,
            "channels": self.channels.state(),
            "entropy": [self.entropy_coef, self._last_world_entropy] if self._entropy_bonus_enabled else None,
            "metrics": {mode: dict(values) for mode, values in self._metrics.items()},
            "figures": self.figures.state(),
            "site_counts": dict(self.site_counts),
            "num_rollouts": self.num_rollouts,
            "alarm": self.alarm.state(),
            "start": None if self._start_model is None else weights_digest(self._start_model),
            "environments": self._environment_states(),
        }
        return {**super().extra_state(), "composer": mine}

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        super().load_extra_state(tree)
        mine = tree["composer"]
        self._step = mine["micro_step"]
        buffer = mine["rollouts"]
        device = self.accelerator.device
        self._buffered_inputs = None if buffer is None else [_on_device(each, device) for each in buffer]
        self.channels.load_state(mine["channels"], self.state.max_steps)
        if mine["entropy"] is not None:
            self.entropy_coef, self._last_world_entropy = mine["entropy"]
        for mode, values in mine["metrics"].items():
            self._metrics[mode].update({name: list(each) for name, each in values.items()})
        self.figures.load_state(mine["figures"])
        self.site_counts, self.num_rollouts = Counter(mine["site_counts"]), mine["num_rollouts"]
        self.alarm.load_state(mine["alarm"])
        if self._start_model is not None and mine["start"] != weights_digest(self._start_model):
            fix = "Make the trainer with the model the run began with; the checkpoint's weights are loaded into it."
            raise StaleArtefactError(explain("start weights of k1", got="others", expected="the run's", fix=fix))
        self._load_environment_states(mine["environments"])

    def _environment_states(self) -> list[list[Any]]:
        """Of each pool of environments: `_state()` of those that have one gives plain values."""
        pools: dict[Any, list[Any]] = getattr(self, "_environment_pool", {})
        return [[each._state() if hasattr(each, "_state") else None for each in pool] for pool in pools.values()]

    def _load_environment_states(self, states: list[list[Any]]) -> None:
        """Into as many environments as there were; `_load_state(...)` takes back what `_state()` gave."""
        pools: dict[Any, list[Any]] = getattr(self, "_environment_pool", {})
        for (name, pool), saved in zip(pools.items(), states, strict=True):
            pool.extend(self.environment_factories[name]() for _ in range(len(saved) - len(pool)))
            for environment, state in zip(pool, saved, strict=False):
                if state is not None:
                    environment._load_state(state)


def _on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
