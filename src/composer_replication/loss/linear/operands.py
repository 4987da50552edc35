"""The tensors a kernel multiplies: detached, contiguous, in one dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from composer_replication.loss.linear.head import LinearHead


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
