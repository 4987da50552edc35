"""Read and check arms.toml, which describes an experiment.

[ablate]            question, world, seeds, baseline, primary metric, budget
[base]              settings that all arms share, in the format of crf.toml
[world]             options of the world, for all arms
[metrics.NAME]      how a metric is computed from the units' sums: `of` / `per` * `times`
[arms.NAME]         about, predict, expect, control_of; settings of this arm in .set and .world
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from composer_replication.canonical_json import nested_items
from composer_replication.config import CrfConfig
from composer_replication.config.loader import from_tables, load
from composer_replication.config.presets import tables_with_preset
from composer_replication.config.schema import option, section, table
from composer_replication.errors import ConfigError, explain

WORLDS = ("workspace", "logs")
Direction = Literal["up", "down"]
_Word = Literal["better", "worse", "same"]
# Names that are safe as folder names: "with-hints_2"; not "With hints" or "-hints"
_ARM_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@table("ablate.budget")
class Budget:
    """What every arm may spend in total with each seed."""

    rollouts: int | None = option(None, "Rollouts that a job samples for training. Unset: not compared.", at_least=0)
    steps: int | None = option(None, "Optimizer steps of a job, including its warm-up.", at_least=0)
    tokens: int | None = option(None, "Tokens of a job. Unset: arms are compared with each other only.", at_least=0)
    tokens_within: float = option(
        0.25, "Maximum share by which an arm's tokens may differ from the budget, or from the median arm.", above=0
    )


@table("metrics.NAME")
class Metric:
    """A metric: the sum of `of` over units, divided by the sum of `per` or the number of units, multiplied by
    `times`.
    """

    of: str = option("", "Name of the sum. Empty: the metric's own name.")
    per: str | None = option(None, "Name of the denominator. Unset: the number of units.")
    times: float = option(1.0, "Factor, such as 100 for a percentage.", above=0)
    better: Direction | None = option(None, "Better direction. Unset: the metric is only shown.")
    label: str = option("", "Label in the table.")


@table("ablate")
class Experiment:
    """An experiment: its question, and the world, seeds, baseline, metric and budget that will answer it."""

    question: str = option("", "The question, in one sentence.")
    world: str = option("logs", "World that runs the jobs: workspace, logs (logged sessions), or a module of your own.")
    seeds: tuple[int, ...] = option((1, 2, 3), "Seeds; every arm is trained with each of them.", at_least=0)
    baseline: str = option("", "Arm that all others are compared with.")
    primary: str = option("", "Metric that the verdict is about.")
    primary_direction: Direction = option("down", "Better direction of the primary metric.")
    run: str | None = option(None, "World logs: a run with split, sites and pairs.")
    reach: dict[str, float] = option({}, "Value that each curve should reach; the table says at which rollout it did.")
    budget: Budget = section(Budget, "What every arm may spend.")


@table("arms.NAME")
class _ArmTable:
    """The table of one arm, as written in arms.toml."""

    about: str = option("", "What this arm does, in one sentence.")
    predict: str = option("", "Prediction in one sentence, written before the run.")
    expect: _Word | None = option(None, "Prediction for the primary metric, compared with the baseline.")
    expect_control: _Word | None = option(
        None, "Prediction for the primary metric, compared with the controls of this arm."
    )
    control_of: str | None = option(None, "Arm that this one is the control of.")
    exempt: str | None = option(None, "Why the budget does not apply to this arm; shown in the table.")
    set: dict[str, object] = option({}, "Settings of this arm over [base], as nested tables of crf.toml.")
    world: dict[str, object] = option({}, "Options of the world for this arm, over [world].")


@table("")
class _ArmsFile:
    """The content of arms.toml."""

    ablate: Experiment = section(Experiment, "The question, and what answers it.")
    base: dict[str, object] = option({}, "Settings that all arms share.")
    world: dict[str, object] = option({}, "Options of the world for all arms.")
    metrics: dict[str, object] = option({}, "How metrics are computed from the units' sums.")
    arms: dict[str, object] = option({}, "The arms, by name.")


@dataclass(frozen=True, kw_only=True)
class AblationArm:
    """An arm with its resolved settings, and its options for the world."""

    name: str
    about: str
    predict: str
    expect: str | None
    expect_control: str | None
    control_of: str | None
    exempt: str | None
    config: CrfConfig
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    """The settings that the file has for this arm only, by dotted keys."""


@dataclass(frozen=True, kw_only=True)
class AblationPlan:
    """An experiment that can be run: its question, metrics and arms."""

    experiment: Experiment
    metrics: Mapping[str, Metric]
    arms: Mapping[str, AblationArm]

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.experiment.seeds


def world_of(name: str) -> Any:
    """Return the module of a world, which runs the jobs.

    The module must have `Options` (a table of its options), `METRICS` and `run_job(job) -> Result`. It may have
    `check_plan(plan)`, which raises an exception if no job could run. It should import heavy packages only inside
    `run_job`. Raises ConfigError if the module does not exist or lacks one of these names.
    """
    expected = f"{', '.join(WORLDS)}, or a module with Options, METRICS and run_job"
    try:
        module = import_module(f"composer_replication.evaluation.ablation.{name}" if name in WORLDS else name)
    except (ImportError, ValueError) as error:
        raise ConfigError(explain("ablate.world", got=f"{name!r} ({error})", expected=expected)) from error
    missing = [attribute for attribute in ("Options", "METRICS", "run_job") if not hasattr(module, attribute)]
    if missing:
        raise ConfigError(explain("ablate.world", got=f"{name!r} without {' and '.join(missing)}", expected=expected))
    return module


def read_plan(path: Path, overrides: Sequence[str] = (), *, run: str | None = None) -> AblationPlan:
    """Read a plan from a file and return it.

    `overrides` are settings for all arms, and `run` is the run directory for the world of logged sessions. Both take
    precedence over the file. Raises ConfigError if the file is not valid.
    """
    file = load(_ArmsFile, path)
    where = f"config file {path}"
    experiment = file.ablate if run is None else replace(file.ablate, run=run)
    world = world_of(experiment.world)
    arms = {name: _read_arm(name, value, file, world.Options, where, overrides) for name, value in file.arms.items()}
    metrics = dict(world.METRICS) | {
        name: from_tables(Metric, [(_check_table(value, f"metrics.{name}", where), f"{where}, [metrics.{name}]")])
        for name, value in file.metrics.items()
    }
    primary = experiment.primary
    _check_primary(primary, metrics, f"{where}: ablate.primary")
    # The primary metric may be one for a single kind of error, which has no entry yet.
    metrics[primary] = replace(metrics.get(primary, Metric()), better=experiment.primary_direction)
    plan = AblationPlan(experiment=experiment, metrics=metrics, arms=arms)
    _check_plan(plan, where)
    return plan


def _read_arm(
    name: str, value: object, file: _ArmsFile, options: type[Any], where: str, overrides: Sequence[str]
) -> AblationArm:
    location = f"{where}, [arms.{name}]"
    if not _ARM_NAME.fullmatch(name):
        got, expected = repr(name), "lowercase letters, digits, - and _ (it names a folder)"
        raise ConfigError(explain(f"{location}: name", got=got, expected=expected))
    arm = from_tables(_ArmTable, [(_check_table(value, f"arms.{name}", where), location)])
    for key in ("about", "predict"):
        if not getattr(arm, key).strip():
            fix = "Write it before the run; a later prediction proves nothing." if key == "predict" else ""
            raise ConfigError(explain(f"{location}: {key}", got="nothing", expected="a sentence", fix=fix))
    tables = [(file.base, f"{where}, [base]"), (arm.set, f"{where}, [arms.{name}.set]")]
    # Later tables take precedence.
    world_tables = [(file.world, f"{where}, [world]"), (arm.world, f"{where}, [arms.{name}.world]")]
    return AblationArm(
        name=name,
        about=arm.about,
        predict=arm.predict,
        expect=arm.expect,
        expect_control=arm.expect_control,
        control_of=arm.control_of,
        exempt=arm.exempt,
        config=tables_with_preset(tables, overrides),
        options=asdict(from_tables(options, world_tables)),
        settings=dict(nested_items({**arm.set, **({"world": arm.world} if arm.world else {})})),
    )


def _check_table(value: object, path: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(explain(f"{where}: {path}", got=repr(value), expected="a table"))
    return value


def _check_plan(plan: AblationPlan, where: str) -> None:
    """Raise ConfigError if the tables contradict each other or are incomplete."""
    experiment = plan.experiment
    for key in ("question", "baseline", "primary"):
        if not getattr(experiment, key).strip():
            raise ConfigError(explain(f"{where}: ablate.{key}", got="nothing", expected="a value"))
    if not plan.seeds or len(set(plan.seeds)) < len(plan.seeds):
        raise ConfigError(
            explain(f"{where}: ablate.seeds", got=list(plan.seeds), expected="at least one, without duplicates")
        )
    if len(plan.arms) < 2:
        raise ConfigError(explain(f"{where}: [arms]", got=len(plan.arms), expected="at least two arms"))
    _check_arm(experiment.baseline, plan.arms, f"{where}: ablate.baseline")
    for arm in plan.arms.values():
        if arm.control_of is not None:
            _check_arm(
                arm.control_of,
                [name for name in plan.arms if name != arm.name],
                f"{where}: arms.{arm.name}.control_of",
            )


def _check_primary(name: str, metrics: Mapping[str, Metric], where: str) -> None:
    """Raise ConfigError unless `name` is a metric, or a metric for one kind of error (`failing_calls:edit_noop`)."""
    if name.strip() and name.partition(":")[0] not in metrics:
        similar = get_close_matches(name, metrics, n=1)
        fix = f"Did you mean {similar[0]}?" if similar else "Define your own metric in [metrics.NAME]."
        raise ConfigError(explain(where, got=repr(name), expected=f"one of {', '.join(metrics)}", fix=fix))


def _check_arm(name: str, arms: Iterable[str], where: str) -> None:
    known_names = list(arms)
    if name not in known_names:
        raise ConfigError(explain(where, got=repr(name), expected=f"one of {', '.join(known_names)}"))
