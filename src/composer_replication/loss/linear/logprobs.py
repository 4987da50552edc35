"""Compute log-probs of given tokens from hidden states and the LM head, differentiable per row.

A preference loss is a nonlinear function of sums of log-probs, so the weight of a row is unknown in the forward pass.
The forward pass stores one normalizer per row; the backward pass recomputes each tile of logits and replaces it by its
gradient. `linear_row_stats` computes, without gradients, the statistics on which row weights depend.

Shape suffixes: N rows, n rows of a tile, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_replication.loss import rows
from composer_replication.loss.linear import head as products
from composer_replication.loss.linear import kernels
from composer_replication.loss.linear.gradients import (
    NeededGradients,
    accumulate_gradients,
    check_now_or_after_backward,
    visit_tiles,
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
    num_term_tiles,
    put_back_tensors,
    sum_of_terms,
    take_out_tensors,
)


def linear_token_logprobs(
    hidden_NH: Tensor,
    head: LinearHead,
    token_ids_N: Tensor,
    *,
    tile_rows: int | None = None,
    backend: kernels.Backend = "auto",
) -> Tensor:
    """Return log softmax(head(hidden))[n, token_n] of every row, (N,), differentiable in hidden, weight and bias."""
    check_rows_and_head(hidden_NH, head, "student")
    check_row_vector(token_ids_N, hidden_NH, "token_ids")
    rows.check_token_dtype(token_ids_N)
    tokens = ChosenTokens.from_ids(token_ids_N, head.vocab)
    operands = prepare_operands(hidden_NH, head)
    use_kernel = kernels.should_use_triton(backend, operands.hidden)
    plan = plan_tiles(
        hidden_NH.shape[0],
        head.vocab,
        device=hidden_NH.device,
        element_bytes=products.product_dtype(operands.hidden).itemsize,
        has_kernel=use_kernel,
        tile_rows=tile_rows,
    )
    return _apply(hidden_NH, head.weight, head.bias, operands, tokens, plan, use_kernel, torch.is_grad_enabled())


class _LinearTokenLogprobs(torch.autograd.Function):
    """Token log-probs: stores normalizers in the forward pass, and computes gradients in the backward pass."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        operands: Operands,
        tokens: ChosenTokens,
        plan: TilePlan,
        use_kernel: bool,
        grad_enabled: bool,
    ) -> Tensor:
        token_ids_N, wide = tokens.safe_N, products.product_dtype(operands.hidden)
        log_z_N, chosen_N = (torch.empty(plan.num_rows, dtype=wide, device=hidden_NH.device) for _ in range(2))

        def visit(tile: slice, logits_nV: Tensor, grad_nV: Tensor | None, scratch: list[Tensor]) -> None:
            del grad_nV, scratch
            if use_kernel:
                log_z_N[tile], chosen_N[tile], _ = kernels.token_stats(logits_nV, token_ids_N[tile])
            else:
                chosen_N[tile] = logits_nV.gather(-1, token_ids_N[tile][:, None])[:, 0]
                log_z_N[tile] = logits_nV.logsumexp(-1)

        with torch.autocast(hidden_NH.device.type, enabled=False):
            visit_tiles(operands, plan, slice(0, plan.num_rows), visit, num_scratch=0, with_grad=False)
        logprobs_N = chosen_N - log_z_N

        # Must not refer to logprobs_N: the closure would keep the output's own graph alive.
        def raise_error() -> None:
            tokens.check()
            rows.check_finite_rows(chosen_N - log_z_N, "linear_token_logprobs")

        passed = torch.isfinite(logprobs_N).all() & tokens.are_valid()
        backward_follows = grad_enabled and any(ctx.needs_input_grad[:3])
        ctx.check = check_now_or_after_backward(passed, raise_error, backward_follows=backward_follows)
        saved: list[Tensor] = []
        ctx.operands, ctx.plan, ctx.use_kernel = take_out_tensors(operands, saved), plan, use_kernel
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, token_ids_N, log_z_N, *saved)
        return logprobs_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NH, weight_VH, bias_V, token_ids_N, log_z_N, *saved = ctx.saved_tensors
        operands: Operands = put_back_tensors(ctx.operands, tuple(saved))
        if ctx.check is not None:
            ctx.check.resolve_after_backward()
        # The derivative of the loss with respect to each row's log-prob.
        row_scale_N = grad_N.to(log_z_N.dtype).contiguous()

        def visit(tile: slice, logits_nV: Tensor, grad_nV: Tensor | None, scratch: list[Tensor]) -> None:
            del scratch
            if grad_nV is not None:
                inputs = logits_nV, token_ids_N[tile], log_z_N[tile], row_scale_N[tile]
                _write_logprob_grad(*inputs, grad_nV, use_kernel=ctx.use_kernel)

        with torch.autocast(hidden_NH.device.type, enabled=False):
            gradients = accumulate_gradients(operands, ctx.plan, NeededGradients(*ctx.needs_input_grad[:3]), visit)
        return (*gradients.scaled_like(None, hidden_NH, weight_VH, bias_V), None, None, None, None, None)


def _write_logprob_grad(
    logits_nV: Tensor, token_ids_n: Tensor, log_z_n: Tensor, row_scale_n: Tensor, grad_nV: Tensor, *, use_kernel: bool
) -> None:
    """Write row_scale * (onehot - softmax), the gradient of row_scale * logprob, to `grad_nV`."""
    # The kernel writes the gradient of the cross-entropy, which is the negative log-prob.
    if use_kernel:
        kernels.write_token_grad(logits_nV, token_ids_n, log_z_n, -row_scale_n, 0.0, grad_nV)
        return
    wide_nV = (logits_nV - log_z_n[:, None]).exp_().mul_(-row_scale_n[:, None])
    wide_nV.scatter_add_(-1, token_ids_n[:, None], row_scale_n[:, None])
    # The copy rounds once, after onehot - softmax.
    grad_nV.copy_(wide_nV)


# torch leaves the type of `apply` unknown.
_apply = cast("Callable[..., Tensor]", _LinearTokenLogprobs.apply)  # pyright: ignore[reportUnknownMemberType]


class RowStats(NamedTuple):
    """Statistics of each row at temperature 1: the log-probs of its token, and the teacher's entropy in nats."""

    student_logprobs: Tensor
    teacher_logprobs: Tensor
    teacher_entropy: Tensor


@torch.no_grad()
def linear_row_stats(
    hidden_NH: Tensor,
    head: LinearHead,
    teacher_terms: Sequence[TeacherTerm],
    token_ids_N: Tensor,
    *,
    tile_rows: int | None = None,
) -> RowStats:
    """Return log p_S(y_n), log p_T(y_n) and H_T(n) per row, (N,) each; NaN for tokens outside the vocabulary.

    This takes one matrix product per head in addition to those of the loss. No (N, V) tensor is created.
    """
    num_rows, vocab = hidden_NH.shape[0], head.vocab
    check_rows_and_head(hidden_NH, head, "student")
    check_teacher_terms(teacher_terms, num_rows, vocab)
    check_row_vector(token_ids_N, hidden_NH, "token_ids")
    rows.check_token_dtype(token_ids_N)
    tokens = ChosenTokens.from_ids(token_ids_N, vocab)
    student = prepare_operands(hidden_NH, head)
    terms = tuple(prepare_teacher_operands(term) for term in teacher_terms)
    wide = products.product_dtype(student.hidden)
    stats_3N = torch.empty(3, num_rows, dtype=wide, device=hidden_NH.device)

    def visit(tile: slice, logits_nV: Tensor, grad_nV: Tensor | None, scratch: list[Tensor]) -> None:
        del grad_nV
        chosen_n1 = tokens.safe_N[tile][:, None].long()
        teacher_nV = sum_of_terms(terms, logits_nV, tile, scratch)
        stats_3N[0, tile] = logits_nV.gather(-1, chosen_n1)[:, 0] - logits_nV.logsumexp(-1)
        log_p_nV = teacher_nV.sub_(teacher_nV.logsumexp(-1, keepdim=True))
        stats_3N[1, tile] = log_p_nV.gather(-1, chosen_n1)[:, 0]
        stats_3N[2, tile] = -(log_p_nV.exp().mul_(log_p_nV)).sum(-1)

    plan = plan_tiles(
        num_rows, vocab, device=hidden_NH.device, element_bytes=wide.itemsize, has_kernel=False, tile_rows=tile_rows
    )
    with torch.autocast(hidden_NH.device.type, enabled=False):
        visit_tiles(student, plan, slice(0, num_rows), visit, num_scratch=num_term_tiles(terms), with_grad=False)
    # Raising here would make the host wait for the GPU. With NaN, the loss that uses these values raises instead.
    return RowStats(*torch.where(tokens.ids_N == tokens.safe_N, stats_3N, math.nan).unbind(0))


def summed_logprobs(
    head: LinearHead, rows_NH: Tensor, targets_N: Tensor, response_N: Tensor, num_responses: int
) -> tuple[Tensor, Tensor]:
    """Return the summed log-probs (R,) and the length of each response.

    `response_N` maps each row to the index of its response.
    """
    token_logprobs_N = linear_token_logprobs(rows_NH, head, targets_N)
    sums = token_logprobs_N.new_zeros(num_responses).index_add(0, response_N, token_logprobs_N)
    return sums, torch.bincount(response_N, minlength=num_responses)
