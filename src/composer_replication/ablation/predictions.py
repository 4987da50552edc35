"""What was predicted, frozen before the first job: predictions.json of an experiment's folder.

An arm keeps its prediction, its settings and the time at which they were written. Once there are jobs, another
prediction, other settings or an arm that is gone are refused; seeds may be added, and arms with a time of their own.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.ablation.plan import Arm, Experiment, Metric, Plan
from composer_replication.ablation.record_files import check_schema, read_record
from composer_replication.atomic import atomic_write_json
from composer_replication.canonical_json import encode
from composer_replication.config.loader import from_tables
from composer_replication.config.writer import to_toml
from composer_replication.errors import StaleArtefactError, explain
from composer_replication.runs.sidecar import now

PREDICTIONS = "predictions.json"
_SCHEMA, _VERSION = "composer_replication.predictions", 1
_PREDICTED = ("predict", "expect", "expect_control", "control_of", "exempt")
_PLACES = ("model", "run", "output")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An arm as it was frozen: what it is, what was predicted, and a digest of both with all its settings."""

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
class Frozen:
    """An experiment as it was frozen: all that a table needs besides the results."""

    experiment: Experiment
    metrics: Mapping[str, Metric]
    arms: Mapping[str, Prediction]

    def compared_with(self, name: str) -> list[str]:
        """The arms that this one is compared with: the baseline, then its controls."""
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
    def from_json(cls, value: Mapping[str, Any], where: str) -> Frozen:
        check_schema(value, _SCHEMA, _VERSION)
        return cls(
            experiment=from_tables(Experiment, [(value["experiment"], where)]),
            metrics={name: from_tables(Metric, [(metric, where)]) for name, metric in value["metrics"].items()},
            arms={name: Prediction(**arm) for name, arm in value["arms"].items()},
        )


def freeze(plan: Plan, folder: Path, *, has_begun: bool) -> Frozen:
    """Write the predictions of a plan, or hold it against those that are there once jobs have begun."""
    frozen = held_against(plan, folder, has_begun=has_begun)
    atomic_write_json(folder / PREDICTIONS, frozen.as_json())
    return frozen


def held_against(plan: Plan, folder: Path, *, has_begun: bool) -> Frozen:
    """What `freeze` would write: StaleArtefactError where jobs have begun with other predictions, or with none."""
    path, stamp = folder / PREDICTIONS, now()
    frozen = Frozen(
        experiment=plan.experiment,
        metrics=plan.metrics,
        arms={name: replace(_prediction(arm), frozen=stamp) for name, arm in plan.arms.items()},
    )
    expected = "what was written before the first job"
    if not path.is_file():
        if has_begun:
            fix = "Put the file back; predictions that are written now would be of jobs that are done."
            raise StaleArtefactError(explain(str(path), got="no file, and jobs", expected=expected, fix=fix))
        return frozen
    mend = "Put the file back as it was, or begin anew in another folder: `-o FOLDER`."
    before = read_record(path, lambda value: Frozen.from_json(value, str(path)), expected="predictions", fix=mend)
    changes = list(_changes(before, frozen))
    if has_begun and changes:
        fix = "What has begun keeps its predictions. Ask something else in another folder: `-o FOLDER`."
        raise StaleArtefactError(explain(str(path), got="; ".join(changes), expected=expected, fix=fix))
    kept_arms = {name: arm for name, arm in before.arms.items() if _same(arm, frozen.arms.get(name))}
    return replace(frozen, arms={**frozen.arms, **kept_arms})


def _changes(before: Frozen, after: Frozen) -> Iterator[str]:
    """What is another now, in words; arms and seeds that are new are none of it."""
    for key, value in vars(before.experiment).items():
        if key not in ("seeds", "run") and value != getattr(after.experiment, key):
            yield f"ablate.{key}: {getattr(after.experiment, key)!r} where {value!r} was"
    yield from (
        f"metrics.{name}: another" for name in before.metrics if before.metrics[name] != after.metrics.get(name)
    )
    for name, arm in before.arms.items():
        now_is = after.arms.get(name)
        if now_is is None:
            yield f"arm {name!r} is gone (--only leaves arms out of a run)"
        elif not _same(arm, now_is):
            keys = [key for key in _PREDICTED if getattr(arm, key) != getattr(now_is, key)]
            yield f"arm {name!r}: another {' and '.join(keys) or 'setting'}"


def _same(before: Prediction, after: Prediction | None) -> bool:
    return after is not None and before.sha256 == after.sha256


def _prediction(arm: Arm) -> Prediction:
    config = tomllib.loads(to_toml(arm.config))
    for option in _PLACES:  # where weights and sessions lie is no setting: what they are, each result says
        config["train"].pop(option, None)
    predicted_fields = {key: getattr(arm, key) for key in _PREDICTED}
    digest = hashlib.sha256(encode([predicted_fields, config, dict(arm.options)], where=arm.name)).hexdigest()
    return Prediction(**predicted_fields, about=arm.about, settings=dict(arm.settings), sha256=digest)


def _without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """Unset options left out, as in TOML."""
    return {
        key: _without_none(child) if isinstance(child, dict) else child
        for key, child in value.items()
        if child is not None
    }
