"""Which sequences share which prefixes, found by sorting: neighbours in sorted order share the most.

Of sequences in lexicographic order, what two of them share is the least that any neighbours between them share. So the
lengths that neighbours share are all there is to know about the tree, and it is never built node by node.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class New(NamedTuple):
    """A sequence's tokens from `first` on are in no sequence laid out before it; those before it are in `parent`."""

    sequence: int
    parent: int
    first: int
    size: int


class _Piece(NamedTuple):
    """Depths [start, end) of a path, and a number that is theirs."""

    start: int
    end: int
    number: int


class SharedPrefixes:
    """Sequences of token ids (1-D tensors), sorted, with the number of tokens each shares with the one before it."""

    def __init__(self, sequences: list[Tensor]) -> None:
        keys = [array("q", sequence.tolist()).tobytes() for sequence in sequences]
        self._order = sorted(range(len(sequences)), key=keys.__getitem__)
        self._lengths = [sequence.numel() for sequence in sequences]
        neighbours = zip(self._order[:-1], self._order[1:], strict=True)
        self._shared = [0, *(_shared_length(sequences[one], sequences[following]) for one, following in neighbours)]

    def in_sorted_order(self) -> Iterator[tuple[int, int]]:
        """Each sequence's number, and how many tokens it shares with the one before it."""
        return zip(self._order, self._shared, strict=True)

    def in_layout_order(self) -> Iterator[New]:
        """Tree by tree: the longest sequence, then the others by how far they share it, longer ones first."""
        for members in self._trees():
            lengths = {position: self._lengths[self._order[position]] for position in members}
            trunk = max(members, key=lambda position: (lengths[position], -self._order[position]))
            with_trunk = self._shared_with(trunk, members)
            order = sorted(
                members, key=lambda position: (position != trunk, with_trunk[position], -lengths[position], position)
            )
            placed: list[int] = []
            for position in order:
                parent, first = self._closest(position, placed)
                insort(placed, position)
                yield New(self._order[position], self._order[parent], first, lengths[position] - first)

    def numbers(self, wanted: Mapping[int, int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """For each wanted sequence, from the given depth on: depth-first numbers, and where the subtrees end."""
        enter: dict[int, Tensor] = {}
        leave: dict[int, Tensor] = {}
        ends: list[int] = []
        stack: list[_Piece] = []
        total = 0
        for position, sequence in enumerate(self._order):
            shared, length = self._shared[position], self._lengths[sequence]
            _push(stack, _Piece(shared, length, total))
            total += length - shared
            ends.append(total)
            if sequence in wanted:
                pieces = _from_depth(stack, wanted[sequence])
                firsts = [(p.number + depth - p.start, p.end - depth) for p, depth in pieces]
                enter[sequence] = torch.cat([torch.arange(first, first + size) for first, size in firsts])
        stack.clear()
        for position in range(len(self._order) - 1, -1, -1):
            sequence = self._order[position]
            shared = self._shared[position + 1] if position + 1 < len(self._order) else 0
            _push(stack, _Piece(shared, self._lengths[sequence], ends[position]))
            if sequence in wanted:
                pieces = _from_depth(stack, wanted[sequence])
                leave[sequence] = torch.cat([torch.full((p.end - depth,), p.number) for p, depth in pieces])
        return enter, leave

    def _trees(self) -> Iterator[range]:
        """Places that share a first token."""
        starts = [position for position, shared in enumerate(self._shared) if not shared]
        for start, end in zip(starts, [*starts[1:], len(self._order)], strict=True):
            yield range(start, end)

    def _shared_with(self, position: int, members: range) -> dict[int, int]:
        shared = {position: self._lengths[self._order[position]]}
        for step, neighbours in (
            (0, range(position + 1, members.stop)),
            (1, range(position - 1, members.start - 1, -1)),
        ):
            least = shared[position]
            for neighbour in neighbours:
                least = min(least, self._shared[neighbour + step])
                shared[neighbour] = least
        return shared

    def _closest(self, position: int, placed: list[int]) -> tuple[int, int]:
        """Of the places laid out (sorted), the one that shares the most, and how much."""
        at = bisect_left(placed, position)
        best = (position, 0)
        for neighbour in placed[max(at - 1, 0) : at + 1]:
            low, high = min(position, neighbour), max(position, neighbour)
            shared = min(self._shared[low + 1 : high + 1])
            best = max(best, (neighbour, shared), key=lambda candidate: candidate[1])
        return best


def _push(stack: list[_Piece], piece: _Piece) -> None:
    """The path turns off at the piece's start: what lay deeper is gone."""
    while stack and stack[-1].start >= piece.start:
        stack.pop()
    if stack and stack[-1].end > piece.start:
        stack[-1] = stack[-1]._replace(end=piece.start)
    if piece.end > piece.start:
        stack.append(piece)


def _from_depth(stack: list[_Piece], depth: int) -> list[tuple[_Piece, int]]:
    """The pieces that reach beyond a depth, each with where to begin in it."""
    pieces: list[tuple[_Piece, int]] = []
    for piece in reversed(stack):
        if piece.end <= depth:
            break
        pieces.append((piece, max(piece.start, depth)))
    return pieces[::-1]


def _shared_length(first: Tensor, second: Tensor) -> int:
    size = min(first.numel(), second.numel())
    differs = (first[:size] != second[:size]).nonzero()
    return int(differs[0]) if differs.numel() else size
