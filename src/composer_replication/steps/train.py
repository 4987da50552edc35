"""`crf train`: weights from what the steps before it left in a run, or from rollouts. Torch is loaded on use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from composer_replication.config import CrfConfig
from composer_replication.runs import RunDir
from composer_replication.runs.elsewhere import note_elsewhere

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.plan import TrainingPlan
    from composer_replication.trainer.from_config.results import TrainingResult
    from composer_replication.trainer.from_config.training import Progress


def train(
    config: CrfConfig,
    run: RunDir | None = None,
    *,
    resume: bool = False,
    must_fit: bool = True,
    progress: Progress | None = None,
) -> TrainingResult:
    """Train on `run`, or on the run that the config names, which a training with rollouts can do without.

    The run is told where checkpoints and weights go when that is outside of it, so that `crf forget` can name them.
    """
    from composer_replication.trainer.from_config.output_folder import TrainingFolder
    from composer_replication.trainer.from_config.training import run_training

    config = _with_run(config, run)
    if config.train.run is not None and config.train.output is not None:
        folder, named = TrainingFolder.of(config), RunDir.open(config.train.run)
        note_elsewhere(named, "checkpoints", folder.checkpoints)
        note_elsewhere(named, "trained weights", folder.trained(is_adapter=config.train.adapter.kind != "none"))
    return run_training(config, resume=resume, must_fit=must_fit, progress=progress)


def plan(config: CrfConfig, run: RunDir | None = None) -> TrainingPlan:
    """What `train` would do; no weights are loaded."""
    from composer_replication.trainer.from_config.plan import plan_training

    return plan_training(_with_run(config, run))


def _with_run(config: CrfConfig, run: RunDir | None) -> CrfConfig:
    return config if run is None else replace(config, train=replace(config.train, run=str(run.root)))
