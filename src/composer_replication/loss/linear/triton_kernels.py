# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
"""Triton kernels on a tile of logits: one program per row, which reads the row in blocks.

The divergence kernel makes three passes over a row: the first computes both normalizers, the second the row's value,
and the third the gradient, including the row's weight and cap. With p and q the teacher's and the student's
distributions at the temperature, d value / d student logit is 1 / temperature times

    kl_ts, cross_entropy   q - p
    kl_st                  q (log q - log p - kl_st)
    jsd                    (1 - beta) q (log q - log m - KL(q || m)),   m = (1 - beta) q + beta p
    entropy_soft           w (q - p) + (1 - w) q (log q - log p - kl_st),   w = clamp(H(p) / entropy_scale, 0, 1)

Shape suffixes: n rows of a tile, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_replication.loss.linear.head import BLOCK_COLUMNS, NUM_WARPS

if TYPE_CHECKING:
    from composer_replication.loss.linear.kernels import DivergenceKernel


_MODES = {"kl_ts": 0, "kl_st": 1, "jsd": 2, "cross_entropy": 3, "entropy_soft": 4}


@triton.jit
def _log_normalizer(row_ptr, n_cols: tl.constexpr, inv_temperature, BLOCK: tl.constexpr):
    """Return the row's maximum, and log sum exp(z - maximum)."""
    # Returned separately: adding them would lose digits of every log-prob of the row. The running sum is rescaled
    # whenever the maximum grows (online softmax).
    largest = -float("inf")
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + offsets, mask=offsets < n_cols, other=-float("inf")) * inv_temperature
        new_largest = tl.maximum(largest, tl.max(z, axis=0))
        pivot = tl.where(new_largest == -float("inf"), 0.0, new_largest)  # a block of nothing but -inf
        total = total * tl.exp(largest - pivot) + tl.sum(tl.exp(z - pivot), axis=0)
        largest = new_largest
    return largest, tl.log(total)


@triton.jit
def _log_mixture(log_q, log_p, log_1_minus_beta, log_beta):
    # logaddexp: the larger term is factored out, so that the exponential cannot overflow.
    a = log_q + log_1_minus_beta
    b = log_p + log_beta
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _row_sums(
    student_row,
    teacher_row,
    top_q,
    rest_q,
    top_p,
    rest_p,
    n_cols: tl.constexpr,
    inv_temperature,
    log_beta,
    log_1_minus_beta,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return two sums over a row, from which its value and gradient are computed.

    For `entropy_soft`, also return the teacher's entropy.
    """
    # One sum per lane, reduced only at the end, so that the loop has no reduction across warps.
    first_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    second_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    entropy_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n_cols
        log_q = tl.load(student_row + offsets, mask=inside, other=0.0) * inv_temperature - top_q - rest_q
        log_p = tl.load(teacher_row + offsets, mask=inside, other=0.0) * inv_temperature - top_p - rest_p
        if MODE == 0:
            first_sum += tl.where(inside, tl.exp(log_p) * (log_p - log_q), 0.0)
        elif MODE == 1:
            first_sum += tl.where(inside, tl.exp(log_q) * (log_q - log_p), 0.0)
        elif MODE == 2:
            log_m = _log_mixture(log_q, log_p, log_1_minus_beta, log_beta)
            first_sum += tl.where(inside, tl.exp(log_p) * (log_p - log_m), 0.0)
            second_sum += tl.where(inside, tl.exp(log_q) * (log_q - log_m), 0.0)
        elif MODE == 3:
            first_sum -= tl.where(inside, tl.exp(log_p) * log_q, 0.0)
        else:
            p = tl.exp(log_p)
            first_sum += tl.where(inside, p * (log_p - log_q), 0.0)
            second_sum += tl.where(inside, tl.exp(log_q) * (log_q - log_p), 0.0)
            entropy_sum -= tl.where(inside, p * log_p, 0.0)
    return tl.sum(first_sum, axis=0), tl.sum(second_sum, axis=0), tl.sum(entropy_sum, axis=0)


@triton.jit
def _gradient(log_q, log_p, first, second, gate, beta, log_beta, log_1_minus_beta, MODE: tl.constexpr):
    """Return the gradient of the value for one block of student logits, without the row's weight and temperature."""
    q = tl.exp(log_q)
    if MODE == 0 or MODE == 3:
        grad = q - tl.exp(log_p)
    elif MODE == 1:
        grad = q * (log_q - log_p - first)
    elif MODE == 2:
        log_m = _log_mixture(log_q, log_p, log_1_minus_beta, log_beta)
        grad = (1.0 - beta) * q * (log_q - log_m - second)
    else:
        grad = gate * (q - tl.exp(log_p)) + (1.0 - gate) * q * (log_q - log_p - second)
    return grad


@triton.jit
def _divergence_kernel(
    student_ptr,
    teacher_ptr,
    grad_ptr,
    value_ptr,
    weight_ptr,
    student_stride,
    teacher_stride,
    grad_stride,
    n_cols: tl.constexpr,  # constant per model, and a constant bound lets the compiler plan the loops
    inv_temperature,
    beta,
    log_beta,
    log_1_minus_beta,
    cap,
    inv_entropy_scale,
    MODE: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # int64, because row * stride can exceed 2**31.
    row = tl.program_id(0).to(tl.int64)
    student_row = student_ptr + row * student_stride
    teacher_row = teacher_ptr + row * teacher_stride
    top_q, rest_q = _log_normalizer(student_row, n_cols, inv_temperature, BLOCK)
    top_p, rest_p = _log_normalizer(teacher_row, n_cols, inv_temperature, BLOCK)

    first, second, entropy = _row_sums(
        student_row,
        teacher_row,
        top_q,
        rest_q,
        top_p,
        rest_p,
        n_cols,
        inv_temperature,
        log_beta,
        log_1_minus_beta,
        MODE,
        BLOCK,
    )
    gate = 0.0
    value = first
    if MODE == 2:
        value = beta * first + (1.0 - beta) * second
    elif MODE == 4:
        gate = tl.minimum(tl.maximum(entropy * inv_entropy_scale, 0.0), 1.0)
        value = gate * first + (1.0 - gate) * second
    tl.store(value_ptr + row, value)

    if WRITE_GRAD:
        # The factor of the whole row: its weight, the temperature's derivative, and the cap (see `rows.cap_rows`).
        row_scale = tl.load(weight_ptr + row) * inv_temperature
        row_scale = tl.where(value > cap, row_scale * (cap / value), row_scale)
        for start in range(0, n_cols, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < n_cols
            log_q = tl.load(student_row + offsets, mask=inside, other=0.0) * inv_temperature - top_q - rest_q
            log_p = tl.load(teacher_row + offsets, mask=inside, other=0.0) * inv_temperature - top_p - rest_p
            grad = _gradient(log_q, log_p, first, second, gate, beta, log_beta, log_1_minus_beta, MODE)
            grad = (grad * row_scale).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + row * grad_stride + offsets, grad, mask=inside)


def divergence_rows(
    kernel: DivergenceKernel,
    student_nV: Tensor,
    teacher_nV: Tensor,
    weights_n: Tensor,
    token_clip: float | None,
    grad_nV: Tensor | None,
) -> Tensor:
    """Return the row values of a tile, and write their weighted, capped gradient to `grad_nV` unless it is None."""
    num_rows, vocab = student_nV.shape
    values_n = torch.empty(num_rows, dtype=torch.float32, device=student_nV.device)
    # The kernel needs some pointer here, which is unused without WRITE_GRAD.
    grad = student_nV if grad_nV is None else grad_nV
    mixes = kernel.mode == "jsd"
    _divergence_kernel[(num_rows,)](
        student_nV,
        teacher_nV,
        grad,
        values_n,
        weights_n,
        student_nV.stride(0),
        teacher_nV.stride(0),
        grad.stride(0),
        vocab,
        1.0 / kernel.temperature,
        kernel.beta,
        math.log(kernel.beta) if mixes else 0.0,
        math.log1p(-kernel.beta) if mixes else 0.0,
        math.inf if token_clip is None else token_clip,
        1.0 / kernel.entropy_scale,
        MODE=_MODES[kernel.mode],
        WRITE_GRAD=grad_nV is not None,
        BLOCK=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,
    )
    return values_n


@triton.jit
def _token_stats_kernel(
    logits_ptr, token_ptr, log_z_ptr, chosen_ptr, mean_ptr, logits_stride, n_cols: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * logits_stride
    largest = -float("inf")
    total = 0.0
    plain_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n_cols
        z = tl.load(logits_row + offsets, mask=inside, other=-float("inf"))
        new_largest = tl.maximum(largest, tl.max(z, axis=0))
        pivot = tl.where(new_largest == -float("inf"), 0.0, new_largest)  # a block of nothing but -inf
        total = total * tl.exp(largest - pivot) + tl.sum(tl.exp(z - pivot), axis=0)
        largest = new_largest
        plain_sum += tl.where(inside, z, 0.0)
    tl.store(log_z_ptr + row, largest + tl.log(total))
    tl.store(chosen_ptr + row, tl.load(logits_row + tl.load(token_ptr + row)))
    tl.store(mean_ptr + row, tl.sum(plain_sum, axis=0) / n_cols)


@triton.jit
def _token_grad_kernel(
    logits_ptr,
    token_ptr,
    log_z_ptr,
    row_scale_ptr,
    grad_ptr,
    logits_stride,
    grad_stride,
    n_cols: tl.constexpr,  # constant per model, as above
    label_smoothing,
    BLOCK: tl.constexpr,
):
    # One program per block: without sums over the row, the blocks are independent.
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_cols
    z = tl.load(logits_ptr + row * logits_stride + offsets, mask=inside, other=0.0)
    target = tl.where(offsets == tl.load(token_ptr + row), 1.0 - label_smoothing, 0.0) + label_smoothing / n_cols
    grad = (tl.exp(z - tl.load(log_z_ptr + row)) - target) * tl.load(row_scale_ptr + row)
    tl.store(grad_ptr + row * grad_stride + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def token_stats(logits_nV: Tensor, token_ids_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log normalizer, the logit of the given token, and the mean logit of each row."""
    num_rows, vocab = logits_nV.shape
    log_z, chosen, mean = (torch.empty(num_rows, dtype=torch.float32, device=logits_nV.device) for _ in range(3))
    _token_stats_kernel[(num_rows,)](
        logits_nV,
        token_ids_n,
        log_z,
        chosen,
        mean,
        logits_nV.stride(0),
        vocab,
        BLOCK=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,
    )
    return log_z, chosen, mean


def write_token_grad(
    logits_nV: Tensor,
    token_ids_n: Tensor,
    log_z_n: Tensor,
    row_scale_n: Tensor,
    label_smoothing: float,
    grad_nV: Tensor,
) -> None:
    """Write row_scale * (softmax - (1 - eps) onehot - eps / V) to `grad_nV`."""
    num_rows, vocab = logits_nV.shape
    _token_grad_kernel[(num_rows, triton.cdiv(vocab, BLOCK_COLUMNS))](
        logits_nV,
        token_ids_n,
        log_z_n,
        row_scale_n,
        grad_nV,
        logits_nV.stride(0),
        grad_nV.stride(0),
        vocab,
        label_smoothing,
        BLOCK=BLOCK_COLUMNS,
        num_warps=8,
    )
