"""Entropy-aware on-policy distillation: the teacher's entropy H_T (in nats) decides which KL divergence is used.

    gate="soft" (this project's API): w = clamp(H_T / h_max, 0, 1);  d = w kl_ts + (1 - w) kl_st;  h_max = log V
    gate="hard" (arXiv 2603.07079):   d = kl_st + 1[H_T > tau] * KL_topk(T || S)

The hard gate's second term is computed on the teacher's top-k entries plus one tail bucket; without the bucket, a
truncated KL can be negative. H_T is computed at the temperature of the loss. No gradient flows through either gate.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from composer_replication.errors import ShapeError, explain
from composer_replication.loss import rows
from composer_replication.loss.jsd import log_prob_divergence
from composer_replication.loss.sdpo import entries_with_tail

GATES = ("soft", "hard")


def _log_prob_entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy in nats of log-distributions along the last dimension."""
    return -(log_probs.exp() * log_probs).sum(-1)


def teacher_entropy(teacher_logits: Tensor) -> Tensor:
    """Return the entropy of the teacher's next-token distribution in nats, (B, T, V) -> (B, T)."""
    if not teacher_logits.is_floating_point():
        raise ShapeError(explain("teacher_logits dtype", got=teacher_logits.dtype, expected="a floating-point dtype"))
    entropy = _log_prob_entropy(rows.in_compute_dtype(teacher_logits).log_softmax(-1))
    rows.check_finite_rows(entropy.flatten(), "teacher_entropy")
    return entropy


@dataclass(frozen=True, kw_only=True)
class EntropyGate:
    """The entropy-gated divergence per row, with the gates of the module docstring; `h_max=None` means log V."""

    gate: Literal["soft", "hard"] = "soft"
    h_max: float | None = None
    temperature: float = 1.0
    tau: float = 1.0
    top_k: int = 16

    def check(self, vocab: int) -> None:
        """Raise InputError if an option is out of range."""
        rows.check_choice(self.gate, GATES, "gate")
        rows.check_positive(self.temperature, "temperature")
        if self.h_max is not None:
            rows.check_positive(self.h_max, "h_max")
        if self.gate == "hard":
            rows.check_at_least_zero(self.tau, "tau")
            rows.check_top_k(self.top_k, vocab)

    def __call__(self, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        self.check(student_NV.shape[-1])
        log_s = (rows.in_compute_dtype(student_NV) / self.temperature).log_softmax(-1)
        log_t = (rows.in_compute_dtype(teacher_NV).detach() / self.temperature).log_softmax(-1)
        entropy_N = _log_prob_entropy(log_t)
        kl_st = log_prob_divergence(log_s, log_t, beta=1.0)
        if self.gate == "hard":
            # The paper's second term: KL(T || S) on the teacher's top-k entries, for rows in which the teacher is
            # uncertain.
            top_ids = log_t.topk(self.top_k, dim=-1).indices
            top_s, top_t = entries_with_tail(log_s, top_ids), entries_with_tail(log_t, top_ids)
            return kl_st + (entropy_N > self.tau) * log_prob_divergence(top_s, top_t, beta=0.0)
        weight_N = (entropy_N / self.entropy_scale(log_t.shape[-1])).clamp(0.0, 1.0)
        return weight_N * log_prob_divergence(log_s, log_t, beta=0.0) + (1.0 - weight_N) * kl_st

    def entropy_scale(self, vocab: int) -> float:
        """Return h_max, by default the maximum entropy over the vocabulary."""
        # log 1 is 0, which must not be a divisor.
        return self.h_max if self.h_max is not None else (math.log(vocab) or 1.0)


def entropy_aware_opd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    labels: Tensor | None = None,
    h_max: float | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    gate: Literal["soft", "hard"] = "soft",
    tau: float = 1.0,
    top_k: int = 16,
) -> Tensor:
    """Return the entropy-gated divergence, reduced over the rows whose label is 1; see the module docstring."""
    divergence = EntropyGate(gate=gate, h_max=h_max, temperature=float(temperature), tau=tau, top_k=top_k)
    rows.check_choice(reduction, rows.REDUCTIONS, "reduction")
    rows.check_logit_pair(student_logits, teacher_logits)
    divergence.check(student_logits.shape[-1])
    row_mask = rows.to_boolean_mask(labels, student_logits, "labels")
    student, teacher = rows.select_rows(student_logits, row_mask), rows.select_rows(teacher_logits, row_mask)
    values_N = divergence(student, teacher)
    rows.check_finite_rows(values_N, "entropy_aware_opd_loss")
    return rows.reduce_rows(values_N, row_mask, student_logits.shape, reduction, student_logits.shape[-1])
