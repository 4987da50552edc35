"""Files that are either wholly written or untouched: a temporary file beside the target, synced, then renamed over it.

Nothing of the old file is preserved (a symbolic link is replaced by the file, see `written_through`); the new one gets
the process's umask. A device, a pipe or a folder is never replaced.
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
# File systems that cannot sync a directory (some network and FUSE mounts) say so with one of these.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
# And those without hard links (FAT, some network and FUSE mounts) with one of these.
_CANNOT_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}


class StagedFile:
    """A temporary file beside its target that takes the target's place when committed."""

    def __init__(self, target: Path) -> None:
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "a device or a pipe"
            fix = "Write to a file, and show that."
            raise InputError(explain(str(target), got=kind, expected="a file, or a name that is free", fix=fix))
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
        commit_together(self)

    def commit_new(self) -> None:
        """Put the file at its target, or raise FileExistsError if there is one: of any number of writers one wins."""
        self.seal()
        try:
            os.link(self._temp, self._target)
        except FileExistsError:
            # On a network mount the answer may be lost and the call repeated: then our own file is in the way.
            if not self._temp.samefile(self._target):
                raise
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            self._claim()
        _sync_directory(self._target.parent)

    def rename(self) -> None:
        """The rename of a commit alone; `seal` comes before it and a sync of the folder after it."""
        self._temp.replace(self._target)

    @property
    def directory(self) -> Path:
        return self._target.parent

    def _claim(self) -> None:
        """`commit_new` without hard links: whoever makes the empty target may rename over it."""
        os.close(os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            self.rename()
        except OSError:
            self._target.unlink()
            raise

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


def written_through(path: str | os.PathLike[str]) -> Path:
    """Where a file goes that a user named: what a symbolic link leads to, so that the link stays one."""
    return Path(os.path.realpath(path))


def commit_together(*stages: StagedFile) -> None:
    """Commit files of one folder, in the order given.

    All of them are complete on the disk before the first rename, and the folder is synced after the last. So an error
    before the first rename leaves every target as it was; an error of the sync leaves every target new, and only its
    durability in doubt; nothing but an error or a crash between two renames leaves some targets new and others old.
    """
    for stage in stages:
        stage.seal()
    for stage in stages:
        stage.rename()
    _sync_directory(stages[0].directory)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` so that a reader or a crash sees the old file or the new one, never a part."""
    with staged(path) as stage:
        stage.file.write(data)
        stage.commit()


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """`atomic_write_bytes` of `text` in UTF-8, line ends as they are."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | os.PathLike[str], value: object) -> None:
    """`atomic_write_bytes` of `value` as indented JSON, keys in the order they have, with a final newline."""
    atomic_write_bytes(path, _json_text(path, value))


def atomic_create_json(path: str | os.PathLike[str], value: object) -> None:
    """`atomic_write_json` of a file that must not exist yet, else FileExistsError; of two at once, one wins."""
    data = _json_text(path, value)
    with staged(path) as stage:
        stage.file.write(data)
        stage.commit_new()


def is_temporary(path: Path) -> bool:
    """Whether `path` has the name of a file that was staged and, after a crash, left behind."""
    return path.name.startswith(".") and path.name.endswith(_TEMP_SUFFIX)


def remove(path: Path) -> None:
    """Delete a file, a folder with all that is in it, or a symbolic link; what a link leads to is never touched."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # which removes links inside and does not follow them
    else:
        path.unlink(missing_ok=True)


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


def try_lock(descriptor: int, *, exclusive: bool = True) -> bool:
    """Take the advisory lock if nobody has it who keeps us out; True also where there are no locks."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_lock_free(descriptor: int) -> bool:
    """Whether nobody has the exclusive advisory lock; True also where there are no locks.

    It takes the shared one, for which a file need not be writable, and which any number may take at once.
    """
    return try_lock(descriptor, exclusive=False)


def unlock(descriptor: int) -> None:
    """Give back what `lock` took."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _json_text(path: str | os.PathLike[str], value: object) -> bytes:
    return encode_as_written(value, where=os.fspath(path), indent=True) + b"\n"


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
