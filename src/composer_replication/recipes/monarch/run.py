"""Run training on one host with four actors, which turn prompts into rollouts, rollouts into rewards and batches, and
batches into new weights.

Actors exchange only numbered files in the run's folder and versions of the weights in shared memory, and every endpoint
is idempotent. Any actor can therefore be killed at any time, and so can this program: when started again in the same
folder, it resumes from the last checkpoint. Rollouts and training alternate, so each batch is sampled with the same
weights that are then trained on it.
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
from composer_replication.batch.alignment import pad_rows
from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.pair_tokens import PairIds, ResponseIds, comparable_ids
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError, RunError, explain
from composer_replication.loss.grpo import group_advantages
from composer_replication.optional import require
from composer_replication.recipes.monarch.actors import GeneratorActor, RewarderActor, TeacherPoolActor, TrainerActor
from composer_replication.recipes.monarch.generator import GeneratorSettings
from composer_replication.recipes.monarch.policy_trainer import LossSettings, TrainerSettings
from composer_replication.recipes.monarch.rewarder import RewarderSettings, TeacherPoolSettings
from composer_replication.recipes.monarch.tensor_file import (
    SavedRollouts,
    SharedWeights,
    StepBatch,
    remove_shared_memory_note,
    shared_memory_folder,
)
from composer_replication.trainer.rollouts.hint_distillation import ErringTurnFinder, ErringTurns
from composer_replication.trainer.rollouts.resample import equal_reward_groups
from composer_replication.trainer.rollouts.sites import (
    Rollout,
    RolloutOptions,
    assistant_id,
    conversation_of,
    is_parsed,
    sampled_runs,
)
from composer_replication.trainer.rollouts.unrelated_hints import replace_by_unrelated_hints
from composer_replication.types import DPOPair, TeacherSpec, TraceState

__all__ = ["ActorRun", "RunSettings"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run.

    `model` is a folder or a name on the Hub. `folder` contains everything that must survive a crash. `trainer` and
    `generator` are additional fields of `TrainerSettings` and `GeneratorSettings`. Without `teachers`, there is no
    teacher pool and no channel 3 (DPO).
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
            fix = "Set teachers, or set beta_replay to 0."
            raise InputError(explain("beta_replay > 0", got="no teachers", expected="at least one", fix=fix))


class ActorRun:
    """A training run together with its actors. Use it as `async with ActorRun(settings, rows) as run: await
    run.train()`.
    """

    def __init__(
        self, settings: RunSettings, rows: Sequence[Mapping[str, Any]], *, on_event: OnEvent | None = None
    ) -> None:
        require("monarch", extra="monarch")
        if not rows:
            raise InputError(explain("rows", got="none", expected="at least one row with `prompt`"))
        self.settings, self._rows, self._folder = settings, rows, Path(settings.folder)
        self.shared = SharedWeights(shared_memory_folder(self._folder))
        self._builder = _BatchBuilder(settings.model, settings.batch)
        supervision: dict[str, Any] = {"max_deaths": settings.max_deaths, "on_event": on_event}
        self.trainer = _SupervisedActor(TrainerActor, self._trainer_settings(), **supervision)
        self.generator = _SupervisedActor(GeneratorActor, self._generator_settings(), **supervision)
        self.rewarder = _SupervisedActor(RewarderActor, RewarderSettings(rewards=settings.rewards), **supervision)
        self.teachers: _SupervisedActor | None = None
        if settings.teachers:
            self.teachers = _SupervisedActor(TeacherPoolActor, self._teacher_settings(), **supervision)

    @property
    def actors(self) -> dict[str, _SupervisedActor]:
        """The actors of the run, keyed by role."""
        actors = (self.trainer, self.generator, self.rewarder, self.teachers)
        return {actor.role: actor for actor in actors if actor is not None}

    async def __aenter__(self) -> ActorRun:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for actor in self.actors.values():
            await actor.stop()
        # Not reached after a kill; then the next start finds and reuses the folder.
        self.shared.remove()
        remove_shared_memory_note(self._folder)

    async def train(self) -> list[dict[str, Any]]:
        """Train on all batches that remain, and return the records of their outer steps."""
        await asyncio.gather(*(actor.pid() for actor in self.actors.values()))  # starts all processes concurrently
        num_trained = await self.trainer.call("num_batches")
        return [await self.step(number) for number in range(num_trained, self.settings.num_batches)]

    async def step(self, number: int) -> dict[str, Any]:
        """Create batch `number` if it does not exist yet, train on it, and return the record of this outer step."""
        if not StepBatch.exists(self._folder / "batches", number):
            await self._make_batch(number)
        record = await self.trainer.call("train_outer_step", number)
        outcome = json.loads(self._outcome_path(number).read_text(encoding="utf-8"))
        return {**record, **outcome}

    async def _make_batch(self, number: int) -> None:
        rows, counts_before = self._prompt_rows(number), self._builder.counts.copy()
        texts = await self.generator.call("rollout", rows, batch_id=number, version=number)
        # The file contains the tokens of the rollouts; the endpoint returns only their texts.
        saved_rollouts = SavedRollouts.load(self._folder / "rollouts", number)
        rewards = await self.rewarder.call("score", texts, rows=_make_reward_rows(saved_rollouts, rows))
        found_sites = self._builder.find_sites(saved_rollouts, number)
        pairs: list[Any] = []
        # Only erring turns are sent to teachers, because requests cost money.
        if self.teachers is not None and (states := self._builder.states(saved_rollouts, found_sites)):
            pairs = await self.teachers.call("pairs", states)
        batch = self._builder.batch(saved_rollouts, rewards, found_sites, pairs)
        # Rollouts of a group with equal rewards have zero advantages, so channel 1 learns nothing from them.
        equal = equal_reward_groups(rewards, self.settings.batch.num_generations)
        outcome = {
            "rewards": rewards,
            "equal_groups": int(equal.sum()),
            "sites": sum(map(len, batch.sites)),
            "pairs": len(batch.pairs.get("dpo_chosen_input_ids", ())),
            "counts": dict(self._builder.counts - counts_before),
        }
        atomic_write_json(self._outcome_path(number), outcome)
        batch.save(self._folder / "batches", number)  # last, because an existing batch counts as complete

    def _prompt_rows(self, number: int) -> list[dict[str, Any]]:
        """Return the data set rows of a batch, each repeated `num_generations` times. The last row of the data set
        is followed by the first.
        """
        count, group = self.settings.prompts_per_batch, self.settings.batch.num_generations
        numbers = [(number * count + offset) % len(self._rows) for offset in range(count)]
        return [dict(self._rows[index]) for index in numbers for _ in range(group)]

    def _outcome_path(self, number: int) -> Path:
        path = self._folder / "rewards" / f"{number:06d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _locations(self) -> dict[str, str]:
        return {"model": self.settings.model, "folder": self.settings.folder, "weights": str(self.shared.folder)}

    def _trainer_settings(self) -> TrainerSettings:
        options = dict(self.settings.trainer)
        # By default the annealing schedule spans the whole run.
        steps = self.settings.num_batches * options.get("num_iterations", 1)
        return TrainerSettings(**self._locations(), loss=self.settings.loss, **{"total_steps": steps, **options})

    def _generator_settings(self) -> GeneratorSettings:
        loss = self.settings.loss
        # The generator must sample with the limits and the temperature that the loss assumes.
        limits = {"max_completion_length": loss.max_completion_length, "temperature": loss.temperature}
        return GeneratorSettings(**self._locations(), **{**limits, **self.settings.generator})

    def _teacher_settings(self) -> TeacherPoolSettings:
        settings = self.settings
        return TeacherPoolSettings(
            folder=settings.folder,
            teachers=settings.teachers,
            max_total_usd=settings.max_total_usd,
            agreement_threshold=settings.agreement_threshold,
        )


logger = logging.getLogger(__name__)
MESH_PREFIX = "composer_"
"""The prefix of our mesh names, by which the fault hook recognizes faults of our processes."""
_LOGGER_PREFIX = "logger-"
"""Monarch's prefix for the meshes of loggers."""
OnEvent = Callable[[str, str], None]
"""Called with "spawn", "call" or "death", and the role."""


@dataclass
class _SupervisedActor:
    """An actor in a separate process, which is restarted when it dies.

    Monarch checks its processes every ten seconds (HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY=1s makes it one second).
    A call to a process that died before or during the call raises SupervisionError; `call` then starts a new process
    and repeats the call. An exception inside an endpoint raises ActorError and leaves the process alive; since it
    indicates a bug, it is passed on to the caller.

    More than `max_deaths` consecutive deaths without an answer end the run, because a process that dies because of its
    settings would die every time.
    """

    actor_class: Any
    settings: Any
    max_deaths: int = 3
    on_event: OnEvent | None = None
    num_deaths: int = 0
    _consecutive_deaths: int = 0
    _mesh: Any = None
    _actor: Any = None

    @property
    def role(self) -> str:
        return self.actor_class.role

    async def call(self, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint of the current process, or of a new process if it has died, and return the answer."""
        supervision_error = _supervision_error()
        while True:  # `_record_death` raises after too many deaths
            actor = self._spawn_if_needed()
            self._notify("call")
            try:
                answer = await getattr(actor, endpoint).call_one(*args, **kwargs)
            except supervision_error as error:
                self._record_death(endpoint, error)
                continue
            self._consecutive_deaths = 0
            return answer

    async def pid(self) -> int:
        return (await self.call("process"))["pid"]

    async def stop(self) -> None:
        """End the process if it is still alive."""
        mesh, self._mesh, self._actor = self._mesh, None, None
        if mesh is None:
            return
        try:
            await mesh.stop()
        except RuntimeError as error:  # a SupervisionError: it died after its last call
            logger.info("%s was already dead when it was stopped: %s", self.role, _first_line(error))

    def _spawn_if_needed(self) -> Any:
        if self._actor is None:
            monarch = require("monarch.actor", extra="monarch")
            _install_fault_hook()
            # One process on this host; "gpus" is just Monarch's name for the dimension and needs no GPU.
            name = f"{MESH_PREFIX}{self.role}"
            self._mesh = monarch.this_host().spawn_procs(per_host={"gpus": 1}, name=name)
            self._actor = self._mesh.spawn(name, self.actor_class, self.settings)
            self._notify("spawn")
        return self._actor

    def _record_death(self, endpoint: str, error: Exception) -> None:
        # The next call spawns a new process.
        self._mesh = self._actor = None
        self.num_deaths += 1
        self._consecutive_deaths += 1
        self._notify("death")
        logger.warning("%s died during %s and is restarted: %s", self.role, endpoint, _first_line(error))
        if self._consecutive_deaths > self.max_deaths:
            fix = "See its output and Monarch's log for the cause. Fix it and start the run again: it resumes."
            got = f"{self._consecutive_deaths} deaths without an answer, the last: {error}"
            raise RunError(explain(f"actor {self.role}", got=got, expected="an answer", fix=fix)) from error

    def _notify(self, event: str) -> None:
        if self.on_event is not None:
            self.on_event(event, self.role)


def _install_fault_hook() -> None:
    """Keep Monarch from ending the program when one of our processes dies. Other faults are passed to the previous
    hook.

    Monarch also reports faults of each process's logger, under a name that does not identify the process. These are
    ignored, because the fault of the process itself follows.
    """
    monarch: Any = require("monarch.actor", extra="monarch")
    previous_hook = monarch.unhandled_fault_hook
    if getattr(previous_hook, "_is_composer_hook", False):
        return

    def hook(failure: Any) -> None:
        if failure.mesh_name.startswith((MESH_PREFIX, _LOGGER_PREFIX)):
            logger.info("process ended: %s", failure.mesh_name)
            return
        previous_hook(failure)

    # Marked, so that a second call does not wrap our own hook.
    hook._is_composer_hook = True  # pyright: ignore[reportFunctionMemberAccess]
    monarch.unhandled_fault_hook = hook


def _supervision_error() -> type[Exception]:
    return require("monarch._rust_bindings.monarch_hyperactor.supervision", extra="monarch").SupervisionError


def _first_line(error: Exception) -> str:
    return str(error).strip().replace("\n", " ")[:300]


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Settings for building batches from rollouts.

    The `num_generations` rollouts of a prompt are adjacent. Pairs longer than `max_pair_tokens` are dropped.
    """

    num_generations: int
    scale_rewards: Literal["group", "batch", "none"] = "none"
    max_pair_tokens: int = 2048
    rollouts: RolloutOptions = field(default_factory=RolloutOptions)


class _BatchBuilder:
    """Builds batches for the trainer, which contain advantages, error sites, and the teachers' pairs.

    `counts` holds the numbers of sites and pairs that were used, and of those that were dropped for each reason.
    """

    def __init__(self, model: str, settings: BatchSettings) -> None:
        self.settings = settings
        tokenizer: Any = load_tokenizer(model)
        # Padding is masked, so any id will do.
        self._pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._renderer = Renderer(tokenizer)
        self._sites = ErringTurnFinder(self._renderer, settings.rollouts)
        self.counts: Counter[str] = Counter()

    def find_sites(self, saved: SavedRollouts, number: int) -> list[ErringTurns]:
        """Return, for each rollout, its error sites and the turns on which hint distillation (channel 2) may train."""
        found_sites = [self._sites.find(rollout) for rollout in saved.rollouts]
        if self.settings.rollouts.hints == "other_kind":  # the control: hints of other kinds
            replace_by_unrelated_hints(self._sites, found_sites, seed=str(number))
        for rollout_sites, rollout in zip(found_sites, saved.rollouts, strict=True):
            self.counts.update(rollout_sites.counts)
            if not is_parsed(rollout, sampled_runs(rollout)):  # without parsed messages, failures cannot be found
                self.counts["dropped:messages_are_not_the_turns"] += 1
        return found_sites

    def states(self, saved: SavedRollouts, found_sites: Sequence[ErringTurns]) -> list[TraceState]:
        """Return the states before the erring turns, without duplicates, to be given to the teachers."""
        states: dict[str, TraceState] = {}
        for rollout, sites in zip(saved.rollouts, found_sites, strict=True):
            # One turn can have several sites.
            for turn_id in sorted({turn.turn_id for turn in sites.turns}):
                states[f"{rollout.rollout_id}::{turn_id}"] = _state(rollout, turn_id)
        return list(states.values())

    def batch(
        self,
        saved: SavedRollouts,
        rewards: Sequence[float],
        found_sites: Sequence[ErringTurns],
        pairs: Sequence[DPOPair] = (),
    ) -> StepBatch:
        """Build the padded batch. The advantage of a rollout is its reward minus the mean reward of its group."""
        rollouts, settings = saved.rollouts, self.settings
        if len(rewards) != len(rollouts):
            raise InputError(explain("rewards", got=len(rewards), expected=f"one for each of {len(rollouts)} rollouts"))
        # The first `num_generations` rewards are the first group, and so on (`_prompt_rows`).
        advantages = group_advantages(torch.tensor(rewards), settings.num_generations, settings.scale_rewards)
        sampled = [rollout.sampled or [1] * len(rollout.completion_ids) for rollout in rollouts]
        if settings.rollouts.only_failed_rollouts:
            found_sites = [
                # Sites are dropped in rollouts better than their group, whose errors did not cost them the reward.
                rollout_sites if advantage <= 0 else ErringTurns(rollout_sites.sequence)
                for rollout_sites, advantage in zip(found_sites, advantages, strict=True)
            ]
        return StepBatch(
            prompt_ids=pad_rows([rollout.prompt_ids for rollout in rollouts], self._pad, at_left=True),
            prompt_mask=pad_rows([[1] * len(rollout.prompt_ids) for rollout in rollouts], 0, at_left=True),
            completion_ids=pad_rows([rollout.completion_ids for rollout in rollouts], self._pad),
            completion_mask=pad_rows([[1] * len(rollout.completion_ids) for rollout in rollouts], 0),
            sampled_mask=pad_rows(sampled, 0),
            advantages=advantages,
            sites=tuple(tuple(rollout_sites.turns) for rollout_sites in found_sites),
            weights_version=saved.weights_version,
            pairs=self._pair_tensors(pairs),
        )

    def _pair_tensors(self, pairs: Sequence[DPOPair]) -> dict[str, Tensor]:
        token_pairs = [ids for pair in pairs if (ids := self._pair_ids(pair)) is not None]
        sides = {"chosen": [pair.chosen for pair in token_pairs], "rejected": [pair.rejected for pair in token_pairs]}
        if not token_pairs:
            return {}
        return {
            f"dpo_{side}_{name}": value
            for side, rows in sides.items()
            for name, value in self._side_tensors(rows).items()
        }

    def _pair_ids(self, pair: DPOPair) -> PairIds | None:
        """Tokenize both answers of a pair. If the pair has to be dropped, count the reason and return None."""
        name = pair["state_id"]
        state = to_conversation(pair["state_messages"], conversation_id=name)
        answers = [answer_turn(pair[side], turn_id=f"{name}:{side}") for side in ("chosen", "rejected")]
        labels = {"conversation_id": name, "format_name": state.format}
        # A string is the reason why the answers cannot be compared.
        ids = comparable_ids(self._renderer, state.turns, *answers, **labels)
        if not isinstance(ids, str) and max(len(side.ids) for side in ids) > self.settings.max_pair_tokens:
            ids = "pair_too_long"
        self.counts["pairs" if not isinstance(ids, str) else f"dropped:{ids}"] += 1
        return None if isinstance(ids, str) else ids

    def _side_tensors(self, rows: Sequence[ResponseIds]) -> dict[str, Tensor]:
        answers = [[0] * row.start + [1] * (len(row.ids) - row.start) for row in rows]
        return {
            "input_ids": pad_rows([row.ids for row in rows], self._pad),
            "attention_mask": pad_rows([[1] * len(row.ids) for row in rows], 0),
            "response_mask": pad_rows(answers, 0),
        }


def _make_reward_rows(saved: SavedRollouts, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that reward functions receive: the data set's columns, the messages, and the environment's
    columns as `info`.
    """
    return [
        {**row, "messages": list(rollout.messages), "info": dict(columns)}
        for row, rollout, columns in zip(rows, saved.rollouts, saved.columns, strict=True)
    ]


def _state(rollout: Rollout, turn_id: str) -> TraceState:
    conversation = conversation_of(rollout, sampled_runs(rollout))
    turn = next(candidate for candidate in conversation.turns if candidate.id == turn_id)
    number, end = 0, 0
    # Turn ids count assistant messages.
    for index, message in enumerate(rollout.messages):
        if message.get("role") == "assistant":
            if assistant_id(number) == turn_id:
                end = index
            number += 1
    return TraceState(
        state_id=f"{rollout.rollout_id}::{turn_id}",
        # The messages before the erring turn are what the teacher sees.
        messages=[*rollout.prompt, *rollout.messages[:end]],
        student_action=action_text(turn),
        tools=[
            {"type": "function", "function": {"name": name, "parameters": dict(schema)}}
            for name, schema in rollout.tools.items()
        ],
    )
