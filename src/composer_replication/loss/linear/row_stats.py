"""What a row weight needs to know about student and teacher, tile by tile and without gradients.

The teacher is the same sum of heads applied to hidden rows that the divergence takes, so no (N, V) tensor exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composer_replication.loss import rows
from composer_replication.loss.linear import products
from composer_replication.loss.linear.gradients import visit_tiles
from composer_replication.loss.linear.head import (
    LinearHead,
    TeacherTerm,
    check_row_vector,
    check_rows_and_head,
    check_teacher_terms,
    prepare_operands,
    prepared_term,
)
from composer_replication.loss.linear.tile_losses import ChosenTokens, num_term_tiles, sum_of_terms
from composer_replication.loss.linear.tiles import plan_tiles


class RowStats(NamedTuple):
    """Per row, at temperature 1: both sides' log-prob of the row's token, and the teacher's entropy in nats."""

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
    """log p_S(y_n), log p_T(y_n) and H_T(n) of every row, (N,) each; a token outside the vocabulary gives NaN.

    One more product of each head than the loss alone needs; nothing of the size of the vocabulary outlives its tile.
    """
    num_rows, vocab = hidden_NH.shape[0], head.vocab
    check_rows_and_head(hidden_NH, head, "student")
    check_teacher_terms(teacher_terms, num_rows, vocab)
    check_row_vector(token_ids_N, hidden_NH, "token_ids")
    rows.check_token_dtype(token_ids_N)
    tokens = ChosenTokens.of(token_ids_N, vocab)
    student = prepare_operands(hidden_NH, head)
    terms = tuple(prepared_term(term) for term in teacher_terms)
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
    # Not raised here: on a GPU that would wait for the verdict. The loss that is weighted with it complains.
    return RowStats(*torch.where(tokens.given_N == tokens.safe_N, stats_3N, math.nan).unbind(0))
