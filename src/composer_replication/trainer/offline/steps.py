"""The callback by which an offline trainer hears of its own run."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback


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
