"""A diagnosis of the run while it runs: every so many steps over the latest lines of metrics, at the end over all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from composer_replication.errors import InputError, explain
from composer_replication.trainer.watch.diagnosis import findings

# ruff: noqa: ARG002  (what a callback is called with is not its choice)
_logger = logging.getLogger(__name__)


class RunDiagnosis(TrainerCallback):
    """Says what `diagnose` finds: while the run goes on, each rule once; at the end, whatever holds for the whole run.

    `said` keeps the sentences of the end.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        max_completion_length: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if every < 1:
            raise InputError(explain("every", got=every, expected="1 step or more"))
        self._every, self._length = every, max_completion_length
        self._say = _logger.warning if say is None else say
        self._told: set[str] = set()
        self.said: list[str] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every:
            return
        first = state.global_step - self._every
        lines = [line for line in state.log_history if line.get("step", 0) > first]
        # Two lines at least: what the very first steps look like says little. None at all is for the end to judge.
        if len(lines) < 2 or not state.is_world_process_zero:
            return
        for finding in findings(lines, max_completion_length=self._length):
            if finding.rule not in self._told:
                self._told.add(finding.rule)
                self._say(f"Steps {first + 1} to {state.global_step}: {finding.text}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.said = [finding.text for finding in findings(state.log_history, max_completion_length=self._length)]
        if state.is_world_process_zero:
            for text in self.said:
                self._say(f"The whole run: {text}")
