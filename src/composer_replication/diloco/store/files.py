"""Implement two stores: one in a folder that the replicas share (on a local disk, or a network mount with hard links),
and one in memory.

A put writes a temporary file, syncs it and renames it. A create writes and syncs a temporary file, and then makes a
hard link to it, which fails if the name exists. Checking for the name before writing, as fsspec does, would let two
processes both succeed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Literal

from composer_replication.atomic import staged
from composer_replication.diloco.store.objects import (
    StoreCannotCreate,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    checked_folder,
    checked_key,
    is_key,
    missing,
    too_large,
)

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# How often a folder is created again that another process removes at the same moment. In a test that deleted without
# pauses, 20 tries were needed.
_TRIES = 1000
# Does not follow symbolic links, which may lead out of the folder, and does not wait for the writer of a pipe.
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class FileStore:
    """An ObjectStore in a folder."""

    def __init__(self, root: Path, *, probes: bool = True) -> None:
        self._root = root.absolute()
        self.uri = self._root.as_uri()
        if not probes:
            return
        with self._store_errors(""):
            self._root.mkdir(parents=True, exist_ok=True)
            self._refuse_without_links()

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, mode="put")

    def create(self, key: str, data: bytes) -> bool:
        # Avoids writing the bytes if the object has existed for long.
        if self.size(key) is not None:
            return False
        try:
            self._write(key, data, mode="create")
        except FileExistsError:
            return False
        return True

    def get(self, key: str, *, most_bytes: int) -> bytes:
        with self._store_errors(key):
            descriptor = os.open(self._path(key), _READ)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise missing(self.uri, key)
                if status.st_size > most_bytes:
                    raise too_large(self.uri, key, size=status.st_size, most_bytes=most_bytes)
                data = file.read(status.st_size)
        # Files are replaced as a whole, so a short read means that this file was truncated.
        if len(data) != status.st_size:
            what = f"the file ended after {len(data):,} of {status.st_size:,} bytes"
            raise StoreUnavailable(what, uri=self.uri, key=key, cause_kind="truncated")
        return data

    def size(self, key: str) -> int | None:
        status = self._status(key)
        return None if status is None else status.st_size

    def written_at(self, key: str) -> float | None:
        """Return when an object was written, by the file system's clock; None if it does not exist."""
        status = self._status(key)
        return None if status is None else status.st_mtime

    def _status(self, key: str) -> os.stat_result | None:
        try:
            with self._store_errors(key):
                status = os.lstat(self._path(key))
        except StoreError as error:
            if error.cause_kind in ("ENOENT", "ENOTDIR"):
                return None
            raise
        return status if stat.S_ISREG(status.st_mode) else None

    def keys(self, prefix: str) -> list[str]:
        folder = checked_folder(prefix)
        with self._store_errors(prefix):
            return sorted(key for key in self._walk(folder) if is_key(key))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._store_errors(key):
                try:
                    path.unlink(missing_ok=True)
                except NotADirectoryError:
                    # A part of the path is a file, so the object does not exist.
                    continue
                self._remove_empty(path.parent)

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _write(self, key: str, data: bytes, *, mode: Literal["put", "create"]) -> None:
        path = self._path(key)
        with self._store_errors(key):
            for tries_left in reversed(range(_TRIES)):
                try:
                    _make_folder(path.parent)
                    with staged(path) as stage:
                        stage.file.write(data)
                        stage.commit_new() if mode == "create" else stage.commit()
                except FileNotFoundError:
                    # Another process removed the folder before the file was created.
                    if not tries_left:
                        raise
                else:
                    return

    def _walk(self, folder: str) -> Iterator[str]:
        try:
            entries = list(os.scandir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(f"{folder}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield f"{folder}{entry.name}"

    def _remove_empty(self, folder: Path) -> None:
        # The folder is not empty, or another process has removed it.
        with contextlib.suppress(OSError):
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _refuse_without_links(self) -> None:
        """Raise StoreCannotCreate if the file system has no hard links."""
        probe = self._root / f".{os.getpid()}.{secrets.token_hex(4)}.tmp"
        linked = probe.with_name(f".{probe.name}")
        try:
            probe.write_bytes(b"")
            os.link(probe, linked)
        except OSError as error:
            # These errors do not mean that links are unsupported.
            if error.errno in _FULL | {errno.EACCES, errno.EROFS}:
                raise
            what = f"the file system has no hard links ({error.strerror}), so two replicas could create one object"
            raise StoreCannotCreate(what, uri=self.uri, cause_kind="no_links") from error
        finally:
            for path in (probe, linked):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _store_errors(self, key: str) -> Generator[None]:
        """Convert an OSError raised in the block into a StoreError, except FileExistsError, which `create` handles."""
        try:
            yield
        except FileExistsError:
            raise
        except OSError as error:
            kind = errno.errorcode.get(error.errno or 0, "OSError")
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
                raise missing(self.uri, key, cause_kind=kind) from error
            failure = StoreDenied if error.errno in _DENIED else StoreFull if error.errno in _FULL else StoreUnavailable
            raise failure(error.strerror or str(error), uri=self.uri, key=key, cause_kind=kind) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # Also raised if the folder existed and was removed before mkdir checked it. Then stat raises FileNotFoundError.
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise


class MemoryStore:
    """An ObjectStore in a dictionary, for tests and for replicas that are threads."""

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
