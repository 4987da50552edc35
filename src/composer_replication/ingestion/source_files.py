"""Read session files tolerantly: unreadable content is counted, reported with file and line, and skipped."""

from __future__ import annotations

import codecs
import io
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from composer_replication.messages import content_text
from composer_replication.types import Conversation, Turn

# Longer lines and documents are counted and skipped. The longest line in our sessions has 0.3 MB, and a request with
# images may have 32 MB. Reading and scrubbing a line requires up to twenty times its size in memory.
MAX_LINE_BYTES = 32 * 2**20
# All lines of a file are in memory together. Lines beyond this weight are counted and skipped, which limits the memory
# for a file to 1 GB. Our largest session weighs 10 MB.
MAX_FILE_WEIGHT = 192 * 2**20
# Values need more memory than text: an empty list takes three bytes in a file and sixty in memory.
_BYTES_PER_VALUE = 32
# Lines are long: with the default of 8 kB, splitting a file into lines costs a third as much as parsing them.
BUFFER_BYTES = 2**20
# Every skip is counted, but only the first ones are stored with their locations.
_MAX_LOCATED_SKIPS = 1000
TOO_DEEP = "nested too deeply"
# No tool nests content deeper. Without a limit, a damaged line can nest a thousand levels.
_MAX_DEPTH = 50
# No session has more tokens. Larger counts are corrupt, and their sums would overflow the 64 bits of the writer.
MAX_COUNT = 2**53
# A reason may quote any text from the log. It is shortened further only after scrubbing, which would not recognize half
# of a secret.
_MAX_REASON_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class Skip:
    """Something that was skipped: the reason and the location (line 0 means the whole file)."""

    reason: str
    file: str
    line: int


@dataclass(slots=True)
class IngestReport:
    """Counts of what was read, and of what was skipped, by reason. Reports for several files can be added."""

    counts: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])
    skips: list[Skip] = field(default_factory=list[Skip])

    def skip(self, reason: str, file: str, line: int = 0) -> None:
        """Count something that was skipped. The location is stored unless there are too many already."""
        reason = reason[:_MAX_REASON_LENGTH]
        self.skipped[reason] += 1
        if len(self.skips) < _MAX_LOCATED_SKIPS:
            self.skips.append(Skip(reason, file, line))

    def merge(self, other: IngestReport) -> None:
        self.counts.update(other.counts)
        self.skipped.update(other.skipped)
        self.skips.extend(other.skips[: _MAX_LOCATED_SKIPS - len(self.skips)])


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and the name by which artifacts refer to it (never an absolute path)."""

    path: Path
    name: str

    def __post_init__(self) -> None:
        # A file name that is not UTF-8 contains lone surrogates, which cannot be written as JSON.
        object.__setattr__(self, "name", self.name.encode("utf-8", "replace").decode())


Record = dict[str, Any]
# Keys under which content blocks store their text in different APIs.
_TEXT_KEYS = ("text", "content", "refusal", "resource", "json")


def read_records(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Record]]:
    """Yield (line number, JSON object) for every valid line. Invalid lines do not affect the others."""
    try:
        with source.path.open("rb", buffering=BUFFER_BYTES) as file:
            # A small file cannot reach the limit, so its values are not counted. The size is doubled because text in
            # UTF-16 may grow when it is converted to UTF-8.
            is_light = 2 * os.fstat(file.fileno()).st_size * (1 + _BYTES_PER_VALUE) <= MAX_FILE_WEIGHT
            lines = enumerate(read_utf8_lines(file, MAX_LINE_BYTES), start=1)
            yield from parse_records(lines, source, report, weigh=len if is_light else _memory_weight)
    except OSError as error:
        report.skip(f"unreadable file: {error.strerror}", source.name)


def parse_records(
    lines: Iterable[tuple[int, bytes]],
    source: SourceFile,
    report: IngestReport,
    *,
    weigh: Callable[[bytes], int] | None = None,
) -> Iterator[tuple[int, Record]]:
    """Yield the numbered records in the lines. Lines that are too long or invalid are counted and skipped.

    `weigh` estimates the memory that a line needs. A cheaper estimate may be passed for files that cannot reach the
    limit.
    """
    weigh = weigh or _memory_weight
    total = 0
    for number, line in lines:
        weight = weigh(line)
        if len(line) > MAX_LINE_BYTES or weight > MAX_FILE_WEIGHT:
            report.skip("line too long", source.name, number)
            continue
        total += weight
        if total > MAX_FILE_WEIGHT:
            report.skip("line beyond what is read of one file", source.name, number)
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        if not isinstance(record, dict):
            record = _repaired_object(line, number, source.name, report)
        if record is not None:
            yield number, record


def _memory_weight(data: bytes) -> int:
    """Return an estimate of the memory that the JSON in `data` needs, in bytes."""
    return len(data) + _BYTES_PER_VALUE * sum(map(data.count, (b",", b"[", b"{")))


def is_too_large(data: bytes) -> bool:
    """Return whether a line or document is skipped because it is too long or contains too many values."""
    return len(data) > MAX_LINE_BYTES or _memory_weight(data) > MAX_FILE_WEIGHT


def _repaired_object(line: bytes, number: int, file: str, report: IngestReport) -> Record | None:
    """Return the object in a line that strict JSON rejects, or None if the line cannot be repaired.

    The reason is counted, unless the line is blank.
    """
    if line.isspace():
        return None
    try:
        value = parse_repaired(line)
    except ValueError as error:
        report.skip(_why_unreadable(line, str(error)), file, number)
        return None
    if not isinstance(value, dict):
        report.skip("not a JSON object", file, number)
        return None
    report.counts["repaired lines"] += 1
    return cast("Record", value)


def _why_unreadable(line: bytes, error: str) -> str:
    """Return the reason to report for a line that cannot be repaired."""
    if error.startswith("depth limit"):
        return TOO_DEEP
    # The last line of a log that is still being written is often incomplete.
    if not line.endswith(b"\n"):
        return "truncated last line"
    if b"\x00" in line:
        return "NUL bytes"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return "invalid UTF-8"
    return "invalid JSON"


def check_depth(value: Any, depth: int = 0) -> None:
    """Raise RecursionError for values nested too deeply: orjson parses a thousand levels but writes only 254."""
    if depth > _MAX_DEPTH:
        raise RecursionError(TOO_DEEP)
    inner: Any = cast("Record", value).values() if isinstance(value, dict) else value
    for child in inner if isinstance(value, (dict, list)) else ():
        if isinstance(child, (dict, list)):
            check_depth(child, depth + 1)


_IMAGE_TYPES = frozenset({"image", "image_url", "input_image"})
# Keys under which part of a Gemini message stores a file.
_INLINE = ("inlineData", "inline_data", "fileData")
IMAGE = "[image]"


def is_image(block: Any) -> bool:
    """Return whether a content block is an image, in the format of any API."""
    if not isinstance(block, dict):
        return False
    data = cast("Record", block)
    kind = data.get("type")
    if isinstance(kind, str) and kind in _IMAGE_TYPES:
        return True
    inline = next((data[key] for key in _INLINE if isinstance(data.get(key), dict)), data)
    media = inline.get("mimeType") or inline.get("mime")
    return isinstance(media, str) and media.startswith("image/")


def images_in(content: Any) -> int:
    """Return the number of images in a content field. Text models see only the marker inserted by `as_text`."""
    if isinstance(content, list):
        return sum(is_image(block) for block in cast("list[Any]", content))
    return int(is_image(content))


def image_count(*contents: Any) -> Record:
    """Return the `extra` of a turn with the number of images in its content fields, or {} if there are none."""
    number = sum(images_in(content) for content in contents)
    return {"images": number} if number else {}


def as_text(content: Any, depth: int = 0) -> str:
    """Return the text of a content field in any format, with a marker for each part without text.

    Raises RecursionError for content nested too deeply, which the caller counts.
    """
    if isinstance(content, str):
        return content
    if depth > _MAX_DEPTH:
        raise RecursionError("content nested too deeply")
    return content_text(content, fallback=lambda part: _block_text(part, depth + 1))


def _block_text(part: Any, depth: int) -> str:
    """Return the text for a part without a text field: the text of nested parts, or a marker with its type."""
    if isinstance(part, list):
        return as_text(part, depth)
    if not isinstance(part, dict):
        return "" if part is None else str(part)
    block = cast("Record", part)
    if is_image(block):
        return IMAGE
    inner = next((block[key] for key in _TEXT_KEYS if block.get(key) is not None), None)
    return as_text(inner, depth) if inner is not None else f"[{block.get('type', 'block')}]"


# JSON as real programs write it. Python writes NaN, JavaScript escapes half an emoji as a lone surrogate, and Windows
# shells redirect output as UTF-16. Such records must not be lost, and no invalid JSON may be written: values that JSON
# cannot represent become null or U+FFFD.

# A byte order mark and the first character, which in JSON is ASCII: b'\xff\xfe{\x00' (UTF-16, little-endian) or
# b'\xfe\xff\x00{'; not b'\xef\xbb\xbf{', which is UTF-8. The mark alone could be two corrupt bytes.
_UTF16_START = re.compile(codecs.BOM_UTF16_LE + rb"[^\x00]\x00|" + codecs.BOM_UTF16_BE + rb"\x00[^\x00]")
_NUM_START_BYTES = 4
_BLOCK_BYTES = 2**20
# A whole string, a number, or one of the constants that Python writes: b'"a \\" b"', b'-1.5e3', b'NaN', b'-Infinity';
# not b'true'.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?Infinity|NaN|-?\d[\d.eE+-]*+', re.DOTALL)
# Matches an escape: b'\\ud83d\\ude00' (a pair), b'\\ud83d' (group "lone"), or b'\\n'. Reading from the left, it takes
# an escaped backslash as a whole: b'\\\\ud83d' has no lone surrogate.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
# A whole string, so that b'"{"' is no bracket, or one of the brackets in b'{"a": []}'.
_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)
_DEPTH_CHANGE = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
# Deeper than any reader looks, and shallower than the limit of the parser.
_MAX_DOCUMENT_DEPTH = 200


def _is_utf16(data: bytes) -> bool:
    return _UTF16_START.match(data) is not None


def as_utf8(data: bytes) -> bytes:
    """Convert text to UTF-8 and remove the byte order mark."""
    if _is_utf16(data):
        return data.decode("utf-16", "replace").encode()
    return data.removeprefix(codecs.BOM_UTF8)


def read_utf8_lines(file: BinaryIO, max_bytes: int = 2**31) -> Iterable[bytes]:
    """Return the lines of an open file in UTF-8, without a byte order mark.

    A line longer than `max_bytes` is truncated to about this size, since the whole line may not fit into memory.
    """
    start = file.read(_NUM_START_BYTES)
    size = file.seek(0, io.SEEK_END)
    file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
    if _is_utf16(start):
        return _utf16_lines(file, max_bytes)
    return file if size <= max_bytes else _bounded_lines(file.readline, max_bytes)


def _utf16_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    text = io.TextIOWrapper(file, "utf-16", errors="replace", newline="\n")
    try:
        yield from _bounded_lines(lambda limit: text.readline(limit).encode(), max_bytes)
    finally:
        text.detach()  # otherwise the wrapper would close the caller's file


def _bounded_lines(readline: Callable[[int], bytes], max_bytes: int) -> Iterator[bytes]:
    while line := readline(max_bytes + 1):
        yield line
        # Skip the rest of the line.
        while not line.endswith(b"\n") and len(line) > max_bytes and (rest := readline(_BLOCK_BYTES)):
            if rest.endswith(b"\n"):
                break


def parse_repaired(data: bytes) -> Any:
    """Parse text that strict JSON rejects. Raises ValueError if it cannot be repaired."""
    return orjson.loads(repair_json(data))


def drop_deep_values(data: bytes) -> bytes:
    """Replace values nested too deeply with null, so that they need no memory."""
    pieces, depth, start = list[bytes](), 0, 0
    for token in _BRACKET.finditer(data):
        step = _DEPTH_CHANGE.get(token.group(), 0)
        if step > 0 and depth == _MAX_DOCUMENT_DEPTH:
            pieces.append(data[start : token.start()])
        depth += step
        if step < 0 and depth == _MAX_DOCUMENT_DEPTH:
            pieces.append(b"null")
            start = token.end()
    return b"".join([*pieces, data[start:] if depth <= _MAX_DOCUMENT_DEPTH else b""])


def repair_json(data: bytes) -> bytes:
    """Replace numbers that JSON does not support with null, and lone surrogates with U+FFFD."""
    return _TOKEN.sub(_repair_token, as_utf8(data))


def _repair_token(token: re.Match[bytes]) -> bytes:
    text = token.group()
    if text.startswith(b'"'):
        return _ESCAPE.sub(_repair_escape, text) if b"\\u" in text else text
    try:
        return text if math.isfinite(float(text)) else b"null"
    except ValueError:
        return text


def _repair_escape(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape["lone"] is not None else escape.group()


# Counts for a conversation. Calls and results without a counterpart are counted under separate names.

COUNTED = ("conversations", "sessions", "turns", "assistant turns", "calls", "results", "errors")
LOST = "calls without a result"
IN_FLIGHT = "calls in flight at the end of a log"
INTERRUPTED = "calls that the user interrupted"
TWICE = "second results of a call"
IMAGES = "images"
UNPLACED = (LOST, IN_FLIGHT, INTERRUPTED, TWICE)
_INTERRUPT = "[Request interrupted by user"


def count_contents(conversation: Conversation) -> Counter[str]:
    """Return the counts for a conversation, by name.

    All counts in `COUNTED` are included. Those in `UNPLACED` and `IMAGES` are included only if they are not zero.
    """
    counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    counts["conversations"] = 1
    counts["sessions"] = int(conversation.parent is None)
    counts["turns"] = len(conversation.turns)
    for turn in conversation.turns:
        counts["assistant turns"] += turn.role == "assistant"
        counts["calls"] += len(turn.calls)
        counts["results"] += len(turn.results)
        counts["errors"] += sum(result.is_error is True for result in turn.results)
    counts.update(_count_unplaced(conversation))
    return counts


def _count_unplaced(conversation: Conversation) -> Counter[str]:
    """Return the nonzero counts of calls and results without a counterpart, and of images."""
    turns, counts = conversation.turns, Counter[str]()
    waiting: dict[str, list[int]] = {}
    call_ids: set[str] = set()
    for number, turn in enumerate(turns):
        for call in turn.calls:
            waiting.setdefault(call.id, []).append(number)
            call_ids.add(call.id)
        for result in turn.results:
            if waiting.get(result.call_id):
                waiting[result.call_id].pop(0)
            elif result.call_id in call_ids:
                counts[TWICE] += 1
        images = turn.extra.get("images", 0)
        if type(images) is int and images > 0:
            counts[IMAGES] += images
    for numbers in waiting.values():
        for number in numbers:
            counts[_reason_unanswered(turns, number)] += 1
    return counts


def _reason_unanswered(turns: Sequence[Turn], number: int) -> str:
    """Return why a call has no result: the log ends before it, the user interrupted it, or it is missing."""
    after = next((turn for turn in turns[number + 1 :] if turn.role != "tool"), None)
    if after is None:
        return IN_FLIGHT
    return INTERRUPTED if after.role == "user" and after.text.startswith(_INTERRUPT) else LOST
