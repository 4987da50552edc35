"""The LM head as data, and teacher logits as a weighted sum of heads applied to hidden rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss import rows
from composer_replication.loss.linear.products import project


@dataclass(frozen=True, eq=False)
class LinearHead:
    """logits = cap(scale * (hidden @ weight.T + bias)); cap(z) = softcap * tanh(z / softcap) where a model has it."""

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.scale == 0.0 or not math.isfinite(self.scale):
            raise InputError(explain("LinearHead scale", got=self.scale, expected="a finite number that is not 0"))
        if self.softcap is not None:
            rows.check_positive(self.softcap, "LinearHead softcap")

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    def detached(self) -> LinearHead:
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, weight=self.weight.detach(), bias=bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits at once, differentiable: for small inputs and for tests; the kernels never call it."""
        logits = rows.in_compute_dtype(hidden) @ rows.in_compute_dtype(self.weight).T
        if self.bias is not None:
            logits = logits + self.bias
        logits = self.scale * logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def write_logits(self, hidden_nH: Tensor, out_nV: Tensor) -> None:
        """Fill `out_nV` with the logits of these rows, in its dtype."""
        project(hidden_nH, self.weight, out_nV)
        if self.bias is not None:
            out_nV.add_(self.bias)
        if self.scale != 1.0:
            out_nV.mul_(self.scale)
        if self.softcap is not None:
            out_nV.div_(self.softcap).tanh_().mul_(self.softcap)

    def grad_through_transform(self, grad_nV: Tensor, logits_nV: Tensor) -> None:
        """Turn d/d logits into d/d (hidden @ weight.T + bias), in place; `logits_nV` are the finished logits."""
        if self.softcap is not None:
            grad_nV.mul_(1.0 - (logits_nV / self.softcap).square())  # tanh' = 1 - tanh^2
        if self.scale != 1.0:
            grad_nV.mul_(self.scale)


@dataclass(frozen=True, eq=False)
class TeacherTerm:
    """One summand of the teacher logits: coefficient * head(hidden). Always detached.

    One term is a plain teacher; two (0.99 reference + 0.01 live) a trust region; `TeacherTerm.student(1 - t)` beside
    `TeacherTerm(hidden, head, t)` is TAID's mix, and costs no extra matrix product.
    """

    hidden: Tensor | None  # (N, H); None stands for the student's own rows
    head: LinearHead | None
    coefficient: float = 1.0

    @classmethod
    def student(cls, coefficient: float) -> TeacherTerm:
        """The student's own logits, detached."""
        return cls(hidden=None, head=None, coefficient=coefficient)

    def detached(self) -> TeacherTerm:
        if self.hidden is None or self.head is None:
            return self
        return replace(self, hidden=self.hidden.detach(), head=self.head.detached())


@dataclass(frozen=True, eq=False)
class Operands:
    """Hidden rows and head, ready for matrix products; gradients are cast back to the originals' dtypes."""

    hidden: Tensor
    head: LinearHead


def prepare_operands(hidden_NH: Tensor, head: LinearHead) -> Operands:
    """Detach both; under autocast cast both to its dtype, as the model's own head would be."""
    hidden, head = hidden_NH.detach(), head.detached()
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        hidden, head = hidden.to(dtype), replace(head, weight=head.weight.to(dtype))
    return Operands(hidden.contiguous(), replace(head, weight=head.weight.contiguous()))


def prepared_term(term: TeacherTerm) -> TeacherTerm:
    if term.hidden is None or term.head is None:
        return term
    operands = prepare_operands(term.hidden, term.head)
    return TeacherTerm(operands.hidden, operands.head, term.coefficient)


def check_rows_and_head(hidden: Tensor, head: LinearHead, name: str) -> None:
    """hidden is (N, H) in the head's dtype, on its device; the bias, if any, is (V,)."""
    weight, bias = head.weight, head.bias
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ShapeError(
            explain(
                f"{name} hidden rows and head weight",
                got=f"{tuple(hidden.shape)} and {tuple(weight.shape)}",
                expected="(N, H) and (V, H) with one H",
            )
        )
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ShapeError(
            explain(f"{name} hidden and weight dtypes", got=(hidden.dtype, weight.dtype), expected="floating point")
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ShapeError(
            explain(
                f"{name} hidden and weight dtypes",
                got=f"hidden {hidden.dtype}, weight {weight.dtype}",
                expected="one dtype, or autocast switched on",
                fix="Cast the hidden rows: hidden.to(weight.dtype).",
            )
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(explain(f"{name} bias", got=tuple(bias.shape), expected=f"({weight.shape[0]},)"))


def check_teacher_terms(terms: Sequence[TeacherTerm], num_rows: int, vocab: int) -> None:
    """At least one term; every term has the student's number of rows and vocabulary."""
    if not terms:
        raise InputError(explain("teacher_terms", got="an empty sequence", expected="at least one TeacherTerm"))
    if all(term.coefficient == 0.0 for term in terms):
        raise InputError(explain("teacher_terms coefficients", got="all 0", expected="at least one that is not"))
    for index, term in enumerate(terms):
        if (term.hidden is None) != (term.head is None):
            raise InputError(explain(f"teacher_terms[{index}]", got="hidden or head alone", expected="both or neither"))
        if term.hidden is None or term.head is None:
            continue
        check_rows_and_head(term.hidden, term.head, f"teacher_terms[{index}]")
        if term.hidden.shape[0] != num_rows or term.head.vocab != vocab:
            raise ShapeError(
                explain(
                    f"teacher_terms[{index}] rows and vocabulary",
                    got=(term.hidden.shape[0], term.head.vocab),
                    expected=f"{(num_rows, vocab)}, the student's",
                )
            )


def check_row_vector(values: Tensor, hidden_NH: Tensor, name: str) -> None:
    if values.shape != hidden_NH.shape[:1]:
        raise ShapeError(explain(f"{name} shape", got=tuple(values.shape), expected=f"({hidden_NH.shape[0]},)"))
