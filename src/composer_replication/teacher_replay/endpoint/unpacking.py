"""The body of an answer, bounded while it is unpacked: a megabyte of gzip can stand for gigabytes.

Only gzip is asked for, and unpacked here, because HTTP clients unpack whatever arrives at once and count afterwards.
"""

from __future__ import annotations

import zlib
from typing import Any

from composer_replication.teacher_replay.endpoint.outcome import Failure, broken

MAX_BODY = 16 * 2**20
ASKED_FOR = {"accept-encoding": "gzip"}
_GZIP_BITS = zlib.MAX_WBITS | 16
_GZIP_BEGINS = b"\x1f\x8b"


async def limited_body(response: Any) -> bytes | Failure:
    """The whole body of a streamed answer, unpacked; a Failure where it is longer than any answer, or in no known form.

    Never more than `MAX_BODY` bytes are held: what would be more is not unpacked, and not read to its end.
    """
    encoding = str(response.headers.get("content-encoding", "")).strip().lower()
    unpackers = {"": _AsItIs, "identity": _AsItIs, "gzip": _Gzip, "x-gzip": _Gzip, "deflate": _Deflate}
    if encoding not in unpackers:
        return _unreadable(f"an answer in an encoding that was not asked for: {encoding[:40]!r}")
    unpacking = unpackers[encoding]()
    parts, room, num_raw = list[bytes](), MAX_BODY, 0
    async for raw in response.aiter_raw():
        try:
            part = unpacking.unpack(raw, room + 1)
        except zlib.error:
            return _unreadable("an answer that cannot be unpacked")
        room, num_raw = room - len(part), num_raw + len(raw)
        if room < 0 or num_raw > MAX_BODY:
            return _unreadable(f"an answer of more than {MAX_BODY} bytes")
        parts.append(part)
    if num_raw and not unpacking.is_whole:
        return broken("an answer that breaks off", was_sent=True)
    return b"".join(parts)


def _unreadable(error: str) -> Failure:
    """It came whole, and is paid for: asked again it would come in the same form, and be paid for again."""
    return Failure(error, False, "unknown")


class _AsItIs:
    is_whole = True

    def unpack(self, raw: bytes, _limit: int) -> bytes:
        return raw


class _Gzip:
    """One member after the other, as the format allows; what follows the last one and is none means nothing."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP_BITS)
        self._behind = b""  # a member: what may begin another one

    @property
    def is_whole(self) -> bool:
        return self._member.eof

    def unpack(self, raw: bytes, limit: int) -> bytes:
        parts = list[bytes]()
        while raw and limit > 0:
            if self._member.eof:
                raw = self._behind + raw
                if len(raw) < len(_GZIP_BEGINS):
                    self._behind = raw
                    break
                if not raw.startswith(_GZIP_BEGINS):
                    self._behind = raw[: len(_GZIP_BEGINS)]
                    break
                self._member, self._behind = zlib.decompressobj(wbits=_GZIP_BITS), b""
            parts.append(self._member.decompress(raw, limit))
            limit -= len(parts[-1])
            raw = self._member.unused_data
        return b"".join(parts)


class _Deflate:
    """With the header of zlib, as the standard says, or without it, as some servers send it."""

    def __init__(self) -> None:
        self._begin, self._stream = b"", None

    @property
    def is_whole(self) -> bool:
        return self._stream is not None and self._stream.eof

    def unpack(self, raw: bytes, limit: int) -> bytes:
        if self._stream is None:
            raw = self._begin = self._begin + raw
            if len(raw) < 2:
                return b""
            has_header = raw[0] & 15 == zlib.DEFLATED and int.from_bytes(raw[:2]) % 31 == 0
            self._stream = zlib.decompressobj(wbits=zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        return self._stream.decompress(raw, limit)
