"""`crf run`: every step of the table, one after the other; what is there and still holds is not made again.

It can be stopped anywhere, by a kill too: each step leaves its file whole or not at all, a training goes on from its
last checkpoint, and paid answers are kept. The same command goes on, and ends with the same report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.atomic import atomic_write_json
from composer_replication.canonical_json import decode_object
from composer_replication.cli.run_checks import (
    Learnable,
    check_judgeable,
    check_learnable,
    learnable,
    remember,
    settled,
    to_judge_by,
)
from composer_replication.cli.split import TEST
from composer_replication.config import CrfConfig
from composer_replication.config.values import value_text
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import NOT_THERE, sha256_of_file
from composer_replication.runs.files import control_name, struck_sites, weight_files_digest
from composer_replication.teacher_replay.teachers import read_specs, writer_in

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.training import TrainingCallbacks


RECORDS = {"split": "split", "sites": "sites", "replay": "teacher_calls", "pairs": "pairs"}
"""The steps that write records, and the artefact that tells whether one has to be made."""
NOTHING_TO_DO = "nothing to do: the training, the evaluation and the report are up to date"


@dataclass(frozen=True)
class RunCallbacks:
    """Whom to tell: what comes next and why, what came of it, sentences; and how far a reading or a training is."""

    begin: Callable[[str, str], None] = field(default_factory=lambda: lambda _name, _why: None)
    done: Callable[[str, Any], None] = field(default_factory=lambda: lambda _name, _result: None)
    say: Callable[[str], None] = field(default_factory=lambda: lambda _text: None)
    reading: Callable[[], AbstractContextManager[Callable[[int, int], None]]] = field(
        default_factory=lambda: lambda: nullcontext(lambda _done, _total: None)
    )
    training: Callable[[int], AbstractContextManager[TrainingCallbacks | None]] = field(
        default_factory=lambda: lambda _steps: nullcontext()
    )


class _StepOutcome(NamedTuple):
    """What became of a step: made, or why not; and how long it took."""

    name: str
    was_made: bool
    why: str
    seconds: float


@dataclass(kw_only=True)
class RunResult:
    """All outcomes in order; the evaluation's record and the report, where it came that far."""

    outcomes: list[_StepOutcome] = field(default_factory=list[_StepOutcome])
    evaluation: dict[str, Any] | None = None
    report: Path | None = None
    stopped_by: str = ""
    """The signal that ended a training; the same command goes on."""


def run_steps(
    config: CrfConfig, run: RunDir, listener: RunCallbacks | None = None, *, is_remembered: bool = False
) -> RunResult:
    """Go through the table; raises InputError where there is nothing to learn from, before any weights are loaded.

    `is_remembered` writes down what the run is told.
    """
    observer, result, config = listener or RunCallbacks(), RunResult(), settled(config)
    if config.replay.teachers is not None or config.sites.writer is not None:
        as_made(config)  # before anybody is paid
    if is_remembered:
        remember(config, run)
    config = replace(config, train=replace(config.train, run=str(run.root)))
    with run.used_alone("crf run"):
        for name, why, make in _steps(config, run, observer):
            if not why:
                result.outcomes.append(_StepOutcome(name, False, "as it should be", 0.0))
                continue
            observer.begin(name, why)
            began = time.monotonic()
            step_result = make()
            result.outcomes.append(_StepOutcome(name, True, why, time.monotonic() - began))
            observer.done(name, step_result)
            if getattr(step_result, "stopped_by", ""):
                result.stopped_by = step_result.stopped_by
                return result
    if not any(outcome.was_made for outcome in result.outcomes if outcome.name != "ingest"):
        observer.say(NOTHING_TO_DO)
    _take_results(run, result)
    return result


_Step = tuple[str, str, Callable[[], Any]]


def _steps(config: CrfConfig, run: RunDir, listener: RunCallbacks) -> Iterator[_Step]:
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


def _of_training(config: CrfConfig, run: RunDir, there: Learnable, listener: RunCallbacks) -> Iterator[_Step]:
    from composer_replication.evaluation.evaluate import PARTIAL
    from composer_replication.trainer.from_config.train_run import (
        set_aside,
        trained_in,
        what_training_does,
        why_train,
    )

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
    report_sources = {**hashes(run, records), **_trained_of(weights)}

    def page() -> Any:
        report = step_named("report").function(run, trained_in=weights["after"].parent)
        note_files("report", run, report_sources)
        return report

    yield "report", why_files("report", run, report_sources), page


def _ingest(config: CrfConfig, run: RunDir, listener: RunCallbacks) -> Any:
    with listener.reading() as progress:
        return step_named("ingest").function(config.ingest, run, progress=progress)


def _train(config: CrfConfig, run: RunDir, listener: RunCallbacks) -> Any:
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
    from composer_replication.runs.files import read_evaluation

    result.evaluation, result.report = read_evaluation(run), run.path("report_html")


# The pipeline as a table: every step of a run in order, with the artefacts that it reads and writes.
#
# What it reads "if there" it can do without: a replay then finds failures itself, pairs are the sessions' own, a
# training has no channel 3, and without a split nothing is kept from it.


# Steps that ablations run, too, without the command line.
_MODULES = {
    "train": "composer_replication.trainer.from_config.train_run",
    "evaluate": "composer_replication.evaluation.evaluate",
}


class Step(NamedTuple):
    """One step; its name is its command, its section of the config, and its file; a report has no options."""

    name: str
    function_name: str
    reads: tuple[str, ...]
    reads_if_there: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def function(self) -> Callable[..., Any]:
        """`function(section, run, **what is said for once)`; loaded when it is asked for."""
        return getattr(
            import_module(_MODULES.get(self.name, f"composer_replication.cli.{self.name}")), self.function_name
        )


def step_named(name: str) -> Step:
    """The step of this name."""
    return next(step for step in STEPS if step.name == name)


_INGESTED = ("conversations", "tools")
_TRAINED = ("config", "hint_proof", "ref_logprobs", "metrics", "checkpoints", "adapter", "model", "control")
_EVALUATED = ("evaluation", "evaluated", "sampled", "token_gaps")
_SHOWN = ("split", "sites", "conventions", "teacher_calls", "pairs", "hint_proof", "metrics", "adapter", "model")
_PAGES = ("report_html", "report_md", "report_sessions")
STEPS = (
    Step("ingest", "ingest", (), (), (*_INGESTED, "session_sources")),
    Step("split", "write_split", ("conversations",), (), ("split",)),
    Step("sites", "write_sites", _INGESTED, ("split", "conventions"), ("sites", "conventions")),
    Step("replay", "replay", _INGESTED, ("split", "sites"), ("teacher_calls", "teacher_cache", "asked_tools")),
    Step("pairs", "write_pairs", _INGESTED, ("split", "sites", "teacher_calls", "asked_tools"), ("pairs",)),
    Step("train", "train", _INGESTED, ("split", "sites", "pairs"), _TRAINED),
    Step("evaluate", "evaluate", (*_INGESTED, "split"), ("sites", "pairs", "adapter", "model", "control"), _EVALUATED),
    Step("report", "write_report", ("conversations",), (*_SHOWN, *_EVALUATED), _PAGES),
)


# Why a step of a run has to be made: what it left is not there, was made of something else, or otherwise.
#
# Sidecars say what records were made of and how. Weights have `training.json` beside them. What an evaluation or a
# report was made of, `crf run` writes down itself.

_NOTES = ".made_of.json"
_UNKNOWN = object()
# What belongs to an artefact's sources as soon as it is there itself.
_READ_IF_THERE = {
    "sites": ("split", "conventions"),
    "teacher_calls": ("split",),
    "pairs": ("split", "sites", "teacher_calls"),
}
_FILES_OF = {"evaluate": ("evaluation",), "report": ("report_html", "report_md")}


def why_records(name: str, config: CrfConfig, run: RunDir) -> str:
    """Why the records `name` have to be written (again); empty where they are as they should be."""
    if not run.path(name).exists():
        return NOT_THERE
    try:
        changed = run.changed_sources(name)
        meta = run.meta(name)
    except (ArtefactCorruptError, ArtefactNotFoundError):
        return "cannot be read"
    source_names = {source.name for source in meta.sources}
    changed += [
        source for source in _READ_IF_THERE.get(name, ()) if run.path(source).exists() and source not in source_names
    ]
    if changed:
        return f"{' and '.join(dict.fromkeys(changed))} changed since"
    now = _SETTINGS[name](config, run)
    changed_settings = [
        f"{key}: {before} -> {value}"
        for key, value in now.items()
        if (before := meta.settings.get(key, _UNKNOWN)) is not _UNKNOWN and before != value
    ]
    return "; ".join(changed_settings)


def _of_split(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    section = config.split
    return {"by": section.by, "validation": section.validation, "test": TEST if section.test is None else section.test}


def _of_sites(config: CrfConfig, run: RunDir) -> dict[str, Any]:
    section = config.sites
    return {
        "min_confidence": section.min_confidence,
        "struck": sorted(struck_sites(run)),
        "writer": writer_in(section.writer),
    }


def _of_calls(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    section = config.replay
    names = ("gate", "threshold", "send_tools", "max_history_tokens", "states", "limit", "max_usd")
    slugs = [str(spec["slug"]) for spec in read_specs(section.teachers, "replay.teachers") or ()]
    return {"teachers": slugs, **{name: getattr(section, name) for name in names}}


def _of_pairs(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    section = config.pairs
    settings = {"threshold": section.threshold} if section.threshold is not None else {}
    names = ("where_it_worked", "thinking", "corrections", "filters", "recipe")
    return settings | {name: getattr(section, name) for name in names}


_SETTINGS: Mapping[str, Callable[[CrfConfig, RunDir], dict[str, Any]]] = {
    "split": _of_split,
    "sites": _of_sites,
    "teacher_calls": _of_calls,
    "pairs": _of_pairs,
}

# ---- what has no sidecar


def why_files(step: str, run: RunDir, made_of: Mapping[str, str | None]) -> str:
    """Why an evaluation or a report has to be made (again); `made_of` is what it would be made of now."""
    if not all(run.path(name).exists() for name in _FILES_OF[step]):
        return NOT_THERE
    before = _notes(run).get(step)
    if before is None:
        return "was not made by `crf run`"
    now = {**made_of, **_left(step, run)}
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    options = [f"{name}: {before.get(name, 'unset')} -> {now.get(name)}" for name in changed if "." in name]
    files = [name for name in changed if "." not in name]
    return "; ".join([*([f"{' and '.join(files)} changed since"] if files else []), *options])


def note_files(step: str, run: RunDir, made_of: Mapping[str, str | None]) -> None:
    """Write down what an evaluation or a report was made of, once it is there, and what it is itself."""
    atomic_write_json(run.root / _NOTES, {**_notes(run), step: {**made_of, **_left(step, run)}})


def _left(step: str, run: RunDir) -> dict[str, str | None]:
    """The files that the step left: somebody may have put others in their place since."""
    return hashes(run, _FILES_OF[step])


def _notes(run: RunDir) -> dict[str, Any]:
    path = run.root / _NOTES
    return decode_object(path.read_bytes()) if path.exists() else {}


def evaluated_of(config: CrfConfig, run: RunDir, weights: Mapping[str, Path | None]) -> dict[str, str | None]:
    """What an evaluation is made of: the records, the weights, the section, and the files that it names."""
    records = hashes(run, ("conversations", "split", "sites", "pairs"))
    section = config.evaluation
    paths = {"gsm8k": section.gsm8k, "code": section.code}
    files = {name: None if path is None else _hash_of(Path(path)) for name, path in paths.items()}
    options = {f"evaluation.{name}": value_text(value) for name, value in vars(section).items()}
    return {**records, **_trained_of(weights), **files, **options}


def _trained_of(weights: Mapping[str, Path | None]) -> dict[str, str | None]:
    """Weights by their training's record, and by their own bytes."""
    digests: dict[str, str | None] = {}
    for name, folder in weights.items():
        digests[name] = None if folder is None else _hash_of(folder / "training.json")
        digests[f"weights of {name}"] = None if folder is None else weight_files_digest(folder)
    return digests


def hashes(run: RunDir, names: Iterable[str]) -> dict[str, str | None]:
    """The files of these artefacts as they are now."""
    return {name: _hash_of(run.path(name)) for name in names if ARTEFACTS[name].kind != "folder"}


def _hash_of(path: Path) -> str | None:
    return sha256_of_file(path) if path.is_file() else None
