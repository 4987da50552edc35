"""The pipeline of `crf run`: run the steps in order, and skip those that are up to date.

The pipeline can be interrupted or killed at any time. Steps write their files atomically, training resumes from its
last checkpoint, and paid answers are cached. After an interruption, the same command leads to the same report.

    STEPS        the table of steps: the function, inputs, outputs and settings of each step
    run_steps    run every stale step
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
    TrainingDataCounts,
    check_enough_training_data,
    check_verdict_possible,
    count_measurable,
    count_training_data,
    resolve_paths,
    save_options,
)
from composer_replication.cli.split import TEST
from composer_replication.config import CrfConfig
from composer_replication.config.values import value_text
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import NOT_WRITTEN_YET, sha256_of_file
from composer_replication.runs.files import control_name, hash_weight_files, read_evaluation, read_rejected_ids
from composer_replication.runs.shared_reads import sharing_reads
from composer_replication.teacher_replay.teachers import hint_writer_name, read_specs

if TYPE_CHECKING:
    from composer_replication.trainer.sessions.phases import TrainingCallbacks


NOTHING_TO_DO = "nothing to do: the training, the evaluation and the report are up to date"
UP_TO_DATE = "up to date"


class Step(NamedTuple):
    """A step of the pipeline. It is also a command-line verb of the same name."""

    name: str
    function_path: str  # "module:function", of `function(section, run, **options)`
    reads: tuple[str, ...]
    # A step can do without these: a replay then finds failures itself, pairs come from the sessions only, a training
    # has no channel 3, and without a split nothing is held out.
    reads_if_there: tuple[str, ...]
    writes: tuple[str, ...]
    # The last two are for steps that write records. The sidecar of the first artefact in `writes` names its sources
    # and the settings that it was written with. It is stale if one of `optional_sources` has been written since, or
    # if `settings` returns other values.
    optional_sources: tuple[str, ...] = ()
    settings: Callable[[CrfConfig, RunDir], dict[str, Any]] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The function that runs the step. Its module is imported on demand, because some modules load torch."""
        module, name = self.function_path.split(":")
        return getattr(import_module(f"composer_replication.{module}"), name)

    def why_stale(self, config: CrfConfig, run: RunDir) -> str:
        """Return why the records of this step have to be written or rewritten, or an empty string if they are up to
        date.
        """
        assert self.settings is not None
        name = self.writes[0]
        if not run.path(name).exists():
            return NOT_WRITTEN_YET
        try:
            changed = run.changed_sources(name)
            meta = run.meta(name)
        except (ArtefactCorruptError, ArtefactNotFoundError):
            return "cannot be read"
        recorded = {source.name for source in meta.sources}
        changed += [source for source in self.optional_sources if run.path(source).exists() and source not in recorded]
        if changed:
            return f"{' and '.join(dict.fromkeys(changed))} changed since"
        # A sidecar of an earlier version lacks newer settings. Their old values are unknown and count as unchanged.
        changed_settings = [
            f"{key}: {meta.settings[key]} -> {value}"
            for key, value in self.settings(config, run).items()
            if key in meta.settings and meta.settings[key] != value
        ]
        return "; ".join(changed_settings)


def _split_settings(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    options = config.split
    return {"by": options.by, "validation": options.validation, "test": TEST if options.test is None else options.test}


def _sites_settings(config: CrfConfig, run: RunDir) -> dict[str, Any]:
    options = config.sites
    return {
        "min_confidence": options.min_confidence,
        "struck": sorted(read_rejected_ids(run)),
        "writer": hint_writer_name(options.writer),
    }


def _replay_settings(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    options = config.replay
    names = ("gate", "threshold", "send_tools", "max_history_tokens", "states", "limit", "max_usd")
    slugs = [str(spec["slug"]) for spec in read_specs(options.teachers, "replay.teachers") or ()]
    return {"teachers": slugs, **{name: getattr(options, name) for name in names}}


def _pairs_settings(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    options = config.pairs
    settings = {"threshold": options.threshold} if options.threshold is not None else {}
    names = ("where_it_worked", "thinking", "corrections", "filters", "recipe")
    return settings | {name: getattr(options, name) for name in names}


_INGESTED = ("conversations", "tools")
_TRAINED = ("config", "hint_proof", "ref_logprobs", "metrics", "checkpoints", "adapter", "model", "control")
_EVALUATED = ("evaluation", "evaluated", "sampled", "token_gaps")
_SHOWN = ("split", "sites", "conventions", "teacher_calls", "pairs", "hint_proof", "metrics", "adapter", "model")
_TABLE = (
    Step("ingest", "cli.ingest:ingest", reads=(), reads_if_there=(), writes=(*_INGESTED, "session_sources")),
    Step(
        "split",
        "cli.split:write_split",
        reads=("conversations",),
        reads_if_there=(),
        writes=("split",),
        settings=_split_settings,
    ),
    Step(
        "sites",
        "cli.sites:write_sites",
        reads=_INGESTED,
        reads_if_there=("split", "conventions"),
        writes=("sites", "conventions"),
        optional_sources=("split", "conventions"),
        settings=_sites_settings,
    ),
    Step(
        "replay",
        "cli.replay:replay",
        reads=_INGESTED,
        reads_if_there=("split", "sites"),
        writes=("teacher_calls", "teacher_cache", "asked_tools"),
        optional_sources=("split",),
        settings=_replay_settings,
    ),
    Step(
        "pairs",
        "cli.pairs:write_pairs",
        reads=_INGESTED,
        reads_if_there=("split", "sites", "teacher_calls", "asked_tools"),
        writes=("pairs",),
        optional_sources=("split", "sites", "teacher_calls"),
        settings=_pairs_settings,
    ),
    Step(
        "train",
        "trainer.from_config.train_run:train",
        reads=_INGESTED,
        reads_if_there=("split", "sites", "pairs"),
        writes=_TRAINED,
    ),
    Step(
        "evaluate",
        "evaluation.evaluate:evaluate",
        reads=(*_INGESTED, "split"),
        reads_if_there=("sites", "pairs", "adapter", "model", "control"),
        writes=_EVALUATED,
    ),
    Step(
        "report",
        "cli.report:write_report",
        reads=("conversations",),
        reads_if_there=(*_SHOWN, *_EVALUATED),
        writes=("report_html", "report_md", "report_sessions"),
    ),
)
STEPS = {step.name: step for step in _TABLE}


def record_steps(config: CrfConfig) -> list[Step]:
    """Return the steps that write records. Without teachers, the replay is not among them."""
    has_teachers = config.replay.teachers is not None
    return [step for step in STEPS.values() if step.settings is not None and (step.name != "replay" or has_teachers)]


@dataclass(frozen=True)
class RunCallbacks:
    """Progress callbacks. The defaults do nothing."""

    on_step_begin: Callable[[str, str], None] = field(default_factory=lambda: lambda _name, _why: None)
    on_step_end: Callable[[str, Any], None] = field(default_factory=lambda: lambda _name, _result: None)
    on_message: Callable[[str], None] = field(default_factory=lambda: lambda _message: None)
    # The next two return a context, which is open while the step runs and yields the callback.
    ingest_progress: Callable[[], AbstractContextManager[Callable[[int, int], None]]] = field(
        default_factory=lambda: lambda: nullcontext(lambda _done, _total: None)
    )
    training_progress: Callable[[int], AbstractContextManager[TrainingCallbacks | None]] = field(
        default_factory=lambda: lambda _steps: nullcontext()
    )


class _StepOutcome(NamedTuple):
    """Whether and why a step has run, and how long it took. The field names are those of `crf run --json`."""

    name: str
    was_made: bool
    why: str
    seconds: float


@dataclass(kw_only=True)
class RunResult:
    """The outcomes of the steps so far, in order. An interrupted run has no evaluation and no report."""

    outcomes: list[_StepOutcome] = field(default_factory=list[_StepOutcome])
    evaluation: dict[str, Any] | None = None
    report: Path | None = None
    stopped_by: str = ""
    """The name of the signal that interrupted a training; empty if there was none."""


def run_steps(
    config: CrfConfig, run: RunDir, callbacks: RunCallbacks | None = None, *, saves_options: bool = False
) -> RunResult:
    """Run every stale step.

    If there is too little training data, InputError is raised before any weights are loaded. With `saves_options`, the
    options are stored in the run for the next call.
    """
    callbacks, result = callbacks or RunCallbacks(), RunResult()
    config = resolve_paths(config)
    if config.replay.teachers is not None or config.sites.writer is not None:
        # Raises for a model that cannot be trained, before money is spent on teachers.
        resolve_for_training(config)
    if saves_options:
        save_options(config, run)
    config = replace(config, train=replace(config.train, run=str(run.root)))
    with run.used_alone("crf run"), sharing_reads():
        for name, why, function in _steps(config, run, callbacks):
            if not why:
                result.outcomes.append(_StepOutcome(name, False, UP_TO_DATE, 0.0))
                continue
            callbacks.on_step_begin(name, why)
            started_s = time.monotonic()
            step_result = function()
            result.outcomes.append(_StepOutcome(name, True, why, time.monotonic() - started_s))
            callbacks.on_step_end(name, step_result)
            if getattr(step_result, "stopped_by", ""):
                result.stopped_by = step_result.stopped_by
                return result
    if not any(outcome.was_made for outcome in result.outcomes if outcome.name != "ingest"):
        callbacks.on_message(NOTHING_TO_DO)
    result.evaluation, result.report = read_evaluation(run), run.path("report_html")
    return result


_Step = tuple[str, str, Callable[[], Any]]
"""The name of a step, the reason to run it (empty if it is up to date), and the function that runs it."""


def _steps(config: CrfConfig, run: RunDir, callbacks: RunCallbacks) -> Iterator[_Step]:
    """Yield the steps in order.

    This is a generator, so each step is checked only after the steps before it have run.
    """
    if config.ingest.paths:
        yield "ingest", "reads what is new", lambda: _ingest(config, run, callbacks)
    for step in record_steps(config):
        yield step.name, step.why_stale(config, run), partial(step.function, getattr(config, step.name), run)
    training_data = count_training_data(run)
    check_enough_training_data(config, training_data)
    yield from _training_steps(resolve_for_training(config), run, training_data, callbacks)


def _training_steps(
    config: CrfConfig, run: RunDir, training_data: TrainingDataCounts, callbacks: RunCallbacks
) -> Iterator[_Step]:
    """Yield the steps for the training, its controls, the evaluation and the report."""
    # Imported here because it loads torch.
    from composer_replication.evaluation.evaluate import PARTIAL
    from composer_replication.trainer.from_config.train_run import (
        describe_training,
        move_earlier_training,
        weights_folder,
        why_train,
    )

    arms = arm_configs(config)
    if any(why_train(arm, run).why for arm in arms.values()):
        check_verdict_possible(config, training_data, count_measurable(config, run), callbacks.on_message)
    for name, arm in arms.items():
        why = why_train(arm, run)
        words = describe_training(arm, run, why) if why.why and not why.is_other else ""
        if why.is_other:
            words = describe_training(arm, run, why, str(move_earlier_training(arm, run)))
        yield name, words, lambda arm=arm: _train(arm, run, callbacks)
    folders = {name: weights_folder(arm, run) for name, arm in arms.items()}
    weights: dict[str, Any] = {"control": None, "after": folders.pop("train"), **folders}
    inputs = _evaluation_inputs(config, run, weights)

    def evaluate() -> Any:
        models = {"before": config.train.model, "after": str(weights["after"])}
        controls = [*map(str, folders.values())]
        with callbacks.training_progress(0) as progress:
            record = STEPS["evaluate"].function(config, run, **models, control=controls, progress=progress)
        _record_hashes("evaluate", run, inputs)
        return record

    why_evaluate = _why_output_stale("evaluate", run, inputs)
    if why_evaluate and (run.root / PARTIAL).exists():
        why_evaluate += "; scores of an interrupted evaluation are reused where they are still valid"
    yield "evaluate", why_evaluate, evaluate
    records = ("evaluation", "conversations", "split", "sites", "pairs", "teacher_calls", "hint_proof")
    report_sources = {**_artefact_hashes(run, records), **_weight_hashes(weights)}

    def write_report() -> Any:
        report = STEPS["report"].function(run, trained_in=weights["after"].parent)
        _record_hashes("report", run, report_sources)
        return report

    yield "report", _why_output_stale("report", run, report_sources), write_report


def _ingest(config: CrfConfig, run: RunDir, callbacks: RunCallbacks) -> Any:
    with callbacks.ingest_progress() as progress:
        return STEPS["ingest"].function(config.ingest, run, progress=progress)


def _train(config: CrfConfig, run: RunDir, callbacks: RunCallbacks) -> Any:
    with callbacks.training_progress(config.train.optimiser.steps) as progress:
        return STEPS["train"].function(config, run, progress=progress)


def arm_configs(config: CrfConfig) -> dict[str, CrfConfig]:
    """Return the configs of the training and of its controls, by step name."""
    arms, shuffles = {"train": config}, range(1, config.run.shuffles + 1) if config.run.control else ()
    for shuffle in shuffles:
        arms[control_name(shuffle)] = replace(config, train=replace(config.train, control="shuffled", shuffle=shuffle))
    return arms


def resolve_for_training(config: CrfConfig) -> CrfConfig:
    """Return the config as the training uses it, with windows that fit the model. Loads torch and the tokenizer."""
    from composer_replication.trainer.from_config.inputs import read_inputs

    inputs = read_inputs(replace(config, train=replace(config.train, run=None)))
    return replace(inputs.config, train=replace(inputs.config.train, run=config.train.run))


# ---- Whether the evaluation and the report are up to date
# Records have a sidecar that lists their inputs, and weights have training.json. For these two steps, `crf run` stores
# the hashes of the inputs and outputs itself, in this file:

_INPUT_RECORDS = ".made_of.json"


def _why_output_stale(step: str, run: RunDir, inputs: Mapping[str, str | None]) -> str:
    """Return why an evaluation or a report has to be made or remade, or an empty string if it is up to date.

    `inputs` describes its current inputs.
    """
    if not all(run.path(name).exists() for name in _output_files(step)):
        return NOT_WRITTEN_YET
    recorded = _read_input_records(run).get(step)
    if recorded is None:
        return "was not made by `crf run`"
    # The outputs are compared as well, because somebody may have replaced them.
    current = {**inputs, **_artefact_hashes(run, _output_files(step))}
    changed = [name for name in {**recorded, **current} if recorded.get(name) != current.get(name)]
    # Names of options contain a dot ("evaluation.samples"), names of files do not.
    options = [f"{name}: {recorded.get(name, 'unset')} -> {current.get(name)}" for name in changed if "." in name]
    files = [name for name in changed if "." not in name]
    return "; ".join([*([f"{' and '.join(files)} changed since"] if files else []), *options])


def _record_hashes(step: str, run: RunDir, inputs: Mapping[str, str | None]) -> None:
    """Store the hashes of the inputs and outputs of an evaluation or report that has finished."""
    record = {**inputs, **_artefact_hashes(run, _output_files(step))}
    atomic_write_json(run.root / _INPUT_RECORDS, {**_read_input_records(run), step: record})


def _output_files(step: str) -> list[str]:
    return [name for name in STEPS[step].writes if ARTEFACTS[name].kind == "file"]


def _read_input_records(run: RunDir) -> dict[str, Any]:
    path = run.root / _INPUT_RECORDS
    return decode_object(path.read_bytes()) if path.exists() else {}


def _evaluation_inputs(config: CrfConfig, run: RunDir, weights: Mapping[str, Path | None]) -> dict[str, str | None]:
    """Return the inputs of an evaluation: its options, and hashes of the records, weights and files that it reads."""
    records = _artefact_hashes(run, ("conversations", "split", "sites", "pairs"))
    section = config.evaluation
    paths = {"gsm8k": section.gsm8k, "code": section.code}
    files = {name: None if path is None else _file_hash(Path(path)) for name, path in paths.items()}
    options = {f"evaluation.{name}": value_text(value) for name, value in vars(section).items()}
    return {**records, **_weight_hashes(weights), **files, **options}


def _weight_hashes(weights: Mapping[str, Path | None]) -> dict[str, str | None]:
    """Return hashes of each model's training.json and of its weight files."""
    digests: dict[str, str | None] = {}
    for name, folder in weights.items():
        digests[name] = None if folder is None else _file_hash(folder / "training.json")
        digests[f"weights of {name}"] = None if folder is None else hash_weight_files(folder)
    return digests


def _artefact_hashes(run: RunDir, names: Iterable[str]) -> dict[str, str | None]:
    """Return the hash of each artifact's file, or None if the file does not exist."""
    return {name: _file_hash(run.path(name)) for name in names if ARTEFACTS[name].kind != "folder"}


def _file_hash(path: Path) -> str | None:
    return sha256_of_file(path) if path.is_file() else None
