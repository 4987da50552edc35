"""Two open comparisons of one replica, with two first members, in every order of events.

`Comparisons` itself is run: what it reads comes from a world, and each of its reads is an event. A first member says
its weights, publishes them and goes on, and may die before and after each of these; that of the later step may have
taken the weights of the earlier one before. A wait ends when what is waited for is there, or cannot come any more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

from composer_replication.diloco.rounds.comparing import Comparisons, _StateComparison
from composer_replication.diloco.rounds.patience import StateUnreadable
from composer_replication.diloco.rounds.records import Layout
from composer_replication.diloco.rounds.settings import RunPosition

EARLIER, LATER = 3, 6
ENDS = {EARLIER: "go on", LATER: "leave"}
PROGRAMS = {EARLIER: ("say", "publish", "go on"), LATER: ("look", "say", "publish", "leave")}


class First(NamedTuple):
    """The first member of a step, and its weights."""

    step: int
    weights: str
    done: tuple[str, ...] = ()
    alive: bool = True
    replaced: bool = False

    @property
    def is_over(self) -> bool:
        return self.replaced or ENDS[self.step] in self.done

    @property
    def said(self) -> str | None:
        return self.weights if "say" in self.done else None

    def may_still(self, action: str) -> bool:
        return self.alive and action not in self.done


class Other(NamedTuple):
    """What `Comparisons` of another member holds, and its weights."""

    weights: str = "mine"
    open: tuple[_StateComparison, ...] = (_StateComparison(EARLIER, (EARLIER, 0), "mine"),)
    agreed: int = -1
    apart: _StateComparison | None = None
    given_up: frozenset[int] = frozenset()  # the steps that it said were not compared
    has_begun: bool = False  # the later one
    end: str = ""


class TwoComparisons(NamedTuple):
    """A world: both first members, and the one that compares, in the middle of what it does."""

    firsts: tuple[First, First]
    other: Other = Other()
    doing: str = ""
    reads: tuple[object, ...] = ()  # in what it is doing

    def first(self, step: int) -> First:
        return self.firsts[step == LATER]


class Unread(Exception):
    """What `Comparisons` would read next."""


class Replayed(Comparisons):
    """Reads what it is given, and stops where that ends."""

    def __init__(self, other: Other, reads: tuple[object, ...]) -> None:
        limits = SimpleNamespace(timeout_s=0.0, poll_s=0.0, grace_s=0.0)
        super().__init__(
            SimpleNamespace(settings=limits, layout=Layout(0), weights_digest=self._mine, load_matching=self._load), 0
        )
        self.agreed, self._open, self._unresolved = other.agreed, list(other.open), other.apart
        self.weights, self.given_up, self._reads = other.weights, set(other.given_up), iter(reads)

    def _read(self, kind: str, step: int):
        for value in self._reads:
            return value
        raise Unread(kind, step)

    def _mine(self, _place):
        return self.weights

    def _load(self, _store, place, numbers):
        if not self._read("load", place.step):
            return None
        self.weights = numbers
        return place

    def _is_over(self, _store, _place, compared):
        return self._read("is over", compared.step)

    def _first_digest(self, _store, step):
        return self._read("said", step)

    def _wait_while_alive(self, _store, _compared, look, **_limits):
        return look()

    def _wait_for_digest(self, _store, compared, _until):
        self._read("last word", compared.step)

    def _warn_not_compared(self, _place, compared, _why, _agreed=""):
        self.given_up.add(compared.step)


@functools.cache
def replay(other: Other, doing: str, reads: tuple[object, ...], follows: bool) -> Other | tuple[str, int]:
    """What the other is after what it does; or its next read."""
    mine, store, place = Replayed(other, reads), SimpleNamespace(uri="model"), RunPosition(2, 0, LATER)
    end = ""
    try:
        if doing == "finish":
            mine.finish(store, place, follows=follows)
            end = "agreed"
        else:
            mine.resolve(store, place, follows=follows)
        if doing == "begin":
            mine.begin(store, place, (LATER, 0), wait_s=0.0)
    except StateUnreadable:
        end = "refused"
    except Unread as read:
        return read.args
    has_begun = other.has_begun or doing == "begin"
    given_up = frozenset(mine.given_up)
    return Other(mine.weights, tuple(mine._open), mine.agreed, mine._unresolved, given_up, has_begun, end)


def answer(world: TwoComparisons, kind: str, step: int) -> tuple[object, ...]:
    """What a read gives; nothing while it is waited for."""
    first = world.first(step)
    if kind == "is over":
        return (first.is_over,)
    if kind == "said":
        return (first.said,)
    awaited = {"load": "publish", "last word": "say"}[kind]
    return () if first.may_still(awaited) else (awaited in first.done,)


def events(world: TwoComparisons, follows: bool) -> Iterator[TwoComparisons]:
    for at, first in enumerate(world.firsts):
        for after in events_of(first, world.first(EARLIER)):
            yield world._replace(firsts=(after, world.firsts[1]) if at == 0 else (world.firsts[0], after))
    if world.doing:
        after = replay(world.other, world.doing, world.reads, follows)
        if isinstance(after, Other):
            yield world._replace(other=after, doing="", reads=())
        else:
            for value in answer(world, *after):
                yield world._replace(reads=(*world.reads, value))
    elif not world.other.end:
        for doing in ("look", "finish" if world.other.has_begun else "begin"):
            yield world._replace(doing=doing)


def events_of(first: First, earlier: First) -> Iterator[First]:
    left = PROGRAMS[first.step][len(first.done) :]
    if first.alive and left:
        takes = left[0] == "look" and "publish" in earlier.done
        yield first._replace(done=(*first.done, left[0]), weights=earlier.weights if takes else first.weights)
    if first.alive:
        yield first._replace(alive=False)
    elif not first.replaced:
        yield first._replace(replaced=True)


def check(world: TwoComparisons, follows: bool) -> None:
    """The latest weights that were said are those at the end; nobody ends with others and without a word."""
    latest = next((first for first in reversed(world.firsts) if first.said is not None), None)
    for step in world.other.given_up:
        assert world.first(step).said is None or step < world.other.agreed, f"given up, and said: {world}"
    if world.other.agreed == LATER:
        assert world.other.weights == world.first(LATER).said, f"agreed on, and others: {world}"
    if (apart := world.other.apart) is not None and apart.step > world.other.agreed:
        assert world.other.weights == apart.weights_digest, f"replaced by earlier ones: {world}"
    if world.other.end == "agreed":
        assert not world.other.open, f"ended with an open one: {world}"
        assert world.other.weights == (latest.said if latest else "mine"), f"ended with others: {world}"
    if world.other.end == "refused":
        can_be_loaded = "publish" in latest.done and (follows or latest.step == LATER)
        assert not can_be_loaded, f"refused what could be loaded: {world}"


def explore_two(*, follows: bool = True) -> set[TwoComparisons]:
    firsts = ((First(EARLIER, one), First(LATER, two)) for one in ("mine", "a") for two in ("mine", "a", "b"))
    todo = [TwoComparisons(pair) for pair in firsts]
    known = set(todo)
    while todo:
        world = todo.pop()
        check(world, follows)
        for after in events(world, follows):
            if after not in known:
                known.add(after)
                todo.append(after)
    return known
