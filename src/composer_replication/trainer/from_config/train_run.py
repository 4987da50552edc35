"""Functions behind `crf train`: train, plan, and decide whether a training is up to date.

Modules that load transformers' or TRL's trainers are imported only when needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from composer_replication.atomic import atomic_write_text
from composer_replication.config import CrfConfig
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import NOT_WRITTEN_YET
from composer_replication.runs.directory import record_outside_copy
from composer_replication.runs.lineage import read_training
from composer_replication.trainer.from_config.inputs import fitted, read_inputs
from composer_replication.trainer.from_config.output_folder import TrainingFolder, current_sources
from composer_replication.trainer.trained import Trained, make_base_absolute, model_card, resolve_base

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.offline import TrainingPace
    from composer_replication.trainer.from_config.training import TrainingResult
    from composer_replication.trainer.replica import Replica
    from composer_replication.trainer.sessions.phases import TrainingCallbacks
    from composer_replication.trainer.watch.memory_plan import MemoryPlan


# Options that may change while a training is resumed.
_MAY_CHANGE = frozenset(
    f"train.{name}"
    for name in ("optimiser.steps", "save.every", "save.keep", "log_every", "diagnose_every", "report_to")
)


def train(
    config: CrfConfig,
    run: RunDir | None = None,
    *,
    resume: bool = False,
    must_fit: bool = True,
    progress: TrainingCallbacks | None = None,
    replica: Replica | None = None,
) -> TrainingResult:
    """Train on `run`, or on the run that the config names. A training on rollouts needs no run.

    Checkpoints and weights that are stored outside the run are recorded in it, so that `crf forget` can list them. A
    `replica` trains on its part of the sessions and ends with the same weights as all other replicas.
    """
    from composer_replication.trainer.from_config.training import run_training

    config = _with_run(config, run)
    if config.train.run is not None and config.train.output is not None and (replica is None or replica.rank == 0):
        folder, run_dir = TrainingFolder.of(config), RunDir.open(config.train.run)
        record_outside_copy(run_dir, "checkpoints", folder.checkpoints)
        record_outside_copy(run_dir, "trained weights", folder.trained(is_adapter=config.train.adapter.kind != "none"))
    result = run_training(config, resume=resume, must_fit=must_fit, progress=progress, replica=replica)
    if result.saved is not None and os.environ.get("RANK", "0") == "0":  # only the main process saves
        _write_model_card(result.saved, config)
    return result


def _write_model_card(saved: Path, config: CrfConfig) -> None:
    """Write the model card, and make the base model's path absolute.

    PEFT alone would write an empty card, and store the base model's name as the user typed it.
    """

    is_adapter = config.train.adapter.kind != "none"
    base = make_base_absolute(saved) if is_adapter else resolve_base(config.train.model or "")
    run = None if config.train.run is None else RunDir.open(config.train.run)
    trained = Trained(base=base, adapter=saved if is_adapter else None, record=read_training(saved), run=run)
    form = "adapter" if is_adapter else "merged"
    atomic_write_text(saved / "README.md", model_card(trained, form=form, name=str(saved.absolute()), evaluation=None))


def weights_folder(config: CrfConfig, run: RunDir) -> Path:
    """Return the folder to which a training run with this config writes its weights."""

    return _training_folder(config, run).trained(is_adapter=config.train.adapter.kind != "none")


class _TrainingNeed(NamedTuple):
    """The result of `why_train`.

    `why` says why a training run has to run or resume, and is "" if it is up to date. `is_other` says whether the
    folder contains a training run with other files or options.
    """

    why: str
    is_other: bool = False


def why_train(config: CrfConfig, run: RunDir) -> _TrainingNeed:
    """Return why a training run has to run, if it does.

    The existing weights are compared with the current files and options.
    """

    config = fitted(_with_run(config, run))
    folder = TrainingFolder.of(config)
    changes = [change for change in folder.changed_options(config) if change.partition(":")[0] not in _MAY_CHANGE]
    now = {source.name: source.sha256 for source in current_sources(run)}
    record = folder.record(is_adapter=config.train.adapter.kind != "none")
    before = folder.made_of() if record is None else {source["name"]: source["sha256"] for source in record["sources"]}
    changed = [name for name in now if before is not None and before.get(name) != now[name]]
    why = "; ".join([*([f"{' and '.join(changed)} changed since"] if changed else []), *changes])
    if why and folder.has_begun:
        return _TrainingNeed(why, is_other=True)
    requested_steps = config.train.optimiser.steps
    finished_steps = folder.newest_step() if record is None else record["steps"]
    steps = f"train.optimiser.steps: {finished_steps} -> {requested_steps}"
    # A training cannot go back to fewer steps.
    if finished_steps is not None and finished_steps > requested_steps:
        return _TrainingNeed(steps, is_other=True)
    if record is not None:
        return _TrainingNeed(steps if finished_steps != requested_steps else "")
    if not folder.has_begun:
        return _TrainingNeed(NOT_WRITTEN_YET)
    allowed = [change for change in folder.changed_options(config) if change.partition(":")[0] in _MAY_CHANGE]
    return _TrainingNeed("; ".join([folder.resumption(requested_steps), *allowed]))


def describe_training(config: CrfConfig, run: RunDir, why: _TrainingNeed, kept_in: str | None = None) -> str:
    """Describe the training that `why_train` found necessary: the step at which it starts, and the reason.

    `kept_in` is the folder to which an earlier training run with other options was moved.
    """

    if why.is_other:
        note = (
            f"; the earlier training was moved to {kept_in}"
            if kept_in
            else "; the earlier training would be moved away"
        )
        return f"starts from the beginning, because of changes ({why.why}){note}"
    folder = _training_folder(config, run)
    if folder.record(is_adapter=config.train.adapter.kind != "none") is None:
        return why.why
    return f"{folder.resumption(config.train.optimiser.steps)} ({why.why})"


def move_earlier_training(config: CrfConfig, run: RunDir) -> Path:
    """Move a training run with other files or options to `earlier/N` inside its own folder, and return the new folder.

    Its evaluation is moved to `earlier/N` in the run, so that it is not mistaken for the evaluation of the next
    training.
    """

    folder = _training_folder(config, run).set_aside()
    if config.train.control == "none":
        destination = run.path("earlier") / folder.name
        destination.mkdir(parents=True, exist_ok=True)
        for artefact in (ARTEFACTS[name] for name in ("evaluation", "evaluated", "sampled", "token_gaps")):
            for name in dict.fromkeys((artefact.file_name, artefact.sidecar_name)):
                if (path := run.root / name).is_file():
                    path.rename(destination / name)
    return folder


def _training_folder(config: CrfConfig, run: RunDir) -> TrainingFolder:
    return TrainingFolder.of(_with_run(config, run))


def _with_run(config: CrfConfig, run: RunDir | None) -> CrfConfig:
    return config if run is None else replace(config, train=replace(config.train, run=str(run.root)))


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a training run would do: its folder, its data, and the memory of a step (offline mode only).

    `newest_checkpoint` names the folder from which the training would resume; damaged checkpoints are skipped.
    """

    folder: TrainingFolder
    mode: str
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    drops: Mapping[str, int] = field(default_factory=dict[str, int])
    memory: MemoryPlan | None = None
    newest_checkpoint: str | None = None
    changed: Sequence[str] = ()
    remarks: Sequence[str] = ()
    pace: TrainingPace | None = None
    seconds: float | None = None
    """A rough estimate of the steps' duration on this machine, without warm-up and hint check."""


def plan(config: CrfConfig, run: RunDir | None = None) -> TrainingPlan:
    """Return what `train` would do, without loading weights.

    The resolved config is written unless a training run has already begun in this folder.
    """
    inputs = read_inputs(_with_run(config, run))
    config = inputs.config
    folder = TrainingFolder.of(config)
    if config.train.mode == "offline":
        from composer_replication.trainer.from_config.offline import plan_offline as plan_mode
    else:
        from composer_replication.trainer.from_config.grpo import plan_grpo as plan_mode
    plan_fields = plan_mode(inputs)
    newest, changed = folder.newest_checkpoint(), folder.changed_options(config)
    # If a training has begun, keep its original options for comparison.
    if not folder.has_begun:
        folder.write_config(config)
    return TrainingPlan(
        folder=folder,
        mode=config.train.mode,
        newest_checkpoint=None if newest is None else newest.name,
        changed=changed if folder.has_begun else (),
        **plan_fields,
    )
