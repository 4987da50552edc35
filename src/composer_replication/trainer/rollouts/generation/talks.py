"""Many conversations with one model: each goes on where it stands, nobody waits for the slowest turn.

TRL samples a turn of all rollouts, then calls all tools, then the next turn. Here a conversation that has heard its
answer goes on at once. Those at work are the first rows of the cache: what has ended takes no part in a pass.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from composer_replication.errors import InputError, explain
from composer_replication.trainer.objective.attention.attend import own_masks_taken
from composer_replication.trainer.objective.distributed import evaluating
from composer_replication.trainer.rollouts.generation.key_values import (
    KeyValueRows,
    Tokens,
    casts_kept,
    shared_by_all,
    shared_length,
)
from composer_replication.trainer.rollouts.generation.passes import NextTokens, read_tokens

MOST_TOKENS = 256
"""Of one turn."""


class Talk(Protocol):
    """A conversation: what it begins with, and what comes back for a turn; None when it is over."""

    draw: random.Random

    def begin(self) -> Sequence[int]: ...

    def hear(self, said: list[int]) -> Sequence[int] | None: ...


class _Cache:
    """Keys and values of every place, each written behind what the place holds already."""

    def __init__(self, num_layers: int, shape: tuple[int, int, int, int], like: Tensor) -> None:
        self._kept = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(num_layers)]
        self.places = self.slots = torch.zeros(0, dtype=torch.long)
        self.is_first_rows, self.longest = False, 0

    def update(self, keys: Tensor, values: Tensor, layer: int, *_ignored: object) -> tuple[Tensor, Tensor]:
        """What a model's layer calls: takes what is new, gives all that the pass may see."""
        both: list[Tensor] = []
        for buffer, new in zip(self._kept[layer], (keys, values), strict=True):
            buffer[self.places[:, None], :, self.slots] = new.transpose(1, 2)
            rows = buffer[: len(self.places)] if self.is_first_rows else buffer[self.places]
            both.append(rows[:, :, : self.longest])
        return both[0], both[1]

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self._kept:
            for buffer in layer:
                buffer[target, :, :length] = buffer[source, :, :length]


class _CacheSlot:
    """A row of the cache: who talks there, how much it holds and may hold, what was said of the turn, what waits."""

    def __init__(self, talk: Talk, *, room: int, most_new: int | None) -> None:
        self.talk, self.length, self.said = talk, 0, list[int]()
        self.waiting: Sequence[int] = talk.begin()
        self.room = room if most_new is None else min(room, len(self.waiting) + most_new)


class Talking:
    """At most `places` conversations at a time, of at most `room` tokens each; one that would be longer is over.

    With `most_new` also one that would have more tokens than that beyond those it began with.
    A share of the conversations may wait for their answers to be read together: one pass over many is cheaper.
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
        self._ends, self._room, self._temperature, self._most = frozenset(ends), room, temperature, places
        self._most_new = most_new
        # One slot more, into which padding is written and from which nothing is read.
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (places, config.num_key_value_heads, room + 1, head)
        weight = next(model.parameters())
        self._device = weight.device
        self._cache = _Cache(config.num_hidden_layers, shape, weight.detach())
        self._logits = torch.zeros(places, config.vocab_size, device=self._device)
        self._at: list[_CacheSlot] = []
        self.num_said = 0

    def run(self, talks: Iterable[Talk]) -> None:
        """Until all are over."""
        coming = deque(talks)
        while coming or self._at:
            while coming and len(self._at) < self._most:
                self._at.append(_CacheSlot(coming.popleft(), room=self._room, most_new=self._most_new))
            waiting = [row for row, cache_row in enumerate(self._at) if cache_row.waiting]
            if 4 * len(waiting) >= len(self._at):
                self._feed(waiting, [self._at[row].waiting for row in waiting])
                for row in waiting:
                    self._at[row].waiting = ()
            self._say()

    def _say(self) -> None:
        """A token of everybody who does not wait; whoever has ended leaves its row to the last one."""
        talking = [row for row, cache_row in enumerate(self._at) if not cache_row.waiting]
        tokens = self._pick(talking)
        picked: dict[int, int] = dict(zip(talking, tokens, strict=True))
        self._feed(range(len(self._at)), [[picked[row]] if row in picked else [] for row in range(len(self._at))])
        for row in reversed(talking):
            cache_row = self._at[row]
            cache_row.said.append(picked[row])
            is_full = cache_row.length + 1 >= cache_row.room
            if picked[row] not in self._ends and len(cache_row.said) < MOST_TOKENS and not is_full:
                continue
            self.num_said += len(cache_row.said)
            answer = cache_row.talk.hear(cache_row.said)
            cache_row.said = []
            if answer is None or cache_row.length + len(answer) >= cache_row.room:
                self._leave(row)
            else:
                cache_row.waiting = answer

    def _leave(self, row: int) -> None:
        last = len(self._at) - 1
        if row != last:
            self._cache.move(last, row, self._at[last].length)
            self._logits[row] = self._logits[last]
            self._at[row] = self._at[last]
        self._at.pop()

    @torch.inference_mode()
    def _feed(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Add tokens to some rows; afterwards `_logits` say what comes next there."""
        counts = torch.tensor([len(row_tokens) for row_tokens in tokens])
        ids = torch.zeros(len(rows), int(counts.max()), dtype=torch.long)
        for number, row_tokens in enumerate(tokens):
            ids[number, : len(row_tokens)] = torch.tensor(row_tokens, dtype=torch.long)
        held = torch.tensor([self._at[row].length for row in rows])
        offsets = torch.arange(ids.shape[1])
        positions = held[:, None] + offsets
        cache, device = self._cache, self._device
        cache.is_first_rows, cache.longest = list(rows) == list(range(len(rows))), int((held + counts).max())
        # All that is known of the pass is known here: it goes to the device once, and nothing comes back before a pick.
        row_numbers, has_tokens, last = torch.tensor(list(rows)), counts > 0, counts - 1
        slots = torch.where(offsets < counts[:, None], positions, self._room)
        sees = torch.arange(cache.longest) <= positions[:, :, None]
        cache.places, cache.slots = row_numbers.to(device), slots.to(device)
        hidden = self._model.model(
            input_ids=ids.to(device),
            attention_mask=sees[:, None].to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
        )[0]
        ends = hidden[has_tokens.nonzero().squeeze(1).to(device), last[has_tokens].to(device)]
        self._logits[row_numbers[has_tokens].to(device)] = self._model.lm_head(ends).float()
        for row, row_tokens in zip(rows, tokens, strict=True):
            self._at[row].length += len(row_tokens)

    def _pick(self, rows: Sequence[int]) -> list[int]:
        lucks = [self._at[row].talk.draw for row in rows]
        return _drawn_tokens(self._logits[list(rows)], lucks, temperature=self._temperature)


def _drawn_tokens(logits_BV: Tensor, lucks: Sequence[random.Random], *, temperature: float) -> list[int]:
    """Temperature 0 takes the likeliest. Each conversation has luck of its own, whoever else is there."""
    if not temperature:
        return logits_BV.argmax(-1).tolist()
    sums = torch.softmax(logits_BV.double() / temperature, dim=-1).cumsum(-1)
    draws = torch.tensor([[generator.random()] for generator in lucks], dtype=torch.float64).to(sums.device)
    tokens = torch.searchsorted(sums, draws * sums[:, -1:]).squeeze(1)
    return tokens.clamp(max=sums.shape[1] - 1).tolist()


# Many conversations with one model on a GPU: `talks`, with every token's pass recorded as a CUDA graph.
#
# A conversation has a row of kept keys for itself. All rows take part in every pass, since a recording has one shape;
# what belongs to a row that waits or has ended is written into the spare slot and read by nobody. A new conversation
# goes on from what its prompt shares with the row's last one: the tools' schemas are read once.

# Slots are looked at up to the end of a stretch: each is one recording.
_STRETCH = 256


class _CacheRow:
    """Who talks in a row of the cache, all its tokens so far, what was said of the turn, and what may still come."""

    def __init__(self, talk: Talk, *, room: int, most_new: int | None) -> None:
        self.talk, self.said = talk, Tokens()
        self.tokens: Tokens = list(talk.begin())
        self.room = room if most_new is None else min(room, len(self.tokens) + most_new)

    def take(self, token: int, ends: frozenset[int]) -> bool:
        """Add a token to the turn; False when the conversation is over."""
        self.said.append(token)
        self.tokens.append(token)
        is_full = len(self.tokens) + 1 >= self.room
        if token not in ends and len(self.said) < MOST_TOKENS and not is_full:
            return True
        turn, self.said = self.said, []
        answer = self.talk.hear(turn)
        if answer is None or len(self.tokens) + len(answer) >= self.room:
            return False
        self.tokens.extend(answer)
        return True


class RecordedTalking:
    """As `Talking`: the same conversations with the same luck, up to rounding; recorded where there is CUDA.

    The whole model is called, so that what wraps it (autocast of a training) holds here too.
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
        """Until all are over; what the recordings held goes back to the device, where training needs it."""
        self._run(talks)
        if self._is_on_gpu:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _run(self, talks: Iterable[Talk]) -> None:
        coming = deque(_CacheRow(talk, room=self._room, most_new=self._most_new) for talk in talks)
        self._check([len(row.tokens) for row in coming])
        with evaluating(self._model), own_masks_taken(self._model), casts_kept(self._model):
            cache = self._begun([row.tokens for row in coming])
            step = NextTokens(self._model, cache, record=self._is_on_gpu)
            rows: list[_CacheRow | None] = [None] * cache.num_rows
            while True:
                for number, row in enumerate(rows):
                    if row is None and coming:
                        rows[number] = new = coming.popleft()
                        num_shared = shared_length(cache.tokens[number], new.tokens[:-1])
                        del cache.tokens[number][num_shared:]
                if not any(rows):
                    return
                self._say(cache, step, rows)

    def _check(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            if not 0 < length <= self._room:
                got, expected = f"a conversation that begins with {length} tokens", f"1 to {self._room}"
                raise InputError(explain("recorded conversations", got=got, expected=expected))

    def _begun(self, prompts: Sequence[Tokens]) -> KeyValueRows:
        """Rows that hold what all prompts begin with."""
        num_rows = min(self._places, len(prompts))
        shared = min(shared_by_all(prompts), *(len(prompt) - 1 for prompt in prompts)) if prompts else 0
        if not shared:
            return KeyValueRows(num_rows, self._room)
        first = KeyValueRows(1, shared)
        read_tokens(self._model, first, [prompts[0][:shared]])
        return first.taken([0] * num_rows, [shared] * num_rows, self._room, moved=True)

    def _say(self, cache: KeyValueRows, step: NextTokens, rows: list[_CacheRow | None]) -> None:
        """A token of everybody who does not wait; those who do are read once they are a quarter of all."""
        waiting = [number for number, row in enumerate(rows) if row and len(row.tokens) - 1 > len(cache.tokens[number])]
        if 4 * len(waiting) >= sum(row is not None for row in rows):
            token_rows = [row.tokens[:-1] if row else cache.tokens[number] for number, row in enumerate(rows)]
            read_tokens(self._model, cache, token_rows)
            waiting = []
        talking = {number: row for number, row in enumerate(rows) if row and number not in waiting}
        logits = self._pass(cache, step, talking)
        lucks = [row.talk.draw for row in talking.values()]
        tokens = _drawn_tokens(logits, lucks, temperature=self._temperature)
        for (number, row), token in zip(talking.items(), tokens, strict=True):
            cache.tokens[number].append(row.tokens[-1])
            if not row.take(token, self._ends):
                rows[number] = None

    def _pass(self, cache: KeyValueRows, step: NextTokens, talking: dict[int, _CacheRow]) -> Tensor:
        """Read the last token of these rows, each in its own slot; logits of them, in their order."""
        spare = cache.capacity
        last = [talking[number].tokens[-1] if number in talking else 0 for number in range(cache.num_rows)]
        slots = [len(cache.tokens[number]) if number in talking else spare for number in range(cache.num_rows)]
        longest = max(slots[number] for number in talking) + 1
        reach = min(-(-longest // _STRETCH) * _STRETCH, cache.capacity)
        tokens_B, slots_B = torch.tensor([last, slots], device=self._model.device)
        logits_BV = step.logits(tokens_B, slots_B, reach)
        return logits_BV[torch.tensor(list(talking), device=logits_BV.device)].float()
