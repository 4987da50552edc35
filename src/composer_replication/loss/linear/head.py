"""The LM head as data, its matrix products, and the sizes of the tiles in which logits are computed.

Teacher logits are a weighted sum of LM heads applied to hidden states (`TeacherTerm`).

Shape suffixes: N rows, n rows of a tile, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss import rows


@dataclass(frozen=True, eq=False)
class LinearHead:
    """The LM head: logits = cap(scale * (hidden @ weight.T + bias)), with cap(z) = softcap * tanh(z / softcap).

    Without a softcap, cap(z) = z.
    """

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
        """The size of the vocabulary."""
        return self.weight.shape[0]

    def detached(self) -> LinearHead:
        """Return the head without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, weight=self.weight.detach(), bias=bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the differentiable logits of all rows at once. Only for small inputs and tests."""
        logits = rows.in_compute_dtype(hidden) @ rows.in_compute_dtype(self.weight).T
        if self.bias is not None:
            logits = logits + self.bias
        logits = self.scale * logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def write_logits(self, hidden_nH: Tensor, out_nV: Tensor) -> None:
        """Write the logits of these rows to `out_nV`, in its dtype."""
        _project(hidden_nH, self.weight, out_nV)
        if self.bias is not None:
            out_nV.add_(self.bias)
        if self.scale != 1.0:
            out_nV.mul_(self.scale)
        if self.softcap is not None:
            out_nV.div_(self.softcap).tanh_().mul_(self.softcap)

    def grad_through_transform(self, grad_nV: Tensor, logits_nV: Tensor) -> None:
        """Convert gradients of capped, scaled logits to gradients of (hidden @ weight.T + bias), in place.

        `logits_nV` are the capped logits.
        """
        # tanh' = 1 - tanh^2, and logits / softcap is the tanh.
        if self.softcap is not None:
            grad_nV.mul_(1.0 - (logits_nV / self.softcap).square())
        if self.scale != 1.0:
            grad_nV.mul_(self.scale)


@dataclass(frozen=True, eq=False)
class TeacherTerm:
    """One summand of the teacher logits: coefficient * head(hidden), always detached.

    A single term is a plain teacher. Two terms, 0.99 of a reference model and 0.01 of the live model, are a trust
    region. `TeacherTerm.student(1 - t)` with `TeacherTerm(hidden, head, t)` is TAID's mix; the student's term needs no
    extra matrix product.
    """

    hidden: Tensor | None  # (N, H); None for the student's own logits
    head: LinearHead | None
    coefficient: float = 1.0

    @classmethod
    def student(cls, coefficient: float) -> TeacherTerm:
        """Return a term for the student's own logits, detached."""
        return cls(hidden=None, head=None, coefficient=coefficient)

    def detached(self) -> TeacherTerm:
        """Return the term without gradients."""
        if self.hidden is None or self.head is None:
            return self
        return replace(self, hidden=self.hidden.detach(), head=self.head.detached())


@dataclass(frozen=True, eq=False)
class Operands:
    """Hidden states and head, ready for matrix products; gradients are cast back to the original dtypes."""

    hidden: Tensor
    head: LinearHead


def prepare_operands(hidden_NH: Tensor, head: LinearHead) -> Operands:
    """Detach the hidden states and the head, cast them to autocast's dtype if it is on, and make them contiguous."""
    hidden, head = hidden_NH.detach(), head.detached()
    device = hidden.device.type
    # Autocast would cast the inputs of the model's own head the same way, but does not apply to these products.
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        hidden, head = hidden.to(dtype), replace(head, weight=head.weight.to(dtype))
    return Operands(hidden.contiguous(), replace(head, weight=head.weight.contiguous()))


def prepare_teacher_operands(term: TeacherTerm) -> TeacherTerm:
    """Return the term with its hidden states and head prepared for matrix products."""
    if term.hidden is None or term.head is None:
        return term
    operands = prepare_operands(term.hidden, term.head)
    return TeacherTerm(operands.hidden, operands.head, term.coefficient)


def check_rows_and_head(hidden: Tensor, head: LinearHead, name: str) -> None:
    """Raise ShapeError unless hidden is (N, H) in the dtype of the weight (V, H), and the bias (V,)."""
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
                expected="equal dtypes, or autocast",
                fix="Cast the hidden rows: hidden.to(weight.dtype).",
            )
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(explain(f"{name} bias", got=tuple(bias.shape), expected=f"({weight.shape[0]},)"))


def check_teacher_terms(terms: Sequence[TeacherTerm], num_rows: int, vocab: int) -> None:
    """Raise an error unless some coefficient is nonzero and all terms match the student's shape."""
    if not terms:
        raise InputError(explain("teacher_terms", got="an empty sequence", expected="at least one TeacherTerm"))
    if all(term.coefficient == 0.0 for term in terms):
        raise InputError(explain("teacher_terms coefficients", got="all 0", expected="at least one that is not"))
    for index, term in enumerate(terms):
        if (term.hidden is None) != (term.head is None):
            raise InputError(
                explain(f"teacher_terms[{index}]", got="only one of hidden and head", expected="both or neither")
            )
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
    """Raise ShapeError unless the vector has one value per row of the hidden states."""
    if values.shape != hidden_NH.shape[:1]:
        raise ShapeError(explain(f"{name} shape", got=tuple(values.shape), expected=f"({hidden_NH.shape[0]},)"))


# Matrix products of half-precision operands return fp32. On CUDA the tensor cores compute them without rounding the
# results. On CPU half-precision weights are converted to fp32 in blocks, so that no fp32 copy of the whole head exists:
# 4096 rows of 4096 in fp32 are 64 MiB.
_BLOCK_ROWS = 4096


def product_dtype(operand: Tensor) -> torch.dtype:
    """Return the dtype of logits: fp64 for fp64 operands, otherwise fp32."""
    return torch.float64 if operand.dtype == torch.float64 else torch.float32


def _project(hidden_nH: Tensor, weight_VH: Tensor, out_nV: Tensor) -> None:
    """Write hidden @ weight.T to `out_nV`."""
    if hidden_nH.dtype == out_nV.dtype:
        torch.mm(hidden_nH, weight_VH.T, out=out_nV)
    elif hidden_nH.is_cuda:
        torch.mm(hidden_nH, weight_VH.T, out_dtype=out_nV.dtype, out=out_nV)
    else:
        wide_nH = hidden_nH.to(out_nV.dtype)
        for block in vocab_blocks(weight_VH):
            out_nV[:, block] = wide_nH @ weight_VH[block].to(out_nV.dtype).T


def vocab_blocks(weight_VH: Tensor) -> Iterator[slice]:
    """Yield slices of the vocabulary that are small enough to copy their part of the weight to a wider dtype."""
    for start in range(0, weight_VH.shape[0], _BLOCK_ROWS):
        yield slice(start, min(start + _BLOCK_ROWS, weight_VH.shape[0]))


# Rows per tile and slab (see `TilePlan`) on CUDA, measured on an H200 (benchmarks/README.md).
_CUDA_TILE_ROWS = 256
_CUDA_SLAB_ROWS = 1024
# Columns that a Triton kernel loads at once, and its warps per row.
BLOCK_COLUMNS, NUM_WARPS = 4096, 16
# Autograd on a divergence without a kernel keeps about eight tensors of the size of a tile.
_CUDA_GENERIC_TILE_ROWS = 64
# The approximate size of one tile of logits on CPU.
_CPU_TILE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class TilePlan:
    """The number of rows per tile and slab in one call.

    A *tile* is a range of rows whose logits exist at the same time; a *slab* is a range of rows whose logit gradients
    enter the head's gradient in one matrix product. Both have a maximum size, so memory does not grow with N, and both
    are large enough for compute-bound matrix products on a GPU. A slab larger than a tile saves memory traffic, because
    the head's gradient is summed in fp32 only once per slab.
    """

    num_rows: int
    tile_rows: int
    slab_rows: int

    def slabs(self) -> Iterator[slice]:
        """Yield the slabs of all rows."""
        return _slices(slice(0, self.num_rows), self.slab_rows)

    def tiles(self, within: slice) -> Iterator[slice]:
        """Yield the tiles of a slab."""
        return _slices(within, self.tile_rows)


def plan_tiles(
    num_rows: int, vocab: int, *, device: torch.device, element_bytes: int, has_kernel: bool, tile_rows: int | None
) -> TilePlan:
    """Choose tile and slab sizes for this device.

    `tile_rows` overrides the size of a tile, and is the minimum size of a slab.
    """
    if tile_rows is not None:
        if tile_rows < 1:
            raise InputError(explain("tile_rows", got=tile_rows, expected="None or an integer >= 1"))
        return TilePlan(num_rows, tile_rows, max(tile_rows, _CUDA_SLAB_ROWS if device.type == "cuda" else tile_rows))
    if device.type != "cuda":
        rows_that_fit = max(1, _CPU_TILE_BYTES // (vocab * element_bytes))
        return TilePlan(num_rows, min(rows_that_fit, 1024), min(rows_that_fit, 1024))
    return TilePlan(num_rows, _CUDA_TILE_ROWS if has_kernel else _CUDA_GENERIC_TILE_ROWS, _CUDA_SLAB_ROWS)


def _slices(within: slice, step: int) -> Iterator[slice]:
    for start in range(within.start, within.stop, step):
        yield slice(start, min(start + step, within.stop))
