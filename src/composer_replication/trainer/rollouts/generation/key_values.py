"""Keys and values of the tokens that a model has read, row by row, and attention by them.

A row's tokens lie in its slots from 0 on, whatever the lengths of other rows: there is no padding on the left, and a
row goes on where it ended. The slot is the token's position. Layers put their keys here and read them again when they
are asked to attend (`RowMask.attend`), so that no cache of transformers takes part.
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


class KeyValueRows:
    """Keys and values (rows, heads, slots, D) of every layer; `tokens` are the ids of a row whose keys are there.

    One slot more than `capacity` takes what belongs to no row. Memory: rows x (capacity + 1) x what a token takes.
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
        """What attention is computed in, which the weights need not tell: a forward may cast for itself."""
        return next((pair[0].dtype for pair in self._layers.values()), None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self._layers.values() for tensor in pair)

    def put(self, module: nn.Module, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write (b, heads, n, D) into the slots (b, n) of these rows (b, 1), and give all of the layer's back."""
        if id(module) not in self._layers:
            # Zeros, since what is masked is multiplied by 0, and memory may hold NaN.
            shapes = [(self.num_rows, tensor.shape[1], self.capacity + 1, tensor.shape[3]) for tensor in (key, value)]
            self._layers[id(module)] = key.new_zeros(shapes[0]), value.new_zeros(shapes[1])
        keys, values = self._layers[id(module)]
        keys[rows, :, slots] = key.transpose(1, 2)
        values[rows, :, slots] = value.transpose(1, 2)
        return keys, values

    def taken(self, rows: Sequence[int], lengths: Sequence[int], capacity: int, *, moved: bool) -> KeyValueRows:
        """New rows that begin with the first tokens of these. With `moved` they replace them, layer by layer."""
        new = KeyValueRows(len(rows), capacity)
        new.tokens = [self.tokens[row][:length] for row, length in zip(rows, lengths, strict=True)]
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
        """Copy rows that were taken from here, and have gone on up to `width`, to where they came from."""
        index = self._index(rows)
        for name, pair in source._layers.items():
            for mine, theirs in zip(self._layers[name], pair, strict=True):
                mine[:, :, :width].index_copy_(0, index, theirs[:, :, :width])

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, device=next((pair[0].device for pair in self._layers.values()), None))


class RowMask(OwnMask):
    """Attention of new tokens of some rows to their own row, up to themselves; the mask says which, for one pass."""

    cache: KeyValueRows
    rows: Tensor
    """Numbers (b, 1) of the rows in the cache."""
    slots: Tensor
    """Where their new tokens lie (b, n)."""
    reach: int
    """Slots that are looked at: more than any of these."""
    is_fresh: bool
    """Nothing is there before the new tokens, so the usual causal kernel does."""
    is_whole: bool
    """The rows are all of the cache, in order."""
    _bias: dict[int, Tensor]

    @classmethod
    def over(cls, cache: KeyValueRows, device: torch.device) -> RowMask:
        """A mask to be aimed at pass after pass: making one takes as long as a small layer."""
        mask = cls.of_length(cache.capacity + 1, device)
        mask.cache = cache
        return mask

    def aimed(self, rows: Tensor, slots: Tensor, reach: int, *, is_fresh: bool = False, is_whole: bool = False) -> Any:
        self.rows, self.slots, self.reach, self.is_fresh, self.is_whole = rows, slots, reach, is_fresh, is_whole
        self._bias = {}
        return self

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
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
        # Heads that share keys become queries of one head: the keys are read once and never repeated in memory.
        batch, heads, width, size = query.shape
        groups = heads // keys.shape[1]
        folded = query.reshape(batch, keys.shape[1], groups * width, size)
        attended = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=self._added(query, groups), scale=scale
        )
        return attended.reshape(batch, heads, width, values.shape[3]).transpose(1, 2)

    def _added(self, query: Tensor, groups: int) -> Tensor:
        """What is added to the scores (b, 1, groups x n, reach); the same for all layers, so made once."""
        if groups not in self._bias:
            hidden = torch.arange(self.reach, device=query.device) > self.slots[:, None, :, None]
            bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            bias.masked_fill_(hidden, -torch.inf)
            self._bias[groups] = bias if hidden.shape[2] == 1 else bias.repeat(1, 1, groups, 1)
        return self._bias[groups]


# Rows of token ids as lists: which are equal, what they share, and which of them go on where another ended.

Tokens = list[int]


class Origin(NamedTuple):
    """The kept row that a new one goes on from: its number, and how many tokens they share."""

    row: int
    shared: int


def rows_without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tokens] | None:
    """The real tokens of each row; None where the padding is not all on the left."""
    rows: list[Tokens] = input_ids.tolist()
    if attention_mask is None:
        return rows
    real = attention_mask.bool()
    if bool((real[:, 1:] < real[:, :-1]).any()) or not bool(real[:, -1].all()):
        return None
    return [row[len(row) - count :] for row, count in zip(rows, real.sum(1).tolist(), strict=True)]


def unequal_rows(rows: Sequence[Tokens]) -> tuple[list[Tokens], list[int]]:
    """Every different row once, and for each of the given ones its number among them."""
    numbers: dict[tuple[int, ...], int] = {}
    row_numbers = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
    return [list(row) for row in numbers], row_numbers


def shared_length(first: Tokens, second: Tokens) -> int:
    """Up to where two rows are equal."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low


def shared_by_all(rows: Sequence[Tokens]) -> int:
    """How many first tokens all rows have in common: the least and the greatest of them tell."""
    return shared_length(min(rows), max(rows)) if rows else 0


def origins(rows: Sequence[Tokens], kept: Sequence[Tokens], prompts: Sequence[int]) -> list[Origin | None]:
    """For each row the kept one that it shares most with, among those whose whole prompt it begins with.

    `prompts` says how many tokens of each kept row are its prompt.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, (tokens, length) in enumerate(zip(kept, prompts, strict=True)):
        by_prompt.setdefault(tuple(tokens[:length]), []).append(number)
    lengths = sorted({len(prompt) for prompt in by_prompt}, reverse=True)

    def origin(row: Tokens) -> Origin | None:
        for length in lengths:
            if candidates := by_prompt.get(tuple(row[:length])):
                return max(
                    (Origin(candidate, shared_length(kept[candidate], row)) for candidate in candidates),
                    key=lambda e: e.shared,
                )
        return None

    return [origin(row) for row in rows]


# Copies of weights in half precision, which an autocast makes: made once a generation, and held for recordings.


class Casts(TorchDispatchMode):
    """Inside, an autocast's copy of a weight is made once, and whoever asks again gets that: weights must not change.

    A recording has the copies' addresses. The ones that autocasts have in common are given back when an autocast ends
    in any other thread, and made again by the next pass: so a recording takes those that are held here. The model must
    not run in another thread meanwhile.
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
        return self._held[key].detach()  # the same memory; autograd writes on what it is given

    def _is_cast(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        """Of a weight, or of what an autocast takes for one, and to an autocast's type.

        Copies that a model makes by itself may be written to.
        """
        is_weight = source.data_ptr() in self._weights or (source.is_leaf and source.requires_grad)
        return is_weight and kwargs.get("dtype") == torch.get_autocast_dtype(source.device.type)


@contextmanager
def casts_kept(model: Any) -> Iterator[None]:
    """Inside, the copies in half precision that an autocast makes of trained weights are made once.

    A trainer with bf16 runs each pass in an autocast of its own, at whose end they go: each token's pass would make
    all of them again, and each recording hold its own. The weights must not change inside.
    """
    kind = model.device.type
    if not torch.amp.is_autocast_available(kind):
        yield
        return
    # As it is already, so that nothing changes but how deep passes are nested: copies go at the outermost one's end.
    with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)):
        yield
