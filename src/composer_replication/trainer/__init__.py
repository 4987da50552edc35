"""Train a model with three channels, on logged sessions or on rollouts.

The names below are imported on first use, so importing this package loads no trainer.

presets           recommended settings as arguments
same_start        checks that all processes begin with the same weights, data and settings
teacher_keeper    channel 2's teacher during a run
start_model       preparing the initial model, and finding untrained rows in its head
metrics_file      writing `metrics.jsonl`, and a callback that notifies a trainer of its own steps
checkpoints/      checkpoints that are either complete or ignored, and that resume a run bit for bit
watch/            memory estimate, collapse alarm, diagnosis
overrides         all overrides of methods in transformers' and TRL's trainers
offline_trainer   training on logged sessions
warmup            training on channel 1 only at first, for a model that does not know the harness
composer_trainer  GRPO with two more channels, on top of TRL
grpo_step         what the composer trainer does in TRL's generation step and loss
logged_batches    logged traces for channels 2 and 3 in a GRPO run
data_collator     collating traces into a batch for all three channels
trace_rows        turning one trace into rows of token ids
reference         an alias of `sessions.reference`
replica           training as one of several DiLoCo replicas
trained           finding trained weights by name, and writing their cards
objective/        computing the losses from a model and a batch
sessions/         turning a run's sessions into windows and batches
rollouts/         error sites and channel 2 on rollouts
from_config/      `crf train` as a library
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from composer_replication.trainer.objective.channels import ChannelSettings
    from composer_replication.trainer.offline_trainer import OfflineTrainer
    from composer_replication.trainer.presets import composer_grpo_config, trainer_arguments
    from composer_replication.trainer.rollouts.sites import RolloutOptions
    from composer_replication.trainer.sessions.dataset import LoggedSessions
    from composer_replication.trainer.teacher_keeper import TeacherKeeper
    from composer_replication.trainer.warmup import warm_up

_HOMES = {
    "ChannelSettings": "trainer.objective.channels",
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
