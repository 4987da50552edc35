"""How much a target token of channel 2 counts. Each weight is a constant: no gradient flows through any of them.

For row n, which predicts token y_n of an erring turn, with the student's and the teacher's log-probs at temperature 1:

    sigmoid gate      w = 2 sigmoid((log p_S(y) - log p_T(y)) / tau)        in (0, 2); 1 where both agree
    teacher entropy   w = clamp(1 - H_T / log V, 0, 1)                      1: the teacher is sure; 0: it knows nothing
    position          w = decay^j for the j-th target token of its site     j from 0

The gate makes tokens that the teacher finds less likely than the student count more, and those that it likes anyway
less. Weights of several kinds are multiplied; normalised, their mean over the channel's rows is 1, so that they move
the loss between tokens and leave its size to alpha.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from composer_replication.loss.rows import check_positive, check_unit_interval


def sigmoid_gate(student_logprobs_N: Tensor, teacher_logprobs_N: Tensor, tau: float) -> Tensor:
    """2 sigmoid((log p_S(y) - log p_T(y)) / tau): 1 where both agree, up to 2 where the teacher objects."""
    check_positive(tau, "tau")
    return 2.0 * torch.sigmoid((student_logprobs_N - teacher_logprobs_N).detach() / tau)


def teacher_certainty(entropy_N: Tensor, vocab: int) -> Tensor:
    """1 - H_T / log V in [0, 1], from entropies in nats; the only distribution over one entry is certain."""
    return (1.0 - entropy_N.detach() / (math.log(vocab) or 1.0)).clamp(0.0, 1.0)


def position_decay(position_N: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """decay^j, with j the number of a target token within its site."""
    check_positive(decay, "decay")
    check_unit_interval(decay, "decay")
    return torch.pow(torch.full_like(position_N, decay, dtype=dtype), position_N)


def with_mean_one(weights_N: Tensor) -> Tensor:
    """Scaled so that their mean is 1; weights that are all 0 stay 0, and say that no row counts."""
    mean = weights_N.mean() if weights_N.numel() else weights_N.new_ones(())
    return weights_N / torch.where(mean == 0, torch.ones_like(mean), mean)
