"""Run all jobs of an experiment, each in its own process, seed by seed; an interrupted command can be resumed.

FOLDER/
    predictions.json       written before the first job
    jobs/ARM/SEED/         the folder of one job; all jobs share jobs/.shared; do not commit these folders
    results.json           every unit of every finished job, the only input to tables and plots; published packed, as
                           results.columns.json.xz (`job.pack`)
    table.md  plots/       written by `page`
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from composer_replication.atomic import atomic_write_json, atomic_write_text, try_lock
from composer_replication.canonical_json import encode
from composer_replication.config.loader import from_tables
from composer_replication.config.values import to_toml
from composer_replication.errors import (
    ArtefactCorruptError,
    ArtefactNotFoundError,
    InputError,
    RunError,
    StaleArtefactError,
    explain,
)
from composer_replication.evaluation.ablation.job import (
    JOB,
    LOG,
    RESULT,
    Job,
    Result,
    check_schema,
    packed_path,
    read_record,
    read_result,
    stored_path,
    write_job,
)
from composer_replication.evaluation.ablation.plan import AblationArm, AblationPlan, Experiment, Metric, world_of
from composer_replication.runs.artefacts import now

RESULTS = "results.json"
# Jobs take at least seconds, so polling at this interval costs little.
_POLL_S = 0.05
# Lines of a failed job's log that the console shows, enough for the end of a traceback.
_NUM_LAST_LINES = 12
# Maximum number of jobs that a message names.
_MAX_NAMED_JOBS = 3
# "in /srv/run/log.txt: 3" -> "/srv/run/"; also "~/run/"; not "./a/b" or "a/b/c"
_FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^\s/:'\"]+/)+")


class JobKey(NamedTuple):
    """The arm and the seed that identify a job."""

    arm: str
    seed: int


class _FailedJob(NamedTuple):
    """A job that ended without a result, with the last lines of its log."""

    arm: str
    seed: int
    last_lines: list[str]


@dataclass(frozen=True, kw_only=True)
class AblationResults:
    """The content of results.json: an experiment and its results so far."""

    frozen: _FrozenPlan
    results: Sequence[Result]
    failed: Sequence[_FailedJob] = ()

    @property
    def missing(self) -> list[JobKey]:
        """The jobs of the plan that have neither succeeded nor failed."""
        ended = {JobKey(job.arm, job.seed) for job in (*self.results, *self.failed)}
        job_keys = (JobKey(arm, seed) for seed in self.frozen.experiment.seeds for arm in self.frozen.arms)
        return [job_key for job_key in job_keys if job_key not in ended]

    def of_arm(self, arm: str) -> list[Result]:
        """Return the results of an arm, ordered by seed."""
        return sorted((result for result in self.results if result.arm == arm), key=lambda result: result.seed)


@dataclass(frozen=True)
class JobCallbacks:
    """Progress callbacks of `run_jobs`.

    They are called as `begins(job, number of finished jobs, number of jobs)`, `done(job, result)` and
    `failed(failure)`.
    """

    begins: Callable[[JobKey, int, int], None] = lambda _job_key, _done, _total: None
    done: Callable[[JobKey, Result], None] = lambda _job_key, _result: None
    failed: Callable[[_FailedJob], None] = lambda _failure: None


def select_jobs(plan: AblationPlan, *, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[JobKey]:
    """Return the jobs of a plan, or only those of the given arms and seeds.

    The baseline's jobs come first, then the others seed by seed. In this order, the jobs that an interrupted command
    has finished can be compared. The first jobs have different seeds, so parallel workers do not wait for work that
    jobs with the same seed share.
    """
    for name, requested_values, planned_values in (("--only", only, plan.arms), ("--seeds", seeds, plan.seeds)):
        for value in requested_values:
            if value not in planned_values:
                expected = f"one of {', '.join(map(str, planned_values))}"
                raise InputError(explain(name, got=repr(value), expected=expected))
    job_keys = [
        JobKey(arm, seed)
        for seed in plan.seeds
        for arm in plan.arms
        if (not only or arm in only) and (not seeds or seed in seeds)
    ]
    # sorted() is stable, so the order by seed remains within the baseline and within the others.
    return sorted(job_keys, key=lambda job_key: job_key.arm != plan.experiment.baseline)


def run_jobs(
    plan: AblationPlan,
    folder: Path,
    job_keys: Sequence[JobKey],
    *,
    workers: int = 1,
    callbacks: JobCallbacks | None = None,
) -> AblationResults:
    """Freeze the predictions, run every job that has no result, and return all results.

    results.json is updated after each job.
    """
    callbacks, jobs = callbacks or JobCallbacks(), folder / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        check_ready(plan, folder)
        frozen = _freeze(plan, folder, has_begun=_has_begun(folder))
        jobs.mkdir(exist_ok=True)
        atomic_write_text(jobs / ".gitignore", "*\n")  # weights and logs are not to be committed
        failures: dict[JobKey, _FailedJob] = {}
        for job_key, failure in _run_all(plan, jobs, job_keys, workers, callbacks):
            if failure is not None:
                failures[job_key] = failure
                callbacks.failed(failure)
            _write_results(folder, frozen, failures)
        return _write_results(folder, frozen, failures)


def check_ready(plan: AblationPlan, folder: Path) -> None:
    """Raise if a plan cannot be run in a folder.

    The folder may contain results without their jobs, or the jobs of another plan, and the world may lack its input.
    """
    _check_results_have_jobs(folder)
    _freeze_predictions(plan, folder, has_begun=_has_begun(folder))
    check = getattr(world_of(plan.experiment.world), "check_plan", None)
    if check is not None:
        check(plan)


def _has_begun(folder: Path) -> bool:
    return any((folder / "jobs").glob(f"*/*/{JOB}"))


def _check_results_have_jobs(folder: Path) -> None:
    """Raise if results.json has results whose jobs are missing, as in a fresh clone.

    Rewriting the file would lose these results.
    """
    try:
        job_keys = [JobKey(result.arm, result.seed) for result in read_results(folder).results]
    except ArtefactNotFoundError:
        return
    except ArtefactCorruptError:
        if _has_begun(folder):
            return  # the file can be rebuilt from the jobs
        raise
    lost_jobs = [job_key for job_key in job_keys if not (_job_folder(folder / "jobs", job_key) / JOB).is_file()]
    if lost_jobs:
        lost_names = ", ".join(f"{job_key.arm} {job_key.seed}" for job_key in lost_jobs[:_MAX_NAMED_JOBS]) + (
            ", ..." if lost_jobs[_MAX_NAMED_JOBS:] else ""
        )
        fix = "Use another folder (`-o FOLDER`), or only rebuild the table: `crf ablate --table -o FOLDER`."
        got = f"results of {len(lost_jobs)} jobs that are not in jobs/ ({lost_names})"
        raise RunError(
            explain(str(stored_path(folder / RESULTS)), got=got, expected="only results of jobs in jobs/", fix=fix)
        )


def _run_all(
    plan: AblationPlan, jobs: Path, job_keys: Sequence[JobKey], workers: int, callbacks: JobCallbacks
) -> Iterator[tuple[JobKey, _FailedJob | None]]:
    """Run the jobs that have no result yet. Yield each job when it ends, with its failure or None."""
    waiting = deque(job_key for job_key in job_keys if not (_job_folder(jobs, job_key) / RESULT).is_file())
    total, running = len(job_keys), dict[JobKey, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job_key = waiting.popleft()
                callbacks.begins(job_key, total - len(waiting) - len(running) - 1, total)
                running[job_key] = _start(_make_job(plan, jobs, job_key), workers)
            ended = [job_key for job_key, process in running.items() if process.poll() is not None]
            for job_key in ended:
                _close(running.pop(job_key))
                result = read_result(_job_folder(jobs, job_key))
                if result is not None:
                    callbacks.done(job_key, result)
                yield job_key, None if result is not None else _read_failure(jobs, job_key)
            if not ended:
                time.sleep(_POLL_S)
    finally:
        # After Ctrl-C, closing stdin ends the jobs; the next command resumes them.
        for process in running.values():
            _close(process)


def _make_job(plan: AblationPlan, jobs: Path, job_key: JobKey) -> Job:
    arm, experiment = plan.arms[job_key.arm], plan.experiment
    optimiser = replace(arm.config.train.optimiser, seed=job_key.seed)
    return Job(
        folder=_job_folder(jobs, job_key),
        arm=job_key.arm,
        seed=job_key.seed,
        world=experiment.world,
        config=replace(arm.config, train=replace(arm.config.train, optimiser=optimiser)),
        options=arm.options,
        budget=experiment.budget,
        run=None if experiment.run is None else Path(experiment.run),
    )


def _job_folder(jobs: Path, job_key: JobKey) -> Path:
    return jobs / job_key.arm / str(job_key.seed)


def _start(job: Job, workers: int) -> subprocess.Popen[bytes]:
    """Start the process of a job. The process exits when this one does, because its stdin is then closed."""
    write_job(job)
    # Workers that all start a thread per core would slow each other down.
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", **os.environ}
    command = [sys.executable, "-m", "composer_replication.evaluation.ablation.job", str(job.folder), "--tied"]
    with (job.folder / LOG).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 (our own module, no shell)
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
        )


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.wait()


def _read_failure(jobs: Path, job_key: JobKey) -> _FailedJob:
    text = (_job_folder(jobs, job_key) / LOG).read_text(encoding="utf-8", errors="replace")
    return _FailedJob(
        job_key.arm, job_key.seed, [line for line in text.splitlines() if line.strip()][-_NUM_LAST_LINES:]
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder. Raises RunError if another command holds it."""
    descriptor = os.open(folder / ".ablate.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not try_lock(descriptor):
            fix = "Wait until it is done, or choose another folder: `-o FOLDER`."
            got = "a folder that another `crf ablate` is using"
            raise RunError(explain(str(folder), got=got, expected="an unused folder", fix=fix))
        yield
    finally:
        os.close(descriptor)


# ---- results.json


def _write_results(folder: Path, frozen: _FrozenPlan, failures: dict[JobKey, _FailedJob]) -> AblationResults:
    """Write the results of all finished jobs and the failures of this command to results.json, and return them."""
    # Folders of arms that are no longer in the plan are ignored.
    arms = list(frozen.arms)
    job_results = [read_result(path.parent) for arm in arms for path in (folder / "jobs" / arm).glob(f"*/{RESULT}")]
    results = sorted(
        (result for result in job_results if result), key=lambda result: (arms.index(result.arm), result.seed)
    )
    all_results = AblationResults(frozen=frozen, results=results, failed=_publishable(failures))
    record = {
        **frozen.as_json(),
        "results": [result.as_json() for result in results],
        "failed": [failure._asdict() for failure in all_results.failed],
    }
    atomic_write_json(folder / RESULTS, record)
    packed_path(folder / RESULTS).unlink(missing_ok=True)  # older than the plain file
    return all_results


def _publishable(failures: dict[JobKey, _FailedJob]) -> list[_FailedJob]:
    """Return the failures with only the last line of each log, and with the folders removed from paths in it."""
    lines = {
        job_key: [_FOLDERS.sub("", line) for line in failures[job_key].last_lines[-1:]] for job_key in sorted(failures)
    }
    return [failures[job_key]._replace(last_lines=lines[job_key]) for job_key in lines]


def read_results(folder: Path) -> AblationResults:
    """Return the content of results.json, plain or packed."""
    path = stored_path(folder / RESULTS)
    if not path.is_file():
        fix = "Run `crf ablate --config arms.toml`, or name the folder: `-o FOLDER`."
        raise ArtefactNotFoundError(
            explain(str(path), got="no such file", expected="a file with the results of jobs", fix=fix)
        )

    def parse(value: Mapping[str, Any]) -> AblationResults:
        return AblationResults(
            frozen=_FrozenPlan.from_json(value, str(path)),
            results=[Result.from_json(result) for result in value["results"]],
            failed=[_FailedJob(**failure) for failure in value["failed"]],
        )

    fix = "If its jobs are here, `crf ablate --config arms.toml` rebuilds it; otherwise restore the file."
    return read_record(path, parse, expected="results of `crf ablate`", fix=fix)


# ---- predictions.json
# The file has each arm's prediction and settings, and the time at which they were frozen. Once jobs exist, changed
# predictions, changed settings and missing arms are errors. Seeds may be added, and so may arms, with a later time.

PREDICTIONS = "predictions.json"
_SCHEMA, _VERSION = "composer_replication.predictions", 1
# Fields that an arm's digest covers besides its settings.
_PREDICTED = ("predict", "expect", "expect_control", "control_of", "exempt")
_PATH_OPTIONS = ("model", "run", "output")


@dataclass(frozen=True, kw_only=True)
class _FrozenArm:
    """A frozen arm: its description, its prediction, and a digest of the prediction and all settings."""

    about: str
    predict: str
    expect: str | None
    expect_control: str | None
    control_of: str | None
    exempt: str | None
    settings: Mapping[str, Any]
    sha256: str
    frozen: str = ""


@dataclass(frozen=True, kw_only=True)
class _FrozenPlan:
    """A frozen experiment: everything that a table needs except the results."""

    experiment: Experiment
    metrics: Mapping[str, Metric]
    arms: Mapping[str, _FrozenArm]

    def compared_with(self, name: str) -> list[str]:
        """Return the names of the arms that an arm is compared with: the baseline, then its controls."""
        controlled_arm = self.arms[name].control_of
        controls = [control for control, arm in self.arms.items() if arm.control_of == name]
        return [
            candidate
            for candidate in dict.fromkeys([self.experiment.baseline, *controls])
            if candidate not in (name, controlled_arm)
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the content of predictions.json."""
        return {
            "schema": _SCHEMA,
            "version": _VERSION,
            "experiment": _without_none(asdict(replace(self.experiment, run=None))),
            "metrics": {name: _without_none(asdict(metric)) for name, metric in self.metrics.items()},
            "arms": {name: asdict(arm) for name, arm in self.arms.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str) -> _FrozenPlan:
        """Return the plan stored in predictions.json or results.json; `where` names the file in error messages."""
        check_schema(value, _SCHEMA, _VERSION)
        return cls(
            experiment=from_tables(Experiment, [(value["experiment"], where)]),
            metrics={name: from_tables(Metric, [(metric, where)]) for name, metric in value["metrics"].items()},
            arms={name: _FrozenArm(**arm) for name, arm in value["arms"].items()},
        )


def _freeze(plan: AblationPlan, folder: Path, *, has_begun: bool) -> _FrozenPlan:
    """Write the predictions of a plan, and return the frozen plan."""
    frozen = _freeze_predictions(plan, folder, has_begun=has_begun)
    atomic_write_json(folder / PREDICTIONS, frozen.as_json())
    return frozen


def _freeze_predictions(plan: AblationPlan, folder: Path, *, has_begun: bool) -> _FrozenPlan:
    """Return the plan with frozen predictions.

    Predictions that predictions.json already contains unchanged keep their time. Raises StaleArtefactError if jobs
    exist and the predictions have changed since, or were never written.
    """
    path, stamp = folder / PREDICTIONS, now()
    frozen = _FrozenPlan(
        experiment=plan.experiment,
        metrics=plan.metrics,
        arms={name: replace(_make_prediction(arm), frozen=stamp) for name, arm in plan.arms.items()},
    )
    expected = "the predictions written before the first job"
    if not path.is_file():
        if has_begun:
            fix = "Restore the file: a prediction that is written after the run proves nothing."
            raise StaleArtefactError(explain(str(path), got="no file, although jobs exist", expected=expected, fix=fix))
        return frozen
    restore = "Restore the file, or start over in another folder: `-o FOLDER`."
    before = read_record(
        path, lambda value: _FrozenPlan.from_json(value, str(path)), expected="predictions", fix=restore
    )
    changes = list(_describe_changes(before, frozen))
    if has_begun and changes:
        fix = "Predictions cannot change once jobs exist. Use another folder for a new question: `-o FOLDER`."
        raise StaleArtefactError(explain(str(path), got="; ".join(changes), expected=expected, fix=fix))
    # An unchanged arm keeps the time at which it was frozen first.
    unchanged_arms = {name: arm for name, arm in before.arms.items() if _is_unchanged(arm, frozen.arms.get(name))}
    return replace(frozen, arms={**frozen.arms, **unchanged_arms})


def _describe_changes(before: _FrozenPlan, after: _FrozenPlan) -> Iterator[str]:
    """Yield a description of each change to a frozen plan; new arms and seeds do not count as changes."""
    for key, value in vars(before.experiment).items():
        if key not in ("seeds", "run") and value != getattr(after.experiment, key):
            yield f"ablate.{key}: changed from {value!r} to {getattr(after.experiment, key)!r}"
    yield from (
        f"metrics.{name}: changed" for name in before.metrics if before.metrics[name] != after.metrics.get(name)
    )
    for name, arm in before.arms.items():
        new_arm = after.arms.get(name)
        if new_arm is None:
            yield f"arm {name!r} is missing (to skip an arm, use --only)"
        elif not _is_unchanged(arm, new_arm):
            keys = [key for key in _PREDICTED if getattr(arm, key) != getattr(new_arm, key)]
            yield f"arm {name!r}: changed {' and '.join(keys) or 'settings'}"


def _is_unchanged(before: _FrozenArm, after: _FrozenArm | None) -> bool:
    return after is not None and before.sha256 == after.sha256


def _make_prediction(arm: AblationArm) -> _FrozenArm:
    config = tomllib.loads(to_toml(arm.config))
    for option in _PATH_OPTIONS:  # paths differ between machines; results have digests of the weights instead
        config["train"].pop(option, None)
    predicted_fields = {key: getattr(arm, key) for key in _PREDICTED}
    digest = hashlib.sha256(encode([predicted_fields, config, dict(arm.options)], where=arm.name)).hexdigest()
    return _FrozenArm(**predicted_fields, about=arm.about, settings=dict(arm.settings), sha256=digest)


def _without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the options that are None, because TOML has no null value."""
    return {
        key: _without_none(child) if isinstance(child, dict) else child
        for key, child in value.items()
        if child is not None
    }


# ---- equal budgets
# Rollouts and optimizer steps must be exactly as planned, and equal in all arms. Tokens depend on what a model writes,
# so an arm's mean may differ from the plan's number, or from the median arm, by the share `tokens_within`.

Breaches = dict[str, list[str]]
"""By arm: a sentence for each way in which its budget or units differ from those of the other arms."""
_EXACT = ("rollouts", "steps")


def find_breaches(study: AblationResults) -> Breaches:
    """Return, by arm, the differences that make the arm incomparable with the others.

    For exempt arms, only the units are checked.
    """
    breaches: Breaches = defaultdict(list)
    compared = [result for result in study.results if study.frozen.arms[result.arm].exempt is None]
    for result in study.results:
        breaches[result.arm] += _unit_breaches(result, study.results)
    for result in compared:
        breaches[result.arm] += _exact_breaches(result, study, compared)
        breaches[result.arm] += _start_breaches(result, compared)
    for arm, sentence in _token_breaches(study, compared):
        breaches[arm].append(sentence)
    return {arm: breaches[arm] for arm in study.frozen.arms if breaches[arm]}


def _exact_breaches(result: Result, study: AblationResults, compared: Sequence[Result]) -> Iterator[str]:
    for name in _EXACT:
        spent, planned = getattr(result.spent, name), getattr(study.frozen.experiment.budget, name)
        expected = (
            _most_common([getattr(job_result.spent, name) for job_result in compared]) if planned is None else planned
        )
        if spent != expected:
            reference = "the plan's" if planned is not None else "the others'"
            yield f"seed {result.seed}: {spent:,} {name}, {reference} are {expected:,}"


def _unit_breaches(result: Result, all_results: Sequence[Result]) -> Iterator[str]:
    units = _most_common([tuple(unit.unit for unit in job_result.units) for job_result in all_results])
    result_units = tuple(unit.unit for unit in result.units)
    if result_units != units:
        num_different = len(set(result_units) ^ set(units))
        yield f"seed {result.seed}: other units than most jobs, {num_different} of them not in both"


def _start_breaches(result: Result, compared: Sequence[Result]) -> Iterator[str]:
    start_digests = [job_result.digests["start"] for job_result in compared if "start" in job_result.digests]
    if start_digests and result.digests.get("start") != _most_common(start_digests):
        yield f"seed {result.seed}: begins with other weights than most jobs"


def _token_breaches(study: AblationResults, compared: Sequence[Result]) -> Iterator[tuple[str, str]]:
    budget = study.frozen.experiment.budget
    means = {
        arm: fmean(result.spent.tokens for result in arm_results)
        for arm in study.frozen.arms
        if (arm_results := [result for result in compared if result.arm == arm])
    }
    expected = median(means.values()) if budget.tokens is None and means else budget.tokens
    for arm, mean in means.items():
        if expected and abs(mean / expected - 1) > budget.tokens_within:
            reference = "the plan's" if budget.tokens is not None else "the median arm's"
            within = f"allowed: {budget.tokens_within:.0%}"
            yield arm, f"{mean:,.0f} tokens a job, {mean / expected - 1:+.0%} of {reference} {expected:,.0f} ({within})"


def _most_common(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
