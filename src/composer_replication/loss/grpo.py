"""GRPO's policy gradient (arXiv 2402.03300): group advantages, and the clipped objective on log-probs.

L and O are the log-probs of a sampled token under the policy and under the policy that sampled it; A is its advantage:

    A    = reward - mean of its group, divided by a standard deviation ("group", "batch") or not ("none")
    r    = exp(L - O)
    term = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)

The terms of B sequences are reduced to one loss in one of four ways, named as in TRL; `mask` marks the sampled tokens:

    grpo     mean over sequences of each one's mean        dr_grpo  sum / (B * max_completion_length)
    bnpo     sum / sampled tokens of this micro-batch      dapo     sum / sampled tokens of the step (`num_items`)

It is meant for engines that lack such a loss or have a different one of the same name. With TRL's trainer, TRL's own
loss is used; a test compares values and gradients of the two.

Shape suffixes: B sequences, T time, G groups, N generations per group.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss import rows

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
LOSS_TYPES: tuple[LossType, ...] = ("grpo", "bnpo", "dr_grpo", "dapo")
# Added to the standard deviation, as in TRL, because all rewards of a group may be equal.
_STD_FLOOR = 1e-4


class _PolicyLoss(NamedTuple):
    """The loss, and the fraction of sampled tokens whose term was clipped and therefore has no gradient."""

    loss: Tensor
    clipped_share: Tensor


def reshape_to_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Reshape rewards (B,) to (G, num_generations). Raises InputError if B is not a multiple of `num_generations`."""
    if num_generations < 1 or rewards.dim() != 1 or rewards.numel() % num_generations:
        got = f"shape {tuple(rewards.shape)} for groups of {num_generations}"
        raise InputError(explain("rewards", got=got, expected="one reward per rollout, in whole groups"))
    return rewards.view(-1, num_generations)


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: Literal["group", "batch", "none"]) -> Tensor:
    """Return the advantages (B,): each reward minus the mean of its group, scaled according to `scale_rewards`.

    Rollouts of a group are adjacent. A rollout without a reward has reward NaN and advantage 0.
    """
    rows.check_choice(scale_rewards, ("group", "batch", "none"), "scale_rewards")
    groups_GN = reshape_to_groups(rewards, num_generations)
    advantages = groups_GN - groups_GN.nanmean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (_nan_std(groups_GN, 1) + _STD_FLOOR)
    elif scale_rewards == "batch":
        advantages = advantages / (_nan_std(groups_GN.reshape(1, -1), 1) + _STD_FLOOR)
    return advantages.reshape(-1).nan_to_num(nan=0.0)


def clipped_terms(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """Return each token's term of the objective, and whether it was clipped. A clipped term has no gradient.

    `advantages` are (B,) or (B, T).
    """
    advantages_BT = advantages[:, None] if advantages.dim() == 1 else advantages
    ratio_BT = (logprobs_BT - old_logprobs_BT.detach()).exp()
    unclipped_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1.0 - epsilon, 1.0 + epsilon_high) * advantages_BT
    return -torch.minimum(unclipped_BT, clipped_BT), (clipped_BT < unclipped_BT).detach()


def grpo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    loss_type: LossType = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    max_completion_length: int | None = None,
    num_items: float | None = None,
    accumulation: int = 1,
) -> _PolicyLoss:
    """Return the clipped objective of one micro-batch; see the module docstring.

    Args:
        old_logprobs_BT: Log-probs under the weights that sampled; `logprobs_BT.detach()` if those are the current ones.
        advantages: One per sequence (B,) or per token (B, T).
        accumulation: Number of micro-batches per step; their losses and gradients sum to those of the step.
        num_items: For "dapo", the sampled tokens of all micro-batches of the step. Unset: this batch is the step.
    """
    rows.check_choice(loss_type, LOSS_TYPES, "loss_type")
    high = epsilon if epsilon_high is None else epsilon_high
    rows.check_positive(epsilon, "epsilon")
    rows.check_positive(high, "epsilon_high")
    _check_shapes(logprobs_BT, old_logprobs_BT, advantages, mask_BT)
    is_sampled_BT = rows.to_boolean_mask(mask_BT, logprobs_BT[..., None])
    assert is_sampled_BT is not None
    # Masked entries may be anything, even NaN. Zeroed before the arithmetic, they reach neither value nor gradient.
    new_BT = torch.where(is_sampled_BT, rows.in_compute_dtype(logprobs_BT), 0.0)
    old_BT = torch.where(is_sampled_BT, rows.in_compute_dtype(old_logprobs_BT), 0.0)
    terms_BT, is_clipped_BT = clipped_terms(
        new_BT, old_BT, rows.in_compute_dtype(advantages), epsilon=epsilon, epsilon_high=high
    )
    # A masked token has ratio 1, so its term would be its advantage.
    terms_BT = torch.where(is_sampled_BT, terms_BT, 0.0)
    rows.check_finite_rows(terms_BT.flatten(), "grpo_loss")
    counts_B = is_sampled_BT.sum(1)
    clipped_share = (is_clipped_BT & is_sampled_BT).sum() / counts_B.sum().clamp(min=1)
    if loss_type == "grpo":
        loss = (terms_BT.sum(1) / counts_B.clamp(min=1)).mean() / accumulation
    else:
        loss = terms_BT.sum() / _denominator(loss_type, counts_B, max_completion_length, num_items, accumulation)
    return _PolicyLoss(loss, clipped_share)


def _denominator(
    loss_type: LossType,
    counts_B: Tensor,
    max_completion_length: int | None,
    num_items: float | None,
    accumulation: int,
) -> Tensor | float:
    """Return the number by which the sum of the terms of all tokens is divided."""
    if loss_type == "dr_grpo":
        if max_completion_length is None or max_completion_length < 1:
            what = 'max_completion_length of loss_type "dr_grpo"'
            expected = "the length at which completions are cut off"
            raise InputError(explain(what, got=max_completion_length, expected=expected))
        return float(counts_B.numel() * max_completion_length * accumulation)
    if loss_type == "bnpo":
        return counts_B.sum().clamp(min=1) * accumulation
    if num_items is None and accumulation > 1:
        expected = "the sampled tokens of all micro-batches of the step"
        raise InputError(explain('num_items of loss_type "dapo" with accumulation', got=None, expected=expected))
    return counts_B.sum().clamp(min=1) if num_items is None else max(float(num_items), 1.0)


def _check_shapes(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> None:
    if logprobs.dim() != 2:
        raise ShapeError(explain("logprobs shape", got=tuple(logprobs.shape), expected="(B, T)"))
    for name, tensor in (("old_logprobs", old), ("mask", mask)):
        if tensor.shape != logprobs.shape:
            raise ShapeError(explain(f"{name} shape", got=tuple(tensor.shape), expected=tuple(logprobs.shape)))
    if advantages.shape not in (logprobs.shape[:1], logprobs.shape):
        expected = f"{tuple(logprobs.shape[:1])} or {tuple(logprobs.shape)}"
        raise ShapeError(explain("advantages shape", got=tuple(advantages.shape), expected=expected))


def _nan_std(values: Tensor, dim: int) -> Tensor:
    """Return the sample standard deviation of the values that are not NaN; NaN if there are fewer than two."""
    # As in TRL, with Bessel's correction, so a single value gives 0 / 0.
    counts = (~values.isnan()).sum(dim, keepdim=True)
    squares = (values - values.nanmean(dim, keepdim=True)) ** 2
    return (squares.nansum(dim, keepdim=True) / (counts - 1).clamp(min=0)).sqrt()
