"""Share what one step of `crf run` has read from the run with the following steps.

Outside `sharing_reads()` nothing is cached: every reader opens, verifies and decodes its files itself. Inside it, a
result is reused as long as the files that it was read from are unchanged, and all results are dropped at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

MAX_SHARED_BYTES = 32 << 20
"""Maximum size of a file of conversations to cache; larger files are decoded again by every step that reads them.

Decoded conversations take about 2.5 times as many bytes as the file.
"""

_T = TypeVar("_T")
_FileState = tuple[int, int, int, int] | None
_results: ContextVar[dict[tuple[Any, ...], tuple[list[_FileState], Any]] | None] = ContextVar("_results", default=None)


@contextlib.contextmanager
def sharing_reads() -> Generator[None]:
    """Let readers share their results while the context is active."""
    token = _results.set({})
    try:
        yield
    finally:
        _results.reset(token)


def is_sharing_reads() -> bool:
    return _results.get() is not None


def shared_read(name: str, paths: Sequence[Path], read: Callable[[], _T]) -> _T:
    """Return `read()`, or its earlier result if reads are shared and none of these files has changed since."""
    results = _results.get()
    if results is None:
        return read()
    # The state is taken before reading: if a writer replaces a file meanwhile, the next call reads again.
    key, states = (name, *paths), [_file_state(path) for path in paths]
    if key not in results or results[key][0] != states:
        results[key] = (states, read())
    return results[key][1]


def _file_state(path: Path) -> _FileState:
    # Writers replace files by renaming, which changes the inode. An edit in place changes the times.
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
