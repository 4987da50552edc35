"""Generalized Jensen-Shannon divergence, with the semantics of OPSD and GKD (arXiv 2306.13649, eq. 1).

    M = (1 - beta) p_S + beta p_T
    JSD_beta = beta KL(p_T || M) + (1 - beta) KL(p_S || M)        0 < beta < 1
    JSD_0 = KL(p_T || p_S)  (kl_ts, mode-covering)      JSD_1 = KL(p_S || p_T)  (kl_st, mode-seeking)

Both logits are divided by the temperature; there is no T^2 factor. The scale is discontinuous at the ends: as beta goes
to 0, JSD_beta / beta goes to kl_ts, but JSD_0 *is* kl_ts. Upstream behaves the same way, which comparisons rely on.

Shape suffixes: N rows, K entries of a distribution, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.loss import rows


def log_prob_divergence(log_s_NK: Tensor, log_t_NK: Tensor, beta: float) -> Tensor:
    """Return JSD_beta between two log-distributions over the same K entries, one value per row."""
    if beta == 0.0:
        return (log_t_NK.exp() * (log_t_NK - log_s_NK)).sum(-1)
    if beta == 1.0:
        return (log_s_NK.exp() * (log_s_NK - log_t_NK)).sum(-1)
    # log M is computed in log space, where probabilities of unlikely entries do not underflow.
    log_m_NK = torch.logaddexp(log_s_NK + math.log1p(-beta), log_t_NK + math.log(beta))
    teacher_part = log_t_NK.exp() * (log_t_NK - log_m_NK)
    student_part = log_s_NK.exp() * (log_s_NK - log_m_NK)
    return (beta * teacher_part + (1.0 - beta) * student_part).sum(-1)


@dataclass(frozen=True, kw_only=True)
class JSD:
    """The generalized JSD of each row.

    With `top_k`, only the teacher's k most likely entries are used, renormalized for both student and teacher.
    """

    beta: float = 0.5
    temperature: float = 1.0
    top_k: int | None = None

    def check(self, vocab: int) -> None:
        """Raise InputError if an option is out of range."""
        rows.check_unit_interval(self.beta, "beta")
        rows.check_positive(self.temperature, "temperature")
        rows.check_top_k(self.top_k, vocab)

    def __call__(self, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        self.check(student_NV.shape[-1])
        student = rows.in_compute_dtype(student_NV) / self.temperature
        teacher = rows.in_compute_dtype(teacher_NV).detach() / self.temperature
        if self.top_k is not None:
            top_ids = teacher.topk(self.top_k, dim=-1).indices
            student, teacher = student.gather(-1, top_ids), teacher.gather(-1, top_ids)
        return log_prob_divergence(student.log_softmax(-1), teacher.log_softmax(-1), self.beta)


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    logits_are_probs: bool = False,
    top_k: int | None = None,
    token_clip: float | None = None,
) -> Tensor:
    """Return JSD_beta over the positions whose label is not -100 (0 counts, as upstream); see the module docstring.

    `batchmean` divides by the number of such positions; without labels, as upstream, by the batch size rather than by
    B * T. `token_clip` caps each token's divergence after the sum over the vocabulary (upstream clamps single entries
    before the sum). With `logits_are_probs` the inputs are probabilities, and temperature and top_k are ignored, as
    upstream.
    """
    divergence = JSD(beta=float(beta), temperature=float(temperature), top_k=top_k)
    rows.check_choice(reduction, rows.REDUCTIONS, "reduction")
    rows.check_logit_pair(student_logits, teacher_logits)
    divergence.check(student_logits.shape[-1])
    row_mask = _labels_to_mask(labels, student_logits)
    student, teacher = rows.select_rows(student_logits, row_mask), rows.select_rows(teacher_logits, row_mask)
    if logits_are_probs:
        # Keeps the logarithm of a probability of 0 finite.
        log_s, log_t = (rows.in_compute_dtype(p).clamp_min(1e-8).log() for p in (student, teacher.detach()))
        values_N = log_prob_divergence(log_s, log_t, divergence.beta)
    else:
        values_N = divergence(student, teacher)
    rows.check_finite_rows(values_N, "generalized_jsd_loss")
    values_N = rows.cap_rows(values_N, token_clip)
    entries = student_logits.shape[-1] if top_k is None or logits_are_probs else top_k
    return rows.reduce_rows(values_N, row_mask, student_logits.shape, reduction, entries)


def _labels_to_mask(labels: Tensor | None, logits: Tensor, name: str = "labels") -> Tensor | None:
    """Return a mask of the rows whose label is not -100, which is upstream's convention; a label of 0 counts."""
    if labels is None:
        return None
    rows.check_mask_shape(labels, logits, name)
    # A boolean mask contains no -100, so every row would count.
    if labels.dtype == torch.bool:
        raise InputError(explain(f"{name} dtype", got="bool", expected=f"integers, {rows.IGNORE_INDEX} where ignored"))
    return labels != rows.IGNORE_INDEX
