"""How a trainer's callbacks serve it: every set of figures as a line of `metrics.jsonl`, and word of its own steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from composer_replication.atomic import atomic_write_bytes
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
