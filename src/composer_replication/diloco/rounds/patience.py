"""A store with patience, whose failing calls are repeated until a round's time is over; and the errors of rounds.

    RoundError (RuntimeError)
    ├── RoundTimeout (TimeoutError)     a round did not end in time; names the missing ranks
    │   └── QuorumLeft                  so many replicas have finished that no round can be held any more
    ├── RankTaken (ValueError)          another living process holds this rank
    ├── Replaced                        another process took this rank while this one was away
    ├── GenerationRefused (ValueError)  the prefix holds a run with other settings, or one that was closed
    ├── StaleRound (ValueError)         the prefix holds rounds of an earlier run
    ├── StateUnreadable                 no published state can be read, and the rounds since are gone
    └── OfferUnreadable                 an offer of this replica cannot be read back, however often it is written

A vector of another shape or type is a ShapeError; what a store refuses is a StoreError.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from composer_replication.diloco.store import MissingObject, ObjectStore, ObjectTooLarge, StoreUnavailable
from composer_replication.errors import ComposerError

T = TypeVar("T")
_WRITES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0


@dataclass
class Traffic:
    """Bytes and calls of one replica."""

    sent: int = 0
    received: int = 0
    calls: int = 0
    repeated: int = 0  # calls that failed and were repeated
    foreign: int = 0  # objects in the run's folders that do not belong to the protocol
    refused: int = 0  # reads whose bytes did not match their checksum, size or format

    def __post_init__(self) -> None:
        # Requests of a round run in several threads.
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        """Add to the counts, from any thread."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class PatientStore:
    """An ObjectStore whose calls are counted, and repeated while the store is unavailable.

    A repeated `create` may lose to itself, if its write arrived and its answer was lost. So its return value is not
    trusted: whoever creates a record reads it back.
    """

    def __init__(self, store: ObjectStore, traffic: Traffic, *, patience_s: float) -> None:
        self._store, self.traffic = store, traffic
        self.uri = store.uri
        self._until = time.monotonic() + patience_s

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() >= self._until

    def put(self, key: str, data: bytes) -> None:
        self._patiently(lambda: self._store.put(key, data))
        self.traffic.add(sent=len(data))

    def create(self, key: str, data: bytes) -> bool:
        created = self._patiently(lambda: self._store.create(key, data))
        self.traffic.add(sent=len(data))
        return created

    def create_verified(self, key: str, record: bytes) -> bool:
        """Create a record unless there is one. Returns whether it is mine and was read back.

        The creator knows what the record should be, so it may repair it.
        """
        return self.create(key, record) and self.put_verified(key, record, written=True)

    def put_verified(self, key: str, data: bytes, *, written: bool = False) -> bool:
        """Write an object and read it back, several times if need be. Returns whether it is there."""
        for _ in range(_WRITES):
            if not written:
                self.put(key, data)
            if self._holds(key, data):
                return True
            # What was created could not be read back: from now on, write it again.
            written = False
        return False

    def get(self, key: str, *, most_bytes: int) -> bytes:
        data = self._patiently(lambda: self._store.get(key, most_bytes=most_bytes))
        self.traffic.add(received=len(data))
        return data

    def size(self, key: str) -> int | None:
        return self._patiently(lambda: self._store.size(key))

    def keys(self, prefix: str) -> list[str]:
        return self._patiently(lambda: self._store.keys(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._patiently(lambda: self._store.delete(keys))

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key, most_bytes=len(data)) == data
        except (MissingObject, ObjectTooLarge):
            return False

    def _patiently(self, call: Callable[[], T]) -> T:
        pause = _FIRST_PAUSE_S
        while True:
            self.traffic.add(calls=1)
            try:
                return call()
            except StoreUnavailable:
                # Other errors of a store, such as a denied request, would not go away.
                if time.monotonic() + pause >= self._until:
                    raise
            self.traffic.add(repeated=1)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


class RoundError(ComposerError, RuntimeError):
    """A round cannot continue for this replica."""


class RoundTimeout(RoundError, TimeoutError):
    """A round did not end in time."""


class QuorumLeft(RoundTimeout):
    """So many replicas have finished that no round can be held any more."""


class RankTaken(RoundError, ValueError):
    """Another living process holds this rank."""


class Replaced(RoundError):
    """Another process took this rank while this one was away."""


class GenerationRefused(RoundError, ValueError):
    """The prefix holds a run with other settings, or one that was closed."""


class StaleRound(RoundError, ValueError):
    """The prefix holds rounds of an earlier run."""


class StateUnreadable(RoundError):
    """No published state can be read, and the rounds since are gone."""


class OfferUnreadable(RoundError):
    """An offer of this replica cannot be read back, and without it there is no quorum."""
