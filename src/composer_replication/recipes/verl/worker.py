"""verl's hybrid worker with our engine inside: the reference worker is the teacher, the policy its student.

The role must hold policy and reference in one process (ActorRolloutRef), or the policy must be LoRA's: the teacher's
logits are a mixture of both. `actor_rollout_ref.composer` has the settings.
"""

from __future__ import annotations

import os
from typing import Any

from composer_replication.errors import ConfigError, explain
from composer_replication.optional import importing
from composer_replication.recipes.verl import registered
from composer_replication.recipes.verl.engine import VENDOR, ChannelEngine, StepChannels
from composer_replication.recipes.verl.settings import settings_of

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
