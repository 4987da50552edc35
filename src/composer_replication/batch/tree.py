"""Merge sequences that share prefixes into one tree of tokens, so that each token is stored and computed once.

Every token has a number in depth-first order, `enter`, and the number at which its node's subtree ends, `leave`. With
kv and q as indices in the layout, token q may attend to token kv exactly if kv's node is on the path to q:

    kv <= q  and  enter[kv] <= enter[q] < leave[kv]

That is the whole attention rule. A token's position is its depth, as in the flat sequence. Several trees in one batch,
and padding, follow the same rule.

The layout puts the longest path of each tree first, as one stretch: the trunk, which plain causal attention can
compute. The other sequences follow, ordered by how much of the trunk they share, each with its new tokens as one
stretch.
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
    """Rows [start, end), and the runs of rows on the path before them; a trunk has an empty context."""

    start: int
    end: int
    context: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """One or several trees: ids, depths and depth-first numbers (L,), and the rows of each sequence's tokens."""

    input_ids: Tensor
    position_ids: Tensor
    enter: Tensor
    leave: Tensor
    rows: tuple[Tensor, ...]
    """For each sequence, the row of each of its tokens."""
    stretches: tuple[Stretch, ...]
    """In order and without gaps; rows after the last stretch are padding."""

    def __len__(self) -> int:
        return self.input_ids.numel()

    @property
    def num_flat_tokens(self) -> int:
        """The number of tokens of the sequences without sharing."""
        return sum(row.numel() for row in self.rows)

    @property
    def longest_path(self) -> int:
        """The length of the longest sequence."""
        return max(row.numel() for row in self.rows)

    def to(self, device: str | torch.device) -> TokenTree:
        """Return the tree with its tensors on a device."""
        ids, positions, enter, leave, *rows = (
            tensor.to(device) for tensor in (self.input_ids, self.position_ids, self.enter, self.leave, *self.rows)
        )
        return TokenTree(ids, positions, enter, leave, tuple(rows), self.stretches)

    def padded(self, multiple: int) -> TokenTree:
        """Return the tree padded to a multiple of tokens. Padding attends only to itself, and nothing attends to it."""
        if multiple < 1:
            raise InputError(explain("multiple", got=multiple, expected="1 or more"))
        missing = -len(self) % multiple
        if not missing:
            return self
        zeros = self.input_ids.new_zeros(missing)
        alone = torch.arange(len(self), len(self) + missing, device=zeros.device)
        return TokenTree(
            torch.cat([self.input_ids, zeros]),
            torch.cat([self.position_ids, zeros]),
            torch.cat([self.enter, alone]),
            torch.cat([self.leave, alone + 1]),
            self.rows,
            self.stretches,
        )

    def dense_mask(self) -> Tensor:
        """Return the attention mask (L, L), True where the row may attend to the column; for small trees and tests."""
        index = torch.arange(len(self), device=self.enter.device)
        enter, leave = self.enter, self.leave
        on_path = (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])
        return (index[None] <= index[:, None]) & on_path


def build_tree(sequences: Sequence[Sequence[int] | Tensor]) -> TokenTree:
    """Return the tree of these sequences. A sequence may be a prefix of another one, or equal to it."""
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
    suffixes: list[NewSuffix] = []
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
    """Return several trees as one batch, none of which sees another; `rows` are those of all trees, in order."""
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
    """Return the first `count` rows of a path."""
    first_runs: list[Run] = []
    for start, end in runs:
        size = min(end - start, count)
        if not size:
            break
        first_runs.append((start, start + size))
        count -= size
    return first_runs


def _append_run(runs: list[Run], last: Run) -> list[Run]:
    """Return the runs with one more, merged with the last run if it is adjacent, left out if it is empty."""
    if last[0] == last[1]:
        return runs
    if runs and runs[-1][1] == last[0]:
        return [*runs[:-1], (runs[-1][0], last[1])]
    return [*runs, last]


class NewSuffix(NamedTuple):
    """The tokens of a sequence from `first` on, which no earlier sequence has; `parent` has those before `first`."""

    sequence: int
    parent: int
    first: int
    size: int


class _Piece(NamedTuple):
    """Depths [start, end) of a path, and a depth-first number: of the first of them, or where their subtrees end."""

    start: int
    end: int
    number: int


class SharedPrefixes:
    """Sequences of token ids in sorted order, and how many tokens each of them shares with the one before it.

    In sorted order, neighbors share the longest prefixes, and two sequences share as much as the least that any
    neighbors between them share. So these lengths determine the whole tree, and it is never built node by node.
    """

    def __init__(self, sequences: list[Tensor]) -> None:
        # Bytes sort fast. Their order is not that of the ids, but any order that groups equal prefixes will do.
        keys = [array("q", sequence.tolist()).tobytes() for sequence in sequences]
        self._order = sorted(range(len(sequences)), key=keys.__getitem__)
        self._lengths = [sequence.numel() for sequence in sequences]
        neighbors = zip(self._order[:-1], self._order[1:], strict=True)
        self._shared = [0, *(_shared_length(sequences[first], sequences[second]) for first, second in neighbors)]

    def in_sorted_order(self) -> Iterator[tuple[int, int]]:
        """Yield each sequence's index, and how many tokens it shares with the sequence before it."""
        return zip(self._order, self._shared, strict=True)

    def in_layout_order(self) -> Iterator[NewSuffix]:
        """Yield the sequences tree by tree: the longest one, then the others by how much of it they share."""
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
                yield NewSuffix(self._order[position], self._order[parent], first, lengths[position] - first)

    def number_depth_first(self, first_depths: Mapping[int, int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return `enter` and `leave` of the tokens of each of these sequences, from its depth in the mapping on."""
        enter: dict[int, Tensor] = {}
        leave: dict[int, Tensor] = {}
        ends: list[int] = []
        stack: list[_Piece] = []
        total = 0
        # Forward in sorted order, a token gets its number from the first sequence that has it.
        for position, sequence in enumerate(self._order):
            shared, length = self._shared[position], self._lengths[sequence]
            _push(stack, _Piece(shared, length, total))
            total += length - shared
            ends.append(total)
            if sequence in first_depths:
                pieces = _from_depth(stack, first_depths[sequence])
                firsts = [(p.number + depth - p.start, p.end - depth) for p, depth in pieces]
                enter[sequence] = torch.cat([torch.arange(first, first + size) for first, size in firsts])
        stack.clear()
        # Backward, the first sequence that has a token is the last one of its subtree, which ends there.
        for position in range(len(self._order) - 1, -1, -1):
            sequence = self._order[position]
            shared = self._shared[position + 1] if position + 1 < len(self._order) else 0
            _push(stack, _Piece(shared, self._lengths[sequence], ends[position]))
            if sequence in first_depths:
                pieces = _from_depth(stack, first_depths[sequence])
                leave[sequence] = torch.cat([torch.full((p.end - depth,), p.number) for p, depth in pieces])
        return enter, leave

    def _trees(self) -> Iterator[range]:
        """Yield the ranges of positions that share a first token; each is one tree."""
        starts = [position for position, shared in enumerate(self._shared) if not shared]
        for start, end in zip(starts, [*starts[1:], len(self._order)], strict=True):
            yield range(start, end)

    def _shared_with(self, position: int, members: range) -> dict[int, int]:
        """Return how many tokens each member shares with the one at `position`."""
        shared = {position: self._lengths[self._order[position]]}
        # `_shared[k]` is between k - 1 and k, hence the step of 1 on the way back.
        for step, neighbors in (
            (0, range(position + 1, members.stop)),
            (1, range(position - 1, members.start - 1, -1)),
        ):
            least = shared[position]
            for neighbor in neighbors:
                least = min(least, self._shared[neighbor + step])
                shared[neighbor] = least
        return shared

    def _closest(self, position: int, laid_out: list[int]) -> tuple[int, int]:
        """Return which of the positions laid out so far (sorted) shares the most tokens, and how many."""
        # In sorted order the next position on either side shares the most.
        at = bisect_left(laid_out, position)
        best = (position, 0)
        for neighbor in laid_out[max(at - 1, 0) : at + 1]:
            low, high = min(position, neighbor), max(position, neighbor)
            shared = min(self._shared[low + 1 : high + 1])
            best = max(best, (neighbor, shared), key=lambda candidate: candidate[1])
        return best


def _push(stack: list[_Piece], piece: _Piece) -> None:
    """Replace the end of a path, from the depth at which the piece begins, by the piece."""
    while stack and stack[-1].start >= piece.start:
        stack.pop()
    if stack and stack[-1].end > piece.start:
        stack[-1] = stack[-1]._replace(end=piece.start)
    if piece.end > piece.start:
        stack.append(piece)


def _from_depth(stack: list[_Piece], depth: int) -> list[tuple[_Piece, int]]:
    """Return the pieces that reach below a depth, each with the depth to start at."""
    pieces: list[tuple[_Piece, int]] = []
    for piece in reversed(stack):
        if piece.end <= depth:
            break
        pieces.append((piece, max(piece.start, depth)))
    return pieces[::-1]


def _shared_length(first: Tensor, second: Tensor) -> int:
    """Return the length of the common prefix."""
    size = min(first.numel(), second.numel())
    differs = (first[:size] != second[:size]).nonzero()
    return int(differs[0]) if differs.numel() else size
