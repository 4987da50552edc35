"""The world of logged sessions: training on one shared run, evaluation by the log-prob metrics of `crf evaluate`.

Each job has a run directory with links to the records of the shared run. Arms with the same warm-up share it: for each
seed, one job runs the warm-up, the other jobs copy its checkpoint, and every job counts the steps of the warm-up as
spent. A unit is a held-out session: for each metric it holds the sum, over the session's error sites, of the changes in
log-probs from the initial model. A digest names the unit, because results are published and sessions are not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.atomic import atomic_write_bytes, link_or_copy, lock, staged_path
from composer_replication.canonical_json import encode
from composer_replication.config import CrfConfig
from composer_replication.config.schema import option, table
from composer_replication.errors import ConfigError, RunError, explain
from composer_replication.evaluation.ablation.job import Job, Result, Spent, Unit
from composer_replication.evaluation.ablation.plan import AblationPlan, Metric
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.directory import MARKER
from composer_replication.runs.journal import read_journal

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.output_folder import TrainingFolder
    from composer_replication.trainer.sessions.phases import TrainingCallbacks

METRICS = {
    "forced_gap": Metric(per="sites", better="up", label="good calls against errors, nats a token"),
    "forced_correction": Metric(per="corrections", better="up", label="right calls against errors, nats a token"),
    "forced_erring": Metric(per="sites", better="down", label="errors, nats a token"),
    "forced_good": Metric(per="sites", better="up", label="good calls, nats a token"),
}
# By metric: the name of its count of sites, where this is not "sites".
_COUNT_NAMES = {"forced_correction": "corrections"}
_SCORES = "scores.jsonl"
# The artifacts that trainings and evaluations read from a run.
_RECORDS = ("conversations", "session_sources", "tools", "split", "sites", "pairs")


@table("world")
class Options:
    """Options of this world in arms.toml."""

    share_warmup: bool = option(True, "Make the warm-up once per seed for all arms with the same warm-up settings.")


def check_plan(plan: AblationPlan) -> None:
    """Raise ConfigError or RunError if the run is missing from the plan or the disk, or lacks the split or sites."""
    run = _open_run(plan.experiment.run)
    for name in ("split", "sites"):
        if not run.path(name).is_file():
            fix = f"Run `{ARTEFACTS[name].command} {run.root}` first."
            raise RunError(
                explain(str(run.root), got=f"a run without {name}", expected="a run with split and sites", fix=fix)
            )


def run_job(job: Job) -> Result:
    """Train and evaluate, and return the sums of each held-out session.

    A job that an earlier process began is resumed.
    """
    from composer_replication.trainer.from_config.output_folder import TrainingFolder
    from composer_replication.trainer.from_config.train_run import train
    from composer_replication.trainer.sessions.phases import TrainingCallbacks

    began = time.monotonic()
    run = linked_run(_open_run(job.run), job.folder / "run")
    config = replace(job.config, train=replace(job.config.train, run=str(run.root), output=None))
    folder = TrainingFolder.of(config)
    with _SharedWarmup(job, config, folder) as shared:
        progress = TrainingCallbacks(say=_log, on_step=lambda _step, _total: shared.publish())
        trained = train(config, run, must_fit=False, progress=progress)
    if trained.saved is None:
        got = f"a training stopped by {trained.stopped_by}"
        raise RunError(explain(str(job.folder), got=got, expected="a finished training"))
    record = _evaluate(job, config, run, trained.saved, progress)
    warmup = _lines(folder.warmup / "metrics.jsonl") if trained.warmup_steps else []
    lines = [line for line in _lines(folder.metrics) if "loss/total" in line]
    result = Result(
        arm=job.arm,
        seed=job.seed,
        world=job.world,
        spent=Spent(
            tokens=round(sum(line.get("tokens", 0.0) * config.train.log_every for line in (*warmup, *lines))),
            steps=trained.steps + trained.warmup_steps,
            seconds=round(time.monotonic() - began, 1),
        ),
        units=_scored_units(run, record["drops"]),
        curve=[_point(line, trained.warmup_steps) for line in lines],
        digests={"start": record["models"]["before"]["digest"], "trained": record["models"]["after"]["digest"]},
        config_sha256=job.config_sha256,
    )
    shutil.rmtree(folder.checkpoints)  # only weights and rows are needed later
    return result


def _evaluate(job: Job, config: CrfConfig, run: RunDir, weights: Path, progress: TrainingCallbacks) -> dict[str, Any]:
    """Evaluate the trained model and return the record.

    The first job scores the initial model, and the others reuse its scores.
    """
    from composer_replication.evaluation.evaluate import evaluate

    job_scores, shared_scores = job.folder / _SCORES, job.shared / _SCORES
    if shared_scores.is_file() and not job_scores.exists():
        shutil.copyfile(shared_scores, job_scores)  # a copy, not a link, because it will be written to
    record = evaluate(config, run, before=config.train.model, after=str(weights), progress=progress, scores=job_scores)
    # If two jobs write this file, both write the same scores.
    if not shared_scores.exists():
        shared_scores.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(shared_scores, job_scores.read_bytes())
    job_scores.unlink()
    return record


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _open_run(path: str | Path | None) -> RunDir:
    if path is None:
        fix = "Name a run with `crf ablate --run RUN` or in ablate.run."
        raise ConfigError(explain("ablate.run", got="none", expected="a run with split and sites", fix=fix))
    return RunDir.open(path)


def linked_run(shared: RunDir, folder: Path) -> RunDir:
    """Return a run directory for one job, with links to the records of the shared run, which no job writes to."""
    folder.mkdir(exist_ok=True)
    for artefact in (ARTEFACTS[name] for name in _RECORDS):
        for name in (artefact.file_name, artefact.sidecar_name):
            if (shared.root / name).is_file() and not (folder / name).exists():
                link_or_copy(shared.root / name, folder / name)
    if not (folder / MARKER).exists():
        shutil.copyfile(shared.root / MARKER, folder / MARKER)
    return RunDir.open(folder)


# ---- shared warm-up


class _SharedWarmup:
    """Context manager that lets jobs share one warm-up.

    It copies the warm-up of an earlier job. If there is none, it makes other jobs wait while this job runs it.
    `publish` releases the waiting jobs as soon as the warm-up has finished.
    """

    def __init__(self, job: Job, config: CrfConfig, folder: TrainingFolder) -> None:
        self._is_shared = bool(job.options.get("share_warmup", True)) and config.train.warmup.mode != "off"
        self._shared, self._own = job.shared / f"warmup-{_warmup_key(config)}", folder.warmup
        self._lock: int | None = None

    def __enter__(self) -> _SharedWarmup:
        if self._is_shared:
            self._shared.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._shared.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
            # Blocks until the job that runs the warm-up publishes it or ends.
            lock(self._lock, exclusive=True)
            if self._shared.is_dir():
                self._release()
                if not self._own.exists():
                    _copy(self._shared, self._own)
        return self

    def publish(self) -> None:
        """Publish the warm-up if it has finished and has not been published yet."""
        from composer_replication.trainer.warmup import FinishedWarmUp

        if self._lock is not None and FinishedWarmUp.read(self._own) is not None:
            _copy(self._own, self._shared)
            self._release()

    def __exit__(self, *_: object) -> None:
        self.publish()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _warmup_key(config: CrfConfig) -> str:
    """Return a digest of the settings that a warm-up depends on.

    When a job copies a warm-up, its weights and data are compared as well.
    """
    train = asdict(config.train)
    names = ("model", "adapter", "batch", "warmup", "optimiser", "save")
    settings = {name: train[name] for name in names} | {"good": train["channels"]["work_failures"]}
    # The number of training steps does not affect the warm-up.
    settings["optimiser"].pop("steps")
    return hashlib.sha256(encode([settings, asdict(config.render)], where="warm-up")).hexdigest()[:16]


def _copy(source: Path, target: Path) -> None:
    with staged_path(target) as unfinished:
        shutil.copytree(source, unfinished, copy_function=link_or_copy)


# ---- results


def _scored_units(run: RunDir, drops: Mapping[str, int]) -> list[Unit]:
    """Return the units of a run, or raise RunError if there are none."""
    units = _session_units(run)
    if not units:
        left_out = ", ".join(f"{reason} {number}" for reason, number in drops.items()) or "none"
        fix = "Hold out more sessions (`crf split RUN --set split.test=0.4`), or increase evaluation.context."
        got = f"no error in the held-out sessions that can be scored (left out: {left_out})"
        raise RunError(explain(str(run.root), got=got, expected="at least one", fix=fix))
    return units


def _session_units(run: RunDir) -> list[Unit]:
    """Return the held-out sessions with the log-prob metrics summed over their error sites, in total and by kind."""
    from composer_replication.evaluation.figures import forced_values
    from composer_replication.runs.files import ROWS_VERSION

    rows = list(run.read_jsonl("evaluated", schema="evaluated", version=ROWS_VERSION))
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, values in forced_values(rows).items():
        count_name = _COUNT_NAMES.get(name, "sites" if name == "forced_erring" else None)
        for value in values:
            for suffix in ("", f":{value.kind}"):
                sums[value.session][name + suffix] += value.change["after"]
                if count_name is not None:
                    sums[value.session][count_name + suffix] += 1
    units = [Unit(_digest(session), dict(sorted(session_sums.items()))) for session, session_sums in sums.items()]
    return sorted(units, key=lambda unit: unit.unit)


def _digest(session: str) -> str:
    return hashlib.sha256(session.encode()).hexdigest()[:16]


def _lines(path: Path) -> list[Mapping[str, Any]]:
    return list(read_journal(path).rows) if path.exists() else []


def _point(line: Mapping[str, Any], warmup_steps: int) -> dict[str, float]:
    names = ("loss/total", "loss/lm_ce", "loss/sdpo_kl", "loss/trace_replay_dpo", "grad_norm")
    metrics = {name: line[name] for name in names if isinstance(line.get(name), int | float)}
    return {"step": warmup_steps + line["step"], **metrics}
