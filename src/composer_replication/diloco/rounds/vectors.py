"""A round's tensors as one vector in shards, and the mean of what several replicas offer for a shard."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from composer_replication.diloco.payload import BLOCK_ELEMENTS, PayloadKind
from composer_replication.diloco.rounds.records import MOST_SHARDS, digest
from composer_replication.errors import InputError, ShapeError, explain

_FINE_ELEMENTS, _FINE_SHARDS = 2**19, 16


class RoundVector:
    """Tensors one after the other, cut into shards. No copy of the whole is made: a shard is gathered when needed."""

    def __init__(self, tensors: Sequence[Tensor], *, parties: int, shard_elements: int) -> None:
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                got = f"tensor {index} of {tensor.dtype}"
                raise ShapeError(explain("all-reduce", got=got, expected="floating point"))
        self.tensors = [tensor.detach() for tensor in tensors]
        self._flat = [tensor.contiguous().view(-1) for tensor in self.tensors]  # a copy only of a transposed one
        self.elements = sum(tensor.numel() for tensor in tensors)
        self.shard_elements, self.num_shards = cut(self.elements, parties, shard_elements)
        if self.num_shards >= MOST_SHARDS:
            got, expected = f"{self.num_shards:,} shards of {shard_elements:,} numbers", f"fewer than {MOST_SHARDS:,}"
            raise InputError(explain("shards of a vector", got=got, expected=expected, fix="Set larger shard_bytes."))

    def size(self, shard: int) -> int:
        return min(self.shard_elements, self.elements - shard * self.shard_elements)

    def read(self, shard: int) -> Tensor:
        """A shard in fp32, on the CPU: not to be written to, for it is no copy where it lies so already."""
        pieces = [flat[a:b].to("cpu", torch.float32) for flat, a, b, _ in self._pieces(shard)]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def write(self, shard: int, values: Tensor) -> None:
        for flat, a, b, start in self._pieces(shard):
            flat[a:b].copy_(values[start : start + b - a])

    def like(self, flat: Tensor) -> RoundVector:
        """Other numbers, cut in the same way."""
        if flat.numel() != self.elements:
            raise ShapeError(explain("numbers of a vector", got=f"{flat.numel():,}", expected=f"{self.elements:,}"))
        vector = copy.copy(self)
        vector.tensors, vector._flat = [flat.detach()], [flat.detach().contiguous().view(-1)]
        return vector

    def finish(self) -> None:
        """After the last write: tensors that are no views of their flat form get theirs."""
        for tensor, flat in zip(self.tensors, self._flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def _pieces(self, shard: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """The part of each tensor that lies in the shard, and where in the shard it begins."""
        first = shard * self.shard_elements
        last = first + self.size(shard)
        start = 0
        for flat in self._flat:
            end = start + flat.numel()
            a, b = max(first, start), min(last, end)
            if a < b:
                yield flat, a - start, b - start, a - first
            start = end


def cut(elements: int, parties: int, shard_elements: int) -> tuple[int, int]:
    """Elements of a shard and how many shards there are: a multiple of the parties, so that each has the same work.

    A large vector has several for each party: what is under way at once is then less than one party's part.
    """
    piece = min(shard_elements, max(_FINE_ELEMENTS, -(-elements // (_FINE_SHARDS * parties))))
    num_pieces = max(parties, -(-elements // piece))
    num_pieces = -(-num_pieces // parties) * parties
    size = max(1, -(-elements // num_pieces))
    size = -(-size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
    return size, -(-elements // size)


def spec_of(vector: RoundVector, kinds: tuple[PayloadKind, PayloadKind], name: str) -> str:
    """Equal at two replicas exactly when their vectors may be averaged."""
    shapes = [[str(tensor.dtype), list(tensor.shape)] for tensor in vector.tensors]
    return digest({"name": name, "tensors": shapes, "payloads": kinds, "shard_elements": vector.shard_elements})


def weighted_mean(offers: Iterable[tuple[float, Tensor]], elements: int) -> Tensor:
    """Sum of weight times vector, in the order given, over the sum of weights.

    Each product and each sum is rounded to fp32 on its own: a fused multiply-add would give other bits on other
    machines. Equal weights count as 1, so that their mean is that of a plain all-reduce.
    """
    total, mean = 0.0, torch.zeros(elements)
    for weight, vector in offers:
        mean.add_(vector.mul(weight) if weight != 1.0 else vector)
        total += weight
    return mean.div_(total)


def fair(weights: Sequence[float]) -> list[float]:
    """Ones where all are equal; else the weights times a power of two, so that their sum is below 1.

    No product and no sum of the mean is then beyond the largest number of its vectors, and no bit is another for it.
    """
    if len(set(weights)) == 1:
        return [1.0] * len(weights)
    return [math.ldexp(weight, -math.frexp(sum(weights))[1]) for weight in weights]


def largest_of(values: Tensor) -> float:
    """The largest magnitude, without a copy."""
    return max((abs(float(edge)) for edge in torch.aminmax(values)), default=0.0) if values.numel() else 0.0
