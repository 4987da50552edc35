"""A model of replicas, a store and faults around `decide`, for the explorer: every order of events, one at a time.

A replica reads the store and decides in one event and acts in another, so that what it acts on may be old by then: that
is a pause, a slow machine and a stale listing. It may crash before and after each action. Writing shards and then their
manifest is one event, because shards without a manifest are seen by nobody. Timers run out whenever that is worst.
Whoever created a seal or an outcome, or lost to another, may go on from the record that is there without a second look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from round_invariants import violations

from composer_replication.diloco.rounds.reading import (
    Offer,
    RoundView,
    _Attempt,
    _expected_ranks,
    _resolve_attempt,
    _view_with_outcome,
    _view_with_seal,
)
from composer_replication.diloco.rounds.records import OfferId, RoundOutcome, Seal
from composer_replication.diloco.rounds.round import (
    Action,
    CreateOutcome,
    CreateSeal,
    Follow,
    Heal,
    LocalReplica,
    MakeOffer,
    Reduce,
    Timers,
    Wait,
    _could_fork,
    decide,
)

decide = cache(decide)
DAMAGED = "damaged"  # a record that belongs elsewhere, in the place of an outcome
WILD = 1e6  # the largest number of an offer that went astray; the others' is 1
TIMERS = [Timers(grace=grace, reduce=late) for grace, late in product((False, True), repeat=2)]


class Round(NamedTuple):
    offers: frozenset[Offer] = frozenset()
    seals: tuple[Seal | None, ...] = ()
    means: frozenset[tuple[int, int]] = frozenset()  # attempt, shard
    outcomes: tuple[tuple[Any, ...], ...] = ()  # by attempt and slot
    commits: frozenset[tuple[int, RoundOutcome]] = frozenset()  # that were written, and in which attempt
    here: frozenset[int] = frozenset()
    corrupt: frozenset[OfferId] = frozenset()
    hidden: frozenset[OfferId] = frozenset()  # their manifests are damaged
    forgotten: bool = False  # retention took its payloads

    @property
    def commit(self) -> RoundOutcome | None:
        return next((outcome for _, outcome in self.commits), None)


class Decision(NamedTuple):
    """What to do, and what was seen when that was decided."""

    attempt: int
    seal: Seal | None
    action: Action
    slot: int = 0


class Replica(NamedTuple):
    rank: int
    claim: int = 0
    alive: bool = True
    step: int = 0
    base: str = "start"
    weight: float = 1.0
    first_trial: int = 0
    tried: frozenset[int] = frozenset()
    unreadable: frozenset[OfferId] = frozenset()
    pending: Decision | None = None
    followed: tuple[RoundOutcome, ...] = ()  # commits, from its own first step on


class World(NamedTuple):
    rounds: tuple[Round, ...]
    replicas: tuple[Replica, ...]
    published: tuple[int, str] = (0, "start")  # the newest state: its step and its history
    crashes: int = 0
    restarts: int = 0
    corruptions: int = 0
    wild: int = 0
    misplaced: int = 0


@dataclass(frozen=True)
class Rules:
    replicas: int = 2
    rounds: int = 2
    shards: int = 1
    quorum: int = 1
    crashes: int = 1
    restarts: int = 1
    corruptions: int = 1
    wild: int = 0  # offers far larger than the others'
    misplaced: int = 0  # records of other keys in the place of outcomes, before or after those were written
    forgets: bool = True  # retention may take any round that a published state is newer than

    def start(self) -> World:
        return World((Round(),) * (self.rounds + 1), tuple(Replica(rank) for rank in range(self.replicas)))


def base_after(base: str, step: int, outcome: RoundOutcome) -> str:
    members = ",".join(f"{member.id.rank}.{member.id.claim}.{member.id.trial}" for member in outcome.members)
    return f"{base}/{step}:{members}"


def seen_by(world: World, step: int, rules: Rules) -> RoundView:
    here = world.rounds[step]
    ended, current = ended_attempts(here.outcomes)
    attempt = len(ended)
    before = world.rounds[step - 1].commit if step else None
    return RoundView(
        expected=_expected_ranks(before, here.here, (), rules.replicas),
        offers=frozenset(offer for offer in here.offers if offer.id not in here.hidden),
        ended=ended,
        seal=here.seals[attempt] if attempt < len(here.seals) else None,
        means=frozenset(shard for of, shard in here.means if of == attempt),
        outcome=current.outcome,
        slot=current.slot,
        abort=current.abort,
    )


@cache
def ended_attempts(outcomes: tuple[tuple[Any, ...], ...]) -> tuple[tuple[RoundOutcome, ...], _Attempt]:
    """Attempts that ended without a commit, and the one after them."""
    ended: list[RoundOutcome] = []
    while True:
        slots = outcomes[len(ended)] if len(ended) < len(outcomes) else ()
        attempt = _resolve_attempt([None if each == DAMAGED else each for each in slots])
        if attempt.outcome is None or attempt.outcome.result == "commit":
            return tuple(ended), attempt
        ended.append(attempt.outcome)


def successors(world: World, rules: Rules) -> Iterator[World]:
    for index, replica in enumerate(world.replicas):
        if replica.alive and replica.step < rules.rounds:
            if replica.pending is None:
                for decision in decisions(world, replica, rules):
                    yield with_replica(world, index, replica._replace(pending=decision))
            else:
                yield acted(world, index, rules)
                yield from hurried(world, index, rules)
                if isinstance(replica.pending.action, MakeOffer) and replica.weight and world.wild < rules.wild:
                    yield acted(world._replace(wild=world.wild + 1), index, rules, largest=WILD)
        if replica.alive and world.crashes < rules.crashes:
            gone = with_replica(world, index, replica._replace(alive=False, pending=None))
            yield gone._replace(crashes=world.crashes + 1)
        if not replica.alive and world.restarts < rules.restarts:
            yield restarted(world, index)
    if world.corruptions < rules.corruptions:
        yield from corrupted(world)
    if world.misplaced < rules.misplaced:
        yield from misplaced(world)
    if rules.forgets:
        yield from forgotten(world)


def decisions(world: World, replica: Replica, rules: Rules) -> set[Decision]:
    """What it may do next, whichever of its timers have run out. Waiting changes nothing."""
    return decided(world, seen_by(world, replica.step, rules), replica, rules)


def decided(world: World, seen: RoundView, replica: Replica, rules: Rules) -> set[Decision]:
    me = LocalReplica(
        rank=replica.rank,
        claim=replica.claim,
        base=replica.base,
        spec="spec",
        quorum=rules.quorum,
        world_size=rules.replicas,
        first_trial=replica.first_trial,
        tried=replica.tried,
        unreadable=replica.unreadable,
    )
    actions = {decide(seen, me, timers) for timers in TIMERS}
    seal = seen.seal if isinstance(seen.seal, Seal) else None
    if world.rounds[replica.step + 1].offers:  # which is looked at before the round is ended another time
        actions = {Heal() if _could_fork(seen, action) else action for action in actions}
    return {Decision(seen.attempt, seal, action, seen.slot) for action in actions if not isinstance(action, Wait)}


def with_replica(world: World, index: int, replica: Replica) -> World:
    replicas = (*world.replicas[:index], replica, *world.replicas[index + 1 :])
    return world._replace(replicas=replicas)


def with_round(world: World, step: int, changed: Round) -> World:
    return world._replace(rounds=(*world.rounds[:step], changed, *world.rounds[step + 1 :]))


def acted(world: World, index: int, rules: Rules, *, largest: float = 1.0) -> World:
    replica = world.replicas[index]
    assert replica.pending is not None
    attempt, seal, action, slot = replica.pending
    replica = replica._replace(pending=None)
    world = with_replica(world, index, replica)
    here = world.rounds[replica.step]
    if isinstance(action, MakeOffer):
        shards = rules.shards if replica.weight else 0
        name = OfferId(replica.rank, replica.claim, action.trial)
        offer = Offer(name, str(name), replica.base, "spec", replica.weight, shards, largest)
        world = with_replica(world, index, replica._replace(tried=replica.tried | {action.trial}))
        return with_round(world, replica.step, here._replace(offers=here.offers | {offer}))
    if isinstance(action, CreateSeal):
        return with_round(world, replica.step, here._replace(seals=created(here.seals, attempt, action.seal)))
    if isinstance(action, Reduce):
        return reduced(world, index, attempt, action)
    if isinstance(action, CreateOutcome):
        return with_round(world, replica.step, ended(here, attempt, slot, proposed(seal, action)))
    if isinstance(action, Follow):
        return followed(world, index, action.outcome)
    assert isinstance(action, Heal), action
    return healed(world, index)


def proposed(seal: Seal | None, action: CreateOutcome) -> RoundOutcome:
    assert seal is not None, "an outcome is proposed for a seal that was seen"
    return RoundOutcome(action.result, seal.base, "spec", seal.members, bad=action.bad)


def ended(here: Round, attempt: int, slot: int, outcome: RoundOutcome) -> Round:
    """An outcome was tried in a slot."""
    attempts = here.outcomes + ((),) * (attempt + 1 - len(here.outcomes))
    slots = created(attempts[attempt], slot, outcome)
    written = {(attempt, outcome)} if slots[slot] == outcome and outcome.result == "commit" else set()
    outcomes = (*attempts[:attempt], slots, *attempts[attempt + 1 :])
    return here._replace(outcomes=outcomes, commits=here.commits | written)


def hurried(world: World, index: int, rules: Rules) -> Iterator[World]:
    """A seal or an outcome was tried, and the next action is decided from what was seen before and what is there now.

    What was seen may be as old as the attempt: no mean, no outcome. Offers that it did not hold are given to it here,
    which allows more than can happen.
    """
    replica = world.replicas[index]
    assert replica.pending is not None
    attempt, seal, action, slot = replica.pending
    if not isinstance(action, CreateSeal | CreateOutcome):
        return
    after = acted(world, index, rules)
    here = after.rounds[replica.step]
    seen = RoundView(frozenset(), offers=here.offers, ended=ended_attempts(here.outcomes)[0][:attempt], seal=seal)
    if isinstance(action, CreateSeal):
        seen = _view_with_seal(seen, there(here.seals, attempt, action.seal))
    else:
        outcome = there(here.outcomes[attempt], slot, proposed(seal, action))
        seen = None if outcome == DAMAGED else _view_with_outcome(seen, outcome)
    for decision in decided(after, seen, replica, rules) if seen is not None else ():
        yield with_replica(after, index, after.replicas[index]._replace(pending=decision))


def there(slots: tuple, attempt: int, _mine: object) -> Any:
    """The record that counts, whoever created it."""
    return slots[attempt]


def created(slots: tuple, attempt: int, value: object) -> tuple:
    """Atomic create: the first one stays."""
    filled = slots + (None,) * (attempt + 1 - len(slots))
    return filled if filled[attempt] is not None else (*filled[:attempt], value, *filled[attempt + 1 :])


def reduced(world: World, index: int, attempt: int, action: Reduce) -> World:
    replica = world.replicas[index]
    here = world.rounds[replica.step]
    seal = here.seals[attempt]
    assert seal is not None, "only a sealed attempt is reduced"
    bad = {member.id for member in seal.members if member.weight}
    if not here.forgotten:  # else all of them are gone
        bad &= here.corrupt | here.hidden
    if bad or here.forgotten:
        return with_replica(world, index, replica._replace(unreadable=replica.unreadable | bad))
    means = here.means | {(attempt, shard) for shard in action.shards}
    return with_round(world, replica.step, here._replace(means=means))


def followed(world: World, index: int, outcome: RoundOutcome) -> World:
    replica = world.replicas[index]
    if outcome.result == "void":
        trials = 1 + max(member.id.trial for member in outcome.members)
        anew = replica._replace(first_trial=trials, tried=frozenset(), weight=1.0)
        return with_replica(world, index, anew)
    if world.rounds[replica.step].forgotten:
        return healed(world, index)
    step, base = replica.step + 1, base_after(replica.base, replica.step, outcome)
    member = (replica.rank, replica.claim) in {each.id[:2] for each in outcome.members}
    moved = Replica(replica.rank, replica.claim, step=step, base=base, followed=(*replica.followed, outcome))
    world = with_replica(world, index, moved)
    if not member:
        following = world.rounds[step]
        world = with_round(world, step, following._replace(here=following.here | {replica.rank}))
    return world._replace(published=max(world.published, (step, base)))


def healed(world: World, index: int) -> World:
    replica = world.replicas[index]
    step, base = world.published
    assert step >= replica.step, "a state is never older than its reader"
    return with_replica(world, index, Replica(replica.rank, replica.claim, step=step, base=base, weight=0.0))


def restarted(world: World, index: int) -> World:
    rank, claim = world.replicas[index][:2]
    step, base = world.published
    world = with_replica(world, index, Replica(rank, claim + 1, step=step, base=base))
    return world._replace(restarts=world.restarts + 1)


def corrupted(world: World) -> Iterator[World]:
    for step, each in enumerate(world.rounds):
        if each.commit is None:  # later it makes no difference: the means are there, or the round is forgotten
            for offer in each.offers:
                if offer.weight and offer.id not in each.corrupt:
                    changed = each._replace(corrupt=each.corrupt | {offer.id})
                    yield with_round(world, step, changed)._replace(corruptions=world.corruptions + 1)
                if offer.id not in each.hidden:
                    changed = each._replace(hidden=each.hidden | {offer.id})
                    yield with_round(world, step, changed)._replace(corruptions=world.corruptions + 1)


def misplaced(world: World) -> Iterator[World]:
    """A copy of another record in the place of an outcome, whether that was written or is to come."""
    for step, each in enumerate(world.rounds[:-1]):
        for attempt in range(len(each.seals)):
            slots = each.outcomes[attempt] if attempt < len(each.outcomes) else ()
            for slot in range(len(slots) + 1):
                if slot == len(slots) or slots[slot] != DAMAGED:
                    attempts = each.outcomes + ((),) * (attempt + 1 - len(each.outcomes))
                    changed = (*slots[:slot], DAMAGED, *slots[slot + 1 :])
                    outcomes = (*attempts[:attempt], changed, *attempts[attempt + 1 :])
                    yield with_round(world, step, each._replace(outcomes=outcomes))._replace(
                        misplaced=world.misplaced + 1
                    )


def forgotten(world: World) -> Iterator[World]:
    slowest = min((each.step for each in world.replicas if each.alive), default=0)
    for step, each in enumerate(world.rounds[: world.published[0]]):
        # Else there is nobody to miss it. Retention keeps a round until the one after it was committed as well.
        if not each.forgotten and slowest <= step and (not world.misplaced or world.rounds[step + 1].offers):
            yield with_round(world, step, each._replace(forgotten=True))


def is_stuck(world: World, rules: Rules) -> bool:
    """A replica waits for ever, although there is a quorum that could end its round.

    Whoever has finished the last round modelled is with nobody any more, as a replica that left.
    """
    waiting = [each for each in world.replicas if each.alive and each.step < rules.rounds]
    if not waiting or any(decisions(world, each, rules) or each.pending for each in waiting):
        return False
    step = min(each.step for each in waiting)
    present = {each.rank for each in waiting if each.step == step}
    seen = seen_by(world, step, rules)
    offered = {offer.id.rank for offer in seen.offers if offer.id not in seen.spent}
    return len(present | offered) >= rules.quorum


def explore(rules: Rules) -> tuple[int, int]:
    """The worlds that can be reached, and how many of them end every round. AssertionError on a wrong one."""
    todo, known, ends = [rules.start()], {rules.start()}, 0
    while todo:
        world = todo.pop()
        wrong = list(violations(world))
        assert not wrong, f"{wrong}\n{world}"
        assert not is_stuck(world, rules), f"stuck: {world}"
        ends += all(each.step == rules.rounds for each in world.replicas if each.alive)
        for after in successors(world, rules):
            if after not in known:
                known.add(after)
                todo.append(after)
    return len(known), ends
