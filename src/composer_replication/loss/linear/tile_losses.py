"""The losses of one tile of logits: the value of each row, and the gradient of their weighted sum.

Autograd differentiates the row functions of the dense losses on the tile, so dense and fused losses share one formula.
On CUDA, divergences with a Triton kernel are computed by the kernel, in three passes over the tile.

Shape suffixes: N all rows, n rows of a tile, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from composer_replication.loss import rows
from composer_replication.loss.linear import kernels
from composer_replication.loss.linear.head import LinearHead, Operands, TeacherTerm
from composer_replication.loss.lm_ce import TokenCrossEntropy


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """The chosen token ids, and a copy of them clamped to the vocabulary, which is safe for indexing.

    With the copy, the ids can be checked later, without waiting for the GPU.
    """

    ids_N: Tensor
    safe_N: Tensor
    vocab: int

    @classmethod
    def from_ids(cls, token_ids_N: Tensor, vocab: int) -> ChosenTokens:
        """Store the ids with a clamped copy."""
        # A copy, because the caller may reuse the buffer before the ids are checked.
        return cls(token_ids_N.clone(), token_ids_N.clamp(0, vocab - 1).contiguous(), vocab)

    def are_valid(self) -> Tensor:
        """Return whether all ids are in the vocabulary, as a tensor on their device."""
        return (self.ids_N == self.safe_N).all()

    def check(self) -> None:
        """Raise InputError if an id is outside the vocabulary."""
        rows.check_token_ids(self.ids_N, self.vocab)


class TileLoss(Protocol):
    """A loss that is computed on one tile of student logits at a time."""

    @property
    def has_kernel(self) -> bool:
        """Whether a Triton kernel computes this loss."""
        ...

    def __call__(
        self, student_nV: Tensor, tile: slice, weights_n: Tensor, grad_nV: Tensor | None, scratch: list[Tensor]
    ) -> Tensor:
        """Return the row values, and write the gradient of their weighted sum to `grad_nV` unless that is None."""
        ...

    @property
    def num_scratch(self) -> int:
        """The number of tile-sized scratch buffers that this loss needs."""
        ...

    @property
    def tokens(self) -> ChosenTokens | None:
        """The tokens whose ids are still to be checked, if any."""
        ...


def _values_and_grad_by_autograd(
    row_function: Callable[[Tensor], Tensor],
    student_nV: Tensor,
    weights_n: Tensor,
    token_clip: float | None,
    grad_nV: Tensor | None,
) -> Tensor:
    """Return the row values, and write d(sum weights * capped values) / d logits to `grad_nV`."""
    with torch.enable_grad():
        leaf = student_nV.detach().requires_grad_(grad_nV is not None)
        values_n = row_function(leaf)
        if grad_nV is not None:
            # The derivative of the weighted sum with respect to each row's value.
            row_scale = weights_n if token_clip is None else weights_n * rows.cap_factor(values_n, token_clip)
            (grad,) = torch.autograd.grad(values_n, leaf, row_scale.to(values_n.dtype))
            grad_nV.copy_(grad)
    return values_n.detach()


@dataclass(frozen=True, eq=False)
class DivergenceTile:
    """The divergence of the student's rows from the teacher's; the teacher's logits are a sum of terms."""

    divergence: rows.Divergence
    terms: Sequence[TeacherTerm]
    token_clip: float | None
    kernel: kernels.DivergenceKernel | None

    @property
    def has_kernel(self) -> bool:
        return self.kernel is not None

    @property
    def num_scratch(self) -> int:
        return num_term_tiles(self.terms)

    def __call__(
        self, student_nV: Tensor, tile: slice, weights_n: Tensor, grad_nV: Tensor | None, scratch: list[Tensor]
    ) -> Tensor:
        teacher_nV = sum_of_terms(self.terms, student_nV, tile, scratch)
        if self.kernel is not None:
            return self.kernel(student_nV, teacher_nV, weights_n, self.token_clip, grad_nV)
        row_function = partial(_swap_arguments, self.divergence, teacher_nV)
        return _values_and_grad_by_autograd(row_function, student_nV, weights_n, self.token_clip, grad_nV)

    @property
    def tokens(self) -> None:
        return None


def num_term_tiles(terms: Sequence[TeacherTerm]) -> int:
    """Return the number of scratch tiles for `sum_of_terms`: one, or two if there are several heads."""
    return 1 + (sum(term.hidden is not None for term in terms) > 1)


def sum_of_terms(terms: Sequence[TeacherTerm], student_nV: Tensor, tile: slice, scratch: list[Tensor]) -> Tensor:
    """Compute the teacher's logits for a tile, and return them; they are stored in the first scratch tile."""
    total_nV = scratch[0]
    is_empty = True
    # Heads come before the student's own logits, so that the first head can write directly into the sum.
    for term in sorted(terms, key=lambda term: term.hidden is None):
        if term.coefficient == 0.0:
            continue
        if term.hidden is None or term.head is None:
            summand_nV = student_nV
        else:
            summand_nV = total_nV if is_empty else scratch[1]
            term.head.write_logits(term.hidden[tile], summand_nV)
        if not is_empty:
            total_nV.add_(summand_nV, alpha=term.coefficient)
        elif term.coefficient != 1.0 or summand_nV is not total_nV:
            torch.mul(summand_nV, term.coefficient, out=total_nV)
        is_empty = False
    return total_nV


def _swap_arguments(divergence: rows.Divergence, teacher_nV: Tensor, student_nV: Tensor) -> Tensor:
    # `partial` binds leading arguments, but the teacher is the second argument of a divergence.
    return divergence(student_nV, teacher_nV)


@dataclass(frozen=True, eq=False)
class CrossEntropyTile:
    """Cross-entropy of one token per row."""

    tokens: ChosenTokens
    label_smoothing: float
    use_kernel: bool

    @property
    def has_kernel(self) -> bool:
        return self.use_kernel

    @property
    def num_scratch(self) -> int:
        return 0

    def __call__(
        self, student_nV: Tensor, tile: slice, weights_n: Tensor, grad_nV: Tensor | None, scratch: list[Tensor]
    ) -> Tensor:
        del scratch
        token_ids_n = self.tokens.safe_N[tile]
        if self.use_kernel:
            stats = kernels.token_stats(student_nV, token_ids_n)
            if grad_nV is not None:
                kernels.write_token_grad(student_nV, token_ids_n, stats.log_z, weights_n, self.label_smoothing, grad_nV)
            smooth = self.label_smoothing
            return stats.log_z - (1.0 - smooth) * stats.chosen - smooth * stats.mean_logit
        row_function = partial(self._values, token_ids_n)
        return _values_and_grad_by_autograd(row_function, student_nV, weights_n, None, grad_nV)

    def _values(self, token_ids_n: Tensor, student_nV: Tensor) -> Tensor:
        return TokenCrossEntropy(label_smoothing=self.label_smoothing)(student_nV, token_ids_n)


# Autograd frees tensors from `save_for_backward` as soon as the backward pass is done, and detects in-place changes. A
# tensor in an attribute of the context would live as long as the loss. So tensors are taken out of their dataclasses
# for `save_for_backward`, and put back in the backward pass.
_RECORDS = (ChosenTokens, CrossEntropyTile, DivergenceTile, LinearHead, Operands, TeacherTerm)


@dataclass(frozen=True)
class _Slot:
    """A placeholder for a tensor that was taken out of a record: the tensor's index in the list of tensors."""

    index: int


def take_out_tensors(record: Any, tensors: list[Tensor]) -> Any:
    """Return the record with every tensor replaced by a placeholder, and append the tensors to `tensors`."""
    if isinstance(record, Tensor):
        tensors.append(record)
        return _Slot(len(tensors) - 1)
    return _map_parts(record, partial(take_out_tensors, tensors=tensors))


def put_back_tensors(record: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Return the record with every placeholder replaced by its tensor: the inverse of `take_out_tensors`."""
    if isinstance(record, _Slot):
        return tensors[record.index]
    return _map_parts(record, partial(put_back_tensors, tensors=tensors))


def _map_parts(record: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every element of a tuple or field of a record; return any other value unchanged."""
    if isinstance(record, tuple):
        return tuple(change(part) for part in cast("tuple[Any, ...]", record))
    if isinstance(record, _RECORDS):
        return replace(record, **{field.name: change(getattr(record, field.name)) for field in fields(record)})
    return record
