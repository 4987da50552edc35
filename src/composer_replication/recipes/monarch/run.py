"""A run on one host: prompts to rollouts to rewards to a batch to new weights, batch after batch, by four actors.

Everything that passes between them is a numbered file in the run's folder or a version in shared memory, and every
question can be asked twice. So any of the four may be killed at any moment, and this program too: started again in the
same folder it goes on where the last checkpoint stands. Rollouts are drawn with the weights that train on them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from composer_replication.action_text import action_text, answer_turn
from composer_replication.atomic import atomic_write_json
from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.pair_tokens import PairIds, ResponseIds, comparable_ids
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError, RunError, explain
from composer_replication.loss.grpo import group_advantages
from composer_replication.optional import require
from composer_replication.recipes.monarch.actors import (
    GeneratorActor,
    RewarderActor,
    TeacherPoolActor,
    TrainerActor,
)
from composer_replication.recipes.monarch.generator import GeneratorSettings
from composer_replication.recipes.monarch.policy_trainer import LossSettings, TrainerSettings
from composer_replication.recipes.monarch.rewarder import RewarderSettings, TeacherPoolSettings
from composer_replication.recipes.monarch.tensor_file import (
    KeptRollouts,
    SharedWeights,
    StepBatch,
    forget_shared_memory,
    shared_memory_folder,
)
from composer_replication.trainer.rollouts.channel import exchange_hints
from composer_replication.trainer.rollouts.resample import equal_reward_groups
from composer_replication.trainer.rollouts.sites import (
    FoundSites,
    Rollout,
    RolloutOptions,
    RolloutSites,
    assistant_id,
    conversation_of,
    is_parsed,
    sampled_runs,
)
from composer_replication.types import DPOPair, TeacherSpec, TraceState

__all__ = ["ActorRun", "RunSettings"]


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


# Actors whose processes may die: each has a process of its own, and a call that finds it dead starts another.
#
# Monarch looks at its processes every ten seconds (HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY=1s makes it one). A
# call to a dead process raises SupervisionError, whether it died before the call or during it; an exception inside an
# endpoint raises ActorError and leaves the process alive. The first is answered by a new process and the same call
# again, which is why every endpoint can be asked twice; the second is a bug, and is raised.

logger = logging.getLogger(__name__)
PREFIX = "composer_"
"""Of the names of our meshes, so that their faults can be told from those of others in the same program."""
_LOGGERS = "logger-"
OnEvent = Callable[[str, str], None]
"""Called with "spawn", "call" or "death", and the role."""


@dataclass
class SupervisedActor:
    """One actor, in a process of its own.

    `max_deaths` in a row, without an answer between them, end the run: what dies of its settings would die for ever.
    """

    actor_class: Any
    settings: Any
    max_deaths: int = 3
    on_event: OnEvent | None = None
    num_deaths: int = 0
    _in_a_row: int = 0
    _mesh: Any = None
    _actor: Any = None
    _errors: list[str] = field(default_factory=list[str])

    @property
    def role(self) -> str:
        return self.actor_class.role

    async def call(self, endpoint: str, *args: Any, **named: Any) -> Any:
        """What the endpoint returns, from this process or from the next."""
        died = _supervision_error()
        while True:
            actor = self._spawned()
            self._tell("call")
            try:
                answer = await getattr(actor, endpoint).call_one(*args, **named)
            except died as error:
                self._bury(endpoint, error)
                continue
            self._in_a_row = 0
            return answer

    async def pid(self) -> int:
        return (await self.call("process"))["pid"]

    async def stop(self) -> None:
        """End the process, if there is one that lives."""
        mesh, self._mesh, self._actor = self._mesh, None, None
        if mesh is None:
            return
        try:
            await mesh.stop()
        except RuntimeError as error:  # SupervisionError is one: it was dead, and nobody had asked it anything since
            logger.info("%s had ended before it was stopped: %s", self.role, _first_line(error))

    def _spawned(self) -> Any:
        if self._actor is None:
            monarch = require("monarch.actor", extra="monarch")
            survive_faults()
            name = f"{PREFIX}{self.role}"
            self._mesh = monarch.this_host().spawn_procs(per_host={"gpus": 1}, name=name)
            self._actor = self._mesh.spawn(name, self.actor_class, self.settings)
            self._tell("spawn")
        return self._actor

    def _bury(self, endpoint: str, error: Exception) -> None:
        self._mesh = self._actor = None
        self.num_deaths += 1
        self._in_a_row += 1
        self._tell("death")
        logger.warning("%s died in %s, and is started anew: %s", self.role, endpoint, _first_line(error))
        if self._in_a_row > self.max_deaths:
            fix = "What it printed, and Monarch's own log, say why; the run goes on where it stands when started again."
            got = f"{self._in_a_row} deaths without an answer, the last: {error}"
            raise RunError(explain(f"actor {self.role}", got=got, expected="a process that lives", fix=fix)) from error

    def _tell(self, event: str) -> None:
        if self.on_event is not None:
            self.on_event(event, self.role)


def survive_faults() -> None:
    """Deaths of our processes do not end the program, as Monarch's own hook would; other faults go to the hook before.

    A process's logger is a mesh of its own, and says not whose it was: its fault alone ends nothing, since that of the
    actor beside it follows.
    """
    monarch: Any = require("monarch.actor", extra="monarch")
    before = monarch.unhandled_fault_hook
    if getattr(before, "_is_composers", False):
        return

    def hook(failure: Any) -> None:
        if failure.mesh_name.startswith((PREFIX, _LOGGERS)):
            logger.info("a process ended: %s", failure.mesh_name)
            return
        before(failure)

    hook._is_composers = True  # pyright: ignore[reportFunctionMemberAccess]
    monarch.unhandled_fault_hook = hook


def _supervision_error() -> type[Exception]:
    return require("monarch._rust_bindings.monarch_hyperactor.supervision", extra="monarch").SupervisionError


def _first_line(error: Exception) -> str:
    return str(error).strip().replace("\n", " ")[:300]


# Rollouts and their rewards as the batch that the trainer reads: advantages, error sites, pairs of the teachers.


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """`num_generations` rollouts of a prompt stand side by side. A pair longer than `max_pair_tokens` is left out."""

    num_generations: int
    scale_rewards: Literal["group", "batch", "none"] = "none"
    max_pair_tokens: int = 2048
    rollouts: RolloutOptions = field(default_factory=RolloutOptions)


class BatchMaker:
    """Makes batches with one tokenizer; `counts` says what became of sites and pairs."""

    def __init__(self, model: str, settings: BatchSettings) -> None:
        self.settings = settings
        tokenizer: Any = load_tokenizer(model)
        self._pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._renderer = Renderer(tokenizer)
        self._sites = RolloutSites(self._renderer, settings.rollouts)
        self.counts: Counter[str] = Counter()

    def find_sites(self, kept: KeptRollouts, number: int) -> list[FoundSites]:
        """The errors of each rollout, and the turns that may be taught."""
        found_sites = [self._sites.find(rollout) for rollout in kept.rollouts]
        if self.settings.rollouts.hints == "other_kind":
            exchange_hints(self._sites, found_sites, seed=str(number))
        for rollout_sites, rollout in zip(found_sites, kept.rollouts, strict=True):
            self.counts.update(rollout_sites.counts)
            if not is_parsed(rollout, sampled_runs(rollout)):  # what failed is then not seen, and not counted as a site
                self.counts["dropped:messages_are_not_the_turns"] += 1
        return found_sites

    def states(self, kept: KeptRollouts, found: Sequence[FoundSites]) -> list[TraceState]:
        """The states before the erring turns, for teachers: each once."""
        states: dict[str, TraceState] = {}
        for rollout, sites in zip(kept.rollouts, found, strict=True):
            for turn_id in sorted({turn.turn_id for turn in sites.taught}):
                states[f"{rollout.rollout_id}::{turn_id}"] = _state(rollout, turn_id)
        return list(states.values())

    def batch(
        self, kept: KeptRollouts, rewards: Sequence[float], found: Sequence[FoundSites], pairs: Sequence[DPOPair] = ()
    ) -> StepBatch:
        """Padded as `StepBatch` says; a rollout's advantage is its reward's distance from its group's mean."""
        rollouts, settings = kept.rollouts, self.settings
        if len(rewards) != len(rollouts):
            raise InputError(explain("rewards", got=len(rewards), expected=f"one of each of {len(rollouts)} rollouts"))
        advantages = group_advantages(torch.tensor(rewards), settings.num_generations, settings.scale_rewards)
        sampled = [rollout.sampled or [1] * len(rollout.completion_ids) for rollout in rollouts]
        if settings.rollouts.only_failed_rollouts:
            found = [
                rollout_sites if better <= 0 else FoundSites(rollout_sites.sequence)
                for rollout_sites, better in zip(found, advantages, strict=True)
            ]
        return StepBatch(
            prompt_ids=_padded([rollout.prompt_ids for rollout in rollouts], self._pad, at_left=True),
            prompt_mask=_padded([[1] * len(rollout.prompt_ids) for rollout in rollouts], 0, at_left=True),
            completion_ids=_padded([rollout.completion_ids for rollout in rollouts], self._pad),
            completion_mask=_padded([[1] * len(rollout.completion_ids) for rollout in rollouts], 0),
            sampled_mask=_padded(sampled, 0),
            advantages=advantages,
            sites=tuple(tuple(rollout_sites.taught) for rollout_sites in found),
            weights_version=kept.weights_version,
            pairs=self._pair_tensors(pairs),
        )

    def _pair_tensors(self, pairs: Sequence[DPOPair]) -> dict[str, Tensor]:
        compared = [ids for pair in pairs if (ids := self._pair_ids(pair)) is not None]
        sides = {"chosen": [pair.chosen for pair in compared], "rejected": [pair.rejected for pair in compared]}
        if not compared:
            return {}
        return {f"dpo_{side}_{name}": value for side, rows in sides.items() for name, value in self._side(rows).items()}

    def _pair_ids(self, pair: DPOPair) -> PairIds | None:
        """Both answers as ids; None with a reason counted."""
        name = pair["state_id"]
        state = to_conversation(pair["state_messages"], conversation_id=name)
        answers = [answer_turn(pair[side], turn_id=f"{name}:{side}") for side in ("chosen", "rejected")]
        labels = {"conversation_id": name, "format_name": state.format}
        ids = comparable_ids(self._renderer, state.turns, *answers, **labels)
        if not isinstance(ids, str) and max(len(side.ids) for side in ids) > self.settings.max_pair_tokens:
            ids = "pair_too_long"
        self.counts["pairs" if not isinstance(ids, str) else f"dropped:{ids}"] += 1
        return None if isinstance(ids, str) else ids

    def _side(self, rows: Sequence[ResponseIds]) -> dict[str, Tensor]:
        answers = [[0] * row.start + [1] * (len(row.ids) - row.start) for row in rows]
        return {
            "input_ids": _padded([row.ids for row in rows], self._pad),
            "attention_mask": _padded([[1] * len(row.ids) for row in rows], 0),
            "response_mask": _padded(answers, 0),
        }


def rows_of(kept: KeptRollouts, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What reward functions may ask for: the data set's columns, the messages, and what the world said as `info`."""
    return [
        {**row, "messages": list(rollout.messages), "info": dict(columns)}
        for row, rollout, columns in zip(rows, kept.rollouts, kept.columns, strict=True)
    ]


def _state(rollout: Rollout, turn_id: str) -> TraceState:
    conversation = conversation_of(rollout, sampled_runs(rollout))
    turn = next(candidate for candidate in conversation.turns if candidate.id == turn_id)
    number, before = 0, 0
    for index, message in enumerate(rollout.messages):
        if message.get("role") == "assistant":
            if assistant_id(number) == turn_id:
                before = index
            number += 1
    return TraceState(
        state_id=f"{rollout.rollout_id}::{turn_id}",
        messages=[*rollout.prompt, *rollout.messages[:before]],
        student_action=action_text(turn),
        tools=[
            {"type": "function", "function": {"name": name, "parameters": dict(schema)}}
            for name, schema in rollout.tools.items()
        ],
    )


def _padded(rows: Sequence[Sequence[int]], value: int, *, at_left: bool = False) -> Tensor:
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    filled = [[*more, *row] if at_left else [*row, *more] for row, more in zip(rows, fill, strict=True)]
    return torch.tensor(filled, dtype=torch.int64)
