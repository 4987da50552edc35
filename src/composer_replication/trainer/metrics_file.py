"""Write metrics to `metrics.jsonl`, notify a trainer of a run's steps, and send evaluation results to a tracker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from composer_replication.atomic import atomic_write_bytes
from composer_replication.runs.journal import Journal, read_journal


class MetricsFile(TrainerCallback):
    """A callback that appends a line with a checksum for each log call, on the main process only.

    A resumed run continues after the step that it resumes from: lines that a killed process logged for later steps are
    dropped, since those steps are repeated. A new run starts a new file. Numbers that are not finite become null.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if not state.is_world_process_zero or not self.path.exists():
            return
        # `read_journal` drops a damaged end of the file, so only the first lines are known to be valid.
        rows: list[Any] = read_journal(self.path).rows
        lines = self.path.read_bytes().split(b"\n")[: len(rows)]
        steps = [row["step"] if isinstance(row.get("step"), int) else 0 for row in rows]
        last = state.global_step
        kept_lines = [line for line, step in zip(lines, steps, strict=True) if last and step <= last]
        atomic_write_bytes(self.path, b"".join(line + b"\n" for line in kept_lines))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        del args, control, kwargs
        if not state.is_world_process_zero or not logs:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with Journal(self.path) as journal:
            journal.append({"step": state.global_step, **{str(key): _plain(value) for key, value in logs.items()}})


def _plain(value: Any) -> Any:
    """Return a value in a form that JSON can store: NaN and infinity become None, and unknown types become text."""
    # torch and numpy scalars have `item`.
    if hasattr(value, "item"):
        value = value.item()
    # JSON has no NaN or infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


class _Steps(Protocol):
    """The interface of trainers that `StepCallback` notifies of their steps."""

    def before_steps(self) -> None: ...
    def after_step(self) -> None: ...


class StepCallback(TrainerCallback):
    """A callback that notifies a trainer of the run's start and the end of each step, before logging and saving."""

    def __init__(self, trainer: _Steps) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.before_steps()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.after_step()
