"""Reading session files without giving up: what cannot be read is counted, named with file and line, and left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson

# Longer lines than this are counted and skipped: no agent writes them, and one would hold the memory of all the others.
MAX_LINE_BYTES = 256 * 2**20
# Every skip is counted; only so many are kept with their place.
_MAX_NAMED_SKIPS = 1000
# No tool nests content deeper; the parser would let a damaged line go on for a thousand levels.
_MAX_DEPTH = 50


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


Record = dict[str, Any]


def read_records(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Record]]:
    """(line number, JSON object) of every good line; a broken line never costs its neighbours."""
    try:
        file = source.path.open("rb")
    except OSError as error:
        report.skip(f"unreadable file: {error.strerror}", source.name)
        return
    with file:
        for number, line in enumerate(file, start=1):
            record = parse_object(line, number, source.name, report, ends_file=not line.endswith(b"\n"))
            if record is not None:
                yield number, record


def parse_object(
    line: bytes, number: int, file: str, report: IngestReport, *, ends_file: bool = False
) -> Record | None:
    """One JSON object, or None with the reason counted; blank lines are nothing at all."""
    if line.isspace():
        return None
    if len(line) > MAX_LINE_BYTES:
        report.skip("line too long", file, number)
        return None
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        # A live log usually ends in the middle of a line; anywhere else it is damage.
        report.skip("truncated last line" if ends_file else _why_unreadable(line), file, number)
        return None
    if not isinstance(value, dict):
        report.skip("not a JSON object", file, number)
        return None
    return cast("Record", value)


def read_document(source: SourceFile, report: IngestReport) -> Any:
    """The JSON document of a whole file, or None with the reason counted."""
    try:
        return orjson.loads(source.path.read_bytes())
    except OSError as error:
        report.skip(f"unreadable file: {error.strerror}", source.name)
    except orjson.JSONDecodeError:
        report.skip("invalid JSON document", source.name)
    return None


def _why_unreadable(line: bytes) -> str:
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
        raise RecursionError("nested too deeply")
    inner: Any = cast("Record", value).values() if isinstance(value, dict) else value
    for each in inner if isinstance(value, (dict, list)) else ():
        if isinstance(each, (dict, list)):
            check_depth(each, depth + 1)


def as_text(content: Any, depth: int = 0) -> str:
    """The text of a content field in any of its shapes: a string, or a list of strings and blocks with text.

    Raises RecursionError early for content nested beyond reason, for the caller to count.
    """
    if isinstance(content, str):
        return content
    if depth > _MAX_DEPTH:
        raise RecursionError("content nested too deeply")
    if isinstance(content, dict):
        block = cast("Record", content)
        inner = block.get("text", block.get("content"))
        return as_text(inner, depth + 1) if inner is not None else f"[{block.get('type', 'block')}]"
    if isinstance(content, list):
        return "\n".join(as_text(each, depth + 1) for each in cast("list[Any]", content))
    return "" if content is None else str(content)
