"""JSON documents: telling them from lines, judging a file by its head, and keeping what stands before damage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from composer_replication.ingestion.source import IngestReport, SourceFile, read_records

# A whole string, or one character that opens, closes or separates; a lone quote is a string that never ends.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\],]', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}
_HEAD_LINES = 16


def head_values(head: bytes) -> list[Any]:
    """The JSON values a file begins with: its first lines, or one document as far as the head goes."""
    lines = [line for line in head.split(b"\n") if line.strip()][:_HEAD_LINES]
    if not lines:
        return []
    parsed = [_object_or_list(line) for line in lines]
    if parsed[0] is None:
        parsed[0] = salvage(head)
    return [value for value in parsed if value is not None]


def read_lines_or_document(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Any]]:
    """(line, object) of every good line, or (0, document); a damaged document is kept up to its last whole message."""
    try:
        if _first_line_is_object(source):
            yield from read_records(source, report)
            return
        data = source.path.read_bytes()
    except OSError as error:
        report.skip(f"unreadable file: {error.strerror}", source.name)
        return
    if not data.strip():
        report.skip("empty file", source.name)
        return
    try:
        yield 0, orjson.loads(data)
        return
    except orjson.JSONDecodeError:
        pass
    if _is_mostly_lines(data):
        yield from read_records(source, report)
        return
    report.skip("invalid JSON document", source.name)
    value = salvage(data, depth=_depth_of_messages(salvage(data)))
    if value is not None:
        yield 0, value


def salvage(data: bytes, *, depth: int | None = None) -> Any:
    """The document up to its first damage, closed there, or None; with `depth`, nothing below that is kept half."""
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").replace("\x00", "\ufffd")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        closed = _close(text[: error.pos], depth)
    try:
        return orjson.loads(closed)
    except orjson.JSONDecodeError:
        return None


def _depth_of_messages(value: Any) -> int:
    """How deep the list of messages lies: it is the document, or stands in it, or in each item of it."""
    if isinstance(value, dict):
        return 2
    first = value[0] if isinstance(value, list) and value else None
    return 1 if isinstance(first, dict) and "role" in first else 3


def _close(text: str, depth: int | None) -> str:
    stack: list[str] = []
    end, closers = 0, ""
    for token in _TOKEN.finditer(text):
        symbol = token.group()
        if symbol in _CLOSES:
            stack.append(_CLOSES[symbol])
            position = token.end()
        elif symbol in ("}", "]"):
            if not stack or stack.pop() != symbol:
                break
            position = token.end()
        elif symbol == ",":
            position = token.start()
        elif symbol == '"':
            break
        else:
            continue
        if depth is None or len(stack) <= depth:
            end, closers = position, "".join(reversed(stack))
    return text[:end] + closers


def _first_line_is_object(source: SourceFile) -> bool:
    with source.path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    return isinstance(_object_or_list(first), dict)


def _is_mostly_lines(data: bytes) -> bool:
    """Whether a file that is no document is lines with a damaged first one, not a damaged document over many lines."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    return 2 * sum(isinstance(_object_or_list(line), dict) for line in lines) >= len(lines)


def _object_or_list(line: bytes) -> Any:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, (dict, list)) else None
