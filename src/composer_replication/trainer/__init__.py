"""Objective to a better model: trainers, teachers, presets, and the collator of all three channels.

Names are resolved when they are first used: importing the package loads neither transformers' trainer nor TRL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.sessions.dataset import LoggedSessions
    from composer_replication.trainer.channel_settings import ChannelSettings
    from composer_replication.trainer.composer.generation import RolloutOptions
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from composer_replication.trainer.offline_trainer import OfflineTrainer
    from composer_replication.trainer.presets import composer_grpo_config, trainer_arguments
    from composer_replication.trainer.teachers import TeacherKeeper

_HOMES = {
    "ChannelSettings": "trainer.channel_settings",
    "ComposerReplicationTrainer": "trainer.composer_trainer",
    "LoggedSessions": "sessions.dataset",
    "OfflineTrainer": "trainer.offline_trainer",
    "RolloutOptions": "trainer.composer.generation",
    "TeacherKeeper": "trainer.teachers",
    "composer_grpo_config": "trainer.presets",
    "trainer_arguments": "trainer.presets",
}

__all__ = [
    "ChannelSettings",
    "ComposerReplicationTrainer",
    "LoggedSessions",
    "OfflineTrainer",
    "RolloutOptions",
    "TeacherKeeper",
    "composer_grpo_config",
    "trainer_arguments",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"composer_replication.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
