"""The protocol of a round: one pure function from what a replica sees to what it does next.

It knows no store, no clock and no tensor. `running.py` calls it with what it has read and performs the action that it
returns; the model check of the tests calls it with every state that crashes, pauses, timers and corrupt objects can
lead to. docs/concepts/diloco.md has the state diagram and the invariants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from composer_replication.diloco.rounds.records import Member, OfferId, RoundOutcome, Seal

MAX_TIMES_MEDIAN = 1000.0
ORDINARY_CHANGE = 10.0
"""A change up to this size always counts, however little the others changed. In a healthy training no weight changes
more between two exchanges.
"""
_ABORTS = 2  # readable aborts that end an attempt, so that it stays ended even if one of them is damaged later
MAX_TRIALS = 3  # how often a replica offers again in one wait, if its offer could not be read


@dataclass(frozen=True)
class Offer:
    """A contribution whose manifest exists and can be read."""

    id: OfferId
    manifest: str
    base: str
    spec: str
    weight: float
    num_shards: int
    largest: float = 0.0  # largest magnitude in its vector


@dataclass(frozen=True)
class RoundView:
    """One round as a replica has read it. A part may be older than the store; none is newer."""

    expected: frozenset[int]  # ranks to wait for until the grace is over
    offers: frozenset[Offer] = frozenset()
    ended: tuple[RoundOutcome, ...] = ()  # attempts that were aborted or void
    seal: Seal | Literal["unreadable"] | None = None  # of the attempt after those
    means: frozenset[int] = frozenset()  # shards whose mean exists
    outcome: RoundOutcome | None = None  # a commit
    departed: frozenset[int] = frozenset()  # ranks whose latest process has said goodbye
    finished: frozenset[int] = frozenset()  # the departed ranks that have all the commits that this replica needs
    slot: int = 0  # where this attempt's outcome goes, after outcomes that cannot be read
    abort: RoundOutcome | None = None  # of this attempt, in one slot only: it counts once it is in two

    @property
    def attempt(self) -> int:
        """The number of the open attempt."""
        return len(self.ended)

    @property
    def spent(self) -> frozenset[OfferId]:
        """The offers that no later attempt may use."""
        return frozenset(offer_id for outcome in self.ended for offer_id in outcome.spent())


class Attempt(NamedTuple):
    """How an attempt ended, as far as that can be read."""

    outcome: RoundOutcome | None = None
    slot: int = 0  # where an outcome would go
    abort: RoundOutcome | None = None  # the only one that can be read, although two are needed


@dataclass(frozen=True)
class Myself:
    """What a replica knows of itself in a round."""

    rank: int
    claim: int
    base: str
    spec: str
    quorum: int
    world_size: int
    first_trial: int = 0  # first of this wait
    excludes_outliers: bool = True  # whether offers far larger than the others' get no weight
    tried: frozenset[int] = frozenset()  # trials of this wait, whether or not their manifests can be read
    unreadable: frozenset[OfferId] = frozenset()  # sealed offers that stayed unreadable


@dataclass(frozen=True)
class Timers:
    """Which timers of this replica have run out. Clocks of different machines are never compared."""

    grace: bool = False  # since a quorum of offers was seen
    reduce: bool = False  # since the last progress of a sealed attempt
    deadline: bool = False  # since the wait began
    alone: bool = False  # since so many replicas have finished that there can be no quorum


@dataclass(frozen=True)
class MakeOffer:
    """Write an offer."""

    trial: int


@dataclass(frozen=True)
class CreateSeal:
    """Decide which offers count."""

    seal: Seal


@dataclass(frozen=True)
class Reduce:
    """Compute these shards of the mean."""

    shards: tuple[int, ...]


@dataclass(frozen=True)
class CreateOutcome:
    """Decide how the attempt ends."""

    result: Literal["commit", "abort", "void"]
    bad: tuple[OfferId, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Follow:
    """End the round for this replica: apply its commit, or end without one."""

    outcome: RoundOutcome


@dataclass(frozen=True)
class Heal:
    """Load a newer state: the others have another history of commits."""


@dataclass(frozen=True)
class Wait:
    """Wait for these ranks."""

    missing: frozenset[int]  # ranks


@dataclass(frozen=True)
class Fail:
    """Give up: this replica cannot take part."""

    kind: Literal["timeout", "spec", "offer", "left"]
    ranks: frozenset[int] = frozenset()


Action = MakeOffer | CreateSeal | Reduce | CreateOutcome | Follow | Heal | Wait | Fail


def decide(view: RoundView, me: Myself, timers: Timers) -> Action:
    """Return what to do next in the round of this view."""
    # A void round ends only for its members: others may still offer to a later attempt.
    void = next((outcome for outcome in view.ended if outcome.result == "void" and _is_mine(outcome.members, me)), None)
    if void is not None:
        return Follow(void)
    if isinstance(view.outcome, RoundOutcome):
        return Follow(view.outcome) if view.outcome.base == me.base else Heal()
    if view.abort is not None:
        return CreateOutcome("abort", bad=view.abort.bad, reason=view.abort.reason)
    # After the checks above, so that a round that has ended is followed however late it is.
    if timers.deadline:
        return Fail("timeout", _missing(view, me))
    if view.seal is None:
        return _decide_before_seal(view, me, timers)
    return _decide_after_seal(view, view.seal, me, timers)


def _decide_before_seal(view: RoundView, me: Myself, timers: Timers) -> Action:
    if not _counts(view, me):
        tried = _tried(view, me)
        if len(tried) < MAX_TRIALS:
            return MakeOffer(max(tried, default=me.first_trial - 1) + 1)
        # Without this offer the others may still have a quorum; then this replica follows their commit.
        if me.world_size - 1 < me.quorum:
            return Fail("offer", frozenset({me.rank}))
    offers = candidates(view, me)
    ranks = {offer.id.rank for offer in offers}
    if len(offers) >= me.quorum and (timers.grace or ranks >= view.expected):
        # A diverged replica keeps its place among the members, so that it follows the round, but gets no weight.
        left_out = outliers(offers) if me.excludes_outliers else frozenset()
        members = tuple(
            Member(offer.id, offer.manifest, 0.0 if offer.id in left_out else offer.weight) for offer in offers
        )
        return CreateSeal(Seal(me.base, me.spec, max(offer.num_shards for offer in offers), members))
    # Waiting is pointless if too few of the world can have the same shapes.
    other_ranks = _of_another_spec(view, me) - ranks
    if me.world_size - len(other_ranks) < me.quorum:
        return Fail("spec", frozenset(other_ranks))
    if timers.alone and len(joining := may_join(view, me)) < me.quorum:
        return Fail("left", view.finished - joining)
    return Wait(_missing(view, me))


def _decide_after_seal(view: RoundView, seal: Seal | Literal["unreadable"], me: Myself, timers: Timers) -> Action:
    if seal == "unreadable":
        # Somebody who could read it may commit meanwhile: as always, the outcome decides.
        return CreateOutcome("abort", reason="the seal is unreadable") if timers.reduce else Wait(frozenset())
    if seal.base != me.base:
        return Heal()
    if seal.spec != me.spec:
        return Fail("spec", frozenset(member.id.rank for member in seal.members))
    if not seal.weight:
        return CreateOutcome("void", reason="every member was healed in this round")
    absent = [shard for shard in range(seal.num_shards) if shard not in view.means]
    # Also if an offer has become unreadable: a replica that cannot read the commit writes the same one again.
    if not absent:
        return CreateOutcome("commit")
    bad = tuple(sorted(me.unreadable & {member.id for member in seal.members}))
    if bad:
        return CreateOutcome("abort", bad=bad, reason="sealed offers are unreadable")
    if my_shards := own_shards(seal, me, absent):
        return Reduce(my_shards)
    owners = frozenset(_owner(seal, shard)[0] for shard in absent)
    # Each replica starts at another shard, so that not all compute the same one.
    if timers.reduce or owners <= view.departed:
        return Reduce((absent[me.rank % len(absent)],))
    return Wait(owners)


def resolve_attempt(slots: Sequence[RoundOutcome | None]) -> Attempt:
    """Return how an attempt ended, from the outcomes in its slots; None is one that cannot be read.

    A later slot was written because the one before was damaged. One commit decides, and so does one void: a replica
    that cannot read it sees the same seal and the same means, and writes the same outcome into the next slot. An abort
    cannot be derived again, so it has to be in two slots before anybody acts on it.
    """
    aborts: list[RoundOutcome] = []
    for outcome in filter(None, slots):
        if outcome.result != "abort":
            return Attempt(outcome)
        aborts.append(outcome)
        if len(aborts) == _ABORTS:
            return Attempt(outcome)
    return Attempt(slot=len(slots), abort=aborts[-1] if aborts else None)


def could_fork(view: RoundView, action: Action) -> bool:
    """Return whether an action could end a round a second time, if its commit was damaged or removed.

    Before such an action the replica must check whether anybody has offered to the next round.
    """
    if isinstance(action, CreateSeal):
        return not view.expected <= {member.id.rank for member in action.seal.members}
    return isinstance(action, CreateOutcome) and action.result == "abort" and view.abort is None


def view_with_seal(view: RoundView, seal: Seal) -> RoundView | None:
    """Return the view with the seal that was just created; None if the round has to be read again.

    The result is what a read right after the seal would show, except for offers that are not in the view. So all
    members of the seal must be among the offers of the view.
    """
    return replace(view, seal=seal) if _knows(view, seal.members) else None


def view_with_outcome(view: RoundView, outcome: RoundOutcome) -> RoundView | None:
    """Return the view with the outcome that was just created; None if the round has to be read again.

    That is so for an outcome other than a commit, because another attempt follows it.
    """
    committed = outcome.result == "commit" and _knows(view, outcome.members)
    return replace(view, outcome=outcome) if committed else None


def own_shards(seal: Seal, me: Myself, absent: Iterable[int]) -> tuple[int, ...]:
    """Return the shards of the mean that this replica owns."""
    return tuple(shard for shard in absent if _owner(seal, shard) == (me.rank, me.claim))


def expected_ranks(
    last: RoundOutcome | None, here: Iterable[int], departed: Iterable[int], world_size: int
) -> frozenset[int]:
    """Return the ranks to wait for: the members of the last commit and those that are back, without those that left.

    So a replica that died costs its peers one grace, not one in every round.
    """
    before = range(world_size) if last is None else (member.id.rank for member in last.members)
    return frozenset({*before, *here} - set(departed))


def candidates(view: RoundView, me: Myself) -> list[Offer]:
    """Return the offers that may be sealed, by rank: those of my history and shapes, the latest of each rank.

    An offer with weight comes before one without. The offer of a process that died is as good as any; the process that
    takes its place gets weight one round later.
    """
    # Sorted so that the last offer of a rank wins: one with weight, of the newest claim and trial.
    latest: dict[int, Offer] = {}
    for offer in sorted(view.offers, key=lambda offer: (offer.weight > 0, offer.id)):
        if offer.base == me.base and offer.spec == me.spec and offer.id not in view.spent:
            latest[offer.id.rank] = offer
    return [latest[rank] for rank in sorted(latest)]


def outliers(offers: Sequence[Offer]) -> frozenset[OfferId]:
    """Return the offers of diverged replicas: their largest number is far beyond that of the (lower) median offer.

    They are sealed without weight, so that all replicas leave out the same ones; their owners take the mean of the
    others. If most replicas do not change at all, everybody is far beyond the median: so ORDINARY_CHANGE is always
    accepted.
    """
    counted = [offer for offer in offers if offer.weight and offer.largest]
    if not counted:
        return frozenset()
    # The lower median, so that of two offers the smaller one sets the scale.
    median = sorted(offer.largest for offer in counted)[(len(counted) - 1) // 2]
    most = max(MAX_TIMES_MEDIAN * median, ORDINARY_CHANGE)
    return frozenset(offer.id for offer in counted if offer.largest > most)


def may_join(view: RoundView, me: Myself) -> frozenset[int]:
    """Return the ranks that have offered to this round or may still do so: all but those that have finished."""
    offered = {offer.id.rank for offer in candidates(view, me)}
    return frozenset({me.rank, *offered, *(set(range(me.world_size)) - view.finished)})


def _counts(view: RoundView, me: Myself) -> bool:
    """Return whether an offer of mine can be read and may still be sealed."""
    return any(_is_me(offer.id, me) and offer.id not in view.spent for offer in view.offers)


def _tried(view: RoundView, me: Myself) -> frozenset[int]:
    """Return the trials of this wait: those made here, even if nobody can read them, and those of ended attempts."""
    known_ids = [*(offer.id for offer in view.offers), *view.spent]
    return me.tried | {offer_id.trial for offer_id in known_ids if _is_me(offer_id, me)}


def _owner(seal: Seal, shard: int) -> tuple[int, int]:
    """Return rank and claim of the replica that computes a shard of the mean."""
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
    """Return the ranks that are waited for, including those that left if there is no quorum without them."""
    offered = {offer.id.rank for offer in candidates(view, me)}
    if len(view.expected | offered) < me.quorum:
        return frozenset(range(me.world_size)) - offered
    return view.expected - offered
