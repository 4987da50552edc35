"""Objects of one process: for tests, for the explorer of the protocol, and for replicas that are threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from composer_replication.diloco.store.objects import checked_folder, checked_key, missing, too_large


class MemoryStore:
    """An ObjectStore that is a dictionary with a lock."""

    def __init__(self, name: str = "memory") -> None:
        self.uri = f"memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[checked_key(key)] = bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if checked_key(key) in self._objects:
                return False
            self._objects[key] = bytes(data)
            return True

    def get(self, key: str, *, most_bytes: int) -> bytes:
        with self._lock:
            data = self._objects.get(checked_key(key))
        if data is None:
            raise missing(self.uri, key)
        if len(data) > most_bytes:
            raise too_large(self.uri, key, size=len(data), most_bytes=most_bytes)
        return data

    def size(self, key: str) -> int | None:
        with self._lock:
            data = self._objects.get(checked_key(key))
        return None if data is None else len(data)

    def keys(self, prefix: str) -> list[str]:
        folder = checked_folder(prefix)
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(folder))

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(checked_key(key), None)
