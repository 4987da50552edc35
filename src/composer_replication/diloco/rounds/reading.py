"""A round as it lies in the store, read into what `decide` takes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeVar

from composer_replication.diloco.rounds.decide import Offer, Seen, after_the_outcome, after_the_seal, expected_ranks
from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.records import (
    MOST_RECORD_BYTES,
    Layout,
    Manifest,
    OfferId,
    Outcome,
    RecordError,
    Seal,
    digest,
    parse_mean,
    parse_offer,
    parse_state,
    unpack_manifest,
    unpack_outcome,
    unpack_seal,
)
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import explain

T = TypeVar("T")
READS = 3  # before bytes count as unreadable: what was damaged on its way is whole the next time


@dataclass
class RoundReader:
    """Reads one round again and again; what cannot change any more is kept."""

    store: PatientStore
    layout: Layout
    step: int
    world_size: int
    last: Outcome | None  # the commit before
    spec: str = ""  # of my vector, and how many shards it has
    num_shards: int = 0
    pool: ThreadPoolExecutor | None = None
    manifests: dict[OfferId, tuple[str, Manifest]] = field(default_factory=dict)
    mean_shas: dict[int, dict[int, str]] = field(default_factory=dict)  # by attempt and shard
    _ended: list[Outcome] = field(default_factory=list)
    _seal: tuple[int, Seal] | None = None
    _left: Future[set[int]] | None = None

    def read(self) -> Seen:
        """The round as the store shows it now."""
        prefix = self.layout.round(self.step)
        self._ask_who_left()
        names = {key.removeprefix(f"{prefix}/") for key in self.store.keys(prefix)}
        outcome = self._read_outcomes(names)
        attempt = len(self._ended)
        self._read_manifests(names)
        seal = self._read_seal(names, attempt) if outcome is None else None
        if self._seal is not None and self._seal[0] == attempt:  # also when it is over: foreign names are counted
            self._list_means(names, attempt, self._seal[1])
        return Seen(
            expected=self._expected(names),
            offers=frozenset(self._offer(ident) for ident in self.manifests),
            ended=tuple(self._ended),
            seal=seal,
            means=frozenset(self.mean_shas.get(attempt, ())),
            outcome=outcome,
        )

    def sealed(self, seen: Seen, *, mine: bytes | None) -> Seen | None:
        """What was seen, with the seal that I tried to create: one request for it, and none where it is mine.

        None where the round has to be read anew.
        """
        seal = self._known(self.layout.seal(self.step, seen.attempt), mine, self._fitting_seal)
        if seal is None:
            return None
        self._seal = (seen.attempt, seal)
        return after_the_seal(seen, seal)

    def ended(self, seen: Seen, *, mine: bytes | None) -> Seen | None:
        """The same for the outcome that I tried to create."""
        outcome = self._known(self.layout.outcome(self.step, seen.attempt), mine, unpack_outcome)
        return None if outcome is None else after_the_outcome(seen, outcome)

    def _known(self, key: str, mine: bytes | None, unpack: Callable[[bytes], T]) -> T | None:
        """A record that I wrote and read back, or else what another wrote in its place. Mine is checked, too."""
        if mine is None:
            return read_record(self.store, key, unpack)
        try:
            return unpack(mine)
        except RecordError:
            return None

    def _read_outcomes(self, names: set[str]) -> Outcome | Literal["unreadable"] | None:
        """The commit, if there is one; attempts that ended otherwise are kept."""
        while f"out/{len(self._ended)}" in names:
            outcome = read_record(self.store, self.layout.outcome(self.step, len(self._ended)), unpack_outcome)
            if not isinstance(outcome, Outcome) or outcome.result == "commit":
                return "unreadable" if outcome is None else outcome
            self._ended.append(outcome)
        return None

    def _read_manifests(self, names: set[str]) -> None:
        unread: list[OfferId] = []
        for name in names:
            if not name.startswith("offer/"):
                continue
            offer = parse_offer(name.removeprefix("offer/"))
            if offer is None or offer.rank >= self.world_size:
                self.store.traffic.add(foreign=1)
            elif offer not in self.manifests:
                unread.append(offer)
        list((self.pool.map if self.pool and len(unread) > 1 else map)(self._read_manifest, unread))

    def _read_manifest(self, offer: OfferId) -> None:
        """One that cannot be read is not there: its owner will see that too, and write it again."""

        def checked(data: bytes) -> tuple[str, Manifest]:
            manifest = unpack_manifest(data)
            if manifest.id != offer:
                raise RecordError(f"{manifest.id} at the place of {offer}")
            return digest(asdict(manifest)), manifest

        if (read := read_record(self.store, self.layout.offer(self.step, offer), checked)) is not None:
            self.manifests[offer] = read

    def _offer(self, ident: OfferId) -> Offer:
        sha256, manifest = self.manifests[ident]
        base, spec, weight = manifest.base, manifest.spec, manifest.weight
        return Offer(ident, sha256, base, spec, weight, len(manifest.shards), manifest.largest)

    def _read_seal(self, names: set[str], attempt: int) -> Seal | Literal["unreadable"] | None:
        if f"seal/{attempt}" not in names:
            return None
        if self._seal is None or self._seal[0] != attempt:
            seal = read_record(self.store, self.layout.seal(self.step, attempt), self._fitting_seal)
            if seal is None:
                return "unreadable"
            self._seal = (attempt, seal)
        return self._seal[1]

    def _fitting_seal(self, data: bytes) -> Seal:
        """A seal whose mean has as many shards as the vectors that it counts."""
        seal = unpack_seal(data)
        if seal.weight and seal.spec == self.spec and seal.num_shards != self.num_shards:
            raise RecordError(explain("shards of a seal", got=seal.num_shards, expected=self.num_shards))
        return seal

    def _list_means(self, names: set[str], attempt: int, seal: Seal) -> None:
        folder, mean_of = f"mean/{attempt}/", digest(seal.members)
        for name in sorted(each for each in names if each.startswith(folder)):
            mean = parse_mean(name.removeprefix(folder), mean_of)
            if mean is not None and mean[0] < seal.num_shards:
                self.mean_shas.setdefault(attempt, {}).setdefault(*mean)
            else:
                self.store.traffic.add(foreign=1)

    def _expected(self, names: set[str]) -> frozenset[int]:
        here = {int(name.removeprefix("here/")) for name in names if name.startswith("here/") and name[5:].isdigit()}
        left = self._ask_who_left().result()
        return expected_ranks(self.last, here & set(range(self.world_size)), left, self.world_size)

    def _ask_who_left(self) -> Future[set[int]]:
        """Once, and where there are threads beside the first listing."""
        if self._left is None:
            if self.pool is not None:
                self._left = self.pool.submit(ranks_that_left, self.store, self.layout)
            else:
                left = ranks_that_left(self.store, self.layout)  # where it fails, the next look asks again
                self._left = Future()
                self._left.set_result(left)
        return self._left


def read_record(store: PatientStore, key: str, unpack: Callable[[bytes], T]) -> T | None:
    """A record; None where it is unreadable or gone."""
    for _ in range(READS):
        try:
            return unpack(store.get(key, most_bytes=MOST_RECORD_BYTES))
        except RecordError:
            store.traffic.add(refused=1)
        except MissingObject:
            return None
        except ObjectTooLarge:
            store.traffic.add(refused=1)
            return None
    return None


def read_commit(store: PatientStore, layout: Layout, step: int) -> tuple[int, Outcome] | None:
    """How a round was committed, and in which attempt; None where it was not, or not yet."""
    attempt = 0
    while (outcome := read_record(store, layout.outcome(step, attempt), unpack_outcome)) is not None:
        if outcome.result == "commit":
            return attempt, outcome
        attempt += 1
    return None


def ranks_that_left(store: PatientStore, layout: Layout) -> set[int]:
    """Ranks whose latest process said goodbye."""
    left = {parse_offer(f"{key.rpartition('/')[2]}.0") for key in store.keys(layout.left())}
    gone = {(each.rank, each.claim) for each in left if each is not None}
    return {rank for rank, claim in gone if store.size(layout.claim(rank, claim + 1)) is None}


def published_states(store: PatientStore, layout: Layout) -> list[str]:
    """Names of the states that are there, the newest first."""
    prefix = layout.key("states")
    names = [key.removeprefix(f"{prefix}/") for key in store.keys(prefix)]
    return sorted((name for name in names if parse_state(name)), reverse=True)


def step_of(name: str) -> int:
    parsed = parse_state(name)
    return parsed[0] if parsed else -1
