"""One tile of logits in, the rows' values out, and their weighted gradient written where the caller wants it.

Every row function is differentiated by autograd on the tile, so the fused path runs the very formula of the dense one.
Where a Triton kernel exists (CUDA), it does the same in three passes over the tile.
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
    """Token ids made safe to index with; whether they had to be changed is looked at later, without a wait."""

    given_N: Tensor
    safe_N: Tensor
    vocab: int

    @classmethod
    def of(cls, token_ids_N: Tensor, vocab: int) -> ChosenTokens:
        # A copy: the caller may reuse the buffer before the verdict is read.
        return cls(token_ids_N.clone(), token_ids_N.clamp(0, vocab - 1).contiguous(), vocab)

    def are_valid(self) -> Tensor:
        return (self.given_N == self.safe_N).all()

    def check(self) -> None:
        rows.check_token_ids(self.given_N, self.vocab)


class TileLoss(Protocol):
    """A loss of one tile of student logits. `grad_nV=None` asks for values only."""

    @property
    def has_kernel(self) -> bool: ...

    def __call__(
        self, student_nV: Tensor, tile: slice, weights_n: Tensor, grad_nV: Tensor | None, scratch: list[Tensor]
    ) -> Tensor: ...

    @property
    def num_scratch(self) -> int: ...

    @property
    def tokens(self) -> ChosenTokens | None: ...


def values_and_grad_by_autograd(
    row_function: Callable[[Tensor], Tensor],
    student_nV: Tensor,
    weights_n: Tensor,
    token_clip: float | None,
    grad_nV: Tensor | None,
) -> Tensor:
    """Row values, and d(sum weights * capped values)/d logits into `grad_nV`."""
    with torch.enable_grad():
        leaf = student_nV.detach().requires_grad_(grad_nV is not None)
        values_n = row_function(leaf)
        if grad_nV is not None:
            pull = weights_n if token_clip is None else weights_n * rows.cap_factor(values_n, token_clip)
            (grad,) = torch.autograd.grad(values_n, leaf, pull.to(values_n.dtype))
            grad_nV.copy_(grad)
    return values_n.detach()


@dataclass(frozen=True, eq=False)
class DivergenceTile:
    """A divergence to the teacher's tile, which is summed up term by term."""

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
        return values_and_grad_by_autograd(row_function, student_nV, weights_n, self.token_clip, grad_nV)

    @property
    def tokens(self) -> None:
        return None


def num_term_tiles(terms: Sequence[TeacherTerm]) -> int:
    """One tile for the sum, one more when a second head must be added to it."""
    return 1 + (sum(term.hidden is not None for term in terms) > 1)


def sum_of_terms(terms: Sequence[TeacherTerm], student_nV: Tensor, tile: slice, scratch: list[Tensor]) -> Tensor:
    """The teacher's logits of a tile, in the first of its `num_term_tiles` scratch tiles."""
    total_nV = scratch[0]
    is_empty = True
    # Heads first, then the student's own logits: the first head can then be written straight into the sum.
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
        return values_and_grad_by_autograd(row_function, student_nV, weights_n, None, grad_nV)

    def _values(self, token_ids_n: Tensor, student_nV: Tensor) -> Tensor:
        return TokenCrossEntropy(label_smoothing=self.label_smoothing)(student_nV, token_ids_n)


# ---- what waits for the backward pass
#
# Autograd releases what was saved with it as soon as the graph is done, and notices when a saved tensor was changed in
# between. A tensor hung on the context as an attribute would stay alive as long as anybody holds the loss. So records
# of tensors are taken apart for `save_for_backward`, and put together again.

_RECORDS = (ChosenTokens, CrossEntropyTile, DivergenceTile, LinearHead, Operands, TeacherTerm)


@dataclass(frozen=True)
class _Slot:
    index: int


def without_tensors(record: Any, tensors: list[Tensor]) -> Any:
    """The record with every tensor moved to `tensors` and a slot left in its place."""
    if isinstance(record, Tensor):
        tensors.append(record)
        return _Slot(len(tensors) - 1)
    return _mapped(record, partial(without_tensors, tensors=tensors))


def with_tensors(record: Any, tensors: tuple[Tensor, ...]) -> Any:
    """The inverse of `without_tensors`."""
    if isinstance(record, _Slot):
        return tensors[record.index]
    return _mapped(record, partial(with_tensors, tensors=tensors))


def _mapped(record: Any, change: Callable[[Any], Any]) -> Any:
    """The record or tuple with every part changed; anything else as it is."""
    if isinstance(record, tuple):
        return tuple(change(part) for part in cast("tuple[Any, ...]", record))
    if isinstance(record, _RECORDS):
        return replace(record, **{field.name: change(getattr(record, field.name)) for field in fields(record)})
    return record
