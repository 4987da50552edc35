"""Train one of several DiLoCo replicas: select the replica's part of the data, and run DiLoCo's outer loop.

This works with any transformers trainer: on logged sessions or rollouts, with an adapter or full weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from composer_replication.diloco.training import OuterLoop, train_replica
from composer_replication.errors import InputError, explain


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica: its rank, and the manager through which it exchanges weights."""

    manager: Any
    rank: int
    world_size: int
    outer: OuterLoop = field(default_factory=OuterLoop)

    def part_of(self, session_ids: Iterable[str]) -> frozenset[str]:
        """Return the ids of this replica's sessions.

        Each session belongs to exactly one replica, and the replicas' shares differ in size by at most one.
        """
        # Sorted by hash: a shuffled order that is the same on every replica.
        shuffled = sorted(
            session_ids, key=lambda session_id: (hashlib.sha256(f"replica:{session_id}".encode()).digest(), session_id)
        )
        return frozenset(shuffled[self.rank :: self.world_size])

    def rows_of(self, number: int) -> range:
        """Return the indices of this replica's rows in a table with `number` rows."""
        return range(self.rank, number, self.world_size)

    def check_steps(self, steps: int) -> None:
        """Raise InputError if the run does not end with an exchange of weights, since later steps would be lost."""
        every = self.outer.steps_per_commit
        if steps % every:
            nearest = every * max(1, round(steps / every))
            fix = f"For example, set train.optimiser.steps = {nearest}."
            raise InputError(explain("train.optimiser.steps", got=steps, expected=f"a multiple of {every}", fix=fix))

    def weigh(self, num_samples: int) -> None:
        """Set this replica's weight to its number of samples. Raises InputError if that is 0."""
        if not num_samples:
            fix = "Start fewer replicas, or give them more sessions."
            got = f"no samples for replica {self.rank} of {self.world_size}"
            raise InputError(explain("data for a replica", got=got, expected="at least one sample", fix=fix))
        self.manager.weight = float(num_samples)


class ReplicaSteps(TrainerCallback):
    """A callback that runs DiLoCo's outer loop around a trainer's steps, and leaves the global weights in its model.

    A replica's step is derived from the number of exchanges that the run has committed. A restarted replica therefore
    continues at the other replicas' step, with that step's learning rate, and ends when they do.
    """

    loop: Any

    def __init__(self, replica: Replica) -> None:
        self._replica, self._block, self._is_over = replica, contextlib.ExitStack(), False

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        del control
        if args.world_size > 1:
            fix = "Start one replica per GPU, each with a single process."
            raise InputError(explain("processes in a replica", got=args.world_size, expected=1, fix=fix))
        self._replica.check_steps(state.max_steps)
        outer = self._replica.outer
        commits = state.max_steps // outer.steps_per_commit
        block = train_replica(self._replica.manager, parts["model"], parts["optimizer"], outer, commits=commits)
        self.loop = self._block.enter_context(block)
        self._catch_up(state, parts["lr_scheduler"])
        self._is_over = state.global_step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        del args
        # A trainer makes at least one step before it can be stopped; discard that step.
        if self._is_over:
            state.global_step, control.should_training_stop = state.max_steps, True
            control.should_log = control.should_save = control.should_evaluate = False
            return
        self._catch_up(state, parts["lr_scheduler"])
        control.should_training_stop |= state.global_step >= state.max_steps

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._block.close()

    def _catch_up(self, state: Any, lr_scheduler: Any) -> None:
        commits = self._replica.manager.current_step()
        step = commits * self._replica.outer.steps_per_commit + self.loop._local_step
        if step > state.global_step:
            state.global_step = min(step, state.max_steps)
            # `lr_scheduler.step()` below increments this and sets the learning rate for the next step.
            lr_scheduler.last_epoch = state.global_step - 1
            # torch warns if the scheduler steps before the optimizer has, which is intended here.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                lr_scheduler.step()
