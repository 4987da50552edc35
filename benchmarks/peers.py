"""Call the divergence kernels of other libraries in a uniform way; one that is not installed raises ImportError."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from measure import Row, missing_peer

# (student rows, head weight, teacher rows) -> mean JSD, beta 0.5
JsdCall = Callable[[Tensor, Tensor, Tensor], Tensor]


def trl_chunked() -> JsdCall:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def call(student: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
        values, _ = ChunkedDivergenceFunction.apply(student, weight, None, teacher, weight.detach(), None, 0.5)
        return values.mean()

    return call


def liger_chunked() -> JsdCall:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=True, chunk_size=1024)

    def call(student: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
        counted = torch.zeros(student.shape[0], dtype=torch.long, device=student.device)
        result = loss(student, weight, teacher, weight.detach(), counted)
        return result[0] if isinstance(result, tuple) else result

    return call


def liger_triton() -> JsdCall:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta=0.5)

    def call(student: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
        return loss(student, weight, teacher, weight.detach(), None)

    return call


def dense() -> JsdCall:
    from composer_replication.loss.jsd import generalized_jsd_loss

    def call(student: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = (teacher @ weight.T)[None]
        counted = torch.ones(1, student.shape[0], dtype=torch.long, device=student.device)
        return generalized_jsd_loss((student @ weight.T)[None], teacher_logits, labels=counted)

    return call


def ours(tile_rows: int | None = None) -> JsdCall:
    from composer_replication.loss import JSD
    from composer_replication.loss.linear import LinearHead, TeacherTerm, linear_divergence

    def call(student: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
        head = LinearHead(weight)
        terms = [TeacherTerm(teacher, head)]
        return linear_divergence(student, head, terms, JSD(beta=0.5), tile_rows=tile_rows).loss

    return call


JSD_PEERS: dict[str, Callable[[], JsdCall]] = {
    "ours: linear_divergence": ours,
    "TRL ChunkedDivergence": trl_chunked,
    "Liger chunked_loss (compiled)": liger_chunked,
    "Liger Triton fused_linear_jsd": liger_triton,
    "dense": dense,
}


def load_peers() -> tuple[dict[str, JsdCall], list[Row]]:
    """Return the kernels that are available, and for each other one an empty row with the reason."""
    calls: dict[str, JsdCall] = {}
    missing: list[Row] = []
    for name, load in JSD_PEERS.items():
        try:
            calls[name] = load()
        except ImportError as error:
            missing.append(missing_peer(name, error))
    return calls, missing
