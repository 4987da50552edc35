"""The walk both fused functions share: logits tile by tile, their gradients slab by slab, and the products of those."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from composer_replication.loss.linear import head as products
from composer_replication.loss.linear.head import Operands, TilePlan

# (tile, logits_nV, where its logit gradient goes or None, scratch tiles) -> None
TileVisitor = Callable[[slice, Tensor, Tensor | None, list[Tensor]], None]


class NeededGradients(NamedTuple):
    """Which of the three inputs need a gradient."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """In the operands' dtype or wider; `scaled_like` gives autograd what it expects."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def stored_like(self, *originals: Tensor | None) -> Gradients:
        """In the dtype they wait for backward in: the originals', but never fp16."""
        pairs = zip(self, originals, strict=True)
        return Gradients(*(None if g is None or o is None else g.to(products.grad_dtype(o)) for g, o in pairs))

    def scaled_like(self, factor: Tensor | None, *originals: Tensor | None) -> list[Tensor | None]:
        """Multiplied in place, so that no second copy of the head's gradient exists, and in the originals' dtypes."""
        if factor is not None:
            for grad in self:
                _ = grad if grad is None else grad.mul_(factor)
        pairs = zip(self, originals, strict=True)
        return [None if g is None or o is None else g.to(o.dtype) for g, o in pairs]


def visit_tiles(
    operands: Operands, plan: TilePlan, slab: slice, visit: TileVisitor, *, num_scratch: int, with_grad: bool
) -> Tensor | None:
    """Show every tile's logits to `visit`; returns d loss / d (hidden @ weight.T + bias) of the slab, or None."""
    hidden, head = operands.hidden, operands.head
    slab_rows = slab.stop - slab.start
    wide = products.product_dtype(hidden)
    buffers = [
        torch.empty(min(plan.tile_rows, slab_rows), head.vocab, dtype=wide, device=hidden.device)
        for _ in range(1 + num_scratch)
    ]
    grad_slab = None
    if with_grad:
        grad_slab = torch.empty(slab_rows, head.vocab, dtype=products.grad_tile_dtype(hidden), device=hidden.device)
    for tile in plan.tiles(slab):
        logits_nV, *scratch = (buffer[: tile.stop - tile.start] for buffer in buffers)
        head.write_logits(hidden[tile], logits_nV)
        grad_nV = None if grad_slab is None else grad_slab[tile.start - slab.start : tile.stop - slab.start]
        visit(tile, logits_nV, grad_nV, scratch)
        if grad_nV is not None:
            head.grad_through_transform(grad_nV, logits_nV)
    return grad_slab


def accumulate_gradients(
    operands: Operands, plan: TilePlan, wanted: NeededGradients, visit: TileVisitor, *, num_scratch: int = 0
) -> Gradients:
    """Visit all tiles and multiply each slab's logit gradients into the gradients that are wanted."""
    hidden, weight = operands.hidden, operands.head.weight
    wide = products.product_dtype(hidden)
    # One slab: its product is rounded once, straight into the weight's dtype. Several: summed in fp32.
    single_slab = 0 < plan.num_rows <= plan.slab_rows
    grad_hidden = torch.zeros_like(hidden, dtype=products.grad_dtype(hidden)) if wanted.hidden else None
    grad_weight = grad_bias = None
    if wanted.weight and not single_slab:
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    if wanted.bias:
        grad_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)
    for slab in plan.slabs():
        grad_nV = visit_tiles(operands, plan, slab, visit, num_scratch=num_scratch, with_grad=any(wanted))
        if grad_nV is None:
            continue
        if grad_hidden is not None:
            grad_hidden[slab] = products.grad_hidden(grad_nV, weight)
        if grad_weight is not None:
            products.add_grad_weight(grad_weight, grad_nV, hidden[slab])
        elif wanted.weight:
            grad_weight = products.grad_weight(grad_nV, hidden[slab], products.grad_dtype(weight))
        if grad_bias is not None:
            grad_bias += grad_nV.sum(0, dtype=wide)
        del grad_nV  # before the next slab asks for its own
    return Gradients(grad_hidden, grad_weight, grad_bias)


# Checks on GPU results that do not make the host wait in the middle of a step.
#
# Reading a verdict back in the forward pass stalls the host until the GPU has caught up, and the GPU then idles until
# the host has queued the backward pass: 2% of a training step, measured. So where a backward pass will follow, the
# verdict travels to pinned memory beside the work and is read when that pass has been queued: late enough to be free,
# and still before `backward()` returns. (An optimizer that runs inside the backward pass has then stepped already.)


class _PendingCheck:
    """A verdict on its way from the GPU, and what to raise when it is bad."""

    def __init__(self, passed: Tensor, complain: Callable[[], None]) -> None:
        self._complain = complain
        self._verdict = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._verdict.copy_(passed, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def resolve_after_backward(self) -> None:
        """Call inside a backward function: the check runs when the whole backward pass has been queued."""
        torch.autograd.Variable._execution_engine.queue_callback(self.resolve)  # pyright: ignore

    def resolve(self) -> None:
        self._arrived.synchronize()
        if not bool(self._verdict):
            self._complain()


def check_now_or_after_backward(
    passed: Tensor, complain: Callable[[], None], *, backward_follows: bool
) -> _PendingCheck | None:
    """On CPU, or without a backward pass, complain at once; else hand back a check for the backward pass to resolve."""
    if passed.is_cuda and backward_follows:
        return _PendingCheck(passed, complain)
    if not bool(passed):
        complain()
    return None
