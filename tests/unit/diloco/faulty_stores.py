"""A store that fails as real ones do: refuses, loses answers, is slow, damages what it hands out or what it holds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from composer_replication.diloco.store import ObjectStore, StoreUnavailable

T = TypeVar("T")


@dataclass(frozen=True)
class Faults:
    """How often each fault comes, as a share of the calls it can come with."""

    refused: float = 0.0  # an error, and nothing was done
    lost: float = 0.0  # done, and then an error
    slow: float = 0.0  # a pause before
    slow_s: float = 0.02
    damaged_read: float = 0.0  # a bit flipped or a tail cut off, on the way
    damaged_write: float = 0.0  # the same, for good, in what is stored


class Killed(BaseException):
    """A replica's thread ends here, as a process does at kill -9: nothing after it runs."""


class FaultyStore:
    """One replica's way to the store all share. `kill_at` ends it at its n-th call, before or after the call."""

    def __init__(self, store: ObjectStore, faults: Faults, seed: int, *, kill_at: int | None = None) -> None:
        self.store, self.faults, self.kill_at = store, faults, kill_at
        self.uri = store.uri
        self.dead = False
        self.paused = threading.Event()
        self.damage: Callable[[str], bool] = lambda key: True  # which keys may be damaged for good
        self.calls = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        self._call(lambda: self.store.put(key, self._stored(key, data)))

    def create(self, key: str, data: bytes) -> bool:
        return self._call(lambda: self.store.create(key, self._stored(key, data)))

    def get(self, key: str, *, most_bytes: int) -> bytes:
        data = self._call(lambda: self.store.get(key, most_bytes=most_bytes))
        return self._damaged(data) if self._happens(self.faults.damaged_read) else data

    def size(self, key: str) -> int | None:
        return self._call(lambda: self.store.size(key))

    def keys(self, prefix: str) -> list[str]:
        return self._call(lambda: self.store.keys(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._call(lambda: self.store.delete(keys))

    def _call(self, call: Callable[[], T]) -> T:
        with self._lock:
            self.calls += 1
            last = self.kill_at is not None and self.calls >= self.kill_at
            after = last and self._random.random() < 0.5
        if last and not after:
            self.dead = True
        if self.dead:
            raise Killed
        while self.paused.is_set():
            time.sleep(0.01)
        if self._happens(self.faults.slow):
            time.sleep(self.faults.slow_s * self._random.random())
        if self._happens(self.faults.refused):
            raise StoreUnavailable("answered 503", uri=self.uri)
        result = call()
        if after:
            self.dead = True
            raise Killed
        if self._happens(self.faults.lost):
            raise StoreUnavailable("the answer was lost", uri=self.uri)
        return result

    def _stored(self, key: str, data: bytes) -> bytes:
        return self._damaged(data) if self.damage(key) and self._happens(self.faults.damaged_write) else data

    def _happens(self, share: float) -> bool:
        with self._lock:
            return self._random.random() < share

    def _damaged(self, data: bytes) -> bytes:
        with self._lock:
            at = self._random.randrange(max(1, len(data)))
            if not data or self._random.random() < 0.5:
                return data[:at]
        return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
