"""Token after token, for rows that are read up to their last one, until all have ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composer_replication.rollouts.generation.choice import Choice, Chooser
from composer_replication.rollouts.generation.key_values import KeyValueRows
from composer_replication.rollouts.generation.passes import NextTokens

# Steps between two looks at which rows have ended: on a GPU a look waits for all that is queued.
_LOOK_EVERY = {"cuda": 8}
# Where no more than this share of the rows are running, they go on by themselves; on a GPU that costs a recording.
_FEW, _FEW_ELSEWHERE = {"cuda": 0.5}, 0.75
# Slots are looked at up to the end of a stretch of so many steps: on a GPU the steps of a stretch are one recording.
_STRETCH = {"cuda": 256}


class TokenLoop:
    """One turn of a batch. `input_ids` are padded on the left; `cache` has all of each row but its last token.

    `budgets` are the most new tokens of each row. With `is_kept` all rows are in the cache at the end as far as they
    were read; without, it is of no use any more.
    """

    def __init__(
        self, model: Any, cache: KeyValueRows, input_ids: Tensor, choice: Choice, budgets: list[int], *, is_kept: bool
    ) -> None:
        device = input_ids.device
        self._model, self._choice, self._is_kept = model, choice, is_kept
        self._all = self._cache = cache
        self._width, self._most = input_ids.shape[1], max(budgets)
        self._ids = torch.nn.functional.pad(input_ids, (0, self._most), value=int(choice.pad))
        self._chooser = Chooser(choice, len(budgets))
        self._starts = torch.tensor([len(row) for row in cache.tokens], device=device)
        self._ends = self._starts.clone()  # up to where each row of the batch is read
        # Of the rows that are computed: their numbers in the batch, and their next slots.
        self._rows = torch.arange(len(budgets), device=device)
        self._slots = self._starts.clone()
        self._last_slots = self._starts + torch.tensor(budgets, device=device)
        self._running = torch.ones_like(self._slots, dtype=torch.bool)
        self._longest_start = int(self._starts.max())
        self._kind = device.type
        self._next = NextTokens(model, cache, record=self._kind == "cuda")
        self.num_new, self.most_bytes = 0, 0

    def run(self) -> Tensor:
        """The ids with the new ones behind them, as wide as the longest row; rows that ended are padded."""
        tokens = self._ids[:, self._width - 1]
        for at in range(1, self._most + 1):
            tokens = self._advance(tokens, at)
            if at % _LOOK_EVERY.get(self._kind, 1) == 0 and at < self._most:
                running = int(self._running.sum())
                if not running:
                    break
                if running <= _FEW.get(self._kind, _FEW_ELSEWHERE) * len(self._rows):
                    tokens = self._only_running(tokens)
        self._chooser.check()
        self._put_back()
        new = self._ends - self._starts
        self.num_new = int(new.sum())
        ids = self._ids[:, : self._width + int(new.max())]
        if self._is_kept:
            self._note_tokens(ids)
        return ids

    def _advance(self, tokens: Tensor, at: int) -> Tensor:
        """Read these tokens and choose the ones behind them, the batch's new ones number `at`."""
        is_whole = len(self._rows) == len(self._ids)
        column = self._width + at - 1
        stretch = _STRETCH.get(self._kind, 1)
        reach = min(self._longest_start - (-at // stretch) * stretch, self._cache.capacity)
        logits = self._next.logits(tokens, self._slots, reach)
        before = self._ids[:, :column] if is_whole else self._ids[self._rows, :column]
        tokens = self._chooser.next_tokens(before, logits, None if is_whole else self._rows)
        tokens = tokens.where(self._running, self._choice.pad)
        self._ids[self._rows, column] = tokens
        # A row that ended waits at the slot behind it, which no token of it will be looked for in.
        self._slots = self._slots + self._running
        self._running = self._running & ~torch.isin(tokens, self._choice.eos) & (self._slots < self._last_slots)
        self.most_bytes = max(self.most_bytes, self._num_bytes())
        return tokens

    def _only_running(self, tokens: Tensor) -> Tensor:
        """Leave the rows that ended out of what is computed."""
        self._put_back()
        chosen = self._running.nonzero()[:, 0]
        rows = self._rows[chosen].tolist() if self._is_kept else chosen.tolist()
        lengths = self._slots[chosen].tolist()
        self._cache = self._all.taken(rows, lengths, self._all.capacity, moved=not self._is_kept)
        if not self._is_kept:
            self._all = self._cache
        names = ("_rows", "_slots", "_last_slots", "_running")
        for name in names:
            setattr(self, name, getattr(self, name)[chosen])
        self._next = NextTokens(self._model, self._cache, record=self._kind == "cuda")
        return tokens[chosen]

    def _put_back(self) -> None:
        self._ends[self._rows] = self._slots
        if self._cache is not self._all:
            self._all.put_back(self._rows.tolist(), self._cache, int(self._slots.max()))

    def _note_tokens(self, ids: Tensor) -> None:
        """A row's own tokens begin behind its padding; its last new one was chosen and never read."""
        first = (self._width - 1 - self._starts).tolist()
        whole = zip(ids.tolist(), first, self._ends.tolist(), strict=True)
        self._all.tokens = [row[begin : begin + end] for row, begin, end in whole]

    def _num_bytes(self) -> int:
        return self._all.num_bytes + (self._cache.num_bytes if self._cache is not self._all else 0)
