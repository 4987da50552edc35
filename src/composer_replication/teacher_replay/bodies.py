"""The body of an answer, bounded while it is unpacked: a megabyte of gzip can stand for gigabytes.

Only gzip is asked for, and unpacked here, because HTTP clients unpack whatever arrives at once and count afterwards.
"""

from __future__ import annotations

import zlib
from typing import Any

from composer_replication.teacher_replay.outcome import Failure, broken

MAX_BODY = 16 * 2**20
ASKED_FOR = {"accept-encoding": "gzip"}
_AS_IT_IS = ("", "identity")
_GZIP = ("gzip", "x-gzip")


async def limited_body(response: Any) -> bytes | Failure:
    """The whole body of a streamed answer, unpacked; a Failure where it is longer than any answer, or in no known form.

    Never more than `MAX_BODY` bytes are held: what would be more is not unpacked, and not read to its end.
    """
    encoding = str(response.headers.get("content-encoding", "")).strip().lower()
    if encoding not in _AS_IT_IS + _GZIP:
        return broken(f"an answer in an encoding that was not asked for: {encoding[:40]!r}", was_sent=True)
    unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16) if encoding in _GZIP else None
    parts, room, num_raw = list[bytes](), MAX_BODY, 0
    async for raw in response.aiter_raw():
        try:
            part = raw if unpacking is None else unpacking.decompress(raw, room + 1)
        except zlib.error:
            return broken("an answer that cannot be unpacked", was_sent=True)
        room, num_raw = room - len(part), num_raw + len(raw)
        if room < 0 or num_raw > MAX_BODY:
            return broken(f"an answer of more than {MAX_BODY} bytes", was_sent=True)
        parts.append(part)
    if unpacking is not None and not unpacking.eof:
        return broken("an answer that breaks off", was_sent=True)
    return b"".join(parts)
