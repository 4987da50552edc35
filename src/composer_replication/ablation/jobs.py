"""All jobs of an experiment: each in a process of its own, seed by seed, going on where an earlier command was killed.

FOLDER/
    predictions.json       written before the first job
    jobs/ARM/SEED/         one job each; jobs/.shared is what they have in common; not for a repository
    results.json           every unit of every finished job: tables and plots are made of it alone; published packed, as
                           results.columns.json.xz (`record_files`)
    table.md  plots/       made by `table` and `plots`
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.ablation.job import JOB, LOG, RESULT, Job, Result, read_result, write_job
from composer_replication.ablation.plan import Plan, world_of
from composer_replication.ablation.predictions import Frozen, freeze, held_against
from composer_replication.ablation.record_files import packed_path, read_record, stored_path
from composer_replication.atomic import atomic_write_json, atomic_write_text, try_lock
from composer_replication.errors import (
    ArtefactCorruptError,
    ArtefactNotFoundError,
    InputError,
    RunError,
    explain,
)

RESULTS = "results.json"
_POLL_S = 0.05
_LAST_LINES = 12
_NAMED = 3
_FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^\s/:'\"]+/)+")


class Place(NamedTuple):
    """Which job: an arm and a seed."""

    arm: str
    seed: int


class Failure(NamedTuple):
    """A job that ended without a result, and the last lines that it said."""

    arm: str
    seed: int
    last_lines: list[str]


@dataclass(frozen=True, kw_only=True)
class Results:
    """An experiment with what has come of it so far: results.json."""

    frozen: Frozen
    results: Sequence[Result]
    failed: Sequence[Failure] = ()

    @property
    def missing(self) -> list[Place]:
        """Jobs of the plan that have neither a result nor failed."""
        known_keys = {Place(outcome.arm, outcome.seed) for outcome in (*self.results, *self.failed)}
        job_keys = (Place(arm, seed) for seed in self.frozen.experiment.seeds for arm in self.frozen.arms)
        return [job_key for job_key in job_keys if job_key not in known_keys]

    def of_arm(self, arm: str) -> list[Result]:
        return sorted((result for result in self.results if result.arm == arm), key=lambda result: result.seed)


@dataclass(frozen=True)
class Listener:
    """Whom to tell: that a job begins, that it is done, that it failed; with how many are done of how many."""

    begins: Callable[[Place, int, int], None] = lambda _place, _done, _total: None
    done: Callable[[Place, Result], None] = lambda _place, _result: None
    failed: Callable[[Failure], None] = lambda _failure: None


def places_of(plan: Plan, *, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Place]:
    """The jobs of a plan, or some of them: the baseline, then seed by seed. What a killed run leaves can be compared.

    The first jobs are of different seeds: what the jobs of a seed share is made by one of them, and the others wait.
    """
    for name, requested_values, planned_values in (("--only", only, plan.arms), ("--seeds", seeds, plan.seeds)):
        for value in requested_values:
            if value not in planned_values:
                expected = f"some of {', '.join(map(str, planned_values))}"
                raise InputError(explain(name, got=repr(value), expected=expected))
    job_keys = [Place(arm, seed) for seed in plan.seeds for arm in plan.arms if _is(arm, only) and _is(seed, seeds)]
    return sorted(job_keys, key=lambda job_key: job_key.arm != plan.experiment.baseline)


def _is(value: Any, requested_values: Sequence[Any]) -> bool:
    return not requested_values or value in requested_values


def run_jobs(
    plan: Plan, folder: Path, places: Sequence[Place], *, workers: int = 1, listener: Listener | None = None
) -> Results:
    """Freeze the predictions, run the jobs that have no result yet, and keep results.json up to date with each."""
    observer, jobs = listener or Listener(), folder / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder):
        check_ready(plan, folder)
        frozen = freeze(plan, folder, has_begun=_has_begun(folder))
        jobs.mkdir(exist_ok=True)
        atomic_write_text(jobs / ".gitignore", "*\n")  # weights and logs are no part of what is committed
        failures: dict[Place, Failure] = {}
        for job_key, failure in _run_all(plan, jobs, places, workers, observer):
            if failure is not None:
                failures[job_key] = failure
                observer.failed(failure)
            write_results(folder, frozen, failures)
        return write_results(folder, frozen, failures)


def check_ready(plan: Plan, folder: Path) -> None:
    """Raise where a plan cannot be run in a folder: what is there is another's, or the world lacks something."""
    _check_nothing_is_lost(folder)
    held_against(plan, folder, has_begun=_has_begun(folder))
    check = getattr(world_of(plan.experiment.world), "check_plan", None)
    if check is not None:
        check(plan)


def _has_begun(folder: Path) -> bool:
    return any((folder / "jobs").glob(f"*/*/{JOB}"))


def _check_nothing_is_lost(folder: Path) -> None:
    """results.json is made of the jobs in the folder: without them, as in a clone, it would be emptied."""
    try:
        job_keys = [Place(result.arm, result.seed) for result in read_results(folder).results]
    except ArtefactNotFoundError:
        return
    except ArtefactCorruptError:
        if _has_begun(folder):
            return  # its jobs make it anew
        raise
    lost = [job_key for job_key in job_keys if not (_folder(folder / "jobs", job_key) / JOB).is_file()]
    if lost:
        lost_names = ", ".join(f"{job_key.arm} {job_key.seed}" for job_key in lost[:_NAMED]) + (
            ", ..." if lost[_NAMED:] else ""
        )
        fix = "Run the plan in another folder: `-o FOLDER`. The table alone: `crf ablate --table -o FOLDER`."
        got = f"results of {len(lost)} jobs that are not in jobs/ ({lost_names})"
        raise RunError(
            explain(str(stored_path(folder / RESULTS)), got=got, expected="results of jobs that are here", fix=fix)
        )


def _run_all(
    plan: Plan, jobs: Path, job_keys: Sequence[Place], workers: int, listener: Listener
) -> Iterator[tuple[Place, Failure | None]]:
    """Each job as it ends; those that were done before are passed over."""
    waiting = deque(job_key for job_key in job_keys if not (_folder(jobs, job_key) / RESULT).is_file())
    total, running = len(job_keys), dict[Place, subprocess.Popen[bytes]]()
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
        for process in running.values():
            _close(process)


def _job(plan: Plan, jobs: Path, job_key: Place) -> Job:
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


def _folder(jobs: Path, job_key: Place) -> Path:
    return jobs / job_key.arm / str(job_key.seed)


def _start(job: Job, workers: int) -> subprocess.Popen[bytes]:
    """A process that writes to the job's log, and ends when we do: its stdin is a pipe that only we hold."""
    write_job(job)
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", **os.environ}
    command = [sys.executable, "-m", "composer_replication.ablation.job", str(job.folder), "--tied"]
    with (job.folder / LOG).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 (our own module, no shell)
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
        )


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.wait()


def _failure(jobs: Path, job_key: Place) -> Failure:
    text = (_folder(jobs, job_key) / LOG).read_text(encoding="utf-8", errors="replace")
    return Failure(job_key.arm, job_key.seed, [line for line in text.splitlines() if line.strip()][-_LAST_LINES:])


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """For one command at a time."""
    descriptor = os.open(folder / ".ablate.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not try_lock(descriptor):
            fix = "Wait until it is done, or choose another folder: `-o FOLDER`."
            got = "another `crf ablate` at work in it"
            raise RunError(explain(str(folder), got=got, expected="the folder for itself", fix=fix))
        yield
    finally:
        os.close(descriptor)


# ---- results.json


def write_results(folder: Path, frozen: Frozen, failures: dict[Place, Failure]) -> Results:
    """Every finished job of the arms, whatever was asked for this time; and what failed this time, in a line each."""
    order = list(frozen.arms)
    job_results = [read_result(path.parent) for arm in order for path in (folder / "jobs" / arm).glob(f"*/{RESULT}")]
    results = sorted(
        (result for result in job_results if result), key=lambda result: (order.index(result.arm), result.seed)
    )
    all_results = Results(frozen=frozen, results=results, failed=_short(failures))
    record = {
        **frozen.as_json(),
        "results": [result.as_json() for result in results],
        "failed": [failure._asdict() for failure in all_results.failed],
    }
    atomic_write_json(folder / RESULTS, record)
    packed_path(folder / RESULTS).unlink(missing_ok=True)  # it has become the older of the two
    return all_results


def _short(failures: dict[Place, Failure]) -> list[Failure]:
    """The last line of each, without the folders that a path in it names: results are published."""
    lines = {
        job_key: [_FOLDERS.sub("", line) for line in failures[job_key].last_lines[-1:]] for job_key in sorted(failures)
    }
    return [failures[job_key]._replace(last_lines=lines[job_key]) for job_key in lines]


def read_results(folder: Path) -> Results:
    """Return what results.json holds, plain or packed; nothing else is read."""
    path = stored_path(folder / RESULTS)
    if not path.is_file():
        fix = "Run `crf ablate --config arms.toml`, or name the folder: `-o FOLDER`."
        raise ArtefactNotFoundError(explain(str(path), got="no such file", expected="results of jobs", fix=fix))

    def make(value: Mapping[str, Any]) -> Results:
        return Results(
            frozen=Frozen.from_json(value, str(path)),
            results=[Result.from_json(result) for result in value["results"]],
            failed=[Failure(**failure) for failure in value["failed"]],
        )

    fix = "Where its jobs are, `crf ablate --config arms.toml` makes it anew; else put the file back as it was."
    return read_record(path, make, expected="results of `crf ablate`", fix=fix)
