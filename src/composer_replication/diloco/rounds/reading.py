"""Read a round from the store into the view that `decide` takes, and other records that say who is in a run."""

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
    pack,
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
READS = 3  # tries before bytes count as unreadable: bytes that were damaged on their way are whole the next time
# "0" and "12"; not "-1"
_CLAIM = re.compile(r"\d{1,9}")


_ABORTS = 2  # readable aborts that end an attempt, so that it stays ended even if one of them is damaged later


@dataclass(frozen=True)
class Offer:
    """A contribution whose manifest exists and can be read."""

    id: OfferId
    manifest: str
    base: str
    spec: str
    weight: float
    num_shards: int
    largest: float = 0.0  # largest magnitude in its vector


@dataclass(frozen=True)
class RoundView:
    """One round as a replica has read it. A part may be older than the store; none is newer."""

    expected: frozenset[int]  # ranks to wait for until the grace is over
    offers: frozenset[Offer] = frozenset()
    ended: tuple[RoundOutcome, ...] = ()  # attempts that were aborted or void
    seal: Seal | Literal["unreadable"] | None = None  # of the attempt after those
    means: frozenset[int] = frozenset()  # shards whose mean exists
    outcome: RoundOutcome | None = None  # a commit
    departed: frozenset[int] = frozenset()  # ranks whose latest process has said goodbye
    finished: frozenset[int] = frozenset()  # the departed ranks that have all the commits that this replica needs
    slot: int = 0  # where this attempt's outcome goes, after outcomes that cannot be read
    abort: RoundOutcome | None = None  # of this attempt, in one slot only: it counts once it is in two

    @property
    def attempt(self) -> int:
        """The number of the open attempt."""
        return len(self.ended)

    @property
    def spent(self) -> frozenset[OfferId]:
        """The offers that no later attempt may use."""
        return frozenset(offer_id for outcome in self.ended for offer_id in outcome.spent())


class _Attempt(NamedTuple):
    """How an attempt ended, as far as that can be read."""

    outcome: RoundOutcome | None = None
    slot: int = 0  # where an outcome would go
    abort: RoundOutcome | None = None  # the only one that can be read, although two are needed


class Goodbye(NamedTuple):
    """What a process says when it leaves: whether it had all the commits that it needed, and how many there were."""

    finished: bool
    step: int


@dataclass(frozen=True)
class _Departures:
    """The ranks whose latest process said goodbye, and the steps of those that had finished."""

    ranks: frozenset[int] = frozenset()
    finished_at: Mapping[int, int] = field(default_factory=dict)

    def finished_for(self, commits: int | None) -> frozenset[int]:
        """Return the ranks that have finished, for a replica that needs so many commits (None: unknown).

        A rank that finished a shorter run is not among them: whoever extends the run starts it again.
        """
        return frozenset(rank for rank, step in self.finished_at.items() if commits is None or step >= commits)


@dataclass
class RoundReader:
    """Reads one round repeatedly, and keeps what cannot change any more."""

    store: PatientStore
    layout: Layout
    step: int
    world_size: int
    last: RoundOutcome | None  # the commit before
    spec: str = ""  # of the vector of this replica
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
        """Return the round as the store shows it now."""
        prefix = self.layout.round(self.step)
        self._ask_for_departures()
        names = {key.removeprefix(f"{prefix}/") for key in self.store.keys(prefix)}
        open_attempt = self._read_outcomes(names)
        attempt, outcome = len(self._ended), open_attempt.outcome
        self._read_manifests(names)
        seal = self._read_seal(names, attempt) if outcome is None else None
        # Also when the attempt is over, so that foreign names are counted.
        if self._seal is not None and self._seal[0] == attempt:
            self._list_means(names, attempt, self._seal[1])
        return RoundView(
            expected=self._expected(names),
            offers=frozenset(self._offer(ident) for ident in self.manifests),
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
        """Return whether some replica has offered to the next round, which only a commit leads to."""
        prefix = self.layout.round(self.step + 1, "offer")
        offers = (parse_offer(key.removeprefix(f"{prefix}/")) for key in self.store.keys(prefix))
        return any(offer is not None and self._manifest(self.step + 1, offer) is not None for offer in offers)

    def departures(self) -> _Departures:
        """Return who has left, by the latest answer."""
        return self._ask_for_departures().result()

    def forget_departures(self) -> None:
        """Let the next read ask again who has left."""
        self._departures = None

    def view_after_seal(self, view: RoundView, *, my_record: bytes | None) -> RoundView | None:
        """Return the view with the seal of the attempt, after this replica tried to create it.

        `mine` is the record that was created here and read back; None if another replica was first, so that its record
        is read. Returns None if the round has to be read again.
        """
        seal = self._known(self.layout.seal(self.step, view.attempt), my_record, self._fitting_seal)
        if seal is None:
            return None
        self._seal = (view.attempt, seal)
        return _view_with_seal(view, seal)

    def view_after_outcome(self, view: RoundView, *, my_record: bytes | None) -> RoundView | None:
        """Return the view with the outcome of the attempt, as `sealed` does for the seal."""
        outcome = self._known(self.layout.outcome(self.step, view.attempt, view.slot), my_record, unpack_outcome)
        return None if outcome is None else _view_with_outcome(view, outcome)

    def _known(self, key: str, mine: bytes | None, unpack: Callable[[str, bytes], T]) -> T | None:
        """Return the content of my record, or of the one that another replica wrote. Mine is checked, too."""
        if mine is None:
            return read_record(self.store, self.layout, key, unpack)
        try:
            return unpack(self.layout.address(key), mine)
        except RecordError:
            return None

    def _read_outcomes(self, names: set[str]) -> _Attempt:
        """Return the first attempt that is open or committed, and keep the outcomes of those before."""
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
        # A slot without an outcome is one that cannot be read, or that was skipped; both count as None.
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
        """Read a manifest. One that cannot be read counts as missing: its owner will notice, and write it again."""

        if (manifest := self._manifest(self.step, offer)) is not None:
            self.manifests[offer] = digest(asdict(manifest)), manifest

    def _manifest(self, step: int, offer: OfferId) -> Manifest | None:
        def checked(at: str, data: bytes) -> Manifest:
            manifest = unpack_manifest(at, data)
            if manifest.id != offer:
                raise RecordError(f"{manifest.id} in the record of {offer}")
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
        """Return a seal. Raises RecordError if it has another number of shards than the vectors it counts."""
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

    def _expected(self, names: set[str]) -> frozenset[int]:
        """Return the ranks to wait for. A "here" record is read once, and then remembered."""
        names_here = {name.removeprefix("here/") for name in names if name.startswith("here/")}
        ranks = {int(name) for name in names_here if name.isdigit()} & set(range(self.world_size))
        for rank in ranks - self._here:
            if read_record(self.store, self.layout, self.layout.here(self.step, rank), _no_fields("here")) is not None:
                self._here.add(rank)
        return _expected_ranks(self.last, self._here, self.departures().ranks, self.world_size)

    def _ask_for_departures(self) -> Future[_Departures]:
        """Return who has left. It is read once until it is forgotten, in the background if there is a pool."""
        if self._departures is None:
            if self.pool is not None:
                self._departures = self.pool.submit(read_departures, self.store, self.layout)
            else:
                # If this raises, the next look asks again.
                departures = read_departures(self.store, self.layout)
                self._departures = Future()
                self._departures.set_result(departures)
        return self._departures


def _resolve_attempt(slots: Sequence[RoundOutcome | None]) -> _Attempt:
    """Return how an attempt ended, from the outcomes in its slots; None is one that cannot be read.

    A later slot was written because the one before was damaged. One commit decides, and so does one void: a replica
    that cannot read it sees the same seal and the same means, and writes the same outcome into the next slot. An abort
    cannot be derived again, so it has to be in two slots before anybody acts on it.
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
    """Return the view with the seal that was just created; None if the round has to be read again.

    The result is what a read right after the seal would show, except for offers that are not in the view. So all
    members of the seal must be among the offers of the view.
    """
    return replace(view, seal=seal) if _knows(view, seal.members) else None


def _view_with_outcome(view: RoundView, outcome: RoundOutcome) -> RoundView | None:
    """Return the view with the outcome that was just created; None if the round has to be read again.

    That is so for an outcome other than a commit, because another attempt follows it.
    """
    committed = outcome.result == "commit" and _knows(view, outcome.members)
    return replace(view, outcome=outcome) if committed else None


def _knows(view: RoundView, members: Iterable[Member]) -> bool:
    return {member.id for member in members} <= {offer.id for offer in view.offers}


def _expected_ranks(
    last: RoundOutcome | None, here: Iterable[int], departed: Iterable[int], world_size: int
) -> frozenset[int]:
    """Return the ranks to wait for: the members of the last commit and those that are back, without those that left.

    So a replica that died costs its peers one grace, not one in every round.
    """
    before = range(world_size) if last is None else (member.id.rank for member in last.members)
    return frozenset({*before, *here} - set(departed))


def _no_fields(kind: str) -> Callable[[str, bytes], bool]:
    """Return a reader for records whose only content is their address."""
    return lambda at, data: unpack_fields(kind, at, data) == {}


def read_record(store: PatientStore, layout: Layout, key: str, unpack: Callable[[str, bytes], T]) -> T | None:
    """Return the record at a key; None if it is unreadable, belongs elsewhere or is missing."""
    return _read(store, layout, key, unpack)[0]


def _read(store: PatientStore, layout: Layout, key: str, unpack: Callable[[str, bytes], T]) -> tuple[T | None, bool]:
    """Return the record, and whether there is any object at its key."""
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
    """Return the attempt in which a round was committed, and its outcome; None if it was not, or not yet.

    There is at most one commit, so any that can be read is the one. The outcomes are listed only if the first one is no
    commit.
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
    """Return the number of the newest claim on a rank; None if there is none after `after`."""
    numbers = sorted((claim for claim in claim_numbers(store, layout, rank) if claim > after), reverse=True)
    is_claim = functools.partial(unpack, "claim")
    return next((claim for claim in numbers if read_record(store, layout, layout.claim(rank, claim), is_claim)), None)


def claim_numbers(store: PatientStore, layout: Layout, rank: int) -> list[int]:
    """Return the numbers of all claims on a rank, readable or not."""
    names = (key.rpartition("/")[2] for key in store.keys(layout.claim(rank)))
    return [int(name) for name in names if _CLAIM.fullmatch(name)]


def read_departures(store: PatientStore, layout: Layout) -> _Departures:
    """Return the ranks whose latest process said goodbye."""
    ranks: set[int] = set()
    finished_at: dict[int, int] = {}
    # A goodbye of an older claim says nothing: a newer process holds the rank.
    for key in store.keys(layout.goodbye()):
        who = _rank_and_claim(key.rpartition("/")[2])
        goodbye = None if who is None else read_goodbye(store, layout, who.rank, who.claim)
        if who is None or goodbye is None or newest_claim(store, layout, who.rank, after=who.claim) is not None:
            continue
        ranks.add(who.rank)
        if goodbye.finished:
            finished_at[who.rank] = goodbye.step
    return _Departures(frozenset(ranks), finished_at)


def read_goodbye(store: PatientStore, layout: Layout, rank: int, claim: int) -> Goodbye | None:
    """Return the goodbye of a process; None if there is none."""
    return read_record(store, layout, layout.goodbye(rank, claim), _goodbye)


def pack_goodbye(at: str, goodbye: Goodbye) -> bytes:
    """Return the record of a goodbye for an address."""
    return pack("goodbye", at, goodbye._asdict())


def joined_ranks(store: PatientStore, layout: Layout) -> set[int]:
    """Return the ranks that some process has claimed."""
    prefix = layout.key("claims")
    names = {key.removeprefix(f"{prefix}/").partition("/")[0] for key in store.keys(prefix)}
    return {int(name) for name in names if name.isdigit()}


def _rank_and_claim(name: str) -> OfferId | None:
    # A goodbye's name lacks the trial, so that with one it reads as an offer.
    return parse_offer(f"{name}.0")


def _goodbye(at: str, data: bytes) -> Goodbye:
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
    """Return the step in the name of a state; -1 for another name."""
    parsed = parse_state(name)
    return parsed[0] if parsed else -1
