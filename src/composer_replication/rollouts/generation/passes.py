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
from weakref import WeakSet

import torch
from torch import Tensor, nn

from composer_replication.rollouts.generation.casts import Casts
from composer_replication.rollouts.generation.key_values import KeyValueRows, RowMask
from composer_replication.rollouts.generation.token_rows import Tokens

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
