"""Run many conversations with one model at once, each at its own pace: none waits for the slowest turn.

TRL samples a turn of all rollouts, then calls all tools, then samples the next turn. Here a conversation continues as
soon as it has its answer. `Talking` is for a small model on a CPU: the running conversations are the first rows of its
cache, and those that have ended cost nothing. `RecordedTalking` is for a GPU: all rows take part in every pass, because
a CUDA graph has a fixed shape, and rows that are waiting or have ended write to a spare slot.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from composer_replication.errors import InputError, explain
from composer_replication.trainer.objective.attention.attend import accept_self_attending_masks
from composer_replication.trainer.objective.distributed import eval_mode
from composer_replication.trainer.rollouts.generation.row_cache import (
    KeyValueRows,
    NextTokens,
    Tokens,
    keep_casts,
    read_tokens,
    shared_by_all,
    shared_length,
)

MAX_TURN_TOKENS = 256
# The cache is read up to a multiple of this many slots; each multiple needs its own recording.
_STRETCH = 256


class Talk(Protocol):
    """A conversation in token ids: `begin` returns the prompt, `hear` the answer to a turn, or None to end."""

    draw: random.Random
    """The random generator for its tokens, so that they do not depend on which other conversations are running."""

    def begin(self) -> Sequence[int]: ...

    def hear(self, said: list[int]) -> Sequence[int] | None: ...


class _Cache:
    """A cache of all conversations' keys and values, with the method `update` that a model's layers call."""

    def __init__(self, num_layers: int, shape: tuple[int, int, int, int], like: Tensor) -> None:
        self._layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(num_layers)]
        self.rows = self.slots = torch.zeros(0, dtype=torch.long)
        self.is_first_rows, self.longest = False, 0

    def update(self, keys: Tensor, values: Tensor, layer: int, *_ignored: object) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, and return all keys and values visible to the pass.

        The model calls this method.
        """
        visible: list[Tensor] = []
        for buffer, new in zip(self._layers[layer], (keys, values), strict=True):
            buffer[self.rows[:, None], :, self.slots] = new.transpose(1, 2)
            # A slice of the first rows is a view; other rows have to be copied.
            rows = buffer[: len(self.rows)] if self.is_first_rows else buffer[self.rows]
            visible.append(rows[:, :, : self.longest])
        return visible[0], visible[1]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row to another row."""
        for layer in self._layers:
            for buffer in layer:
                buffer[target, :, :length] = buffer[source, :, :length]


class _CacheSlot:
    """The state of a conversation in a row of `_Cache`: length, maximum length, current turn and unread tokens."""

    def __init__(self, talk: Talk, *, room: int, most_new: int | None) -> None:
        self.talk, self.length, self.turn = talk, 0, list[int]()
        self.waiting: Sequence[int] = talk.begin()
        self.room = room if most_new is None else min(room, len(self.waiting) + most_new)


class Talking:
    """A runner of conversations on a CPU: at most `places` at a time, of at most `room` tokens each.

    A conversation ends when it would exceed `room`, or `most_new` tokens after its prompt. Answers are read in batches,
    once a quarter of the conversations are waiting, because one pass over many answers is cheaper.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ends: Iterable[int],
        places: int = 32,
        room: int = 2048,
        most_new: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        config: Any = model.config
        self._model: Any = model
        self._ends, self._room, self._temperature, self._max_rows = frozenset(ends), room, temperature, places
        self._most_new = most_new
        # One spare slot, to which padding is written and which is never read. Not all configs contain the head size.
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (places, config.num_key_value_heads, room + 1, head)
        weight = next(model.parameters())
        self._device = weight.device
        self._cache = _Cache(config.num_hidden_layers, shape, weight.detach())
        self._logits = torch.zeros(places, config.vocab_size, device=self._device)
        self._rows: list[_CacheSlot] = []
        self.num_sampled = 0

    def run(self, talks: Iterable[Talk]) -> None:
        """Run all conversations until they end."""
        coming = deque(talks)
        while coming or self._rows:
            while coming and len(self._rows) < self._max_rows:
                self._rows.append(_CacheSlot(coming.popleft(), room=self._room, most_new=self._most_new))
            waiting = [row for row, cache_row in enumerate(self._rows) if cache_row.waiting]
            if 4 * len(waiting) >= len(self._rows):
                self._feed(waiting, [self._rows[row].waiting for row in waiting])
                for row in waiting:
                    self._rows[row].waiting = ()
            self._step()

    def _step(self) -> None:
        """Sample a token for every conversation without an unread answer, and remove conversations that have ended."""
        talking = [row for row, cache_row in enumerate(self._rows) if not cache_row.waiting]
        tokens = self._pick(talking)
        picked: dict[int, int] = dict(zip(talking, tokens, strict=True))
        # All rows take part, even those that get no token, because using the first rows of the cache needs no copy.
        self._feed(range(len(self._rows)), [[picked[row]] if row in picked else [] for row in range(len(self._rows))])
        for row in reversed(talking):
            cache_row = self._rows[row]
            cache_row.turn.append(picked[row])
            is_full = cache_row.length + 1 >= cache_row.room
            if picked[row] not in self._ends and len(cache_row.turn) < MAX_TURN_TOKENS and not is_full:
                continue
            self.num_sampled += len(cache_row.turn)
            answer = cache_row.talk.hear(cache_row.turn)
            cache_row.turn = []
            if answer is None or cache_row.length + len(answer) >= cache_row.room:
                self._remove(row)
            else:
                cache_row.waiting = answer

    def _remove(self, row: int) -> None:
        """Remove a conversation, and move the last one into its row."""
        last = len(self._rows) - 1
        if row != last:
            self._cache.move(last, row, self._rows[last].length)
            self._logits[row] = self._logits[last]
            self._rows[row] = self._rows[last]
        self._rows.pop()

    @torch.inference_mode()
    def _feed(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Read the given tokens of these rows, and store the logits for each row's next token in `_logits`."""
        counts = torch.tensor([len(row_tokens) for row_tokens in tokens])
        ids = torch.zeros(len(rows), int(counts.max()), dtype=torch.long)
        for number, row_tokens in enumerate(tokens):
            ids[number, : len(row_tokens)] = torch.tensor(row_tokens, dtype=torch.long)
        held = torch.tensor([self._rows[row].length for row in rows])
        offsets = torch.arange(ids.shape[1])
        positions = held[:, None] + offsets
        cache, device = self._cache, self._device
        cache.is_first_rows, cache.longest = list(rows) == list(range(len(rows))), int((held + counts).max())
        # All inputs are computed on the host and copied once, so that nothing waits for the device before sampling.
        row_numbers, has_tokens, last = torch.tensor(list(rows)), counts > 0, counts - 1
        slots = torch.where(offsets < counts[:, None], positions, self._room)
        # A token sees all slots in its row up to its own position.
        sees = torch.arange(cache.longest) <= positions[:, :, None]
        cache.rows, cache.slots = row_numbers.to(device), slots.to(device)
        hidden = self._model.model(
            input_ids=ids.to(device),
            attention_mask=sees[:, None].to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
        )[0]
        ends = hidden[has_tokens.nonzero().squeeze(1).to(device), last[has_tokens].to(device)]
        self._logits[row_numbers[has_tokens].to(device)] = self._model.lm_head(ends).float()
        for row, row_tokens in zip(rows, tokens, strict=True):
            self._rows[row].length += len(row_tokens)

    def _pick(self, rows: Sequence[int]) -> list[int]:
        generators = [self._rows[row].talk.draw for row in rows]
        return _sample(self._logits[list(rows)], generators, temperature=self._temperature)


def _sample(logits_BV: Tensor, generators: Sequence[random.Random], *, temperature: float) -> list[int]:
    """Sample one token per row with the row's own random generator, or return the likeliest tokens if temperature is
    0.
    """
    if not temperature:
        return logits_BV.argmax(-1).tolist()
    # Inversion of the cumulative distribution, in double precision because float32 sums over a large vocabulary are
    # inexact.
    sums = torch.softmax(logits_BV.double() / temperature, dim=-1).cumsum(-1)
    draws = torch.tensor([[generator.random()] for generator in generators], dtype=torch.float64).to(sums.device)
    tokens = torch.searchsorted(sums, draws * sums[:, -1:]).squeeze(1)
    return tokens.clamp(max=sums.shape[1] - 1).tolist()


class _CacheRow:
    """The state of a conversation in a row of `KeyValueRows`: all its tokens, its current turn, and its maximum
    length.
    """

    def __init__(self, talk: Talk, *, room: int, most_new: int | None) -> None:
        self.talk, self.turn = talk, Tokens()
        self.tokens: Tokens = list(talk.begin())
        self.room = room if most_new is None else min(room, len(self.tokens) + most_new)

    def take(self, token: int, ends: frozenset[int]) -> bool:
        """Add a token to the turn, and return whether the conversation continues."""
        self.turn.append(token)
        self.tokens.append(token)
        is_full = len(self.tokens) + 1 >= self.room
        if token not in ends and len(self.turn) < MAX_TURN_TOKENS and not is_full:
            return True
        finished_turn, self.turn = self.turn, []
        answer = self.talk.hear(finished_turn)
        if answer is None or len(self.tokens) + len(answer) >= self.room:
            return False
        self.tokens.extend(answer)
        return True


class RecordedTalking:
    """A runner of conversations like `Talking`, but with CUDA graphs on a GPU.

    It produces the same conversations from the same random numbers, except for rounding errors. A new conversation
    reuses the prefix that its prompt shares with the previous conversation in its row, such as the tool schemas. The
    whole model is called, so that wrappers (such as the autocast of a trainer) also apply here.
    """

    def __init__(
        self,
        model: Any,
        *,
        ends: Iterable[int],
        places: int = 32,
        room: int = 2048,
        most_new: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        self._model, self._ends, self._places = model, frozenset(ends), places
        self._room, self._most_new, self._temperature = room, most_new, temperature
        self._is_on_gpu = model.device.type == "cuda"

    def run(self, talks: Iterable[Talk]) -> None:
        """Run all conversations until they end, then free the memory of the recordings for training."""
        self._run(talks)
        if self._is_on_gpu:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _run(self, talks: Iterable[Talk]) -> None:
        coming = deque(_CacheRow(talk, room=self._room, most_new=self._most_new) for talk in talks)
        self._check([len(row.tokens) for row in coming])
        with eval_mode(self._model), accept_self_attending_masks(self._model), keep_casts(self._model):
            cache = self._with_shared_prefix([row.tokens for row in coming])
            step = NextTokens(self._model, cache, record=self._is_on_gpu)
            rows: list[_CacheRow | None] = [None] * cache.num_rows
            while True:
                for number, row in enumerate(rows):
                    if row is None and coming:
                        rows[number] = new = coming.popleft()
                        # All but the last token may be reused, whose pass gives the first new token.
                        num_shared = shared_length(cache.tokens[number], new.tokens[:-1])
                        del cache.tokens[number][num_shared:]
                if not any(rows):
                    return
                self._step(cache, step, rows)

    def _check(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            if not 0 < length <= self._room:
                got, expected = f"a conversation that begins with {length} tokens", f"1 to {self._room} tokens"
                raise InputError(explain("recorded conversations", got=got, expected=expected))

    def _with_shared_prefix(self, prompts: Sequence[Tokens]) -> KeyValueRows:
        """Return a cache in which every row contains the common prefix of all prompts."""
        num_rows = min(self._places, len(prompts))
        shared = min(shared_by_all(prompts), *(len(prompt) - 1 for prompt in prompts)) if prompts else 0
        if not shared:
            return KeyValueRows(num_rows, self._room)
        first = KeyValueRows(1, shared)
        read_tokens(self._model, first, [prompts[0][:shared]])
        return first.copy_rows([0] * num_rows, [shared] * num_rows, self._room, moved=True)

    def _step(self, cache: KeyValueRows, step: NextTokens, rows: list[_CacheRow | None]) -> None:
        """Sample a token for every conversation that has no unread answer.

        Unread answers are read first if at least a quarter of the conversations have one.
        """
        waiting = [number for number, row in enumerate(rows) if row and len(row.tokens) - 1 > len(cache.tokens[number])]
        if 4 * len(waiting) >= sum(row is not None for row in rows):
            token_rows = [row.tokens[:-1] if row else cache.tokens[number] for number, row in enumerate(rows)]
            read_tokens(self._model, cache, token_rows)
            waiting = []
        talking = {number: row for number, row in enumerate(rows) if row and number not in waiting}
        logits = self._pass(cache, step, talking)
        generators = [row.talk.draw for row in talking.values()]
        tokens = _sample(logits, generators, temperature=self._temperature)
        for (number, row), token in zip(talking.items(), tokens, strict=True):
            cache.tokens[number].append(row.tokens[-1])
            if not row.take(token, self._ends):
                rows[number] = None

    def _pass(self, cache: KeyValueRows, step: NextTokens, talking: dict[int, _CacheRow]) -> Tensor:
        """Read the last token of each row in `talking`, and return the logits for their next tokens in the same
        order.
        """
        spare = cache.capacity
        last = [talking[number].tokens[-1] if number in talking else 0 for number in range(cache.num_rows)]
        slots = [len(cache.tokens[number]) if number in talking else spare for number in range(cache.num_rows)]
        longest = max(slots[number] for number in talking) + 1
        reach = min(-(-longest // _STRETCH) * _STRETCH, cache.capacity)
        tokens_B, slots_B = torch.tensor([last, slots], device=self._model.device)
        logits_BV = step.logits(tokens_B, slots_B, reach)
        return logits_BV[torch.tensor(list(talking), device=logits_BV.device)].float()
