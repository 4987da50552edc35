"""Run one round of one replica: read the store, let `decide` choose an action, perform it, and repeat.

`decide` has the rules of the protocol. This module does the work: it watches the clocks, writes offers, seals and
outcomes, averages shards, and copies the committed mean into the tensors.
"""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal, TypeVar

import torch
from torch import Tensor

from composer_replication.diloco.payload import (
    HEADER_BYTES,
    ErrorFeedback,
    PayloadError,
    PayloadKind,
    decode_vector,
    encode_vector,
    payload_bytes,
)
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
    RoundView,
    Timers,
    Wait,
    candidates,
    could_fork,
    decide,
    may_join,
    own_shards,
)
from composer_replication.diloco.rounds.patience import OfferUnreadable, PatientStore, QuorumLeft, RoundTimeout
from composer_replication.diloco.rounds.reading import READS, RoundReader
from composer_replication.diloco.rounds.records import (
    MAX_MAGNITUDE,
    MAX_RANKS,
    Layout,
    Manifest,
    Member,
    OfferId,
    RoundOutcome,
    Seal,
    Shard,
    digest,
    pack_manifest,
    pack_outcome,
    pack_seal,
)
from composer_replication.diloco.rounds.vectors import RoundVector, largest_of, scaled_weights, spec_of, weighted_mean
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import InputError, NonFiniteError, ShapeError, explain

_log = logging.getLogger(__name__)
_ASK_AFTER_POLLS = 3  # poll intervals until departures are read again
_MAX_RETURN_S = 4.0  # so that a late replica of a finished run ends within 5 s


@dataclass(frozen=True)
class RoundSettings:
    """Settings of a run's rounds: what all replicas agree on, and how long this one waits."""

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
    excludes_outliers: bool = True  # whether offers far larger than the others' get no weight

    def __post_init__(self) -> None:
        # More members would not fit into a record.
        if self.world_size >= MAX_RANKS:
            raise InputError(explain("world_size", got=f"{self.world_size:,}", expected=f"fewer than {MAX_RANKS:,}"))

    @property
    def kinds(self) -> tuple[PayloadKind, PayloadKind]:
        """The payload kinds of offers and of means."""
        return self.payload, self.mean_payload

    def return_grace_s(self, commits: int | None) -> float:
        """Return how long a replica waits for finished peers to come back when there is no quorum without them.

        A replica that knows how many commits it needs does not wait: peers that need more than those do not count as
        finished. For one that does not know, a peer may only be paused, or may be restarted for more commits.
        """
        return 0.0 if commits is not None else min(self.first_grace_s, _MAX_RETURN_S)

    def threads(self) -> ThreadPoolExecutor:
        """Return a thread pool for requests: `parallel` of them in each direction."""
        return ThreadPoolExecutor(2 * self.parallel, thread_name_prefix="diloco")


@dataclass(frozen=True)
class RunPosition:
    """Where a replica is in its run: its claim, its step, and the history of commits that its weights come from."""

    rank: int
    claim: int
    step: int = 0
    base: str = ""
    last: RoundOutcome | None = None  # the commit that led to this step
    first_trial: int = 0
    commits: int | None = None  # how many the run needs; None if unknown


Result = Literal["commit", "void", "heal", "over"]


@dataclass
class Ended:
    """How a wait for a round ended: with a commit in the tensors, without one, or with the need to heal."""

    result: Result  # "over": the run had ended before, so no round was held
    outcome: RoundOutcome | None = None
    seconds: float = 0.0
    trials: int = 0
    feedback: ErrorFeedback | None = None


@dataclass
class RunningRound:
    """One round as this replica takes part in it."""

    store: PatientStore
    layout: Layout
    settings: RoundSettings
    position: RunPosition
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
            self.position.step,
            self.settings.world_size,
            self.position.last,
            self.spec,
            self.vector.num_shards,
            self.pool,
            self.position.commits,
        )
        self.shards = _ShardIO(self)
        return_grace_s = self.settings.return_grace_s(self.position.commits)
        self.clock = _Clock(self.settings, first=self.position.last is None, return_grace_s=return_grace_s)

    def run(self) -> Ended:
        """Take part until the round is over for this replica. Raises RoundTimeout, which names the missing ranks."""
        view = self.reader.read()
        while True:
            me = self._myself()
            self.clock.look(view, len(candidates(view, me)), joining=len(may_join(view, me)))
            action = decide(view, me, self.clock.timers())
            ended = self._end(view, action)
            # A seal without an expected rank or an abort could end a round that is already over, if its commit was
            # lost. An offer to the next round proves that there was one.
            if ended is None and could_fork(view, action) and self.reader.has_a_later_round():
                ended = Ended("heal")
            if ended is not None:
                ended.seconds = self.clock.elapsed()
                return ended
            view = self._act(view, action) or self.reader.read()

    def take(self, outcome: RoundOutcome) -> Result:
        """Copy the mean of a commit into the tensors without taking part in its round."""
        return self._follow(self.reader.read(), outcome).result

    def _myself(self) -> Myself:
        position = self.position
        return Myself(
            rank=position.rank,
            claim=position.claim,
            base=position.base,
            spec=self.spec,
            quorum=self.settings.min_replicas,
            world_size=self.settings.world_size,
            first_trial=position.first_trial,
            excludes_outliers=self.settings.excludes_outliers,
            tried=frozenset(self.tried),
            unreadable=frozenset(self.unreadable),
        )

    def _end(self, view: RoundView, action: Action) -> Ended | None:
        if isinstance(action, Heal):
            return Ended("heal")
        if isinstance(action, Fail):
            raise self._failure(action, view)
        if isinstance(action, Follow):
            return self._follow(view, action.outcome)
        return None

    def _follow(self, view: RoundView, outcome: RoundOutcome) -> Ended:
        if outcome.result == "void":
            self._own_weight(outcome)
            return Ended("void", outcome, trials=1 + max(member.id.trial for member in outcome.members))
        if outcome.spec != self.spec or len(outcome.means) != self.vector.num_shards:
            raise self._failure(Fail("spec", frozenset(member.id.rank for member in outcome.members)), view)
        try:
            self.shards.fetch_mean(view.attempt, outcome)
        except _UnreadableOffer:
            # Neither the mean nor the offers that it was computed from can be read any more.
            return Ended("heal")
        weight = self._own_weight(outcome)
        return Ended("commit", outcome, feedback=self.shards.updated_feedback() if weight else self.feedback)

    def _own_weight(self, outcome: RoundOutcome) -> float:
        """Return the weight of this replica in an outcome; warn if its offer was left out."""
        mine = (self.position.rank, self.position.claim)
        weights = [member.weight for member in outcome.members if member.id[:2] == mine]
        if weights == [0] and self.weight:
            why = "it is not finite, or far larger than the offers of the others"
            _log.warning("round %d: the offer of rank %d was left out: %s", self.position.step, self.position.rank, why)
        return sum(weights)

    def _act(self, view: RoundView, action: Action) -> RoundView | None:
        """Perform an action.

        Returns the new view of the round if the action itself shows it; None if the round has to be read again.
        """
        if isinstance(action, MakeOffer):
            self.tried.add(action.trial)
            self.shards.make_offer(action.trial)
        elif isinstance(action, CreateSeal):
            seal, key = action.seal, self.layout.seal(self.position.step, view.attempt)
            record = pack_seal(self.layout.address(key), seal)
            self.shards.prefetch_offers(seal.members, own_shards(seal, self._myself(), range(seal.num_shards)))
            mine = self.store.create_verified(key, record)
            return self.reader.sealed(view, mine=record if mine else None)
        elif isinstance(action, Reduce) and isinstance(view.seal, Seal):
            self._reduce(view.attempt, view.seal, action)
        elif isinstance(action, CreateOutcome):
            outcome = self._outcome(view, action)
            self.shards.prefetch_means(view.attempt, outcome)
            key = self.layout.outcome(self.position.step, view.attempt, view.slot)
            record = pack_outcome(self.layout.address(key), outcome)
            mine = self.store.create_verified(key, record)
            return self.reader.ended(view, mine=record if mine else None)
        elif isinstance(action, Wait):
            self.sleep(self.clock.pause())
            if self.clock.rereads_departures():
                self.reader.forget_departures()
        return None

    def _reduce(self, attempt: int, seal: Seal, action: Reduce) -> None:
        try:
            self.shards.reduce(attempt, seal.members, action.shards)
        except _UnreadableOffer as bad:
            self.unreadable.add(bad.offer)

    def _outcome(self, view: RoundView, action: CreateOutcome) -> RoundOutcome:
        members = view.seal.members if isinstance(view.seal, Seal) else ()
        shas = self.reader.mean_shas.get(view.attempt, {})
        means = tuple(shas[shard] for shard in sorted(shas)) if action.result == "commit" else ()
        manifests = [self.reader.manifests[member.id][1] for member in members if member.id in self.reader.manifests]
        return RoundOutcome(
            action.result,
            self.position.base,
            self.spec,
            members,
            means,
            action.bad,
            action.reason,
            seconds=self.clock.elapsed(),
            num_bytes=sum(shard.bytes for manifest in manifests for shard in manifest.shards),
        )

    def _failure(self, action: Fail, view: RoundView) -> Exception:
        where = f"round {self.position.step} of generation {self.layout.generation} at {self.store.uri}"
        ranks = ", ".join(map(str, sorted(action.ranks))) or "none"
        if action.kind == "spec":
            fix = "Use the same model, fragments, payload and shard size at all replicas."
            got, expected = f"other shapes at ranks {ranks}", "those of this replica"
            return ShapeError(explain(f"vectors of {where}", got=got, expected=expected, fix=fix))
        if action.kind == "offer":
            got = f"{len(self.tried)} offers of rank {ranks} that cannot be read back"
            fix = "Check the store: reads do not return what was written."
            return OfferUnreadable(explain(where, got=got, expected="a readable one", fix=fix))
        if action.kind == "left":
            return self._quorum_left(where, action, view)
        offered = sorted(offer.id.rank for offer in candidates(view, self._myself()))
        got = f"offers of ranks {offered} after {self.settings.timeout_s:g} s, missing {ranks}"
        fix = "Restart the missing replicas, or lower min_replicas."
        return RoundTimeout(explain(where, got=got, expected=f"at least {self.settings.min_replicas}", fix=fix))

    def _quorum_left(self, where: str, action: Fail, view: RoundView) -> QuorumLeft:
        steps = self.reader.departures().finished_at
        finished = ", ".join(f"rank {rank} finished at step {steps[rank]}" for rank in sorted(action.ranks))
        joining, needed = len(may_join(view, self._myself())), self.settings.min_replicas
        fix = "If the run has all its commits, load the last published state and stop. To continue, restart those "
        fix += "replicas with a larger number of commits, and give that number to every replica (end_after)."
        return QuorumLeft(f"{where}: only {joining} of the {needed} replicas needed can still join: {finished}. {fix}")


class _Clock:
    """Timers of one wait, by this machine's monotonic clock.

    They run since a quorum of offers was seen, since no quorum is possible any more, since the attempt last made
    progress, and since the wait began.
    """

    def __init__(self, settings: RoundSettings, *, first: bool, return_grace_s: float) -> None:
        self._settings, self._return_grace_s = settings, return_grace_s
        self._grace_s = settings.first_grace_s if first else settings.grace_s
        self._began = self._moved = time.monotonic()
        self._quorum: float | None = None
        self._alone: float | None = None
        self._progress: object = None
        self._pause = settings.poll_s / 8
        self._asked = self._began

    def look(self, view: RoundView, offers: int, *, joining: int) -> None:
        """Restart the timers whose condition has changed since the last view."""
        now = time.monotonic()
        if offers < self._settings.min_replicas:
            self._quorum = None
        elif self._quorum is None:
            self._quorum = now
        if joining >= self._settings.min_replicas:
            self._alone = None
        elif self._alone is None:
            self._alone = now
        progress = (view.attempt, view.seal is None, view.means, len(view.offers))
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
        """Return the seconds until the next look: growing while nothing changes, up to the poll interval."""
        self._pause = min(1.5 * self._pause, self._settings.poll_s)
        return self._pause

    def rereads_departures(self) -> bool:
        """Return whether to read again which replicas have left.

        That is at every fourth look of a long wait, and at every look while a quorum lacks only replicas that have
        finished: they may be back.
        """
        now = time.monotonic()
        if self._alone is None and now - self._asked < _ASK_AFTER_POLLS * self._settings.poll_s:
            return False
        self._asked = now
        return True

    def elapsed(self) -> float:
        return time.monotonic() - self._began


# Reading and writing the bytes of a round.

T = TypeVar("T")
_ROUNDED_UP = 1 + 2.0**-7  # how much rounding to any payload kind can enlarge a number


class _UnreadableOffer(Exception):
    """An offer that was sealed cannot be read, after several tries."""

    def __init__(self, offer: OfferId) -> None:
        super().__init__(str(offer))
        self.offer = offer


def identity(data: bytes) -> str:
    """Return the identity of a payload: the digest of its header.

    The header holds the checksum of the rest, which the reader compares.
    """
    return hashlib.sha256(data[:HEADER_BYTES]).hexdigest()


class _ShardIO:
    """Reads and writes the shards of one running round."""

    def __init__(self, round: RunningRound) -> None:
        # A cycle would keep the tensors until the next garbage collection.
        self._round: RunningRound = weakref.proxy(round)
        self._store, self._layout, self._settings = round.store, round.layout, round.settings
        self._step = round.position.step
        # The vector as readers see it: rounded, with the residual of earlier rounds.
        self._offered: RoundVector | None = None
        self._residual: Tensor | None = None
        self._pool: ThreadPoolExecutor = round.pool
        # Prefetched: (members, shards) and the vectors.
        self._offers: tuple[object, Iterator[Tensor]] = (None, iter(()))
        self._means: dict[str, Future[Tensor]] = {}  # prefetched, by key

    def make_offer(self, trial: int) -> None:
        """Write the shards and then their manifest, so that a crash in between leaves nothing visible.

        A vector that is not finite, or too large to be summed, is offered without weight and shards: its replica takes
        the mean of the others.
        """
        offer = OfferId(self._round.position.rank, self._round.position.claim, trial)
        weight, shards, largest = self._put_all(offer) if self._round.weight else (0.0, (), 0.0)
        manifest = Manifest(offer, self._round.position.base, self._round.spec, weight, shards, largest)
        key = self._layout.offer(self._step, offer)
        self._store.put(key, pack_manifest(self._layout.address(key), manifest))

    def prefetch_offers(self, members: Sequence[Member], shards: Sequence[int]) -> None:
        """Prefetch the first offers of a seal that is about to be created, most likely with these members."""
        other_members = [member for member in members if member.weight and not self._is_mine(member)]
        calls = (partial(self._read_offer, member, shard) for shard in shards for member in other_members)
        self._offers = ((members, shards), self._in_order(calls))

    def prefetch_means(self, attempt: int, outcome: RoundOutcome) -> None:
        """Prefetch the first shards of a mean that is about to be committed, and drop those of earlier attempts."""
        self._means = {}
        for shard, sha256 in enumerate(outcome.means[: self._settings.parallel]):
            key = self._mean_key(attempt, outcome.members, shard, sha256)
            self._means[key] = self._pool.submit(self._read_mean, key, sha256, shard, outcome.members)

    def reduce(self, attempt: int, members: Sequence[Member], shards: Sequence[int]) -> None:
        """Compute shards of the mean and write each under its checksum.

        Offers of the next shards are read while a mean is written: each direction has its own requests.
        """
        if self._offers[0] != (members, shards):
            self.prefetch_offers(members, shards)
        (_, offers), self._offers = self._offers, (None, iter(()))
        counted = [member for member in members if member.weight]
        puts: deque[Future[None]] = deque()
        for shard in shards:
            vectors = (self._read_offer(member, shard) if self._is_mine(member) else next(offers) for member in counted)
            data, sha256 = self._mean_of(members, shard, vectors)
            puts.append(self._pool.submit(self._store.put, self._mean_key(attempt, members, shard, sha256), data))
            # Frees the bytes early: the queue of writes is bounded, and nothing else holds them.
            del data
            if len(puts) >= self._settings.parallel:
                puts.popleft().result()
        for put in puts:
            put.result()

    def fetch_mean(self, attempt: int, outcome: RoundOutcome) -> None:
        """Copy the committed mean into the round's tensors.

        Raises _UnreadableOffer if a shard can neither be read nor computed again.
        """
        vector = self._round.vector

        def fetch(shard: int) -> None:
            vector.write(shard, self._committed(attempt, outcome, shard))

        for _ in self._in_order(partial(fetch, shard) for shard in range(vector.num_shards)):
            pass
        vector.finish()

    def updated_feedback(self) -> ErrorFeedback | None:
        """Return the error feedback after a commit, with this round's residual in it."""
        if self._round.feedback is not None and self._residual is not None:
            self._round.feedback.keep(self._residual)
        return self._round.feedback

    def _rounded_vector(self) -> RoundVector:
        """Return the vector to offer, which is computed once per wait."""
        if self._offered is None:
            vector, feedback = self._round.vector, self._round.feedback
            if feedback is None:
                self._offered = vector
            else:
                whole = torch.cat([vector.read(shard) for shard in range(vector.num_shards)])
                sent, self._residual = feedback.compress(whole, self._settings.payload)
                self._offered = vector.like(sent)
        return self._offered

    def _put_all(self, offer: OfferId) -> tuple[float, tuple[Shard, ...], float]:
        """Write all shards of an offer. Returns its weight, its shards and its largest magnitude."""
        try:
            vector = self._rounded_vector()
            put = list(self._in_order(partial(self._put, vector, offer, shard) for shard in range(vector.num_shards)))
        except NonFiniteError:
            return 0.0, (), 0.0
        largest = max((magnitude for _, magnitude in put), default=0.0)
        if largest > MAX_MAGNITUDE:
            return 0.0, (), 0.0
        return self._round.weight, tuple(shard for shard, _ in put), largest

    def _put(self, vector: RoundVector, offer: OfferId, shard: int) -> tuple[Shard, float]:
        values = vector.read(shard)
        data = encode_vector(values, kind=self._settings.payload, about=self._about(offer, shard))
        self._store.put(self._layout.shard(self._step, offer, shard), data)
        return Shard(len(data), identity(data)), largest_of(values)

    def _mean_bytes(self, members: Sequence[Member], shard: int) -> tuple[bytes, str]:
        return self._mean_of(members, shard, (self._read_offer(member, shard) for member in members if member.weight))

    def _mean_of(self, members: Sequence[Member], shard: int, vectors: Iterable[Tensor]) -> tuple[bytes, str]:
        """Return a shard of the mean and its identity. `vectors` are those of members with weight, in order."""
        weights = scaled_weights([member.weight for member in members if member.weight])
        mean = weighted_mean(zip(weights, vectors, strict=True), self._round.vector.size(shard))
        about = self._about_mean(members, shard)
        data = encode_vector(mean, kind=self._settings.mean_payload, about=about)
        return data, identity(data)

    def _read_offer(self, member: Member, shard: int) -> Tensor:
        manifest = self._manifest(member)
        if manifest is None or shard >= len(manifest.shards):
            raise _UnreadableOffer(member.id)
        if self._offered is not None and self._is_mine(member):
            return self._offered.read(shard)
        values = self._read(
            self._layout.shard(self._step, member.id, shard),
            manifest.shards[shard].sha256,
            shard,
            self._about(member.id, shard),
            member.id,
        )
        if largest_of(values) > manifest.largest * _ROUNDED_UP:
            self._store.traffic.add(refused=1)
            raise _UnreadableOffer(member.id)
        return values

    def _is_mine(self, member: Member) -> bool:
        """Return whether this is an offer of this wait, whose numbers are in memory."""
        position = self._round.position
        is_own = member.id[:2] == (position.rank, position.claim) and member.id.trial >= position.first_trial
        return is_own and self._offered is not None

    def _manifest(self, member: Member) -> Manifest | None:
        entry = self._round.reader.manifests.get(member.id)
        return entry[1] if entry is not None and entry[0] == member.manifest else None

    def _committed(self, attempt: int, outcome: RoundOutcome, shard: int) -> Tensor:
        """Return a shard of the committed mean. One that is damaged is computed again and written back."""
        members, sha256 = outcome.members, outcome.means[shard]
        key = self._mean_key(attempt, members, shard, sha256)
        pending_mean = self._means.pop(key, None)
        try:
            return pending_mean.result() if pending_mean is not None else self._read_mean(key, sha256, shard, members)
        except _UnreadableOffer:
            data, again = self._mean_bytes(members, shard)
            if again != sha256:
                raise
            self._store.put(key, data)
            about = self._about_mean(members, shard)
            return decode_vector(data, elements=self._round.vector.size(shard), about=about)

    def _read_mean(self, key: str, sha256: str, shard: int, members: Sequence[Member]) -> Tensor:
        return self._read(key, sha256, shard, self._about_mean(members, shard), members[0].id)

    def _mean_key(self, attempt: int, members: Sequence[Member], shard: int, sha256: str) -> str:
        return self._layout.mean(self._step, attempt, shard, sha256, digest(members))

    def _read(self, key: str, sha256: str, shard: int, about: dict[str, str], offer: OfferId) -> Tensor:
        elements = self._round.vector.size(shard)
        # A short vector takes more bytes in 8 bits than in 32, because every block has a scale.
        most_bytes = max(payload_bytes(elements, kind) for kind in self._settings.kinds)
        for _ in range(READS):
            # A read may be damaged on its way, so it is repeated; a missing object will not come back.
            try:
                data = self._store.get(key, most_bytes=most_bytes)
                if identity(data) == sha256:
                    return decode_vector(data, elements=elements, about=about)
                self._store.traffic.add(refused=1)
            except MissingObject:
                break
            except (PayloadError, ObjectTooLarge):
                self._store.traffic.add(refused=1)
        raise _UnreadableOffer(offer)

    def _in_order(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Yield what the calls return, in their order. The first `parallel` calls start at once; no more run ahead."""
        rest = iter(calls)
        under_way = deque(self._pool.submit(call) for call in islice(rest, self._settings.parallel))

        def results() -> Iterator[T]:
            while under_way:
                result = under_way.popleft().result()
                under_way.extend(self._pool.submit(call) for call in islice(rest, 1))
                yield result

        return results()

    def _about(self, offer: OfferId, shard: int) -> dict[str, str]:
        where = f"g{self._layout.generation} round {self._step}"
        return {"where": where, "offer": str(offer), "shard": str(shard)}

    def _about_mean(self, members: Sequence[Member], shard: int) -> dict[str, str]:
        where = f"g{self._layout.generation} round {self._step}"
        return {"where": where, "mean_of": digest(members), "shard": str(shard)}
