"""A key-value cache organized by rows, and a model's forward passes that use it to read new tokens or predict the next.

Every row starts at slot 0. There is no left padding, and a row continues where it ended, so a token's slot is its
position. Layers store their keys and values here when they compute attention (`_RowMask.attend`), so the caches of
transformers are not involved. Half-precision copies of weights are also kept, instead of being made in every pass
(`_Casts`).

On CUDA the pass for the next token is recorded as a graph, one for each length up to which the cache is read. Launching
its thousand kernels one by one takes the host several times as long as the device needs to run them. A model whose pass
cannot be recorded runs without graphs, with a warning.

`why_not_kept` tells whether a model can generate in this way. It checks the config first, and then runs an experiment
once per setting: it reads a few rows of unequal lengths in pieces, as generation does, and compares the logits with
those of plain passes over the whole rows. This detects what a config does not mention (a convolution, a recurrent
state, a position bias by slot) before anything is sampled.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.trainer.objective.attention.attend import (
    SelfAttendingMask,
    accept_self_attending_masks,
    cast_for_attention,
    check_attention_options,
    usual_attention,
)
from composer_replication.trainer.objective.attention.forward import has_attention_dropout
from composer_replication.trainer.objective.attention.model_checks import (
    compute_dtype,
    max_invariant_length,
    shortest_window,
    text_config,
    why_no_tree,
)
from composer_replication.trainer.objective.distributed import eval_mode, is_sharded

Tokens = list[int]
logger = logging.getLogger(__name__)
# Maximum tokens in a pass over empty rows, in a pass over rows with a past, and per row in the latter. They fill a
# device, but keep activations small compared with the cache.
_FRESH_TOKENS, _MORE_TOKENS, _MAX_WIDTH = 16384, 8192, 512
_unrecordable: WeakSet[nn.Module] = WeakSet()
# Errors raised by models that were not written for such a mask. NotImplementedError is a RuntimeError.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
# The experiment: the lengths of its rows, and how far each row is read in each of three pieces.
_LENGTHS, _PIECES = (23, 14, 31), ((0, 9, 20), (6, 6, 11), (0, 17, 28))
# Its results, keyed by device, precision and attention. Weak references, so that a model can be freed.
_trials: WeakKeyDictionary[nn.Module, dict[str, str | None]] = WeakKeyDictionary()


class KeyValueRows:
    """The keys and values (rows, heads, slots, D) of every layer; `tokens` has the cached token ids of each row.

    The slot with index `capacity` is an extra one: padding is written to it, and it is never read.
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
        """The dtype of the cached keys and values, or None before the first read. Autocast can make it differ from
        the weights'.
        """
        return next((pair[0].dtype for pair in self._layers.values()), None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self._layers.values() for tensor in pair)

    def put(self, module: nn.Module, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (b, heads, n, D) to the slots (b, n) of the rows (b, 1).

        Returns the layer's complete buffers of keys and values.
        """
        if id(module) not in self._layers:
            # Zeros, because masked values are multiplied by 0 and uninitialized memory may contain NaN.
            shapes = [(self.num_rows, tensor.shape[1], self.capacity + 1, tensor.shape[3]) for tensor in (key, value)]
            self._layers[id(module)] = key.new_zeros(shapes[0]), value.new_zeros(shapes[1])
        keys, values = self._layers[id(module)]
        keys[rows, :, slots] = key.transpose(1, 2)
        values[rows, :, slots] = value.transpose(1, 2)
        return keys, values

    def copy_rows(self, rows: Sequence[int], lengths: Sequence[int], capacity: int, *, moved: bool) -> KeyValueRows:
        """Return a new cache with the first `lengths` tokens of these rows.

        If `moved` is set, each layer of this cache is freed once it is copied.
        """
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
        """Copy rows back into this cache from `source`, to which they were copied earlier; `width` slots are copied."""
        index = self._index(rows)
        for name, pair in source._layers.items():
            for target, copy in zip(self._layers[name], pair, strict=True):
                target[:, :, :width].index_copy_(0, index, copy[:, :, :width])

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, device=next((pair[0].device for pair in self._layers.values()), None))


class _RowMask(SelfAttendingMask):
    """The attention mask of one pass, in which each new token attends to its own row, up to and including itself."""

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
    def over(cls, cache: KeyValueRows, device: torch.device) -> _RowMask:
        """Return a mask for this cache. Building one takes as long as a small layer, so reuse it for many passes
        with `set_up`.
        """
        mask = cls.of_length(cache.capacity + 1, device)
        mask.cache = cache
        return mask

    def set_up(self, rows: Tensor, slots: Tensor, reach: int, *, is_fresh: bool = False, is_whole: bool = False) -> Any:
        """Prepare this mask for the next pass, and return it."""
        self.rows, self.slots, self.reach, self.is_fresh, self.is_whole = rows, slots, reach, is_fresh, is_whole
        self._bias = {}
        return self

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Store the new tokens' keys and values, and return the output of their queries' attention to the cache."""
        query, key, value = cast_for_attention(query, key, value)
        check_attention_options("attention while generating", options)
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
            folded, keys, values, attn_mask=self._additive_mask(query, groups), scale=scale
        )
        return attended.reshape(batch, heads, width, values.shape[3]).transpose(1, 2)

    def _additive_mask(self, query: Tensor, groups: int) -> Tensor:
        """Return the additive mask (b, 1, groups x n, reach), computed once because all layers share it."""
        if groups not in self._bias:
            hidden = torch.arange(self.reach, device=query.device) > self.slots[:, None, :, None]
            bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            bias.masked_fill_(hidden, -torch.inf)
            self._bias[groups] = bias if hidden.shape[2] == 1 else bias.repeat(1, 1, groups, 1)
        return self._bias[groups]


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
    """Return the length of the common prefix of all rows, found by comparing only the smallest row and the largest."""
    return shared_length(min(rows), max(rows)) if rows else 0


class _Casts(TorchDispatchMode):
    """A cache for the half-precision copies that autocast makes of weights.

    The weights must not change while the cache is in use. A CUDA graph contains the addresses of these copies.
    Autocast's own cache frees them when an autocast ends in any thread, so graphs are recorded with the copies held
    here. The model must not run in another thread at the same time.
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
def keep_casts(model: Any) -> Iterator[None]:
    """Keep autocast's half-precision copies of trained weights until the end of the block.

    A trainer with bf16 runs each pass under its own autocast, which frees the copies when it ends. Without this
    function, the weights would be copied in the pass of every token, and every CUDA graph would hold its own copies.
    The weights must not change inside the block.
    """
    kind = model.device.type
    if not torch.amp.is_autocast_available(kind):
        yield
        return
    # The settings do not change. The extra level is needed because copies are freed when the outermost autocast ends.
    with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)):
        yield


def read_tokens(model: Any, cache: KeyValueRows, tokens_by_row: Sequence[Tokens]) -> int:
    """Read those tokens of each row that are not in the cache yet, and return the number of tokens read."""
    device = model.device
    mask = _RowMask.over(cache, device)
    missing = [(row, len(tokens) - len(cache.tokens[row])) for row, tokens in enumerate(tokens_by_row)]
    todo = sorted(((row, count) for row, count in missing if count), key=lambda pair: -pair[1])
    total = sum(count for _, count in todo)
    while todo:
        rows, width = _next_batch(todo, cache)
        pieces = [tokens_by_row[row][len(cache.tokens[row]) :][:width] for row in rows]
        starts = [len(cache.tokens[row]) for row in rows]
        # Padding is written to the spare slot at `capacity`.
        slots = [
            [*range(start, start + len(piece)), *[cache.capacity] * (width - len(piece))]
            for start, piece in zip(starts, pieces, strict=True)
        ]
        ids = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=device)
        slots_bn = torch.tensor(slots, device=device)
        rows_b1 = torch.tensor(rows, device=device)[:, None]
        reach = max(start + len(piece) for start, piece in zip(starts, pieces, strict=True))
        _pass(model, ids, mask.set_up(rows_b1, slots_bn, reach, is_fresh=not any(starts)))
        for row, piece in zip(rows, pieces, strict=True):
            cache.tokens[row].extend(piece)
        remaining = {row: count - width for row, count in todo if row in rows and count > width}
        todo = [*remaining.items(), *[pair for pair in todo if pair[0] not in rows]]
    return total


def _next_batch(todo: Sequence[tuple[int, int]], cache: KeyValueRows) -> tuple[list[int], int]:
    """Return the rows of the next pass and the number of tokens to read per row.

    The rows of a pass either all have cached tokens or all have none.
    """
    first, count = todo[0]
    is_fresh = not cache.tokens[first]
    width = count if is_fresh else min(count, _MAX_WIDTH)
    max_rows = max(1, (_FRESH_TOKENS if is_fresh else _MORE_TOKENS) // width)
    candidates = [row for row, _ in todo if (not cache.tokens[row]) == is_fresh]
    return candidates[:max_rows], width


class _Recording(NamedTuple):
    """A CUDA graph, with the input and output tensors whose addresses it contains."""

    graph: Any
    tokens: Tensor
    slots: Tensor
    logits: Tensor


class NextTokens:
    """A forward pass that reads one more token of every row in a cache, and returns the next logits."""

    def __init__(self, model: Any, cache: KeyValueRows, *, record: bool) -> None:
        self._model, self._cache = model, cache
        self._mask = _RowMask.over(cache, model.device)
        self._rows = torch.arange(cache.num_rows, device=model.device)[:, None]
        self.is_recording = record and model not in _unrecordable
        self._recorded: dict[int, _Recording] = {}
        self._pool: Any = None
        self._capture_stream: torch.cuda.Stream | None = None
        self._casts = _Casts(model)

    def logits(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Tensor:
        """Return the logits (B, V), which are valid until the next call. The slots of all running rows must be below
        `reach`.
        """
        if not self.is_recording:
            return self._run(tokens_B, slots_B, reach)
        recorded = self._recorded.get(reach)
        if recorded is None:
            return self._run_and_record(tokens_B, slots_B, reach)
        recorded.tokens.copy_(tokens_B)
        recorded.slots.copy_(slots_B)
        recorded.graph.replay()
        return recorded.logits

    def _run(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Tensor:
        mask = self._mask.set_up(self._rows, slots_B[:, None], reach, is_whole=True)
        return _pass(self._model, tokens_B[:, None], mask)

    def _run_with_held(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Tensor:
        with self._casts:
            return self._run(tokens_B, slots_B, reach)

    def _run_and_record(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Tensor:
        """Run the pass without a graph, then record it as a graph.

        The first pass allocates workspaces, which cannot be allocated during a recording. If it waits for the device,
        it is not recorded, because a recording that fails half-way corrupts later random numbers.
        """
        try:
            with torch.cuda.device(tokens_B.device), _no_device_sync():
                torch.clear_autocast_cache()  # copies from other passes, which `_casts` does not hold
                logits = self._run_with_held(tokens_B, slots_B, reach)
            with torch.cuda.device(tokens_B.device):
                self._recorded[reach] = self._record(tokens_B, slots_B, reach)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.is_recording = False
            _unrecordable.add(self._model)
            message = str(error).partition("\n")[0]
            logger.warning("rollouts run without CUDA graphs: the pass for one token cannot be recorded (%s)", message)
            return self._run(tokens_B, slots_B, reach)
        return logits

    def _record(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> _Recording:
        """Return a recording of the pass.

        torch.cuda.graph is not used, because it runs the garbage collector, which takes longer than the pass in a
        training process. All recordings are made on the same stream, because only then can they share a memory pool.
        """
        tokens, slots = tokens_B.clone(), slots_B.clone()
        graph = torch.cuda.CUDAGraph()
        stream = self._capture_stream = self._capture_stream or torch.cuda.Stream()
        current_stream = torch.cuda.current_stream()
        stream.wait_stream(current_stream)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits = self._run_with_held(tokens, slots, reach)
            finally:
                if self._casts.were_recorded:
                    # These copies are only filled by replays, so no other pass may use them.
                    torch.clear_autocast_cache()
                graph.capture_end()
        current_stream.wait_stream(stream)
        self._pool = self._pool or graph.pool()
        return _Recording(graph, tokens, slots, logits)


@contextmanager
def _no_device_sync() -> Iterator[None]:
    """Raise an error inside the block if an operation waits for a CUDA device, as far as PyTorch detects it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch warns that this mode is a prototype and does not detect all such operations.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _pass(model: Any, ids_bn: Tensor, mask: _RowMask) -> Tensor:
    """Return the logits (b, V) after the last column. They are valid only for rows that have a token in that column."""
    positions = mask.slots.clamp(max=mask.cache.capacity - 1)
    output = model(input_ids=ids_bn, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1)
    return output.logits[:, -1]


def why_not_kept(model: Any, longest: int) -> str | None:
    """Return why this model cannot generate rows of up to `longest` tokens with the cache, or None if it can."""
    reason = _why_never(model) or _why_too_long(model.config, longest)
    if reason is not None:
        return reason
    reasons = _trials.setdefault(model, {})
    setting = f"{model.device} {compute_dtype(model)} {usual_attention(model)}"
    if setting not in reasons:
        with eval_mode(model):
            reasons[setting] = _try_rows(model)
    return reasons[setting]


def _why_never(model: Any) -> str | None:
    is_fsdp1 = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if is_fsdp1 or is_sharded(model) or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "the weights are spread over processes"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "the weights are on several devices"
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model has an encoder"
    if has_attention_dropout(model) or any(
        isinstance(module, nn.Dropout) and module.training and module.p for module in model.modules()
    ):
        return "dropout is on while generating"
    if usual_attention(model) == "eager":
        return "the attention is eager; load the model with attn_implementation='sdpa' if it supports that"
    return why_no_tree(model.config)


def _why_too_long(config: Any, longest: int) -> str | None:
    window = shortest_window(config)
    if window is not None and longest > window:
        return f"rows of up to {longest} tokens are longer than the sliding window of {window}"
    limit, why = max_invariant_length(config)
    return None if limit is None or longest <= limit else f"rows of up to {longest} tokens, {why}"


def _try_rows(model: Any) -> str | None:
    try:
        return _first_objection(model)
    except torch.OutOfMemoryError:  # a RuntimeError, but no evidence against the model
        raise
    except _REFUSALS as error:
        return f"the model fails with cached rows: {type(error).__name__}: {error}"[:200]


def _first_objection(model: Any) -> str | None:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Fixed ids, spread over the vocabulary by a prime factor.
    rows = [[(7919 * (31 * row + slot + 1)) % vocabulary for slot in range(size)] for row, size in enumerate(_LENGTHS)]
    whole = [_plain_logits(model, row) for row in rows]
    cache = KeyValueRows(len(rows), max(_LENGTHS))
    with accept_self_attending_masks(model):
        for ends in zip(*_PIECES, strict=True):
            read_tokens(model, cache, [row[:end] for row, end in zip(rows, ends, strict=True)])
        layers = getattr(text_config(model.config), "num_hidden_layers", 1)
        if cache.num_layers < layers:
            return f"only {cache.num_layers} of {layers} layers use attention; the state of the others is not cached"
        worst = _worst_step(model, cache, rows, whole)
    half = cache.dtype in (torch.float16, torch.bfloat16)
    if not worst <= (0.1 if half else 1e-3):  # negated, so that NaN fails too
        return f"logits with cached rows differ from those of plain passes by {worst:.1e} (relative)"
    return None


def _worst_step(model: Any, cache: KeyValueRows, rows: list[list[int]], whole: list[Tensor]) -> float:
    """Read three more tokens of every row one at a time, and return the largest difference from the logits of whole
    passes.
    """
    step = NextTokens(model, cache, record=False)
    gaps: list[float] = []
    for ahead in range(3):
        slots = [min(pieces[-1] + ahead, size - 1) for pieces, size in zip(_PIECES, _LENGTHS, strict=True)]
        tokens = [row[slot] for row, slot in zip(rows, slots, strict=True)]
        tokens_B, slots_B = (torch.tensor(numbers, device=model.device) for numbers in (tokens, slots))
        logits = step.logits(tokens_B, slots_B, max(_LENGTHS))
        gaps += [_gap(whole[row][slot], logits[row]) for row, slot in enumerate(slots)]
    return max(gaps)


def _plain_logits(model: Any, row: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits[0].float()


def _gap(expected: Tensor, logits: Tensor) -> float:
    return float((logits.float() - expected).norm() / expected.norm().clamp_min(1e-12))
