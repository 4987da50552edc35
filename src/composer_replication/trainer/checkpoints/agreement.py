"""One answer on every process of a run."""

from __future__ import annotations

import torch
from torch import distributed


def most_anywhere(value: int, device: torch.device | str) -> int:
    """The largest `value` of all processes; also a point that none passes before all have reached it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    agreed = torch.tensor([value], device=device)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX)
    return int(agreed.item())
