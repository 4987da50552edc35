"""Generate rollouts with a key-value cache, as a replacement for the sampling loop of transformers' `generate`.

Whatever the rollouts in a group share is computed once, and the cache of a rollout is kept for its next turn:

    prompts   equal rows are read once and copied, as are the leading tokens that all rows share
    turns     inside `rollout()` a row continues from the cache of its last turn, up to the first different token
    steps     recorded as CUDA graphs on a GPU (`generation.row_cache`)
    ends      once many rows have ended, only the other rows are computed

Tokens are chosen in the same way as in transformers. Calls that are not supported (beam search, an unknown logits
processor, a model that `row_cache.why_not_kept` rules out) fall back to transformers' own loop, with one warning per
reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.trainer.objective.attention.attend import accept_self_attending_masks
from composer_replication.trainer.objective.distributed import eval_mode, merged_token_rows
from composer_replication.trainer.rollouts.generation.row_cache import (
    KeyValueRows,
    NextTokens,
    Tokens,
    keep_casts,
    read_tokens,
    shared_by_all,
    shared_length,
    why_not_kept,
)

logger = logging.getLogger(__name__)
# The inputs that transformers passes to the sampling loop for a plain text model; others are for multimodal models.
_USUAL_INPUTS = {"position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
# A shorter common prefix is not worth a separate pass.
_MIN_SHARED_PREFIX = 64
# The number of steps between checks for ended rows: on a GPU a check waits for all queued work.
_STEPS_BETWEEN_CHECKS = {"cuda": 8}
# If at most this fraction of the rows is still running, the others are dropped, which costs a new recording on a GPU.
_COMPACT_BELOW, _COMPACT_BELOW_ON_CPU = {"cuda": 0.5}, 0.75
# The cache is read up to a multiple of this many slots; on a GPU each multiple needs its own recording.
_STRETCH = {"cuda": 256}
# Stateless processors, whose scores depend only on a row's scores and ids, so that rows may be dropped between calls.
_PROCESSORS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensLogitsProcessor",
}
_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
_MODES = {"sample", "greedy_search"}


class _Unsupported(Exception):
    """Raised if a call must fall back to transformers' own loop; the message is the reason."""


@dataclass
class _CachedRows:
    """The cache of a batch's rows, and the length of each row's first prompt."""

    cache: KeyValueRows
    prompts: list[int]


@dataclass
class _Rollout:
    """The state of a batch of rollouts between two turns: their token budget and their cache."""

    budget: int | None
    is_kept: bool
    cached: _CachedRows | None = None


@dataclass
class RolloutGenerator:
    """A replacement for `model.generate` with a faster loop; `batch` limits how many rows are generated at once.

    The cache stores rows x (longest row + new tokens) x layers x 2 x key heads x head size numbers, and half as many
    more while only a few rows are running. `counts["cache_bytes"]` is the maximum number of bytes so far. If `batch` is
    set, the cache is not kept between turns.
    """

    batch: int | None = None
    counts: Counter[str] = field(default_factory=Counter[str])
    left_because: set[str] = field(default_factory=set[str])
    """The reasons why calls fell back to transformers' own loop, without duplicates."""
    _rollout: _Rollout | None = None

    def generate(self, model: Any, *args: Any, **inputs: Any) -> Tensor:
        """Return the result of `model.generate` for the same arguments."""
        with merged_token_rows(model):
            return self._generate(model.generate, args, inputs)

    @contextmanager
    def replace_generate(self, model: Any) -> Iterator[None]:
        """Replace `model.generate` inside the block, for engines that call this method themselves."""
        usual, own_generate = model.generate, model.__dict__.get("generate")

        def generate(*args: Any, **inputs: Any) -> Tensor:
            with merged_token_rows(model):
                return self._generate(usual, args, inputs)

        model.__dict__["generate"] = generate
        try:
            yield
        finally:
            del model.__dict__["generate"]
            if own_generate is not None:
                model.__dict__["generate"] = own_generate

    @contextmanager
    def rollout(self, *, budget: int | None = None, keep: bool = True) -> Iterator[None]:
        """Keep the cache between the turns of one batch of rollouts inside the block, where weights must not change.

        `budget` limits the tokens of a rollout after its first prompt, over all turns and including tool results.
        """
        self._rollout = _Rollout(budget, keep and self.batch is None)
        try:
            yield
        finally:
            self._rollout = None

    def _generate(self, usual: Callable[..., Tensor], args: Any, inputs: dict[str, Any]) -> Tensor:
        if "custom_generate" not in inputs:
            try:
                ids = usual(*args, **inputs, custom_generate=self._sample)
            except _Unsupported as reason:
                self._warn_once(str(reason))
            else:
                self.counts["fast_calls"] += 1
                return ids
        self.counts["usual_calls"] += 1
        return usual(*args, **inputs)

    def _warn_once(self, reason: str) -> None:
        if reason not in self.left_because:
            self.left_because.add(reason)
            logger.warning("rollouts use the slower loop of transformers: %s", reason)

    def _sample(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:
        """Sample tokens as transformers' own loop does, from the inputs that `generate` has prepared for that loop.

        The parameter names are those of that loop, because `generate` passes its inputs by name.
        """
        attention_mask: Tensor | None = model_kwargs.pop("attention_mask", None)
        other_inputs = {name for name, value in model_kwargs.items() if value is not None} - _USUAL_INPUTS
        if other_inputs:
            raise _Unsupported(f"the model is given {', '.join(sorted(other_inputs))}")
        if "logits_to_keep" not in model_kwargs:
            raise _Unsupported("the model computes the logits of every token it reads")
        if reason := _unsupported_setting(logits_processor, stopping_criteria, generation_config):
            raise _Unsupported(reason)
        rows = _rows_without_padding(input_ids, attention_mask)
        if rows is None:
            raise _Unsupported("prompts are not padded on the left")
        choice = _token_choice(logits_processor, stopping_criteria, generation_config, input_ids.device)
        if reason := why_not_kept(model, max(map(len, rows)) + choice.max_length - input_ids.shape[1]):
            raise _Unsupported(reason)
        size = self.batch or len(rows)
        starts = range(0, len(rows), size)
        with eval_mode(model), accept_self_attending_masks(model), keep_casts(model):
            parts = [self._sample_rows(model, input_ids[at : at + size], rows[at : at + size], choice) for at in starts]
        width = max(part.shape[1] for part in parts)
        return torch.cat(
            [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=int(choice.pad)) for part in parts]
        )

    def _sample_rows(self, model: Any, input_ids: Tensor, rows: list[Tokens], choice: _TokenChoice) -> Tensor:
        rollout = self._rollout or _Rollout(None, is_kept=False)
        max_new = choice.max_length - input_ids.shape[1]
        unequal, row_numbers = _unequal_rows(rows)
        cached_rows, rollout.cached = rollout.cached, None
        sources = (
            [None] * len(unequal)
            if cached_rows is None
            else _origins(unequal, cached_rows.cache.tokens, cached_rows.prompts)
        )
        prompts = [
            cached_rows.prompts[origin.row] if cached_rows and origin else len(row)
            for origin, row in zip(sources, unequal, strict=True)
        ]
        spent = [len(row) - prompt for row, prompt in zip(unequal, prompts, strict=True)]
        # A row whose budget is used up still gets one token, because a turn cannot be empty.
        budgets = [
            max_new if rollout.budget is None else max(1, min(max_new, rollout.budget - count)) for count in spent
        ]
        # All but the last token, whose pass gives the first new token.
        capacity = max(len(row) - 1 + new for row, new in zip(unequal, budgets, strict=True))
        cache = self._read(model, [row[:-1] for row in unequal], row_numbers, capacity, cached_rows, sources)
        self.counts["prompt_tokens"] += sum(map(len, rows)) - len(rows)
        loop = _TokenLoop(
            model, cache, input_ids, choice, [budgets[number] for number in row_numbers], is_kept=rollout.is_kept
        )
        ids = loop.run()
        self.counts["new_tokens"] += loop.num_new
        self.counts["cache_bytes"] = max(self.counts["cache_bytes"], loop.most_bytes)
        rollout.cached = _CachedRows(cache, [prompts[number] for number in row_numbers]) if rollout.is_kept else None
        return ids

    def _read(
        self,
        model: Any,
        rows: list[Tokens],
        row_numbers: list[int],
        capacity: int,
        cached_rows: _CachedRows | None,
        sources: Sequence[_Origin | None],
    ) -> KeyValueRows:
        """Return a cache that contains the rows, continuing the last turn's cache if there is one.

        `rows` are distinct; `row_numbers` has the index into `rows` for each row of the batch.
        """
        if cached_rows is None:
            cache = self._with_shared_prefix(model, rows, capacity)
        else:
            begins = [source or _Origin(0, 0) for source in sources]
            shared = [min(begin.shared, len(row)) for begin, row in zip(begins, rows, strict=True)]
            cache = cached_rows.cache.copy_rows([begin.row for begin in begins], shared, capacity, moved=True)
        self.counts["read_tokens"] += read_tokens(model, cache, rows)
        if len(rows) == len(row_numbers):
            return cache
        return cache.copy_rows(row_numbers, [len(rows[number]) for number in row_numbers], capacity, moved=True)

    def _with_shared_prefix(self, model: Any, rows: Sequence[Tokens], capacity: int) -> KeyValueRows:
        """Return a new cache that contains the common prefix of all rows, or nothing if the prefix is too short for
        a separate pass.
        """
        shared = shared_by_all(rows)
        if len(rows) < 2 or shared < _MIN_SHARED_PREFIX:
            return KeyValueRows(len(rows), capacity)
        first = KeyValueRows(1, shared)
        self.counts["read_tokens"] += read_tokens(model, first, [rows[0][:shared]])
        return first.copy_rows([0] * len(rows), [shared] * len(rows), capacity, moved=True)


class _TokenLoop:
    """The loop that samples one turn for a batch of rows.

    `input_ids` are padded on the left, and `cache` contains all tokens of each row except the last. `budgets` has the
    maximum number of new tokens for each row. If `is_kept` is set, the cache contains the tokens read for all rows when
    the loop ends; otherwise its contents are invalid afterwards.
    """

    def __init__(
        self,
        model: Any,
        cache: KeyValueRows,
        input_ids: Tensor,
        choice: _TokenChoice,
        budgets: list[int],
        *,
        is_kept: bool,
    ) -> None:
        device = input_ids.device
        self._model, self._choice, self._is_kept = model, choice, is_kept
        self._all = self._cache = cache
        self._width, self._most = input_ids.shape[1], max(budgets)
        self._ids = torch.nn.functional.pad(input_ids, (0, self._most), value=int(choice.pad))
        self._sampler = _Sampler(choice, len(budgets))
        self._starts = torch.tensor([len(row) for row in cache.tokens], device=device)
        self._ends = self._starts.clone()  # how far each row of the batch has been read
        # The following have one entry per row that is still computed: its number in the batch, its next slot, ...
        self._rows = torch.arange(len(budgets), device=device)
        self._slots = self._starts.clone()
        self._last_slots = self._starts + torch.tensor(budgets, device=device)
        self._running = torch.ones_like(self._slots, dtype=torch.bool)
        self._longest_start = int(self._starts.max())
        self._kind = device.type
        self._next = NextTokens(model, cache, record=self._kind == "cuda")
        self.num_new, self.most_bytes = 0, 0

    def run(self) -> Tensor:
        """Return the ids with the new tokens appended. Rows that end early are padded to the longest row."""
        tokens = self._ids[:, self._width - 1]
        for at in range(1, self._most + 1):
            tokens = self._advance(tokens, at)
            if at % _STEPS_BETWEEN_CHECKS.get(self._kind, 1) == 0 and at < self._most:
                running = int(self._running.sum())
                if not running:
                    break
                if running <= _COMPACT_BELOW.get(self._kind, _COMPACT_BELOW_ON_CPU) * len(self._rows):
                    tokens = self._drop_ended_rows(tokens)
        self._sampler.check()
        self._put_back()
        new = self._ends - self._starts
        self.num_new = int(new.sum())
        ids = self._ids[:, : self._width + int(new.max())]
        if self._is_kept:
            self._set_cached_tokens(ids)
        return ids

    def _advance(self, tokens: Tensor, at: int) -> Tensor:
        """Read one token per running row, and return each row's next token, which is its new token number `at`."""
        is_whole = len(self._rows) == len(self._ids)
        column = self._width + at - 1
        stretch = _STRETCH.get(self._kind, 1)
        # Round the used slots up to a whole number of stretches: -(-at // stretch) is the ceiling.
        reach = min(self._longest_start - (-at // stretch) * stretch, self._cache.capacity)
        logits = self._next.logits(tokens, self._slots, reach)
        before = self._ids[:, :column] if is_whole else self._ids[self._rows, :column]
        tokens = self._sampler.next_tokens(before, logits, None if is_whole else self._rows)
        tokens = tokens.where(self._running, self._choice.pad)
        self._ids[self._rows, column] = tokens
        # A row that ended keeps writing to the slot after its last token, which is never read.
        self._slots = self._slots + self._running
        self._running = self._running & ~torch.isin(tokens, self._choice.eos) & (self._slots < self._last_slots)
        self.most_bytes = max(self.most_bytes, self._num_bytes())
        return tokens

    def _drop_ended_rows(self, tokens: Tensor) -> Tensor:
        """Stop computing rows that have ended, and return the tokens of the remaining rows."""
        self._put_back()
        chosen = self._running.nonzero()[:, 0]
        # If the cache is kept, the running rows are copied out of the whole batch; otherwise they replace it.
        rows = self._rows[chosen].tolist() if self._is_kept else chosen.tolist()
        lengths = self._slots[chosen].tolist()
        self._cache = self._all.copy_rows(rows, lengths, self._all.capacity, moved=not self._is_kept)
        if not self._is_kept:
            self._all = self._cache
        names = ("_rows", "_slots", "_last_slots", "_running")
        for name in names:
            setattr(self, name, getattr(self, name)[chosen])
        self._next = NextTokens(self._model, self._cache, record=self._kind == "cuda")
        return tokens[chosen]

    def _put_back(self) -> None:
        """Copy the running rows' state back into the whole batch."""
        self._ends[self._rows] = self._slots
        if self._cache is not self._all:
            self._all.put_back(self._rows.tolist(), self._cache, int(self._slots.max()))

    def _set_cached_tokens(self, ids: Tensor) -> None:
        """Record which token ids of each row are in the cache."""
        # Skip the padding at the start of each row, and the last new token, which was chosen but never read.
        first = (self._width - 1 - self._starts).tolist()
        whole = zip(ids.tolist(), first, self._ends.tolist(), strict=True)
        self._all.tokens = [row[begin : begin + end] for row, begin, end in whole]

    def _num_bytes(self) -> int:
        return self._all.num_bytes + (self._cache.num_bytes if self._cache is not self._all else 0)


class _TokenChoice(NamedTuple):
    """The settings for choosing tokens and ending rows."""

    processors: Any
    is_sampled: bool
    eos: Tensor
    pad: Tensor
    """A tensor on the device, like `eos`: a number would be copied there in every step."""
    max_length: int


def _unsupported_setting(processors: Sequence[Any], criteria: Sequence[Any], config: Any) -> str | None:
    """Return the reason why a generation config is not supported, or None if it is."""
    unsupported = sorted({type(processor).__name__ for processor in processors} - _PROCESSORS)
    unsupported += sorted({type(criterion).__name__ for criterion in criteria} - _CRITERIA)
    if unsupported:
        return f"the generation config asks for {', '.join(unsupported)}"
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode not in _MODES:
        return f"the generation config asks for {mode}"
    if config.return_dict_in_generate:
        return "the generation config asks for return_dict_in_generate"
    if not config.use_cache:
        return "the generation config asks for use_cache=False"
    return None


def _token_choice(processors: Any, criteria: Sequence[Any], config: Any, device: torch.device) -> _TokenChoice:
    ends: list[Any] = [criterion.eos_token_id for criterion in criteria if hasattr(criterion, "eos_token_id")]
    eos = ends[0].to(device) if ends else torch.empty(0, dtype=torch.long, device=device)
    pad = config.pad_token_id if config.pad_token_id is not None else (int(eos[0]) if len(eos) else 0)
    return _TokenChoice(
        processors, bool(config.do_sample), eos, torch.tensor(int(pad), device=device), int(config.max_length)
    )


class _Sampler:
    """A sampler for the rows that are still running in a batch that started with `num_rows` rows."""

    def __init__(self, choice: _TokenChoice, num_rows: int) -> None:
        self._choice, self._num_rows = choice, num_rows
        self._is_sound: Tensor | None = None

    def next_tokens(self, ids_BT: Tensor, logits_BV: Tensor, running: Tensor | None) -> Tensor:
        """Return one token per row. `running` has the rows' indices in the whole batch, or is None if all rows are
        running.

        Random numbers are drawn for the whole batch, so that the tokens of a row do not depend on which other rows have
        ended.
        """
        scores = self._choice.processors(ids_BT, logits_BV.to(torch.float32, copy=True))
        if not self._choice.is_sampled:
            return scores.argmax(-1)
        probs = scores.softmax(-1)
        # The computation of torch.multinomial for one token (an exponential race) without its check for valid values,
        # which waits for the device in every step; `check` does that once at the end.
        noise = torch.empty(self._num_rows, probs.shape[1], device=probs.device).exponential_(1)
        noise = noise if running is None else noise[running]
        sound = probs.sum(-1).isfinite().all()
        self._is_sound = sound if self._is_sound is None else self._is_sound & sound
        return (probs / noise).argmax(-1)

    def check(self) -> None:
        """Raise InputError if any probability was NaN, as torch.multinomial would."""
        if self._is_sound is not None and not bool(self._is_sound):
            fix = "Check the weights for NaN; a lower learning rate or float32 may help."
            raise InputError(explain("probabilities of the next token", got="NaN", expected="finite numbers", fix=fix))


class _Origin(NamedTuple):
    """The cached row that a new row continues: its index in the cache, and the length of their common prefix."""

    row: int
    shared: int


def _unequal_rows(rows: Sequence[Tokens]) -> tuple[list[Tokens], list[int]]:
    """Return the distinct rows, and for each row of `rows` its index among the distinct rows."""
    numbers: dict[tuple[int, ...], int] = {}
    row_numbers = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
    return [list(row) for row in numbers], row_numbers


def _rows_without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tokens] | None:
    """Return the real tokens of each row, or None if any padding is not on the left."""
    rows: list[Tokens] = input_ids.tolist()
    if attention_mask is None:
        return rows
    # With left padding, all tokens after the first real one are real.
    real = attention_mask.bool()
    if bool((real[:, 1:] < real[:, :-1]).any()) or not bool(real[:, -1].all()):
        return None
    return [row[len(row) - count :] for row, count in zip(rows, real.sum(1).tolist(), strict=True)]


def _origins(rows: Sequence[Tokens], cached: Sequence[Tokens], prompts: Sequence[int]) -> list[_Origin | None]:
    """Return, for each row, the cached row with the longest common prefix, or None if the row begins with none of
    the cached prompts.

    `prompts` has the length of each cached row's prompt.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, (tokens, length) in enumerate(zip(cached, prompts, strict=True)):
        by_prompt.setdefault(tuple(tokens[:length]), []).append(number)
    lengths = sorted({len(prompt) for prompt in by_prompt}, reverse=True)

    def origin(row: Tokens) -> _Origin | None:
        for length in lengths:
            if candidates := by_prompt.get(tuple(row[:length])):
                shared_lengths = (_Origin(candidate, shared_length(cached[candidate], row)) for candidate in candidates)
                return max(shared_lengths, key=lambda origin: origin.shared)
        return None

    return [origin(row) for row in rows]
