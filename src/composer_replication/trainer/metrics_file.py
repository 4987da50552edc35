"""How a trainer's callbacks serve it: every set of figures as a line of `metrics.jsonl`, and word of its own steps."""

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
    """Appends one checked line a log call, on the main process alone.

    A resumed run goes on after the step it resumes from: what a killed process logged later is dropped, since those
    steps are made again. A run that begins anew begins a new file. A figure that is no finite number becomes null.
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
        rows = read_journal(self.path).rows
        lines = self.path.read_bytes().split(b"\n")[: len(rows)]
        kept_lines = [line for line, row in zip(lines, rows, strict=True) if step and _step_of(row) <= step]
        atomic_write_bytes(self.path, b"".join(line + b"\n" for line in kept_lines))


def _step_of(row: dict[str, object]) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _plain(value: Any) -> Any:
    """Numbers of other libraries as Python's own; text and flags as they are."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


class Steps(Protocol):
    def before_steps(self) -> None: ...
    def after_step(self) -> None: ...


class TellSteps(TrainerCallback):
    """Tells that a run begins, and that the optimiser has made a step, before anything is logged or saved."""

    def __init__(self, trainer: Steps) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.before_steps()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.after_step()


# The evaluation in trackio or Weights & Biases, beside the training that it judges: what `train.report_to` names.

# Where transformers' own callbacks put a training, unless the environment names another project.
_PROJECT = "huggingface"


def evaluation_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Figures as metrics: `evaluation/ARM/NAME` and its interval's ends; by kind with the kind behind the name."""
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
    """Log the figures as one run of the tracker, and return them; "none" logs nothing."""
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
