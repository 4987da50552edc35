"""Choose between Triton and torch, and call the Triton kernels, which are imported on first use on a GPU.

Shape suffixes: n rows of a tile, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.loss import rows

Backend = Literal["auto", "torch", "triton"]
BACKENDS = ("auto", "torch", "triton")


class _TokenStats(NamedTuple):
    """The log normalizer, the logit of the given token, and the mean logit, for each row."""

    log_z: Tensor
    chosen: Tensor
    mean_logit: Tensor


@dataclass(frozen=True)
class DivergenceKernel:
    """A divergence that `triton_kernels` implements; `mode` selects its formula."""

    mode: str
    beta: float = 0.0
    temperature: float = 1.0
    entropy_scale: float = 1.0

    def __call__(
        self,
        student_nV: Tensor,
        teacher_nV: Tensor,
        weights_n: Tensor,
        token_clip: float | None,
        grad_nV: Tensor | None,
    ) -> Tensor:
        return _triton_kernels().divergence_rows(self, student_nV, teacher_nV, weights_n, token_clip, grad_nV)


@cache
def _triton_kernels() -> ModuleType:
    # Triton is not installed everywhere, and its import fails without it.
    from composer_replication.loss.linear import triton_kernels

    return triton_kernels


def should_use_triton(backend: str, operand: Tensor) -> bool:
    """Return whether to use Triton: with "auto", for CUDA tensors other than fp64 if Triton is installed.

    Raises InputError if the backend is "triton" but Triton cannot be used.
    """
    rows.check_choice(backend, BACKENDS, "backend")
    possible = operand.is_cuda and operand.dtype != torch.float64 and _has_triton()
    if backend == "triton" and not possible:
        raise InputError(
            explain(
                'backend="triton"',
                got=f"{operand.dtype} on {operand.device}, triton installed: {_has_triton()}",
                expected="a CUDA tensor of at most 32 bits with triton installed",
                fix='Use backend="auto".',
            )
        )
    return possible and backend != "torch"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def token_stats(logits_nV: Tensor, token_ids_n: Tensor) -> _TokenStats:
    """Compute the statistics of every row in one pass over the tile."""
    return _TokenStats(*_triton_kernels().token_stats(logits_nV, token_ids_n))


def write_token_grad(
    logits_nV: Tensor,
    token_ids_n: Tensor,
    log_z_n: Tensor,
    row_scale_n: Tensor,
    label_smoothing: float,
    grad_nV: Tensor,
) -> None:
    """Write row_scale * (p - (1 - eps) onehot - eps / V), the gradient of row_scale * cross_entropy, to `grad_nV`."""
    _triton_kernels().write_token_grad(logits_nV, token_ids_n, log_z_n, row_scale_n, label_smoothing, grad_nV)
