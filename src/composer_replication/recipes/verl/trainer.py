"""verl's synchronous trainer with `ComposerWorker` for its own worker: `trainer.v1.trainer_mode: composer_sync`.

verl's trainers are swapped as verl swaps them itself: after the roles are mapped to classes, one of these is replaced.
"""

from __future__ import annotations

import os
from typing import Any

from composer_replication.errors import ConfigError, explain
from composer_replication.optional import importing
from composer_replication.recipes.verl import registered
from composer_replication.recipes.verl.channel_loss import settings_of
from composer_replication.recipes.verl.engine import VENDOR, ChannelEngine, StepChannels

with importing("verl", extra="verl"):
    import ray
    from omegaconf import open_dict
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
MODE = "composer_sync"


@register_trainer(MODE)
class ComposerTrainer(PPOTrainerSync):
    """Rollouts, rewards, advantages and checkpoints are verl's; the actor's step has our channels."""

    def __init__(self, config: Any) -> None:
        settings_of(config.actor_rollout_ref)  # a wrong name is an error before any process starts
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # by this name verl chooses the buffer of a synchronous run
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        """verl's own roles; the teacher needs a reference beside the actor also where verl has no use for one."""
        super()._init_resource_pool_mgr()
        roles = [role for role in (Role.ActorRolloutRef, Role.ActorRollout) if role in self.role_worker_mapping]
        if not roles:
            got = sorted(str(role) for role in self.role_worker_mapping)
            expected = "actor and rollout in one worker"
            raise ConfigError(explain("roles of the trainer", got=got, expected=expected))
        role = roles[0]
        del self.role_worker_mapping[role]
        pool = self.mapping.pop(role)
        if _needs_reference(self.config):
            role = Role.ActorRolloutRef
        self.role_worker_mapping[role], self.mapping[role] = ray.remote(ComposerWorker), pool


def _needs_reference(config: Any) -> bool:
    """Whether the teacher has weights of its own: under LoRA they are those below the adapter."""
    model, settings = config.actor_rollout_ref.model, settings_of(config.actor_rollout_ref)
    rank = max(model.get("lora", {}).get("rank", 0), model.get("lora_rank", 0))
    has_adapter = rank > 0 or model.get("lora_adapter_path") is not None
    return not has_adapter and settings.alpha_sdpo > 0 and settings.live_share < 1.0


# verl's hybrid worker with our engine inside: the reference worker is the teacher, the policy its student.
#
# The role must hold policy and reference in one process (ActorRolloutRef), or the policy must be LoRA's: the teacher's
# logits are a mixture of both. `actor_rollout_ref.composer` has the settings.

with importing("verl", extra="verl"):
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.workers.engine_workers import ActorRolloutRefWorker
NAMES = (registered.ADVANTAGE, registered.POLICY_LOSS)
"""What importing this module has put into verl's registries; workers are processes of their own."""


class ComposerWorker(ActorRolloutRefWorker):
    """Actor, rollout and reference as verl makes them; the actor's steps have our channels."""

    def __init__(self, config: Any, role: str, distillation_config: Any = None, **named: Any) -> None:
        os.environ["VERL_ENGINE_VENDOR"] = VENDOR  # which engine verl's registry looks for in this process
        super().__init__(config, role, distillation_config=distillation_config, **named)
        if self.distillation_enabled:
            fix = "Use verl's own ActorRolloutRefWorker with a registered loss, or leave distillation off."
            raise ConfigError(explain("distillation.enabled with ComposerWorker", got=True, expected=False, fix=fix))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """verl's own, and then the channels."""
        settings = settings_of(self.config)
        super().init_model()
        if self.actor is None:
            return
        engine = self.actor.engine
        if not isinstance(engine, ChannelEngine):
            fix = "Set actor.strategy to fsdp2, and leave VERL_ENGINE_DEVICE as it is unless this is a CPU."
            got = type(engine).__name__
            raise ConfigError(explain("engine of the actor", got=got, expected="ChannelEngine", fix=fix))
        channels = StepChannels(settings, None if self.ref is None else self.ref.engine)
        if settings.alpha_sdpo > 0:
            channels.shares(engine)  # says now, not at the first step, that there is no teacher
        engine.channels = channels
