"""Many conversations with one model on a GPU: `talks`, with every token's pass recorded as a CUDA graph.

A conversation has a row of kept keys for itself. All rows take part in every pass, since a recording has one shape;
what belongs to a row that waits or has ended is written into the spare slot and read by nobody. A new conversation goes
on from what its prompt shares with the row's last one: the tools' schemas are read once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.objective.adapters import evaluating
from composer_replication.objective.attention.attend import own_masks_taken
from composer_replication.rollouts.generation.casts import casts_kept
from composer_replication.rollouts.generation.key_values import KeyValueRows
from composer_replication.rollouts.generation.passes import NextTokens, read_tokens
from composer_replication.rollouts.generation.talks import MOST_TOKENS, Talk, drawn_tokens
from composer_replication.rollouts.generation.token_rows import Tokens, shared_by_all, shared_length

# Slots are looked at up to the end of a stretch: each is one recording.
_STRETCH = 256


class _Row:
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
        coming = deque(_Row(talk, room=self._room, most_new=self._most_new) for talk in talks)
        self._check([len(row.tokens) for row in coming])
        with evaluating(self._model), own_masks_taken(self._model), casts_kept(self._model):
            cache = self._begun([row.tokens for row in coming])
            step = NextTokens(self._model, cache, record=self._is_on_gpu)
            rows: list[_Row | None] = [None] * cache.num_rows
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

    def _say(self, cache: KeyValueRows, step: NextTokens, rows: list[_Row | None]) -> None:
        """A token of everybody who does not wait; those who do are read once they are a quarter of all."""
        waiting = [number for number, row in enumerate(rows) if row and len(row.tokens) - 1 > len(cache.tokens[number])]
        if 4 * len(waiting) >= sum(row is not None for row in rows):
            token_rows = [row.tokens[:-1] if row else cache.tokens[number] for number, row in enumerate(rows)]
            read_tokens(self._model, cache, token_rows)
            waiting = []
        talking = {number: row for number, row in enumerate(rows) if row and number not in waiting}
        logits = self._pass(cache, step, talking)
        lucks = [row.talk.draw for row in talking.values()]
        tokens = drawn_tokens(logits, lucks, temperature=self._temperature)
        for (number, row), token in zip(talking.items(), tokens, strict=True):
            cache.tokens[number].append(row.tokens[-1])
            if not row.take(token, self._ends):
                rows[number] = None

    def _pass(self, cache: KeyValueRows, step: NextTokens, talking: dict[int, _Row]) -> Tensor:
        """Read the last token of these rows, each in its own slot; logits of them, in their order."""
        spare = cache.capacity
        last = [talking[number].tokens[-1] if number in talking else 0 for number in range(cache.num_rows)]
        slots = [len(cache.tokens[number]) if number in talking else spare for number in range(cache.num_rows)]
        longest = max(slots[number] for number in talking) + 1
        reach = min(-(-longest // _STRETCH) * _STRETCH, cache.capacity)
        tokens_B, slots_B = torch.tensor([last, slots], device=self._model.device)
        logits_BV = step.logits(tokens_B, slots_B, reach)
        return logits_BV[torch.tensor(list(talking), device=logits_BV.device)].float()
