"""A signal ends training after the step at hand, with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator, Sequence
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from composer_replication.trainer.checkpoints.save_attempt import most_anywhere


class StopRequest:
    """The signal that asked for an end, once one has; on every process, also where only one was asked."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextlib.contextmanager
    def listening(self, signals: Sequence[signal.Signals]) -> Generator[None]:
        """Hear these signals, and put their handlers back afterwards; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, self._hear) for signum in signals}
        try:
            yield
        finally:
            for signum, handler in before.items():
                # None: the handler was not set from Python and cannot be put back.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        # A second Ctrl-C is meant. A second SIGTERM is not: launchers and schedulers send several.
        if self.signal_name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = self.signal_name or signal.Signals(number).name


class CheckpointTiming(TrainerCallback):
    """When to save: on a signal at the end of the step, and after an epoch's evaluation instead of before it."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request
        self._held_back = False
        self.stopped_at: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> Any:
        if most_anywhere(int(bool(self._request.signal_name)), args.device):
            control.should_save = control.should_training_stop = True
            self.stopped_at = state.global_step
        # Evaluation draws random numbers; a save before it, resumed from, would not know of them.
        elif control.should_save and args.eval_strategy == IntervalStrategy.EPOCH and float(state.epoch).is_integer():
            control.should_save, self._held_back = False, True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> Any:  # noqa: ARG002
        if self.stopped_at is not None:  # saved at the step's end; this is no epoch's end
            control.should_save = control.should_evaluate = control.should_log = False
        elif self._held_back:
            control.should_save, self._held_back = True, False
        return control
