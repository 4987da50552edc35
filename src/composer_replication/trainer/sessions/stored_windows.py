"""Windows of logged sessions as they wait for their step: a tree in small integers, made into a batch on demand.

A tree batch holds the row of every token of every sequence, in 64 bits: for a long session with many branches that is
many times its own tokens. A sequence's rows are a few runs, and the rest fits in 32 bits.
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
from composer_replication.batch.tree_batch import (
    CHANNELS,
    TargetRows,
    TreeBatch,
    pack_batches,
)
from composer_replication.errors import InputError, explain

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StoredWindow:
    """One window of one rendered conversation: which sites and states are in it, and its tree."""

    conversation_id: str
    sequence: int
    first: int
    end: int
    site_ids: tuple[str, ...]
    state_ids: tuple[str, ...]
    small: TreeBatch
    """The batch, its integers in 32 bits, and its rows as runs (R, 2)."""

    @property
    def num_tokens(self) -> int:
        return len(self.small.tree)

    @property
    def has_references(self) -> bool:
        return self.small.pairs is None or self.small.pairs.chosen_reference is not None

    def counts(self) -> dict[str, int]:
        """Items of each channel: response tokens, erring tokens, pairs."""
        return self.small.counts()

    def batch(self, device: str | torch.device = "cpu") -> TreeBatch:
        """The batch that was stored."""
        rows = tuple(torch.cat([torch.arange(*run) for run in runs.tolist()]) for runs in self.small.tree.rows)
        tree = replace(self.small.tree, rows=rows)
        return _mapped(replace(self.small, tree=tree), lambda tensor: tensor.to(device, _whole(tensor.dtype)))

    def pair_ids(self) -> list[PairIds]:
        """Both sides of each pair in the context that this window shows them in."""
        batch = self.batch()
        pairs = batch.pairs
        if pairs is None:
            return []
        owned = [pairs.response == side for side in range(2 * pairs.num_pairs)]
        sides = [_path_ids(batch.tree, pairs.rows[mask], pairs.targets[mask]) for mask in owned]
        return [PairIds(*sides[number :: pairs.num_pairs]) for number in range(pairs.num_pairs)]

    def with_references(self, references: Sequence[tuple[float, float]]) -> StoredWindow:
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
        nothing = TargetRows(*(tensor[:0] for tensor in self.small.response))
        return replace(self, small=replace(self.small, response=nothing))


@dataclass(frozen=True, eq=False, slots=True)
class SessionItem:
    """What one number of a data set stands for: one window, or several that share a tree batch."""

    windows: tuple[StoredWindow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(window.num_tokens for window in self.windows)

    def batch(self, device: str | torch.device = "cpu") -> TreeBatch:
        return _side_by_side([window.batch(device) for window in self.windows])


def store_window(
    batch: TreeBatch,
    *,
    conversation_id: str,
    sequence: int,
    span: tuple[int, int],
    site_ids: Sequence[str],
    state_ids: Sequence[str],
) -> StoredWindow:
    """A tree batch in small integers."""
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


def _side_by_side(batches: Sequence[TreeBatch]) -> TreeBatch:
    """These trees as one batch."""
    return batches[0] if len(batches) == 1 else pack_batches(batches)


def moved(batch: TreeBatch, device: str | torch.device) -> TreeBatch:
    """The batch on a device."""
    return _mapped(batch, lambda tensor: tensor.to(device))


def _mapped(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same records with every tensor in them changed."""
    if isinstance(value, Tensor):
        return change(value)  # pyright: ignore[reportReturnType]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _mapped(getattr(value, field.name), change) for field in fields(value)})
    if isinstance(value, tuple) and any(isinstance(member, Tensor) for member in value):
        several: Any = [_mapped(member, change) for member in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    return value


def _small(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.int32) if tensor.dtype == torch.int64 else tensor.cpu()


def _whole(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.int32 else dtype


def _runs(rows: Tensor) -> Tensor:
    """(R, 2): where stretches of neighbouring rows begin and end."""
    breaks = (rows.diff() != 1).nonzero().flatten()
    first = torch.cat([rows[:1], rows[breaks + 1]])
    last = torch.cat([rows[breaks], rows[-1:]])
    return torch.stack([first, last + 1], dim=1)


def _path_ids(tree: TokenTree, rows: Tensor, targets: Tensor) -> ResponseIds:
    """The sequence of a response: the path to the row that predicts its last token, and that token."""
    last = int(rows[-1])
    depth = int(tree.position_ids[last])
    path = next(candidate for candidate in tree.rows if candidate.numel() > depth and int(candidate[depth]) == last)
    start = int(tree.position_ids[int(rows[0])]) + 1
    return ResponseIds([*tree.input_ids[path[: depth + 1]].tolist(), int(targets[-1])], start)


KEY, TOKENS = "session_batch", "tokens"


@dataclass(frozen=True, eq=False)
class SessionBatch:
    """One micro-batch: its trees side by side. Not a mapping of tensors, so that no library moves or cuts it."""

    batch: TreeBatch
    items: Mapping[str, int]


def collate(batches: Sequence[TreeBatch]) -> dict[str, SessionBatch]:
    batch = _side_by_side(batches)
    return {KEY: SessionBatch(batch, batch.counts())}


def items_of(batches: Sequence[Mapping[str, SessionBatch]]) -> dict[str, int]:
    """Items of each channel in all of these, and the tokens of their trees."""
    total: Counter[str] = Counter()
    for batch in batches:
        total.update(batch[KEY].items)
        total[TOKENS] += batch[KEY].batch.tree.input_ids.numel()
    return {name: total[name] for name in (*CHANNELS, TOKENS)}
