"""Sequences that share prefixes as one tree of tokens: each token is stored, and computed, once.

Flattened in depth-first order, every node's tokens lie together and its whole subtree follows them. So token q may see
token kv exactly when

    kv <= q < subtree_end[kv]

where `subtree_end[kv]` is where the subtree of kv's node ends. That is the whole attention rule: one integer a token. A
token's position is its depth, as in the flat sequence. Trees side by side, and padding, follow the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A flattened tree, or several: ids, depths and subtree ends (L,), and where each sequence's tokens went."""

    input_ids: Tensor
    position_ids: Tensor
    subtree_end: Tensor
    rows: tuple[Tensor, ...]
    """For each sequence, the flat index of each of its tokens."""

    def __len__(self) -> int:
        return self.input_ids.numel()

    @property
    def num_flat_tokens(self) -> int:
        """What the sequences would cost one by one."""
        return sum(each.numel() for each in self.rows)

    def to(self, device: str | torch.device) -> TokenTree:
        rows = tuple(each.to(device) for each in self.rows)
        return TokenTree(self.input_ids.to(device), self.position_ids.to(device), self.subtree_end.to(device), rows)

    def padded(self, multiple: int) -> TokenTree:
        """With padding up to a multiple: tokens that see only themselves, and that nothing sees."""
        if multiple < 1:
            raise InputError(explain("multiple", got=multiple, expected="1 or more"))
        missing = -len(self) % multiple
        if not missing:
            return self
        zeros = self.input_ids.new_zeros(missing)
        alone = torch.arange(len(self), len(self) + missing, device=zeros.device) + 1
        return TokenTree(
            torch.cat([self.input_ids, zeros]),
            torch.cat([self.position_ids, zeros]),
            torch.cat([self.subtree_end, alone]),
            self.rows,
        )

    def dense_mask(self) -> Tensor:
        """(L, L) boolean, True where the row may see the column: for small trees, and for tests."""
        index = torch.arange(len(self), device=self.subtree_end.device)
        return (index[None] <= index[:, None]) & (index[:, None] < self.subtree_end[None])


def build_tree(sequences: Sequence[Sequence[int] | Tensor]) -> TokenTree:
    """The tree of these sequences; equal prefixes are merged. A sequence may be a prefix of another, or equal to it."""
    flat = [torch.as_tensor(each, dtype=torch.int64) for each in sequences]
    for number, each in enumerate(flat):
        if each.dim() != 1 or not each.numel():
            raise InputError(
                explain(f"sequence {number}", got=f"shape {tuple(each.shape)}", expected="at least one token")
            )
    root = _Node(torch.empty(0, dtype=torch.int64))
    for each in flat:
        root.insert(each)
    nodes = _depth_first(root)
    sizes = torch.tensor([node.ids.numel() for node in nodes])
    return TokenTree(
        torch.cat([node.ids for node in nodes]),
        torch.cat([torch.arange(node.depth, node.depth + node.ids.numel()) for node in nodes]),
        torch.tensor([node.subtree_end for node in nodes]).repeat_interleave(sizes),
        tuple(root.rows_of(each) for each in flat),
    )


def pack_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """Several trees side by side; none sees another. `rows` are those of all trees, one after the other."""
    if not trees:
        raise InputError(explain("trees", got="none", expected="at least one"))
    offsets = list(accumulate((len(each) for each in trees[:-1]), initial=0))
    return TokenTree(
        torch.cat([each.input_ids for each in trees]),
        torch.cat([each.position_ids for each in trees]),
        torch.cat([each.subtree_end + offset for each, offset in zip(trees, offsets, strict=True)]),
        tuple(row + offset for each, offset in zip(trees, offsets, strict=True) for row in each.rows),
    )


@dataclass(eq=False)
class _Node:
    """A run of tokens without a fork, and what continues it, by first token. Laying it out sets the numbers."""

    ids: Tensor
    children: dict[int, _Node] = field(default_factory=dict[int, "_Node"])
    start: int = 0
    depth: int = 0
    subtree_end: int = 0

    def insert(self, ids: Tensor) -> None:
        node = self
        while ids.numel():
            child = node.children.get(int(ids[0]))
            if child is None:
                node.children[int(ids[0])] = _Node(ids)
                return
            shared = _shared_length(child.ids, ids)
            if shared < child.ids.numel():
                child.split(shared)
            node, ids = child, ids[shared:]

    def split(self, at: int) -> None:
        """Cut the run: the rest becomes the only child, with all children of this one."""
        rest = _Node(self.ids[at:], self.children)
        self.ids, self.children = self.ids[:at], {int(rest.ids[0]): rest}

    def rows_of(self, ids: Tensor) -> Tensor:
        pieces: list[Tensor] = []
        node = self
        while ids.numel():
            node = node.children[int(ids[0])]
            pieces.append(torch.arange(node.start, node.start + node.ids.numel()))
            ids = ids[node.ids.numel() :]
        return torch.cat(pieces)


def _depth_first(root: _Node) -> list[_Node]:
    """The nodes in order, each with its place. A session has hundreds of forks on its trunk, so nothing recurses."""
    nodes: list[_Node] = []
    length = 0
    stack: list[tuple[_Node, int] | _Node] = [(child, 0) for child in reversed(root.children.values())]
    while stack:
        entry = stack.pop()
        if isinstance(entry, _Node):  # everything below it is laid out
            entry.subtree_end = length
            continue
        node, node.depth = entry
        node.start = length
        nodes.append(node)
        length += node.ids.numel()
        stack.append(node)
        stack += [(child, node.depth + node.ids.numel()) for child in reversed(node.children.values())]
    return nodes


def _shared_length(first: Tensor, second: Tensor) -> int:
    size = min(first.numel(), second.numel())
    differs = (first[:size] != second[:size]).nonzero()
    return int(differs[0]) if differs.numel() else size
