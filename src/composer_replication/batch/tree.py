"""Sequences that share prefixes as one tree of tokens: each token is stored, and computed, once.

Every token has a number in depth-first order, `enter`, and the number where its node's subtree ends, `leave`. Token q
may see token kv exactly when

    kv <= q  and  enter[kv] <= enter[q] < leave[kv]

(kv and q being their places in the layout), which says that kv's node is on the path to q. That is the whole attention
rule. A token's position is its depth, as in the flat sequence. Trees side by side, and padding, follow the same rule.

The layout puts the longest path of each tree first, as one stretch: the trunk, which plain causal attention can
compute. The other sequences follow by how far they share the trunk, each with what is new in it as one stretch.
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
    """Rows [start, end), and the runs of rows on the path before them; a trunk has none before it."""

    start: int
    end: int
    context: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A tree, or several: ids, depths and depth-first numbers (L,), and where each sequence's tokens went."""

    input_ids: Tensor
    position_ids: Tensor
    enter: Tensor
    leave: Tensor
    rows: tuple[Tensor, ...]
    """For each sequence, the row of each of its tokens."""
    stretches: tuple[Stretch, ...]
    """In order, without gaps; rows behind the last are padding."""

    def __len__(self) -> int:
        return self.input_ids.numel()

    @property
    def num_flat_tokens(self) -> int:
        """What the sequences would cost one by one."""
        return sum(row.numel() for row in self.rows)

    @property
    def longest_path(self) -> int:
        return max(row.numel() for row in self.rows)

    def to(self, device: str | torch.device) -> TokenTree:
        ids, positions, enter, leave, *rows = (
            tensor.to(device) for tensor in (self.input_ids, self.position_ids, self.enter, self.leave, *self.rows)
        )
        return TokenTree(ids, positions, enter, leave, tuple(rows), self.stretches)

    def padded(self, multiple: int) -> TokenTree:
        """With padding up to a multiple: tokens that see only themselves, and that nothing sees."""
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
        """(L, L) boolean, True where the row may see the column: for small trees, and for tests."""
        index = torch.arange(len(self), device=self.enter.device)
        enter, leave = self.enter, self.leave
        on_path = (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])
        return (index[None] <= index[:, None]) & on_path


def build_tree(sequences: Sequence[Sequence[int] | Tensor]) -> TokenTree:
    """The tree of these sequences; equal prefixes are merged. A sequence may be a prefix of another, or equal to it."""
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
    news: list[New] = []
    length = 0
    for new in prefixes.in_layout_order():
        context = _first_rows(runs[new.parent], new.first) if new.first else []
        runs[new.sequence] = _joined(context, (length, length + new.size))
        if new.size:
            stretches.append(Stretch(length, length + new.size, tuple(context)))
            news.append(new)
            length += new.size
    enter, leave = prefixes.numbers({new.sequence: new.first for new in news})
    return TokenTree(
        torch.cat([flat[new.sequence][new.first :] for new in news]),
        torch.cat([torch.arange(new.first, new.first + new.size) for new in news]),
        torch.cat([enter[new.sequence] for new in news]),
        torch.cat([leave[new.sequence] for new in news]),
        tuple(torch.cat([torch.arange(*run) for run in runs[number]]) for number in range(len(flat))),
        tuple(stretches),
    )


def pack_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """Several trees side by side; none sees another. `rows` are those of all trees, one after the other."""
    if not trees:
        raise InputError(explain("trees", got="none", expected="at least one"))
    offsets = list(accumulate((len(tree) for tree in trees[:-1]), initial=0))
    placed = list(zip(trees, offsets, strict=True))
    return TokenTree(
        torch.cat([tree.input_ids for tree in trees]),
        torch.cat([tree.position_ids for tree in trees]),
        torch.cat([tree.enter + offset for tree, offset in placed]),
        torch.cat([tree.leave + offset for tree, offset in placed]),
        tuple(row + offset for tree, offset in placed for row in tree.rows),
        tuple(
            Stretch(start + offset, end + offset, tuple((first + offset, last + offset) for first, last in context))
            for tree, offset in placed
            for start, end, context in tree.stretches
        ),
    )


def _first_rows(runs: list[Run], count: int) -> list[Run]:
    """The first `count` rows of a path."""
    first_runs: list[Run] = []
    for start, end in runs:
        size = min(end - start, count)
        if not size:
            break
        first_runs.append((start, start + size))
        count -= size
    return first_runs


def _joined(runs: list[Run], last: Run) -> list[Run]:
    if last[0] == last[1]:
        return runs
    if runs and runs[-1][1] == last[0]:
        return [*runs[:-1], (runs[-1][0], last[1])]
    return [*runs, last]


# Which sequences share which prefixes, found by sorting: neighbours in sorted order share the most.
#
# Of sequences in lexicographic order, what two of them share is the least that any neighbours between them share. So
# the lengths that neighbours share are all there is to know about the tree, and it is never built node by node.


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
