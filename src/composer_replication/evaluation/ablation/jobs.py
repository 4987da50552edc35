"""Run all jobs of an experiment, each in a process of its own, seed by seed; an interrupted command resumes.

FOLDER/
    predictions.json       written before the first job
    jobs/ARM/SEED/         one job each; jobs/.shared is for all of them; not for a repository
    results.json           every unit of every finished job, the only input of tables and plots; published packed, as
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
# Jobs take seconds at least, so polling at this rate costs nothing that matters.
_POLL_S = 0.05
# Lines of a failed job's log that the console shows; enough for the end of a traceback.
_LAST_LINES = 12
# Jobs that a message lists by name.
_MAX_LISTED = 3
# "in /srv/run/log.txt: 3" -> "/srv/run/"; also "~/run/"; not "./a/b" or "a/b/c"
_FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^\s/:'\"]+/)+")


class JobKey(NamedTuple):
    """An arm and a seed: the identity of a job."""

    arm: str
    seed: int


class _FailedJob(NamedTuple):
    """A job that ended without a result, with the last lines of its log."""

    arm: str
    seed: int
    last_lines: list[str]


@dataclass(frozen=True, kw_only=True)
class AblationResults:
    """An experiment with its results so far: results.json."""

    frozen: _FrozenPlan
    results: Sequence[Result]
    failed: Sequence[_FailedJob] = ()

    @property
    def missing(self) -> list[JobKey]:
        """Jobs of the plan that have neither succeeded nor failed."""
        # Failed jobs are listed separately.
        known_keys = {JobKey(outcome.arm, outcome.seed) for outcome in (*self.results, *self.failed)}
        job_keys = (JobKey(arm, seed) for seed in self.frozen.experiment.seeds for arm in self.frozen.arms)
        return [job_key for job_key in job_keys if job_key not in known_keys]

    def of_arm(self, arm: str) -> list[Result]:
        return sorted((result for result in self.results if result.arm == arm), key=lambda result: result.seed)


@dataclass(frozen=True)
class JobCallbacks:
    """Callbacks: `begins(job, number done, number of all)`, `done(job, result)`, `failed(failure)`."""

    begins: Callable[[JobKey, int, int], None] = lambda _place, _done, _total: None
    done: Callable[[JobKey, Result], None] = lambda _place, _result: None
    failed: Callable[[_FailedJob], None] = lambda _failure: None


def job_keys_of(plan: AblationPlan, *, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[JobKey]:
    """Return the jobs of a plan, or some of them: the baseline's first, then seed by seed.

    With this order an interrupted run leaves jobs that can be compared. The first jobs have different seeds, so that
    parallel workers do not wait for what the jobs of one seed share.
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
        if _is_selected(arm, only) and _is_selected(seed, seeds)
    ]
    # sorted() is stable: within the baseline and the rest, the order by seeds remains.
    return sorted(job_keys, key=lambda job_key: job_key.arm != plan.experiment.baseline)


def _is_selected(value: Any, requested_values: Sequence[Any]) -> bool:
    return not requested_values or value in requested_values


def run_jobs(
    plan: AblationPlan,
    folder: Path,
    job_keys: Sequence[JobKey],
    *,
    workers: int = 1,
    listener: JobCallbacks | None = None,
) -> AblationResults:
    """Freeze the predictions, run the jobs that have no result yet, and update results.json after each."""
    observer, jobs = listener or JobCallbacks(), folder / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        check_ready(plan, folder)
        frozen = freeze(plan, folder, has_begun=_has_begun(folder))
        jobs.mkdir(exist_ok=True)
        atomic_write_text(jobs / ".gitignore", "*\n")  # weights and logs are not to be committed
        failures: dict[JobKey, _FailedJob] = {}
        for job_key, failure in _run_all(plan, jobs, job_keys, workers, observer):
            if failure is not None:
                failures[job_key] = failure
                observer.failed(failure)
            write_results(folder, frozen, failures)
        return write_results(folder, frozen, failures)


def check_ready(plan: AblationPlan, folder: Path) -> None:
    """Raise if a plan cannot be run in a folder: the folder belongs to another plan, or the world lacks something."""
    _check_no_results_are_lost(folder)
    _checked_predictions(plan, folder, has_begun=_has_begun(folder))
    check = getattr(world_of(plan.experiment.world), "check_plan", None)
    if check is not None:
        check(plan)


def _has_begun(folder: Path) -> bool:
    return any((folder / "jobs").glob(f"*/*/{JOB}"))


def _check_no_results_are_lost(folder: Path) -> None:
    """Raise if results.json has jobs that are not in the folder, as in a clone: rewriting it would lose them."""
    try:
        job_keys = [JobKey(result.arm, result.seed) for result in read_results(folder).results]
    except ArtefactNotFoundError:
        return
    except ArtefactCorruptError:
        if _has_begun(folder):
            return  # it can be rebuilt from its jobs
        raise
    lost = [job_key for job_key in job_keys if not (_folder(folder / "jobs", job_key) / JOB).is_file()]
    if lost:
        lost_names = ", ".join(f"{job_key.arm} {job_key.seed}" for job_key in lost[:_MAX_LISTED]) + (
            ", ..." if lost[_MAX_LISTED:] else ""
        )
        fix = "Use another folder (`-o FOLDER`), or only rebuild the table: `crf ablate --table -o FOLDER`."
        got = f"results of {len(lost)} jobs that are not in jobs/ ({lost_names})"
        raise RunError(
            explain(str(stored_path(folder / RESULTS)), got=got, expected="results of jobs that are here", fix=fix)
        )


def _run_all(
    plan: AblationPlan, jobs: Path, job_keys: Sequence[JobKey], workers: int, listener: JobCallbacks
) -> Iterator[tuple[JobKey, _FailedJob | None]]:
    """Yield each job when it ends, with its failure or None; jobs that have a result are skipped."""
    waiting = deque(job_key for job_key in job_keys if not (_folder(jobs, job_key) / RESULT).is_file())
    total, running = len(job_keys), dict[JobKey, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job_key = waiting.popleft()
                listener.begins(job_key, total - len(waiting) - len(running) - 1, total)
                running[job_key] = _start(_job(plan, jobs, job_key), workers)
            ended = [job_key for job_key, process in running.items() if process.poll() is not None]
            for job_key in ended:
                _close(running.pop(job_key))
                result = read_result(_folder(jobs, job_key))
                if result is not None:
                    listener.done(job_key, result)
                yield job_key, None if result is not None else _failure(jobs, job_key)
            if not ended:
                time.sleep(_POLL_S)
    finally:
        # Also after Ctrl-C: closing stdin ends the jobs, which resume next time.
        for process in running.values():
            _close(process)


def _job(plan: AblationPlan, jobs: Path, job_key: JobKey) -> Job:
    arm, experiment = plan.arms[job_key.arm], plan.experiment
    optimiser = replace(arm.config.train.optimiser, seed=job_key.seed)
    return Job(
        folder=_folder(jobs, job_key),
        arm=job_key.arm,
        seed=job_key.seed,
        world=experiment.world,
        config=replace(arm.config, train=replace(arm.config.train, optimiser=optimiser)),
        options=arm.options,
        budget=experiment.budget,
        run=None if experiment.run is None else Path(experiment.run),
    )


def _folder(jobs: Path, job_key: JobKey) -> Path:
    return jobs / job_key.arm / str(job_key.seed)


def _start(job: Job, workers: int) -> subprocess.Popen[bytes]:
    """Start the process of a job. It ends when this one does: its stdin is a pipe that only this process holds."""
    write_job(job)
    # Workers that each start a thread per core would slow each other down.
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


def _failure(jobs: Path, job_key: JobKey) -> _FailedJob:
    text = (_folder(jobs, job_key) / LOG).read_text(encoding="utf-8", errors="replace")
    return _FailedJob(job_key.arm, job_key.seed, [line for line in text.splitlines() if line.strip()][-_LAST_LINES:])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder for one command at a time."""
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


def write_results(folder: Path, frozen: _FrozenPlan, failures: dict[JobKey, _FailedJob]) -> AblationResults:
    """Write every finished job of the arms, whatever was requested this time, and one line for each failure of this
    time.
    """
    # Folders of arms that the plan no longer has are ignored.
    order = list(frozen.arms)
    job_results = [read_result(path.parent) for arm in order for path in (folder / "jobs" / arm).glob(f"*/{RESULT}")]
    results = sorted(
        (result for result in job_results if result), key=lambda result: (order.index(result.arm), result.seed)
    )
    all_results = AblationResults(frozen=frozen, results=results, failed=_without_folders(failures))
    record = {
        **frozen.as_json(),
        "results": [result.as_json() for result in results],
        "failed": [failure._asdict() for failure in all_results.failed],
    }
    atomic_write_json(folder / RESULTS, record)
    packed_path(folder / RESULTS).unlink(missing_ok=True)  # outdated by the plain file
    return all_results


def _without_folders(failures: dict[JobKey, _FailedJob]) -> list[_FailedJob]:
    """Return the failures with their last lines only, without the folders in paths: results are published."""
    lines = {
        job_key: [_FOLDERS.sub("", line) for line in failures[job_key].last_lines[-1:]] for job_key in sorted(failures)
    }
    return [failures[job_key]._replace(last_lines=lines[job_key]) for job_key in lines]


def read_results(folder: Path) -> AblationResults:
    """Return the content of results.json, plain or packed; nothing else is read."""
    path = stored_path(folder / RESULTS)
    if not path.is_file():
        fix = "Run `crf ablate --config arms.toml`, or name the folder: `-o FOLDER`."
        raise ArtefactNotFoundError(
            explain(str(path), got="no such file", expected="a file with the results of jobs", fix=fix)
        )

    def make(value: Mapping[str, Any]) -> AblationResults:
        return AblationResults(
            frozen=_FrozenPlan.from_json(value, str(path)),
            results=[Result.from_json(result) for result in value["results"]],
            failed=[_FailedJob(**failure) for failure in value["failed"]],
        )

    fix = "If its jobs are here, `crf ablate --config arms.toml` rebuilds it; otherwise restore the file."
    return read_record(path, make, expected="results of `crf ablate`", fix=fix)


# ---- predictions.json
# An arm keeps its prediction, its settings and the time at which they were frozen. Once there are jobs, a changed
# prediction, changed settings or a missing arm are refused; seeds may be added, and arms with a time of their own.

PREDICTIONS = "predictions.json"
_SCHEMA, _VERSION = "composer_replication.predictions", 1
# What an arm's digest covers besides its settings.
_PREDICTED = ("predict", "expect", "expect_control", "control_of", "exempt")
_PATH_OPTIONS = ("model", "run", "output")


@dataclass(frozen=True, kw_only=True)
class _Prediction:
    """An arm as it was frozen: description, prediction, and a digest of these with all its settings."""

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
    """An experiment as it was frozen: everything that a table needs besides the results."""

    experiment: Experiment
    metrics: Mapping[str, Metric]
    arms: Mapping[str, _Prediction]

    def compared_with(self, name: str) -> list[str]:
        """Return the arms that an arm is compared with: the baseline, then its controls."""
        controlled_arm = self.arms[name].control_of
        controls = [other_name for other_name, arm in self.arms.items() if arm.control_of == name]
        return [
            candidate
            for candidate in dict.fromkeys([self.experiment.baseline, *controls])
            if candidate not in (name, controlled_arm)
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "version": _VERSION,
            "experiment": _without_none(asdict(replace(self.experiment, run=None))),
            "metrics": {name: _without_none(asdict(metric)) for name, metric in self.metrics.items()},
            "arms": {name: asdict(arm) for name, arm in self.arms.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str) -> _FrozenPlan:
        check_schema(value, _SCHEMA, _VERSION)
        return cls(
            experiment=from_tables(Experiment, [(value["experiment"], where)]),
            metrics={name: from_tables(Metric, [(metric, where)]) for name, metric in value["metrics"].items()},
            arms={name: _Prediction(**arm) for name, arm in value["arms"].items()},
        )


def freeze(plan: AblationPlan, folder: Path, *, has_begun: bool) -> _FrozenPlan:
    """Write the predictions of a plan; once jobs exist, they must be those that are already written."""
    frozen = _checked_predictions(plan, folder, has_begun=has_begun)
    atomic_write_json(folder / PREDICTIONS, frozen.as_json())
    return frozen


def _checked_predictions(plan: AblationPlan, folder: Path, *, has_begun: bool) -> _FrozenPlan:
    """Return what `freeze` would write.

    Raises StaleArtefactError if jobs exist and the predictions have changed since, or were never written.
    """
    path, stamp = folder / PREDICTIONS, now()
    frozen = _FrozenPlan(
        experiment=plan.experiment,
        metrics=plan.metrics,
        arms={name: replace(_prediction(arm), frozen=stamp) for name, arm in plan.arms.items()},
    )
    expected = "what was written before the first job"
    if not path.is_file():
        if has_begun:
            fix = "Restore the file: a prediction that is written after the run proves nothing."
            raise StaleArtefactError(explain(str(path), got="no file, although jobs exist", expected=expected, fix=fix))
        return frozen
    mend = "Restore the file, or start over in another folder: `-o FOLDER`."
    before = read_record(path, lambda value: _FrozenPlan.from_json(value, str(path)), expected="predictions", fix=mend)
    changes = list(_changes(before, frozen))
    if has_begun and changes:
        fix = "Predictions cannot change once jobs exist. Use another folder for a new question: `-o FOLDER`."
        raise StaleArtefactError(explain(str(path), got="; ".join(changes), expected=expected, fix=fix))
    # An unchanged arm keeps the time at which it was frozen first.
    kept_arms = {name: arm for name, arm in before.arms.items() if _same(arm, frozen.arms.get(name))}
    return replace(frozen, arms={**frozen.arms, **kept_arms})


def _changes(before: _FrozenPlan, after: _FrozenPlan) -> Iterator[str]:
    """Yield a description of each change; new arms and seeds are no changes."""
    for key, value in vars(before.experiment).items():
        if key not in ("seeds", "run") and value != getattr(after.experiment, key):
            yield f"ablate.{key}: changed from {value!r} to {getattr(after.experiment, key)!r}"
    yield from (
        f"metrics.{name}: changed" for name in before.metrics if before.metrics[name] != after.metrics.get(name)
    )
    for name, arm in before.arms.items():
        now_is = after.arms.get(name)
        if now_is is None:
            yield f"arm {name!r} is missing (to skip an arm, use --only)"
        elif not _same(arm, now_is):
            keys = [key for key in _PREDICTED if getattr(arm, key) != getattr(now_is, key)]
            yield f"arm {name!r}: changed {' and '.join(keys) or 'settings'}"


def _same(before: _Prediction, after: _Prediction | None) -> bool:
    return after is not None and before.sha256 == after.sha256


def _prediction(arm: AblationArm) -> _Prediction:
    config = tomllib.loads(to_toml(arm.config))
    for option in _PATH_OPTIONS:  # paths are no settings: each result has the digests of its weights
        config["train"].pop(option, None)
    predicted_fields = {key: getattr(arm, key) for key in _PREDICTED}
    digest = hashlib.sha256(encode([predicted_fields, config, dict(arm.options)], where=arm.name)).hexdigest()
    return _Prediction(**predicted_fields, about=arm.about, settings=dict(arm.settings), sha256=digest)


def _without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record without unset options, as in TOML."""
    return {
        key: _without_none(child) if isinstance(child, dict) else child
        for key, child in value.items()
        if child is not None
    }


# ---- equal budgets
# Rollouts and optimizer steps have to be exactly those of the plan, and the same in all arms. Tokens depend on what a
# model writes: an arm's mean may differ from the plan's number, or from the median arm, by `tokens_within`.

Breaches = dict[str, list[str]]
"""By arm, a sentence for each inequality."""
# What a training controls exactly; tokens are compared with a tolerance.
_EXACT = ("rollouts", "steps")


def breaches_of(study: AblationResults) -> Breaches:
    """Return what makes arms incomparable; an arm that the plan exempts is checked for its units only."""
    breaches: Breaches = defaultdict(list)
    spending = [result for result in study.results if study.frozen.arms[result.arm].exempt is None]
    for result in study.results:
        breaches[result.arm] += _unit_breaches(result, study.results)
    for result in spending:
        breaches[result.arm] += _exact_breaches(result, study, spending)
        breaches[result.arm] += _start_breaches(result, spending)
    for arm, sentence in _token_breaches(study, spending):
        breaches[arm].append(sentence)
    return {arm: breaches[arm] for arm in study.frozen.arms if breaches[arm]}


def spent_by(results: Sequence[Result], name: str) -> list[float]:
    """Return what each of these jobs spent of one quantity."""
    return [getattr(result.spent, name) for result in results]


def _exact_breaches(result: Result, study: AblationResults, spending: Sequence[Result]) -> Iterator[str]:
    for name in _EXACT:
        spent, planned = getattr(result.spent, name), getattr(study.frozen.experiment.budget, name)
        usual = _most_common(spent_by(spending, name)) if planned is None else planned
        if spent != usual:
            whose = "the plan's" if planned is not None else "the others'"
            yield f"seed {result.seed}: {spent:,} {name}, {whose} are {usual:,}"


def _unit_breaches(result: Result, all_results: Sequence[Result]) -> Iterator[str]:
    units = _most_common([tuple(unit.unit for unit in other_result.units) for other_result in all_results])
    own_units = tuple(unit.unit for unit in result.units)
    if own_units != units:
        yield f"seed {result.seed}: other units than most jobs, {len(set(own_units) ^ set(units))} of them not in both"


def _start_breaches(result: Result, spending: Sequence[Result]) -> Iterator[str]:
    start_digests = [other_result.digests["start"] for other_result in spending if "start" in other_result.digests]
    if start_digests and result.digests.get("start") != _most_common(start_digests):
        yield f"seed {result.seed}: begins with other weights than most jobs"


def _token_breaches(study: AblationResults, spending: Sequence[Result]) -> Iterator[tuple[str, str]]:
    budget = study.frozen.experiment.budget
    means = {
        arm: fmean(spent_by(arm_results, "tokens"))
        for arm in study.frozen.arms
        if (arm_results := [result for result in spending if result.arm == arm])
    }
    usual = median(means.values()) if budget.tokens is None and means else budget.tokens
    for arm, mean in means.items():
        if usual and abs(mean / usual - 1) > budget.tokens_within:
            whose = "the plan's" if budget.tokens is not None else "the median arm's"
            within = f"allowed: {budget.tokens_within:.0%}"
            yield arm, f"{mean:,.0f} tokens a job, {mean / usual - 1:+.0%} of {whose} {usual:,.0f} ({within})"


def _most_common(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
