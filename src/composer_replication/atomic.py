"""Write files atomically: to a temporary file in the target's folder, which is synced and then renamed over the target.

A crash leaves the old file or the new one, never a part. Nothing of the old file is preserved: a symbolic link is
replaced by a file (see `resolve_link`), and the mode of the new file follows the process's umask. A device, a pipe
or a folder is never replaced.

The module also has advisory locks of files and folders, which do nothing on platforms and file systems without locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from composer_replication.canonical_json import encode_as_written
from composer_replication.errors import InputError, explain

if sys.platform != "win32":
    import fcntl

_TEMP_SUFFIX = ".tmp"
# Errors of file systems that cannot sync a directory, such as some network and FUSE mounts.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
# Errors of file systems without hard or symbolic links (FAT, some network and FUSE mounts), or between two of them.
CANNOT_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV}


class StagedFile:
    """A temporary file in the folder of its target, which it replaces when it is committed."""

    def __init__(self, target: Path) -> None:
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "a device or a pipe"
            fix = "Write to a file and print that."
            raise InputError(explain(str(target), got=kind, expected="a file or a new name", fix=fix))
        self._target = target
        self._temp = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMP_SUFFIX}")
        # Not tempfile.mkstemp: it sets mode 0600, which would remain and hide the file from the user's group.
        descriptor = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self.file: BinaryIO = os.fdopen(descriptor, "wb")

    def seal(self) -> None:
        """Sync the file to disk and close it, so that `commit` only has to rename it."""
        if not self.file.closed:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()

    def commit(self) -> None:
        """Replace the target with the file."""
        commit_together(self)

    def commit_new(self) -> None:
        """Create the target, or raise FileExistsError if it exists. Of several concurrent writers, exactly one
        succeeds.
        """
        self.seal()
        try:
            os.link(self._temp, self._target)
        except FileExistsError:
            # A network mount may lose the answer and repeat the call. The file in the way is then our own.
            if not self._temp.samefile(self._target):
                raise
        except OSError as error:
            if error.errno not in CANNOT_LINK:
                raise
            self._claim()
        _sync_directory(self._target.parent)

    def rename(self) -> None:
        """Rename the file over its target. The caller must seal the file before and sync the folder afterwards."""
        self._temp.replace(self._target)

    @property
    def directory(self) -> Path:
        """The folder of the target."""
        return self._target.parent

    def _claim(self) -> None:
        """Do what `commit_new` does on file systems without hard links: only the writer that creates the empty
        target may rename over it.
        """
        os.close(os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            self.rename()
        except OSError:
            self._target.unlink()
            raise

    def discard(self) -> None:
        """Delete the temporary file. Does nothing after a commit."""
        # Closing flushes, which fails on a full disk. That must not hide the error for which the file is discarded.
        with contextlib.suppress(OSError):
            self.file.close()
        self._temp.unlink(missing_ok=True)


@contextlib.contextmanager
def staged(target: str | os.PathLike[str]) -> Generator[StagedFile, None, None]:
    """Yield a StagedFile for `target`, and discard it at the end of the block unless the block has committed it."""
    stage = StagedFile(Path(target))
    try:
        yield stage
    finally:
        stage.discard()


@contextlib.contextmanager
def staged_path(target: Path) -> Generator[Path, None, None]:
    """Yield a temporary path at which the block creates a file, folder or link, and then rename it to `target`.

    If the block raises, whatever it created is removed and the target stays as it was. Nothing is synced to disk. An
    existing file or link is replaced, but the block has to remove an existing folder. Only one writer at a time may use
    this: the leftovers of a killed writer are removed first.
    """
    temporary = target.with_name(f".{target.name}.making")
    remove(temporary)
    try:
        yield temporary
        temporary.replace(target)
    finally:
        # An error of the removal must not hide that of the block.
        with contextlib.suppress(OSError):
            remove(temporary)


def link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Create a hard link to a file, or a copy of it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        shutil.copy2(source, target)


def resolve_link(path: str | os.PathLike[str]) -> Path:
    """Return the path with symbolic links resolved, so that writing to it replaces the target and not the link."""
    return Path(os.path.realpath(path))


def commit_together(*stages: StagedFile) -> None:
    """Commit several files of one folder in the given order.

    All files are complete on disk before the first rename, and the folder is synced after the last one:

    - An error before the first rename leaves every target unchanged.
    - An error while the folder is synced leaves every target new; a power cut may still undo the renames.
    - Only an error or crash between two renames leaves some targets new and others old.
    """
    for stage in stages:
        stage.seal()
    for stage in stages:
        stage.rename()
    _sync_directory(stages[0].directory)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file so that readers see the old file or the new one, never a part, even after a crash."""
    with staged(path) as stage:
        stage.file.write(data)
        stage.commit()


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text atomically in UTF-8, with its line endings unchanged."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write a value atomically as indented JSON with a final newline, with keys in their original order."""
    atomic_write_bytes(path, _json_text(path, value))


def atomic_create_json(path: str | os.PathLike[str], value: object) -> None:
    """Write a new JSON file atomically. Raises FileExistsError if it exists; of several concurrent writers, exactly
    one succeeds.
    """
    data = _json_text(path, value)
    with staged(path) as stage:
        stage.file.write(data)
        stage.commit_new()


def is_temporary(path: Path) -> bool:
    """Return whether a file has the name of a staged file. After a crash, such files may remain in a folder."""
    return path.name.startswith(".") and path.name.endswith(_TEMP_SUFFIX)


def remove(path: Path) -> None:
    """Delete a file, a folder with its contents, or a symbolic link. The target of a link is never touched."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # does not follow links inside the folder
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def directory_lock(directory: Path, *, exclusive: bool) -> Generator[None, None, None]:
    """Hold the advisory lock of a directory during the block, if the platform has such locks.

    The lock keeps cooperating processes that each rename two files from mixing their pairs. Some file systems have no
    locks, so readers of such a pair must still check that the two files belong together.
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
    """Wait for the advisory lock of an open file, and take it. Does nothing if the platform or file system has no
    locks.
    """
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)


def try_lock(descriptor: int, *, exclusive: bool = True) -> bool:
    """Take the advisory lock of an open file if it is free; return whether it was. Returns True if the platform or
    file system has no locks.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def unlock(descriptor: int) -> None:
    """Release the advisory lock of an open file."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _json_text(path: str | os.PathLike[str], value: object) -> bytes:
    return encode_as_written(value, where=os.fspath(path), indent=True) + b"\n"


def _sync_directory(directory: Path) -> None:
    """Sync a directory, so that renames in it survive a power cut."""
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
