"""The protocol: one pure function from what a replica sees of a round to what it does next.

It knows no store, no clock and no tensor. `running.py` calls it with what it read and performs what it answers; the
model check calls it with every state that crashes, pauses, timers and corrupt objects can lead to.
docs/concepts/diloco.md has the state diagram and the invariants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from composer_replication.diloco.rounds.records import (
    Member,
    OfferId,
    RoundOutcome,
    Seal,
)

MOST_TIMES_THE_MEDIAN = 1000.0
ORDINARY_CHANGE = 10.0
"""No weight of a training that goes well moves further between two exchanges, however little the others' moved."""
_ABORTS = 2  # that can be read: then an attempt has ended, even if one of them is damaged later
MAX_TRIALS = 3  # how often a replica offers anew in one wait, when what it offered could not be read


@dataclass(frozen=True)
class Offer:
    """A contribution whose manifest is there and could be read."""

    id: OfferId
    manifest: str
    base: str
    spec: str
    weight: float
    num_shards: int
    largest: float = 0.0  # magnitude in its vector


@dataclass(frozen=True)
class RoundView:
    """One round as a replica read it. Each part may be older than the store is by now; none is newer."""

    expected: frozenset[int]  # ranks that are waited for until the grace is over
    offers: frozenset[Offer] = frozenset()
    ended: tuple[RoundOutcome, ...] = ()  # attempts that were aborted or void
    seal: Seal | Literal["unreadable"] | None = None  # of the attempt after them
    means: frozenset[int] = frozenset()  # shards of the mean that are there
    outcome: RoundOutcome | None = None  # a commit
    left: frozenset[int] = frozenset()  # ranks whose latest process said goodbye
    finished: frozenset[int] = frozenset()  # those of them that had all the commits that I need
    slot: int = 0  # where this attempt's outcome goes: past outcomes that cannot be read
    abort: RoundOutcome | None = None  # of this attempt, in one slot: it counts as soon as it is in two

    @property
    def attempt(self) -> int:
        return len(self.ended)

    @property
    def spent(self) -> frozenset[OfferId]:
        return frozenset(offer_id for outcome in self.ended for offer_id in outcome.spent())


class Attempt(NamedTuple):
    """How an attempt ended, as far as that can be read."""

    outcome: RoundOutcome | None = None
    slot: int = 0  # where an outcome would go
    abort: RoundOutcome | None = None  # the only one that can be read, where a second is needed


@dataclass(frozen=True)
class Myself:
    rank: int
    claim: int
    base: str
    spec: str
    quorum: int
    world_size: int
    first_trial: int = 0  # of this wait
    judges_sizes: bool = True  # whether offers far beyond the others' are left out
    tried: frozenset[int] = frozenset()  # trials that I made in it, whether or not their manifests can be read
    unreadable: frozenset[OfferId] = frozenset()  # sealed offers that stayed unreadable


@dataclass(frozen=True)
class Timers:
    """Which of my own clocks ran out. Nobody's time of day is compared with anybody else's."""

    grace: bool = False  # since a quorum of offers was seen
    reduce: bool = False  # since the last progress of a sealed attempt
    deadline: bool = False  # since the wait began
    alone: bool = False  # since so many had finished that no quorum can come


@dataclass(frozen=True)
class MakeOffer:
    trial: int


@dataclass(frozen=True)
class CreateSeal:
    seal: Seal


@dataclass(frozen=True)
class Reduce:
    shards: tuple[int, ...]


@dataclass(frozen=True)
class CreateOutcome:
    result: Literal["commit", "abort", "void"]
    bad: tuple[OfferId, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Follow:
    """The round is over for me: apply a commit, or end without one."""

    outcome: RoundOutcome


@dataclass(frozen=True)
class Heal:
    """The others come from a history that is not mine."""


@dataclass(frozen=True)
class Wait:
    missing: frozenset[int]  # ranks


@dataclass(frozen=True)
class Fail:
    kind: Literal["timeout", "spec", "offer", "left"]
    ranks: frozenset[int] = frozenset()


Action = MakeOffer | CreateSeal | Reduce | CreateOutcome | Follow | Heal | Wait | Fail


def decide(seen: RoundView, me: Myself, timers: Timers) -> Action:
    """What to do next, given what was seen."""
    void = next((outcome for outcome in seen.ended if outcome.result == "void" and _is_mine(outcome.members, me)), None)
    if void is not None:
        return Follow(void)
    if isinstance(seen.outcome, RoundOutcome):
        return Follow(seen.outcome) if seen.outcome.base == me.base else Heal()
    if seen.abort is not None:
        return CreateOutcome("abort", bad=seen.abort.bad, reason=seen.abort.reason)
    if timers.deadline:
        return Fail("timeout", _missing(seen, me))
    if seen.seal is None:
        return _before_the_seal(seen, me, timers)
    return _after_the_seal(seen, seen.seal, me, timers)


def _before_the_seal(view: RoundView, me: Myself, timers: Timers) -> Action:
    if not _counts(view, me):
        tried = _tried(view, me)
        if len(tried) < MAX_TRIALS:
            return MakeOffer(max(tried, default=me.first_trial - 1) + 1)
        if me.world_size - 1 < me.quorum:
            return Fail("offer", frozenset({me.rank}))
    offers = candidates(view, me)
    ranks = {offer.id.rank for offer in offers}
    if len(offers) >= me.quorum and (timers.grace or ranks >= view.expected):
        left_out = outliers(offers) if me.judges_sizes else frozenset()
        members = tuple(
            Member(offer.id, offer.manifest, 0.0 if offer.id in left_out else offer.weight) for offer in offers
        )
        return CreateSeal(Seal(me.base, me.spec, max(offer.num_shards for offer in offers), members))
    other_ranks = _of_another_spec(view, me) - ranks
    if me.world_size - len(other_ranks) < me.quorum:
        return Fail("spec", frozenset(other_ranks))
    if timers.alone and len(joining := may_join(view, me)) < me.quorum:
        return Fail("left", view.finished - joining)
    return Wait(_missing(view, me))


def _after_the_seal(view: RoundView, seal: Seal | Literal["unreadable"], me: Myself, timers: Timers) -> Action:
    if seal == "unreadable":
        # Somebody who could read it may commit meanwhile: the outcome decides, as always.
        return CreateOutcome("abort", reason="the seal is unreadable") if timers.reduce else Wait(frozenset())
    if seal.base != me.base:
        return Heal()
    if seal.spec != me.spec:
        return Fail("spec", frozenset(member.id.rank for member in seal.members))
    if not seal.weight:
        return CreateOutcome("void", reason="every member was healed in this round")
    absent = [shard for shard in range(seal.num_shards) if shard not in view.means]
    if not absent:  # also where an offer is unreadable by now: whoever cannot read a commit writes the same one
        return CreateOutcome("commit")
    bad = tuple(sorted(me.unreadable & {member.id for member in seal.members}))
    if bad:
        return CreateOutcome("abort", bad=bad, reason="sealed offers are unreadable")
    if my_shards := own_shards(seal, me, absent):
        return Reduce(my_shards)
    owners = frozenset(_owner(seal, shard)[0] for shard in absent)
    if timers.reduce or owners <= view.left:  # each begins at another one, so that not all do the same
        return Reduce((absent[me.rank % len(absent)],))
    return Wait(owners)


def how_it_ended(slots: Sequence[RoundOutcome | None]) -> Attempt:
    """Return how an attempt ended, by the outcomes in its slots; None for one that cannot be read.

    A later slot was written past a damaged one. One commit decides, and so does one void: whoever cannot read it finds
    the same seal and the same means, and writes the same into the next slot. An abort cannot be worked out again, so it
    has to be in two slots before anybody acts on it.
    """
    aborts: list[RoundOutcome] = []
    for outcome in filter(None, slots):
        if outcome.result != "abort":
            return Attempt(outcome)
        aborts.append(outcome)
        if len(aborts) == _ABORTS:
            return Attempt(outcome)
    return Attempt(slot=len(slots), abort=aborts[-1] if aborts else None)


def could_fork(seen: RoundView, action: Action) -> bool:
    """Return whether an action could end a round for the second time, if its commit was damaged or removed.

    Before it is done, one has to look whether anybody has offered to the next round.
    """
    if isinstance(action, CreateSeal):
        return not seen.expected <= {member.id.rank for member in action.seal.members}
    return isinstance(action, CreateOutcome) and action.result == "abort" and seen.abort is None


def after_the_seal(seen: RoundView, seal: Seal) -> RoundView | None:
    """What was seen before an attempt was sealed, with the seal that is there now; None where that is not enough.

    Nothing else has to be read anew: it is what a look right after the seal was created would have shown, less offers
    that I had not seen. So all of its members must be among those that I had.
    """
    return replace(seen, seal=seal) if _knows(seen, seal.members) else None


def after_the_outcome(seen: RoundView, outcome: RoundOutcome) -> RoundView | None:
    """The same for how an attempt ended. One that was not committed has another after it, which has to be looked at."""
    committed = outcome.result == "commit" and _knows(seen, outcome.members)
    return replace(seen, outcome=outcome) if committed else None


def own_shards(seal: Seal, me: Myself, absent: Iterable[int]) -> tuple[int, ...]:
    """Those shards of the mean that are mine to make."""
    return tuple(shard for shard in absent if _owner(seal, shard) == (me.rank, me.claim))


def expected_ranks(
    last: RoundOutcome | None, here: Iterable[int], left: Iterable[int], world_size: int
) -> frozenset[int]:
    """Who is waited for: the members of the last commit and those who said that they are back, less those who left.

    So a replica that died costs its peers one grace, not one in each round.
    """
    before = range(world_size) if last is None else (member.id.rank for member in last.members)
    return frozenset({*before, *here} - set(left))


def candidates(seen: RoundView, me: Myself) -> list[Offer]:
    """The offers that may be sealed, by rank: of my history and my shapes, the latest of each rank that has weight.

    What a process offered before it died is as good as any; the one that took its place has weight one round later.
    """
    latest: dict[int, Offer] = {}
    for offer in sorted(seen.offers, key=lambda offer: (offer.weight > 0, offer.id)):
        if offer.base == me.base and offer.spec == me.spec and offer.id not in seen.spent:
            latest[offer.id.rank] = offer
    return [latest[rank] for rank in sorted(latest)]


def outliers(offers: Sequence[Offer]) -> frozenset[OfferId]:
    """Offers of a replica that diverged: their largest number is far beyond that of the (lower) median offer.

    They are sealed without weight, so that all leave out the same ones; whoever offered them takes the others' mean.
    Beside replicas that stand still everyone is far beyond the median: a change of an ordinary size is always taken.
    """
    counted = [offer for offer in offers if offer.weight and offer.largest]
    if not counted:
        return frozenset()
    median = sorted(offer.largest for offer in counted)[(len(counted) - 1) // 2]
    most = max(MOST_TIMES_THE_MEDIAN * median, ORDINARY_CHANGE)
    return frozenset(offer.id for offer in counted if offer.largest > most)


def may_join(seen: RoundView, me: Myself) -> frozenset[int]:
    """Return the ranks that have offered to this round or may still do so: all but those that have finished."""
    offered = {offer.id.rank for offer in candidates(seen, me)}
    return frozenset({me.rank, *offered, *(set(range(me.world_size)) - seen.finished)})


def _counts(view: RoundView, me: Myself) -> bool:
    """Whether an offer of mine can be read and may be sealed."""
    return any(_is_me(offer.id, me) and offer.id not in view.spent for offer in view.offers)


def _tried(view: RoundView, me: Myself) -> frozenset[int]:
    """My trials of this wait: those that I made, though nobody can read them, and those of an attempt that ended."""
    known_ids = [*(offer.id for offer in view.offers), *view.spent]
    return me.tried | {offer_id.trial for offer_id in known_ids if _is_me(offer_id, me)}


def _owner(seal: Seal, shard: int) -> tuple[int, int]:
    return seal.members[shard % len(seal.members)].id[:2]


def _knows(view: RoundView, members: Iterable[Member]) -> bool:
    return {member.id for member in members} <= {offer.id for offer in view.offers}


def _is_me(offer: OfferId, me: Myself) -> bool:
    return offer[:2] == (me.rank, me.claim) and offer.trial >= me.first_trial


def _is_mine(members: Iterable[Member], me: Myself) -> bool:
    return any(_is_me(member.id, me) for member in members)


def _of_another_spec(view: RoundView, me: Myself) -> set[int]:
    return {offer.id.rank for offer in view.offers if offer.base == me.base and offer.spec != me.spec}


def _missing(view: RoundView, me: Myself) -> frozenset[int]:
    """Return the ranks that are waited for: those that left as well, where there is no quorum without them."""
    offered = {offer.id.rank for offer in candidates(view, me)}
    if len(view.expected | offered) < me.quorum:
        return frozenset(range(me.world_size)) - offered
    return view.expected - offered
