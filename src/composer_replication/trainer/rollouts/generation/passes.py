"""Passes of a model over rows whose keys are kept: new tokens of some rows at once, or the next token of every row.

On CUDA the next token's pass is recorded as a graph, one for each reach: launching its thousand kernels one
by one takes the host several times as long as the device needs to run them. A model whose pass cannot be recorded runs
unrecorded, and says so.
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
from composer_replication.trainer.rollouts.generation.key_values import (
    Casts,
    KeyValueRows,
    RowMask,
    Tokens,
)

logger = logging.getLogger(__name__)
# Tokens of one pass: enough to fill a device, and few enough that activations stay small beside the keys.
_FRESH_TOKENS, _MORE_TOKENS, _WIDEST = 16384, 8192, 512
_unrecordable: WeakSet[nn.Module] = WeakSet()


def read_tokens(model: Any, cache: KeyValueRows, wanted: Sequence[Tokens]) -> int:
    """Read what of each row is not in the cache yet; how many tokens that were, padding aside."""
    device = model.device
    mask = RowMask.over(cache, device)
    missing = [(row, len(tokens) - len(cache.tokens[row])) for row, tokens in enumerate(wanted)]
    todo = sorted(((row, count) for row, count in missing if count), key=lambda pair: -pair[1])
    total = sum(count for _, count in todo)
    while todo:
        rows, width = _next_batch(todo, cache)
        pieces = [wanted[row][len(cache.tokens[row]) :][:width] for row in rows]
        starts = [len(cache.tokens[row]) for row in rows]
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
    """The longest of those to be read, and more that are like it: all from nothing, or all behind something."""
    first, count = todo[0]
    is_fresh = not cache.tokens[first]
    width = count if is_fresh else min(count, _WIDEST)
    most = max(1, (_FRESH_TOKENS if is_fresh else _MORE_TOKENS) // width)
    alike = [row for row, _ in todo if (not cache.tokens[row]) == is_fresh]
    return alike[:most], width


class _Recorded(NamedTuple):
    graph: Any
    tokens: Tensor
    slots: Tensor
    logits: Tensor


class NextTokens:
    """The pass that reads one more token of every row of a cache and gives the logits behind it."""

    def __init__(self, model: Any, cache: KeyValueRows, *, record: bool) -> None:
        self._model, self._cache = model, cache
        self._mask = RowMask.over(cache, model.device)
        self._rows = torch.arange(cache.num_rows, device=model.device)[:, None]
        self.is_recording = record and model not in _unrecordable
        self._recorded: dict[int, _Recorded] = {}
        self._pool: Any = None
        self._aside: torch.cuda.Stream | None = None
        self._casts = Casts(model)

    def logits(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Tensor:
        """Logits (B, V); valid until the next call. Every slot of a running row is below `reach`."""
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
        """The first pass runs as it is, which makes the workspaces that a recording cannot make.

        If it asks the device for a number, no recording is begun: one that fails half-way breaks later random numbers.
        """
        try:
            with torch.cuda.device(tokens_B.device), _no_looks_at_the_device():
                torch.clear_autocast_cache()  # what other passes left there is held by nobody
                logits = self._run_with_held(tokens_B, slots_B, reach)
            with torch.cuda.device(tokens_B.device):
                self._recorded[reach] = self._record(tokens_B, slots_B, reach)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.is_recording = False
            _unrecordable.add(self._model)
            message = str(error).partition("\n")[0]
            logger.warning("rollouts: the pass of a token cannot be recorded as a CUDA graph (%s)", message)
            return self._run(tokens_B, slots_B, reach)
        return logits

    def _record(self, tokens_B: Tensor, slots_B: Tensor, reach: int) -> _Recorded:
        """Not by torch.cuda.graph, which collects garbage: in a training process that takes longer than the pass.

        All on one stream: memory of a pool is used again by recordings of the same stream alone.
        """
        tokens, slots = tokens_B.clone(), slots_B.clone()
        graph = torch.cuda.CUDAGraph()
        aside = self._aside = self._aside or torch.cuda.Stream()
        here = torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits = self._run_with_held(tokens, slots, reach)
            finally:
                if self._casts.were_recorded:  # made anew by every replay, holding nothing before: not for other passes
                    torch.clear_autocast_cache()
                graph.capture_end()
        here.wait_stream(aside)
        self._pool = self._pool or graph.pool()
        return _Recorded(graph, tokens, slots, logits)


@contextmanager
def _no_looks_at_the_device() -> Iterator[None]:
    """Inside, what makes the host wait for a CUDA device is an error, as far as PyTorch notices."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not notice everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _pass(model: Any, ids_bn: Tensor, mask: RowMask) -> Tensor:
    """Logits (b, V) behind the last column; rows that end before it have no use for them."""
    positions = mask.slots.clamp(max=mask.cache.capacity - 1)
    output = model(input_ids=ids_bn, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1)
    return output.logits[:, -1]


# Whether a model may generate from kept rows: its config is asked first, then an experiment is made, once a setting.
#
# The experiment reads a few rows of unequal lengths in pieces, as generation does, and holds the logits against those
# of plain passes over the whole rows. So what a config does not tell (a convolution, a recurrent state, a bias by
# slots) is found out before anything is sampled.

# As in `objective.attention.trial`: what models raise that were not written for such a mask.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
_LENGTHS, _PIECES = (23, 14, 31), ((0, 9, 20), (6, 6, 11), (0, 17, 28))
_tried: WeakKeyDictionary[nn.Module, dict[str, str | None]] = WeakKeyDictionary()


def why_not_kept(model: Any, longest: int) -> str | None:
    """Why this model cannot generate rows of up to so many tokens from kept keys; None where it can."""
    reason = _why_never(model) or _why_too_long(model.config, longest)
    if reason is not None:
        return reason
    reasons = _tried.setdefault(model, {})
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
        return "the weights lie on several devices"
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model has an encoder"
    if dropout_on(model) or any(
        isinstance(module, nn.Dropout) and module.training and module.p for module in model.modules()
    ):
        return "dropout is on while generating"
    if usual_attention(model) == "eager":
        return "its attention is written out (eager); load it with attn_implementation='sdpa' where it has that"
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
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except _REFUSALS as error:
        return f"it does not take rows of kept keys: {type(error).__name__}: {error}"[:200]


def _first_objection(model: Any) -> str | None:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rows = [[(7919 * (31 * row + slot + 1)) % vocabulary for slot in range(size)] for row, size in enumerate(_LENGTHS)]
    whole = [_plain_logits(model, row) for row in rows]
    cache = KeyValueRows(len(rows), max(_LENGTHS))
    with own_masks_taken(model):
        for ends in zip(*_PIECES, strict=True):
            read_tokens(model, cache, [row[:end] for row, end in zip(rows, ends, strict=True)])
        layers = getattr(text_config(model.config), "num_hidden_layers", 1)
        if cache.num_layers < layers:
            return f"of its {layers} layers {cache.num_layers} ask for attention; what the others keep cannot be kept"
        worst = _worst_step(model, cache, rows, whole)
    half = cache.dtype in (torch.float16, torch.bfloat16)
    if not worst <= (0.1 if half else 1e-3):  # so that NaN fails too
        return f"logits from kept keys differ from those of plain passes by {worst:.1e} of their size"
    return None


def _worst_step(model: Any, cache: KeyValueRows, rows: list[list[int]], whole: list[Tensor]) -> float:
    """The largest gap over a few tokens more of every row."""
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
