"""What every row-wise loss shares: checking its inputs, selecting the rows that count, and reducing their values.

A *row* is one position's logits over the vocabulary. Rows are selected before any arithmetic, so an ignored row costs
nothing, gets no gradient, and may hold NaN without harm. Shape suffixes: B batch, T time, N rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from composer_replication.errors import (
    InputError,
    NonFiniteError,
    ShapeError,
    explain,
)

REDUCTIONS = ("batchmean", "sum", "mean", "none")
IGNORE_INDEX = -100


class Divergence(Protocol):
    """A distance between a student row and a teacher row; gradients flow to the student only."""

    def __call__(self, student_NV: Tensor, teacher_NV: Tensor) -> Tensor: ...

    def check(self, vocab: int) -> None: ...


def in_compute_dtype(logits: Tensor) -> Tensor:
    """fp64 stays fp64 (finite differences need it); everything else is computed in fp32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def check_logit_pair(student: Tensor, teacher: Tensor) -> None:
    """Both are floating point and of one (B, T, V) or (N, V) shape."""
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
    """A mask has one entry per row of the logits."""
    if mask.shape != logits.shape[:-1]:
        raise ShapeError(
            explain(f"{name} shape", got=tuple(mask.shape), expected=f"{tuple(logits.shape[:-1])}, one entry per row")
        )


def kept_from_labels(labels: Tensor | None, logits: Tensor, name: str = "labels") -> Tensor | None:
    """Upstream's convention: exactly -100 is ignored, anything else (0 too) counts."""
    if labels is None:
        return None
    check_mask_shape(labels, logits, name)
    if labels.dtype == torch.bool:
        raise InputError(explain(f"{name} dtype", got="bool", expected=f"integers, {IGNORE_INDEX} where ignored"))
    return labels != IGNORE_INDEX


def kept_from_mask(mask: Tensor | None, logits: Tensor, name: str = "mask") -> Tensor | None:
    """The 0/1 convention: only a row whose entry is 1 (True) counts; other numbers are refused, not guessed at."""
    if mask is None:
        return None
    check_mask_shape(mask, logits, name)
    if mask.dtype == torch.bool:
        return mask
    row_mask = mask == 1
    if not bool((row_mask | (mask == 0)).all()):
        raise InputError(explain(f"{name} values", got="values other than 0 and 1", expected="a 0/1 or boolean mask"))
    return row_mask


def check_unit_interval(value: float, name: str) -> None:
    if not 0.0 <= value <= 1.0:  # also refuses NaN
        raise InputError(explain(name, got=value, expected="a number in [0, 1]"))


def check_positive(value: float, name: str) -> None:
    if not 0.0 < value < math.inf:  # also refuses NaN
        raise InputError(explain(name, got=value, expected="a finite number > 0"))


def check_at_least_zero(value: float, name: str) -> None:
    if not 0.0 <= value < math.inf:
        raise InputError(explain(name, got=value, expected="a finite number >= 0"))


def check_top_k(top_k: int | None, vocab: int) -> None:
    if top_k is not None and not 1 <= top_k <= vocab:
        raise InputError(explain("top_k", got=top_k, expected=f"None or 1..{vocab} (the vocabulary)"))


def check_token_dtype(token_ids: Tensor) -> None:
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise ShapeError(explain("token_ids dtype", got=token_ids.dtype, expected="an integer dtype"))


def check_token_ids(token_ids: Tensor, vocab: int) -> None:
    """Token ids are integers inside the vocabulary."""
    check_token_dtype(token_ids)
    outside = (token_ids < 0) | (token_ids >= vocab)
    if bool(outside.any()):
        raise InputError(explain("token_ids value", got=int(token_ids[outside][0]), expected=f"0..{vocab - 1}"))


def check_choice(value: str, choices: tuple[str, ...], name: str) -> None:
    if value not in choices:
        raise InputError(explain(name, got=repr(value), expected="one of " + ", ".join(map(repr, choices))))


def check_finite_rows(values_N: Tensor, what: str) -> None:
    """Raise when a row's value is NaN or infinite, naming the first such row: never let it reach the optimizer."""
    finite = torch.isfinite(values_N.detach())
    if not bool(finite.all()):
        bad = (~finite).nonzero()[:, 0]
        raise NonFiniteError(
            explain(
                f"{what}: row {int(bad[0])} of the {values_N.numel()} rows that count",
                got=f"{values_N[bad[0]].item()} ({bad.numel()} such rows)",
                expected="a finite value",
                fix="Look for NaN or infinite logits; mask a vocabulary entry with a large negative number, not -inf.",
            )
        )


def cap_rows(values_N: Tensor, token_clip: float | None) -> Tensor:
    """d * min(1, cap / sg(d)): the cap acts on a token's whole divergence, after the sum over the vocabulary.

    Clamping vocabulary entries instead (as upstream does) can make the loss negative and turn the gradient around on
    the teacher's own token; scaling the finished value keeps the direction and bounds the size.
    """
    if token_clip is None:
        return values_N
    check_positive(token_clip, "token_clip")
    return values_N * cap_factor(values_N, token_clip)


def cap_factor(values_N: Tensor, token_clip: float) -> Tensor:
    """The detached factor min(1, cap / d) of `cap_rows`; rows at or below zero are left alone."""
    values_N = values_N.detach()
    return torch.where(values_N > token_clip, token_clip / values_N, torch.ones_like(values_N))


def select_rows(logits: Tensor, kept: Tensor | None) -> Tensor:
    """(B, T, V) -> (N, V): the rows that count, in order."""
    return logits.flatten(0, -2) if kept is None else logits[kept]


def reduce_rows(values_N: Tensor, kept: Tensor | None, shape: torch.Size, reduction: str, entries: int) -> Tensor:
    """batchmean: / kept rows (without a mask: / batch size); mean: / (kept rows * entries); sum; none: 0 where ignored.

    No kept row gives an exact 0 that is still attached to the graph, so that its gradient is 0 and not missing.
    """
    if reduction == "none":
        if kept is None:
            return values_N.reshape(shape[:-1])
        scattered = values_N.new_zeros(shape[:-1])
        return scattered.masked_scatter(kept, values_N)
    total = values_N.sum()
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / max(values_N.numel() * entries, 1)
    return total / max(shape[0] if kept is None else values_N.numel(), 1)


def check_pair_vectors(**named: Tensor) -> list[Tensor]:
    """All are floating-point vectors of one length, one entry per pair; returned in the compute dtype."""
    for name, values in named.items():
        if not isinstance(values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(explain(name, got=type(values).__name__, expected="a tensor (B,), one entry per pair"))
        if values.dim() != 1:
            raise ShapeError(explain(f"{name} shape", got=tuple(values.shape), expected="(B,), one entry per pair"))
        if not values.is_floating_point():
            raise ShapeError(explain(f"{name} dtype", got=values.dtype, expected="a floating-point dtype"))
    lengths = {name: tuple(values.shape) for name, values in named.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(explain("log-prob vectors", got=lengths, expected="one length"))
    return [in_compute_dtype(values) for values in named.values()]
