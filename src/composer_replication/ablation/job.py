"""One job: an arm with a seed, in a folder of its own. `python -m composer_replication.ablation.job FOLDER` runs it.

    job.json      what is to be done: world, settings, seed
    log.txt       what was said on the way
    result.json   what came of it, written whole and last: a job with one is done

A world goes on with what an earlier process left in the folder. A job ends with whoever started it.
"""

from __future__ import annotations

import os
import sys
import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.ablation.plan import Budget, world_of
from composer_replication.ablation.record_files import check_schema, read_record
from composer_replication.atomic import atomic_write_json, lock
from composer_replication.config import CrfConfig, config_hash, to_toml
from composer_replication.config.loader import from_tables
from composer_replication.errors import ComposerError

JOB, RESULT, LOG = "job.json", "result.json", "log.txt"
_SCHEMA, _VERSION = "composer_replication.ablation_job", 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a world is given. `config` has the job's seed; `shared` is a folder that all jobs of an experiment have."""

    folder: Path
    arm: str
    seed: int
    world: str
    config: CrfConfig
    options: Mapping[str, Any]
    budget: Budget
    run: Path | None = None

    @property
    def shared(self) -> Path:
        """Never removed while jobs run; whoever writes there writes whole files or folders, under a lock."""
        return self.folder.parents[1] / ".shared"

    @property
    def config_sha256(self) -> str:
        """Of all settings but places: the same weights may lie elsewhere on another machine."""
        return config_hash(replace(self.config, train=replace(self.config.train, model=None, run=None, output=None)))


class Spent(NamedTuple):
    """What a job used: sampled rollouts, tokens, optimiser steps (a warm-up's too), and seconds."""

    rollouts: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


class Unit(NamedTuple):
    """A held-out task or session: sums and counts, of which figures are made (`plan.Metric`)."""

    unit: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a job. `curve` has a point a step or so: `rollouts`, `step` and figures; `digests` say of what."""

    arm: str
    seed: int
    world: str
    spent: Spent
    units: Sequence[Unit]
    curve: Sequence[Mapping[str, float]] = ()
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    config_sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["spent"] = self.spent._asdict()
        record["units"] = [{"unit": unit.unit, "metrics": dict(unit.metrics)} for unit in self.units]
        return record

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        """The result that `as_json` wrote."""
        units = [Unit(str(unit["unit"]), dict(unit["metrics"])) for unit in value["units"]]
        fields = {name: value[name] for name in ("arm", "seed", "world", "curve", "digests", "config_sha256")}
        return cls(spent=Spent(**value["spent"]), units=units, **fields)


def write_job(job: Job) -> None:
    """`job.json` of a folder, which is made."""
    job.folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "arm": job.arm,
        "seed": job.seed,
        "world": job.world,
        "options": dict(job.options),
        "budget": asdict(job.budget),
        "run": None if job.run is None else str(job.run.absolute()),
        "config_sha256": job.config_sha256,
        "config": tomllib.loads(to_toml(job.config)),
    }
    atomic_write_json(job.folder / JOB, record)


def read_job(folder: Path) -> Job:
    """The job of a folder."""
    path = folder / JOB

    def make(record: Mapping[str, Any]) -> Job:
        check_schema(record, _SCHEMA, _VERSION)
        return Job(
            folder=folder,
            config=from_tables(CrfConfig, [(record["config"], f"{path}, config")]),
            options=record["options"],
            budget=from_tables(Budget, [(_set(record["budget"]), f"{path}, budget")]),
            run=None if record["run"] is None else Path(record["run"]),
            **{name: record[name] for name in ("arm", "seed", "world")},
        )

    return read_record(path, make, expected="a job", fix="`crf ablate --config arms.toml` writes it anew.")


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def read_result(folder: Path) -> Result | None:
    """What came of a job; None where it is not done."""
    path = folder / RESULT
    if not path.is_file():
        return None
    return read_record(path, Result.from_json, expected="a job's result", fix="Remove it, and the job is done again.")


def run_in(folder: Path) -> Result:
    """Do the job of a folder, or go on with it; done already, its result is given."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(descriptor, exclusive=True)  # one that outlived its starter for a moment is waited for
        earlier_result = read_result(folder)
        if earlier_result is not None:
            return earlier_result
        job = read_job(folder)
        result: Result = world_of(job.world).run_job(job)
        atomic_write_json(folder / RESULT, result.as_json())
        return result
    finally:
        os.close(descriptor)


def _end_with_parent() -> None:
    """Our stdin is a pipe that its starter never writes to: at its end the starter is gone, however it went."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """`FOLDER [--tied]`: tied, it ends when its stdin does."""
    if "--tied" in arguments[1:]:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_in(Path(arguments[0]))
    except ComposerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
