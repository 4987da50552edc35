"""A conversation of which every word is known: for tests of those who sample the other side."""

from __future__ import annotations

import random


class Scripted:
    """Hears `answers` one after the other; turns end at their limit or with the end token."""

    def __init__(self, number: int, answers: int) -> None:
        self.draw, self.number, self._left = random.Random(number), number, answers
        self.heard: list[list[int]] = []

    def begin(self) -> list[int]:
        return [3 + self.number] * (2 + self.number)

    def hear(self, said: list[int]) -> list[int] | None:
        self.heard.append(list(said))
        self._left -= 1
        return None if self._left < 0 else [10 + self.number] * (1 + self._left)
