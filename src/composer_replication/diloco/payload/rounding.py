"""Blocks of numbers as small integers and a scale.

A scale is the block's largest magnitude over the largest integer, kept to 16 bits of mantissa. Then integer times scale
is exact in fp32, and rounding what was rounded changes nothing: a sender knows to the bit what its readers will see.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from composer_replication.diloco.payload.formats import BLOCK_ELEMENTS

LARGEST_INT8, LARGEST_INT4 = 127, 7
_INT4_ZERO = 8
# Where the largest magnitude is below it, a scale of 16 bits would not be a normal number: such a block is zero.
_SMALLEST = 1e-30
_DROPPED_BITS = 8


def to_blocks(vector: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """The scale of each block (fp32) and the integers (int8, one for each element)."""
    blocks = pad(vector, (0, -vector.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    magnitudes = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=1)
    scales = _to_16_bits(magnitudes / largest).masked_fill_(magnitudes < _SMALLEST, 0.0)
    divisors = scales.masked_fill(scales == 0, torch.inf)
    integers = torch.round(blocks / divisors.unsqueeze(1)).clamp_(-largest, largest)
    return scales, integers.to(torch.int8).view(-1)[: vector.numel()]


def from_blocks(scales: Tensor, integers: Tensor) -> Tensor:
    """The vector of scales and integers, in fp32."""
    count = integers.numel()
    values = pad(integers.to(torch.float32), (0, -count % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    return values.mul_(scales.unsqueeze(1)).view(-1)[:count]


def pack_int4(integers: Tensor) -> Tensor:
    """Two integers of -7 to 7 in a byte, the first in the low half."""
    halves = (pad(integers, (0, integers.numel() % 2)) + _INT4_ZERO).to(torch.uint8).view(-1, 2)
    return halves[:, 0] | (halves[:, 1] << 4)


def unpack_int4(packed: Tensor, count: int) -> Tensor:
    """The integers of `pack_int4`; a sender's -8, which it never writes, is read as what it says."""
    halves = torch.stack((packed & 0x0F, packed >> 4), dim=1).view(-1)[:count]
    return halves.to(torch.int8) - _INT4_ZERO


def _to_16_bits(positive: Tensor) -> Tensor:
    bits = positive.view(torch.int32)
    half = 1 << (_DROPPED_BITS - 1)
    return ((bits + half) >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32)
