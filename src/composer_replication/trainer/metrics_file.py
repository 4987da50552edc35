"""Write metrics to `metrics.jsonl`, notify a trainer of its own steps, and send evaluation results to a tracker."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from composer_replication.atomic import atomic_write_bytes
from composer_replication.errors import MissingExtraError
from composer_replication.optional import available
from composer_replication.runs.journal import Journal, read_journal


class MetricsFile(TrainerCallback):
    """Appends a checksummed line per log call, on the main process only.

    A resumed run continues after the step that it resumes from: lines that a killed process logged for later steps are
    dropped, since those steps are repeated. A new run starts a new file. Numbers that are not finite become null.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.is_world_process_zero and self.path.exists():
            self._keep_up_to(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        del args, control, kwargs
        if not state.is_world_process_zero or not logs:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with Journal(self.path) as journal:
            journal.append({"step": state.global_step, **{str(key): _plain(value) for key, value in logs.items()}})

    def _keep_up_to(self, step: int) -> None:
        # `read_journal` drops a damaged end of the file, so only the first lines are known to be valid.
        rows = read_journal(self.path).rows
        lines = self.path.read_bytes().split(b"\n")[: len(rows)]
        kept_lines = [line for line, row in zip(lines, rows, strict=True) if step and _step_of(row) <= step]
        atomic_write_bytes(self.path, b"".join(line + b"\n" for line in kept_lines))


def _step_of(row: dict[str, object]) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _plain(value: Any) -> Any:
    """Return a value as JSON can store it: NaN and infinity as None, objects of unknown types as text."""
    # torch and numpy scalars have `item`.
    if hasattr(value, "item"):
        value = value.item()
    # JSON has no NaN or infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


class Steps(Protocol):
    """A trainer that `StepCallback` notifies of its steps."""

    def before_steps(self) -> None: ...
    def after_step(self) -> None: ...


class StepCallback(TrainerCallback):
    """Calls the trainer at the start of a run, and after each optimizer step, before anything is logged or saved."""

    def __init__(self, trainer: Steps) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.before_steps()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.after_step()


# The project that transformers' own callbacks use, unless the environment names another one.
_PROJECT = "huggingface"


def evaluation_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return evaluation results as metrics: `evaluation/ARM/NAME`, with `/low` and `/high` for its interval.

    A result for one kind of error has `/KIND` after its name.
    """
    metrics: dict[str, float] = {}
    for figure in evaluation["figures"]:
        name = "/".join(
            ["evaluation", figure["arm"], figure["name"], *([figure["kind"]] if figure.get("kind") else [])]
        )
        for key, suffix in (("estimate", ""), ("low", "/low"), ("high", "/high")):
            if figure[key] is not None:
                metrics[name + suffix] = float(figure[key])
    for metric in evaluation.get("damage", ()):
        for arm in ("before", "after", "control"):
            if metric.get(arm) is not None:
                metrics[f"evaluation/damage/{metric['name']}/{arm}"] = float(metric[arm])
    return metrics


def report_evaluation(report_to: str, evaluation: Mapping[str, Any], *, run_name: str) -> dict[str, float]:
    """Log evaluation results as a new run in the tracker `report_to`, and return them as metrics;
    "none" logs nothing.
    """
    metrics = evaluation_metrics(evaluation)
    if report_to == "none":
        return metrics
    if not available(report_to):
        raise MissingExtraError(f"{report_to} is not installed. Type: pip install {report_to}", name=report_to)
    tracker: Any = import_module(report_to)
    models = {f"{arm}_model": str(model["name"]) for arm, model in evaluation["models"].items() if model}
    settings = {"verdict": evaluation["verdict"]["word"], "primary": evaluation["primary"], **models}
    tracker.init(
        project=os.environ.get(f"{report_to.upper()}_PROJECT", _PROJECT), name=f"{run_name}-evaluation", config=settings
    )
    try:
        tracker.log(metrics)
    finally:
        tracker.finish()
    return metrics
