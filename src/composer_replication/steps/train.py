"""`crf train`: weights from what the steps before it left in a run, or from rollouts. Torch is loaded on use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.atomic import atomic_write_text
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
    result = run_training(config, resume=resume, must_fit=must_fit, progress=progress)
    if result.saved is not None and os.environ.get("RANK", "0") == "0":  # of several processes, the one that saved
        _finish(result.saved, config)
    return result


def _finish(saved: Path, config: CrfConfig) -> None:
    """Trained weights with a card, and with the path of their start weights as it is from everywhere.

    PEFT leaves an empty card, and the name of the start weights as it was typed.
    """
    from composer_replication.use.cards import model_card
    from composer_replication.use.trained import Trained, absolute_base, read_record, settle_base

    is_adapter = config.train.adapter.kind != "none"
    base = settle_base(saved) if is_adapter else absolute_base(config.train.model or "")
    run = None if config.train.run is None else RunDir.open(config.train.run)
    trained = Trained(base=base, adapter=saved if is_adapter else None, record=read_record(saved), run=run)
    form = "adapter" if is_adapter else "merged"
    atomic_write_text(saved / "README.md", model_card(trained, form=form, name=str(saved.absolute()), evaluation=None))


def plan(config: CrfConfig, run: RunDir | None = None) -> TrainingPlan:
    """What `train` would do; no weights are loaded."""
    from composer_replication.trainer.from_config.plan import plan_training

    planned = plan_training(_with_run(config, run))
    return replace(planned, remarks=(*planned.remarks, *_beyond_context(config)))


def _beyond_context(config: CrfConfig) -> Iterator[str]:
    """A sentence where windows are longer than what the model has seen, or has positions for."""
    from composer_replication.batch.model_folder import load_config
    from composer_replication.envs.student import TRAINED_CONTEXT, student_folder

    name, budget = config.train.model or "", config.train.batch.budget
    if config.train.mode != "offline":
        return
    most = getattr(load_config(name, what=f"train.model {name!r}").get_text_config(), "max_position_embeddings", None)
    if Path(name).is_dir() and Path(name).samefile(student_folder()):
        most = TRAINED_CONTEXT
    if most and budget > most:
        yield (
            f"train.batch.budget is {budget:,} tokens, and this model has learnt contexts of up to {most:,}: what it "
            f"says behind them is noise. Set train.batch.budget = {most}, and train.batch.overlap to a quarter of it"
        )


def _with_run(config: CrfConfig, run: RunDir | None) -> CrfConfig:
    return config if run is None else replace(config, train=replace(config.train, run=str(run.root)))
