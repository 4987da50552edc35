"""Handle the bytes of a round: divide tensors into shards, write offers, and compute and read means."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
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
    pack,
)
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import InputError, NonFiniteError, ShapeError, explain

T = TypeVar("T")
# A large vector is cut into about 16 shards per replica, but not into shards of less than 2**19 elements.
_MIN_SHARD_ELEMENTS, _SHARDS_PER_PARTY = 2**19, 16
_MAX_ROUNDING = 1 + 2.0**-7  # the largest factor by which rounding to a payload kind can enlarge a number


class RoundVector:
    """Tensors viewed as one long vector that is divided into shards.

    The vector is never copied as a whole: each shard is gathered when it is needed.
    """

    def __init__(self, tensors: Sequence[Tensor], *, parties: int, shard_elements: int) -> None:
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                got = f"tensor {index} of {tensor.dtype}"
                raise ShapeError(explain("all-reduce", got=got, expected="floating-point tensors"))
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
        """Return a shard in fp32 on the CPU. It may share memory with the tensors, so callers must not write to it."""
        pieces = [flat[a:b].to("cpu", torch.float32) for flat, a, b, _ in self._pieces(shard)]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def write(self, shard: int, values: Tensor) -> None:
        """Copy values into a shard."""
        for flat, a, b, start in self._pieces(shard):
            flat[a:b].copy_(values[start : start + b - a])

    def like(self, flat: Tensor) -> RoundVector:
        """Return a vector with the elements of `flat`, divided into the same shards."""
        if flat.numel() != self.elements:
            raise ShapeError(explain("numbers of a vector", got=f"{flat.numel():,}", expected=f"{self.elements:,}"))
        vector = copy.copy(self)
        vector.tensors, vector._flat = [flat.detach()], [flat.detach().contiguous().view(-1)]
        return vector

    def finish(self) -> None:
        """Copy the written values back to tensors that are not contiguous. Must be called after the last write."""
        for tensor, flat in zip(self.tensors, self._flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def spec(self, kinds: tuple[PayloadKind, PayloadKind], name: str) -> str:
        """Return a digest of the layout of this vector. Two replicas have the same digest exactly if their vectors
        can be averaged.
        """
        shapes = [[str(tensor.dtype), list(tensor.shape)] for tensor in self.tensors]
        return digest({"name": name, "tensors": shapes, "payloads": kinds, "shard_elements": self.shard_elements})

    def _pieces(self, shard: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield one tuple for each tensor that overlaps the shard: the flattened tensor, the start and end of the
        overlap in the tensor, and the start of the overlap in the shard.
        """
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
    """Return the number of elements per shard, and the number of shards.

    The number of shards is a multiple of `parties`, so that each party averages the same number of shards, but shards
    at the end that would be empty are left out. A large vector has several shards per party, so that no party has to
    hold its whole part in memory.
    """
    piece = min(shard_elements, max(_MIN_SHARD_ELEMENTS, -(-elements // (_SHARDS_PER_PARTY * parties))))
    num_pieces = max(parties, -(-elements // piece))
    num_pieces = -(-num_pieces // parties) * parties
    size = max(1, -(-elements // num_pieces))
    # A shard is a multiple of the payload blocks, so that the scales of a block do not depend on the shards.
    size = -(-size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
    return size, -(-elements // size)


def _weighted_mean(offers: Iterable[tuple[float, Tensor]], elements: int) -> Tensor:
    """Return the weighted mean of vectors. `offers` are pairs of weight and vector, which are added in this order.

    Each product and each sum is rounded to fp32 separately, because the result of a fused multiply-add would differ
    between machines. If all weights are equal, there is no multiplication by them, so that the result is exactly the
    mean of a plain all-reduce.
    """
    total, mean = 0.0, torch.zeros(elements)
    for weight, vector in offers:
        mean.add_(vector.mul(weight) if weight != 1.0 else vector)
        total += weight
    return mean.div_(total)


def _scaled_weights(weights: Sequence[float]) -> list[float]:
    """Return ones if all weights are equal; otherwise, return the weights scaled by a power of two so that their sum is
    below 1.

    This keeps every product and sum in the mean below the largest absolute value of the vectors. Scaling by a power of
    two does not change a mantissa.
    """
    if len(set(weights)) == 1:
        return [1.0] * len(weights)
    return [math.ldexp(weight, -math.frexp(sum(weights))[1]) for weight in weights]


def largest_magnitude(values: Tensor) -> float:
    """Return the largest absolute value of a tensor without copying the tensor."""
    # Unlike abs().max(), aminmax allocates no second tensor. If there is a NaN, both extremes are NaN.
    return max((abs(float(edge)) for edge in torch.aminmax(values)), default=0.0) if values.numel() else 0.0


class UnreadableOffer(Exception):
    """Raised if a sealed offer cannot be read, even after several tries."""

    def __init__(self, offer: OfferId) -> None:
        super().__init__(str(offer))
        self.offer = offer


def _payload_digest(data: bytes) -> str:
    """Return the digest of a payload's header. It identifies the whole payload, because the header contains a
    checksum of the rest, which readers verify.
    """
    return hashlib.sha256(data[:HEADER_BYTES]).hexdigest()


class ShardIO:
    """Reads and writes the shards of one round."""

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
        # The vector as readers of the offer see it: with the residual of earlier rounds, and rounded.
        self._rounded: RoundVector | None = None
        self._residual: Tensor | None = None
        # Prefetched offers: (members, shards) and an iterator over their vectors.
        self._offers: tuple[object, Iterator[Tensor]] = (None, iter(()))
        self._means: dict[str, Future[Tensor]] = {}  # prefetched means, by key

    def make_offer(self, trial: int) -> None:
        """Write the shards of an offer and then its manifest, so that the offer becomes visible only when it is
        complete.

        A vector that is not finite, or is too large to be summed, is offered with weight 0 and without shards; this
        replica then takes the mean of the others.
        """
        offer = OfferId(self._position.rank, self._position.claim, trial)
        weight, shards, largest = self._put_shards(offer) if self._weight else (0.0, (), 0.0)
        manifest = Manifest(offer, self._position.base, self._spec, weight, shards, largest)
        key = self._layout.offer(self._position.step, offer)
        self._store.put(key, pack("manifest", self._layout.address(key), asdict(manifest)))

    def prefetch_offers(self, members: Sequence[Member], shards: Sequence[int]) -> None:
        """Start reading the first offers for a seal that is about to be created. Its expected members are `members`."""
        other_members = [member for member in members if member.weight and not self._is_mine(member)]
        calls = (partial(self._read_offer, member, shard) for shard in shards for member in other_members)
        self._offers = ((members, shards), self._run_in_order(calls))

    def prefetch_means(self, attempt: int, outcome: RoundOutcome) -> None:
        """Start reading the first shards of a mean that is about to be committed, and drop shards read for earlier
        attempts.
        """
        self._means = {}
        for shard, sha256 in enumerate(outcome.means[: self._settings.parallel]):
            key = self._mean_key(attempt, outcome.members, shard, sha256)
            self._means[key] = self._pool.submit(self._read_mean, key, sha256, shard, outcome.members)

    def reduce(self, attempt: int, members: Sequence[Member], shards: Sequence[int]) -> None:
        """Compute shards of the mean, and write each under a name that contains its checksum. The offers for later
        shards are read in the background.
        """
        if self._offers[0] != (members, shards):
            self.prefetch_offers(members, shards)
        (_, offers), self._offers = self._offers, (None, iter(()))
        counted = [member for member in members if member.weight]
        puts: deque[Future[None]] = deque()
        for shard in shards:
            vectors = (self._read_offer(member, shard) if self._is_mine(member) else next(offers) for member in counted)
            data, sha256 = self._compute_mean(members, shard, vectors)
            puts.append(self._pool.submit(self._store.put, self._mean_key(attempt, members, shard, sha256), data))
            # Frees the bytes as soon as they are written; only the bounded queue of writes holds them.
            del data
            if len(puts) >= self._settings.parallel:
                puts.popleft().result()
        for put in puts:
            put.result()

    def fetch_mean(self, attempt: int, outcome: RoundOutcome) -> None:
        """Copy the committed mean into the round's tensors. Raises UnreadableOffer if a shard can neither be read
        nor recomputed.
        """
        vector = self._vector

        def fetch(shard: int) -> None:
            vector.write(shard, self._read_committed(attempt, outcome, shard))

        for _ in self._run_in_order(partial(fetch, shard) for shard in range(vector.num_shards)):
            pass
        vector.finish()

    def keep_residual(self) -> None:
        """Store the rounding error of this round's offer, so that it is added to this replica's next offer."""
        if self._feedback is not None and self._residual is not None:
            self._feedback.keep(self._residual)

    def _rounded_vector(self) -> RoundVector:
        """Return the vector to offer. It is computed only once, and then cached."""
        if self._rounded is None:
            vector, feedback = self._vector, self._feedback
            if feedback is None:
                self._rounded = vector
            else:
                whole = torch.cat([vector.read(shard) for shard in range(vector.num_shards)])
                sent, self._residual = feedback.compress(whole, self._settings.payload)
                self._rounded = vector.like(sent)
        return self._rounded

    def _put_shards(self, offer: OfferId) -> tuple[float, tuple[Shard, ...], float]:
        """Write all shards of an offer, and return its weight, its shards and its largest absolute value."""
        try:
            vector = self._rounded_vector()
            calls = (partial(self._put_shard, vector, offer, shard) for shard in range(vector.num_shards))
            shards = list(self._run_in_order(calls))
        except NonFiniteError:
            return 0.0, (), 0.0
        largest = max((magnitude for _, magnitude in shards), default=0.0)
        if largest > MAX_MAGNITUDE:
            return 0.0, (), 0.0
        return self._weight, tuple(shard for shard, _ in shards), largest

    def _put_shard(self, vector: RoundVector, offer: OfferId, shard: int) -> tuple[Shard, float]:
        values = vector.read(shard)
        data = encode_vector(values, kind=self._settings.payload, about=self._offer_metadata(offer, shard))
        self._store.put(self._layout.shard(self._position.step, offer, shard), data)
        return Shard(len(data), _payload_digest(data)), largest_magnitude(values)

    def _mean_bytes(self, members: Sequence[Member], shard: int) -> tuple[bytes, str]:
        vectors = (self._read_offer(member, shard) for member in members if member.weight)
        return self._compute_mean(members, shard, vectors)

    def _compute_mean(self, members: Sequence[Member], shard: int, vectors: Iterable[Tensor]) -> tuple[bytes, str]:
        """Compute one shard of the mean from the vectors of the members with weight, and return it as a payload with
        its digest.
        """
        weights = _scaled_weights([member.weight for member in members if member.weight])
        mean = _weighted_mean(zip(weights, vectors, strict=True), self._vector.size(shard))
        about = self._mean_metadata(members, shard)
        data = encode_vector(mean, kind=self._settings.mean_payload, about=about)
        return data, _payload_digest(data)

    def _read_offer(self, member: Member, shard: int) -> Tensor:
        manifest = self._find_manifest(member)
        if manifest is None or shard >= len(manifest.shards):
            raise UnreadableOffer(member.id)
        if self._rounded is not None and self._is_mine(member):
            return self._rounded.read(shard)
        values = self._read_payload(
            self._layout.shard(self._position.step, member.id, shard),
            manifest.shards[shard].sha256,
            shard,
            self._offer_metadata(member.id, shard),
            member.id,
        )
        if largest_magnitude(values) > manifest.largest * _MAX_ROUNDING:
            self._store.traffic.add(refused=1)
            raise UnreadableOffer(member.id)
        return values

    def _is_mine(self, member: Member) -> bool:
        """Return whether this replica made the offer during the current wait, which means that its vector is still
        in memory.
        """
        position = self._position
        is_own = member.id[:2] == (position.rank, position.claim) and member.id.trial >= position.first_trial
        return is_own and self._rounded is not None

    def _find_manifest(self, member: Member) -> Manifest | None:
        entry = self._manifests.get(member.id)
        return entry[1] if entry is not None and entry[0] == member.manifest else None

    def _read_committed(self, attempt: int, outcome: RoundOutcome, shard: int) -> Tensor:
        """Return one shard of the committed mean. A damaged shard is recomputed and rewritten."""
        members, sha256 = outcome.members, outcome.means[shard]
        key = self._mean_key(attempt, members, shard, sha256)
        pending_mean = self._means.pop(key, None)
        try:
            return pending_mean.result() if pending_mean is not None else self._read_mean(key, sha256, shard, members)
        except UnreadableOffer:
            data, new_sha256 = self._mean_bytes(members, shard)
            if new_sha256 != sha256:
                raise
            self._store.put(key, data)
            about = self._mean_metadata(members, shard)
            return decode_vector(data, elements=self._vector.size(shard), about=about)

    def _read_mean(self, key: str, sha256: str, shard: int, members: Sequence[Member]) -> Tensor:
        return self._read_payload(key, sha256, shard, self._mean_metadata(members, shard), members[0].id)

    def _mean_key(self, attempt: int, members: Sequence[Member], shard: int, sha256: str) -> str:
        return self._layout.mean(self._position.step, attempt, shard, sha256, digest(members))

    def _read_payload(self, key: str, sha256: str, shard: int, about: dict[str, str], offer: OfferId) -> Tensor:
        elements = self._vector.size(shard)
        # Not simply fp32: a very short vector is larger as int8, because every block has a scale.
        most_bytes = max(payload_bytes(elements, kind) for kind in self._settings.payload_kinds)
        for _ in range(READS):
            # Bytes may be damaged in transit, so the read is repeated; a missing object will not come back.
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

    def _run_in_order(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Return an iterator over the results of the calls, in the order of the calls. Up to `parallel` calls run at
        the same time; the first ones start immediately.
        """
        rest = iter(calls)
        under_way = deque(self._pool.submit(call) for call in islice(rest, self._settings.parallel))

        def results() -> Iterator[T]:
            while under_way:
                result = under_way.popleft().result()
                under_way.extend(self._pool.submit(call) for call in islice(rest, 1))
                yield result

        return results()

    def _offer_metadata(self, offer: OfferId, shard: int) -> dict[str, str]:
        where = f"g{self._layout.generation} round {self._position.step}"
        return {"where": where, "offer": str(offer), "shard": str(shard)}

    def _mean_metadata(self, members: Sequence[Member], shard: int) -> dict[str, str]:
        where = f"g{self._layout.generation} round {self._position.step}"
        return {"where": where, "mean_of": digest(members), "shard": str(shard)}
