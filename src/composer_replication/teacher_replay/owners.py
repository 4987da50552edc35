"""Which processes that reserved money are still alive: each holds the lock of a small file as long as it lives."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from composer_replication.atomic import try_lock


class Owner:
    """This process's lock file beside a store; it goes away with `close`, and its lock with the process."""

    def __init__(self, store: Path) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._path = _lock_path(store, self.name)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try_lock(self._descriptor)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def dead_owners(store: Path | None, names: Sequence[str], own: str = "") -> Iterator[str]:
    """Of these, the processes that are gone. Lock files of all that are gone are removed."""
    if store is None:
        return
    left = {path.name[len(store.name) + 1 : -len(".lock")] for path in store.parent.glob(f"{store.name}.*.lock")}
    for name in sorted({*names, *left} - {own}):
        path = _lock_path(store, name)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            yield name
            continue
        try:
            if try_lock(descriptor):
                path.unlink(missing_ok=True)
                yield name
        finally:
            os.close(descriptor)


def _lock_path(store: Path, name: str) -> Path:
    return store.with_name(f"{store.name}.{name}.lock")
