"""Define the four actors, which are wrappers that Monarch can spawn around classes that do not need Monarch.

Every endpoint is async, because Monarch rejects classes that mix sync and async endpoints. Long work runs in a thread,
so that the process can answer its supervisor; an actor still handles one call at a time. Arguments and results are
small, because Monarch pickles them between processes. Tensors are passed in files and shared memory.

Without Monarch, these classes can be imported and inspected; creating an instance raises an error that says what to
install.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_replication.optional import available, require

if TYPE_CHECKING:
    from composer_replication.recipes.monarch.generator import GeneratorSettings, Prompt
    from composer_replication.recipes.monarch.policy_trainer import TrainerSettings
    from composer_replication.recipes.monarch.rewarder import RewarderSettings, TeacherPoolSettings
    from composer_replication.types import DPOPair, TeacherCallResult, TraceState

__all__ = ["GeneratorActor", "RewarderActor", "TeacherPoolActor", "TrainerActor"]


class _MissingMonarch:
    """The base class of the actors if Monarch is not installed."""

    def __init__(self, *_args: object, **_options: object) -> None:
        require("monarch", extra="monarch")


def _undecorated(method: Any) -> Any:
    return method


# Chosen at import time, because the definitions of the actors below need the base class and the decorator.
_Actor: Any = _MissingMonarch
_endpoint: Any = _undecorated
if available("monarch"):
    from monarch.actor import Actor, endpoint

    _Actor, _endpoint = Actor, endpoint


class _Process(_Actor):
    """The base class of the four actors. It reports an actor's role and process id."""

    backend = "monarch"
    role = ""

    @_endpoint
    async def process(self) -> dict[str, Any]:
        return {"backend": self.backend, "role": self.role, "pid": os.getpid()}


class TrainerActor(_Process):
    """The actor that trains on numbered batches, each exactly once (see `policy_trainer`)."""

    role = "trainer"

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__()
        # Imported in the actor's process, so that the caller need not load torch and transformers.
        from composer_replication.recipes.monarch.policy_trainer import PolicyTrainer

        self._work = PolicyTrainer(settings)

    @_endpoint
    async def train_outer_step(self, batch_id: int) -> dict[str, Any]:
        """Run all optimizer steps on batch `batch_id` from the run's folder, and return the metrics of each step."""
        return await asyncio.to_thread(self._work.train_outer_step, batch_id)

    @_endpoint
    async def num_batches(self) -> int:
        """Return the number of batches on which the weights have been trained."""
        return self._work.num_batches


class GeneratorActor(_Process):
    """The actor that samples rollouts, with the newest weights or a specific version of them (see `generator`)."""

    role = "generator"

    def __init__(self, settings: GeneratorSettings) -> None:
        super().__init__()
        from composer_replication.recipes.monarch.generator import Generator

        self._work = Generator(settings)

    @_endpoint
    async def rollout(
        self, prompts: Sequence[Prompt], *, batch_id: int | None = None, version: int | None = None
    ) -> list[str]:
        """Return the texts of the completions. If a batch number is given, also save their tokens in the run's
        folder.
        """
        return await asyncio.to_thread(self._work.rollout, prompts, batch_id=batch_id, version=version)


class RewarderActor(_Process):
    """The actor that computes rewards with the protocol of verifiers (see `rewarder`)."""

    role = "rewarder"

    def __init__(self, settings: RewarderSettings) -> None:
        super().__init__()
        from composer_replication.recipes.monarch.rewarder import Rewarder

        self._work = Rewarder(settings)

    @_endpoint
    async def score(
        self, completions: Sequence[str], *, rows: Sequence[Mapping[str, Any]] | None = None
    ) -> list[float]:
        """Return the reward of each completion. `rows` contain the columns of each completion, which become
        arguments of the reward functions.
        """
        return await self._work.score(completions, rows=rows)


class TeacherPoolActor(_Process):
    """The actor that queries teachers under a shared spending cap (see `rewarder`)."""

    role = "teacher_pool"

    def __init__(self, settings: TeacherPoolSettings) -> None:
        super().__init__()
        from composer_replication.recipes.monarch.rewarder import TeacherPool

        self._work = TeacherPool(settings)

    @_endpoint
    async def replay(self, states: Sequence[TraceState]) -> list[TeacherCallResult]:
        """Return the answer of every teacher in every state, or fewer answers if the spending cap is reached."""
        return await self._work.replay(states)

    @_endpoint
    async def pairs(self, states: Sequence[TraceState]) -> list[DPOPair]:
        """Return DPO pairs: the chosen answer is the one on which the teachers agree, and the rejected answer is the
        student's.
        """
        return await self._work.pairs(states)

    @_endpoint
    async def spent(self) -> dict[str, Any]:
        """Return the amount in US dollars that has been spent so far."""
        return await self._work.spent()
