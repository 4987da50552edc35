"""Preference losses on pairs of a chosen response c and a rejected response r, as means over pairs.

DPO (arXiv 2305.18290) compares the policy with a frozen reference model, on log-probs summed over a response's tokens:

    loss = - logsigmoid(beta ((log pi_c - log ref_c) - (log pi_r - log ref_r)))

SimPO (arXiv 2405.14734) needs no reference model and uses log-probs averaged over a response's tokens:

    loss = - logsigmoid(beta (avg log pi_c - avg log pi_r) - gamma)

A response includes its end-of-turn token. The `gamma_beta_ratio` of SimPO's own code is gamma / beta.

Shape suffix: B pairs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss import rows


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Return the mean DPO loss of B pairs of summed log-probs, each argument (B,)."""
    rows.check_positive(beta, "beta")
    chosen, rejected, ref_chosen, ref_rejected = _check_pair_vectors(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    # How much more strongly than the reference model the policy prefers the chosen response.
    margin = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())
    values_B = -F.logsigmoid(beta * margin)
    rows.check_finite_rows(values_B, "dpo_loss")
    # Without pairs this is 0 and not NaN.
    return values_B.sum() / max(values_B.numel(), 1)


def avg_sequence_logprob(model_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Return the mean log-prob of each sequence's response tokens, (B, T) -> (B,). Raises if a response is empty."""
    token_mask = rows.to_boolean_mask(response_mask, model_logprobs[..., None], "response_mask")
    assert token_mask is not None
    lengths = token_mask.sum(-1)
    if bool((lengths == 0).any()):
        empty = int((lengths == 0).nonzero()[0, 0])
        raise InputError(
            explain(f"response_mask of sequence {empty}", got="no response token", expected="at least one")
        )
    return rows.in_compute_dtype(model_logprobs).masked_fill(~token_mask, 0.0).sum(-1) / lengths


def simpo_loss(
    chosen_avg_logprobs: Tensor, rejected_avg_logprobs: Tensor, *, beta: float = 2.0, gamma: float = 1.0
) -> Tensor:
    """Return the mean SimPO loss of B pairs of averaged log-probs, each argument (B,)."""
    rows.check_positive(beta, "beta")
    chosen, rejected = _check_pair_vectors(
        chosen_avg_logprobs=chosen_avg_logprobs, rejected_avg_logprobs=rejected_avg_logprobs
    )
    values_B = -F.logsigmoid(beta * (chosen - rejected) - gamma)
    rows.check_finite_rows(values_B, "simpo_loss")
    return values_B.sum() / max(values_B.numel(), 1)


def _check_pair_vectors(**logprobs: Tensor) -> list[Tensor]:
    """Cast the vectors to the compute dtype. Raises ShapeError unless they are all floating point and equally long."""
    for name, values in logprobs.items():
        if not isinstance(values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(explain(name, got=type(values).__name__, expected="a tensor (B,), one entry per pair"))
        if values.dim() != 1:
            raise ShapeError(explain(f"{name} shape", got=tuple(values.shape), expected="(B,), one entry per pair"))
        if not values.is_floating_point():
            raise ShapeError(explain(f"{name} dtype", got=values.dtype, expected="a floating-point dtype"))
    lengths = {name: tuple(values.shape) for name, values in logprobs.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(explain("log-prob vectors", got=lengths, expected="equal lengths"))
    return [rows.in_compute_dtype(values) for values in logprobs.values()]
