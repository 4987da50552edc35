"""Compute logits of the fused losses tile by tile, and gradients slab by slab; check results after backward.

Shape suffixes: N rows, n rows of a tile or slab, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from composer_replication.loss.linear.head import Operands, TilePlan, product_dtype, vocab_blocks

# (tile, logits_nV, tensor for their gradient or None, scratch tiles) -> None
TileVisitor = Callable[[slice, Tensor, Tensor | None, list[Tensor]], None]


class NeededGradients(NamedTuple):
    """Which of the three inputs (hidden states, weight, bias) need a gradient."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """The gradients of the three inputs, in the operands' dtypes or wider ones."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def stored_like(self, *originals: Tensor | None) -> Gradients:
        """Cast the gradients for storage until backward: to the dtypes of the original inputs, but never to fp16."""
        pairs = zip(self, originals, strict=True)
        return Gradients(*(None if g is None or o is None else g.to(_grad_dtype(o)) for g, o in pairs))

    def scaled_like(self, factor: Tensor | None, *originals: Tensor | None) -> list[Tensor | None]:
        """Multiply the gradients by `factor` in place, and cast them to the dtypes of the original inputs."""
        # In place, so that there are never two copies of the head's gradient.
        if factor is not None:
            for grad in self:
                _ = grad if grad is None else grad.mul_(factor)
        pairs = zip(self, originals, strict=True)
        return [None if g is None or o is None else g.to(o.dtype) for g, o in pairs]


def visit_tiles(
    operands: Operands, plan: TilePlan, slab: slice, visit: TileVisitor, *, num_scratch: int, with_grad: bool
) -> Tensor | None:
    """Call `visit` with the logits of every tile of a slab.

    With `with_grad`, return the gradient d loss / d (hidden @ weight.T + bias) of the slab.
    """
    hidden, head = operands.hidden, operands.head
    slab_rows = slab.stop - slab.start
    wide = product_dtype(hidden)
    # Allocated once and reused for all tiles of the slab.
    buffers = [
        torch.empty(min(plan.tile_rows, slab_rows), head.vocab, dtype=wide, device=hidden.device)
        for _ in range(1 + num_scratch)
    ]
    grad_slab = None
    if with_grad:
        grad_slab = torch.empty(slab_rows, head.vocab, dtype=_grad_tile_dtype(hidden), device=hidden.device)
    for tile in plan.tiles(slab):
        logits_nV, *scratch = (buffer[: tile.stop - tile.start] for buffer in buffers)
        head.write_logits(hidden[tile], logits_nV)
        grad_nV = None if grad_slab is None else grad_slab[tile.start - slab.start : tile.stop - slab.start]
        visit(tile, logits_nV, grad_nV, scratch)
        if grad_nV is not None:
            head.grad_through_transform(grad_nV, logits_nV)
    return grad_slab


def accumulate_gradients(
    operands: Operands, plan: TilePlan, needed: NeededGradients, visit: TileVisitor, *, num_scratch: int = 0
) -> Gradients:
    """Visit the tiles of all slabs, and return the gradients that are needed."""
    hidden, weight = operands.hidden, operands.head.weight
    wide = product_dtype(hidden)
    # The product of a single slab is rounded once, directly to the weight's dtype. Several slabs are summed in fp32.
    single_slab = 0 < plan.num_rows <= plan.slab_rows
    grad_hidden = torch.zeros_like(hidden, dtype=_grad_dtype(hidden)) if needed.hidden else None
    grad_weight = grad_bias = None
    if needed.weight and not single_slab:
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    if needed.bias:
        grad_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)
    for slab in plan.slabs():
        grad_nV = visit_tiles(operands, plan, slab, visit, num_scratch=num_scratch, with_grad=any(needed))
        if grad_nV is None:
            continue
        if grad_hidden is not None:
            grad_hidden[slab] = _grad_hidden(grad_nV, weight)
        if grad_weight is not None:
            _add_grad_weight(grad_weight, grad_nV, hidden[slab])
        elif needed.weight:
            grad_weight = _grad_weight(grad_nV, hidden[slab], _grad_dtype(weight))
        if grad_bias is not None:
            grad_bias += grad_nV.sum(0, dtype=wide)
        del grad_nV  # frees its memory before the next slab is allocated
    return Gradients(grad_hidden, grad_weight, grad_bias)


class _PendingCheck:
    """A check of a GPU result that does not make the host wait in the middle of a step.

    Reading the result in the forward pass would stall the host until the GPU has caught up, and then the GPU until the
    host has queued the backward pass, which costs a measured 2% of a training step. So the result is copied to pinned
    memory asynchronously, and read when the backward pass is queued, before `backward()` returns. (An optimizer that
    runs inside the backward pass has already stepped by then.)
    """

    def __init__(self, passed: Tensor, raise_error: Callable[[], None]) -> None:
        self._raise_error = raise_error
        self._passed = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._passed.copy_(passed, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def resolve_after_backward(self) -> None:
        """Schedule the check for the end of the backward pass. Call this inside a backward function."""
        # torch has no public API for a callback at the end of a backward pass.
        torch.autograd.Variable._execution_engine.queue_callback(self.resolve)  # pyright: ignore

    def resolve(self) -> None:
        """Wait for the result, and raise the check's error if it failed."""
        self._arrived.synchronize()
        if not bool(self._passed):
            self._raise_error()


def check_now_or_after_backward(
    passed: Tensor, raise_error: Callable[[], None], *, backward_follows: bool
) -> _PendingCheck | None:
    """Check a result now, or return a check that the backward pass resolves.

    The check is postponed only for a result on a GPU that is followed by a backward pass.
    """
    if passed.is_cuda and backward_follows:
        return _PendingCheck(passed, raise_error)
    if not bool(passed):
        raise_error()
    return None


def _grad_tile_dtype(operand: Tensor) -> torch.dtype:
    """Return the dtype of logit gradients: on CUDA that of the operands, for the tensor cores; on CPU fp32 or fp64."""
    # fp16 is an exception: a probability times 1 / N underflows, and the loss scale that would prevent this is applied
    # only in the backward pass.
    return operand.dtype if operand.is_cuda and operand.dtype != torch.float16 else product_dtype(operand)


def _grad_dtype(operand: Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is stored until backward: the operand's, but fp32 instead of fp16."""
    return torch.float32 if operand.dtype == torch.float16 else operand.dtype


def _grad_hidden(grad_nV: Tensor, weight_VH: Tensor) -> Tensor:
    """Return d loss / d hidden = grad @ weight; the sum over the vocabulary is rounded only once."""
    if grad_nV.dtype == weight_VH.dtype:
        return grad_nV @ weight_VH
    total_nH = grad_nV.new_zeros(grad_nV.shape[0], weight_VH.shape[1])
    for block in vocab_blocks(weight_VH):
        total_nH.addmm_(grad_nV[:, block], weight_VH[block].to(grad_nV.dtype))
    return total_nH


def _grad_weight(grad_nV: Tensor, hidden_nH: Tensor, dtype: torch.dtype) -> Tensor:
    """Return d loss / d weight = grad.T @ hidden over all rows, in `dtype`."""
    if grad_nV.dtype == hidden_nH.dtype and (dtype == grad_nV.dtype or not grad_nV.is_cuda):
        return (grad_nV.T @ hidden_nH).to(dtype)
    total_VH = torch.zeros(grad_nV.shape[1], hidden_nH.shape[1], dtype=dtype, device=grad_nV.device)
    _add_grad_weight(total_VH, grad_nV, hidden_nH)
    return total_VH


def _add_grad_weight(total_VH: Tensor, grad_nV: Tensor, hidden_nH: Tensor) -> None:
    """Add grad.T @ hidden to `total_VH`."""
    # Sums over slabs stay in fp32: rounding each partial sum to bf16 would lose the small but systematic contributions
    # of unlikely tokens and bias training.
    if grad_nV.dtype == total_VH.dtype == hidden_nH.dtype:
        total_VH.addmm_(grad_nV.T, hidden_nH)
    elif grad_nV.is_cuda and grad_nV.dtype == hidden_nH.dtype and total_VH.dtype == torch.float32:
        torch.addmm(total_VH, grad_nV.T, hidden_nH, out_dtype=torch.float32, out=total_VH)
    else:
        wide_nH = hidden_nH.to(grad_nV.dtype)
        for block in vocab_blocks(total_VH):
            total_VH[block] += (grad_nV[:, block].T @ wide_nH).to(total_VH.dtype)
