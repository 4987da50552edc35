"""The tensors of a round as one vector in shards, and the weighted mean of several replicas' offers for a shard."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from composer_replication.diloco.payload import BLOCK_ELEMENTS, PayloadKind
from composer_replication.diloco.rounds.records import MAX_SHARDS, digest
from composer_replication.errors import InputError, ShapeError, explain

# A large vector is cut into about 16 shards per party, but not into shards below 2**19 elements.
_FINE_ELEMENTS, _FINE_SHARDS = 2**19, 16


class RoundVector:
    """Tensors in a row, cut into shards. The whole vector is never copied: a shard is gathered when it is needed."""

    def __init__(self, tensors: Sequence[Tensor], *, parties: int, shard_elements: int) -> None:
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                got = f"tensor {index} of {tensor.dtype}"
                raise ShapeError(explain("all-reduce", got=got, expected="floating point"))
        self.tensors = [tensor.detach() for tensor in tensors]
        # Copies only tensors that are not contiguous.
        self._flat = [tensor.contiguous().view(-1) for tensor in self.tensors]
        self.elements = sum(tensor.numel() for tensor in tensors)
        self.shard_elements, self.num_shards = shard_sizes(self.elements, parties, shard_elements)
        if self.num_shards >= MAX_SHARDS:
            got, expected = f"{self.num_shards:,} shards of {shard_elements:,} numbers", f"fewer than {MAX_SHARDS:,}"
            raise InputError(explain("shards of a vector", got=got, expected=expected, fix="Set larger shard_bytes."))

    def size(self, shard: int) -> int:
        """Return the number of elements in a shard."""
        return min(self.shard_elements, self.elements - shard * self.shard_elements)

    def read(self, shard: int) -> Tensor:
        """Return a shard in fp32 on the CPU. It may be a view of the tensors, so do not write to it."""
        pieces = [flat[a:b].to("cpu", torch.float32) for flat, a, b, _ in self._pieces(shard)]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def write(self, shard: int, values: Tensor) -> None:
        """Copy values into a shard."""
        for flat, a, b, start in self._pieces(shard):
            flat[a:b].copy_(values[start : start + b - a])

    def like(self, flat: Tensor) -> RoundVector:
        """Return a vector of these numbers that is cut in the same way."""
        if flat.numel() != self.elements:
            raise ShapeError(explain("numbers of a vector", got=f"{flat.numel():,}", expected=f"{self.elements:,}"))
        vector = copy.copy(self)
        vector.tensors, vector._flat = [flat.detach()], [flat.detach().contiguous().view(-1)]
        return vector

    def finish(self) -> None:
        """Copy the shards into tensors that are not contiguous. Call it after the last write."""
        for tensor, flat in zip(self.tensors, self._flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def _pieces(self, shard: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield the part of each tensor that is in the shard, and where in the shard it begins."""
        first = shard * self.shard_elements
        last = first + self.size(shard)
        start = 0
        for flat in self._flat:
            end = start + flat.numel()
            a, b = max(first, start), min(last, end)
            if a < b:
                yield flat, a - start, b - start, a - first
            start = end


def shard_sizes(elements: int, parties: int, shard_elements: int) -> tuple[int, int]:
    """Return the elements per shard and the number of shards, a multiple of the parties, so that each has the same
    work.

    A large vector has several shards per party, so that less than one party's part is in memory at once.
    """
    piece = min(shard_elements, max(_FINE_ELEMENTS, -(-elements // (_FINE_SHARDS * parties))))
    num_pieces = max(parties, -(-elements // piece))
    num_pieces = -(-num_pieces // parties) * parties
    size = max(1, -(-elements // num_pieces))
    # A shard is a whole number of payload blocks, so that its scales do not depend on the cut.
    size = -(-size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
    return size, -(-elements // size)


def spec_of(vector: RoundVector, kinds: tuple[PayloadKind, PayloadKind], name: str) -> str:
    """Return a digest that is equal at two replicas exactly if their vectors may be averaged."""
    shapes = [[str(tensor.dtype), list(tensor.shape)] for tensor in vector.tensors]
    return digest({"name": name, "tensors": shapes, "payloads": kinds, "shard_elements": vector.shard_elements})


def weighted_mean(offers: Iterable[tuple[float, Tensor]], elements: int) -> Tensor:
    """Return the sum of weight times vector, in the order of `offers`, divided by the sum of weights.

    Each product and each sum is rounded to fp32 separately: a fused multiply-add would give other bits on other
    machines. A weight of 1 is not multiplied, so that equal weights give the mean of a plain all-reduce.
    """
    total, mean = 0.0, torch.zeros(elements)
    for weight, vector in offers:
        mean.add_(vector.mul(weight) if weight != 1.0 else vector)
        total += weight
    return mean.div_(total)


def scaled_weights(weights: Sequence[float]) -> list[float]:
    """Return ones if all weights are equal; otherwise the weights times a power of two, so that their sum is below 1.

    Then no product or sum of the mean exceeds the largest number of its vectors. A power of two changes no mantissa.
    """
    if len(set(weights)) == 1:
        return [1.0] * len(weights)
    return [math.ldexp(weight, -math.frexp(sum(weights))[1]) for weight in weights]


def largest_of(values: Tensor) -> float:
    """Return the largest magnitude, without a copy."""
    # aminmax makes no tensor of absolute values; a NaN makes both extremes NaN.
    return max((abs(float(edge)) for edge in torch.aminmax(values)), default=0.0) if values.numel() else 0.0
