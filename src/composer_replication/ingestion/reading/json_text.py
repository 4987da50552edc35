"""JSON text as real programs leave it: byte order marks, UTF-16, NaN, numbers beyond all bounds, lone surrogates.

Python writes NaN, JavaScript escapes half an emoji as a lone surrogate, and Windows shells redirect into UTF-16. None
of these may cost a record, and none may come back out: what JSON cannot hold becomes null or U+FFFD.
"""

from __future__ import annotations

import codecs
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import orjson

# The mark and the first character, which is ASCII in JSON: the mark alone may be two broken bytes.
_UTF16_START = re.compile(codecs.BOM_UTF16_LE + rb"[^\x00]\x00|" + codecs.BOM_UTF16_BE + rb"\x00[^\x00]")
_LONGEST_START = 4
_BLOCK = 2**20
# A whole string, a number, or one of the words that Python's writer adds to JSON.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?Infinity|NaN|-?\d[\d.eE+-]*+', re.DOTALL)
# Escapes are read from the left, so that an escaped backslash is never taken for the start of the next one.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)
_STEPS = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
# Deeper than anybody looks, and no deeper than the parser follows.
_MAX_DEPTH = 200


def is_utf16(data: bytes) -> bool:
    return _UTF16_START.match(data) is not None


def as_utf8(data: bytes) -> bytes:
    """The same text in UTF-8, without a byte order mark."""
    if is_utf16(data):
        return data.decode("utf-16", "replace").encode()
    return data.removeprefix(codecs.BOM_UTF8)


def utf8_lines(file: BinaryIO, longest: int = 2**31) -> Iterable[bytes]:
    """The lines of an open file in UTF-8, without a byte order mark.

    Of a line that is longer than `longest` so much comes and a little more, never all: memory has to hold it.
    """
    start = file.read(_LONGEST_START)
    size = file.seek(0, io.SEEK_END)
    file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
    if is_utf16(start):
        return _utf16_lines(file, longest)
    return file if size <= longest else _bounded_lines(file.readline, longest)


def _utf16_lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    text = io.TextIOWrapper(file, "utf-16", errors="replace", newline="\n")
    try:
        yield from _bounded_lines(lambda limit: text.readline(limit).encode(), longest)
    finally:
        text.detach()  # whoever opened the file closes it


def _bounded_lines(readline: Callable[[int], bytes], longest: int) -> Iterator[bytes]:
    while line := readline(longest + 1):
        yield line
        while not line.endswith(b"\n") and len(line) > longest and (rest := readline(_BLOCK)):
            if rest.endswith(b"\n"):
                break


def loads(data: bytes) -> Any:
    """The value of a text that strict JSON refuses; raises ValueError where there is more wrong with it than that."""
    return orjson.loads(mended(data))


def shallow(data: bytes) -> bytes:
    """The text with null in place of what is nested beyond reason, so that it costs no more than itself."""
    pieces, depth, start = list[bytes](), 0, 0
    for token in _BRACKET.finditer(data):
        step = _STEPS.get(token.group(), 0)
        if step > 0 and depth == _MAX_DEPTH:
            pieces.append(data[start : token.start()])
        depth += step
        if step < 0 and depth == _MAX_DEPTH:
            pieces.append(b"null")
            start = token.end()
    return b"".join([*pieces, data[start:] if depth <= _MAX_DEPTH else b""])


def mended(data: bytes) -> bytes:
    """The text with null in place of numbers JSON does not know, and U+FFFD in place of half characters."""
    return _TOKEN.sub(_writable, as_utf8(data))


def _writable(token: re.Match[bytes]) -> bytes:
    text = token.group()
    if text.startswith(b'"'):
        return _ESCAPE.sub(_paired, text) if b"\\u" in text else text
    try:
        return text if math.isfinite(float(text)) else b"null"
    except ValueError:
        return text


def _paired(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape["lone"] is not None else escape.group()
