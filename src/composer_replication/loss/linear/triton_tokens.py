"""Triton kernels for one chosen token per row: its logit, the row's normaliser, and the cross-entropy's gradient."""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
# Triton's language is typed dynamically; the launchers below are the typed surface.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_replication.loss.linear.tiles import BLOCK_COLUMNS, NUM_WARPS


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
    pull_ptr,
    grad_ptr,
    logits_stride,
    grad_stride,
    n_cols: tl.constexpr,  # a model has one vocabulary: compiling for it lets the loops be planned
    label_smoothing,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_cols
    z = tl.load(logits_ptr + row * logits_stride + offsets, mask=inside, other=0.0)
    target = tl.where(offsets == tl.load(token_ptr + row), 1.0 - label_smoothing, 0.0) + label_smoothing / n_cols
    grad = (tl.exp(z - tl.load(log_z_ptr + row)) - target) * tl.load(pull_ptr + row)
    tl.store(grad_ptr + row * grad_stride + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def token_stats(logits_nV: Tensor, token_ids_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log normaliser, chosen token's logit, mean logit) of each row."""
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
    logits_nV: Tensor, token_ids_n: Tensor, log_z_n: Tensor, pull_n: Tensor, label_smoothing: float, grad_nV: Tensor
) -> None:
    """grad = pull * (softmax - (1 - eps) onehot - eps / V)."""
    num_rows, vocab = logits_nV.shape
    _token_grad_kernel[(num_rows, triton.cdiv(vocab, BLOCK_COLUMNS))](
        logits_nV,
        token_ids_n,
        log_z_n,
        pull_n,
        grad_nV,
        logits_nV.stride(0),
        grad_nV.stride(0),
        vocab,
        label_smoothing,
        BLOCK=BLOCK_COLUMNS,
        num_warps=8,
    )
