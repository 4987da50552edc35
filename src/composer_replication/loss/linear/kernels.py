"""How to call a Triton kernel of a row loss; Triton itself is imported on first use on a GPU."""

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
    """Per row: log of the normaliser, the chosen token's logit, the mean logit."""

    log_z: Tensor
    chosen: Tensor
    mean_logit: Tensor


@dataclass(frozen=True)
class DivergenceKernel:
    """One compiled row divergence; `mode` picks the formula in triton_rows.py."""

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
        return _triton_rows().divergence_rows(self, student_nV, teacher_nV, weights_n, token_clip, grad_nV)


@cache
def _triton_rows() -> ModuleType:
    from composer_replication.loss.linear import triton_kernels as triton_rows

    return triton_rows


@cache
def _triton_tokens() -> ModuleType:
    from composer_replication.loss.linear import triton_kernels as triton_tokens

    return triton_tokens


def wants_triton(backend: str, operand: Tensor) -> bool:
    """ "auto" takes Triton for CUDA tensors up to fp32 where it is installed; fp64 always takes torch."""
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
    """One pass over the tile for all three numbers of every row."""
    return _TokenStats(*_triton_tokens().token_stats(logits_nV, token_ids_n))


def write_token_grad(
    logits_nV: Tensor, token_ids_n: Tensor, log_z_n: Tensor, pull_n: Tensor, label_smoothing: float, grad_nV: Tensor
) -> None:
    """grad = pull * (p - (1 - eps) onehot - eps / V): the gradient of `pull * cross_entropy`."""
    _triton_tokens().write_token_grad(logits_nV, token_ids_n, log_z_n, pull_n, label_smoothing, grad_nV)
