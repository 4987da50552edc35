"""Reading session files without giving up: what cannot be read is counted, named with file and line, and left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson

from composer_replication.actions.messages import content_text
from composer_replication.ingestion.reading import json_text

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
            lines = enumerate(json_text.utf8_lines(file, MAX_LINE_BYTES), start=1)
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
        value = json_text.loads(line)
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
