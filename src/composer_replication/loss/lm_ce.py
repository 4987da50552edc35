"""Next-token cross-entropy with label smoothing, one value per row:

nll = -((1 - eps) log p(target) + eps / V * sum_v log p(v))

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.loss import rows


def check_label_smoothing(label_smoothing: float) -> None:
    """Raise InputError unless the value is in [0, 1)."""
    if not 0.0 <= label_smoothing < 1.0:
        raise InputError(explain("label_smoothing", got=label_smoothing, expected="a number in [0, 1)"))


@dataclass(frozen=True, kw_only=True)
class TokenCrossEntropy:
    """Cross-entropy of one token per row. The fused kernels compute the same formula."""

    label_smoothing: float = 0.0

    def __call__(self, logits_NV: Tensor, token_ids_N: Tensor) -> Tensor:
        log_probs = rows.in_compute_dtype(logits_NV).log_softmax(-1)
        chosen = log_probs.gather(-1, token_ids_N[:, None]).squeeze(-1)
        # 0 * -inf would be NaN for a masked vocabulary entry.
        if self.label_smoothing == 0.0:
            return -chosen
        return -((1.0 - self.label_smoothing) * chosen + self.label_smoothing * log_probs.mean(-1))


def lm_cross_entropy(
    logits: Tensor, token_ids: Tensor, mask: Tensor | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy over `mask`; row n of the logits must *predict* token_ids[n] (already shifted)."""
    check_label_smoothing(label_smoothing)
    rows.check_logit_pair(logits, logits)
    rows.check_mask_shape(token_ids, logits, "token_ids")
    row_mask = rows.to_boolean_mask(mask, logits)
    chosen = token_ids.flatten() if row_mask is None else token_ids[row_mask]
    rows.check_token_ids(chosen, logits.shape[-1])
    values_N = TokenCrossEntropy(label_smoothing=label_smoothing)(rows.select_rows(logits, row_mask), chosen)
    rows.check_finite_rows(values_N, "lm_cross_entropy")
    return values_N.sum() / max(values_N.numel(), 1)
