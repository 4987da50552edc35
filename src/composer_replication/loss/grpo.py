"""GRPO's policy gradient (arXiv 2402.03300): rewards of a group as advantages, and the clipped objective on log-probs.

L and O are the log-probs of a sampled token under the policy and under the policy that sampled it, A its advantage:

    A    = reward - mean of its group, over a standard deviation ("group", "batch") or over nothing ("none")
    r    = exp(L - O)
    term = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)

How the terms of B sequences become one loss, by TRL's names; `mask` marks the sampled tokens:

    grpo     mean over sequences of each one's own mean      dr_grpo  sum / (B * max_completion_length)
    bnpo     sum / sampled tokens of this micro-batch        dapo     sum / those of the whole step (`num_items`)

For engines that have no such loss, or another one under the same name. TRL's own trainer uses TRL's; a test holds the
two together, values and gradients.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss import rows

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
LOSS_TYPES: tuple[LossType, ...] = ("grpo", "bnpo", "dr_grpo", "dapo")
_STD_FLOOR = 1e-4  # TRL's


class _PolicyLoss(NamedTuple):
    """The loss, and the share of sampled tokens whose term the clip made constant."""

    loss: Tensor
    clipped_share: Tensor


def grouped(rewards: Tensor, num_generations: int) -> Tensor:
    """(B,) -> (groups, num_generations)."""
    if num_generations < 1 or rewards.dim() != 1 or rewards.numel() % num_generations:
        got = f"shape {tuple(rewards.shape)} for groups of {num_generations}"
        raise InputError(explain("rewards", got=got, expected="one reward a rollout, in whole groups"))
    return rewards.view(-1, num_generations)


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: Literal["group", "batch", "none"]) -> Tensor:
    """Distance of summed rewards from their group's mean, over a standard deviation, or over nothing.

    Rollouts of a group stand side by side. A NaN is a rollout that nobody judged: its advantage is 0.
    """
    rows.check_choice(scale_rewards, ("group", "batch", "none"), "scale_rewards")
    groups_GN = grouped(rewards, num_generations)
    advantages = groups_GN - groups_GN.nanmean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (_nan_std(groups_GN, 1) + _STD_FLOOR)
    elif scale_rewards == "batch":
        advantages = advantages / (_nan_std(groups_GN.reshape(1, -1), 1) + _STD_FLOOR)
    return advantages.reshape(-1).nan_to_num(nan=0.0)


def clipped_terms(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """Each token's term, and whether the clip holds it (and so its gradient is 0); `advantages` are (B,) or (B, T)."""
    advantages_BT = advantages[:, None] if advantages.dim() == 1 else advantages
    ratio_BT = (logprobs_BT - old_logprobs_BT.detach()).exp()
    free_BT = ratio_BT * advantages_BT
    held_BT = ratio_BT.clamp(1.0 - epsilon, 1.0 + epsilon_high) * advantages_BT
    return -torch.minimum(free_BT, held_BT), (held_BT < free_BT).detach()


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
    """The clipped objective of one micro-batch; see the module docstring.

    `old_logprobs_BT` are those of the weights that sampled (where they are the weights at hand: `logprobs.detach()`).
    `accumulation` micro-batches make up a step, and their losses and gradients add up to its own. `num_items`, for
    "dapo", counts the sampled tokens of all of them; without it the step is this batch alone.
    """
    rows.check_choice(loss_type, LOSS_TYPES, "loss_type")
    high = epsilon if epsilon_high is None else epsilon_high
    rows.check_positive(epsilon, "epsilon")
    rows.check_positive(high, "epsilon_high")
    _check_shapes(logprobs_BT, old_logprobs_BT, advantages, mask_BT)
    kept_BT = rows.kept_from_mask(mask_BT, logprobs_BT[..., None])
    assert kept_BT is not None
    # What is not kept may hold anything: zeroed before the arithmetic, it reaches neither the value nor a gradient.
    now_BT = torch.where(kept_BT, rows.in_compute_dtype(logprobs_BT), 0.0)
    then_BT = torch.where(kept_BT, rows.in_compute_dtype(old_logprobs_BT), 0.0)
    terms_BT, is_held_BT = clipped_terms(
        now_BT, then_BT, rows.in_compute_dtype(advantages), epsilon=epsilon, epsilon_high=high
    )
    terms_BT = torch.where(kept_BT, terms_BT, 0.0)
    rows.check_finite_rows(terms_BT.flatten(), "grpo_loss")
    counts_B = kept_BT.sum(1)
    held = (is_held_BT & kept_BT).sum() / counts_B.sum().clamp(min=1)
    if loss_type == "grpo":
        loss = (terms_BT.sum(1) / counts_B.clamp(min=1)).mean() / accumulation
    else:
        whole = _denominator(loss_type, counts_B, max_completion_length, num_items, accumulation)
        loss = terms_BT.sum() / whole
    return _PolicyLoss(loss, held)


def _denominator(
    loss_type: LossType, counts_B: Tensor, longest: int | None, num_items: float | None, accumulation: int
) -> Tensor | float:
    """What the sum over all tokens is divided by."""
    if loss_type == "dr_grpo":
        if longest is None or longest < 1:
            expected = "the length at which completions are cut off"
            raise InputError(explain('max_completion_length of loss_type "dr_grpo"', got=longest, expected=expected))
        return float(counts_B.numel() * longest * accumulation)
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
    """The standard deviation of a sample, NaN where fewer than two values are judged, as TRL's."""
    judged = (~values.isnan()).sum(dim, keepdim=True)
    squares = (values - values.nanmean(dim, keepdim=True)) ** 2
    return (squares.nansum(dim, keepdim=True) / (judged - 1).clamp(min=0)).sqrt()
