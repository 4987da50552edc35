"""Store windows of logged sessions compactly, and build tree batches from them on demand.

A tree batch stores the row of every token of every sequence in 64 bits. For a long session with many branches that
takes many times the size of its tokens. A stored window encodes the rows of a sequence as a few runs, and uses 32-bit
integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from composer_replication.batch.pair_tokens import PairIds, ResponseIds
from composer_replication.batch.tree import TokenTree
from composer_replication.batch.tree_batch import CHANNELS, TargetRows, TreeBatch, pack_batches
from composer_replication.errors import InputError, explain

T = TypeVar("T")
KEY, TOKENS = "session_batch", "tokens"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StoredWindow:
    """One window of a rendered conversation: its tree, and the ids of the sites and pairs in it."""

    conversation_id: str
    sequence: int
    first: int
    end: int
    site_ids: tuple[str, ...]
    state_ids: tuple[str, ...]
    small: TreeBatch
    """The batch with 32-bit integers, and with rows encoded as runs (R, 2)."""

    @property
    def num_tokens(self) -> int:
        return len(self.small.tree)

    @property
    def has_references(self) -> bool:
        """Whether all pairs have reference log-probs."""
        return self.small.pairs is None or self.small.pairs.chosen_reference is not None

    def counts(self) -> dict[str, int]:
        """Return the item count of each channel: response tokens, erring tokens, pairs."""
        return self.small.counts()

    def batch(self, device: str | torch.device = "cpu") -> TreeBatch:
        """Return the batch in its original form."""
        rows = tuple(torch.cat([torch.arange(*run) for run in runs.tolist()]) for runs in self.small.tree.rows)
        tree = replace(self.small.tree, rows=rows)
        return _mapped(replace(self.small, tree=tree), lambda tensor: tensor.to(device, _full_width(tensor.dtype)))

    def pair_ids(self) -> list[PairIds]:
        """Return both sides of each pair, in their context in this window."""
        batch = self.batch()
        pairs = batch.pairs
        if pairs is None:
            return []
        masks = [pairs.response == side for side in range(2 * pairs.num_pairs)]
        sides = [_path_ids(batch.tree, pairs.rows[mask], pairs.targets[mask]) for mask in masks]
        # All chosen sides come first, followed by all rejected sides.
        return [PairIds(*sides[number :: pairs.num_pairs]) for number in range(pairs.num_pairs)]

    def with_references(self, references: Sequence[tuple[float, float]]) -> StoredWindow:
        """Return the window with reference log-probs (chosen, rejected) for its pairs, in their order."""
        pairs = self.small.pairs
        if pairs is None:
            return self
        if len(references) != pairs.num_pairs:
            expected = f"one for each of {pairs.num_pairs} pairs"
            raise InputError(explain("reference log-probs", got=len(references), expected=expected))
        chosen, rejected = torch.tensor(references, dtype=torch.float64).unbind(1)
        referenced_pairs = replace(pairs, chosen_reference=chosen, rejected_reference=rejected)
        return replace(self, small=replace(self.small, pairs=referenced_pairs))

    def without_responses(self) -> StoredWindow:
        """Return the window without targets for channel 1."""
        empty = TargetRows(*(tensor[:0] for tensor in self.small.response))
        return replace(self, small=replace(self.small, response=empty))


@dataclass(frozen=True, eq=False, slots=True)
class SessionItem:
    """One item of a data set: a single window, or several windows that share a tree batch."""

    windows: tuple[StoredWindow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(window.num_tokens for window in self.windows)

    def batch(self, device: str | torch.device = "cpu") -> TreeBatch:
        """Return the windows as one batch."""
        return _packed([window.batch(device) for window in self.windows])


def store_window(
    batch: TreeBatch,
    *,
    conversation_id: str,
    sequence: int,
    span: tuple[int, int],
    site_ids: Sequence[str],
    state_ids: Sequence[str],
) -> StoredWindow:
    """Return the tree batch in compact form."""
    tree = replace(batch.tree, rows=tuple(_runs(rows) for rows in batch.tree.rows))
    return StoredWindow(
        conversation_id=conversation_id,
        sequence=sequence,
        first=span[0],
        end=span[1],
        site_ids=tuple(site_ids),
        state_ids=tuple(state_ids),
        small=_mapped(replace(batch, tree=tree), _small),
    )


def _packed(batches: Sequence[TreeBatch]) -> TreeBatch:
    """Pack these trees into one batch."""
    return batches[0] if len(batches) == 1 else pack_batches(batches)


def moved(batch: TreeBatch, device: str | torch.device) -> TreeBatch:
    """Copy the batch to a device."""
    return _mapped(batch, lambda tensor: tensor.to(device))


def _mapped(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return nested records with `change` applied to every tensor in them."""
    if isinstance(value, Tensor):
        return change(value)  # pyright: ignore[reportReturnType]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _mapped(getattr(value, field.name), change) for field in fields(value)})
    if isinstance(value, tuple) and any(isinstance(member, Tensor) for member in value):
        members: Any = [_mapped(member, change) for member in value]
        # The constructor of a NamedTuple takes its fields as separate arguments.
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return value


def _small(tensor: Tensor) -> Tensor:
    # Ids and rows fit into 32 bits; masks and floats keep their dtype.
    return tensor.to("cpu", torch.int32) if tensor.dtype == torch.int64 else tensor.cpu()


def _full_width(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.int32 else dtype


def _runs(rows: Tensor) -> Tensor:
    """Return the first and one past the last row (R, 2) for each run of consecutive rows."""
    # A run ends where the next row is not its successor.
    breaks = (rows.diff() != 1).nonzero().flatten()
    first = torch.cat([rows[:1], rows[breaks + 1]])
    last = torch.cat([rows[breaks], rows[-1:]])
    return torch.stack([first, last + 1], dim=1)


def _path_ids(tree: TokenTree, rows: Tensor, targets: Tensor) -> ResponseIds:
    """Return the ids of a response and its context: the path to its last row, and the token predicted there."""
    # All paths through the last row have the same tokens up to it.
    last = int(rows[-1])
    depth = int(tree.position_ids[last])
    path = next(candidate for candidate in tree.rows if candidate.numel() > depth and int(candidate[depth]) == last)
    start = int(tree.position_ids[int(rows[0])]) + 1
    return ResponseIds([*tree.input_ids[path[: depth + 1]].tolist(), int(targets[-1])], start)


@dataclass(frozen=True, eq=False)
class SessionBatch:
    """One micro-batch of packed trees. It is not a mapping of tensors, so that no library moves or slices it."""

    batch: TreeBatch
    items: Mapping[str, int]


def collate(batches: Sequence[TreeBatch]) -> dict[str, SessionBatch]:
    """Collate the batches into one micro-batch, for a DataLoader."""
    batch = _packed(batches)
    return {KEY: SessionBatch(batch, batch.counts())}


def items_of(batches: Sequence[Mapping[str, SessionBatch]]) -> dict[str, int]:
    """Return the item counts of the channels over all of these batches, and the number of tokens in their trees."""
    total: Counter[str] = Counter()
    for batch in batches:
        total.update(batch[KEY].items)
        total[TOKENS] += batch[KEY].batch.tree.input_ids.numel()
    return {name: total[name] for name in (*CHANNELS, TOKENS)}
