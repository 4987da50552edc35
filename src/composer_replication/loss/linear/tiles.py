"""How many rows are worked on at once.

A *tile* is the rows whose logits exist at one moment; a *slab* the rows whose logit gradients are multiplied together
into the head's gradient. Both are bounded whatever N is, so memory is flat in N, and so wide that the matrix products
stay compute-bound on a GPU. A slab larger than a tile cuts the traffic of summing the head's gradient in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from composer_replication.errors import InputError, explain

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
