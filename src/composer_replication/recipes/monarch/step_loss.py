"""The loss of one batch of rollouts: the clipped policy gradient, channel 2 on the same pass, channel 3 on its pairs.

total = grpo + alpha * sdpo + beta_replay * replay

The kernels are those of every other engine: `loss.grpo`, `rollouts.channel`, `objective.compose`. A batch may be cut
into pieces of rows, whose losses and gradients add up to the whole's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.errors import InputError, explain
from composer_replication.loss.grpo import LOSS_TYPES, LossType, grpo_loss
from composer_replication.loss.linear import linear_token_logprobs
from composer_replication.loss.rows import check_choice, check_positive
from composer_replication.objective.channels import in_head_dtype
from composer_replication.objective.compose import channel_options, compose_loss
from composer_replication.objective.knobs import LossKnobs
from composer_replication.objective.model_head import causal_lm_of, decoder_of, head_of
from composer_replication.objective.teacher_rows import WeightedTeacher
from composer_replication.recipes.monarch.step_batch import StepBatch
from composer_replication.rollouts.channel import Importance, RolloutChannel, place_sites


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What a step computes. `is_clip` bounds the importance weights of channel 2, None leaves them out.

    `rows_at_once` cuts a batch into pieces of so many rows, for memory; it must divide the batch.
    """

    knobs: LossKnobs = field(default_factory=lambda: LossKnobs(beta_replay=0.0))
    loss_type: LossType = "dr_grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    max_completion_length: int = 256
    temperature: float = 1.0
    is_clip: float | None = 2.0
    rows_at_once: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.loss_type, LOSS_TYPES, "loss_type")
        check_positive(self.temperature, "temperature")
        if self.knobs.sdpo_wrapper == "taid":
            fix = "Use the TRL trainer for it; here no schedule moves its target."
            raise InputError(explain("sdpo_wrapper", got="taid", expected="none or entropy_opd", fix=fix))


class StepTerms(NamedTuple):
    """Values of one pass over a batch or a piece of it; a channel that had no items is None, not 0."""

    total: Tensor
    grpo: Tensor
    sdpo: Tensor | None
    replay: Tensor | None
    logprobs_BC: Tensor
    """Of the sampled tokens, detached; 0 elsewhere."""
    clipped_share: float


class Shares(NamedTuple):
    """How many pieces a batch is cut into, and what all of them hold together."""

    pieces: int
    sampled_tokens: int
    taught_tokens: int


def shares_of(batch: StepBatch, settings: LossSettings) -> Shares:
    rows = batch.completion_ids.shape[0]
    size = settings.rows_at_once or rows
    if size < 1 or rows % size:
        raise InputError(explain("rows_at_once", got=f"{size} for {rows} rows", expected="a divisor of the batch"))
    taught = sum(turn.end - turn.start for turns in batch.sites for turn in turns)
    return Shares(rows // size, int(batch.loss_mask.sum()), taught)


def pieces_of(batch: StepBatch, shares: Shares) -> Iterator[tuple[slice, StepBatch]]:
    """The pieces with their rows; pairs go with the first."""
    size = batch.completion_ids.shape[0] // shares.pieces
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampled_mask", "advantages", "sites")
    for number in range(shares.pieces):
        rows = slice(number * size, (number + 1) * size)
        cut: dict[str, Any] = {name: getattr(batch, name)[rows] for name in names}
        old = None if batch.old_logprobs is None else batch.old_logprobs[rows]
        yield rows, replace(batch, **cut, old_logprobs=old, pairs=batch.pairs if number == 0 else {})


def step_terms(
    model: nn.Module,
    batch: StepBatch,
    settings: LossSettings,
    shares: Shares,
    *,
    alpha: float,
    teachers: Sequence[WeightedTeacher] | None = None,
) -> StepTerms:
    """All channels of a piece. Without old log-probs the weights at hand are those that sampled: every ratio is 1."""
    head = head_of(model, batch.input_ids[:1])  # its first look runs the body, which channel 2 must not hear

    def policy() -> tuple[Tensor, Tensor, float]:
        now_BC = completion_logprobs(model, batch, settings.temperature, head)
        then_BC = now_BC.detach() if batch.old_logprobs is None else batch.old_logprobs
        policy_loss = grpo_loss(
            now_BC,
            then_BC,
            batch.advantages,
            batch.loss_mask,
            loss_type=settings.loss_type,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high,
            max_completion_length=settings.max_completion_length,
            num_items=shares.sampled_tokens,
            accumulation=shares.pieces,
        )
        return policy_loss.loss, now_BC.detach(), float(policy_loss.clipped_share)

    (grpo, logprobs_BC, clipped), sdpo = _with_hints(model, batch, settings, shares, alpha, teachers, policy)
    replay = _replay(model, batch, settings.knobs)
    total = grpo if sdpo is None else grpo + alpha * sdpo
    total = total if replay is None else total + settings.knobs.beta_replay * replay
    return StepTerms(total, grpo, sdpo, replay, logprobs_BC, clipped)


def completion_logprobs(model: nn.Module, batch: StepBatch, temperature: float, head: Any = None) -> Tensor:
    """(B, C) of the sampled tokens, 0 elsewhere; the LM head is applied to their rows alone."""
    head = head or head_of(model, batch.input_ids[:1])
    warm = replace(head, scale=head.scale / temperature)
    body: Any = decoder_of(causal_lm_of(model))
    hidden_BTH: Tensor = body(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state
    width, mask_BC = batch.completion_ids.shape[1], batch.loss_mask
    rows_NH = in_head_dtype(hidden_BTH[:, -width - 1 : -1][mask_BC], head)
    logprobs_N = linear_token_logprobs(rows_NH, warm, batch.completion_ids[mask_BC])
    return torch.zeros(mask_BC.shape, dtype=logprobs_N.dtype, device=mask_BC.device).index_put(
        mask_BC.nonzero(as_tuple=True), logprobs_N
    )


def _with_hints(
    model: nn.Module,
    batch: StepBatch,
    settings: LossSettings,
    shares: Shares,
    alpha: float,
    teachers: Sequence[WeightedTeacher] | None,
    policy: Callable[[], tuple[Tensor, Tensor, float]],
) -> tuple[tuple[Tensor, Tensor, float], Tensor | None]:
    """The policy's loss, and channel 2 on the rows of its pass; also where its weight has sunk to 0."""
    knobs = settings.knobs
    placed = None
    if knobs.alpha_sdpo > 0:
        placed = place_sites(batch.sites, batch.prompt_mask, batch.input_ids, batch.completion_mask)
    if placed is None:
        return policy(), None
    options = channel_options(
        model,
        replace(knobs, alpha_sdpo=alpha, beta_replay=0.0),
        denominators={"sdpo_jsd": float(shares.taught_tokens)},
        sdpo_teachers=teachers,
    )
    importance = None
    if batch.old_logprobs is not None and settings.is_clip is not None:
        importance = Importance(batch.old_logprobs, settings.temperature, settings.is_clip)
    channel = RolloutChannel(model, placed, options, importance)
    channel.teach(batch.input_ids)
    with channel.listening():
        policy_terms = policy()
    hints = channel.result(*batch.input_ids.shape)
    assert hints is not None
    return policy_terms, hints.value


def _replay(model: nn.Module, batch: StepBatch, knobs: LossKnobs) -> Tensor | None:
    """Channel 3; channel 1's stand-in has no row here."""
    if not batch.pairs or not knobs.beta_replay:
        return None
    ids = batch.pairs["dpo_chosen_input_ids"][:1]
    inputs = {"input_ids": ids, "response_mask": torch.zeros_like(ids), **batch.pairs}
    options: dict[str, Any] = {**vars(knobs), "alpha_sdpo": 0.0}
    return compose_loss(model, inputs, **options).trace_replay_dpo
