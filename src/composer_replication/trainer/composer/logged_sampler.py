"""Which logged item comes next: a new order each time round, the same in every run, and known after a restart."""

from __future__ import annotations

import random
from typing import Any

from composer_replication.errors import InputError, StaleArtefactError, explain


class CyclingSampler:
    """Numbers 0 to size - 1 without end. Every process draws the same order and takes its own share of each draw."""

    def __init__(self, size: int, *, seed: int, process: int = 0, num_processes: int = 1) -> None:
        if size < 1:
            raise InputError(explain("logged items", got=size, expected="at least one"))
        self._size, self._seed, self._process, self._num_processes = size, seed, process, num_processes
        self._drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def draw(self, count: int) -> list[int]:
        """The next `count` of this process; all processes together take num_processes times as many."""
        first = self._drawn + self._process * count
        self._drawn += count * self._num_processes
        return [self._at(position) for position in range(first, first + count)]

    def _at(self, position: int) -> int:
        time_round, place = divmod(position, self._size)
        if self._order[0] != time_round:
            order = list(range(self._size))
            random.Random(f"{self._seed}:{time_round}").shuffle(order)  # noqa: S311 (an order, not a secret)
            self._order = time_round, order
        return self._order[1][place]

    def state(self) -> dict[str, Any]:
        return {"size": self._size, "seed": self._seed, "drawn": self._drawn}

    def load_state(self, tree: dict[str, Any]) -> None:
        if (tree["size"], tree["seed"]) != (self._size, self._seed):
            got, expected = f"{self._size} items, seed {self._seed}", f"{tree['size']} items, seed {tree['seed']}"
            fix = "Resume with the logged sessions the run began with."
            raise StaleArtefactError(explain("logged items", got=got, expected=expected, fix=fix))
        self._drawn = tree["drawn"]
