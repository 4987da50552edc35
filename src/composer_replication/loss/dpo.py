"""Direct preference optimisation (arXiv 2305.18290).

    loss = - logsigmoid(beta ((log pi_c - log ref_c) - (log pi_r - log ref_r))), mean over pairs

Log-probs are sums over a response's tokens, its end-of-turn token included; the reference is frozen.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from composer_replication.loss import rows


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Mean DPO loss of B pairs of summed sequence log-probs, each (B,)."""
    rows.check_positive(beta, "beta")
    chosen, rejected, ref_chosen, ref_rejected = rows.check_pair_vectors(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    margin = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())
    values_B = -F.logsigmoid(beta * margin)
    rows.check_finite_rows(values_B, "dpo_loss")
    return values_B.sum() / max(values_B.numel(), 1)
