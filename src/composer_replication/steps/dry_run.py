"""`crf run --dry-run`: which steps would be made and why, at what price, in what time, with what memory.

What costs next to nothing (reading, sites, pairs) is done for the answer, in a folder that goes away again. The run
itself is not touched, nobody is asked, and no weights are loaded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.config import CrfConfig
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.steps.run import RECORDS, arms_of, as_made
from composer_replication.steps.running.learnable import check_judgeable, check_learnable, learnable, to_judge_by
from composer_replication.runs.artefacts import NOT_THERE
from composer_replication.steps.stale import why_records
from composer_replication.steps.table import step_named

if TYPE_CHECKING:
    from composer_replication.steps.running.durations import TimeOfPart
    from composer_replication.teacher_replay.cost_survey import PriceRange
    from composer_replication.trainer.from_config.plan import TrainingPlan

_LIGHT = ("crf ingest", "crf forget", "crf split", "crf sites", "crf hints", "crf replay", "crf pairs")


class PlannedStep(NamedTuple):
    """A step and why it would be made; empty where what is there holds."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What `crf run` would do. `time` is a guess for each part that takes minutes.

    `price` is that of advisers; `writer_usd` is the most that a writer of hints may cost, where one would be asked.
    """

    steps: Sequence[PlannedStep]
    training: TrainingPlan
    price: PriceRange | None
    writer_usd: float | None
    time: Sequence[TimeOfPart] | None
    remarks: Sequence[str]


def plan_run(config: CrfConfig, output: Path) -> RunPlan:
    """The plan for a run at `output`, which need not be there."""
    from composer_replication.steps.running.durations import time_of_run
    from composer_replication.steps.train import plan

    with tempfile.TemporaryDirectory(prefix="crf-plan-") as folder:
        run = _copy_of(output, Path(folder) / "run")
        remarks: list[str] = []
        steps, price = _light_steps(config, run)
        is_asked = any(step.why for step in steps if step.name == "sites")
        there = learnable(run)
        check_learnable(config, there)
        config = as_made(config)
        judged = to_judge_by(config, run)
        check_judgeable(config, there, judged, remarks.append)
        steps += _heavy_steps(config, run, output)
        training = plan(replace(config, train=replace(config.train, output=None)), run)
    step_names = [step.name for step in steps if step.why]
    return RunPlan(
        steps=steps,
        training=training,
        price=price,
        writer_usd=config.sites.max_usd if config.sites.writer and is_asked else None,
        time=time_of_run(config, judged, training, step_names),
        remarks=[f"to learn from: {there.in_words()}", *remarks, *training.remarks],
    )


def _copy_of(output: Path, folder: Path) -> RunDir:
    """The run's small files, where there is a run."""
    if not (output.is_dir() and any(output.iterdir())):
        return RunDir.create(folder)
    run = RunDir.open(output)
    folder.mkdir()
    light = [artefact for artefact in ARTEFACTS.values() if artefact.command in _LIGHT]
    names = {"run.json", *(artefact.file_name for artefact in light), *(artefact.sidecar_name for artefact in light)}
    for path in sorted(run.root.iterdir()):
        if path.name in names or path.name.startswith("teacher_cache.sqlite"):
            shutil.copy2(path, folder / path.name)
    return RunDir.open(folder)


def _light_steps(config: CrfConfig, run: RunDir) -> tuple[list[PlannedStep], PriceRange | None]:
    """Made in the copy, so that what comes after them is known; advisers are asked for nothing but their price."""
    from composer_replication.steps.replay import plan_replay

    steps, price = list[PlannedStep](), None
    if config.ingest.paths:
        before = run.meta("conversations").sha256 if run.path("conversations").exists() else None
        step_named("ingest").function(config.ingest, run)
        is_new = run.meta("conversations").sha256 != before
        steps.append(PlannedStep("ingest", "reads what is new" if is_new else ""))
    sections: dict[str, Any] = {
        "split": config.split,
        "sites": replace(config.sites, writer=None),
        "pairs": config.pairs,
    }
    for name, written in RECORDS.items():
        if name == "replay" and config.replay.teachers is None:
            continue
        steps.append(PlannedStep(name, why_records(written, config, run)))
        if name == "replay":
            price = plan_replay(config.replay, run).price
        elif steps[-1].why:
            step_named(name).function(sections[name], run)
    return steps, price


def _heavy_steps(config: CrfConfig, run: RunDir, output: Path) -> list[PlannedStep]:
    """Trainings, evaluation and report: made again as soon as anything before them is."""
    from composer_replication.steps.train import what_training_does, why_train

    has_run = (output / "run.json").exists()
    steps = list[PlannedStep]()
    for name, arm in arms_of(config).items():
        arm = replace(arm, train=replace(arm.train, output=arm.train.output or str(output)))
        why = why_train(arm, run)
        words = what_training_does(arm, run, why) if why.why else ""
        steps.append(PlannedStep(name, words if has_run else NOT_THERE))
    why = next((f"{step.name} is made" for step in steps if step.why), "")
    for name, file in (("evaluate", "evaluation"), ("report", "report_html")):
        is_there = has_run and RunDir.open(output).path(file).exists()
        steps.append(PlannedStep(name, why or ("" if is_there else NOT_THERE)))
    return steps
