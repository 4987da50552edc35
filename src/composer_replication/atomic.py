"""Files that are either wholly written or untouched: a temporary file beside the target, synced, then renamed over it.

Nothing of the old file is preserved (a symbolic link is replaced by the file); the new one gets the process's umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from composer_replication.canonical_json import encode

if sys.platform != "win32":
    import fcntl

_TEMP_SUFFIX = ".tmp"
# File systems that cannot sync a directory (some network and FUSE mounts) say so with one of these.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


class StagedFile:
    """A temporary file beside its target that takes the target's place when committed."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._temp = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMP_SUFFIX}")
        # Not tempfile.mkstemp: its mode 0600 would stay, and hide the file from the user's group.
        descriptor = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self.file: BinaryIO = os.fdopen(descriptor, "wb")

    def seal(self) -> None:
        """Bring every byte to the disk and close the file, so that `commit` is nothing but a rename."""
        if not self.file.closed:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()

    def commit(self) -> None:
        """Put the file in its target's place."""
        self.seal()
        self._temp.replace(self._target)
        _sync_directory(self._target.parent)

    def discard(self) -> None:
        """Remove what was not committed; does nothing after a commit."""
        with contextlib.suppress(OSError):  # closing flushes, and a full disk must not hide why we are here
            self.file.close()
        self._temp.unlink(missing_ok=True)


@contextlib.contextmanager
def staged(target: str | os.PathLike[str]) -> Generator[StagedFile, None, None]:
    """A StagedFile for `target` that is removed on the way out unless the block committed it."""
    stage = StagedFile(Path(target))
    try:
        yield stage
    finally:
        stage.discard()


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` so that a reader or a crash sees the old file or the new one, never a part."""
    with staged(path) as stage:
        stage.file.write(data)
        stage.commit()


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """`atomic_write_bytes` of `text` in UTF-8, line ends as they are."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | os.PathLike[str], value: object) -> None:
    """`atomic_write_bytes` of `value` as indented canonical JSON with a final newline."""
    atomic_write_bytes(path, encode(value, where=os.fspath(path), indent=True) + b"\n")


def is_temporary(path: Path) -> bool:
    """Whether `path` has the name of a file that was staged and, after a crash, left behind."""
    return path.name.startswith(".") and path.name.endswith(_TEMP_SUFFIX)


@contextlib.contextmanager
def directory_lock(directory: Path, *, exclusive: bool) -> Generator[None, None, None]:
    """Hold the advisory lock of a directory where the platform has one.

    It keeps cooperating processes from renaming two files each in turn. It is a courtesy: file systems without locks
    run on without it, so whoever reads such a pair must still check that it belongs together.
    """
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        lock(descriptor, exclusive=exclusive)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def lock(descriptor: int, *, exclusive: bool) -> None:
    """Take the advisory lock of an open file, where the platform and the file system have one."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)


def unlock(descriptor: int) -> None:
    """Give back what `lock` took."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut: the entry lives in the directory, which is synced on its own."""
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)
