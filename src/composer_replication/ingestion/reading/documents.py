"""JSON documents: telling them from lines, judging a file by its head, and keeping what stands around damage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, cast

import orjson

from composer_replication.ingestion.reading import json_text
from composer_replication.ingestion.reading.after_damage import values_behind
from composer_replication.ingestion.reading.source import IngestReport, SourceFile, read_records

# A whole string, or one character that opens, closes or separates; a lone quote is a string that never ends.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\],]', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}
_HEAD_LINES = 16
# Deeper than any format puts its messages, and no deeper than the parser follows.
_MAX_DEPTH = 64


@lru_cache(maxsize=2)
def head_values(head: bytes) -> list[Any]:
    """The JSON values a file begins with: its first lines, or one document as far as the head goes.

    Every format asks for them; the head is taken apart once.
    """
    head = json_text.as_utf8(head)
    lines = [line for line in head.split(b"\n") if line.strip()][:_HEAD_LINES]
    if not lines:
        return []
    parsed = [_object_or_list(line) for line in lines]
    if parsed[0] is None:
        parsed[0] = salvage(head)
    return [value for value in parsed if value is not None]


def read_lines_or_document(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Any]]:
    """(line, object) of every good line, or (0, document); of a damaged document all whole messages are kept."""
    try:
        if _first_line_is_object(source):
            yield from read_records(source, report)
            return
        data = json_text.as_utf8(source.path.read_bytes())
    except OSError as error:
        report.skip(f"unreadable file: {error.strerror}", source.name)
        return
    if not data.strip():
        report.skip("empty file", source.name)
        return
    try:
        yield 0, parsed(data, report)
        return
    except ValueError:
        pass
    if _is_mostly_lines(data):
        yield from read_records(source, report)
        return
    value, position = around_damage(data)
    report.skip("invalid JSON document", source.name, position)
    if value is not None:
        yield 0, value


def parsed(data: bytes, report: IngestReport) -> Any:
    """The value of a document, also with the NaN that Python writes; raises ValueError where it is damaged."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        value = json_text.loads(data)
    report.counts["repaired documents"] += 1
    return value


def salvage(data: bytes, *, depth: int = _MAX_DEPTH) -> Any:
    """The document up to its first damage, closed there, or None; nothing deeper than `depth` is kept half."""
    text = _text(data)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        end, closers = _last_whole(text[: error.pos], depth)
    try:
        return orjson.loads(text[:end] + closers)
    except orjson.JSONDecodeError:
        return None


def around_damage(data: bytes) -> tuple[Any, int]:
    """What can be kept of a damaged document, and the position of the first broken message (0: outside of them).

    A broken message that others follow leaves None in its place, so that their positions stay what they were.
    """
    depth = _depth_of_messages(salvage(data))
    value, text = salvage(data, depth=depth), _text(data)
    before = _last_list(salvage(data[: _first_bad_byte(data)], depth=depth), depth)
    position = 0 if before is None else len(before) + 1
    messages = _last_list(value, depth)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        end, _ = _last_whole(text[: error.pos], depth)
        if messages is not None:
            _append(values_behind(text, end, depth), {1: value if isinstance(value, list) else [], depth: messages})
    return value, position


def _append(behind: Iterable[tuple[int, Any]], lists: dict[int, list[Any]]) -> None:
    innermost = max(lists)
    is_first = True
    for level, message in behind:
        if level == innermost and is_first:
            lists[level].append(None)
        is_first = False
        lists[level].append(message)


def _text(data: bytes) -> str:
    return json_text.mended(data).decode("utf-8", "replace").replace("\x00", "\ufffd")


def _first_bad_byte(data: bytes) -> int:
    """Where the first byte stands that no text holds, or the end."""
    nul = data.find(b"\x00")
    end = len(data) if nul < 0 else nul
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return min(end, error.start)
    return end


def _depth_of_messages(value: Any) -> int:
    """How deep the list of messages lies: it is the document, or stands in it, or in each item of it."""
    if isinstance(value, dict):
        return 2
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict) or "role" in first:
        return 1
    return 3 if any(isinstance(each, list) and each and isinstance(each[0], dict) for each in first.values()) else 1


def _last_list(value: Any, depth: int) -> list[Any] | None:
    """The list at that depth that was being written last."""
    for _ in range(depth - 1):
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        value = inner[-1] if inner else None
    return cast("list[Any]", value) if isinstance(value, list) else None


_DEEPEST = 300


def _last_whole(text: str, depth: int) -> tuple[int, str]:
    """Where the last whole value ends, not deeper than `depth`, and what closes the document there."""
    stack: list[str] = []
    end, closers = 0, ""
    for token in _TOKEN.finditer(text):
        symbol = token.group()
        if symbol in _CLOSES:
            if len(stack) > _DEEPEST:  # the parser would refuse it, and closing it again and again costs gigabytes
                break
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
        if len(stack) <= depth:
            end, closers = position, "".join(reversed(stack))
    return end, closers


def _first_line_is_object(source: SourceFile) -> bool:
    with source.path.open("rb") as file:
        first = next((line for line in json_text.utf8_lines(file) if line.strip()), b"")
    return isinstance(_object_or_list(first), dict)


def _is_mostly_lines(data: bytes) -> bool:
    """Whether a file that is no document is lines with a damaged first one, not a damaged document over many lines."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    return 2 * sum(isinstance(_object_or_list(line), dict) for line in lines) >= len(lines)


def _object_or_list(line: bytes) -> Any:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            value = json_text.loads(line)
        except ValueError:
            return None
    return value if isinstance(value, (dict, list)) else None
