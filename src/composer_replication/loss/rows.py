"""The shared parts of all row-wise losses: input checks, row selection, and reductions.

A *row* is the logits of one position over the vocabulary. Rows that are ignored are left out before any arithmetic, so
they cost nothing, get no gradient, and may contain NaN. Shape suffixes: B batch, T time, N rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from composer_replication.errors import InputError, NonFiniteError, ShapeError, explain

REDUCTIONS = ("batchmean", "sum", "mean", "none")
IGNORE_INDEX = -100


class Divergence(Protocol):
    """A divergence between student rows and teacher rows; gradients flow to the student only."""

    def __call__(self, student_NV: Tensor, teacher_NV: Tensor) -> Tensor: ...

    def check(self, vocab: int) -> None:
        """Raise InputError if an option is out of range for this vocabulary."""
        ...


def in_compute_dtype(logits: Tensor) -> Tensor:
    """Cast to the dtype in which losses are computed: fp64 stays fp64, anything else becomes fp32."""
    # fp64 stays for tests with finite differences.
    return logits if logits.dtype == torch.float64 else logits.float()


def check_logit_pair(student: Tensor, teacher: Tensor) -> None:
    """Raise ShapeError unless both tensors are floating point and have the same (B, T, V) or (N, V) shape."""
    for name, logits in (("student_logits", student), ("teacher_logits", teacher)):
        if not logits.is_floating_point():
            raise ShapeError(explain(f"{name} dtype", got=logits.dtype, expected="a floating-point dtype"))
        if logits.dim() < 2:
            raise ShapeError(explain(f"{name} shape", got=tuple(logits.shape), expected="(B, T, V) or (N, V)"))
    if student.shape != teacher.shape:
        raise ShapeError(
            explain(
                "student_logits and teacher_logits shapes",
                got=f"{tuple(student.shape)} and {tuple(teacher.shape)}",
                expected="equal shapes",
                fix="Gather the rows that predict the same token on both sides first (index pairs).",
            )
        )


def check_mask_shape(mask: Tensor, logits: Tensor, name: str) -> None:
    """Raise ShapeError unless the mask has one entry per row of the logits."""
    if mask.shape != logits.shape[:-1]:
        raise ShapeError(
            explain(f"{name} shape", got=tuple(mask.shape), expected=f"{tuple(logits.shape[:-1])}, one entry per row")
        )


def to_boolean_mask(mask: Tensor | None, logits: Tensor, name: str = "mask") -> Tensor | None:
    """Return a boolean mask of the entries that are 1. Raises InputError on numbers other than 0 and 1."""
    if mask is None:
        return None
    check_mask_shape(mask, logits, name)
    if mask.dtype == torch.bool:
        return mask
    row_mask = mask == 1
    if not bool((row_mask | (mask == 0)).all()):
        raise InputError(explain(f"{name} values", got="values other than 0 and 1", expected="a 0/1 or boolean mask"))
    return row_mask


# The comparisons below also reject NaN, for which every comparison is false.


def check_unit_interval(value: float, name: str) -> None:
    """Raise InputError unless the value is in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise InputError(explain(name, got=value, expected="a number in [0, 1]"))


def check_positive(value: float, name: str) -> None:
    """Raise InputError unless the value is finite and above 0."""
    if not 0.0 < value < math.inf:
        raise InputError(explain(name, got=value, expected="a finite number > 0"))


def check_at_least_zero(value: float, name: str) -> None:
    """Raise InputError unless the value is finite and not negative."""
    if not 0.0 <= value < math.inf:
        raise InputError(explain(name, got=value, expected="a finite number >= 0"))


def check_top_k(top_k: int | None, vocab: int) -> None:
    """Raise InputError unless `top_k` is None or from 1 to the size of the vocabulary."""
    if top_k is not None and not 1 <= top_k <= vocab:
        raise InputError(explain("top_k", got=top_k, expected=f"None or 1..{vocab} (the vocabulary)"))


def check_token_dtype(token_ids: Tensor) -> None:
    """Raise ShapeError unless the ids are integers."""
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise ShapeError(explain("token_ids dtype", got=token_ids.dtype, expected="an integer dtype"))


def check_token_ids(token_ids: Tensor, vocab: int) -> None:
    """Raise an error unless the ids are integers in the vocabulary."""
    check_token_dtype(token_ids)
    outside = (token_ids < 0) | (token_ids >= vocab)
    if bool(outside.any()):
        raise InputError(explain("token_ids value", got=int(token_ids[outside][0]), expected=f"0..{vocab - 1}"))


def check_choice(value: str, choices: tuple[str, ...], name: str) -> None:
    """Raise InputError unless the value is one of the choices."""
    if value not in choices:
        raise InputError(explain(name, got=repr(value), expected="one of " + ", ".join(map(repr, choices))))


def check_finite_rows(values_N: Tensor, what: str) -> None:
    """Raise NonFiniteError, naming the first bad row, if a value is NaN or infinite."""
    # A single bad value would turn every weight into NaN in the next optimizer step.
    finite = torch.isfinite(values_N.detach())
    if not bool(finite.all()):
        bad = (~finite).nonzero()[:, 0]
        raise NonFiniteError(
            explain(
                f"{what}: row {int(bad[0])} of the {values_N.numel()} rows that count",
                got=f"{values_N[bad[0]].item()} ({bad.numel()} such rows)",
                expected="a finite value",
                fix="Check for NaN or infinite logits; mask vocabulary entries with a large negative number, not -inf.",
            )
        )


def cap_rows(values_N: Tensor, token_clip: float | None) -> Tensor:
    """Return d * min(1, cap / sg(d)): divergences per token, scaled down to the cap where they exceed it.

    Each divergence is summed over the vocabulary first. Upstream clamps single vocabulary entries instead, which can
    make the loss negative and reverse the gradient on the teacher's own token. Scaling the sum keeps the gradient's
    direction and bounds its size.
    """
    if token_clip is None:
        return values_N
    check_positive(token_clip, "token_clip")
    return values_N * cap_factor(values_N, token_clip)


def cap_factor(values_N: Tensor, token_clip: float) -> Tensor:
    """Return the detached factor min(1, cap / d) of `cap_rows`; it is 1 for values of 0 or less."""
    values_N = values_N.detach()
    return torch.where(values_N > token_clip, token_clip / values_N, torch.ones_like(values_N))


def select_rows(logits: Tensor, row_mask: Tensor | None) -> Tensor:
    """Return the rows that the mask selects, or all rows without a mask, in order: (B, T, V) -> (N, V)."""
    return logits.flatten(0, -2) if row_mask is None else logits[row_mask]


def reduce_rows(values_N: Tensor, row_mask: Tensor | None, shape: torch.Size, reduction: str, entries: int) -> Tensor:
    """Reduce the values of the rows that count; `shape` is the shape of the logits.

    none       the values at the positions of their rows, 0 at ignored rows
    sum        the sum
    batchmean  the sum / number of rows (without a mask: / batch size)
    mean       the sum / (number of rows * `entries`), where `entries` is the number of vocabulary entries per row
    """
    if reduction == "none":
        if row_mask is None:
            return values_N.reshape(shape[:-1])
        scattered = values_N.new_zeros(shape[:-1])
        return scattered.masked_scatter(row_mask, values_N)
    # Without rows this is an exact 0 in the autograd graph, so the gradient is 0 rather than missing.
    total = values_N.sum()
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / max(values_N.numel() * entries, 1)
    return total / max(shape[0] if row_mask is None else values_N.numel(), 1)
