"""The three matrix products of a linear-fused loss, with results kept wider than half-precision inputs.

On CUDA, half-precision operands go to the tensor cores and the result comes out in fp32 without being rounded first.
On CPU, half-precision weights are widened a block at a time, so that no fp32 copy of the head ever exists.
Shape suffixes: n rows of a tile, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Rows of the head widened at once on CPU: 4096 x 4096 in fp32 is 64 MiB.
_WIDENED_ROWS = 4096


def product_dtype(operand: Tensor) -> torch.dtype:
    """What logits and their gradients are computed in: fp64 for fp64, else fp32."""
    return torch.float64 if operand.dtype == torch.float64 else torch.float32


def grad_tile_dtype(operand: Tensor) -> torch.dtype:
    """CUDA multiplies logit gradients in the operands' own dtype (tensor cores); CPU keeps them wide.

    So does fp16 anywhere: a probability times 1 / N lies below its range, and a loss scale only arrives in backward.
    """
    return operand.dtype if operand.is_cuda and operand.dtype != torch.float16 else product_dtype(operand)


def grad_dtype(operand: Tensor) -> torch.dtype:
    """What a finished gradient waits for backward in: the operand's dtype, but fp32 for fp16 (see above)."""
    return torch.float32 if operand.dtype == torch.float16 else operand.dtype


def project(hidden_nH: Tensor, weight_VH: Tensor, out_nV: Tensor) -> None:
    """out = hidden @ weight.T"""
    if hidden_nH.dtype == out_nV.dtype:
        torch.mm(hidden_nH, weight_VH.T, out=out_nV)
    elif hidden_nH.is_cuda:
        torch.mm(hidden_nH, weight_VH.T, out_dtype=out_nV.dtype, out=out_nV)
    else:
        wide_nH = hidden_nH.to(out_nV.dtype)
        for block in _vocab_blocks(weight_VH):
            out_nV[:, block] = wide_nH @ weight_VH[block].to(out_nV.dtype).T


def grad_hidden(grad_nV: Tensor, weight_VH: Tensor) -> Tensor:
    """d loss / d hidden = grad @ weight, summed over the whole vocabulary before it is rounded once."""
    if grad_nV.dtype == weight_VH.dtype:
        return grad_nV @ weight_VH
    total_nH = grad_nV.new_zeros(grad_nV.shape[0], weight_VH.shape[1])
    for block in _vocab_blocks(weight_VH):
        total_nH.addmm_(grad_nV[:, block], weight_VH[block].to(grad_nV.dtype))
    return total_nH


def grad_weight(grad_nV: Tensor, hidden_nH: Tensor, dtype: torch.dtype) -> Tensor:
    """d loss / d weight = grad.T @ hidden in `dtype`, when all rows are at hand."""
    if grad_nV.dtype == hidden_nH.dtype and (dtype == grad_nV.dtype or not grad_nV.is_cuda):
        return (grad_nV.T @ hidden_nH).to(dtype)
    total_VH = torch.zeros(grad_nV.shape[1], hidden_nH.shape[1], dtype=dtype, device=grad_nV.device)
    add_grad_weight(total_VH, grad_nV, hidden_nH)
    return total_VH


def add_grad_weight(total_VH: Tensor, grad_nV: Tensor, hidden_nH: Tensor) -> None:
    """total += grad.T @ hidden. Sums over slabs stay in fp32: rounding each partial sum to bf16 loses the small, steady
    contributions of unlikely tokens and biases training."""
    if grad_nV.dtype == total_VH.dtype == hidden_nH.dtype:
        total_VH.addmm_(grad_nV.T, hidden_nH)
    elif grad_nV.is_cuda and grad_nV.dtype == hidden_nH.dtype and total_VH.dtype == torch.float32:
        torch.addmm(total_VH, grad_nV.T, hidden_nH, out_dtype=torch.float32, out=total_VH)
    else:
        wide_nH = hidden_nH.to(grad_nV.dtype)
        for block in _vocab_blocks(total_VH):
            total_VH[block] += (grad_nV[:, block].T @ wide_nH).to(total_VH.dtype)


def _vocab_blocks(weight_VH: Tensor) -> Iterator[slice]:
    for start in range(0, weight_VH.shape[0], _WIDENED_ROWS):
        yield slice(start, min(start + _WIDENED_ROWS, weight_VH.shape[0]))
