"""Merge sequences that share prefixes into one tree of tokens, so that each shared token is computed once.

Every token has its index in depth-first order, `enter`, and the index at which its node's subtree ends, `leave`. With
kv and q as rows of the layout, token q may attend to token kv if and only if kv is on the path to q:

    kv <= q  and  enter[kv] <= enter[q] < leave[kv]

The same rule covers several trees in one batch, and padding. A token's position id is its depth, as in the flat
sequence.

The layout begins with the longest path of each tree, the trunk, which plain causal attention can compute. The other
sequences follow, ordered by how much of the trunk they share, each with its new tokens as one stretch of rows.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain

Run = tuple[int, int]
"""Rows [start, end)."""


class Stretch(NamedTuple):
    """Consecutive rows [start, end) of a sequence, and the runs of rows that precede them on their path (none for a
    trunk).
    """

    start: int
    end: int
    context: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """One or several token trees: ids, depths and depth-first indices, each of shape (L,), and the rows of each
    sequence's tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    enter: Tensor
    leave: Tensor
    rows: tuple[Tensor, ...]
    """For each sequence, the row of each of its tokens."""
    stretches: tuple[Stretch, ...]
    """All rows in order, without gaps; rows after the last stretch are padding."""

    def __len__(self) -> int:
        return self.input_ids.numel()

    @property
    def num_flat_tokens(self) -> int:
        """The total length of the sequences, with shared tokens counted once per sequence."""
        return sum(row.numel() for row in self.rows)

    @property
    def longest_path(self) -> int:
        """The length of the longest sequence."""
        return max(row.numel() for row in self.rows)

    def to(self, device: str | torch.device) -> TokenTree:
        """Move the tensors to a device."""
        ids, positions, enter, leave, *rows = (
            tensor.to(device) for tensor in (self.input_ids, self.position_ids, self.enter, self.leave, *self.rows)
        )
        return TokenTree(ids, positions, enter, leave, tuple(rows), self.stretches)

    def padded(self, multiple: int) -> TokenTree:
        """Pad to a multiple of `multiple` rows. A padding row attends only to itself, and no other
        row attends to it.
        """
        if multiple < 1:
            raise InputError(explain("multiple", got=multiple, expected="1 or more"))
        num_padding = -len(self) % multiple
        if not num_padding:
            return self
        zeros = self.input_ids.new_zeros(num_padding)
        padding_rows = torch.arange(len(self), len(self) + num_padding, device=zeros.device)
        return TokenTree(
            torch.cat([self.input_ids, zeros]),
            torch.cat([self.position_ids, zeros]),
            torch.cat([self.enter, padding_rows]),
            torch.cat([self.leave, padding_rows + 1]),
            self.rows,
            self.stretches,
        )

    def dense_mask(self) -> Tensor:
        """Return the attention mask (L, L), True where the query row may attend to the column. Use it only for small
        trees and tests.
        """
        index = torch.arange(len(self), device=self.enter.device)
        enter, leave = self.enter, self.leave
        on_path = (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])
        return (index[None] <= index[:, None]) & on_path


def build_tree(sequences: Sequence[Sequence[int] | Tensor]) -> TokenTree:
    """Build the tree of these sequences. A sequence may equal another one or be its prefix."""
    flat = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
    for number, sequence in enumerate(flat):
        if sequence.dim() != 1 or not sequence.numel():
            raise InputError(
                explain(f"sequence {number}", got=f"shape {tuple(sequence.shape)}", expected="at least one token")
            )
    if not flat:
        raise InputError(explain("sequences", got="none", expected="at least one"))
    prefixes = SharedPrefixes(flat)
    runs: dict[int, list[Run]] = {}
    stretches: list[Stretch] = []
    suffixes: list[_NewSuffix] = []
    length = 0
    for suffix in prefixes.in_layout_order():
        context = _first_rows(runs[suffix.parent], suffix.first) if suffix.first else []
        runs[suffix.sequence] = _append_run(context, (length, length + suffix.size))
        # A sequence that is a prefix of another one adds no tokens.
        if suffix.size:
            stretches.append(Stretch(length, length + suffix.size, tuple(context)))
            suffixes.append(suffix)
            length += suffix.size
    enter, leave = prefixes.number_depth_first({suffix.sequence: suffix.first for suffix in suffixes})
    return TokenTree(
        torch.cat([flat[suffix.sequence][suffix.first :] for suffix in suffixes]),
        torch.cat([torch.arange(suffix.first, suffix.first + suffix.size) for suffix in suffixes]),
        torch.cat([enter[suffix.sequence] for suffix in suffixes]),
        torch.cat([leave[suffix.sequence] for suffix in suffixes]),
        tuple(torch.cat([torch.arange(*run) for run in runs[number]]) for number in range(len(flat))),
        tuple(stretches),
    )


def pack_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """Concatenate trees into one batch; no tree can attend to another. `rows` has the rows of all trees' sequences,
    in order.
    """
    if not trees:
        raise InputError(explain("trees", got="none", expected="at least one"))
    offsets = list(accumulate((len(tree) for tree in trees[:-1]), initial=0))
    trees_with_offset = list(zip(trees, offsets, strict=True))
    return TokenTree(
        torch.cat([tree.input_ids for tree in trees]),
        torch.cat([tree.position_ids for tree in trees]),
        torch.cat([tree.enter + offset for tree, offset in trees_with_offset]),
        torch.cat([tree.leave + offset for tree, offset in trees_with_offset]),
        tuple(row + offset for tree, offset in trees_with_offset for row in tree.rows),
        tuple(
            Stretch(start + offset, end + offset, tuple((first + offset, last + offset) for first, last in context))
            for tree, offset in trees_with_offset
            for start, end, context in tree.stretches
        ),
    )


def _first_rows(runs: list[Run], count: int) -> list[Run]:
    """Return the runs that contain the first `count` rows of a path."""
    first_runs: list[Run] = []
    for start, end in runs:
        size = min(end - start, count)
        if not size:
            break
        first_runs.append((start, start + size))
        count -= size
    return first_runs


def _append_run(runs: list[Run], last: Run) -> list[Run]:
    """Append a run. If it continues the last run, the two are merged; an empty run is dropped."""
    if last[0] == last[1]:
        return runs
    if runs and runs[-1][1] == last[0]:
        return [*runs[:-1], (runs[-1][0], last[1])]
    return [*runs, last]


class _NewSuffix(NamedTuple):
    """The tokens of a sequence that no earlier sequence has: `size` tokens beginning at `first`. The tokens before
    them are those of `parent`.
    """

    sequence: int
    parent: int
    first: int
    size: int


class _PathPiece(NamedTuple):
    """A part of a path at depths [start, end). `number` is the depth-first index of its first token, or the index at
    which the subtrees of its tokens end.
    """

    start: int
    end: int
    number: int


class SharedPrefixes:
    """Sequences of token ids in sorted order, and the length of the prefix that each shares with its predecessor.

    In sorted order, neighbors share the longest prefixes, and the common prefix of any two sequences is the shortest
    one of the neighbors between them. So these lengths determine the whole tree without building it node by node.
    """

    def __init__(self, sequences: list[Tensor]) -> None:
        # Bytes sort fast. Their order is not that of the ids, but any order that groups equal prefixes will do.
        keys = [array("q", sequence.tolist()).tobytes() for sequence in sequences]
        self._order = sorted(range(len(sequences)), key=keys.__getitem__)
        self._lengths = [sequence.numel() for sequence in sequences]
        neighbors = zip(self._order[:-1], self._order[1:], strict=True)
        self._shared = [0, *(_shared_length(sequences[first], sequences[second]) for first, second in neighbors)]

    def in_sorted_order(self) -> Iterator[tuple[int, int]]:
        """Yield each sequence's index, and the number of tokens that it shares with the sequence before it."""
        return zip(self._order, self._shared, strict=True)

    def in_layout_order(self) -> Iterator[_NewSuffix]:
        """Yield the new tokens of each sequence, tree by tree: first the longest sequence, then the others by the
        length of the prefix they share with it.
        """
        for members in self._trees():
            lengths = {position: self._lengths[self._order[position]] for position in members}
            trunk = max(members, key=lambda position: (lengths[position], -self._order[position]))
            with_trunk = self._shared_with(trunk, members)
            order = sorted(
                members, key=lambda position: (position != trunk, with_trunk[position], -lengths[position], position)
            )
            laid_out: list[int] = []
            for position in order:
                parent, first = self._closest(position, laid_out)
                insort(laid_out, position)
                yield _NewSuffix(self._order[position], self._order[parent], first, lengths[position] - first)

    def number_depth_first(self, first_depths: Mapping[int, int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return `enter` and `leave` for the tokens of each sequence in `first_depths`, beginning at the depth given
        there.
        """
        enter: dict[int, Tensor] = {}
        leave: dict[int, Tensor] = {}
        ends: list[int] = []
        stack: list[_PathPiece] = []
        total = 0
        # Forward in sorted order: a token gets its index from the first sequence that contains it.
        for position, sequence in enumerate(self._order):
            shared, length = self._shared[position], self._lengths[sequence]
            _replace_tail(stack, _PathPiece(shared, length, total))
            total += length - shared
            ends.append(total)
            if sequence in first_depths:
                pieces = _pieces_from(stack, first_depths[sequence])
                firsts = [(p.number + depth - p.start, p.end - depth) for p, depth in pieces]
                enter[sequence] = torch.cat([torch.arange(first, first + size) for first, size in firsts])
        stack.clear()
        # Backward: the first sequence that contains a token is the last one of the token's subtree, which ends there.
        for position in range(len(self._order) - 1, -1, -1):
            sequence = self._order[position]
            shared = self._shared[position + 1] if position + 1 < len(self._order) else 0
            _replace_tail(stack, _PathPiece(shared, self._lengths[sequence], ends[position]))
            if sequence in first_depths:
                pieces = _pieces_from(stack, first_depths[sequence])
                leave[sequence] = torch.cat([torch.full((p.end - depth,), p.number) for p, depth in pieces])
        return enter, leave

    def _trees(self) -> Iterator[range]:
        """Yield the ranges of sorted positions whose sequences share a first token; each range is one tree."""
        starts = [position for position, shared in enumerate(self._shared) if not shared]
        for start, end in zip(starts, [*starts[1:], len(self._order)], strict=True):
            yield range(start, end)

    def _shared_with(self, position: int, members: range) -> dict[int, int]:
        """Return the number of tokens that each member shares with the sequence at `position`."""
        shared = {position: self._lengths[self._order[position]]}
        # `_shared[k]` is between k - 1 and k, hence the step of 1 on the way back.
        for step, neighbors in (
            (0, range(position + 1, members.stop)),
            (1, range(position - 1, members.start - 1, -1)),
        ):
            shortest = shared[position]
            for neighbor in neighbors:
                shortest = min(shortest, self._shared[neighbor + step])
                shared[neighbor] = shortest
        return shared

    def _closest(self, position: int, laid_out: list[int]) -> tuple[int, int]:
        """Return the position in `laid_out` (sorted) whose sequence shares the most tokens with the one at
        `position`, and the number of shared tokens.
        """
        # In sorted order, the nearest neighbor on one of the two sides shares the most.
        insertion = bisect_left(laid_out, position)
        best = (position, 0)
        for neighbor in laid_out[max(insertion - 1, 0) : insertion + 1]:
            low, high = min(position, neighbor), max(position, neighbor)
            shared = min(self._shared[low + 1 : high + 1])
            best = max(best, (neighbor, shared), key=lambda candidate: candidate[1])
        return best


def _replace_tail(stack: list[_PathPiece], piece: _PathPiece) -> None:
    """Truncate the path at the depth at which the piece begins, and append the piece."""
    while stack and stack[-1].start >= piece.start:
        stack.pop()
    if stack and stack[-1].end > piece.start:
        stack[-1] = stack[-1]._replace(end=piece.start)
    if piece.end > piece.start:
        stack.append(piece)


def _pieces_from(stack: list[_PathPiece], depth: int) -> list[tuple[_PathPiece, int]]:
    """Return the pieces of a path that reach beyond `depth`, each with its first depth that is at least `depth`."""
    pieces: list[tuple[_PathPiece, int]] = []
    for piece in reversed(stack):
        if piece.end <= depth:
            break
        pieces.append((piece, max(piece.start, depth)))
    return pieces[::-1]


def _shared_length(first: Tensor, second: Tensor) -> int:
    """Return the length of the two sequences' common prefix."""
    size = min(first.numel(), second.numel())
    differs = (first[:size] != second[:size]).nonzero()
    return int(differs[0]) if differs.numel() else size
