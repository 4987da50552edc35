"""A key-value cache in which every row starts at slot 0, and the attention of a model to it.

There is no left padding, and a row continues where it ended, so a token's slot is its position. Layers store their keys
and values here when they compute attention (`RowMask.attend`), so the caches of transformers are not involved.

This module also finds prefixes that token rows share (`unequal_rows`, `shared_by_all`, `origins`), and keeps casts of
weights, so that they are made once instead of in every pass (`Casts`, `casts_kept`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.trainer.objective.attention.attend import OwnMask, as_computed, check_options

Tokens = list[int]


class KeyValueRows:
    """Keys and values (rows, heads, slots, D) of every layer; `tokens` are the ids in the cache for each row.

    The slot at `capacity` is a spare one, to which padding is written and which is never read.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows, self.capacity = num_rows, capacity
        self.tokens: list[Tokens] = [[] for _ in range(num_rows)]
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the attention (not the weights' if a forward casts), or None before the first read."""
        return next((pair[0].dtype for pair in self._layers.values()), None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self._layers.values() for tensor in pair)

    def put(self, module: nn.Module, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (b, heads, n, D) to the slots (b, n) of rows (b, 1), and return the layer's buffers."""
        if id(module) not in self._layers:
            # Zeros, because masked values are multiplied by 0 and uninitialized memory may contain NaN.
            shapes = [(self.num_rows, tensor.shape[1], self.capacity + 1, tensor.shape[3]) for tensor in (key, value)]
            self._layers[id(module)] = key.new_zeros(shapes[0]), value.new_zeros(shapes[1])
        keys, values = self._layers[id(module)]
        keys[rows, :, slots] = key.transpose(1, 2)
        values[rows, :, slots] = value.transpose(1, 2)
        return keys, values

    def copied(self, rows: Sequence[int], lengths: Sequence[int], capacity: int, *, moved: bool) -> KeyValueRows:
        """Return a new cache with the first tokens of these rows. With `moved`, layers are freed as they are copied."""
        new = KeyValueRows(len(rows), capacity)
        new.tokens = [self.tokens[row][:length] for row, length in zip(rows, lengths, strict=True)]
        # All rows are copied up to the length of the longest; any excess is overwritten before it is read.
        width, index = max(lengths, default=0), self._index(rows)
        for name, pair in list(self._layers.items()):
            copies: list[Tensor] = []
            for tensor in pair:
                copies.append(tensor.new_zeros(len(rows), tensor.shape[1], capacity + 1, tensor.shape[3]))
                copies[-1][:, :, :width] = tensor[:, :, :width].index_select(0, index)
            new._layers[name] = copies[0], copies[1]
            if moved:
                del self._layers[name], pair
        return new

    def put_back(self, rows: Sequence[int], source: KeyValueRows, width: int) -> None:
        """Copy rows that were taken from this cache and have grown up to `width` back into it."""
        index = self._index(rows)
        for name, pair in source._layers.items():
            for target, copy in zip(self._layers[name], pair, strict=True):
                target[:, :, :width].index_copy_(0, index, copy[:, :, :width])

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, device=next((pair[0].device for pair in self._layers.values()), None))


class RowMask(OwnMask):
    """The mask of one pass: new tokens of some rows attend to their own row, up to and including themselves."""

    cache: KeyValueRows
    rows: Tensor
    """The numbers (b, 1) of the rows in the cache."""
    slots: Tensor
    """The slots (b, n) of the new tokens."""
    reach: int
    """How many slots are read: greater than any of `slots`."""
    is_fresh: bool
    """The rows are empty before these tokens, so the usual causal kernel suffices."""
    is_whole: bool
    """The rows are all rows of the cache, in order."""
    _bias: dict[int, Tensor]

    @classmethod
    def over(cls, cache: KeyValueRows, device: torch.device) -> RowMask:
        """Return a mask to reuse for many passes with `aimed`; building one takes as long as a small layer."""
        mask = cls.of_length(cache.capacity + 1, device)
        mask.cache = cache
        return mask

    def aimed(self, rows: Tensor, slots: Tensor, reach: int, *, is_fresh: bool = False, is_whole: bool = False) -> Any:
        """Return this mask after setting it up for the next pass."""
        self.rows, self.slots, self.reach, self.is_fresh, self.is_whole = rows, slots, reach, is_fresh, is_whole
        self._bias = {}
        return self

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Store the new tokens' keys and values, and return the attention of their queries to the cache."""
        query, key, value = as_computed(query, key, value)
        check_options("attention while generating", options)
        if options.get("softcap") is not None:
            raise ValueError("attention with a soft-cap is not supported for cached rows")
        scale = options.get("scaling")
        keys, values = self.cache.put(module, key, value, self.rows, self.slots)
        if self.is_fresh:
            is_grouped = query.shape[1] != key.shape[1]
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
            )
            return attended.transpose(1, 2)
        keys, values = keys[:, :, : self.reach], values[:, :, : self.reach]
        if not self.is_whole:
            keys, values = (tensor.index_select(0, self.rows[:, 0]) for tensor in (keys, values))
        # Queries of heads that share keys become queries of one head, so that keys are not repeated or read twice.
        batch, heads, width, size = query.shape
        groups = heads // keys.shape[1]
        folded = query.reshape(batch, keys.shape[1], groups * width, size)
        attended = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=self._added(query, groups), scale=scale
        )
        return attended.reshape(batch, heads, width, values.shape[3]).transpose(1, 2)

    def _added(self, query: Tensor, groups: int) -> Tensor:
        """Return the additive mask (b, 1, groups x n, reach), computed once because all layers share it."""
        if groups not in self._bias:
            hidden = torch.arange(self.reach, device=query.device) > self.slots[:, None, :, None]
            bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            bias.masked_fill_(hidden, -torch.inf)
            self._bias[groups] = bias if hidden.shape[2] == 1 else bias.repeat(1, 1, groups, 1)
        return self._bias[groups]


class Origin(NamedTuple):
    """The cached row that a new row continues: its number, and the length of the common prefix."""

    row: int
    shared: int


def rows_without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tokens] | None:
    """Return the real tokens of each row, or None if any padding is not on the left."""
    rows: list[Tokens] = input_ids.tolist()
    if attention_mask is None:
        return rows
    # With left padding, all tokens after the first real one are real.
    real = attention_mask.bool()
    if bool((real[:, 1:] < real[:, :-1]).any()) or not bool(real[:, -1].all()):
        return None
    return [row[len(row) - count :] for row, count in zip(rows, real.sum(1).tolist(), strict=True)]


def unequal_rows(rows: Sequence[Tokens]) -> tuple[list[Tokens], list[int]]:
    """Deduplicate rows: return the distinct rows, and the index of each of `rows` among them."""
    numbers: dict[tuple[int, ...], int] = {}
    row_numbers = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
    return [list(row) for row in numbers], row_numbers


def shared_length(first: Tokens, second: Tokens) -> int:
    """Return the length of the common prefix of two rows."""
    # Binary search with slices, which compare much faster than a Python loop over tokens.
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low


def shared_by_all(rows: Sequence[Tokens]) -> int:
    """Return the length of the common prefix of all rows, which is the common prefix of their minimum and maximum."""
    return shared_length(min(rows), max(rows)) if rows else 0


def origins(rows: Sequence[Tokens], cached: Sequence[Tokens], prompts: Sequence[int]) -> list[Origin | None]:
    """Return for each row the cached row with the longest common prefix, or None if it starts with no cached prompt.

    `prompts` has the length of the prompt in each cached row.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, (tokens, length) in enumerate(zip(cached, prompts, strict=True)):
        by_prompt.setdefault(tuple(tokens[:length]), []).append(number)
    lengths = sorted({len(prompt) for prompt in by_prompt}, reverse=True)

    def origin(row: Tokens) -> Origin | None:
        for length in lengths:
            if candidates := by_prompt.get(tuple(row[:length])):
                shared_lengths = (Origin(candidate, shared_length(cached[candidate], row)) for candidate in candidates)
                return max(shared_lengths, key=lambda origin: origin.shared)
        return None

    return [origin(row) for row in rows]


class Casts(TorchDispatchMode):
    """A cache for the half-precision copies that autocast makes of weights.

    The weights must not change while it is in use. A CUDA graph contains the addresses of these copies. Autocast's own
    cache frees them when an autocast ends in any thread, so graphs are recorded with the copies held here. The model
    must not run in another thread at the same time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.data_ptr() for parameter in model.parameters()} - {0}
        self._held: dict[Any, Tensor] = {}
        self.were_recorded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._to_copy.default or not self._is_cast(args[0], kwargs):
            return func(*args, **kwargs)
        weight: Tensor = args[0]
        key = weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), *map(str, sorted(kwargs.items()))
        if key not in self._held:
            copy = func(*args, **kwargs)
            if weight.is_cuda and torch.cuda.is_current_stream_capturing():
                self.were_recorded = True
                return copy
            self._held[key] = copy
        return self._held[key].detach()  # the same memory in a new tensor, because autograd sets attributes on it

    def _is_cast(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether this is a cast of a weight to autocast's dtype."""
        # Other copies are excluded, because the model may write to copies that it makes itself.
        is_weight = source.data_ptr() in self._weights or (source.is_leaf and source.requires_grad)
        return is_weight and kwargs.get("dtype") == torch.get_autocast_dtype(source.device.type)


@contextmanager
def casts_kept(model: Any) -> Iterator[None]:
    """Keep the half-precision copies of trained weights that autocast makes until the end of the block.

    A trainer with bf16 runs each pass under its own autocast, which frees the copies when it ends. Without this, the
    pass of every token would repeat the copies, and every CUDA graph would hold its own. The weights must not change
    inside the block.
    """
    kind = model.device.type
    if not torch.amp.is_autocast_available(kind):
        yield
        return
    # The settings do not change. The extra level is needed because copies are freed when the outermost autocast ends.
    with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)):
        yield
