"""Compute sum_n weight_n * loss_n from hidden states and the LM head; no (N, V) tensor is kept for backward.

The weights are known in the forward pass, so the gradients of the weighted sum can be computed there: logits are
computed once, replaced by their gradient, and multiplied into the gradients of hidden states and weight. The backward
pass only scales these. A divergence takes four matrix products; storing only the normalizers would take eight.

Shape suffixes: N rows, n rows of a tile, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_replication.loss import rows
from composer_replication.loss.entropy_opd import EntropyGate
from composer_replication.loss.jsd import JSD
from composer_replication.loss.linear import head as products
from composer_replication.loss.linear import kernels
from composer_replication.loss.linear.gradients import (
    Gradients,
    NeededGradients,
    accumulate_gradients,
    check_now_or_after_backward,
)
from composer_replication.loss.linear.head import (
    LinearHead,
    Operands,
    TeacherTerm,
    TilePlan,
    check_row_vector,
    check_rows_and_head,
    check_teacher_terms,
    plan_tiles,
    prepare_operands,
    prepare_teacher_operands,
)
from composer_replication.loss.linear.tile_losses import (
    ChosenTokens,
    CrossEntropyTile,
    DivergenceTile,
    TileLoss,
    put_back_tensors,
    take_out_tensors,
)
from composer_replication.loss.lm_ce import check_label_smoothing
from composer_replication.loss.taid import CrossEntropyToTeacher


class LinearLoss(NamedTuple):
    """The differentiable weighted sum, and the detached value of each row before the cap and the weights."""

    loss: Tensor
    row_values: Tensor


def linear_divergence(
    hidden_NH: Tensor,
    head: LinearHead,
    teacher_terms: Sequence[TeacherTerm],
    divergence: rows.Divergence,
    *,
    row_weights: Tensor | None = None,
    token_clip: float | None = None,
    tile_rows: int | None = None,
    backend: kernels.Backend = "auto",
) -> LinearLoss:
    """Return sum_n weight_n * min(1, token_clip / d_n) * d_n, where d_n is the divergence of row n from the teacher.

    The result is differentiable in `hidden_NH`, `head.weight` and `head.bias`. The weights (default 1 / N), the clip
    factor and the teacher terms are treated as constants.
    """
    num_rows, vocab = hidden_NH.shape[0], head.vocab
    check_rows_and_head(hidden_NH, head, "student")
    check_teacher_terms(teacher_terms, num_rows, vocab)
    divergence.check(vocab)
    if token_clip is not None:
        rows.check_positive(token_clip, "token_clip")
    student = prepare_operands(hidden_NH, head)
    terms = tuple(prepare_teacher_operands(term) for term in teacher_terms)
    kernel = _divergence_kernel(divergence, vocab) if kernels.should_use_triton(backend, student.hidden) else None
    tile_loss = DivergenceTile(divergence, terms, token_clip, kernel)
    return _weighted_sum(hidden_NH, head, student, tile_loss, row_weights, token_clip, tile_rows)


def linear_cross_entropy(
    hidden_NH: Tensor,
    head: LinearHead,
    token_ids_N: Tensor,
    *,
    row_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    tile_rows: int | None = None,
    backend: kernels.Backend = "auto",
) -> LinearLoss:
    """Return sum_n weight_n * cross_entropy(row n, token n); weights default to 1 / N."""
    check_rows_and_head(hidden_NH, head, "student")
    check_label_smoothing(label_smoothing)
    check_row_vector(token_ids_N, hidden_NH, "token_ids")
    rows.check_token_dtype(token_ids_N)
    student = prepare_operands(hidden_NH, head)
    use_kernel = kernels.should_use_triton(backend, student.hidden)
    tile_loss = CrossEntropyTile(ChosenTokens.from_ids(token_ids_N, head.vocab), label_smoothing, use_kernel)
    return _weighted_sum(hidden_NH, head, student, tile_loss, row_weights, None, tile_rows)


def _divergence_kernel(divergence: rows.Divergence, vocab: int) -> kernels.DivergenceKernel | None:
    """Return the Triton kernel for a divergence, or None for top-k variants and custom divergences."""
    # The exact type is compared, because a subclass may have changed the formula.
    if type(divergence) is JSD and divergence.top_k is None:
        mode = {0.0: "kl_ts", 1.0: "kl_st"}.get(divergence.beta, "jsd")
        return kernels.DivergenceKernel(mode, beta=divergence.beta, temperature=divergence.temperature)
    if type(divergence) is CrossEntropyToTeacher:
        return kernels.DivergenceKernel("cross_entropy")
    if type(divergence) is EntropyGate and divergence.gate == "soft":
        scale = divergence.entropy_scale(vocab)
        return kernels.DivergenceKernel("entropy_soft", temperature=divergence.temperature, entropy_scale=scale)
    return None


def _weighted_sum(
    hidden_NH: Tensor,
    head: LinearHead,
    student: Operands,
    tile_loss: TileLoss,
    row_weights: Tensor | None,
    token_clip: float | None,
    tile_rows: int | None,
) -> LinearLoss:
    num_rows = hidden_NH.shape[0]
    dtype = products.product_dtype(student.hidden)
    if row_weights is None:
        row_weights = torch.full((num_rows,), 1.0 / max(num_rows, 1), dtype=dtype, device=hidden_NH.device)
    check_row_vector(row_weights, hidden_NH, "row_weights")
    plan = plan_tiles(
        num_rows,
        head.vocab,
        device=hidden_NH.device,
        element_bytes=dtype.itemsize,
        has_kernel=tile_loss.has_kernel,
        tile_rows=tile_rows,
    )
    weights = row_weights.detach().to(dtype).contiguous()
    job = _Job(student, tile_loss, weights, plan)
    return LinearLoss(*_apply(hidden_NH, head.weight, head.bias, job, token_clip, torch.is_grad_enabled()))


class _Job(NamedTuple):
    """The arguments of a weighted sum on detached operands, so that it can be recomputed for a second backward pass."""

    student: Operands
    tile_loss: TileLoss
    weights_N: Tensor
    plan: TilePlan

    def run(self, needed: NeededGradients) -> tuple[Tensor, Gradients]:
        """Return the value of each row and the needed gradients of the weighted sum."""
        weights_N, tile_loss = self.weights_N, self.tile_loss
        values_N = torch.empty(self.plan.num_rows, dtype=weights_N.dtype, device=weights_N.device)

        def visit(tile: slice, logits_nV: Tensor, grad_nV: Tensor | None, scratch: list[Tensor]) -> None:
            values_N[tile] = tile_loss(logits_nV, tile, weights_N[tile], grad_nV, scratch)

        with torch.autocast(weights_N.device.type, enabled=False):
            gradients = accumulate_gradients(self.student, self.plan, needed, visit, num_scratch=tile_loss.num_scratch)
        return values_N, gradients


def _raise_error(tokens: ChosenTokens | None, values_N: Tensor, loss: Tensor) -> None:
    """Find out why a check failed, and raise the most specific error."""
    if tokens is not None:
        tokens.check()
    rows.check_finite_rows(values_N, "linear-fused loss")
    rows.check_finite_rows(loss.reshape(1), "row_weights times linear-fused loss")


class _LinearWeightedSum(torch.autograd.Function):
    """The weighted sum, whose gradients are computed in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        job: _Job,
        token_clip: float | None,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        # needs_input_grad ignores no_grad, and grad mode is always off inside `forward`, so the caller passes the mode.
        needs_grad = NeededGradients(*(grad_enabled and needed for needed in ctx.needs_input_grad[:3]))
        values_N, gradients = job.run(needs_grad)
        loss = (job.weights_N * rows.cap_rows(values_N, token_clip)).sum()
        tokens = job.tile_loss.tokens
        passed = torch.isfinite(values_N).all() & torch.isfinite(loss)
        passed = passed if tokens is None else passed & tokens.are_valid()
        # A clone, because the check would otherwise keep the output's own graph alive.
        raise_error = partial(_raise_error, tokens, values_N, loss.clone())
        ctx.check = check_now_or_after_backward(passed, raise_error, backward_follows=any(needs_grad))
        saved: list[Tensor] = []
        ctx.job = _Job(*take_out_tensors(tuple(job), saved))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, *saved)
        # Cast now, to free the fp32 sum of the head's gradient before the backward pass needs the memory.
        ctx.gradients, ctx.needed = gradients.stored_like(hidden_NH, weight_VH, bias_V), needs_grad
        ctx.mark_non_differentiable(values_N)
        return loss, values_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _grad_values: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (*originals,) = ctx.saved_tensors[:3]
        if ctx.check is not None:
            ctx.check.resolve_after_backward()
        # The gradients are scaled in place and handed over, which saves a copy of the head's gradient. A second
        # backward pass through a retained graph recomputes them.
        gradients, ctx.gradients, ctx.check = ctx.gradients, None, None
        if gradients is None:
            job = _Job(*put_back_tensors(tuple(ctx.job), ctx.saved_tensors[3:]))
            gradients = job.run(ctx.needed)[1].stored_like(*originals)
        return (*gradients.scaled_like(grad_loss, *originals), None, None, None)


# torch leaves the type of `apply` unknown.
_apply = cast("Callable[..., tuple[Tensor, Tensor]]", _LinearWeightedSum.apply)  # pyright: ignore[reportUnknownMemberType]
