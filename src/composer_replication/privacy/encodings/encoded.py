"""Secrets behind an encoding: base64 (both alphabets, wrapped lines, UTF-16, gzip), hex, percent signs.

A run is decoded and the plain text goes through the same scan; when something is found there, the whole run goes.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote, unquote_plus

_PRINTABLE = bytes(range(32, 127)) + b"\t\r\n"
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{12,}={0,2}")
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:[0-9a-fA-F]{2}){12,}(?![0-9A-Za-z])")
# base64(1) wraps at 76, PEM at 64; the break may be a literal backslash-n, and a reader may have numbered the lines.
_BREAK = r"(?:\r?\n|\\r\\n|\\n)[ \t]*+(?:\d{1,6}+[→:|\t][ \t]*+)?+"
_WRAPPED = re.compile(
    rf"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{{60,80}}+(?:{_BREAK}[A-Za-z0-9+/]{{60,80}}+)*"
    rf"{_BREAK}[A-Za-z0-9+/]{{4,80}}={{0,2}}"
)
_NUMBERING = re.compile(r"(?:\\r)?\\n|\s+(?:\d{1,6}[→:|\t])?|\d{1,6}[→|]")
_ADDRESS = re.compile(r"[^\0\s\"'`<>\\&?#;,]*")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")
_LONGEST_LEAD = 2000  # this far before a percent sign the address it stands in is looked for
_COMPONENT = re.compile(r"[A-Za-z0-9_.~+*!%-]+")
_MAX_ENCODED = 200_000
_GZIP = "H4sI"  # the first bytes of gzip, in base64
_MOST_UNPACKED = 1 << 16


class Decoded(NamedTuple):
    """A run and what it says."""

    start: int
    end: int
    text: str

    def is_plain(self) -> bool:
        """Whether every character of it is one that people write. Random bytes never decode to that."""
        return len(self.text) >= 12 and "".join(self.text.split()).isprintable() and "\ufffd" not in self.text


def _readable(data: bytes) -> str | None:
    """The text in decoded bytes, or None for binary data."""
    odd = data.translate(None, _PRINTABLE)
    if data[1:16:2].count(0) >= 6:
        return data.decode("utf-16-le", "replace").lstrip("\ufeff")
    if data[0:16:2].count(0) >= 6:
        return data.decode("utf-16-be", "replace").lstrip("\ufeff")
    if len(odd) > len(data) * 0.25:
        return None
    return data.decode("utf-8", "replace")


def decode_base64(run: str) -> str | None:
    """The text behind a base64 run, or None when it is not base64 of text."""
    body = run.rstrip("=")
    if len(body) % 4 == 1:
        body = body[:-1]
    try:
        if body.startswith(_GZIP):
            return _readable(zlib.decompressobj(wbits=31).decompress(_b64(body), _MOST_UNPACKED))
        if len(body) > 32 and _readable(_b64(body[:32])) is None:  # most runs are words: find out on the first bytes
            return None
        return _readable(_b64(body))
    except (binascii.Error, ValueError, zlib.error):
        return None


def _b64(body: str) -> bytes:
    return base64.b64decode(body.replace("-", "+").replace("_", "/") + "=" * (-len(body) % 4), validate=True)


def decoded_in_run(run: str) -> tuple[Decoded, ...]:
    """Every piece of a run of key characters that decodes to text."""
    return tuple(_decoded(run))


def _decoded(run: str) -> Iterator[Decoded]:
    for match in _BASE64.finditer(run):
        start, piece = match.start(), match[0]
        if len(piece) > _MAX_ENCODED:
            continue
        if (text := decode_base64(piece)) is not None:
            yield Decoded(start, match.end(), text)
            continue
        # A prefix glued on with a slash, a dash or an underscore shifts the alignment.
        for split in ("/", "_", "-"):
            if split in piece:
                cursor = start
                for part in piece.split(split):
                    if len(part) >= 16 and (text := decode_base64(part)) is not None:
                        yield Decoded(cursor, cursor + len(part), text)
                    cursor += len(part) + 1
    for match in _HEX.finditer(run):
        if len(match[0]) <= _MAX_ENCODED and (text := _readable(bytes.fromhex(match[0]))) is not None:
            yield Decoded(match.start(), match.end(), text)


def wrapped_base64(text: str, starts: list[int]) -> Iterator[Decoded]:
    """Base64 over several lines, decoded as one. `starts` are where a line of it may begin."""
    done = 0
    for start in starts:
        match = _WRAPPED.match(text, start) if start >= done else None
        if match is None:
            continue
        joined = _NUMBERING.sub("", match[0])
        done = match.end()
        if len(joined) <= _MAX_ENCODED and (plain := decode_base64(joined)) is not None:
            yield Decoded(start, match.end(), plain)


def percent_encoded(text: str) -> Iterator[Decoded]:
    """Percent-encoded pieces of an address, then the whole of it: a separator inside a secret may stand unencoded."""
    for begin, end in _addresses(text):
        address = text[begin:end]
        for piece in _COMPONENT.finditer(address):
            start = begin + piece.start()
            if "%" in piece[0]:
                yield Decoded(start, start + len(piece[0]), unquote_plus(piece[0]))
        yield Decoded(begin, end, unquote(address))


def _addresses(text: str) -> Iterator[tuple[int, int]]:
    """The words around percent signs, found from the signs: most words have none."""
    done = 0
    for percent in _PERCENT.finditer(text):
        if percent.start() < done:
            continue
        lead = _ADDRESS.match(text[max(done, percent.start() - _LONGEST_LEAD) : percent.start()][::-1])
        rest = _ADDRESS.match(text, percent.start())
        begin, done = percent.start() - (lead.end() if lead else 0), rest.end() if rest else percent.end()
        if done - begin <= _MAX_ENCODED:
            yield begin, done
