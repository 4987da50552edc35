"""Rollouts and their rewards as the batch that the trainer reads: advantages, error sites, pairs of the teachers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from composer_replication.actions.parse import answer_turn
from composer_replication.actions.write import action_text
from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.pair_tokens import PairIds, ResponseIds, compared_ids
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError, explain
from composer_replication.loss.grpo import group_advantages
from composer_replication.recipes.monarch.rollout_file import KeptRollouts
from composer_replication.recipes.monarch.step_batch import StepBatch
from composer_replication.rollouts.conversation import Rollout, assistant_id, conversation_of, is_parsed, sampled_runs
from composer_replication.rollouts.other_hints import exchange_hints
from composer_replication.rollouts.sites import FoundSites, RolloutOptions, RolloutSites
from composer_replication.types import DPOPair, TraceState


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
        ids = compared_ids(self._renderer, state.turns, *answers, **labels)
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
