"""Run a model over rows of a `KeyValueRows` cache: new tokens of some rows at once, or the next token of every row.

On CUDA the pass for the next token is recorded as a graph, one for each length up to which the cache is read. Launching
its thousand kernels one by one takes the host several times as long as the device needs to run them. A model whose pass
cannot be recorded runs without graphs, with a warning.

`why_not_kept` tells whether a model can generate in this way. It checks the config first, and then runs an experiment
once per setting: it reads a few rows of unequal lengths in pieces, as generation does, and compares the logits with
those of plain passes over the whole rows. This detects what a config does not mention (a convolution, a recurrent
state, a bias by slots) before anything is sampled.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from composer_replication.trainer.objective.attention.attend import own_masks_taken, usual_attention
from composer_replication.trainer.objective.attention.forward import dropout_on
from composer_replication.trainer.objective.attention.passes import (
    compute_dtype,
    longest_alike,
    shortest_window,
    text_config,
    why_never,
)
from composer_replication.trainer.objective.distributed import evaluating, is_sharded
from composer_replication.trainer.rollouts.generation.key_values import Casts, KeyValueRows, RowMask, Tokens

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


def read_tokens(model: Any, cache: KeyValueRows, tokens_by_row: Sequence[Tokens]) -> int:
    """Read the tokens of each row that are not in the cache yet, and return their number without padding."""
    device = model.device
    mask = RowMask.over(cache, device)
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
        _pass(model, ids, mask.aimed(rows_b1, slots_bn, reach, is_fresh=not any(starts)))
        for row, piece in zip(rows, pieces, strict=True):
            cache.tokens[row].extend(piece)
        remaining = {row: count - width for row, count in todo if row in rows and count > width}
        todo = [*remaining.items(), *[pair for pair in todo if pair[0] not in rows]]
    return total


def _next_batch(todo: Sequence[tuple[int, int]], cache: KeyValueRows) -> tuple[list[int], int]:
    """Return the next pass: its rows, which are either all empty or all not, and its number of tokens per row."""
    first, count = todo[0]
    is_fresh = not cache.tokens[first]
    width = count if is_fresh else min(count, _MAX_WIDTH)
    max_rows = max(1, (_FRESH_TOKENS if is_fresh else _MORE_TOKENS) // width)
    candidates = [row for row, _ in todo if (not cache.tokens[row]) == is_fresh]
    return candidates[:max_rows], width


class _Recording(NamedTuple):
    """A CUDA graph with its input and output tensors, whose addresses it contains."""

    graph: Any
    tokens: Tensor
    slots: Tensor
    logits: Tensor


class NextTokens:
    """The pass that reads one more token of every row in a cache, and returns the logits for the next token."""

    def __init__(self, model: Any, cache: KeyValueRows, *, record: bool) -> None:
        self._model, self._cache = model, cache
        self._mask = RowMask.over(cache, model.device)
        self._rows = torch.arange(cache.num_rows, device=model.device)[:, None]
        self.is_recording = record and model not in _unrecordable
        self._recorded: dict[int, _Recording] = {}
        self._pool: Any = None
        self._capture_stream: torch.cuda.Stream | None = None
        self._casts = Casts(model)

    def logits(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Tensor:
        """Return logits (B, V), valid until the next call. Every slot of a running row must be below `reach`."""
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
        mask = self._mask.aimed(self._rows, slots_B[:, None], reach, is_whole=True)
        return _pass(self._model, tokens_B[:, None], mask)

    def _run_with_held(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Tensor:
        with self._casts:
            return self._run(tokens_B, slots_B, reach)

    def _run_and_record(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Tensor:
        """Run the pass, then record it.

        The plain pass allocates the workspaces that a recording cannot allocate. If the pass waits for the device, it
        is not recorded, because a recording that fails half-way corrupts later random numbers.
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

        torch.cuda.graph is avoided because it runs the garbage collector, which takes longer than the pass in a
        training process. All recordings use one stream, because only recordings on the same stream share the memory of
        a pool.
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
    """Make operations that wait for a CUDA device an error inside the block, as far as PyTorch detects them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch warns that this mode is a prototype and does not detect all such operations.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _pass(model: Any, ids_bn: Tensor, mask: RowMask) -> Tensor:
    """Return the logits (b, V) after the last column; they are only valid for rows that reach it."""
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
        with evaluating(model):
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
    if dropout_on(model) or any(
        isinstance(module, nn.Dropout) and module.training and module.p for module in model.modules()
    ):
        return "dropout is on while generating"
    if usual_attention(model) == "eager":
        return "the attention is eager; load the model with attn_implementation='sdpa' if it supports that"
    return why_never(model.config)


def _why_too_long(config: Any, longest: int) -> str | None:
    window = shortest_window(config)
    if window is not None and longest > window:
        return f"rows of up to {longest} tokens are longer than the sliding window of {window}"
    limit, why = longest_alike(config)
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
    with own_masks_taken(model):
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
    """Return the largest gap over a few more tokens of every row."""
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
