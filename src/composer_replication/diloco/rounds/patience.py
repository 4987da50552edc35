"""Retry failing calls to a store until the time limit of a round, and define the errors of rounds.

    RoundError (RuntimeError)
    ├── RoundTimeout (TimeoutError)     a round did not end in time; the message names the missing ranks
    │   └── QuorumLeft                  so many replicas have finished that there can be no quorum
    ├── RankTaken (ValueError)          another living process holds this rank
    ├── Replaced                        another process has taken this rank while this process was paused
    ├── GenerationRefused (ValueError)  the generation has a run with other settings, a closed run, or none
    ├── StaleRound (ValueError)         the store has rounds of an earlier run
    ├── StateUnreadable                 a state that this replica needs cannot be read
    └── OfferUnreadable                 an offer of this replica cannot be read back, even after several tries

A vector with a different shape or type raises ShapeError; a failure of the store raises StoreError.
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
    """The numbers of bytes and requests that one replica has sent and received."""

    sent: int = 0
    received: int = 0
    calls: int = 0
    repeated: int = 0  # failed calls that were repeated
    foreign: int = 0  # objects in the run's folders that do not belong to the protocol
    refused: int = 0  # reads whose bytes did not match their checksum, size or format

    def __post_init__(self) -> None:
        # A round makes requests in several threads.
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        """Add to the counts. This method is thread-safe."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class PatientStore:
    """An ObjectStore that counts its calls, and repeats them while the store is unavailable.

    If the answer to a `create` call is lost, the repeated call finds the object that the first call wrote, and returns
    False. The return value of `create` is therefore not reliable: read the object back to find out which process wrote
    it.
    """

    def __init__(self, store: ObjectStore, traffic: Traffic, *, patience_s: float) -> None:
        self._store, self.traffic = store, traffic
        self.uri = store.uri
        self._until = time.monotonic() + patience_s

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() >= self._until

    def put(self, key: str, data: bytes) -> None:
        self._retry(lambda: self._store.put(key, data))
        self.traffic.add(sent=len(data))

    def create(self, key: str, data: bytes) -> bool:
        created = self._retry(lambda: self._store.create(key, data))
        self.traffic.add(sent=len(data))
        return created

    def create_verified(self, key: str, record: bytes) -> bool:
        """Create a record unless one exists at this key. Returns whether this call created it and could read it
        back.

        A record that cannot be read back is rewritten.
        """
        return self.create(key, record) and self.put_verified(key, record, written=True)

    def put_verified(self, key: str, data: bytes, *, written: bool = False) -> bool:
        """Write an object and read it back, with up to three writes. Returns whether the object could be read back.

        If `written` is true, the caller has already done the first write.
        """
        for _ in range(_WRITES):
            if not written:
                self.put(key, data)
            if self._has_object(key, data):
                return True
            # It could not be read back, so write it again.
            written = False
        return False

    def get(self, key: str, *, most_bytes: int) -> bytes:
        data = self._retry(lambda: self._store.get(key, most_bytes=most_bytes))
        self.traffic.add(received=len(data))
        return data

    def size(self, key: str) -> int | None:
        return self._retry(lambda: self._store.size(key))

    def keys(self, prefix: str) -> list[str]:
        return self._retry(lambda: self._store.keys(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._retry(lambda: self._store.delete(keys))

    def _has_object(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key, most_bytes=len(data)) == data
        except (MissingObject, ObjectTooLarge):
            return False

    def _retry(self, call: Callable[[], T]) -> T:
        pause = _FIRST_PAUSE_S
        while True:
            self.traffic.add(calls=1)
            try:
                return call()
            except StoreUnavailable:
                # Only this error is temporary; a denied request would be denied again.
                if time.monotonic() + pause >= self._until:
                    raise
            self.traffic.add(repeated=1)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


class RoundError(ComposerError, RuntimeError):
    """Raised if a replica cannot continue with a round."""


class RoundTimeout(RoundError, TimeoutError):
    """Raised if a round does not end in time."""


class QuorumLeft(RoundTimeout):
    """Raised if so many replicas have finished that there can be no quorum."""


class RankTaken(RoundError, ValueError):
    """Raised if another living process holds this rank."""


class Replaced(RoundError):
    """Raised if another process has taken this rank while this process was paused."""


class GenerationRefused(RoundError, ValueError):
    """Raised if the generation (the number of a run in the store) has a run with other settings, a closed run, or no
    run.
    """


class StaleRound(RoundError, ValueError):
    """Raised if the store contains rounds of an earlier run."""


class StateUnreadable(RoundError):
    """Raised if a state that this replica needs cannot be read, or was never published."""


class OfferUnreadable(RoundError):
    """Raised if an offer of this replica cannot be read back, and there is no quorum without it."""
