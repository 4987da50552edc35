"""One round of one replica: read, decide, act, until it is over. `decide` has the rules; here is the work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from composer_replication.diloco.payload import ErrorFeedback, PayloadKind
from composer_replication.diloco.rounds.decide import (
    Action,
    CreateOutcome,
    CreateSeal,
    Fail,
    Follow,
    Heal,
    MakeOffer,
    Myself,
    Reduce,
    Seen,
    Timers,
    Wait,
    candidates,
    could_fork,
    decide,
    may_join,
    own_shards,
)
from composer_replication.diloco.rounds.failures import OfferUnreadable, QuorumLeft, RoundTimeout
from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.reading import RoundReader
from composer_replication.diloco.rounds.records import MOST_RANKS, Layout, Outcome, Seal, pack_outcome, pack_seal
from composer_replication.diloco.rounds.shards import ShardIO, UnreadableOffer
from composer_replication.diloco.rounds.vectors import RoundVector, spec_of
from composer_replication.errors import InputError, ShapeError, explain

_log = logging.getLogger(__name__)
_ASK_AFTER_POLLS = 3
_MOST_RETURN_S = 4.0  # a late replica of a run that has ended ends within 5 s


@dataclass(frozen=True)
class Settings:
    """What all replicas of a run agree on, and how long this one waits."""

    world_size: int
    min_replicas: int
    grace_s: float
    first_grace_s: float
    timeout_s: float
    poll_s: float
    payload: PayloadKind
    mean_payload: PayloadKind
    shard_bytes: int
    parallel: int
    judges_sizes: bool = True  # whether an offer far beyond the others' is left out

    def __post_init__(self) -> None:
        if self.world_size >= MOST_RANKS:  # its members would not fit into a record
            raise InputError(explain("world_size", got=f"{self.world_size:,}", expected=f"fewer than {MOST_RANKS:,}"))

    @property
    def kinds(self) -> tuple[PayloadKind, PayloadKind]:
        return self.payload, self.mean_payload

    def return_grace_s(self, commits: int | None) -> float:
        """Return how long a replica waits for peers that have finished, where no quorum can come without them.

        One that knows how many commits it needs does not wait: peers that need more than those do not count as
        finished. For one that does not know, they may have been stopped for a moment, or be started again for more.
        """
        return 0.0 if commits is not None else min(self.first_grace_s, _MOST_RETURN_S)

    def threads(self) -> ThreadPoolExecutor:
        """For requests: `parallel` of them each way."""
        return ThreadPoolExecutor(2 * self.parallel, thread_name_prefix="diloco")


@dataclass(frozen=True)
class Place:
    """Where in its run a replica stands."""

    rank: int
    claim: int
    step: int = 0
    base: str = ""
    last: Outcome | None = None  # the commit that led here
    first_trial: int = 0
    commits: int | None = None  # that the run needs, where that was said


Result = Literal["commit", "void", "heal", "over"]


@dataclass
class Ended:
    """How a wait ended: with a commit that is in the tensors by now, without one, or with the need to heal."""

    result: Result  # over: the run had ended, and no round was held
    outcome: Outcome | None = None
    seconds: float = 0.0
    trials: int = 0
    feedback: ErrorFeedback | None = None


@dataclass
class RunningRound:
    store: PatientStore
    layout: Layout
    settings: Settings
    place: Place
    vector: RoundVector
    weight: float
    pool: ThreadPoolExecutor
    name: str = ""
    feedback: ErrorFeedback | None = None
    sleep: Callable[[float], None] = time.sleep
    unreadable: set = field(default_factory=set)
    tried: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.spec = spec_of(self.vector, self.settings.kinds, self.name)
        self.reader = RoundReader(
            self.store,
            self.layout,
            self.place.step,
            self.settings.world_size,
            self.place.last,
            self.spec,
            self.vector.num_shards,
            self.pool,
            self.place.commits,
        )
        self.shards = ShardIO(self)
        return_grace_s = self.settings.return_grace_s(self.place.commits)
        self.clock = _Clock(self.settings, first=self.place.last is None, return_grace_s=return_grace_s)

    def run(self) -> Ended:
        """Take part until the round is over for this replica. RoundTimeout names who stayed away."""
        view = self.reader.read()
        while True:
            me = self._myself()
            self.clock.look(view, len(candidates(view, me)), joining=len(may_join(view, me)))
            action = decide(view, me, self.clock.timers())
            ended = self._end(view, action)
            if ended is None and could_fork(view, action) and self.reader.has_a_later_round():
                ended = Ended("heal")
            if ended is not None:
                ended.seconds = self.clock.elapsed()
                return ended
            view = self._act(view, action) or self.reader.read()

    def take(self, outcome: Outcome) -> Result:
        """The mean of a commit into the vector, without taking part."""
        return self._follow(self.reader.read(), outcome).result

    def _myself(self) -> Myself:
        position = self.place
        return Myself(
            rank=position.rank,
            claim=position.claim,
            base=position.base,
            spec=self.spec,
            quorum=self.settings.min_replicas,
            world_size=self.settings.world_size,
            first_trial=position.first_trial,
            judges_sizes=self.settings.judges_sizes,
            tried=frozenset(self.tried),
            unreadable=frozenset(self.unreadable),
        )

    def _end(self, view: Seen, action: Action) -> Ended | None:
        if isinstance(action, Heal):
            return Ended("heal")
        if isinstance(action, Fail):
            raise self._failure(action, view)
        if isinstance(action, Follow):
            return self._follow(view, action.outcome)
        return None

    def _follow(self, view: Seen, outcome: Outcome) -> Ended:
        if outcome.result == "void":
            self._weight_in(outcome)
            return Ended("void", outcome, trials=1 + max(member.id.trial for member in outcome.members))
        if outcome.spec != self.spec or len(outcome.means) != self.vector.num_shards:
            raise self._failure(Fail("spec", frozenset(member.id.rank for member in outcome.members)), view)
        try:
            self.shards.fetch_mean(view.attempt, outcome)
        except UnreadableOffer:  # neither the mean nor what it was made of is there any more
            return Ended("heal")
        weight = self._weight_in(outcome)
        return Ended("commit", outcome, feedback=self.shards.feedback_kept() if weight else self.feedback)

    def _weight_in(self, outcome: Outcome) -> float:
        """What this replica counted in an outcome. That it was left out is said, for nobody else sees why."""
        mine = (self.place.rank, self.place.claim)
        weights = [member.weight for member in outcome.members if member.id[:2] == mine]
        if weights == [0] and self.weight:
            why = "it was not finite, or far larger than what the others moved"
            _log.warning("round %d: what rank %d moved was left out: %s", self.place.step, self.place.rank, why)
        return sum(weights)

    def _act(self, view: Seen, action: Action) -> Seen | None:
        """Do it; what is seen then, where the action itself says so and the round need not be read anew."""
        if isinstance(action, MakeOffer):
            self.tried.add(action.trial)
            self.shards.make_offer(action.trial)
        elif isinstance(action, CreateSeal):
            seal, key = action.seal, self.layout.seal(self.place.step, view.attempt)
            record = pack_seal(self.layout.address(key), seal)
            self.shards.expect_seal(seal.members, own_shards(seal, self._myself(), range(seal.num_shards)))
            mine = self.store.settle(key, record)
            return self.reader.sealed(view, mine=record if mine else None)
        elif isinstance(action, Reduce) and isinstance(view.seal, Seal):
            self._reduce(view.attempt, view.seal, action)
        elif isinstance(action, CreateOutcome):
            outcome = self._outcome(view, action)
            self.shards.expect_outcome(view.attempt, outcome)
            key = self.layout.outcome(self.place.step, view.attempt, view.slot)
            record = pack_outcome(self.layout.address(key), outcome)
            mine = self.store.settle(key, record)
            return self.reader.ended(view, mine=record if mine else None)
        elif isinstance(action, Wait):
            self.sleep(self.clock.pause())
            if self.clock.asks_who_left():
                self.reader.forget_who_left()
        return None

    def _reduce(self, attempt: int, seal: Seal, action: Reduce) -> None:
        try:
            self.shards.reduce(attempt, seal.members, action.shards)
        except UnreadableOffer as bad:
            self.unreadable.add(bad.offer)

    def _outcome(self, view: Seen, action: CreateOutcome) -> Outcome:
        members = view.seal.members if isinstance(view.seal, Seal) else ()
        shas = self.reader.mean_shas.get(view.attempt, {})
        means = tuple(shas[shard] for shard in sorted(shas)) if action.result == "commit" else ()
        manifests = [self.reader.manifests[member.id][1] for member in members if member.id in self.reader.manifests]
        return Outcome(
            action.result,
            self.place.base,
            self.spec,
            members,
            means,
            action.bad,
            action.reason,
            seconds=self.clock.elapsed(),
            num_bytes=sum(shard.bytes for manifest in manifests for shard in manifest.shards),
        )

    def _failure(self, action: Fail, view: Seen) -> Exception:
        where = f"round {self.place.step} of generation {self.layout.generation} at {self.store.uri}"
        ranks = ", ".join(map(str, sorted(action.ranks))) or "none"
        if action.kind == "spec":
            fix = "All replicas need the same model, fragments, payload and shard size."
            return ShapeError(explain(f"vectors of {where}", got=f"others at ranks {ranks}", expected="mine", fix=fix))
        if action.kind == "offer":
            got = f"{len(self.tried)} offers of rank {ranks} that cannot be read back"
            fix = "Look at the store: what is written there is not what is read."
            return OfferUnreadable(explain(where, got=got, expected="one that can", fix=fix))
        if action.kind == "left":
            return self._quorum_left(where, action, view)
        there = sorted(offer.id.rank for offer in candidates(view, self._myself()))
        got = f"offers of ranks {there} after {self.settings.timeout_s:g} s, missing {ranks}"
        fix = "Start the missing replicas again, or allow fewer with min_replicas."
        return RoundTimeout(explain(where, got=got, expected=f"at least {self.settings.min_replicas}", fix=fix))

    def _quorum_left(self, where: str, action: Fail, view: Seen) -> QuorumLeft:
        steps = self.reader.departures().finished_at
        finished = ", ".join(f"rank {rank} finished at step {steps[rank]}" for rank in sorted(action.ranks))
        joining, needed = len(may_join(view, self._myself())), self.settings.min_replicas
        fix = "If the run has all its commits, load the last published state and stop. To go on, start those replicas "
        fix += "again with a larger number of commits, and give that number to every replica (end_after)."
        return QuorumLeft(f"{where}: only {joining} of the {needed} replicas needed can still join: {finished}. {fix}")


class _Clock:
    """My own clock alone: how long since a quorum was there or could not come any more, since the attempt moved,
    since the wait began."""

    def __init__(self, settings: Settings, *, first: bool, return_grace_s: float) -> None:
        self._settings, self._return_grace_s = settings, return_grace_s
        self._grace_s = settings.first_grace_s if first else settings.grace_s
        self._began = self._moved = time.monotonic()
        self._quorum: float | None = None
        self._alone: float | None = None
        self._progress: object = None
        self._pause = settings.poll_s / 8
        self._asked = self._began

    def look(self, seen: Seen, offers: int, *, joining: int) -> None:
        now = time.monotonic()
        if offers < self._settings.min_replicas:
            self._quorum = None
        elif self._quorum is None:
            self._quorum = now
        if joining >= self._settings.min_replicas:
            self._alone = None
        elif self._alone is None:
            self._alone = now
        progress = (seen.attempt, seen.seal is None, seen.means, len(seen.offers))
        if progress != self._progress:
            self._progress, self._moved, self._pause = progress, now, self._settings.poll_s / 8

    def timers(self) -> Timers:
        now = time.monotonic()
        return Timers(
            grace=self._quorum is not None and now - self._quorum >= self._grace_s,
            reduce=now - self._moved >= self._settings.grace_s,
            deadline=now - self._began >= self._settings.timeout_s,
            alone=self._alone is not None and now - self._alone >= self._return_grace_s,
        )

    def pause(self) -> float:
        """Longer and longer while nothing moves, up to the poll interval."""
        self._pause = min(1.5 * self._pause, self._settings.poll_s)
        return self._pause

    def asks_who_left(self) -> bool:
        """Return whether it is time to ask again who has left: at every fourth look of a long wait, and at each look
        while only those are missing who have finished, for they may be back."""
        now = time.monotonic()
        if self._alone is None and now - self._asked < _ASK_AFTER_POLLS * self._settings.poll_s:
            return False
        self._asked = now
        return True

    def elapsed(self) -> float:
        return time.monotonic() - self._began
