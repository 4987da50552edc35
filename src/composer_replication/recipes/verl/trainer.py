"""verl's synchronous trainer with `ComposerWorker` for its own worker: `trainer.v1.trainer_mode: composer_sync`.

verl's trainers are swapped as verl swaps them itself: after the roles are mapped to classes, one of these is replaced.
"""

from __future__ import annotations

from typing import Any

from composer_replication.errors import ConfigError, explain
from composer_replication.optional import importing
from composer_replication.recipes.verl.settings import settings_of
from composer_replication.recipes.verl.worker import ComposerWorker

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
