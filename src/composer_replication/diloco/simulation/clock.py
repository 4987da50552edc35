"""Events in the order of their time, and processes that wait for a time or for a signal.

A process is a generator: it yields seconds to sleep, or a Signal to wait for. Equal times run in the order they were
asked for, so that a run with one seed is one run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from itertools import count

Process = Generator["float | Signal", None, None]


class Signal:
    """Something that happens once; who waits for it goes on when it does."""

    def __init__(self) -> None:
        self.happened = False
        self.waiting: list[Callable[[], None]] = []


class Clock:
    """The time of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ended: set[int] = set()

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Do something at a time; never before now."""
        heapq.heappush(self._events, (max(seconds, self.now), next(self._order), event))

    def start(self, process: Process) -> int:
        """Run a process; the number is for `end`."""
        number = next(self._order)

        def step() -> None:
            if number in self._ended:
                return
            wait = next(process, None)
            if isinstance(wait, Signal):
                if wait.happened:
                    self.at(self.now, step)
                else:
                    wait.waiting.append(step)
            elif wait is not None:
                self.at(self.now + wait, step)

        self.at(self.now, step)
        return number

    def end(self, number: int) -> None:
        """A process that does nothing any more, wherever it waits."""
        self._ended.add(number)

    def happen(self, signal: Signal) -> None:
        signal.happened = True
        for step in signal.waiting:
            self.at(self.now, step)
        signal.waiting.clear()

    def run(self, until: Callable[[], bool]) -> None:
        """Until something is so, or nothing is left to happen."""
        while self._events and not until():
            self.now, _, event = heapq.heappop(self._events)
            event()
