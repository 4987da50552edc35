"""The bytes of a round: tensors as one vector in shards, writing an offer, and computing and reading the mean."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from composer_replication.diloco.payload import (
    BLOCK_ELEMENTS,
    HEADER_BYTES,
    ErrorFeedback,
    PayloadError,
    PayloadKind,
    decode_vector,
    encode_vector,
    payload_bytes,
)
from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.reading import READS
from composer_replication.diloco.rounds.records import (
    MAX_MAGNITUDE,
    MAX_SHARDS,
    Layout,
    Manifest,
    Member,
    OfferId,
    RoundOutcome,
    Shard,
    digest,
    pack_manifest,
)
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import InputError, NonFiniteError, ShapeError, explain

T = TypeVar("T")
# A large vector is cut into about 16 shards per party, but not into shards below 2**19 elements.
_FINE_ELEMENTS, _FINE_SHARDS = 2**19, 16
_ROUNDED_UP = 1 + 2.0**-7  # how much rounding to any payload kind can enlarge a number


class RoundVector:
    """Tensors in a row, cut into shards. The whole vector is never copied: a shard is gathered when it is needed."""

    def __init__(self, tensors: Sequence[Tensor], *, parties: int, shard_elements: int) -> None:
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                got = f"tensor {index} of {tensor.dtype}"
                raise ShapeError(explain("all-reduce", got=got, expected="floating point"))
        self.tensors = [tensor.detach() for tensor in tensors]
        # Copies only tensors that are not contiguous.
        self._flat = [tensor.contiguous().view(-1) for tensor in self.tensors]
        self.elements = sum(tensor.numel() for tensor in tensors)
        self.shard_elements, self.num_shards = _shard_sizes(self.elements, parties, shard_elements)
        if self.num_shards >= MAX_SHARDS:
            got, expected = f"{self.num_shards:,} shards of {shard_elements:,} numbers", f"fewer than {MAX_SHARDS:,}"
            raise InputError(explain("shards of a vector", got=got, expected=expected, fix="Set larger shard_bytes."))

    def size(self, shard: int) -> int:
        """Return the number of elements in a shard."""
        return min(self.shard_elements, self.elements - shard * self.shard_elements)

    def read(self, shard: int) -> Tensor:
        """Return a shard in fp32 on the CPU. It may be a view of the tensors, so do not write to it."""
        pieces = [flat[a:b].to("cpu", torch.float32) for flat, a, b, _ in self._pieces(shard)]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def write(self, shard: int, values: Tensor) -> None:
        """Copy values into a shard."""
        for flat, a, b, start in self._pieces(shard):
            flat[a:b].copy_(values[start : start + b - a])

    def like(self, flat: Tensor) -> RoundVector:
        """Return a vector of these numbers that is cut in the same way."""
        if flat.numel() != self.elements:
            raise ShapeError(explain("numbers of a vector", got=f"{flat.numel():,}", expected=f"{self.elements:,}"))
        vector = copy.copy(self)
        vector.tensors, vector._flat = [flat.detach()], [flat.detach().contiguous().view(-1)]
        return vector

    def finish(self) -> None:
        """Copy the shards into tensors that are not contiguous. Call it after the last write."""
        for tensor, flat in zip(self.tensors, self._flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def _pieces(self, shard: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield the part of each tensor that is in the shard, and where in the shard it begins."""
        first = shard * self.shard_elements
        last = first + self.size(shard)
        start = 0
        for flat in self._flat:
            end = start + flat.numel()
            a, b = max(first, start), min(last, end)
            if a < b:
                yield flat, a - start, b - start, a - first
            start = end


def _shard_sizes(elements: int, parties: int, shard_elements: int) -> tuple[int, int]:
    """Return the elements per shard and the number of shards, a multiple of the parties, so that each has the same
    work.

    A large vector has several shards per party, so that less than one party's part is in memory at once.
    """
    piece = min(shard_elements, max(_FINE_ELEMENTS, -(-elements // (_FINE_SHARDS * parties))))
    num_pieces = max(parties, -(-elements // piece))
    num_pieces = -(-num_pieces // parties) * parties
    size = max(1, -(-elements // num_pieces))
    # A shard is a whole number of payload blocks, so that its scales do not depend on the cut.
    size = -(-size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
    return size, -(-elements // size)


def vector_spec(vector: RoundVector, kinds: tuple[PayloadKind, PayloadKind], name: str) -> str:
    """Return a digest that is equal at two replicas exactly if their vectors may be averaged."""
    shapes = [[str(tensor.dtype), list(tensor.shape)] for tensor in vector.tensors]
    return digest({"name": name, "tensors": shapes, "payloads": kinds, "shard_elements": vector.shard_elements})


def _weighted_mean(offers: Iterable[tuple[float, Tensor]], elements: int) -> Tensor:
    """Return the sum of weight times vector, in the order of `offers`, divided by the sum of weights.

    Each product and each sum is rounded to fp32 separately: a fused multiply-add would give other bits on other
    machines. A weight of 1 is not multiplied, so that equal weights give the mean of a plain all-reduce.
    """
    total, mean = 0.0, torch.zeros(elements)
    for weight, vector in offers:
        mean.add_(vector.mul(weight) if weight != 1.0 else vector)
        total += weight
    return mean.div_(total)


def _scaled_weights(weights: Sequence[float]) -> list[float]:
    """Return ones if all weights are equal; otherwise the weights times a power of two, so that their sum is below 1.

    Then no product or sum of the mean exceeds the largest number of its vectors. A power of two changes no mantissa.
    """
    if len(set(weights)) == 1:
        return [1.0] * len(weights)
    return [math.ldexp(weight, -math.frexp(sum(weights))[1]) for weight in weights]


def largest_magnitude(values: Tensor) -> float:
    """Return the largest magnitude, without a copy."""
    # aminmax makes no tensor of absolute values; a NaN makes both extremes NaN.
    return max((abs(float(edge)) for edge in torch.aminmax(values)), default=0.0) if values.numel() else 0.0


class UnreadableOffer(Exception):
    """An offer that was sealed cannot be read, after several tries."""

    def __init__(self, offer: OfferId) -> None:
        super().__init__(str(offer))
        self.offer = offer


def _payload_digest(data: bytes) -> str:
    """Return the identity of a payload: the digest of its header.

    The header holds the checksum of the rest, which the reader compares.
    """
    return hashlib.sha256(data[:HEADER_BYTES]).hexdigest()


class ShardIO:
    """Reads and writes the shards of one running round."""

    def __init__(
        self,
        store: PatientStore,
        layout: Layout,
        settings: RoundSettings,
        position: RunPosition,
        vector: RoundVector,
        spec: str,
        weight: float,
        pool: ThreadPoolExecutor,
        feedback: ErrorFeedback | None,
        manifests: Mapping[OfferId, tuple[str, Manifest]],
    ) -> None:
        self._store, self._layout, self._settings, self._position = store, layout, settings, position
        self._vector, self._spec, self._weight, self._pool = vector, spec, weight, pool
        self._feedback = feedback
        # The manifests that the round has read so far, with their digests.
        self._manifests = manifests
        # The vector as readers see it: rounded, with the residual of earlier rounds.
        self._rounded: RoundVector | None = None
        self._residual: Tensor | None = None
        # Prefetched: (members, shards) and the vectors.
        self._offers: tuple[object, Iterator[Tensor]] = (None, iter(()))
        self._means: dict[str, Future[Tensor]] = {}  # prefetched, by key

    def make_offer(self, trial: int) -> None:
        """Write the shards and then their manifest, so that a crash in between leaves nothing visible.

        A vector that is not finite, or too large to be summed, is offered without weight and shards: its replica takes
        the mean of the others.
        """
        offer = OfferId(self._position.rank, self._position.claim, trial)
        weight, shards, largest = self._put_all(offer) if self._weight else (0.0, (), 0.0)
        manifest = Manifest(offer, self._position.base, self._spec, weight, shards, largest)
        key = self._layout.offer(self._position.step, offer)
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

        Raises UnreadableOffer if a shard can neither be read nor computed again.
        """
        vector = self._vector

        def fetch(shard: int) -> None:
            vector.write(shard, self._committed(attempt, outcome, shard))

        for _ in self._in_order(partial(fetch, shard) for shard in range(vector.num_shards)):
            pass
        vector.finish()

    def keep_residual(self) -> None:
        """Keep what rounding took from this round's offer, to be added to the next one."""
        if self._feedback is not None and self._residual is not None:
            self._feedback.keep(self._residual)

    def _rounded_vector(self) -> RoundVector:
        """Return the vector to offer, which is computed once per wait."""
        if self._rounded is None:
            vector, feedback = self._vector, self._feedback
            if feedback is None:
                self._rounded = vector
            else:
                whole = torch.cat([vector.read(shard) for shard in range(vector.num_shards)])
                sent, self._residual = feedback.compress(whole, self._settings.payload)
                self._rounded = vector.like(sent)
        return self._rounded

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
        return self._weight, tuple(shard for shard, _ in put), largest

    def _put(self, vector: RoundVector, offer: OfferId, shard: int) -> tuple[Shard, float]:
        values = vector.read(shard)
        data = encode_vector(values, kind=self._settings.payload, about=self._about(offer, shard))
        self._store.put(self._layout.shard(self._position.step, offer, shard), data)
        return Shard(len(data), _payload_digest(data)), largest_magnitude(values)

    def _mean_bytes(self, members: Sequence[Member], shard: int) -> tuple[bytes, str]:
        return self._mean_of(members, shard, (self._read_offer(member, shard) for member in members if member.weight))

    def _mean_of(self, members: Sequence[Member], shard: int, vectors: Iterable[Tensor]) -> tuple[bytes, str]:
        """Return a shard of the mean and its identity. `vectors` are those of members with weight, in order."""
        weights = _scaled_weights([member.weight for member in members if member.weight])
        mean = _weighted_mean(zip(weights, vectors, strict=True), self._vector.size(shard))
        about = self._about_mean(members, shard)
        data = encode_vector(mean, kind=self._settings.mean_payload, about=about)
        return data, _payload_digest(data)

    def _read_offer(self, member: Member, shard: int) -> Tensor:
        manifest = self._manifest(member)
        if manifest is None or shard >= len(manifest.shards):
            raise UnreadableOffer(member.id)
        if self._rounded is not None and self._is_mine(member):
            return self._rounded.read(shard)
        values = self._read(
            self._layout.shard(self._position.step, member.id, shard),
            manifest.shards[shard].sha256,
            shard,
            self._about(member.id, shard),
            member.id,
        )
        if largest_magnitude(values) > manifest.largest * _ROUNDED_UP:
            self._store.traffic.add(refused=1)
            raise UnreadableOffer(member.id)
        return values

    def _is_mine(self, member: Member) -> bool:
        """Return whether this is an offer of this wait, whose numbers are in memory."""
        position = self._position
        is_own = member.id[:2] == (position.rank, position.claim) and member.id.trial >= position.first_trial
        return is_own and self._rounded is not None

    def _manifest(self, member: Member) -> Manifest | None:
        entry = self._manifests.get(member.id)
        return entry[1] if entry is not None and entry[0] == member.manifest else None

    def _committed(self, attempt: int, outcome: RoundOutcome, shard: int) -> Tensor:
        """Return a shard of the committed mean. One that is damaged is computed again and written back."""
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
            return decode_vector(data, elements=self._vector.size(shard), about=about)

    def _read_mean(self, key: str, sha256: str, shard: int, members: Sequence[Member]) -> Tensor:
        return self._read(key, sha256, shard, self._about_mean(members, shard), members[0].id)

    def _mean_key(self, attempt: int, members: Sequence[Member], shard: int, sha256: str) -> str:
        return self._layout.mean(self._position.step, attempt, shard, sha256, digest(members))

    def _read(self, key: str, sha256: str, shard: int, about: dict[str, str], offer: OfferId) -> Tensor:
        elements = self._vector.size(shard)
        # A short vector takes more bytes in 8 bits than in 32, because every block has a scale.
        most_bytes = max(payload_bytes(elements, kind) for kind in self._settings.payload_kinds)
        for _ in range(READS):
            # A read may be damaged on its way, so it is repeated; a missing object will not come back.
            try:
                data = self._store.get(key, most_bytes=most_bytes)
                if _payload_digest(data) == sha256:
                    return decode_vector(data, elements=elements, about=about)
                self._store.traffic.add(refused=1)
            except MissingObject:
                break
            except (PayloadError, ObjectTooLarge):
                self._store.traffic.add(refused=1)
        raise UnreadableOffer(offer)

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
        where = f"g{self._layout.generation} round {self._position.step}"
        return {"where": where, "offer": str(offer), "shard": str(shard)}

    def _about_mean(self, members: Sequence[Member], shard: int) -> dict[str, str]:
        where = f"g{self._layout.generation} round {self._position.step}"
        return {"where": where, "mean_of": digest(members), "shard": str(shard)}
