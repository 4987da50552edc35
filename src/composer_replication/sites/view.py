"""A result's text as rules read it: no terminal codes, one kind of line end, bounded, every place traceable back."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import orjson

# Results are mostly short. Of a very long one the beginning and the end are read: what was run, and how it ended.
_HEAD = _TAIL = 24 * 1024
_GAP = "\n"
# Colours, cursor movements, window titles; and carriage returns, which end a line or start it over.
_CODES = re.compile(
    r"\x1b(?:\[[0-9;?]{0,32}[ -/]?[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_])|\r(?:\n)?|\x00"
)
_TAG = re.compile(
    r"\s*(?:<tool_use_error>|<error(?:_details)?>"
    r"|The tool execution failed with the following error:\s*(?:<error>)?)\s*"
)
_LABEL = re.compile(
    r"\s*(?:#{1,4} Error\n)?(?:Exit code \d{1,3}\n(?=apply_patch"
    r"|Failed to))?(?:(?:MCP )?Error(?: (?:while )?(?:executing|calling"
    r"|running)(?: the)? tool(?: [\w.:-]{1,80})?)?"
    r"(?: -?(?!32602)\d{3,6})?:\s+){0,2}",
    re.IGNORECASE,
)
# What an envelope writes in front of the first line of a stream.
_STREAM = re.compile(r"(?:Output|Stdout|Stderr|STDERR|stderr|Error): (?=\S)|<output>")
_MAX_LINE = 1000
_MAX_LINES = 40
# More terminal codes than this is a progress bar or a game; its beginning is enough.
_MAX_CODES = 4_000
_ENVELOPE = re.compile(r'\s*\{\s*"(?:output|stdout)"\s*:')


@dataclass(frozen=True)
class CleanedText:
    """The cleaned text, and where its pieces stood: (start here, start there)."""

    text: str
    pieces: tuple[tuple[int, int], ...]
    is_cut: bool
    envelope: str = ""

    @staticmethod
    def of(original: str) -> CleanedText:
        inner = _unwrapped(original)
        if inner is not None:
            return replace(CleanedText.of(inner), envelope=original)
        if len(original) <= _HEAD + _TAIL:
            return _cleaned(original, 0, is_cut=False)
        head = _cleaned(original[:_HEAD], 0, is_cut=True)
        tail = _cleaned(original[-_TAIL:], len(original) - _TAIL, is_cut=True)
        offset = len(head.text) + len(_GAP)
        pieces = (*head.pieces, *((here + offset, there) for here, there in tail.pieces))
        return CleanedText(head.text + _GAP + tail.text, pieces, is_cut=True)

    @cached_property
    def lowered(self) -> str:
        """For quick searches; never for places, since some characters change their length."""
        return self.text.lower()

    @cached_property
    def start(self) -> int:
        """Where the message begins, behind the harness's tag and the word Error."""
        tag = _TAG.match(self.text)
        label = _LABEL.match(self.text, tag.end() if tag else 0)
        return label.end() if label else 0

    @property
    def is_labelled(self) -> bool:
        """Whether the text itself begins with the word Error."""
        return bool(self.text[: self.start].strip())

    @cached_property
    def is_tagged(self) -> bool:
        """Whether the harness itself says that it refused the call."""
        return _TAG.match(self.text) is not None

    def has_any(self, needles: tuple[str, ...]) -> bool:
        """Whether one of these words, in lower case, is in the text; each word is looked for once, however many ask."""
        known_needles, lowered = self._known, self.lowered
        for needle in needles:
            is_present = known_needles.get(needle)
            if is_present is None:
                is_present = known_needles[needle] = needle in lowered
            if is_present:
                return True
        return False

    @cached_property
    def _known(self) -> dict[str, bool]:
        return {}

    @property
    def last_line(self) -> str:
        """The last line with something in it."""
        return self.text.rstrip().rpartition("\n")[2][:_MAX_LINE]

    def lines_with(self, needles: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        """Lines in which one of these words stands: where each begins and how it reads, in order, not too many."""
        text = self.text
        # A character whose lower case has another length would move the places: rare, and then case has to agree.
        lowered = self.lowered if len(self.lowered) == len(text) else text
        starts: set[int] = set()
        for needle in needles:
            if self._known.get(needle) is False:
                continue
            position, number = lowered.find(needle), 0
            while position >= 0 and number < _MAX_LINES:
                starts.add(text.rfind("\n", 0, position) + 1)
                end = text.find("\n", position)
                position, number = (lowered.find(needle, end) if end >= 0 else -1), number + 1
        for start in sorted(starts):
            end = text.find("\n", start)
            line = text[start : min(end if end >= 0 else len(text), start + _MAX_LINE)]
            label = _STREAM.match(line)
            skipped = label.end() if label else 0
            yield start + skipped, line[skipped:]

    def ends(self, number: int) -> CleanedText:
        """Its first and its last lines, so many of each."""
        head = _nth_line_end(self.text, number)
        tail = _nth_line_start(self.text, number)
        if head >= tail:
            return self
        offset = head + len(_GAP) - tail
        first = (piece for piece in self.pieces if piece[0] < head)
        last = ((here + offset, there) for here, there in self.pieces if here > tail)
        pieces = (*first, (tail + offset, self._there(tail)), *last)
        return CleanedText(self.text[:head] + _GAP + self.text[tail:], pieces, self.is_cut, self.envelope)

    def place(self, start: int, end: int) -> tuple[int, int]:
        """A span of this text as a span of the original."""
        if self.envelope:
            quoted = json.dumps(self.text[start:end], ensure_ascii=False)[1:-1]
            position = self.envelope.find(quoted)
            return (position, position + len(quoted)) if position >= 0 else (0, len(self.envelope))
        return self._there(start), self._there(end - 1) + 1 if end > start else self._there(start)

    def here(self, position: int) -> int:
        """Where a place of the original stands in this text; the start where it cannot be told."""
        if self.envelope:
            quoted = self.envelope[position : position + 40].partition("\\")[0]
            return max(0, self.text.find(quoted))
        return next((here + position - there for here, there in reversed(self.pieces) if there <= position), 0)

    def _there(self, position: int) -> int:
        here, there = self.pieces[max(0, bisect_right(self.pieces, (position, 1 << 62)) - 1)]
        return there + position - here


def _nth_line_end(text: str, number: int) -> int:
    position = -1
    for _ in range(number):
        position = text.find("\n", position + 1)
        if position < 0:
            return len(text)
    return position


def _nth_line_start(text: str, number: int) -> int:
    position = len(text.rstrip())
    for _ in range(number):
        position = text.rfind("\n", 0, position)
        if position < 0:
            return 0
    return position + 1


def _unwrapped(original: str) -> str | None:
    """The output inside a JSON envelope, with the exit code in a line before it; None where there is no envelope."""
    if not _ENVELOPE.match(original) or len(original) > _HEAD + _TAIL:
        return None
    try:
        value = orjson.loads(original)
    except ValueError:  # also what is nested beyond reason
        return None
    output = value.get("output", value.get("stdout"))
    if isinstance(output, str) and isinstance(value.get("stderr"), str):
        output = f"{output}\n{value['stderr']}" if output else value["stderr"]
    metadata = value.get("metadata")
    code = metadata.get("exit_code") if isinstance(metadata, dict) else value.get("exit_code")
    if not isinstance(output, str):
        return None
    return f"Exit code {code}\n{output}" if isinstance(code, int) else output


def _cleaned(original: str, offset: int, *, is_cut: bool) -> CleanedText:
    num_codes = sum(map(original.count, "\x1b\r\x00"))
    if not num_codes:
        return CleanedText(original, ((0, offset),), is_cut)
    if num_codes > _MAX_CODES and not is_cut:
        return _cleaned(original[: _MAX_CODES * 4], offset, is_cut=True)
    if num_codes > _MAX_CODES:
        original = original[:_MAX_CODES]
    kept_parts: list[str] = []
    pieces: list[tuple[int, int]] = [(0, offset)]
    cursor = length = 0
    for code in _CODES.finditer(original):
        kept_parts.append(original[cursor : code.start()])
        length += code.start() - cursor
        if code[0].startswith("\r"):
            pieces.append((length, offset + code.start()))
            kept_parts.append("\n")
            length += 1
        cursor = code.end()
        pieces.append((length, offset + cursor))
    kept_parts.append(original[cursor:])
    return CleanedText("".join(kept_parts), tuple(pieces), is_cut)
