"""A round as it lies in the store, read into what `decide` takes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple, TypeVar

from composer_replication.diloco.rounds.decide import (
    Attempt,
    Offer,
    RoundView,
    after_the_outcome,
    after_the_seal,
    expected_ranks,
    how_it_ended,
)
from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.records import (
    MOST_RECORD_BYTES,
    MOST_TRIALS,
    Layout,
    Manifest,
    OfferId,
    RecordError,
    RoundOutcome,
    Seal,
    digest,
    fields_of,
    pack,
    parse_mean,
    parse_offer,
    parse_outcome,
    parse_state,
    refusing,
    unpack,
    unpack_manifest,
    unpack_outcome,
    unpack_seal,
    whole,
)
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import explain

T = TypeVar("T")
READS = 3  # before bytes count as unreadable: what was damaged on its way is whole the next time
_CLAIM = re.compile(r"\d{1,9}")  # "0"


class Goodbye(NamedTuple):
    """What a process says when it leaves: whether it had all the commits that it needed, and how many there were."""

    finished: bool
    step: int


@dataclass(frozen=True)
class Departures:
    """Ranks whose latest process said goodbye, and the steps of those whose process had finished."""

    ranks: frozenset[int] = frozenset()
    finished_at: Mapping[int, int] = field(default_factory=dict)

    def finished_for(self, commits: int | None) -> frozenset[int]:
        """Return the ranks that have finished, for a replica that needs so many commits (None: nobody knows).

        A rank that finished a shorter run is not among them: whoever extends the run starts it again.
        """
        return frozenset(rank for rank, step in self.finished_at.items() if commits is None or step >= commits)


@dataclass
class RoundReader:
    """Reads one round again and again; what cannot change any more is kept."""

    store: PatientStore
    layout: Layout
    step: int
    world_size: int
    last: RoundOutcome | None  # the commit before
    spec: str = ""  # of my vector, and how many shards it has
    num_shards: int = 0
    pool: ThreadPoolExecutor | None = None
    commits: int | None = None  # that this replica needs; None where nobody knows
    manifests: dict[OfferId, tuple[str, Manifest]] = field(default_factory=dict)
    mean_shas: dict[int, dict[int, str]] = field(default_factory=dict)  # by attempt and shard
    _ended: list[RoundOutcome] = field(default_factory=list)
    _outcomes: dict[tuple[int, int], RoundOutcome] = field(default_factory=dict)  # by attempt and slot
    _seal: tuple[int, Seal] | None = None
    _departures: Future[Departures] | None = None
    _here: set[int] = field(default_factory=set)

    def read(self) -> RoundView:
        """The round as the store shows it now."""
        prefix = self.layout.round(self.step)
        self._ask_who_left()
        names = {key.removeprefix(f"{prefix}/") for key in self.store.keys(prefix)}
        open_attempt = self._read_outcomes(names)
        attempt, outcome = len(self._ended), open_attempt.outcome
        self._read_manifests(names)
        seal = self._read_seal(names, attempt) if outcome is None else None
        if self._seal is not None and self._seal[0] == attempt:  # also when it is over: foreign names are counted
            self._list_means(names, attempt, self._seal[1])
        return RoundView(
            expected=self._expected(names),
            offers=frozenset(self._offer(ident) for ident in self.manifests),
            ended=tuple(self._ended),
            seal=seal,
            means=frozenset(self.mean_shas.get(attempt, ())),
            outcome=outcome,
            left=self.departures().ranks,
            finished=self.departures().finished_for(self.commits),
            slot=open_attempt.slot,
            abort=open_attempt.abort,
        )

    def has_a_later_round(self) -> bool:
        """Return whether some replica has offered to the round after this one, which only a commit leads to."""
        prefix = self.layout.round(self.step + 1, "offer")
        offers = (parse_offer(key.removeprefix(f"{prefix}/")) for key in self.store.keys(prefix))
        return any(offer is not None and self._manifest(self.step + 1, offer) is not None for offer in offers)

    def departures(self) -> Departures:
        """Return who has left, by the latest answer to that."""
        return self._ask_who_left().result()

    def forget_who_left(self) -> None:
        """Ask again at the next look who has left."""
        self._departures = None

    def sealed(self, seen: RoundView, *, mine: bytes | None) -> RoundView | None:
        """What was seen, with the seal that I tried to create: one request for it, and none where it is mine.

        None where the round has to be read anew.
        """
        seal = self._known(self.layout.seal(self.step, seen.attempt), mine, self._fitting_seal)
        if seal is None:
            return None
        self._seal = (seen.attempt, seal)
        return after_the_seal(seen, seal)

    def ended(self, seen: RoundView, *, mine: bytes | None) -> RoundView | None:
        """The same for the outcome that I tried to create."""
        outcome = self._known(self.layout.outcome(self.step, seen.attempt, seen.slot), mine, unpack_outcome)
        return None if outcome is None else after_the_outcome(seen, outcome)

    def _known(self, key: str, mine: bytes | None, unpack: Callable[[str, bytes], T]) -> T | None:
        """A record that I wrote and read back, or else what another wrote in its place. Mine is checked, too."""
        if mine is None:
            return read_record(self.store, self.layout, key, unpack)
        try:
            return unpack(self.layout.address(key), mine)
        except RecordError:
            return None

    def _read_outcomes(self, names: set[str]) -> Attempt:
        """Return the first attempt that did not end without a commit; keep the outcomes of those that did."""
        slots: dict[int, list[int]] = {}
        for name in names:
            if name.startswith("out/") and (parsed := parse_outcome(name.removeprefix("out/"))) is not None:
                slots.setdefault(parsed[0], []).append(parsed[1])
        while True:
            attempt = self._read_attempt(len(self._ended), sorted(slots.get(len(self._ended), ())))
            if attempt.outcome is None or attempt.outcome.result == "commit":
                return attempt
            self._ended.append(attempt.outcome)

    def _read_attempt(self, attempt: int, slots: list[int]) -> Attempt:
        outcomes: list[RoundOutcome | None] = [None] * (slots[-1] + 1 if slots else 0)
        for slot in slots:
            outcome = self._outcomes.get((attempt, slot)) or read_record(
                self.store, self.layout, self.layout.outcome(self.step, attempt, slot), unpack_outcome
            )
            if outcome is not None:
                outcomes[slot] = self._outcomes[attempt, slot] = outcome
        return how_it_ended(outcomes)

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

        if (manifest := self._manifest(self.step, offer)) is not None:
            self.manifests[offer] = digest(asdict(manifest)), manifest

    def _manifest(self, step: int, offer: OfferId) -> Manifest | None:
        def checked(at: str, data: bytes) -> Manifest:
            manifest = unpack_manifest(at, data)
            if manifest.id != offer:
                raise RecordError(f"{manifest.id} at the place of {offer}")
            return manifest

        return read_record(self.store, self.layout, self.layout.offer(step, offer), checked)

    def _offer(self, ident: OfferId) -> Offer:
        sha256, manifest = self.manifests[ident]
        base, spec, weight = manifest.base, manifest.spec, manifest.weight
        return Offer(ident, sha256, base, spec, weight, len(manifest.shards), manifest.largest)

    def _read_seal(self, names: set[str], attempt: int) -> Seal | Literal["unreadable"] | None:
        if f"seal/{attempt}" not in names:
            return None
        if self._seal is None or self._seal[0] != attempt:
            seal = read_record(self.store, self.layout, self.layout.seal(self.step, attempt), self._fitting_seal)
            if seal is None:
                return "unreadable"
            self._seal = (attempt, seal)
        return self._seal[1]

    def _fitting_seal(self, at: str, data: bytes) -> Seal:
        """A seal whose mean has as many shards as the vectors that it counts."""
        seal = unpack_seal(at, data)
        if seal.weight and seal.spec == self.spec and seal.num_shards != self.num_shards:
            raise RecordError(explain("shards of a seal", got=seal.num_shards, expected=self.num_shards))
        return seal

    def _list_means(self, names: set[str], attempt: int, seal: Seal) -> None:
        folder, mean_of = f"mean/{attempt}/", digest(seal.members)
        for name in sorted(name for name in names if name.startswith(folder)):
            mean = parse_mean(name.removeprefix(folder), mean_of)
            if mean is not None and mean[0] < seal.num_shards:
                self.mean_shas.setdefault(attempt, {}).setdefault(*mean)
            else:
                self.store.traffic.add(foreign=1)

    def _expected(self, names: set[str]) -> frozenset[int]:
        names_here = {name.removeprefix("here/") for name in names if name.startswith("here/")}
        ranks = {int(name) for name in names_here if name.isdigit()} & set(range(self.world_size))
        for rank in ranks - self._here:
            if read_record(self.store, self.layout, self.layout.here(self.step, rank), _no_fields("here")) is not None:
                self._here.add(rank)
        return expected_ranks(self.last, self._here, self.departures().ranks, self.world_size)

    def _ask_who_left(self) -> Future[Departures]:
        """Once until it is forgotten, and where there are threads beside the first listing."""
        if self._departures is None:
            if self.pool is not None:
                self._departures = self.pool.submit(ranks_that_left, self.store, self.layout)
            else:
                departures = ranks_that_left(self.store, self.layout)  # where it fails, the next look asks again
                self._departures = Future()
                self._departures.set_result(departures)
        return self._departures


def _no_fields(kind: str) -> Callable[[str, bytes], bool]:
    """Return a reader of records that say nothing but where they belong."""
    return lambda at, data: fields_of(kind, at, data) == {}


def read_record(store: PatientStore, layout: Layout, key: str, unpack: Callable[[str, bytes], T]) -> T | None:
    """Return a record that belongs at this key; None where it is unreadable, belongs elsewhere or is gone."""
    return _read(store, layout, key, unpack)[0]


def _read(store: PatientStore, layout: Layout, key: str, unpack: Callable[[str, bytes], T]) -> tuple[T | None, bool]:
    """Return the record, and whether there is anything at its key."""
    at = layout.address(key)
    for _ in range(READS):
        try:
            return unpack(at, store.get(key, most_bytes=MOST_RECORD_BYTES)), True
        except RecordError:
            store.traffic.add(refused=1)
        except MissingObject:
            return None, False
        except ObjectTooLarge:
            store.traffic.add(refused=1)
            return None, True
    return None, True


def read_commit(store: PatientStore, layout: Layout, step: int) -> tuple[int, RoundOutcome] | None:
    """Return how a round was committed, and in which attempt; None where it was not, or not yet.

    There is one commit at most, so any that can be read is it: only where the first outcome is something else are the
    others listed.
    """
    first, is_there = _read(store, layout, layout.outcome(step, 0), unpack_outcome)
    if not is_there or (first is not None and first.result == "commit"):
        return None if first is None else (0, first)
    prefix = layout.round(step, "out")
    names = (parse_outcome(key.removeprefix(f"{prefix}/")) for key in store.keys(prefix))
    for attempt, slot in sorted(name for name in names if name is not None and name != (0, 0)):
        outcome = read_record(store, layout, layout.outcome(step, attempt, slot), unpack_outcome)
        if outcome is not None and outcome.result == "commit":
            return attempt, outcome
    return None


def newest_claim(store: PatientStore, layout: Layout, rank: int, *, after: int = -1) -> int | None:
    """Return the newest claim on a rank, by its number; None where no process has made one after that one."""
    numbers = sorted((claim for claim in claim_numbers(store, layout, rank) if claim > after), reverse=True)
    is_claim = functools.partial(unpack, "claim")
    return next((claim for claim in numbers if read_record(store, layout, layout.claim(rank, claim), is_claim)), None)


def claim_numbers(store: PatientStore, layout: Layout, rank: int) -> list[int]:
    """Return the numbers of all claims on a rank, readable or not."""
    names = (key.rpartition("/")[2] for key in store.keys(layout.claim(rank)))
    return [int(name) for name in names if _CLAIM.fullmatch(name)]


def ranks_that_left(store: PatientStore, layout: Layout) -> Departures:
    """Return the ranks whose latest process said goodbye."""
    ranks: set[int] = set()
    finished_at: dict[int, int] = {}
    for key in store.keys(layout.left()):
        who = _rank_and_claim(key.rpartition("/")[2])
        goodbye = None if who is None else read_goodbye(store, layout, who.rank, who.claim)
        if who is None or goodbye is None or newest_claim(store, layout, who.rank, after=who.claim) is not None:
            continue
        ranks.add(who.rank)
        if goodbye.finished:
            finished_at[who.rank] = goodbye.step
    return Departures(frozenset(ranks), finished_at)


def read_goodbye(store: PatientStore, layout: Layout, rank: int, claim: int) -> Goodbye | None:
    """Return the goodbye of a process; None where it has not said it."""
    return read_record(store, layout, layout.left(rank, claim), _goodbye)


def pack_goodbye(at: str, goodbye: Goodbye) -> bytes:
    """Return the record of a goodbye for an address."""
    return pack("goodbye", at, goodbye._asdict())


def ranks_that_joined(store: PatientStore, layout: Layout) -> set[int]:
    """Return the ranks that some process has claimed."""
    prefix = layout.key("claims")
    names = {key.removeprefix(f"{prefix}/").partition("/")[0] for key in store.keys(prefix)}
    return {int(name) for name in names if name.isdigit()}


def _rank_and_claim(name: str) -> OfferId | None:
    return parse_offer(f"{name}.0")


def _goodbye(at: str, data: bytes) -> Goodbye:
    content = fields_of("goodbye", at, data, *Goodbye._fields)
    with refusing("goodbye"):
        if not isinstance(content["finished"], bool):
            raise ValueError("neither true nor false")
        return Goodbye(content["finished"], whole(content["step"], below=MOST_TRIALS))


def published_states(store: PatientStore, layout: Layout) -> list[str]:
    """Names of the states that are there, the newest first."""
    prefix = layout.key("states")
    names = [key.removeprefix(f"{prefix}/") for key in store.keys(prefix)]
    return sorted((name for name in names if parse_state(name)), reverse=True)


def step_of(name: str) -> int:
    parsed = parse_state(name)
    return parsed[0] if parsed else -1
