"""The bytes of a round: shards out, the mean of a shard, and the mean back into the tensors."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from composer_replication.diloco.payload import ErrorFeedback, PayloadError, decode_vector, encode_vector, payload_bytes
from composer_replication.diloco.payload.formats import HEADER_BYTES
from composer_replication.diloco.rounds.reading import READS
from composer_replication.diloco.rounds.records import (
    MOST_MAGNITUDE,
    Manifest,
    Member,
    OfferId,
    Outcome,
    Shard,
    digest,
    pack_manifest,
)
from composer_replication.diloco.rounds.vectors import RoundVector, fair, largest_of, weighted_mean
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import NonFiniteError

if TYPE_CHECKING:
    from composer_replication.diloco.rounds.running import RunningRound


T = TypeVar("T")
_ROUNDED_UP = 1 + 2.0**-7  # at most, by any payload


class UnreadableOffer(Exception):
    """A sealed offer stayed unreadable after several reads."""

    def __init__(self, offer: OfferId) -> None:
        super().__init__(str(offer))
        self.offer = offer


def identity(data: bytes) -> str:
    """A payload's name: the digest of its header, which holds the checksum that its reader compares the rest with."""
    return hashlib.sha256(data[:HEADER_BYTES]).hexdigest()


class ShardIO:
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

    def expect_outcome(self, attempt: int, outcome: Outcome) -> None:
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

    def fetch_mean(self, attempt: int, outcome: Outcome) -> None:
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
            raise UnreadableOffer(member.id)
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
            raise UnreadableOffer(member.id)
        return values

    def _is_mine(self, member: Member) -> bool:
        """Whether it is an offer of this wait, whose numbers are here."""
        position = self._round.place
        is_own = member.id[:2] == (position.rank, position.claim) and member.id.trial >= position.first_trial
        return is_own and self._offered is not None

    def _manifest(self, member: Member) -> Manifest | None:
        entry = self._round.reader.manifests.get(member.id)
        return entry[1] if entry is not None and entry[0] == member.manifest else None

    def _committed(self, attempt: int, outcome: Outcome, shard: int) -> Tensor:
        """A shard of the mean; where it is damaged, computed again and put in its place."""
        members, sha256 = outcome.members, outcome.means[shard]
        key = self._mean_key(attempt, members, shard, sha256)
        pending_mean = self._means.pop(key, None)
        try:
            return pending_mean.result() if pending_mean is not None else self._read_mean(key, sha256, shard, members)
        except UnreadableOffer:
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
        raise UnreadableOffer(offer)

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
