"""A key-value cache in which every row begins at slot 0, and the attention of a model to it.

There is no padding on the left, and a row continues where it ended; a token's slot is its position. Layers store their
keys and values here when they compute attention (`RowMask.attend`), so transformers' own caches are not involved.

Also here: how token rows share prefixes (`unequal_rows`, `shared_by_all`, `origins`), and casts of weights that are
made once instead of in every pass (`Casts`, `casts_kept`).
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
    """Keys and values (rows, heads, slots, D) of every layer; `tokens` are the ids of each row that are in the cache.

    The slot at `capacity` is spare: padding is written there, and never read.
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
        """The dtype of the attention, which is not the weights' if a forward casts; None if nothing has been read."""
        return next((pair[0].dtype for pair in self._layers.values()), None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self._layers.values() for tensor in pair)

    def put(self, module: nn.Module, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write (b, heads, n, D) into the slots (b, n) of these rows (b, 1), and return the layer's keys and values."""
        if id(module) not in self._layers:
            # Zeros, since masked values are multiplied by 0, and uninitialized memory may hold NaN.
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
        # Slots up to the longest row are copied for all rows; what is too much is overwritten before it is read.
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
        """Copy rows back that were copied from here and have grown up to `width`."""
        index = self._index(rows)
        for name, pair in source._layers.items():
            for target, copy in zip(self._layers[name], pair, strict=True):
                target[:, :, :width].index_copy_(0, index, copy[:, :, :width])

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, device=next((pair[0].device for pair in self._layers.values()), None))


class RowMask(OwnMask):
    """The mask of one pass: new tokens of some rows of a cache attend to their own row, up to themselves."""

    cache: KeyValueRows
    rows: Tensor
    """Numbers (b, 1) of the rows in the cache."""
    slots: Tensor
    """The slots of their new tokens (b, n)."""
    reach: int
    """How many slots are read; greater than any of `slots`."""
    is_fresh: bool
    """The rows are empty before these tokens, so the usual causal kernel is enough."""
    is_whole: bool
    """The rows are all of the cache, in order."""
    _bias: dict[int, Tensor]

    @classmethod
    def over(cls, cache: KeyValueRows, device: torch.device) -> RowMask:
        """Return a mask to be used for many passes, by `aimed`: building one takes as long as a small layer."""
        mask = cls.of_length(cache.capacity + 1, device)
        mask.cache = cache
        return mask

    def aimed(self, rows: Tensor, slots: Tensor, reach: int, *, is_fresh: bool = False, is_whole: bool = False) -> Any:
        """Return this mask, set up for the next pass."""
        self.rows, self.slots, self.reach, self.is_fresh, self.is_whole = rows, slots, reach, is_fresh, is_whole
        self._bias = {}
        return self

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Store the keys and values of the new tokens, and return the attention of their queries to the cache."""
        query, key, value = as_computed(query, key, value)
        check_options("attention while generating", options)
        if options.get("softcap") is not None:
            raise ValueError("attention with a soft-cap has no kernel for rows")
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
        # Heads that share keys become queries of one head, so that the keys are neither repeated nor read twice.
        batch, heads, width, size = query.shape
        groups = heads // keys.shape[1]
        folded = query.reshape(batch, keys.shape[1], groups * width, size)
        attended = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=self._added(query, groups), scale=scale
        )
        return attended.reshape(batch, heads, width, values.shape[3]).transpose(1, 2)

    def _added(self, query: Tensor, groups: int) -> Tensor:
        """Return what is added to the scores (b, 1, groups x n, reach); computed once, since all layers share it."""
        if groups not in self._bias:
            hidden = torch.arange(self.reach, device=query.device) > self.slots[:, None, :, None]
            bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            bias.masked_fill_(hidden, -torch.inf)
            self._bias[groups] = bias if hidden.shape[2] == 1 else bias.repeat(1, 1, groups, 1)
        return self._bias[groups]


class Origin(NamedTuple):
    """The cached row that a new row continues: its number, and how many tokens they share."""

    row: int
    shared: int


def rows_without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tokens] | None:
    """Return the real tokens of each row, or None if there is padding that is not on the left."""
    rows: list[Tokens] = input_ids.tolist()
    if attention_mask is None:
        return rows
    # Padding on the left: once a token is real, all later ones are.
    real = attention_mask.bool()
    if bool((real[:, 1:] < real[:, :-1]).any()) or not bool(real[:, -1].all()):
        return None
    return [row[len(row) - count :] for row, count in zip(rows, real.sum(1).tolist(), strict=True)]


def unequal_rows(rows: Sequence[Tokens]) -> tuple[list[Tokens], list[int]]:
    """Return every distinct row once, and for each of `rows` its index among them."""
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
    """Return the length of the common prefix of all rows, which is that of the smallest and the largest of them."""
    return shared_length(min(rows), max(rows)) if rows else 0


def origins(rows: Sequence[Tokens], cached: Sequence[Tokens], prompts: Sequence[int]) -> list[Origin | None]:
    """Return for each row the cached row that it shares most tokens with, or None if it begins with no cached prompt.

    `prompts` has the numbers of tokens of each cached row that are its prompt.
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
    """A cache of the half-precision copies of weights that an autocast makes; the weights must not change meanwhile.

    A CUDA graph has the addresses of these copies. Autocast's own cache frees them when an autocast ends in any thread,
    so graphs are recorded with the copies that are held here. The model must not run in another thread meanwhile.
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
        return self._held[key].detach()  # the same memory in a new tensor, as autograd sets attributes on it

    def _is_cast(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether this is a cast of a weight to autocast's dtype."""
        # Not every copy: those that a model makes itself may be written to.
        is_weight = source.data_ptr() in self._weights or (source.is_leaf and source.requires_grad)
        return is_weight and kwargs.get("dtype") == torch.get_autocast_dtype(source.device.type)


@contextmanager
def casts_kept(model: Any) -> Iterator[None]:
    """Keep the half-precision copies that autocast makes of trained weights until the end of the block.

    A trainer with bf16 runs each pass in its own autocast, which frees the copies at its end: the pass of every token
    would make all of them again, and every CUDA graph would hold its own. The weights must not change inside the block.
    """
    kind = model.device.type
    if not torch.amp.is_autocast_available(kind):
        yield
        return
    # With the current settings: only the nesting changes, and copies are freed at the end of the outermost autocast.
    with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)):
        yield
