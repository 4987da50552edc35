"""Many sessions at once, the states of one session to one teacher in order: prompt caches live on that order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import groupby, starmap
from typing import NamedTuple, TypeVar

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
    for _, group in groupby(starmap(Numbered, enumerate(states)), key=lambda each: session_of(each.state)):
        yield list(group)


async def work_off(jobs: Iterable[T], work: Callable[[T], Awaitable[None]], *, num_workers: int) -> None:
    """Every job, `num_workers` at a time, taken from the iterator as workers become free. The first error ends all."""
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await work(job)

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
