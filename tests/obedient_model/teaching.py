"""Batches of the world's sessions as the real renderer makes them, plain training on them, and what to measure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from composer_replication import compose_loss
from composer_replication.batch.hint_placement import teacher_context
from composer_replication.batch.pair_tokens import _pair_ids
from composer_replication.batch.session_batch import SiteHint, TokenPair, session_batches
from composer_replication.batch.tree_batch import TreeBatch, pack_batches
from composer_replication.trainer.objective.compose import LossComponents
from composer_replication.trainer.objective.reference import response_logprobs
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from obedient_model.tasks import ToySession
from obedient_model.world import World

BUDGET = 4096  # no session comes near it


def site_batches(world: World, sessions: Sequence[ToySession], hints: Sequence[str]) -> list[TreeBatch]:
    """Channel 2 alone: each session's erring turn with a hint."""
    made: list[TreeBatch] = []
    for session, hint in zip(sessions, hints, strict=True):
        rendered, span = world.rendered(session)
        sites = [SiteHint(span, hint)]
        made += session_batches(world.renderer, rendered, budget=BUDGET, responses=[], sites=sites).batches
    return made


def token_pair(world: World, session: ToySession) -> TokenPair:
    """The right call over the one that was made."""
    identity = session.conversation.id
    pair = _pair_ids(world.renderer, session.state, session.answer(), session.erring, conversation_id=identity)
    return TokenPair(
        chosen_ids=pair.chosen.ids,
        chosen_start=pair.chosen.start,
        rejected_ids=pair.rejected.ids,
        rejected_start=pair.rejected.start,
    )


def pair_batches(world: World, sessions: Sequence[ToySession]) -> list[TreeBatch]:
    """Channel 3 alone, without reference log-probs."""
    made: list[TreeBatch] = []
    for session in sessions:
        rendered, _ = world.rendered(session)
        pairs = [token_pair(world, session)]
        made += session_batches(world.renderer, rendered, budget=BUDGET, responses=[], pairs=pairs).batches
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Plain SGD moves the weights by the gradient and nothing else; AdamW is what runs use."""

    num_steps: int = 16
    batch_size: int = 8
    learning_rate: float = 0.2
    optimizer: Literal["sgd", "adamw"] = "sgd"

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=self.learning_rate)
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.0)


def train(
    model: nn.Module,
    batches: Sequence[TreeBatch],
    seed: int,
    how: Training,
    *,
    options_at: Callable[[int], dict[str, Any]] | None = None,
    after_step: Callable[[LossComponents, int], object] | None = None,
    **options: Any,
) -> list[float]:
    """Steps on the composed loss; gives the losses back."""
    draw = random.Random(seed)
    optimizer = how.optimizer_of(model)
    losses: list[float] = []
    for step in range(how.num_steps):
        batch = pack_batches(draw.sample(list(batches), how.batch_size))
        components = compose_loss(model, batch, **options, **(options_at(step) if options_at else {}))
        optimizer.zero_grad(set_to_none=True)
        components.total.backward()
        optimizer.step()
        losses.append(float(components.total.detach()))
        if after_step is not None:
            after_step(components, step)
    return losses


TeacherName = Literal["live", "frozen", "trust_region"]


def teachers_of(world: World, name: TeacherName) -> list[WeightedTeacher] | None:
    """None is the student itself; a trust region is nearly all start weights and a little of the student."""
    if name == "live":
        return None
    shares = [(world.model, 1.0)] if name == "frozen" else [(world.model, 0.99), (None, 0.01)]
    return [WeightedTeacher(model, coefficient) for model, coefficient in shares]


def erring_logprobs(world: World, model: nn.Module, sessions: Sequence[ToySession], hint: str = "") -> Tensor:
    """Log-prob of each session's erring call, its name and arguments, as it stands there (or after a hint)."""
    found: list[tuple[list[int], int]] = []
    for session in sessions:
        rendered, span = world.rendered(session)
        assert span.call_start is not None
        assert span.call_end is not None
        context = teacher_context(world.renderer, rendered, span, hint)
        moved = context.start - span.start
        found.append((context.ids[: span.call_end + moved], span.call_start + moved))
    return response_logprobs(model, found)


def pair_logprobs(world: World, model: nn.Module, sessions: Sequence[ToySession]) -> tuple[Tensor, Tensor]:
    """Summed log-probs (P, 2) of the right and the erring answer to each session's state, and their lengths."""
    responses: list[tuple[Sequence[int], int]] = []
    for session in sessions:
        pair = token_pair(world, session)
        responses += [(pair.chosen_ids, pair.chosen_start), (pair.rejected_ids, pair.rejected_start)]
    lengths = torch.tensor([len(ids) - start for ids, start in responses])
    return response_logprobs(model, responses).view(-1, 2), lengths.view(-1, 2)
