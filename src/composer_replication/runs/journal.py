"""Journals: JSONL files that grow during a run. Each line contains the CRC-32 of its row.

A line looks like `{"crc32":"89abcdef","loss":1.5,"step":3}`, so pandas and jq can read the file directly. The checksum
covers the bytes of the row without this first field. A crash can leave only one torn line, and only at the end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from composer_replication.atomic import lock, unlock
from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ArtefactCorruptError, InputError, RunError, explain

_log = logging.getLogger(__name__)
_CRC_KEY = "crc32"
_PREFIX_LENGTH = len(b'{"crc32":"00000000",')
_EXAMPLE_START = b'{"crc32":"00000000","'
# `{"crc32":"89abcdef","` begins a journal; `{"loss":1.5}` does not
_START = re.compile(rb'\{"crc32":"[0-9a-f]{8}","')


@dataclass(frozen=True, slots=True)
class TornLine:
    """An incomplete line that a crash left at the end of a journal."""

    number: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class JournalContents:
    """The rows of a journal, and the torn line after them, if any."""

    rows: list[dict[str, object]]
    torn: TornLine | None


class Journal:
    """A journal that is open for appending. Readers see an appended row completely or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _open_for_append(path)
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, self._descriptor)
            self._cut_torn_line()
            on_error.pop_all()

    def append(self, row: Mapping[str, object]) -> None:
        """Append a row as one line in a single write. If the disk is full, the part of the line that was written is
        removed.
        """
        line = _to_line(row, where=f"{self._path.name}, a new row")
        lock(self._descriptor, exclusive=True)
        try:
            size = os.fstat(self._descriptor).st_size
            written = os.write(self._descriptor, line)
            if written != len(line):
                os.ftruncate(self._descriptor, size)
                raise RunError(
                    explain(f"{self._path}, a new row", got=f"{written} bytes written", expected=f"{len(line)} bytes")
                )
        finally:
            unlock(self._descriptor)

    def close(self) -> None:
        """Sync all rows to disk and close the file."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _cut_torn_line(self) -> None:
        """Remove an incomplete last line. Otherwise the next row would continue that line, and both would be lost."""
        lock(self._descriptor, exclusive=True)
        try:
            size = os.fstat(self._descriptor).st_size
            whole_size = _end_of_last_line(self._descriptor, self._path) if size else 0
            if whole_size < size:
                os.ftruncate(self._descriptor, whole_size)
                _log.warning(
                    "%s: removed %d bytes of an incomplete line that a crash left", self._path, size - whole_size
                )
        finally:
            unlock(self._descriptor)


def read_journal(path: Path) -> JournalContents:
    """Return all rows of the journal at `path`. An incomplete last line is allowed and reported."""
    *lines, tail = path.read_bytes().split(b"\n")
    rows = [_from_line(line, where=f"{path.name} line {number}") for number, line in enumerate(lines, start=1)]
    return JournalContents(rows, TornLine(len(lines) + 1, len(tail)) if tail else None)


def _to_line(row: Mapping[str, object], *, where: str) -> bytes:
    if not row or _CRC_KEY in row:
        raise InputError(explain(where, got=f"keys {sorted(row)}", expected=f"at least one key, and not {_CRC_KEY!r}"))
    payload = encode(dict(row), where=where)
    return _with_crc(payload) + b"\n"


def _with_crc(payload: bytes) -> bytes:
    return b'{"%s":"%08x",%s' % (_CRC_KEY.encode(), zlib.crc32(payload), payload[1:])


def _from_line(line: bytes, *, where: str) -> dict[str, object]:
    payload = _payload(line)
    if not _is_whole(line):
        raise ArtefactCorruptError(
            explain(where, got=repr(line[:60]), expected=f"a row with crc32 {zlib.crc32(payload):08x}")
        )
    return decode_object(payload)


def _payload(line: bytes) -> bytes:
    return b"{" + line[_PREFIX_LENGTH:]


def _is_whole(line: bytes) -> bool:
    """Return whether a line is complete: it begins with a checksum that matches its row."""
    return line == _with_crc(_payload(line))


def _open_for_append(path: Path) -> int:
    """Open or create a regular file. Raises RunError for a symbolic link, which may lead out of the run."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _no_journal(path, "a symbolic link") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_journal(path, "not a regular file")
    return descriptor


def _end_of_last_line(descriptor: int, path: Path) -> int:
    """Return the offset after the last line break, where a torn line would begin. Raises RunError if the file is not
    a journal.
    """
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as view:
        head = view[: len(_EXAMPLE_START)].partition(b"\n")[0]
        # A crash may have cut off the first line, so the remaining part is completed before the comparison.
        if not _START.fullmatch(head + _EXAMPLE_START[len(head) :]):
            raise _no_journal(path, "a file with another beginning")
        end = view.find(b"\n")
        if end >= 0 and not _is_whole(view[:end]):
            raise _no_journal(path, "a first line with another checksum")
        return view.rfind(b"\n") + 1


def _no_journal(path: Path, got: str) -> RunError:
    fix = "Move the file away; it was not changed. The next row starts a new journal"
    return RunError(explain(str(path), got=got, expected="a journal, with a crc32 at the start of each line", fix=fix))
