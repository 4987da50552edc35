"""`crf run`: every step of the table, one after the other; what is there and still holds is not made again.

It can be stopped anywhere, by a kill too: each step leaves its file whole or not at all, a training goes on from its
last checkpoint, and paid answers are kept. The same command goes on, and ends with the same report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.config import CrfConfig
from composer_replication.runs import RunDir
from composer_replication.runs.evaluation import control_name
from composer_replication.steps.running.learnable import (
    Learnable,
    check_judgeable,
    check_learnable,
    learnable,
    to_judge_by,
)
from composer_replication.steps.running.options import remember, settled
from composer_replication.steps.stale import evaluated_of, hashes, note_files, trained_of, why_files, why_records
from composer_replication.steps.table import step_named

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.training import Progress

RECORDS = {"split": "split", "sites": "sites", "replay": "teacher_calls", "pairs": "pairs"}
"""The steps that write records, and the artefact that tells whether one has to be made."""
NOTHING_TO_DO = "nothing to do: the training, the evaluation and the report are up to date"


@dataclass(frozen=True)
class Listener:
    """Whom to tell: what comes next and why, what came of it, sentences; and how far a reading or a training is."""

    begin: Callable[[str, str], None] = field(default_factory=lambda: lambda _name, _why: None)
    done: Callable[[str, Any], None] = field(default_factory=lambda: lambda _name, _result: None)
    say: Callable[[str], None] = field(default_factory=lambda: lambda _text: None)
    reading: Callable[[], AbstractContextManager[Callable[[int, int], None]]] = field(
        default_factory=lambda: lambda: nullcontext(lambda _done, _total: None)
    )
    training: Callable[[int], AbstractContextManager[Progress | None]] = field(
        default_factory=lambda: lambda _steps: nullcontext()
    )


class Outcome(NamedTuple):
    """What became of a step: made, or why not; and how long it took."""

    name: str
    was_made: bool
    why: str
    seconds: float


@dataclass(kw_only=True)
class RunResult:
    """All outcomes in order; the evaluation's record and the report, where it came that far."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    evaluation: dict[str, Any] | None = None
    report: Path | None = None
    stopped_by: str = ""
    """The signal that ended a training; the same command goes on."""


def run_steps(
    config: CrfConfig, run: RunDir, listener: Listener | None = None, *, is_remembered: bool = False
) -> RunResult:
    """Go through the table; raises InputError where there is nothing to learn from, before any weights are loaded.

    `is_remembered` writes down what the run is told.
    """
    observer, result, config = listener or Listener(), RunResult(), settled(config)
    if config.replay.teachers is not None or config.sites.writer is not None:
        as_made(config)  # before anybody is paid
    if is_remembered:
        remember(config, run)
    config = replace(config, train=replace(config.train, run=str(run.root)))
    with run.used_alone("crf run"):
        for name, why, make in _steps(config, run, observer):
            if not why:
                result.outcomes.append(Outcome(name, False, "as it should be", 0.0))
                continue
            observer.begin(name, why)
            began = time.monotonic()
            step_result = make()
            result.outcomes.append(Outcome(name, True, why, time.monotonic() - began))
            observer.done(name, step_result)
            if getattr(step_result, "stopped_by", ""):
                result.stopped_by = step_result.stopped_by
                return result
    if not any(outcome.was_made for outcome in result.outcomes if outcome.name != "ingest"):
        observer.say(NOTHING_TO_DO)
    _take_results(run, result)
    return result


_Step = tuple[str, str, Callable[[], Any]]


def _steps(config: CrfConfig, run: RunDir, listener: Listener) -> Iterator[_Step]:
    """Each step with why it has to be made, asked when those before it are done."""
    if config.ingest.paths:
        yield "ingest", "reads what is new", lambda: _ingest(config, run, listener)
    for name, written in RECORDS.items():
        if name != "replay" or config.replay.teachers is not None:
            yield (
                name,
                why_records(written, config, run),
                partial(step_named(name).function, getattr(config, name), run),
            )
    there = learnable(run)
    check_learnable(config, there)
    yield from _of_training(as_made(config), run, there, listener)


def _of_training(config: CrfConfig, run: RunDir, there: Learnable, listener: Listener) -> Iterator[_Step]:
    from composer_replication.evaluation.evaluate import PARTIAL
    from composer_replication.steps.train import set_aside, trained_in, what_training_does, why_train

    arms = arms_of(config)
    if any(why_train(arm, run).why for arm in arms.values()):
        check_judgeable(config, there, to_judge_by(config, run), listener.say)
    for name, arm in arms.items():
        why = why_train(arm, run)
        words = what_training_does(arm, run, why) if why.why and not why.is_other else ""
        if why.is_other:
            words = what_training_does(arm, run, why, str(set_aside(arm, run)))
        yield name, words, lambda arm=arm: _train(arm, run, listener)
    folders = {name: trained_in(arm, run) for name, arm in arms.items()}
    weights: dict[str, Any] = {"control": None, "after": folders.pop("train"), **folders}
    made_of = evaluated_of(config, run, weights)

    def compare() -> Any:
        names = {"before": config.train.model, "after": str(weights["after"]), "control": [*map(str, folders.values())]}
        with listener.training(0) as progress:
            record = step_named("evaluate").function(config, run, **names, progress=progress)
        note_files("evaluate", run, made_of)
        return record

    why_evaluate = why_files("evaluate", run, made_of)
    if why_evaluate and (run.root / PARTIAL).exists():
        why_evaluate += "; scores that an interrupted evaluation kept are used where they still hold"
    yield "evaluate", why_evaluate, compare
    records = ("evaluation", "conversations", "split", "sites", "pairs", "teacher_calls", "hint_proof")
    report_sources = {**hashes(run, records), **trained_of(weights)}

    def page() -> Any:
        report = step_named("report").function(run, trained_in=weights["after"].parent)
        note_files("report", run, report_sources)
        return report

    yield "report", why_files("report", run, report_sources), page


def _ingest(config: CrfConfig, run: RunDir, listener: Listener) -> Any:
    with listener.reading() as progress:
        return step_named("ingest").function(config.ingest, run, progress=progress)


def _train(config: CrfConfig, run: RunDir, listener: Listener) -> Any:
    with listener.training(config.train.optimiser.steps) as progress:
        return step_named("train").function(config, run, progress=progress)


def arms_of(config: CrfConfig) -> dict[str, CrfConfig]:
    """The trainings of a run, by the name of their step: its own, and its controls where those are asked for."""
    arms, shuffles = {"train": config}, range(1, config.run.shuffles + 1) if config.run.control else ()
    for shuffle in shuffles:
        arms[control_name(shuffle)] = replace(config, train=replace(config.train, control="shuffled", shuffle=shuffle))
    return arms


def as_made(config: CrfConfig) -> CrfConfig:
    """A config as a training sees it: a model with a tokenizer and a template, windows that fit. Loads torch."""
    from composer_replication.trainer.from_config.inputs import read_inputs

    inputs = read_inputs(replace(config, train=replace(config.train, run=None)))
    return replace(inputs.config, train=replace(inputs.config.train, run=config.train.run))


def _take_results(run: RunDir, result: RunResult) -> None:
    from composer_replication.runs.evaluation import read_evaluation

    result.evaluation, result.report = read_evaluation(run), run.path("report_html")
