"""The LM head as data, and teacher logits as a weighted sum of heads applied to hidden rows."""

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


# The three matrix products of a linear-fused loss, with results kept wider than half-precision inputs.
#
# On CUDA, half-precision operands go to the tensor cores and the result comes out in fp32 without being rounded first.
# On CPU, half-precision weights are widened a block at a time, so that no fp32 copy of the head ever exists.
# Shape suffixes: n rows of a tile, H hidden, V vocabulary.

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


# How many rows are worked on at once.
#
# A *tile* is the rows whose logits exist at one moment; a *slab* the rows whose logit gradients are multiplied together
# into the head's gradient. Both are bounded whatever N is, so memory is flat in N, and so wide that the matrix products
# stay compute-bound on a GPU. A slab larger than a tile cuts the traffic of summing the head's gradient in fp32.

# CUDA, measured on an H200 (benchmarks/README.md).
_CUDA_TILE_ROWS = 256
_CUDA_SLAB_ROWS = 1024
# How a kernel walks one row of a tile.
BLOCK_COLUMNS, NUM_WARPS = 4096, 16
# A row function without a kernel of its own keeps about eight tile-sized intermediates.
_CUDA_GENERIC_TILE_ROWS = 64
# Elsewhere: one tile of logits stays near this size.
_CPU_TILE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class TilePlan:
    """Row counts of tiles and slabs for one call."""

    num_rows: int
    tile_rows: int
    slab_rows: int

    def slabs(self) -> Iterator[slice]:
        return _slices(slice(0, self.num_rows), self.slab_rows)

    def tiles(self, within: slice) -> Iterator[slice]:
        return _slices(within, self.tile_rows)


def plan_tiles(
    num_rows: int, vocab: int, *, device: torch.device, element_bytes: int, has_kernel: bool, tile_rows: int | None
) -> TilePlan:
    """Choose sizes for this device; `tile_rows` overrides the tile (and the slab follows it)."""
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
