"""SDPO's self-distillation loss (arXiv 2601.20802): the policy with feedback in context teaches the policy without it.

    support: the student's top-k entries with their true log-probs, plus a tail bucket with the log of all other mass;
             without the tail both sides are renormalized on the k entries; top_k=None is the full vocabulary
    d_n    = JSD_beta on that support (beta = 1, the default, is kl_st = KL(student || teacher))
    w_n    = min(exp(clamp(logp - logp_old, -20, 20)), is_clip), detached: importance weight of the sampled token
    loss   = sum_n mask_n w_n d_n / sum_n mask_n

The sampled-token mode uses only the token that was sampled: sg(log p_S - log p_T) * log p_S. The gradient of
(log p_S - log p_T) itself would have expectation zero.

Shape suffixes: N rows, K entries of a distribution, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.loss import rows
from composer_replication.loss.jsd import log_prob_divergence

# Keeps log(1 - sum p) finite if the k entries have all of the mass; the value is upstream's.
_LARGEST_LOG_MASS = -1e-7
_EMPTY_TAIL = math.log(-math.expm1(_LARGEST_LOG_MASS))
# Keeps the exponential of a log-ratio finite.
_LOG_RATIO_LIMIT = 20.0


def with_tail_bucket(log_probs_NK: Tensor) -> Tensor:
    """Append log(1 - sum exp(log_probs)), the log-mass of all entries that are not listed.

    Use this only if no other entries are available. In fp32 the difference is off by up to 2e-6, so a tail of 1e-5 is
    wrong by up to a fifth, and a tail below 1e-7 has no gradient. `entries_with_tail` needs the whole row but has
    neither limitation.
    """
    log_mass = log_probs_NK.logsumexp(-1, keepdim=True).clamp(max=_LARGEST_LOG_MASS)
    return torch.cat([log_probs_NK, torch.log(-torch.expm1(log_mass))], dim=-1)


def entries_with_tail(log_probs_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Return the log-probs of the entries `ids_NK`, followed by the log-mass of all other entries, (N, K + 1).

    If the other entries have no mass (there are none, or all are -inf), the tail is that of `with_tail_bucket`.
    """
    # Not -inf: the gradient of logsumexp over a row of only -inf is NaN.
    lowest = torch.finfo(log_probs_NV.dtype).min
    tail_N1 = log_probs_NV.scatter(-1, ids_NK, lowest).logsumexp(-1, keepdim=True)
    tail_N1 = torch.where(tail_N1 < lowest / 2, _EMPTY_TAIL, tail_N1)
    return torch.cat([log_probs_NV.gather(-1, ids_NK), tail_N1], dim=-1)


def _renormalize(log_probs_NK: Tensor) -> Tensor:
    """Shift the log-probs of each row so that its probabilities sum to one."""
    return log_probs_NK - log_probs_NK.logsumexp(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class StudentTopK:
    """JSD_beta on the student's top-k entries, with all other entries in one tail bucket."""

    beta: float = 1.0
    top_k: int | None = 20
    add_tail: bool = True

    def check(self, vocab: int) -> None:
        """Raise InputError if an option is out of range."""
        rows.check_unit_interval(self.beta, "beta")
        rows.check_top_k(self.top_k, vocab)

    def __call__(self, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        self.check(student_NV.shape[-1])
        log_s = rows.in_compute_dtype(student_NV).log_softmax(-1)
        log_t = rows.in_compute_dtype(teacher_NV).detach().log_softmax(-1)
        if self.top_k is not None:
            top_ids = log_s.detach().topk(self.top_k, dim=-1).indices
            if self.add_tail:
                log_s, log_t = entries_with_tail(log_s, top_ids), entries_with_tail(log_t, top_ids)
            else:
                log_s, log_t = _renormalize(log_s.gather(-1, top_ids)), _renormalize(log_t.gather(-1, top_ids))
        return log_prob_divergence(log_s, log_t, self.beta)


def importance_weights(logprobs_N: Tensor, old_logprobs_N: Tensor, is_clip: float) -> Tensor:
    """Return min(exp(logp - logp_old), is_clip) per row, detached."""
    log_ratio = (logprobs_N - old_logprobs_N).detach().clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return log_ratio.exp().clamp(max=is_clip)


def sampled_token_values(student_logprobs_N: Tensor, teacher_logprobs_N: Tensor) -> Tensor:
    """Return sg(log p_S - log p_T) * log p_S of each sampled token.

    The gradient is an unbiased estimate of the gradient of kl_st.
    """
    return (student_logprobs_N - teacher_logprobs_N).detach() * student_logprobs_N


def sdpo_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    beta: float = 1.0,
    top_k: int | None = None,
    add_tail: bool = True,
    token_ids: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    is_clip: float | None = None,
    sampled_token: bool = False,
) -> Tensor:
    """Return the mean SDPO divergence over the tokens of `mask`; see the module docstring for the formula.

    `is_clip` needs `token_ids` (the sampled tokens) and `old_logprobs` (their log-probs when they were sampled).
    `sampled_token` needs `token_ids`.
    """
    divergence = StudentTopK(beta=float(beta), top_k=top_k, add_tail=add_tail)
    rows.check_logit_pair(student_logits, teacher_logits)
    divergence.check(student_logits.shape[-1])
    row_mask = rows.to_boolean_mask(mask, student_logits)
    _check_sampling_inputs(student_logits, token_ids, old_logprobs, is_clip, sampled_token, beta)
    student, teacher = rows.select_rows(student_logits, row_mask), rows.select_rows(teacher_logits, row_mask)
    chosen = None if token_ids is None else _select_values(token_ids, row_mask)
    if chosen is not None:
        rows.check_token_ids(chosen, student_logits.shape[-1])
    if sampled_token:
        assert chosen is not None
        values_N = sampled_token_values(_gather_logprobs(student, chosen), _gather_logprobs(teacher.detach(), chosen))
    else:
        values_N = divergence(student, teacher)
    if is_clip is not None:
        assert chosen is not None
        assert old_logprobs is not None
        old_N = _select_values(old_logprobs, row_mask)
        values_N = values_N * importance_weights(_gather_logprobs(student.detach(), chosen), old_N, is_clip)
    rows.check_finite_rows(values_N, "sdpo_loss")
    return values_N.sum() / max(values_N.numel(), 1)


def _select_values(values: Tensor, mask: Tensor | None) -> Tensor:
    return values.flatten() if mask is None else values[mask]


def _gather_logprobs(logits_NV: Tensor, token_ids_N: Tensor) -> Tensor:
    log_probs = rows.in_compute_dtype(logits_NV).log_softmax(-1)
    return log_probs.gather(-1, token_ids_N[:, None]).squeeze(-1)


def _check_sampling_inputs(
    logits: Tensor,
    token_ids: Tensor | None,
    old_logprobs: Tensor | None,
    is_clip: float | None,
    sampled_token: bool,
    beta: float,
) -> None:
    if is_clip is not None:
        rows.check_positive(is_clip, "is_clip")
        if old_logprobs is None:
            raise InputError(
                explain("is_clip without old_logprobs", got="old_logprobs=None", expected="one log-prob per row")
            )
    if (is_clip is not None or sampled_token) and token_ids is None:
        option = "sampled_token" if sampled_token else "is_clip"
        raise InputError(explain(f"{option} without token_ids", got="token_ids=None", expected="the sampled token ids"))
    # Tokens sampled from the student can estimate only KL(student || teacher).
    if sampled_token and beta != 1.0:
        raise InputError(
            explain("beta with sampled_token", got=beta, expected="1.0 (this estimator exists only for kl_st)")
        )
    for name, values in (("token_ids", token_ids), ("old_logprobs", old_logprobs)):
        if values is not None:
            rows.check_mask_shape(values, logits, name)
