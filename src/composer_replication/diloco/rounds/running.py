"""One round of one replica: read, decide, act, until it is over. `decide` has the rules; here is the work."""

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
from typing import TYPE_CHECKING, Literal, TypeVar

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
from composer_replication.diloco.rounds.patience import (
    OfferUnreadable,
    PatientStore,
    QuorumLeft,
    RoundTimeout,
)
from composer_replication.diloco.rounds.reading import READS, RoundReader
from composer_replication.diloco.rounds.records import (
    MOST_MAGNITUDE,
    MOST_RANKS,
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
from composer_replication.diloco.rounds.vectors import (
    RoundVector,
    fair,
    largest_of,
    spec_of,
    weighted_mean,
)
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import (
    InputError,
    NonFiniteError,
    ShapeError,
    explain,
)

if TYPE_CHECKING:
    pass


_log = logging.getLogger(__name__)
_ASK_AFTER_POLLS = 3
_MOST_RETURN_S = 4.0  # a late replica of a run that has ended ends within 5 s


@dataclass(frozen=True)
class RoundSettings:
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
class RunPosition:
    """Where in its run a replica stands."""

    rank: int
    claim: int
    step: int = 0
    base: str = ""
    last: RoundOutcome | None = None  # the commit that led here
    first_trial: int = 0
    commits: int | None = None  # that the run needs, where that was said


Result = Literal["commit", "void", "heal", "over"]


@dataclass
class Ended:
    """How a wait ended: with a commit that is in the tensors by now, without one, or with the need to heal."""

    result: Result  # over: the run had ended, and no round was held
    outcome: RoundOutcome | None = None
    seconds: float = 0.0
    trials: int = 0
    feedback: ErrorFeedback | None = None


@dataclass
class RunningRound:
    store: PatientStore
    layout: Layout
    settings: RoundSettings
    place: RunPosition
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
        self.shards = _ShardIO(self)
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

    def take(self, outcome: RoundOutcome) -> Result:
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
            self._weight_in(outcome)
            return Ended("void", outcome, trials=1 + max(member.id.trial for member in outcome.members))
        if outcome.spec != self.spec or len(outcome.means) != self.vector.num_shards:
            raise self._failure(Fail("spec", frozenset(member.id.rank for member in outcome.members)), view)
        try:
            self.shards.fetch_mean(view.attempt, outcome)
        except _UnreadableOffer:  # neither the mean nor what it was made of is there any more
            return Ended("heal")
        weight = self._weight_in(outcome)
        return Ended("commit", outcome, feedback=self.shards.feedback_kept() if weight else self.feedback)

    def _weight_in(self, outcome: RoundOutcome) -> float:
        """What this replica counted in an outcome. That it was left out is said, for nobody else sees why."""
        mine = (self.place.rank, self.place.claim)
        weights = [member.weight for member in outcome.members if member.id[:2] == mine]
        if weights == [0] and self.weight:
            why = "it was not finite, or far larger than what the others moved"
            _log.warning("round %d: what rank %d moved was left out: %s", self.place.step, self.place.rank, why)
        return sum(weights)

    def _act(self, view: RoundView, action: Action) -> RoundView | None:
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
        except _UnreadableOffer as bad:
            self.unreadable.add(bad.offer)

    def _outcome(self, view: RoundView, action: CreateOutcome) -> RoundOutcome:
        members = view.seal.members if isinstance(view.seal, Seal) else ()
        shas = self.reader.mean_shas.get(view.attempt, {})
        means = tuple(shas[shard] for shard in sorted(shas)) if action.result == "commit" else ()
        manifests = [self.reader.manifests[member.id][1] for member in members if member.id in self.reader.manifests]
        return RoundOutcome(
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

    def _failure(self, action: Fail, view: RoundView) -> Exception:
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

    def _quorum_left(self, where: str, action: Fail, view: RoundView) -> QuorumLeft:
        steps = self.reader.departures().finished_at
        finished = ", ".join(f"rank {rank} finished at step {steps[rank]}" for rank in sorted(action.ranks))
        joining, needed = len(may_join(view, self._myself())), self.settings.min_replicas
        fix = "If the run has all its commits, load the last published state and stop. To go on, start those replicas "
        fix += "again with a larger number of commits, and give that number to every replica (end_after)."
        return QuorumLeft(f"{where}: only {joining} of the {needed} replicas needed can still join: {finished}. {fix}")


class _Clock:
    """My own clock alone: how long since a quorum was there or could not come any more, since the attempt moved,
    since the wait began."""

    def __init__(self, settings: RoundSettings, *, first: bool, return_grace_s: float) -> None:
        self._settings, self._return_grace_s = settings, return_grace_s
        self._grace_s = settings.first_grace_s if first else settings.grace_s
        self._began = self._moved = time.monotonic()
        self._quorum: float | None = None
        self._alone: float | None = None
        self._progress: object = None
        self._pause = settings.poll_s / 8
        self._asked = self._began

    def look(self, seen: RoundView, offers: int, *, joining: int) -> None:
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


# The bytes of a round: shards out, the mean of a shard, and the mean back into the tensors.

T = TypeVar("T")
_ROUNDED_UP = 1 + 2.0**-7  # at most, by any payload


class _UnreadableOffer(Exception):
    """A sealed offer stayed unreadable after several reads."""

    def __init__(self, offer: OfferId) -> None:
        super().__init__(str(offer))
        self.offer = offer


def identity(data: bytes) -> str:
    """A payload's name: the digest of its header, which holds the checksum that its reader compares the rest with."""
    return hashlib.sha256(data[:HEADER_BYTES]).hexdigest()


class _ShardIO:
    """Reads and writes the shards of one running round."""

    def __init__(self, round: RunningRound) -> None:
        self._round: RunningRound = weakref.proxy(round)  # whose tensors go with it, not with a later collection
        self._store, self._layout, self._settings = round.store, round.layout, round.settings
        self._step = round.place.step
        self._offered: RoundVector | None = None  # as its readers see it: rounded, with what was left out before
        self._residual: Tensor | None = None
        self._pool: ThreadPoolExecutor = round.pool
        self._offers: tuple[object, Iterator[Tensor]] = (None, iter(()))  # asked for before the seal: of what, and they
        self._means: dict[str, Future[Tensor]] = {}  # asked for before the outcome

    def make_offer(self, trial: int) -> None:
        """Shards first and then their manifest: a crash in between leaves nothing that anybody sees.

        A vector that is not finite, or too large to be summed up, is offered without weight: its replica takes the mean
        of the others.
        """
        offer = OfferId(self._round.place.rank, self._round.place.claim, trial)
        weight, shards, largest = self._put_all(offer) if self._round.weight else (0.0, (), 0.0)
        manifest = Manifest(offer, self._round.place.base, self._round.spec, weight, shards, largest)
        key = self._layout.offer(self._step, offer)
        self._store.put(key, pack_manifest(self._layout.address(key), manifest))

    def expect_seal(self, members: Sequence[Member], shards: Sequence[int]) -> None:
        """A seal is being created that will most likely have these members: ask for the first offers meanwhile."""
        other_members = [member for member in members if member.weight and not self._is_mine(member)]
        calls = (partial(self._read_offer, member, shard) for shard in shards for member in other_members)
        self._offers = ((members, shards), self._in_order(calls))

    def expect_outcome(self, attempt: int, outcome: RoundOutcome) -> None:
        """The same for the first shards of a mean that is being committed; those of one that lost are let go."""
        self._means = {}
        for shard, sha256 in enumerate(outcome.means[: self._settings.parallel]):
            key = self._mean_key(attempt, outcome.members, shard, sha256)
            self._means[key] = self._pool.submit(self._read_mean, key, sha256, shard, outcome.members)

    def reduce(self, attempt: int, members: Sequence[Member], shards: Sequence[int]) -> None:
        """Compute shards of the mean and put each under the name of its checksum.

        Offers of the next shards come in while a mean goes out: each way has requests of its own under way.
        """
        if self._offers[0] != (members, shards):
            self.expect_seal(members, shards)
        (_, offers), self._offers = self._offers, (None, iter(()))
        counted = [member for member in members if member.weight]
        puts: deque[Future[None]] = deque()
        for shard in shards:
            vectors = (self._read_offer(member, shard) if self._is_mine(member) else next(offers) for member in counted)
            data, sha256 = self._mean_of(members, shard, vectors)
            puts.append(self._pool.submit(self._store.put, self._mean_key(attempt, members, shard, sha256), data))
            del data  # what waits to be put is bounded, and nothing else holds it
            if len(puts) >= self._settings.parallel:
                puts.popleft().result()
        for put in puts:
            put.result()

    def fetch_mean(self, attempt: int, outcome: RoundOutcome) -> None:
        """The committed mean into the round's tensors. UnreadableOffer where neither it nor its parts can be read."""
        vector = self._round.vector

        def fetch(shard: int) -> None:
            vector.write(shard, self._committed(attempt, outcome, shard))

        for _ in self._in_order(partial(fetch, shard) for shard in range(vector.num_shards)):
            pass
        vector.finish()

    def feedback_kept(self) -> ErrorFeedback | None:
        if self._round.feedback is not None and self._residual is not None:
            self._round.feedback.keep(self._residual)
        return self._round.feedback

    def _to_offer(self) -> RoundVector:
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
        """The weight of the offer, its shards, and its largest magnitude."""
        try:
            vector = self._to_offer()
            put = list(self._in_order(partial(self._put, vector, offer, shard) for shard in range(vector.num_shards)))
        except NonFiniteError:
            return 0.0, (), 0.0
        largest = max((magnitude for _, magnitude in put), default=0.0)
        if largest > MOST_MAGNITUDE:
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
        """A shard of the mean and its checksum, from the vectors of the members that have weight, in their order."""
        weights = fair([member.weight for member in members if member.weight])
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
        """Whether it is an offer of this wait, whose numbers are here."""
        position = self._round.place
        is_own = member.id[:2] == (position.rank, position.claim) and member.id.trial >= position.first_trial
        return is_own and self._offered is not None

    def _manifest(self, member: Member) -> Manifest | None:
        entry = self._round.reader.manifests.get(member.id)
        return entry[1] if entry is not None and entry[0] == member.manifest else None

    def _committed(self, attempt: int, outcome: RoundOutcome, shard: int) -> Tensor:
        """A shard of the mean; where it is damaged, computed again and put in its place."""
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
        # A few numbers take more bytes in 8 bits than in 32: each block has a scale.
        most_bytes = max(payload_bytes(elements, kind) for kind in self._settings.kinds)
        for _ in range(READS):
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
        """What calls return, in their order; the first ones are made at once, and no more than is allowed ahead."""
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
