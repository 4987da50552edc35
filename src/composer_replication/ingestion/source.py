"""Reading session files without giving up: what cannot be read is counted, named with file and line, and left out."""

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

# Longer lines and documents are counted and skipped. The longest line of the sessions at hand has 0.3 MB, and a request
# of an agent, images and all, may have 32 MB; what is read and scrubbed needs up to twenty times its size in memory.
MAX_LINE_BYTES = 32 * 2**20
# The lines of a file are held together. Beyond this weight they are counted and skipped, so that a file needs less than
# 1 GB; the largest of those sessions weighs 10 MB.
MAX_FILE_WEIGHT = 192 * 2**20
# An empty list takes three bytes of a file and sixty of memory.
_BYTES_PER_VALUE = 32
# Lines are long: with the usual 8 kB, cutting them out of the file costs as much as a third of parsing them.
BUFFER_BYTES = 2**20
# Every skip is counted; only so many are kept with their place.
_MAX_NAMED_SKIPS = 1000
TOO_DEEP = "nested too deeply"
# No tool nests content deeper; the parser would let a damaged line go on for a thousand levels.
_MAX_DEPTH = 50
# More tokens than this nobody counted; beyond it sums leave the 64 bits that can be written.
MAX_COUNT = 2**53
# A reason may quote what it found there, and that may be anything. It is cut short only after it was scrubbed.
_MAX_REASON = 2000


@dataclass(frozen=True, slots=True)
class Skip:
    """Something that was left out: why, and where it stands (line 0: the file as a whole)."""

    reason: str
    file: str
    line: int


@dataclass(slots=True)
class IngestReport:
    """What was read and what was not; reports of several files add up."""

    counts: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])
    skips: list[Skip] = field(default_factory=list[Skip])

    def skip(self, reason: str, file: str, line: int = 0) -> None:
        reason = reason[:_MAX_REASON]
        self.skipped[reason] += 1
        if len(self.skips) < _MAX_NAMED_SKIPS:
            self.skips.append(Skip(reason, file, line))

    def merge(self, other: IngestReport) -> None:
        self.counts.update(other.counts)
        self.skipped.update(other.skipped)
        self.skips.extend(other.skips[: _MAX_NAMED_SKIPS - len(self.skips)])


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and the name under which it appears in artefacts (never an absolute path)."""

    path: Path
    name: str

    def __post_init__(self) -> None:
        # A name that is no UTF-8 holds lone surrogates here, which no artefact can hold.
        object.__setattr__(self, "name", self.name.encode("utf-8", "replace").decode())


Record = dict[str, Any]
# Where blocks of different interfaces keep what they say.
_TEXT_KEYS = ("text", "content", "refusal", "resource", "json")


def read_records(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Record]]:
    """(line number, JSON object) of every good line; a broken line never costs its neighbours."""
    try:
        with source.path.open("rb", buffering=BUFFER_BYTES) as file:
            # Twice the size: UTF-16 may grow when it is read.
            is_light = 2 * os.fstat(file.fileno()).st_size * (1 + _BYTES_PER_VALUE) <= MAX_FILE_WEIGHT
            lines = enumerate(utf8_lines(file, MAX_LINE_BYTES), start=1)
            yield from records_in(lines, source, report, weigh=len if is_light else weight_of)
    except OSError as error:
        report.skip(f"unreadable file: {error.strerror}", source.name)


def records_in(
    lines: Iterable[tuple[int, bytes]],
    source: SourceFile,
    report: IngestReport,
    *,
    weigh: Callable[[bytes], int] | None = None,
) -> Iterator[tuple[int, Record]]:
    """Yield the records of numbered lines; `weigh` may be a cheaper measure where a file is too small for the limit."""
    weigh = weigh or weight_of
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


def weight_of(data: bytes) -> int:
    """Return how much memory the JSON in `data` needs, relative to text of so many bytes."""
    return len(data) + _BYTES_PER_VALUE * sum(map(data.count, (b",", b"[", b"{")))


def is_too_large(data: bytes) -> bool:
    """Return whether a line or document is skipped: for its length, or for the number of values in it."""
    return len(data) > MAX_LINE_BYTES or weight_of(data) > MAX_FILE_WEIGHT


def _repaired_object(line: bytes, number: int, file: str, report: IngestReport) -> Record | None:
    """The object of a line that is none at first sight, or None with the reason counted; blank lines are nothing."""
    if line.isspace():
        return None
    try:
        value = loads(line)
    except ValueError as error:
        report.skip(_why_unreadable(line, str(error)), file, number)
        return None
    if not isinstance(value, dict):
        report.skip("not a JSON object", file, number)
        return None
    report.counts["repaired lines"] += 1
    return cast("Record", value)


def _why_unreadable(line: bytes, error: str) -> str:
    if error.startswith("depth limit"):
        return TOO_DEEP
    # A live log usually ends in the middle of a line; anywhere else it is damage.
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
    """Raises RecursionError for what is nested beyond reason: orjson reads a thousand levels but writes only 254."""
    if depth > _MAX_DEPTH:
        raise RecursionError(TOO_DEEP)
    inner: Any = cast("Record", value).values() if isinstance(value, dict) else value
    for child in inner if isinstance(value, (dict, list)) else ():
        if isinstance(child, (dict, list)):
            check_depth(child, depth + 1)


_IMAGE_TYPES = frozenset({"image", "image_url", "input_image"})
# Where Gemini puts what a part holds.
_INLINE = ("inlineData", "inline_data", "fileData")
IMAGE = "[image]"


def is_image(block: Any) -> bool:
    """Whether a content block is an image, in the shape of any interface."""
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
    """How many images a content field shows: text models cannot see them, and `as_text` leaves a mark for each."""
    if isinstance(content, list):
        return sum(is_image(block) for block in cast("list[Any]", content))
    return int(is_image(content))


def image_count(*contents: Any) -> Record:
    """What a turn's `extra` says about the images in its content fields: nothing where there are none."""
    number = sum(images_in(content) for content in contents)
    return {"images": number} if number else {}


def as_text(content: Any, depth: int = 0) -> str:
    """The text of a content field in any of its shapes, with a mark for what has none.

    Raises RecursionError early for content nested beyond reason, for the caller to count.
    """
    if isinstance(content, str):
        return content
    if depth > _MAX_DEPTH:
        raise RecursionError("content nested too deeply")
    return content_text(content, other=lambda part: _without_text(part, depth + 1))


def _without_text(part: Any, depth: int) -> str:
    """What is shown for a part that has no text of its own: that of what is in it, or its type."""
    if isinstance(part, list):
        return as_text(part, depth)
    if not isinstance(part, dict):
        return "" if part is None else str(part)
    block = cast("Record", part)
    if is_image(block):
        return IMAGE
    inner = next((block[key] for key in _TEXT_KEYS if block.get(key) is not None), None)
    return as_text(inner, depth) if inner is not None else f"[{block.get('type', 'block')}]"


# JSON text as real programs leave it: byte order marks, UTF-16, NaN, numbers beyond all bounds, lone surrogates.
#
# Python writes NaN, JavaScript escapes half an emoji as a lone surrogate, and Windows shells redirect into UTF-16. None
# of these may cost a record, and none may come back out: what JSON cannot hold becomes null or U+FFFD.

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
_JSON_TEXT_MAX_DEPTH = 200


def _is_utf16(data: bytes) -> bool:
    return _UTF16_START.match(data) is not None


def as_utf8(data: bytes) -> bytes:
    """The same text in UTF-8, without a byte order mark."""
    if _is_utf16(data):
        return data.decode("utf-16", "replace").encode()
    return data.removeprefix(codecs.BOM_UTF8)


def utf8_lines(file: BinaryIO, longest: int = 2**31) -> Iterable[bytes]:
    """The lines of an open file in UTF-8, without a byte order mark.

    Of a line that is longer than `longest` so much comes and a little more, never all: memory has to hold it.
    """
    start = file.read(_LONGEST_START)
    size = file.seek(0, io.SEEK_END)
    file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
    if _is_utf16(start):
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
        if step > 0 and depth == _JSON_TEXT_MAX_DEPTH:
            pieces.append(data[start : token.start()])
        depth += step
        if step < 0 and depth == _JSON_TEXT_MAX_DEPTH:
            pieces.append(b"null")
            start = token.end()
    return b"".join([*pieces, data[start:] if depth <= _JSON_TEXT_MAX_DEPTH else b""])


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


# What a conversation holds, in numbers; calls and results that have no counterpart are counted each by its name.

COUNTED = ("conversations", "sessions", "turns", "assistant turns", "calls", "results", "errors")
LOST = "calls without a result"
IN_FLIGHT = "calls in flight at the end of a log"
INTERRUPTED = "calls that the user interrupted"
TWICE = "second results of a call"
IMAGES = "images"
UNPLACED = (LOST, IN_FLIGHT, INTERRUPTED, TWICE)
_INTERRUPT = "[Request interrupted by user"


def counts_of(conversation: Conversation) -> Counter[str]:
    """All of `COUNTED`, and what of `UNPLACED` and `IMAGES` there is."""
    counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    counts["conversations"] = 1
    counts["sessions"] = int(conversation.parent is None)
    counts["turns"] = len(conversation.turns)
    for turn in conversation.turns:
        counts["assistant turns"] += turn.role == "assistant"
        counts["calls"] += len(turn.calls)
        counts["results"] += len(turn.results)
        counts["errors"] += sum(result.is_error is True for result in turn.results)
    counts.update(unplaced_in(conversation))
    return counts


def unplaced_in(conversation: Conversation) -> Counter[str]:
    """What of a conversation has no counterpart, and how many images it shows; nothing is counted that is not there."""
    turns, counts = conversation.turns, Counter[str]()
    waiting: dict[str, list[int]] = {}
    known_ids: set[str] = set()
    for number, turn in enumerate(turns):
        for call in turn.calls:
            waiting.setdefault(call.id, []).append(number)
            known_ids.add(call.id)
        for result in turn.results:
            if waiting.get(result.call_id):
                waiting[result.call_id].pop(0)
            elif result.call_id in known_ids:
                counts[TWICE] += 1
        images = turn.extra.get("images", 0)
        if type(images) is int and images > 0:
            counts[IMAGES] += images
    for numbers in waiting.values():
        for number in numbers:
            counts[_why_unanswered(turns, number)] += 1
    return counts


def _why_unanswered(turns: Sequence[Turn], number: int) -> str:
    """What became of a call of this turn: the log may end before its result, or the user stop it."""
    after = next((turn for turn in turns[number + 1 :] if turn.role != "tool"), None)
    if after is None:
        return IN_FLIGHT
    return INTERRUPTED if after.role == "user" and after.text.startswith(_INTERRUPT) else LOST
