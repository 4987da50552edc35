"""Provide verl's synchronous trainer with `ComposerWorker` as its worker. Select it with `trainer.v1.trainer_mode:
composer_sync`.

The worker is replaced the way verl's own trainers do it: after roles have been mapped to classes.
"""

from __future__ import annotations

import os
from typing import Any

from composer_replication.errors import ConfigError, explain
from composer_replication.optional import importing
from composer_replication.recipes.verl import registered
from composer_replication.recipes.verl.channel_loss import read_settings
from composer_replication.recipes.verl.engine import VENDOR, ChannelEngine, StepChannels

with importing("verl", extra="verl"):
    import ray
    from omegaconf import open_dict
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
    from verl.workers.engine_workers import ActorRolloutRefWorker
MODE = "composer_sync"
NAMES = (registered.ADVANTAGE, registered.POLICY_LOSS)
"""The names that importing `registered` adds to verl's registries; each worker is a process and imports it itself."""


@register_trainer(MODE)
class ComposerTrainer(PPOTrainerSync):
    """verl's synchronous trainer with channels 2 and 3 added to the actor's training step. Everything else is
    unchanged.
    """

    def __init__(self, config: Any) -> None:
        read_settings(config.actor_rollout_ref)  # reports a mistake in the settings before any process starts
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl selects the buffer of a synchronous run by this name
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        """Map roles to workers as verl does, and then replace the worker. The new worker includes a reference model
        if the teacher needs one.
        """
        super()._init_resource_pool_mgr()
        roles = [role for role in (Role.ActorRolloutRef, Role.ActorRollout) if role in self.role_worker_mapping]
        if not roles:
            got = sorted(str(role) for role in self.role_worker_mapping)
            expected = "actor and rollout in one worker"
            raise ConfigError(explain("roles of the trainer", got=got, expected=expected))
        role = roles[0]
        # verl maps a role to its worker class and to its pool; both entries move to the new role.
        del self.role_worker_mapping[role]
        pool = self.mapping.pop(role)
        if _needs_reference(self.config):
            role = Role.ActorRolloutRef
        self.role_worker_mapping[role], self.mapping[role] = ray.remote(ComposerWorker), pool


def _needs_reference(config: Any) -> bool:
    """Return whether the teacher needs a reference worker. With LoRA, it does not, because the policy without its
    adapter is the reference.
    """
    model, settings = config.actor_rollout_ref.model, read_settings(config.actor_rollout_ref)
    # verl has two keys for the LoRA rank.
    rank = max(model.get("lora", {}).get("rank", 0), model.get("lora_rank", 0))
    has_adapter = rank > 0 or model.get("lora_adapter_path") is not None
    return not has_adapter and settings.alpha_sdpo > 0 and settings.live_share < 1.0


class ComposerWorker(ActorRolloutRefWorker):
    """verl's hybrid worker (actor, rollout and reference) with channels 2 and 3 added to the actor's training steps.

    The teacher's logits are a weighted sum of those of the reference and of the policy. Both must therefore be in one
    process (ActorRolloutRef), or the policy must have a LoRA adapter. The settings are in `actor_rollout_ref.composer`.
    """

    def __init__(self, config: Any, role: str, distillation_config: Any = None, **kwargs: Any) -> None:
        os.environ["VERL_ENGINE_VENDOR"] = VENDOR  # selects our engine from verl's registry in this process
        super().__init__(config, role, distillation_config=distillation_config, **kwargs)
        # verl's distillation would add a second teacher to the same step.
        if self.distillation_enabled:
            fix = "Use verl's own ActorRolloutRefWorker with a registered loss, or set distillation.enabled to false."
            raise ConfigError(explain("distillation.enabled with ComposerWorker", got=True, expected=False, fix=fix))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models as verl does, and then add the channels to the actor's engine."""
        settings = read_settings(self.config)
        super().init_model()
        # A process with only a reference or a rollout has no actor.
        if self.actor is None:
            return
        engine = self.actor.engine
        if not isinstance(engine, ChannelEngine):
            fix = "Set actor.strategy to fsdp2, and set VERL_ENGINE_DEVICE only on a CPU."
            got = type(engine).__name__
            raise ConfigError(explain("engine of the actor", got=got, expected="ChannelEngine", fix=fix))
        channels = StepChannels(settings, None if self.ref is None else self.ref.engine)
        if settings.alpha_sdpo > 0:
            channels.shares(engine)  # raises now rather than at the first step if there is no teacher
        engine.channels = channels
