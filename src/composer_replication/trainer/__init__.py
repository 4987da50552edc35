"""Objective to a better model. Names are resolved when they are first used: importing this loads no trainer.

channel_settings  the knobs of channels 2 and 3, and how a weight changes over a run
presets           what a preset says, as arguments
same_start        what all processes of one training must begin with
teacher_keeper    who teaches channel 2 over a run
start_model       the start weights, as a trainer takes them
token_rows        tokens of the template that the weights never learnt, and how an adapter learns them
metrics_file      `metrics.jsonl`, and how a trainer hears of its own steps
checkpoints/      complete or passed over, resumed bit for bit
watch/            will it fit, has it collapsed, why does it not learn
overrides         every method of transformers' and TRL's trainers that a part takes over, a line each
offline/          parts of the offline trainer
offline_trainer   training on logged sessions
warmup            channel 1 first, for a model that does not speak the harness
composer/         parts of the composer trainer
composer_trainer  GRPO with two more channels, inside TRL
traces/           one trace as rows of token ids
data_collator     traces to a batch for all three channels
reference         a known path: `sessions.reference`
replica           a training as one of several
from_config/      what `crf train` does, as a library
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from composer_replication.trainer.offline_trainer import OfflineTrainer
    from composer_replication.trainer.presets import ChannelSettings, composer_grpo_config, trainer_arguments
    from composer_replication.trainer.rollouts.sites import RolloutOptions
    from composer_replication.trainer.sessions.dataset import LoggedSessions
    from composer_replication.trainer.teacher_keeper import TeacherKeeper
    from composer_replication.trainer.warmup import warm_up

_HOMES = {
    "ChannelSettings": "trainer.presets",
    "ComposerReplicationTrainer": "trainer.composer_trainer",
    "LoggedSessions": "trainer.sessions.dataset",
    "OfflineTrainer": "trainer.offline_trainer",
    "RolloutOptions": "trainer.rollouts.sites",
    "TeacherKeeper": "trainer.teacher_keeper",
    "composer_grpo_config": "trainer.presets",
    "trainer_arguments": "trainer.presets",
    "warm_up": "trainer.warmup",
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
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"composer_replication.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
