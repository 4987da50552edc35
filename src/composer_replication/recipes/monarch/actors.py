"""The four actors: shells that Monarch can spawn, around classes that need no Monarch.

Every endpoint is async (Monarch refuses a class that mixes both kinds). What takes long runs in a thread, so that the
process answers its supervisor meanwhile; an actor still does one thing at a time. Arguments and results are small: they
are pickled by Monarch on their way between processes of one host. Tensors go through files and shared memory.

Without Monarch these classes can be named and looked at; making one says what to install.
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


class _WithoutMonarch:
    """Stands where Monarch's actor would."""

    def __init__(self, *_args: object, **_options: object) -> None:
        require("monarch", extra="monarch")


def _plain(method: Any) -> Any:
    return method


_Actor: Any = _WithoutMonarch
_endpoint: Any = _plain
if available("monarch"):
    from monarch.actor import Actor, endpoint

    _Actor, _endpoint = Actor, endpoint


class _Process(_Actor):
    """What all four have: which process of which role they are."""

    backend = "monarch"
    role = ""

    @_endpoint
    async def process(self) -> dict[str, Any]:
        return {"backend": self.backend, "role": self.role, "pid": os.getpid()}


class TrainerActor(_Process):
    """Steps on numbered batches, each exactly once (`policy_trainer`)."""

    role = "trainer"

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__()
        from composer_replication.recipes.monarch.policy_trainer import PolicyTrainer

        self._work = PolicyTrainer(settings)

    @_endpoint
    async def train_outer_step(self, batch_id: int) -> dict[str, Any]:
        """All optimiser steps on batch `batch_id` of the run's folder; the figures of each."""
        return await asyncio.to_thread(self._work.train_outer_step, batch_id)

    @_endpoint
    async def num_batches(self) -> int:
        """How many batches the weights have seen."""
        return self._work.num_batches


class GeneratorActor(_Process):
    """Rollouts with the newest weights, or those of a version (`generator`)."""

    role = "generator"

    def __init__(self, settings: GeneratorSettings) -> None:
        super().__init__()
        from composer_replication.recipes.monarch.generator import Generator

        self._work = Generator(settings)

    @_endpoint
    async def rollout(
        self, prompts: Sequence[Prompt], *, batch_id: int | None = None, version: int | None = None
    ) -> list[str]:
        """The completions' texts; with a batch's number their tokens are kept in the run's folder."""
        return await asyncio.to_thread(self._work.rollout, prompts, batch_id=batch_id, version=version)


class RewarderActor(_Process):
    """Reward functions by the protocol of verifiers (`rewarder`)."""

    role = "rewarder"

    def __init__(self, settings: RewarderSettings) -> None:
        super().__init__()
        from composer_replication.recipes.monarch.rewarder import Rewarder

        self._work = Rewarder(settings)

    @_endpoint
    async def score(
        self, completions: Sequence[str], *, rows: Sequence[Mapping[str, Any]] | None = None
    ) -> list[float]:
        """A reward of each completion; `rows` are what is known of each beside its text."""
        return await self._work.score(completions, rows=rows)


class TeacherPoolActor(_Process):
    """Teachers under one budget (`teacher_pool`)."""

    role = "teacher_pool"

    def __init__(self, settings: TeacherPoolSettings) -> None:
        super().__init__()
        from composer_replication.recipes.monarch.rewarder import TeacherPool

        self._work = TeacherPool(settings)

    @_endpoint
    async def replay(self, states: Sequence[TraceState]) -> list[TeacherCallResult]:
        """Every teacher's answer at every state; fewer where the budget ends."""
        return await self._work.replay(states)

    @_endpoint
    async def pairs(self, states: Sequence[TraceState]) -> list[DPOPair]:
        """What the teachers agreed on against what the student did."""
        return await self._work.pairs(states)

    @_endpoint
    async def spent(self) -> dict[str, Any]:
        """What of the budget is gone, in US dollars."""
        return await self._work.spent()
