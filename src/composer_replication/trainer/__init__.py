"""Train a model on the objective.

The names below are imported on first use, so importing this package loads no trainer.

presets           recommended settings as arguments, and the knobs of channels 2 and 3
same_start        what all processes of a training must begin with
teacher_keeper    the teacher of channel 2 over a run
start_model       the initial model as a trainer takes it, and rows of its head that were never trained
metrics_file      `metrics.jsonl`, and the callback for a trainer's own steps
checkpoints/      checkpoints that are complete or ignored, and resume bit for bit
watch/            memory estimate, collapse alarm, diagnosis
overrides         every method of transformers' and TRL's trainers that is overridden
offline_trainer   training on logged sessions
offline_checks    checks before and after an offline run, and its metrics
warmup            channel 1 alone first, for a model that does not know the harness
composer_trainer  GRPO with two more channels, on top of TRL
composer/         parts of the composer trainer
data_collator     traces to a batch for all three channels
trace_rows        one trace as rows of token ids
reference         an alias of `sessions.reference`
replica           a training as one of several DiLoCo replicas
trained           trained weights by name, and their cards
objective/        a model and a batch in, losses out
sessions/         a run's sessions as windows and batches
rollouts/         error sites and channel 2 on rollouts
from_config/      `crf train` as a library
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
