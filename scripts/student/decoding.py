"""Many conversations with one small model: each goes on where it stands, and a free place is taken at once."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

MOST_TOKENS = 256
"""Of one turn; the longest right turn of an easy task has about 120."""


class Talk(Protocol):
    """A conversation: what it begins with, and what comes back for a turn; None when it is over."""

    draw: random.Random

    def begin(self) -> list[int]: ...

    def hear(self, said: list[int]) -> list[int] | None: ...


class _Cache:
    """Keys and values of every place, each written behind what the place holds already."""

    def __init__(self, num_layers: int, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self._kept = [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in range(num_layers)]
        self.places = self.slots = torch.zeros(0, dtype=torch.long)
        self.longest = 0

    def update(self, keys: Tensor, values: Tensor, layer: int, *_ignored: object) -> tuple[Tensor, Tensor]:
        both: list[Tensor] = []
        for kept, new in zip(self._kept[layer], (keys, values), strict=True):
            kept[self.places[:, None], :, self.slots] = new.transpose(1, 2)
            is_all = len(self.places) == len(kept)
            both.append(kept[:, :, : self.longest] if is_all else kept[self.places, :, : self.longest])
        return both[0], both[1]


class Decoder:
    """`num_places` conversations at a time, of at most `room` tokens each; one that would be longer is over."""

    def __init__(
        self, model: torch.nn.Module, *, end: int, num_places: int = 32, room: int = 2048, temperature: float = 1.0
    ) -> None:
        config = model.config
        self._model, self._end, self._room, self._temperature = model, end, room, temperature
        # One slot more, into which padding is written and from which nothing is read.
        shape = (num_places, config.num_key_value_heads, room + 1, config.head_dim)
        self._device = next(model.parameters()).device
        self._cache = _Cache(config.num_hidden_layers, shape, self._device)
        self._lengths = [0] * num_places
        self._logits = torch.zeros(num_places, config.vocab_size)
        self.num_said = 0

    def run(self, talks: Iterable[Talk]) -> None:
        """Until all are over. Places that wait for a long text are served together, when a quarter of them waits."""
        coming, num_places = iter(talks), len(self._lengths)
        talking: dict[int, Talk] = {}
        said: dict[int, list[int]] = {}
        waiting: dict[int, list[int]] = {}
        while True:
            for place in range(num_places):
                if place not in talking and (talk := next(coming, None)) is not None:
                    talking[place], self._lengths[place], said[place] = talk, 0, []
                    waiting[place] = talk.begin()
            if not talking:
                return
            if waiting and (4 * len(waiting) >= len(talking)):
                self._feed(waiting)
                waiting = {}
            picked = {place: self._pick(place, talking[place].draw) for place in talking if place not in waiting}
            self._feed({place: [token] for place, token in picked.items()}, everywhere=True)
            for place, token in picked.items():
                said[place].append(token)
                is_full = self._lengths[place] + 1 >= self._room
                if token != self._end and len(said[place]) < MOST_TOKENS and not is_full:
                    continue
                self.num_said += len(said[place])
                answer = talking[place].hear(said[place])
                if answer is None or self._lengths[place] + len(answer) >= self._room:
                    del talking[place]
                else:
                    waiting[place], said[place] = answer, []

    @torch.inference_mode()
    def _feed(self, tokens: dict[int, list[int]], *, everywhere: bool = False) -> None:
        """Add tokens to some places; afterwards `_logits` say what comes next there.

        `everywhere` computes the other places too, for nothing: cheaper than copying out what these hold.
        """
        places = list(range(len(self._lengths))) if everywhere else list(tokens)
        counts = torch.tensor([len(tokens.get(place, ())) for place in places])
        ids = torch.zeros(len(places), int(counts.max()), dtype=torch.long)
        for row, place in enumerate(places):
            ids[row, : counts[row]] = torch.tensor(tokens.get(place, []), dtype=torch.long)
        offsets, held = torch.arange(ids.shape[1]), torch.tensor([self._lengths[place] for place in places])
        positions = held[:, None] + offsets
        cache = self._cache
        cache.places, cache.slots = torch.tensor(places), torch.where(offsets < counts[:, None], positions, self._room)
        cache.longest = int(torch.where(counts > 0, held + counts, 1).max())
        sees = torch.arange(cache.longest) <= positions[:, :, None]
        cache.places, cache.slots = cache.places.to(self._device), cache.slots.to(self._device)
        hidden = self._model.model(
            input_ids=ids.to(self._device),
            attention_mask=sees[:, None].to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
        )[0]
        rows = [row for row in range(len(places)) if counts[row]]
        said = [places[row] for row in rows]
        self._logits[said] = self._model.lm_head(hidden[rows, (counts[rows] - 1).tolist()]).cpu()
        for place, own in tokens.items():
            self._lengths[place] += len(own)

    def _pick(self, place: int, draw: random.Random) -> int:
        """Temperature 0 takes the likeliest."""
        logits = self._logits[place]
        if not self._temperature:
            return int(logits.argmax())
        sums = torch.softmax(logits.double() / self._temperature, dim=-1).cumsum(-1)
        return min(int(torch.searchsorted(sums, draw.random() * float(sums[-1]))), len(sums) - 1)


def load_model(folder: str, device: str = "cpu") -> torch.nn.Module:
    """The weights in fp32: the figures are those of the committed numbers, whatever a machine does with bf16."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).to(device).eval()
