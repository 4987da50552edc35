"""Comparing weights in every order of events: no comparison is given up that could still be made, and none stays open.

The first member says its sum and then offers to the next round; it may die before and after each of these, or leave,
and be replaced once it is dead. The other looks in two events, first whether it is over and then what was said. With
two open comparisons (`comparison_model.py`) its weights at the end are those of the later one that was said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from comparison_model import explore_two, replay

from composer_replication.diloco.rounds import comparing
from composer_replication.diloco.rounds.comparing import Verdict, _compare_digests

PROGRAM = ("say", "offer", "leave")
SUMS = ("equal", "other")


class World(NamedTuple):
    numbers: str  # what the first member's sum is to mine
    next: int = 0  # of its program
    alive: bool = True
    done: frozenset[str] = frozenset()
    replaced: bool = False
    looked: bool | None = None  # what the other saw first of its two reads, if it has made that
    verdict: Verdict = "open"

    @property
    def is_over(self) -> bool:
        return self.replaced or bool(self.done & {"offer", "leave"})

    @property
    def said(self) -> str | None:
        return self.numbers if "say" in self.done else None


def look(world: World) -> World:
    if world.looked is None:
        return world._replace(looked=world.is_over)
    return world._replace(looked=None, verdict=_compare_digests("equal", world.said, is_over=world.looked))


def look_the_other_way_round(world: World) -> World:
    if world.looked is None:
        return world._replace(looked=world.said is not None)
    said = world.numbers if world.looked else None
    return world._replace(looked=None, verdict=_compare_digests("equal", said, is_over=world.is_over))


def successors(world: World, program: tuple[str, ...], other: Callable[[World], World]) -> Iterator[World]:
    if world.alive and world.next < len(program):
        yield world._replace(next=world.next + 1, done=world.done | {program[world.next]})
    if world.alive:
        yield world._replace(alive=False)
    if not world.alive and not world.replaced:
        yield world._replace(replaced=True)
    if world.verdict == "open":
        yield other(world)


def explore(program: tuple[str, ...] = PROGRAM, other: Callable[[World], World] = look) -> set[World]:
    todo = [World(numbers) for numbers in SUMS]
    known = set(todo)
    while todo:
        world = todo.pop()
        if world.verdict == "never":
            assert world.said is None, f"given up, and then said: {world}"
        elif world.verdict != "open":
            assert world.verdict == world.said, f"another verdict than what was said: {world}"
        for after in successors(world, program, other):
            if after not in known:
                known.add(after)
                todo.append(after)
    return known


def test_a_comparison_is_given_up_only_when_nothing_will_be_said():
    worlds = explore()
    assert len(worlds) > 50
    assert {world.verdict for world in worlds} == {"equal", "other", "never", "open"}


def test_one_look_is_enough_once_the_first_member_has_said_it_went_on_or_is_gone():
    for world in explore():
        if world.verdict == "open" and world.looked is None and (world.is_over or world.said):
            assert look(look(world)).verdict != "open", world


@pytest.mark.parametrize(
    ("program", "other"),
    [(("offer", "say", "leave"), look), (PROGRAM, look_the_other_way_round)],
    ids=["says it after its offer", "looks the other way round"],
)
def test_the_explorer_sees_what_is_broken(program, other):
    with pytest.raises(AssertionError, match="given up, and then said"):
        explore(program, other)


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(comparing._log, "disabled", True)
    replay.cache_clear()
    yield
    replay.cache_clear()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("follows", [True, False])
def test_of_two_comparisons_the_later_decides_in_every_order_of_events(follows, note):
    worlds = explore_two(follows=follows)
    note(f"{len(worlds)} worlds of two comparisons, {replay.cache_info().currsize} states of what compares")
    assert {(world.other.end, world.other.weights) for world in worlds if world.other.end} >= {
        *(("agreed", weights) for weights in ("mine", "a", "b")),
        ("refused", "mine"),
    }


def oldest_first(comparisons, key):
    return sorted(comparisons, key=key, reverse=True)


def without_regard_to_later_ones(mine, said, *, is_over, later_is_open):
    return _compare_digests(mine, said, is_over=is_over)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("name", "broken"),
    [("sorted", oldest_first), ("_compare_digests", without_regard_to_later_ones)],
    ids=["order", "hold"],
)
def test_the_explorer_sees_an_earlier_comparison_that_undoes_a_later_one(name, broken, monkeypatch):
    monkeypatch.setattr(comparing, name, broken, raising=False)
    with pytest.raises(AssertionError, match=r": TwoComparisons\(firsts"):
        explore_two()
