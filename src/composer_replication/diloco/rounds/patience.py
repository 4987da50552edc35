"""A store seen through a round's patience: calls that fail for a moment are repeated until the round's time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from composer_replication.diloco.store import (
    MissingObject,
    ObjectStore,
    ObjectTooLarge,
    StoreUnavailable,
)
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
    repeated: int = 0  # calls that failed and were made again
    foreign: int = 0  # objects in the run's folders that are none of the protocol's
    refused: int = 0  # reads whose bytes were not those promised

    def __post_init__(self) -> None:
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class PatientStore:
    """An ObjectStore whose calls are counted, and made again while the store is unavailable.

    A repeated `create` may lose to itself: its answer was lost, not its write. So nobody here trusts what it returns;
    whoever creates reads what is there.
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

    def settle(self, key: str, record: bytes) -> bool:
        """Create a record, unless somebody has; whether it is mine, and was read back.

        Whoever created it knows what should be there, and may mend it.
        """
        return self.create(key, record) and self.put_whole(key, record, written=True)

    def put_whole(self, key: str, data: bytes, *, written: bool = False) -> bool:
        """Write an object and read it back, some times if need be; whether it is there."""
        for _ in range(_WRITES):
            if not written:
                self.put(key, data)
            if self._holds(key, data):
                return True
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
                if time.monotonic() + pause >= self._until:
                    raise
            self.traffic.add(repeated=1)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


# What can go wrong in a round, by name.
#
#     RoundError (RuntimeError)
#     ├── RoundTimeout (TimeoutError)     a round did not end in time; says who is missing
#     │   └── QuorumLeft                  so many replicas have finished that no round can be held any more
#     ├── RankTaken (ValueError)          another living process holds this rank
#     ├── Replaced                        another process took this rank while this one was away
#     ├── GenerationRefused (ValueError)  the prefix holds a run of another shape, or one that was closed
#     ├── StaleRound (ValueError)         the prefix holds rounds of an earlier run
#     ├── StateUnreadable                 no published state could be read, and the rounds since are gone
#     └── OfferUnreadable                 what this replica offers cannot be read back, however often it is written
#
# A vector of another shape or type is a ShapeError; what a store refuses is a StoreError.


class RoundError(ComposerError, RuntimeError):
    """A round of the protocol cannot go on for this replica."""


class RoundTimeout(RoundError, TimeoutError):
    """A round did not end within its time."""


class QuorumLeft(RoundTimeout):
    """So many replicas have finished that no round can be held any more: it is not waited for."""


class RankTaken(RoundError, ValueError):
    """Another living process holds this rank."""


class Replaced(RoundError):
    """Another process took this rank while this one was away."""


class GenerationRefused(RoundError, ValueError):
    """The prefix holds a run of another shape, or one that was closed."""


class StaleRound(RoundError, ValueError):
    """The prefix holds rounds of an earlier run."""


class StateUnreadable(RoundError):
    """No published state could be read, and the rounds since are gone."""


class OfferUnreadable(RoundError):
    """What this replica offers cannot be read back, and without it there is no quorum."""
