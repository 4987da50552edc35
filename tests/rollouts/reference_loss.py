"""The eight policy losses, written token by token from their definitions, to judge a trainer's loss and its gradient.

L, O, R are the log-probabilities of the sampled token under the policy, under the policy that sampled it, and under the
reference; A is the advantage of the sequence; r = exp(L - O), or its sequence form exp(mean(L - O)).

    clipped (grpo, bnpo, dr_grpo, dapo, luspo)   -min(min(r, delta) A, clip(r, 1 - low, 1 + high) A)
    cispo   -sg(min(r, high)) A L        sapo   -4/t sigmoid(t (r - 1)) A, t by the sign of A
    vespo   -sg(phi(w)) A L, log phi = lam + k log w - lam w, w = exp(sum(L - O)), k and lam by the sign of A
    KL term  + beta r (exp(R - L) - (R - L) - 1), r left out without bias correction
"""

from __future__ import annotations

from typing import Any

import torch

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")


def reference_loss(
    args: Any, inputs: dict[str, Any], logps: torch.Tensor, entropies: torch.Tensor, *, num_accumulated: int = 1
) -> torch.Tensor:
    """The loss of one micro-batch in training mode on one process."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"]))
    counts = mask * _high_entropy(entropies.detach(), mask, args.top_entropy_quantile)
    old = inputs.get("old_per_token_logps", logps.detach())
    rows, length = logps.shape
    total = logps.new_zeros(())
    for row in range(rows):
        kept = [t for t in range(length) if mask[row, t]]
        terms = [
            _token(args, inputs, logps[row], old[row], row, t, kept) * counts[row, t]
            + args.beta * _kl(args, inputs, logps, old, row, t, kept)
            for t in kept
        ]
        share = sum(terms, logps.new_zeros(()))
        total = total + (share / max(len(kept), 1) if args.loss_type in ("grpo", "sapo") else share)
    loss = total / _normaliser(args, inputs, mask, num_accumulated)
    bonus = (entropies * counts).sum() / counts.sum().clamp(min=1)
    return loss - args.entropy_coef * bonus / num_accumulated


def _token(
    args: Any, inputs: dict[str, Any], logps: torch.Tensor, old: torch.Tensor, row: int, t: int, kept: list[int]
):
    advantage = inputs["advantages"][row]
    gaps = [logps[each] - old[each] for each in kept]
    ratio = _ratio(args, logps, old, t, kept)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type in CLIPPED:
        clipped = ratio.clamp(1 - args.epsilon, 1 + high)
        capped = ratio if args.delta is None else ratio.clamp(max=args.delta)
        value = -torch.minimum(capped * advantage, clipped * advantage)
    elif args.loss_type == "cispo":
        value = -ratio.clamp(max=high).detach() * advantage * logps[t]
    elif args.loss_type == "sapo":
        heat = args.sapo_temperature_pos if advantage > 0 else args.sapo_temperature_neg
        value = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
    else:
        value = -_phi(args, sum(gaps).detach(), advantage) * advantage * logps[t]
    return value * _is_kept(args, sum(gaps).detach() / len(gaps), advantage)


def _phi(args: Any, log_weight: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    k, lam = (args.vespo_k_pos, args.vespo_lambda_pos) if advantage >= 0 else (args.vespo_k_neg, args.vespo_lambda_neg)
    return torch.exp(lam + k * log_weight - lam * torch.exp(log_weight))


def _is_kept(args: Any, mean_gap: torch.Tensor, advantage: torch.Tensor) -> float:
    """The off-policy rule: a bad sequence that has become much less likely is left alone."""
    threshold = args.off_policy_mask_threshold
    return 1.0 if threshold is None or advantage >= 0 or -mean_gap <= threshold else 0.0


def _ratio(args: Any, logps: torch.Tensor, old: torch.Tensor, t: int, kept: list[int]) -> torch.Tensor:
    positions = kept if args.importance_sampling_level == "sequence" else [t]
    return torch.exp(sum(logps[each] - old[each] for each in positions) / len(positions))


def _kl(
    args: Any, inputs: dict[str, Any], logps: torch.Tensor, old: torch.Tensor, row: int, t: int, kept: list[int]
) -> torch.Tensor | float:
    if "ref_per_token_logps" not in inputs:
        return 0.0
    gap = inputs["ref_per_token_logps"][row, t] - logps[row, t]
    weight = _ratio(args, logps[row], old[row], t, kept) if args.use_bias_correction_kl else 1.0
    return weight * (torch.exp(gap) - gap - 1)


def _high_entropy(entropies: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    if share == 1.0:
        return torch.ones_like(mask)
    threshold = torch.quantile(entropies[mask.bool()], 1 - share)
    return (entropies >= threshold).to(mask.dtype)


def _normaliser(args: Any, inputs: dict[str, Any], mask: torch.Tensor, num_accumulated: int) -> Any:
    rows = mask.size(0)
    if args.loss_type in ("grpo", "sapo", "luspo"):
        return rows * num_accumulated
    if args.loss_type == "bnpo":
        return mask.sum().clamp(min=1) * num_accumulated
    if args.loss_type == "dr_grpo":
        return rows * args.max_completion_length * num_accumulated
    # dapo, cispo, vespo: all tokens of the generation, shared out over the steps that use them
    return inputs["num_items_in_batch"].clamp(min=1) * num_accumulated / args.steps_per_generation
