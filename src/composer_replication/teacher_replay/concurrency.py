"""Many sessions at once, and how the states of one session follow each other: prompt caches live on that.

A state's prompt begins with that of every earlier state of its session. So a provider that has read the longest one has
read them all: it is asked first, and the others side by side when it is answered. In order instead, each waits for the
one before it: slow, but right for caches that keep only the ends of prompts they have seen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import groupby, starmap
from typing import Any, NamedTuple, TypeVar

from composer_replication.types import TraceState

T = TypeVar("T")


class Numbered(NamedTuple):
    """A state and its place among all of them."""

    number: int
    state: TraceState


def session_of(state: TraceState) -> str:
    """What a state belongs to: its session if it says so, else what its id begins with."""
    return state.get("session_id") or state["state_id"].rpartition("::")[0] or state["state_id"]


def sessions(states: Iterable[TraceState]) -> Iterator[list[Numbered]]:
    """Neighbours of one session, together. One session at a time is held, so memory does not grow with the log."""
    for _, group in groupby(starmap(Numbered, enumerate(states)), key=lambda numbered: session_of(numbered.state)):
        yield list(group)


async def work_off(jobs: Iterable[T], work: Callable[[T], Awaitable[None]], *, num_workers: int) -> None:
    """Every job, `num_workers` at a time, taken from the iterator as workers become free. The first error ends all."""
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await work(job)

    await _together(worker, num_workers)


async def work_off_lanes(
    lanes: Iterable[Sequence[T]], work: Callable[[T], Awaitable[None]], *, num_workers: int
) -> None:
    """As `work_off`: of each lane the first job alone, and when it is done the others side by side.

    A lane is opened only when nothing of the open ones can be done, so few are held at a time.
    """
    waiting, ready = iter(lanes), deque[T]()
    num_opening, moved = 0, asyncio.Event()

    async def worker() -> None:
        nonlocal num_opening
        while True:
            lane = None if ready else next(waiting, None)
            if ready:
                await work(ready.popleft())
            elif lane is not None:
                num_opening += 1
                await work(lane[0])
                num_opening -= 1
                ready.extend(lane[1:])
                moved.set()
            elif num_opening:
                moved.clear()
                await moved.wait()
            else:
                return

    await _together(worker, num_workers)


async def _together(worker: Callable[[], Coroutine[Any, Any, None]], num_workers: int) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others are what it did to the rest


def by_teacher(states: Iterable[TraceState], num_teachers: int) -> Iterator[tuple[Sequence[Numbered], int]]:
    """A session for each teacher by itself: they do not wait for each other."""
    for group in sessions(states):
        for teacher in range(num_teachers):
            yield group, teacher
