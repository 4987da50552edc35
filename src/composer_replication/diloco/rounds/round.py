"""Run one DiLoCo round over an object store, from the perspective of one replica.

    claim         the replica holds its rank, and knows the commits that its weights come from (replica_lifecycle.py)
    local steps   it trains alone; then torchft's DiLoCo hands over how far its weights have moved (manager.py)
    offer         it writes that vector in shards, and then the manifest, which makes the offer visible
    seal          once all expected replicas have offered, or a quorum has and the grace is over, any replica creates
                  the seal, which says whose offers count; the store lets only one of them succeed
    mean          member i computes the shards i, i + n, ... of the weighted mean; other members do the shards of one
                  that is late
    outcome       once all shards of the mean exist, any replica creates the outcome, a commit with their checksums; an
                  attempt with damaged offers ends with an abort, and one in which no offer has weight is void
    outer step    every replica, however late, reads the same mean, which DiLoCo's outer optimizer applies
    next round    the step advances, and the commit joins the history that the weights come from (replica_lifecycle.py)

`Round.run` repeats: read the store, let `decide` choose the next action, perform it. `decide` has the rules. It is a
pure function that knows no store, no clock and no tensor, so that the model check of the tests can call it with every
state that crashes, pauses, timers and damaged objects can lead to. docs/concepts/diloco.md has the state diagram and
the invariants. The bytes of a round are in shards.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

from composer_replication.diloco.payload import ErrorFeedback
from composer_replication.diloco.rounds.patience import OfferUnreadable, PatientStore, QuorumLeft, RoundTimeout
from composer_replication.diloco.rounds.reading import Offer, RoundReader, RoundView
from composer_replication.diloco.rounds.records import (
    Layout,
    Member,
    OfferId,
    RoundOutcome,
    Seal,
    pack,
)
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
from composer_replication.diloco.rounds.shards import RoundVector, ShardIO, UnreadableOffer
from composer_replication.errors import ShapeError, explain

_log = logging.getLogger(__name__)
_MAX_TRIALS = 3  # how often a replica offers again in one wait, if its offer could not be read
_MAX_TIMES_MEDIAN = 1000.0
# A change up to this size always counts, however little the others changed. In a healthy training no weight changes
# more between two exchanges.
_ORDINARY_CHANGE = 10.0
_REREAD_AFTER_POLLS = 3  # poll intervals until departures are read again

Ending = Literal["commit", "void", "heal", "over"]


@dataclass
class RoundResult:
    """How a round ended for a replica: for example, with a commit whose mean is in its tensors, without a commit, or
    with the need to load a newer state.
    """

    result: Ending  # "over": the run had ended before, so no round was held
    outcome: RoundOutcome | None = None
    seconds: float = 0.0
    trials: int = 0


@dataclass
class Round:
    """One round from the perspective of the replica that runs it."""

    store: PatientStore
    layout: Layout
    settings: RoundSettings
    position: RunPosition
    vector: RoundVector
    weight: float
    pool: ThreadPoolExecutor
    name: str = ""
    feedback: ErrorFeedback | None = None

    def __post_init__(self) -> None:
        position = self.position
        self.spec = self.vector.spec(self.settings.payload_kinds, self.name)
        self._reader = RoundReader(
            self.store,
            self.layout,
            position.step,
            self.settings.world_size,
            position.last,
            self.spec,
            self.vector.num_shards,
            self.pool,
            position.commits,
        )
        self._shards = ShardIO(
            self.store,
            self.layout,
            self.settings,
            position,
            self.vector,
            self.spec,
            self.weight,
            self.pool,
            self.feedback,
            self._reader.manifests,
        )
        return_grace_s = self.settings.return_grace_s(position.commits)
        self._clock = _Clock(self.settings, first=position.last is None, return_grace_s=return_grace_s)
        self._trials: set[int] = set()
        self._unreadable_offers: set[OfferId] = set()

    def run(self) -> RoundResult:
        """Take part until the round is over for this replica. Raises RoundTimeout, which names the missing ranks, if
        the round does not end in time.
        """
        view = self._reader.read()
        while True:
            me = self._local_replica()
            self._clock.observe(view, len(_candidates(view, me)), joining=len(_possible_participants(view, me)))
            action = decide(view, me, self._clock.timers())
            ended = self._finish(view, action)
            # A seal without an expected rank or an abort could end a round that is already over, if its commit was
            # lost. An offer to the next round proves that there was one.
            if ended is None and _could_fork(view, action) and self._reader.has_a_later_round():
                ended = RoundResult("heal")
            if ended is not None:
                ended.seconds = self._clock.elapsed()
                return ended
            view = self._perform(view, action) or self._reader.read()

    def fetch_commit(self, outcome: RoundOutcome) -> Ending:
        """Copy the mean of a committed round into the tensors without taking part in the round, and return the
        result.
        """
        return self._follow(self._reader.read(), outcome).result

    def _local_replica(self) -> LocalReplica:
        position = self.position
        return LocalReplica(
            rank=position.rank,
            claim=position.claim,
            base=position.base,
            spec=self.spec,
            quorum=self.settings.min_replicas,
            world_size=self.settings.world_size,
            first_trial=position.first_trial,
            excludes_outliers=self.settings.excludes_outliers,
            tried=frozenset(self._trials),
            unreadable=frozenset(self._unreadable_offers),
        )

    def _finish(self, view: RoundView, action: Action) -> RoundResult | None:
        if isinstance(action, Heal):
            return RoundResult("heal")
        if isinstance(action, Fail):
            raise self._describe_failure(action, view)
        if isinstance(action, Follow):
            return self._follow(view, action.outcome)
        return None

    def _follow(self, view: RoundView, outcome: RoundOutcome) -> RoundResult:
        if outcome.result == "void":
            self._own_weight_in(outcome)
            return RoundResult("void", outcome, trials=1 + max(member.id.trial for member in outcome.members))
        if outcome.spec != self.spec or len(outcome.means) != self.vector.num_shards:
            raise self._describe_failure(Fail("spec", frozenset(member.id.rank for member in outcome.members)), view)
        try:
            self._shards.fetch_mean(view.attempt, outcome)
        except UnreadableOffer:
            # Neither the mean nor the offers that it was computed from can be read any more.
            return RoundResult("heal")
        if self._own_weight_in(outcome):
            self._shards.keep_residual()
        return RoundResult("commit", outcome)

    def _own_weight_in(self, outcome: RoundOutcome) -> float:
        """Return the weight that an outcome gives to this replica's offer, and log a warning if the offer was left
        out.
        """
        mine = (self.position.rank, self.position.claim)
        weights = [member.weight for member in outcome.members if member.id[:2] == mine]
        if weights == [0] and self.weight:
            why = "it is not finite, or far larger than the offers of the others"
            _log.warning("round %d: the offer of rank %d was left out: %s", self.position.step, self.position.rank, why)
        return sum(weights)

    def _perform(self, view: RoundView, action: Action) -> RoundView | None:
        """Perform an action. Returns the view after the action, or None if the round has to be reread."""
        if isinstance(action, MakeOffer):
            self._trials.add(action.trial)
            self._shards.make_offer(action.trial)
        elif isinstance(action, CreateSeal):
            seal, key = action.seal, self.layout.seal(self.position.step, view.attempt)
            record = pack("seal", self.layout.address(key), asdict(seal))
            my_shards = _owned_shards(seal, self._local_replica(), range(seal.num_shards))
            self._shards.prefetch_offers(seal.members, my_shards)
            is_mine = self.store.create_verified(key, record)
            return self._reader.view_after_seal(view, my_record=record if is_mine else None)
        elif isinstance(action, Reduce) and isinstance(view.seal, Seal):
            self._reduce(view.attempt, view.seal, action)
        elif isinstance(action, CreateOutcome):
            outcome = self._make_outcome(view, action)
            self._shards.prefetch_means(view.attempt, outcome)
            key = self.layout.outcome(self.position.step, view.attempt, view.slot)
            record = pack("outcome", self.layout.address(key), asdict(outcome))
            is_mine = self.store.create_verified(key, record)
            return self._reader.view_after_outcome(view, my_record=record if is_mine else None)
        elif isinstance(action, Wait):
            time.sleep(self._clock.next_pause())
            if self._clock.should_reread_departures():
                self._reader.forget_departures()
        return None

    def _reduce(self, attempt: int, seal: Seal, action: Reduce) -> None:
        try:
            self._shards.reduce(attempt, seal.members, action.shards)
        except UnreadableOffer as error:
            self._unreadable_offers.add(error.offer)

    def _make_outcome(self, view: RoundView, action: CreateOutcome) -> RoundOutcome:
        members = view.seal.members if isinstance(view.seal, Seal) else ()
        checksums = self._reader.mean_checksums.get(view.attempt, {})
        means = tuple(checksums[shard] for shard in sorted(checksums)) if action.result == "commit" else ()
        manifests = [self._reader.manifests[member.id][1] for member in members if member.id in self._reader.manifests]
        return RoundOutcome(
            action.result,
            self.position.base,
            self.spec,
            members,
            means,
            action.bad,
            action.reason,
            seconds=self._clock.elapsed(),
            num_bytes=sum(shard.bytes for manifest in manifests for shard in manifest.shards),
        )

    def _describe_failure(self, action: Fail, view: RoundView) -> Exception:
        where = f"round {self.position.step} of generation {self.layout.generation} at {self.store.uri}"
        ranks = ", ".join(map(str, sorted(action.ranks))) or "none"
        if action.kind == "spec":
            fix = "Use the same model, fragments, payload and shard size at all replicas."
            got, expected = f"other shapes at ranks {ranks}", "the shapes of this replica"
            return ShapeError(explain(f"vectors of {where}", got=got, expected=expected, fix=fix))
        if action.kind == "offer":
            got = f"{len(self._trials)} offers of rank {ranks} that cannot be read back"
            fix = "Check the store: reads do not return what was written."
            return OfferUnreadable(explain(where, got=got, expected="a readable offer", fix=fix))
        if action.kind == "left":
            return self._describe_lost_quorum(where, action, view)
        offered = sorted(offer.id.rank for offer in _candidates(view, self._local_replica()))
        got = f"offers of ranks {offered} after {self.settings.timeout_s:g} s, missing {ranks}"
        fix = "Restart the missing replicas, or lower min_replicas."
        return RoundTimeout(
            explain(where, got=got, expected=f"offers of at least {self.settings.min_replicas} replicas", fix=fix)
        )

    def _describe_lost_quorum(self, where: str, action: Fail, view: RoundView) -> QuorumLeft:
        steps = self._reader.departures().finished_at
        finished = ", ".join(f"rank {rank} finished at step {steps[rank]}" for rank in sorted(action.ranks))
        joining, needed = len(_possible_participants(view, self._local_replica())), self.settings.min_replicas
        fix = "If the run has all its commits, load the last published state and stop. To continue, restart those "
        fix += "replicas with a larger number of commits, and give that number to every replica (end_after)."
        return QuorumLeft(f"{where}: only {joining} of the {needed} replicas needed can still join: {finished}. {fix}")


def decide(view: RoundView, me: LocalReplica, timers: Timers) -> Action:
    """Return the next action of a replica in a round, given its view of the round."""
    # A void round ends only for its members: others may still offer to a later attempt.
    for outcome in view.ended:
        if outcome.result == "void" and _includes_own_offer(outcome.members, me):
            return Follow(outcome)
    if isinstance(view.outcome, RoundOutcome):
        return Follow(view.outcome) if view.outcome.base == me.base else Heal()
    if view.abort is not None:
        return CreateOutcome("abort", bad=view.abort.bad, reason=view.abort.reason)
    # After the checks above, so that a round that has ended is followed however late it is.
    if timers.deadline:
        return Fail("timeout", _missing_ranks(view, me))
    if view.seal is None:
        return _decide_before_seal(view, me, timers)
    return _decide_after_seal(view, view.seal, me, timers)


def _decide_before_seal(view: RoundView, me: LocalReplica, timers: Timers) -> Action:
    if not _has_usable_offer(view, me):
        tried = _used_trials(view, me)
        if len(tried) < _MAX_TRIALS:
            return MakeOffer(max(tried, default=me.first_trial - 1) + 1)
        # Without this offer the others may still have a quorum; then this replica follows their commit.
        if me.world_size - 1 < me.quorum:
            return Fail("offer", frozenset({me.rank}))
    offers = _candidates(view, me)
    ranks = {offer.id.rank for offer in offers}
    if len(offers) >= me.quorum and (timers.grace or ranks >= view.expected):
        # A diverged replica keeps its place among the members, so that it follows the round, but gets no weight.
        left_out = _outliers(offers) if me.excludes_outliers else frozenset()
        members = tuple(
            Member(offer.id, offer.manifest, 0.0 if offer.id in left_out else offer.weight) for offer in offers
        )
        return CreateSeal(Seal(me.base, me.spec, max(offer.num_shards for offer in offers), members))
    # Waiting is pointless if too few of the world can have the same shapes.
    other_ranks = _ranks_with_another_spec(view, me) - ranks
    if me.world_size - len(other_ranks) < me.quorum:
        return Fail("spec", frozenset(other_ranks))
    if timers.alone and len(joining := _possible_participants(view, me)) < me.quorum:
        return Fail("left", view.finished - joining)
    return Wait(_missing_ranks(view, me))


def _decide_after_seal(view: RoundView, seal: Seal | Literal["unreadable"], me: LocalReplica, timers: Timers) -> Action:
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
    if my_shards := _owned_shards(seal, me, absent):
        return Reduce(my_shards)
    owners = frozenset(_shard_owner(seal, shard)[0] for shard in absent)
    # Each replica starts at another shard, so that not all compute the same one.
    if timers.reduce or owners <= view.departed:
        return Reduce((absent[me.rank % len(absent)],))
    return Wait(owners)


@dataclass(frozen=True)
class LocalReplica:
    """What a replica knows about itself during a round."""

    rank: int
    claim: int
    base: str
    spec: str
    quorum: int
    world_size: int
    first_trial: int = 0  # the number of its first offer in this wait
    excludes_outliers: bool = True  # whether offers far larger than the others' get no weight
    tried: frozenset[int] = frozenset()  # the numbers of its offers in this wait, readable or not
    unreadable: frozenset[OfferId] = frozenset()  # sealed offers that it could not read


@dataclass(frozen=True)
class Timers:
    """Flags that say which timers of this replica have run out. Clocks of different machines are never compared."""

    grace: bool = False  # since a quorum of offers was seen
    reduce: bool = False  # since the last progress of a sealed attempt
    deadline: bool = False  # since the wait began
    alone: bool = False  # since so many replicas have finished that there can be no quorum


@dataclass(frozen=True)
class MakeOffer:
    """The action of writing an offer."""

    trial: int


@dataclass(frozen=True)
class CreateSeal:
    """The action of creating the seal, which decides which offers count."""

    seal: Seal


@dataclass(frozen=True)
class Reduce:
    """The action of computing and writing these shards of the mean."""

    shards: tuple[int, ...]


@dataclass(frozen=True)
class CreateOutcome:
    """The action of creating the outcome, which decides how the attempt ends."""

    result: Literal["commit", "abort", "void"]
    bad: tuple[OfferId, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Follow:
    """The action of ending the round with this outcome: the replica applies the commit, or ends the round without
    one.
    """

    outcome: RoundOutcome


@dataclass(frozen=True)
class Heal:
    """The action of loading a newer state, because the other replicas have another history of commits."""


@dataclass(frozen=True)
class Wait:
    """The action of waiting for other replicas."""

    missing: frozenset[int]  # their ranks


@dataclass(frozen=True)
class Fail:
    """The action of giving up, because this replica cannot take part in the round."""

    kind: Literal["timeout", "spec", "offer", "left"]
    ranks: frozenset[int] = frozenset()


Action = MakeOffer | CreateSeal | Reduce | CreateOutcome | Follow | Heal | Wait | Fail


def _could_fork(view: RoundView, action: Action) -> bool:
    """Return whether an action could give a second result to a round that was already committed, in case the record of
    that commit was damaged or removed.

    Before such an action, the replica must check whether any replica has made an offer to the next round.
    """
    if isinstance(action, CreateSeal):
        return not view.expected <= {member.id.rank for member in action.seal.members}
    return isinstance(action, CreateOutcome) and action.result == "abort" and view.abort is None


def _candidates(view: RoundView, me: LocalReplica) -> list[Offer]:
    """Return the offers that may be sealed, sorted by rank.

    For each rank, this is the latest offer with the same history of commits and the same shapes as this replica's. An
    offer with weight is preferred to one without. The offer of a process that has died also counts; the process that
    replaces it gets weight one round later.
    """
    # Sorted so that the last offer of a rank wins: one with weight, of the newest claim and trial.
    latest: dict[int, Offer] = {}
    for offer in sorted(view.offers, key=lambda offer: (offer.weight > 0, offer.id)):
        if offer.base == me.base and offer.spec == me.spec and offer.id not in view.spent:
            latest[offer.id.rank] = offer
    return [latest[rank] for rank in sorted(latest)]


def _outliers(offers: Sequence[Offer]) -> frozenset[OfferId]:
    """Return the offers of replicas that have diverged, that is, whose largest absolute value is far above that of the
    median offer (the lower one of two).

    These offers are sealed with weight 0, so that all replicas leave out the same ones; the replicas that made them
    take the mean of the others. An offer whose values are at most `_ORDINARY_CHANGE` is always accepted: if the weights
    of most replicas do not change at all, every change is far above the median.
    """
    counted = [offer for offer in offers if offer.weight and offer.largest]
    if not counted:
        return frozenset()
    # The lower median, so that of two offers the smaller one sets the scale.
    median = sorted(offer.largest for offer in counted)[(len(counted) - 1) // 2]
    most = max(_MAX_TIMES_MEDIAN * median, _ORDINARY_CHANGE)
    return frozenset(offer.id for offer in counted if offer.largest > most)


def _possible_participants(view: RoundView, me: LocalReplica) -> frozenset[int]:
    """Return the ranks that have made an offer to this round or may still make one: all ranks except those that have
    finished.
    """
    offered = {offer.id.rank for offer in _candidates(view, me)}
    return frozenset({me.rank, *offered, *(set(range(me.world_size)) - view.finished)})


def _owned_shards(seal: Seal, me: LocalReplica, absent: Iterable[int]) -> tuple[int, ...]:
    """Return the absent shards of the mean that this replica has to compute."""
    return tuple(shard for shard in absent if _shard_owner(seal, shard) == (me.rank, me.claim))


def _shard_owner(seal: Seal, shard: int) -> tuple[int, int]:
    """Return the rank and claim of the replica that should compute a shard of the mean."""
    return seal.members[shard % len(seal.members)].id[:2]


def _has_usable_offer(view: RoundView, me: LocalReplica) -> bool:
    """Return whether this replica has an offer that can be read and may still be sealed."""
    return any(_is_own_offer(offer.id, me) and offer.id not in view.spent for offer in view.offers)


def _used_trials(view: RoundView, me: LocalReplica) -> frozenset[int]:
    """Return the numbers of all offers that this replica has made in this round, including those that are unreadable
    or belong to attempts that have ended.
    """
    known_ids = [*(offer.id for offer in view.offers), *view.spent]
    return me.tried | {offer_id.trial for offer_id in known_ids if _is_own_offer(offer_id, me)}


def _is_own_offer(offer: OfferId, me: LocalReplica) -> bool:
    return offer[:2] == (me.rank, me.claim) and offer.trial >= me.first_trial


def _includes_own_offer(members: Iterable[Member], me: LocalReplica) -> bool:
    return any(_is_own_offer(member.id, me) for member in members)


def _ranks_with_another_spec(view: RoundView, me: LocalReplica) -> set[int]:
    return {offer.id.rank for offer in view.offers if offer.base == me.base and offer.spec != me.spec}


def _missing_ranks(view: RoundView, me: LocalReplica) -> frozenset[int]:
    """Return the ranks to wait for. They include ranks that have left if a quorum is impossible without them."""
    offered = {offer.id.rank for offer in _candidates(view, me)}
    if len(view.expected | offered) < me.quorum:
        return frozenset(range(me.world_size)) - offered
    return view.expected - offered


class _Clock:
    """The timers of one round, measured by this machine's monotonic clock.

    They measure the time since a quorum of offers was first seen, since a quorum became impossible, since the attempt
    last made progress, and since this replica entered the round.
    """

    def __init__(self, settings: RoundSettings, *, first: bool, return_grace_s: float) -> None:
        self._settings, self._return_grace_s = settings, return_grace_s
        self._grace_s = settings.first_grace_s if first else settings.grace_s
        self._began_at = self._progressed_at = self._departures_read_at = time.monotonic()
        self._quorum_since: float | None = None
        self._no_quorum_since: float | None = None
        self._progress: object = None
        self._pause = settings.poll_s / 8

    def observe(self, view: RoundView, offers: int, *, joining: int) -> None:
        """Restart each timer whose condition has changed since the previous view."""
        now = time.monotonic()
        if offers < self._settings.min_replicas:
            self._quorum_since = None
        elif self._quorum_since is None:
            self._quorum_since = now
        if joining >= self._settings.min_replicas:
            self._no_quorum_since = None
        elif self._no_quorum_since is None:
            self._no_quorum_since = now
        progress = (view.attempt, view.seal is None, view.means, len(view.offers))
        if progress != self._progress:
            self._progress, self._progressed_at, self._pause = progress, now, self._settings.poll_s / 8

    def timers(self) -> Timers:
        now = time.monotonic()
        return Timers(
            grace=self._quorum_since is not None and now - self._quorum_since >= self._grace_s,
            reduce=now - self._progressed_at >= self._settings.grace_s,
            deadline=now - self._began_at >= self._settings.timeout_s,
            alone=self._no_quorum_since is not None and now - self._no_quorum_since >= self._return_grace_s,
        )

    def next_pause(self) -> float:
        """Return the number of seconds to wait before the next read. While nothing changes, it grows up to the poll
        interval.
        """
        self._pause = min(1.5 * self._pause, self._settings.poll_s)
        return self._pause

    def should_reread_departures(self) -> bool:
        """Return whether to determine again which replicas have left.

        During a long wait, this is done once in several reads. It is done at every read while a quorum is impossible
        without replicas that have finished, because they may return.
        """
        now = time.monotonic()
        if (
            self._no_quorum_since is None
            and now - self._departures_read_at < _REREAD_AFTER_POLLS * self._settings.poll_s
        ):
            return False
        self._departures_read_at = now
        return True

    def elapsed(self) -> float:
        return time.monotonic() - self._began_at
