"""Read the records of a run from its store: rounds (as a `RoundView`, the input of `round.decide`), commits, and
which replicas have joined or left.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.records import (
    MAX_COUNTER,
    MAX_RECORD_BYTES,
    Layout,
    Manifest,
    Member,
    OfferId,
    RecordError,
    RoundOutcome,
    Seal,
    as_record_error,
    checked_int,
    digest,
    parse_mean,
    parse_offer,
    parse_outcome,
    parse_state,
    unpack,
    unpack_fields,
    unpack_manifest,
    unpack_outcome,
    unpack_seal,
)
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import explain

T = TypeVar("T")
READS = 3  # tries before an object counts as unreadable: bytes damaged in transit are correct the next time
# "0" and "12"; not "-1"
_CLAIM = re.compile(r"\d{1,9}")


_ABORTS = 2  # readable aborts needed to end an attempt, so that it stays ended if one of them is damaged later


@dataclass(frozen=True)
class Offer:
    """A replica's offer to a round, as read from its manifest."""

    id: OfferId
    manifest: str
    base: str
    spec: str
    weight: float
    num_shards: int
    largest: float = 0.0  # largest magnitude in its vector


@dataclass(frozen=True)
class RoundView:
    """The state of one round as a replica has read it. The store may have changed since then."""

    expected: frozenset[int]  # ranks to wait for until the grace is over
    offers: frozenset[Offer] = frozenset()
    ended: tuple[RoundOutcome, ...] = ()  # the outcomes of attempts that were aborted or void
    seal: Seal | Literal["unreadable"] | None = None  # of the open attempt
    means: frozenset[int] = frozenset()  # shards whose mean exists
    outcome: RoundOutcome | None = None  # the commit that ended the round
    departed: frozenset[int] = frozenset()  # ranks whose latest process has said goodbye
    finished: frozenset[int] = frozenset()  # the departed ranks that have all the commits that this replica needs
    slot: int = 0  # where to write the outcome of the open attempt, after outcomes that cannot be read
    abort: RoundOutcome | None = None  # an abort of the open attempt in only one slot; it counts once it is in two

    @property
    def attempt(self) -> int:
        """The number of the open attempt."""
        return len(self.ended)

    @property
    def spent(self) -> frozenset[OfferId]:
        """The offers that later attempts may not use."""
        return frozenset(offer_id for outcome in self.ended for offer_id in outcome.spent())


class _Attempt(NamedTuple):
    """How an attempt ended, as far as its records can be read."""

    outcome: RoundOutcome | None = None
    slot: int = 0  # where an outcome would go
    abort: RoundOutcome | None = None  # an abort that can be read in only one slot, although two are needed


class Goodbye(NamedTuple):
    """A record that a process has left: whether it had all the commits that it needed, and how many commits it had."""

    finished: bool
    step: int


@dataclass(frozen=True)
class _Departures:
    """The ranks whose latest process has left, and the last step of each rank that had finished."""

    ranks: frozenset[int] = frozenset()
    finished_at: Mapping[int, int] = field(default_factory=dict)

    def finished_for(self, commits: int | None) -> frozenset[int]:
        """Return the ranks that count as finished for a replica that needs `commits` commits (None if the number is
        unknown).

        A rank that finished with fewer commits is not included, because it has to be restarted when the run is
        extended.
        """
        return frozenset(rank for rank, step in self.finished_at.items() if commits is None or step >= commits)


@dataclass
class RoundReader:
    """Reads the state of one round repeatedly, and caches the records that cannot change."""

    store: PatientStore
    layout: Layout
    step: int
    world_size: int
    last: RoundOutcome | None  # the commit of the previous round
    spec: str = ""  # the spec of this replica's vector
    num_shards: int = 0
    pool: ThreadPoolExecutor | None = None
    commits: int | None = None  # how many this replica needs; None if unknown
    manifests: dict[OfferId, tuple[str, Manifest]] = field(default_factory=dict)
    mean_checksums: dict[int, dict[int, str]] = field(default_factory=dict)  # by attempt and shard
    _ended: list[RoundOutcome] = field(default_factory=list)
    _outcomes: dict[tuple[int, int], RoundOutcome] = field(default_factory=dict)  # by attempt and slot
    _seal: tuple[int, Seal] | None = None
    _departures: Future[_Departures] | None = None
    _here: set[int] = field(default_factory=set)

    def read(self) -> RoundView:
        """Read the round from the store, and return its current state."""
        prefix = self.layout.round(self.step)
        self._request_departures()
        names = {key.removeprefix(f"{prefix}/") for key in self.store.keys(prefix)}
        open_attempt = self._read_outcomes(names)
        attempt, outcome = len(self._ended), open_attempt.outcome
        self._read_manifests(names)
        seal = self._read_seal(names, attempt) if outcome is None else None
        # Even if the attempt has ended, so that objects with foreign names are counted.
        if self._seal is not None and self._seal[0] == attempt:
            self._list_means(names, attempt, self._seal[1])
        return RoundView(
            expected=self._read_expected_ranks(names),
            offers=frozenset(self._to_offer(offer_id) for offer_id in self.manifests),
            ended=tuple(self._ended),
            seal=seal,
            means=frozenset(self.mean_checksums.get(attempt, ())),
            outcome=outcome,
            departed=self.departures().ranks,
            finished=self.departures().finished_for(self.commits),
            slot=open_attempt.slot,
            abort=open_attempt.abort,
        )

    def has_a_later_round(self) -> bool:
        """Return whether any replica has made an offer to the next round, which proves that this round was
        committed.
        """
        prefix = self.layout.round(self.step + 1, "offer")
        offers = (parse_offer(key.removeprefix(f"{prefix}/")) for key in self.store.keys(prefix))
        return any(
            offer is not None and self._read_valid_manifest(self.step + 1, offer) is not None for offer in offers
        )

    def departures(self) -> _Departures:
        """Return which replicas have left, as last read. If a read is under way, wait for its result."""
        return self._request_departures().result()

    def forget_departures(self) -> None:
        """Clear the cached departures, so that the next read determines which replicas have left."""
        self._departures = None

    def view_after_seal(self, view: RoundView, *, my_record: bytes | None) -> RoundView | None:
        """Return the view including the seal of the attempt, after this replica has tried to create the seal.

        `my_record` is the record that this replica created and read back, or None if another replica was first; its
        record is then read from the store. Returns None if the round has to be reread.
        """
        seal = self._use_or_read(self.layout.seal(self.step, view.attempt), my_record, self._unpack_seal_for_me)
        if seal is None:
            return None
        self._seal = (view.attempt, seal)
        return _view_with_seal(view, seal)

    def view_after_outcome(self, view: RoundView, *, my_record: bytes | None) -> RoundView | None:
        """Return the view including the outcome of the attempt, in the same way as `view_after_seal` does for the
        seal.
        """
        outcome = self._use_or_read(self.layout.outcome(self.step, view.attempt, view.slot), my_record, unpack_outcome)
        return None if outcome is None else _view_with_outcome(view, outcome)

    def _use_or_read(self, key: str, my_record: bytes | None, unpack: Callable[[str, bytes], T]) -> T | None:
        """Return the validated content of `my_record`, or, if it is None, of the record stored at `key`. Returns
        None if the record is invalid.
        """
        if my_record is None:
            return read_record(self.store, self.layout, key, unpack)
        try:
            return unpack(self.layout.address(key), my_record)
        except RecordError:
            return None

    def _read_outcomes(self, names: set[str]) -> _Attempt:
        """Return the first attempt that is still open or was committed, and remember the outcomes of all attempts
        before it.
        """
        slots: dict[int, list[int]] = {}
        for name in names:
            if name.startswith("out/") and (parsed := parse_outcome(name.removeprefix("out/"))) is not None:
                slots.setdefault(parsed[0], []).append(parsed[1])
        while True:
            attempt = self._read_attempt(len(self._ended), sorted(slots.get(len(self._ended), ())))
            if attempt.outcome is None or attempt.outcome.result == "commit":
                return attempt
            self._ended.append(attempt.outcome)

    def _read_attempt(self, attempt: int, slots: list[int]) -> _Attempt:
        # The outcome of a slot that cannot be read, or that was skipped, is None.
        outcomes: list[RoundOutcome | None] = [None] * (slots[-1] + 1 if slots else 0)
        for slot in slots:
            outcome = self._outcomes.get((attempt, slot)) or read_record(
                self.store, self.layout, self.layout.outcome(self.step, attempt, slot), unpack_outcome
            )
            if outcome is not None:
                outcomes[slot] = self._outcomes[attempt, slot] = outcome
        return _resolve_attempt(outcomes)

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
        # An unreadable manifest counts as missing: its owner will notice, and offer again.
        if (manifest := self._read_valid_manifest(self.step, offer)) is not None:
            self.manifests[offer] = digest(asdict(manifest)), manifest

    def _read_valid_manifest(self, step: int, offer: OfferId) -> Manifest | None:
        def checked(at: str, data: bytes) -> Manifest:
            manifest = unpack_manifest(at, data)
            if manifest.id != offer:
                raise RecordError(f"{manifest.id} in the record of {offer}")
            return manifest

        return read_record(self.store, self.layout, self.layout.offer(step, offer), checked)

    def _to_offer(self, offer_id: OfferId) -> Offer:
        sha256, manifest = self.manifests[offer_id]
        base, spec, weight = manifest.base, manifest.spec, manifest.weight
        return Offer(offer_id, sha256, base, spec, weight, len(manifest.shards), manifest.largest)

    def _read_seal(self, names: set[str], attempt: int) -> Seal | Literal["unreadable"] | None:
        if f"seal/{attempt}" not in names:
            return None
        if self._seal is None or self._seal[0] != attempt:
            seal = read_record(self.store, self.layout, self.layout.seal(self.step, attempt), self._unpack_seal_for_me)
            if seal is None:
                return "unreadable"
            self._seal = (attempt, seal)
        return self._seal[1]

    def _unpack_seal_for_me(self, at: str, data: bytes) -> Seal:
        """Return the content of a seal. Raises RecordError if the seal is for vectors of the same shape as this
        replica's, but lists a different number of shards.
        """
        seal = unpack_seal(at, data)
        if seal.weight and seal.spec == self.spec and seal.num_shards != self.num_shards:
            raise RecordError(explain("shards of a seal", got=seal.num_shards, expected=self.num_shards))
        return seal

    def _list_means(self, names: set[str], attempt: int, seal: Seal) -> None:
        folder, mean_of = f"mean/{attempt}/", digest(seal.members)
        for name in sorted(name for name in names if name.startswith(folder)):
            mean = parse_mean(name.removeprefix(folder), mean_of)
            if mean is not None and mean[0] < seal.num_shards:
                self.mean_checksums.setdefault(attempt, {}).setdefault(*mean)
            else:
                self.store.traffic.add(foreign=1)

    def _read_expected_ranks(self, names: set[str]) -> frozenset[int]:
        """Return the ranks to wait for. Each "here" record, with which a replica announces its return, is read only
        once.
        """
        names_here = {name.removeprefix("here/") for name in names if name.startswith("here/")}
        ranks = {int(name) for name in names_here if name.isdigit()} & set(range(self.world_size))
        for rank in ranks - self._here:
            if (
                read_record(self.store, self.layout, self.layout.here(self.step, rank), _unpack_empty("here"))
                is not None
            ):
                self._here.add(rank)
        return _expected_ranks(self.last, self._here, self.departures().ranks, self.world_size)

    def _request_departures(self) -> Future[_Departures]:
        """Return a future for the replicas that have left. The result is cached. If there is a thread pool, the
        records are read in the background.
        """
        if self._departures is None:
            if self.pool is not None:
                self._departures = self.pool.submit(read_departures, self.store, self.layout)
            else:
                # If this raises, nothing is cached.
                departures = read_departures(self.store, self.layout)
                self._departures = Future()
                self._departures.set_result(departures)
        return self._departures


def _resolve_attempt(slots: Sequence[RoundOutcome | None]) -> _Attempt:
    """Return how an attempt ended, given the outcomes in its slots (None for an outcome that cannot be read).

    A slot is used only if the one before it is damaged. A single commit or void outcome decides, because a replica that
    cannot read it sees the same seal and the same means, and therefore writes the same outcome into the next slot. An
    abort cannot be derived from other records, so it must be in two slots before any replica acts on it.
    """
    aborts: list[RoundOutcome] = []
    for outcome in filter(None, slots):
        if outcome.result != "abort":
            return _Attempt(outcome)
        aborts.append(outcome)
        if len(aborts) == _ABORTS:
            return _Attempt(outcome)
    return _Attempt(slot=len(slots), abort=aborts[-1] if aborts else None)


def _view_with_seal(view: RoundView, seal: Seal) -> RoundView | None:
    """Return the view including a seal that was just created, or None if the round has to be reread.

    The result equals what a read right after the creation of the seal would return, except for offers that are newer
    than the view. All offers that the seal counts must therefore be in the view; otherwise, None is returned.
    """
    return replace(view, seal=seal) if _has_offers_of(view, seal.members) else None


def _view_with_outcome(view: RoundView, outcome: RoundOutcome) -> RoundView | None:
    """Return the view including an outcome that was just created, or None if the round has to be reread.

    After any outcome other than a commit, the round has to be reread, because another attempt follows.
    """
    committed = outcome.result == "commit" and _has_offers_of(view, outcome.members)
    return replace(view, outcome=outcome) if committed else None


def _has_offers_of(view: RoundView, members: Iterable[Member]) -> bool:
    return {member.id for member in members} <= {offer.id for offer in view.offers}


def _expected_ranks(
    last: RoundOutcome | None, here: Iterable[int], departed: Iterable[int], world_size: int
) -> frozenset[int]:
    """Return the ranks to wait for: the members of the last commit and the ranks that have returned, without those that
    have left.

    As a result, a replica that dies delays its peers by a single grace period, and not in every round.
    """
    before = range(world_size) if last is None else (member.id.rank for member in last.members)
    return frozenset({*before, *here} - set(departed))


def _unpack_empty(kind: str) -> Callable[[str, bytes], bool]:
    """Return a function that unpacks records without fields."""
    return lambda at, data: unpack_fields(kind, at, data) == {}


def read_record(store: PatientStore, layout: Layout, key: str, unpack: Callable[[str, bytes], T]) -> T | None:
    """Return the record at a key, or None if it is missing, unreadable or written for another address."""
    return _read_if_there(store, layout, key, unpack)[0]


def _read_if_there(
    store: PatientStore, layout: Layout, key: str, unpack: Callable[[str, bytes], T]
) -> tuple[T | None, bool]:
    """Return the record at a key (None in the same cases as `read_record`), and whether any object exists at that
    key.
    """
    at = layout.address(key)
    for _ in range(READS):
        try:
            return unpack(at, store.get(key, most_bytes=MAX_RECORD_BYTES)), True
        except RecordError:
            store.traffic.add(refused=1)
        except MissingObject:
            return None, False
        except ObjectTooLarge:
            store.traffic.add(refused=1)
            return None, True
    return None, True


def read_commit(store: PatientStore, layout: Layout, step: int) -> tuple[int, RoundOutcome] | None:
    """Return the number of the attempt in which a round was committed, and the commit; None if the round is not
    committed.

    A round has at most one commit. To save requests, its outcomes are listed only if the first one exists and is not a
    commit.
    """
    first, is_there = _read_if_there(store, layout, layout.outcome(step, 0), unpack_outcome)
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
    """Return the number of the newest readable claim on a rank; None if no claim is newer than `after`."""
    numbers = sorted((claim for claim in claim_numbers(store, layout, rank) if claim > after), reverse=True)
    is_claim = functools.partial(unpack, "claim")
    return next((claim for claim in numbers if read_record(store, layout, layout.claim(rank, claim), is_claim)), None)


def claim_numbers(store: PatientStore, layout: Layout, rank: int) -> list[int]:
    """Return the numbers of all claims on a rank, including unreadable ones."""
    names = (key.rpartition("/")[2] for key in store.keys(layout.claim(rank)))
    return [int(name) for name in names if _CLAIM.fullmatch(name)]


def read_departures(store: PatientStore, layout: Layout) -> _Departures:
    """Return the ranks whose latest process has left the run."""
    ranks: set[int] = set()
    finished_at: dict[int, int] = {}
    # The goodbye of an older claim does not count, because a newer process holds the rank.
    for key in store.keys(layout.goodbye()):
        process = _parse_goodbye(key.rpartition("/")[2])
        goodbye = None if process is None else read_goodbye(store, layout, process.rank, process.claim)
        if process is None or goodbye is None:
            continue
        if newest_claim(store, layout, process.rank, after=process.claim) is not None:
            continue
        ranks.add(process.rank)
        if goodbye.finished:
            finished_at[process.rank] = goodbye.step
    return _Departures(frozenset(ranks), finished_at)


def read_goodbye(store: PatientStore, layout: Layout, rank: int, claim: int) -> Goodbye | None:
    """Return the goodbye written by the process that holds this claim, or None if the process has not left."""
    return read_record(store, layout, layout.goodbye(rank, claim), _unpack_goodbye)


def _parse_goodbye(name: str) -> OfferId | None:
    # The name of a goodbye is that of an offer without the trial.
    return parse_offer(f"{name}.0")


def _unpack_goodbye(at: str, data: bytes) -> Goodbye:
    content = unpack_fields("goodbye", at, data, *Goodbye._fields)
    with as_record_error("goodbye"):
        if not isinstance(content["finished"], bool):
            raise ValueError("`finished` is not a boolean")
        return Goodbye(content["finished"], checked_int(content["step"], below=MAX_COUNTER))


def published_states(store: PatientStore, layout: Layout) -> list[str]:
    """Return the names of the published states, newest first."""
    prefix = layout.key("states")
    names = [key.removeprefix(f"{prefix}/") for key in store.keys(prefix)]
    return sorted((name for name in names if parse_state(name)), reverse=True)


def step_of(name: str) -> int:
    """Return the step in the name of a published state, or -1 if the name has another format."""
    parsed = parse_state(name)
    return parsed[0] if parsed else -1
