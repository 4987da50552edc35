"""Read JSON documents: distinguish them from JSON lines, detect their format, and salvage damaged files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

import orjson

from composer_replication.ingestion.source_files import (
    BUFFER_BYTES,
    MAX_LINE_BYTES,
    IngestReport,
    SourceFile,
    as_utf8,
    drop_deep_values,
    is_too_large,
    parse_records,
    parse_repaired,
    read_records,
    read_utf8_lines,
    repair_json,
)

# A whole string, or one character that opens, closes or separates: '"a, b"', '{', ','. In '"never closed' only the
# quote matches.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\],]', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}
_HEAD_LINES = 16
# How much of a file that is too large to parse as one document is read to decide whether it consists of lines.
_HEAD_OF_LINES = 2**20
# Deeper than any format nests its messages, and shallower than the limit of the parser.
_MAX_DEPTH = 64
# Damage can open any number of brackets. The parser rejects such depths, and building the closing brackets takes
# gigabytes.
_MAX_OPEN_BRACKETS = 300


@lru_cache(maxsize=2)
def head_values(head: bytes) -> list[Any]:
    """Return the JSON values at the beginning of a file.

    These are the values of its first lines or, if the file is a single document, the part of the document in `head`.
    Every format calls this function, so the latest results are cached.
    """
    head = as_utf8(head)
    lines = [line for line in head.split(b"\n") if line.strip()][:_HEAD_LINES]
    if not lines:
        return []
    parse_document = [_parse_line(line)[0] for line in lines]
    # The first line of a document that spans many lines is not a value by itself.
    if parse_document[0] is None:
        parse_document[0] = _salvage_document(head)
    return [value for value in parse_document if value is not None]


def read_lines_or_document(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Any]]:
    """Yield (line number, object) for every valid line, or (0, document) if the file is a single document.

    For a damaged document, yield the complete messages before the damage. The first line decides whether the file
    consists of lines, and is not parsed again.
    """
    try:
        with source.path.open("rb", buffering=BUFFER_BYTES) as file:
            lines = enumerate(read_utf8_lines(file, MAX_LINE_BYTES), start=1)
            number, line = next((numbered_line for numbered_line in lines if numbered_line[1].strip()), (0, b""))
            if not line:
                report.skip("empty file", source.name)
                return
            first, is_repaired = _parse_line(line) if not is_too_large(line) else (None, False)
            if isinstance(first, dict) or is_too_large(line):
                report.counts.update({"repaired lines": 1} if is_repaired else {})
                yield from [(number, first)] if first is not None else parse_records([(number, line)], source, report)
                yield from parse_records(lines, source, report)
                return
            # A list on the first line and nothing after it is a document on one line.
            if first is not None and not any(rest.strip() for _, rest in lines):
                report.counts.update({"repaired documents": 1} if is_repaired else {})
                yield 0, first
                return
        yield from _read_document(source, report)
    except OSError as error:
        report.skip(f"unreadable file: {error.strerror}", source.name)


def _read_document(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Any]]:
    """Yield the document in a file, or its records if it turns out to consist of lines."""
    with source.path.open("rb") as file:
        data = as_utf8(file.read(MAX_LINE_BYTES + 1))
    is_large = is_too_large(data)
    try:
        if not is_large:
            yield 0, parse_document(data, report)
            return
    except ValueError:
        pass
    # A file of lines may be large; only a single document has to fit into memory.
    if is_large and not _is_mostly_lines(data[:_HEAD_OF_LINES]):
        report.skip("document too large", source.name)
        return
    if is_large or _is_mostly_lines(data):
        yield from read_records(source, report)
        return
    value, position = salvage_messages(data)
    report.skip("invalid JSON document", source.name, position)
    if value is not None:
        yield 0, value


def parse_document(data: bytes, report: IngestReport) -> Any:
    """Return the parsed document, with support for the NaN that Python writes. Raises ValueError if it is damaged."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        value = parse_repaired(drop_deep_values(data) if str(error).startswith("depth limit") else data)
    report.counts["repaired documents"] += 1
    return value


def _salvage_document(data: bytes, *, depth: int = _MAX_DEPTH) -> Any:
    """Return the document up to its first damage, with all open brackets closed, or None.

    Incomplete values are kept down to nesting level `depth`; deeper values are kept only if they are complete.
    """
    text = repair_json(data).decode("utf-8", "replace").replace("\x00", "\ufffd")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        end, closers = _last_complete_value(text[: error.pos], depth)
    try:
        return orjson.loads(text[:end] + closers)
    except orjson.JSONDecodeError:
        return None


def salvage_messages(data: bytes) -> tuple[Any, int]:
    """Return the complete messages before the damage, and the position of the first broken message.

    The position is 0 if the damage is outside the messages. If a crash or a full disk truncated the document, no
    messages follow the broken one. If it contains invalid bytes, only the messages with these bytes are lost.
    """
    depth = _depth_of_messages(_salvage_document(data))
    before = _last_list(_salvage_document(data[: _first_invalid_byte(data)], depth=depth), depth)
    return _salvage_document(data, depth=depth), 0 if before is None else len(before) + 1


def _first_invalid_byte(data: bytes) -> int:
    """Return the position of the first NUL or invalid UTF-8 byte, or the length if there is none."""
    nul = data.find(b"\x00")
    end = len(data) if nul < 0 else nul
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return min(end, error.start)
    return end


def _depth_of_messages(value: Any) -> int:
    """Return the nesting level of the message list: the document, a list in it, or a list in each of its entries."""
    if isinstance(value, dict):
        return 2
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict) or "role" in first:
        return 1
    return 3 if any(isinstance(field, list) and field and isinstance(field[0], dict) for field in first.values()) else 1


def _last_list(value: Any, depth: int) -> list[Any] | None:
    """Return the last list at nesting level `depth`, which is the one that the program was still writing, or None."""
    for _ in range(depth - 1):
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        value = inner[-1] if inner else None
    return cast("list[Any]", value) if isinstance(value, list) else None


def _last_complete_value(text: str, depth: int) -> tuple[int, str]:
    """Return the end of the last complete value down to `depth`, and the brackets that close the document."""
    stack: list[str] = []
    end, closers = 0, ""
    for token in _TOKEN.finditer(text):
        symbol = token.group()
        if symbol in _CLOSES:
            if len(stack) > _MAX_OPEN_BRACKETS:
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


def _is_mostly_lines(data: bytes) -> bool:
    """Return whether an invalid document really consists of lines, of which the first is damaged."""
    num_lines = num_objects = 0
    for line in io.BytesIO(data):  # not a list: with empty lines it would take forty times the file size
        if line.strip():
            num_lines += 1
            num_objects += isinstance(_parse_line(line)[0], dict)
    return 2 * num_objects >= num_lines


def _parse_line(line: bytes) -> tuple[Any, bool]:
    """Return the value of a line (None unless it is an object or a list), and whether it was repaired."""
    is_repaired = False
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            value, is_repaired = parse_repaired(line), True
        except ValueError:
            return None, False
    return (value, is_repaired) if isinstance(value, (dict, list)) else (None, False)
