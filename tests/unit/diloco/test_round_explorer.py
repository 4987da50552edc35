"""The protocol in every order of events: nothing wrong is reachable, and no round with a quorum waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import round_model
from hypothesis import given
from hypothesis import strategies as st
from round_model import Rules, explore

from composer_replication.diloco.rounds import round as protocol
from composer_replication.diloco.rounds.round import CreateOutcome, CreateSeal

SMALL = [
    Rules(rounds=1, corruptions=0, restarts=0),
    Rules(rounds=1, quorum=2, crashes=1, corruptions=0),
    Rules(rounds=1, crashes=0, restarts=0, corruptions=1),
    Rules(rounds=1, crashes=0, restarts=0, corruptions=0, misplaced=1),
    Rules(rounds=2, crashes=0, restarts=0, corruptions=0),
    Rules(rounds=1, crashes=0, restarts=0, corruptions=0, wild=2),
]
LARGE = [
    Rules(rounds=2, crashes=1, restarts=1, corruptions=0),
    Rules(rounds=1, shards=2, crashes=1, restarts=1, corruptions=1),
    Rules(replicas=3, rounds=1, quorum=2, crashes=1, restarts=0, corruptions=0),
    Rules(replicas=3, rounds=1, quorum=1, crashes=0, restarts=0, corruptions=1),
    Rules(rounds=1, crashes=1, restarts=1, corruptions=1, wild=1),
    Rules(replicas=3, rounds=1, quorum=2, crashes=0, restarts=0, corruptions=0, wild=2),
    Rules(rounds=1, crashes=0, restarts=0, corruptions=1, misplaced=1),
    Rules(rounds=2, crashes=0, restarts=0, corruptions=0, misplaced=1),
    Rules(rounds=1, crashes=1, restarts=1, corruptions=0, misplaced=1),
]


@pytest.mark.parametrize("rules", SMALL, ids=str)
def test_every_order_of_events_is_safe_and_ends(rules):
    worlds, ends = explore(rules)
    assert worlds > 100
    assert ends > 10


@pytest.mark.full
@pytest.mark.parametrize("rules", LARGE, ids=str)
def test_every_order_of_many_events_is_safe_and_ends(rules):
    worlds, ends = explore(rules)
    assert worlds > 5_000
    assert ends > 100


def commits_what_it_could_not_read(seen, me, timers):
    action = protocol.decide(seen, me, timers)
    return CreateOutcome("commit") if isinstance(action, CreateOutcome) and action.bad else action


def never_helps(seen, me, timers):
    """Nobody reduces the shards of a member that died."""
    return protocol.decide(seen, me, replace(timers, reduce=False))


def averages_everybody(seen, me, timers):
    """What went astray is sealed with its weight."""
    action = protocol.decide(seen, me, timers)
    if not isinstance(action, CreateSeal):
        return action
    weights = {offer.id: offer.weight for offer in seen.offers}
    members = tuple(member._replace(weight=weights[member.id]) for member in action.seal.members)
    return CreateSeal(replace(action.seal, members=members))


def overwritten(slots, attempt, value):
    """A store on which the last writer wins."""
    filled = slots + (None,) * (attempt + 1 - len(slots))
    return (*filled[:attempt], value, *filled[attempt + 1 :])


def aborts_with_the_mean_there(seen, me, timers):
    """An offer that cannot be read any more ends an attempt, although all of its mean is there."""
    action = protocol.decide(seen, me, timers)
    bad = tuple(sorted(me.unreadable & {member.id for member in seen.seal.members})) if seen.seal else ()
    return CreateOutcome("abort", bad=bad) if bad and isinstance(action, CreateOutcome) else action


def gives_up_what_it_cannot_read(seen, me, timers):
    """An attempt whose outcome cannot be read counts as aborted, even where it can be worked out again."""
    action = protocol.decide(seen, me, timers)
    return CreateOutcome("abort") if seen.slot and isinstance(action, CreateOutcome) else action


@pytest.mark.parametrize(
    ("name", "broken", "rules"),
    [
        ("decide", gives_up_what_it_cannot_read, Rules(rounds=1, crashes=0, corruptions=0, misplaced=1)),
        ("decide", aborts_with_the_mean_there, Rules(rounds=1, crashes=0, restarts=0, misplaced=1)),
        ("decide", never_helps, Rules(rounds=1, corruptions=0, restarts=0)),
        ("decide", commits_what_it_could_not_read, Rules(rounds=1, crashes=0)),
        ("decide", averages_everybody, Rules(rounds=1, crashes=0, corruptions=0, wild=1)),
        ("created", overwritten, Rules(rounds=1, crashes=0, corruptions=0)),
    ],
    ids=[
        "an outcome that cannot be read",
        "an abort beside the whole mean",
        "a dead member's shards",
        "unreadable offers",
        "wild offers",
        "create that overwrites",
    ],
)
def test_the_explorer_sees_what_is_broken(monkeypatch, name, broken, rules):
    monkeypatch.setattr(round_model, name, broken)
    with pytest.raises(AssertionError):
        explore(rules)


WIDE = Rules(replicas=4, rounds=3, shards=3, quorum=2, crashes=2, restarts=2, corruptions=2, wild=2)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]))
def test_walks_through_larger_worlds_are_safe_and_end(seed, quorum):
    """More replicas, rounds and faults than can be visited one and all: one drawn way through them at a time."""
    rules, dice = replace(WIDE, quorum=quorum), random.Random(seed)
    world, worlds = rules.start(), 0
    while after := list(round_model.successors(world, rules)):
        world, worlds = dice.choice(after), worlds + 1
        assert not list(round_model.violations(world)), world
        assert not round_model.is_stuck(world, rules), world
        assert worlds < 2000
