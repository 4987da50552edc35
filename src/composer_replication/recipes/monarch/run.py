"""A run on one host: prompts to rollouts to rewards to a batch to new weights, batch after batch, by four actors.

Everything that passes between them is a numbered file in the run's folder or a version in shared memory, and every
question can be asked twice. So any of the four may be killed at any moment, and this program too: started again in the
same folder it goes on where the last checkpoint stands. Rollouts are drawn with the weights that train on them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from composer_replication.atomic import atomic_write_json
from composer_replication.errors import InputError, explain
from composer_replication.optional import require
from composer_replication.recipes.monarch.actors import GeneratorActor, RewarderActor, TeacherPoolActor, TrainerActor
from composer_replication.recipes.monarch.gathering import BatchMaker, BatchSettings, rows_of
from composer_replication.recipes.monarch.generator import GeneratorSettings
from composer_replication.recipes.monarch.policy_trainer import TrainerSettings
from composer_replication.recipes.monarch.rewarder import RewarderSettings
from composer_replication.recipes.monarch.rollout_file import KeptRollouts
from composer_replication.recipes.monarch.shared_weights import (
    SharedWeights,
    forget_shared_memory,
    shared_memory_folder,
)
from composer_replication.recipes.monarch.step_batch import StepBatch
from composer_replication.recipes.monarch.step_loss import LossSettings
from composer_replication.recipes.monarch.supervision import OnEvent, SupervisedActor
from composer_replication.recipes.monarch.teacher_pool import TeacherPoolSettings
from composer_replication.rollouts.resample import equal_reward_groups
from composer_replication.types import TeacherSpec


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is made of. `model` is a folder or a name on the hub; `folder` holds all that must outlive a process.

    `trainer` and `generator` are further fields of `TrainerSettings` and `GeneratorSettings`. Without `teachers`
    there is no teacher pool, and no channel 3.
    """

    model: str
    folder: str
    num_batches: int
    prompts_per_batch: int
    rewards: tuple[str, ...]
    batch: BatchSettings
    loss: LossSettings = field(default_factory=LossSettings)
    trainer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generator: Mapping[str, Any] = field(default_factory=dict[str, Any])
    teachers: tuple[TeacherSpec, ...] = ()
    max_total_usd: float = 5.0
    agreement_threshold: int = 2
    max_deaths: int = 3

    def __post_init__(self) -> None:
        for name in ("num_batches", "prompts_per_batch"):
            if getattr(self, name) < 1:
                raise InputError(explain(name, got=getattr(self, name), expected="1 or more"))
        if self.loss.knobs.beta_replay > 0 and not self.teachers:
            fix = "Name teachers, or set beta_replay to 0."
            raise InputError(explain("beta_replay", got="no teachers to ask", expected="some", fix=fix))


class ActorRun:
    """The actors of a run, while it is entered: `async with ActorRun(settings, rows) as run: await run.train()`."""

    def __init__(
        self, settings: RunSettings, rows: Sequence[Mapping[str, Any]], *, on_event: OnEvent | None = None
    ) -> None:
        require("monarch", extra="monarch")
        if not rows:
            raise InputError(explain("rows", got="none", expected="at least one, with `prompt`"))
        self.settings, self._rows, self._folder = settings, rows, Path(settings.folder)
        self.shared = SharedWeights(shared_memory_folder(self._folder))
        self._maker = BatchMaker(settings.model, settings.batch)
        watched: dict[str, Any] = {"max_deaths": settings.max_deaths, "on_event": on_event}
        self.trainer = SupervisedActor(TrainerActor, self._trainer_settings(), **watched)
        self.generator = SupervisedActor(GeneratorActor, self._generator_settings(), **watched)
        self.rewarder = SupervisedActor(RewarderActor, RewarderSettings(rewards=settings.rewards), **watched)
        self.teachers: SupervisedActor | None = None
        if settings.teachers:
            self.teachers = SupervisedActor(TeacherPoolActor, self._teacher_settings(), **watched)

    @property
    def actors(self) -> dict[str, SupervisedActor]:
        """By role."""
        all_four = (self.trainer, self.generator, self.rewarder, self.teachers)
        return {actor.role: actor for actor in all_four if actor is not None}

    async def __aenter__(self) -> ActorRun:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for actor in self.actors.values():
            await actor.stop()
        self.shared.remove()
        forget_shared_memory(self._folder)

    async def train(self) -> list[dict[str, Any]]:
        """All batches that are left; what came of each."""
        await asyncio.gather(*(actor.pid() for actor in self.actors.values()))  # they load at the same time
        first = await self.trainer.call("num_batches")
        return [await self.step(number) for number in range(first, self.settings.num_batches)]

    async def step(self, number: int) -> dict[str, Any]:
        """One batch: made, unless it was made before, and trained on."""
        if not StepBatch.is_there(self._folder / "batches", number):
            await self._make_batch(number)
        record = await self.trainer.call("train_outer_step", number)
        judged = json.loads(self._judged_path(number).read_text(encoding="utf-8"))
        return {**record, **judged}

    async def _make_batch(self, number: int) -> None:
        rows, counted_before = self._rows_of(number), self._maker.counts.copy()
        texts = await self.generator.call("rollout", rows, batch_id=number, version=number)
        kept_rollouts = KeptRollouts.load(self._folder / "rollouts", number)
        rewards = await self.rewarder.call("score", texts, rows=rows_of(kept_rollouts, rows))
        found_sites = self._maker.find_sites(kept_rollouts, number)
        pairs: list[Any] = []
        if self.teachers is not None and (states := self._maker.states(kept_rollouts, found_sites)):
            pairs = await self.teachers.call("pairs", states)
        batch = self._maker.batch(kept_rollouts, rewards, found_sites, pairs)
        equal = equal_reward_groups(rewards, self.settings.batch.num_generations)
        judged = {
            "rewards": rewards,
            "equal_groups": int(equal.sum()),
            "sites": sum(map(len, batch.sites)),
            "pairs": len(batch.pairs.get("dpo_chosen_input_ids", ())),
            "counts": dict(self._maker.counts - counted_before),
        }
        atomic_write_json(self._judged_path(number), judged)
        batch.save(self._folder / "batches", number)  # last: a batch that is there is whole

    def _rows_of(self, number: int) -> list[dict[str, Any]]:
        """The next prompts, from the first again after the last; each as often as a group has rollouts."""
        count, group = self.settings.prompts_per_batch, self.settings.batch.num_generations
        numbers = [(number * count + offset) % len(self._rows) for offset in range(count)]
        return [dict(self._rows[index]) for index in numbers for _ in range(group)]

    def _judged_path(self, number: int) -> Path:
        path = self._folder / "rewards" / f"{number:06d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _places(self) -> dict[str, str]:
        return {"model": self.settings.model, "folder": self.settings.folder, "weights": str(self.shared.folder)}

    def _trainer_settings(self) -> TrainerSettings:
        options = dict(self.settings.trainer)
        steps = self.settings.num_batches * options.get("num_iterations", 1)
        return TrainerSettings(**self._places(), loss=self.settings.loss, **{"total_steps": steps, **options})

    def _generator_settings(self) -> GeneratorSettings:
        loss = self.settings.loss
        limits = {"max_completion_length": loss.max_completion_length, "temperature": loss.temperature}
        return GeneratorSettings(**self._places(), **{**limits, **self.settings.generator})

    def _teacher_settings(self) -> TeacherPoolSettings:
        settings = self.settings
        return TeacherPoolSettings(
            folder=settings.folder,
            teachers=settings.teachers,
            max_total_usd=settings.max_total_usd,
            agreement_threshold=settings.agreement_threshold,
        )
