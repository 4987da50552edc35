"""Rollouts generated from kept keys: a stand-in for the sampling loop of transformers' `generate`.

What a group of rollouts shares is read once, and what a rollout has read stays for its next turn:

    prompts   equal rows are read once and copied, and so are first tokens that all rows share
    turns     inside `rollout()` a row goes on from the keys of its last turn; what differs from them is read anew
    steps     recorded as CUDA graphs where there are some (`generation.passes`)
    ends      once many rows have ended, only the others are computed

Tokens are chosen as transformers would choose them (`generation.choice`). Whatever is not done here (beams, a processor
that is not known, a model that cannot: `generation.suitability`) is left to transformers, and said once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_replication.objective.adapters import evaluating, rows_in_place
from composer_replication.objective.attention.attend import own_masks_taken
from composer_replication.rollouts.generation.casts import casts_kept
from composer_replication.rollouts.generation.choice import Choice, choice_of, why_not_chosen
from composer_replication.rollouts.generation.key_values import KeyValueRows
from composer_replication.rollouts.generation.loop import TokenLoop
from composer_replication.rollouts.generation.passes import read_tokens
from composer_replication.rollouts.generation.suitability import why_not_kept
from composer_replication.rollouts.generation.token_rows import (
    Origin,
    Tokens,
    origins,
    rows_without_padding,
    shared_by_all,
    unequal_rows,
)

logger = logging.getLogger(__name__)
# What transformers hands to a sampling loop of a plain text model; anything else is for a model that reads more.
_USUAL_INPUTS = {"position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
_WORTH_SHARING = 64


class _Left(Exception):
    """Not done here, and why."""


@dataclass
class _Kept:
    """Rows of this rollout as far as they were read, and how many tokens of each are the first prompt."""

    cache: KeyValueRows
    prompts: list[int]


@dataclass
class _Rollout:
    budget: int | None
    is_kept: bool
    kept: _Kept | None = None


@dataclass
class RolloutGenerator:
    """`generate` is `model.generate` with another loop inside. `batch` bounds how many rows are generated at once.

    Memory: rows x (longest row + new tokens) x layers x 2 x key heads x head size, half as much again while few rows
    run on; `counts["cache_bytes"]` is the most so far. With `batch`, nothing is kept between turns.
    """

    batch: int | None = None
    counts: Counter[str] = field(default_factory=Counter[str])
    left_because: set[str] = field(default_factory=set[str])
    """Why calls were left to transformers, each reason once."""
    _rollout: _Rollout | None = None

    def generate(self, model: Any, *args: Any, **inputs: Any) -> Tensor:
        """As `model.generate`, with the same arguments."""
        with rows_in_place(model):
            return self._generate(model.generate, args, inputs)

    @contextmanager
    def standing_in(self, model: Any) -> Iterator[None]:
        """Inside, `model.generate` is this one's: for engines that call it themselves."""
        usual, own_generate = model.generate, model.__dict__.get("generate")

        def generate(*args: Any, **inputs: Any) -> Tensor:
            with rows_in_place(model):
                return self._generate(usual, args, inputs)

        model.__dict__["generate"] = generate
        try:
            yield
        finally:
            del model.__dict__["generate"]
            if own_generate is not None:
                model.__dict__["generate"] = own_generate

    @contextmanager
    def rollout(self, *, budget: int | None = None, keep: bool = True) -> Iterator[None]:
        """One batch of rollouts, over all of their turns; the weights must stay as they are inside.

        `budget` bounds the tokens of a rollout behind its first prompt, what tools say included, over all turns.
        """
        self._rollout = _Rollout(budget, keep and self.batch is None)
        try:
            yield
        finally:
            self._rollout = None

    def _generate(self, usual: Callable[..., Tensor], args: Any, inputs: dict[str, Any]) -> Tensor:
        if "custom_generate" not in inputs:
            try:
                ids = usual(*args, **inputs, custom_generate=self._sample)
            except _Left as left:
                self._say(str(left))
            else:
                self.counts["fast_calls"] += 1
                return ids
        self.counts["usual_calls"] += 1
        return usual(*args, **inputs)

    def _say(self, reason: str) -> None:
        if reason not in self.left_because:
            self.left_because.add(reason)
            logger.warning("rollouts are generated by transformers' own loop: %s", reason)

    def _sample(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:
        """In the place of transformers' own sampling loop, which `generate` has prepared everything for.

        Parameters that the own one has not would be taken out of what `generate` prepares.
        """
        attention_mask: Tensor | None = model_kwargs.pop("attention_mask", None)
        other_inputs = {name for name, value in model_kwargs.items() if value is not None} - _USUAL_INPUTS
        if other_inputs:
            raise _Left(f"the model is given {', '.join(sorted(other_inputs))}")
        if "logits_to_keep" not in model_kwargs:
            raise _Left("the model computes the logits of every token it reads")
        if reason := why_not_chosen(logits_processor, stopping_criteria, generation_config):
            raise _Left(reason)
        rows = rows_without_padding(input_ids, attention_mask)
        if rows is None:
            raise _Left("prompts are not padded on the left")
        choice = choice_of(logits_processor, stopping_criteria, generation_config, input_ids.device)
        if reason := why_not_kept(model, max(map(len, rows)) + choice.max_length - input_ids.shape[1]):
            raise _Left(reason)
        size = self.batch or len(rows)
        starts = range(0, len(rows), size)
        with evaluating(model), own_masks_taken(model), casts_kept(model):
            parts = [self._sample_rows(model, input_ids[at : at + size], rows[at : at + size], choice) for at in starts]
        width = max(part.shape[1] for part in parts)
        return torch.cat(
            [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=int(choice.pad)) for part in parts]
        )

    def _sample_rows(self, model: Any, input_ids: Tensor, rows: list[Tokens], choice: Choice) -> Tensor:
        rollout = self._rollout or _Rollout(None, is_kept=False)
        most = choice.max_length - input_ids.shape[1]
        unequal, row_numbers = unequal_rows(rows)
        kept_rows, rollout.kept = rollout.kept, None
        sources = (
            [None] * len(unequal) if kept_rows is None else origins(unequal, kept_rows.cache.tokens, kept_rows.prompts)
        )
        prompts = [
            kept_rows.prompts[origin.row] if kept_rows and origin else len(row)
            for origin, row in zip(sources, unequal, strict=True)
        ]
        spent = [len(row) - prompt for row, prompt in zip(unequal, prompts, strict=True)]
        budgets = [most if rollout.budget is None else max(1, min(most, rollout.budget - count)) for count in spent]
        capacity = max(len(row) - 1 + new for row, new in zip(unequal, budgets, strict=True))
        cache = self._read(model, [row[:-1] for row in unequal], row_numbers, capacity, kept_rows, sources)
        self.counts["prompt_tokens"] += sum(map(len, rows)) - len(rows)
        loop = TokenLoop(
            model, cache, input_ids, choice, [budgets[number] for number in row_numbers], is_kept=rollout.is_kept
        )
        ids = loop.run()
        self.counts["new_tokens"] += loop.num_new
        self.counts["cache_bytes"] = max(self.counts["cache_bytes"], loop.most_bytes)
        rollout.kept = _Kept(cache, [prompts[number] for number in row_numbers]) if rollout.is_kept else None
        return ids

    def _read(
        self,
        model: Any,
        rows: list[Tokens],
        row_numbers: list[int],
        capacity: int,
        kept_rows: _Kept | None,
        sources: Sequence[Origin | None],
    ) -> KeyValueRows:
        """The keys of these rows, kept or read now, each in all of its places."""
        if kept_rows is None:
            cache = self._begun(model, rows, capacity)
        else:
            begins = [source or Origin(0, 0) for source in sources]
            shared = [min(begin.shared, len(row)) for begin, row in zip(begins, rows, strict=True)]
            cache = kept_rows.cache.taken([begin.row for begin in begins], shared, capacity, moved=True)
        self.counts["read_tokens"] += read_tokens(model, cache, rows)
        if len(rows) == len(row_numbers):
            return cache
        return cache.taken(row_numbers, [len(rows[number]) for number in row_numbers], capacity, moved=True)

    def _begun(self, model: Any, rows: Sequence[Tokens], capacity: int) -> KeyValueRows:
        """Rows with what all of them begin with."""
        shared = shared_by_all(rows)
        if len(rows) < 2 or shared < _WORTH_SHARING:
            return KeyValueRows(len(rows), capacity)
        first = KeyValueRows(1, shared)
        self.counts["read_tokens"] += read_tokens(model, first, [rows[0][:shared]])
        return first.taken([0] * len(rows), [shared] * len(rows), capacity, moved=True)
