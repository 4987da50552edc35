"""What the two preference losses share: the vectors of log-probs they take."""

from __future__ import annotations

from torch import Tensor

from composer_replication.errors import ShapeError, explain
from composer_replication.loss import rows


def check_pair_vectors(**named: Tensor) -> list[Tensor]:
    """All are floating-point vectors of one length, one entry per pair; returned in the compute dtype."""
    for name, values in named.items():
        if not isinstance(values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(explain(name, got=type(values).__name__, expected="a tensor (B,), one entry per pair"))
        if values.dim() != 1:
            raise ShapeError(explain(f"{name} shape", got=tuple(values.shape), expected="(B,), one entry per pair"))
        if not values.is_floating_point():
            raise ShapeError(explain(f"{name} dtype", got=values.dtype, expected="a floating-point dtype"))
    lengths = {name: tuple(values.shape) for name, values in named.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(explain("log-prob vectors", got=lengths, expected="one length"))
    return [rows.in_compute_dtype(values) for values in named.values()]
