"""Clean the text of a tool result for the rules, and map positions in the cleaned text back to the original.

Terminal codes are removed, all line endings become newlines, and only the beginning and the end of a long result are
kept. The evidence for an error site is a span in the original text, so `CleanedText` records where each piece came
from.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import orjson

# Only the beginning and the end of a very long result are read: what was run, and how it ended.
_MAX_HEAD = _MAX_TAIL = 24 * 1024
_GAP = "\n"
# Colors, cursor movements and window titles; also carriage returns, which end a line or restart it.
# "\x1b[31m"; "\x1b]0;title\x07"; "\r\n"; not "plain"
_TERMINAL_CODE = re.compile(
    r"\x1b(?:\[[0-9;?]{0,32}[ -/]?[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_])|\r(?:\n)?|\x00"
)
# A harness marks a result as its own message with these tags: "<tool_use_error>"; "<error>"; not "Error: "
_TAG = re.compile(
    r"\s*(?:<tool_use_error>|<error(?:_details)?>"
    r"|The tool execution failed with the following error:\s*(?:<error>)?)\s*"
)
# The label before a message. Code -32602 is left to the rule for wrong arguments.
# "MCP error -32001: "; "Error executing tool grep: "; `Exit code 1\nFailed to find context`; "Error: "
_LABEL = re.compile(
    r"\s*(?:#{1,4} Error\n)?(?:Exit code \d{1,3}\n(?=apply_patch"
    r"|Failed to))?(?:(?:MCP )?Error(?: (?:while )?(?:executing|calling"
    r"|running)(?: the)? tool(?: [\w.:-]{1,80})?)?"
    r"(?: -?(?!32602)\d{3,6})?:\s+){0,2}",
    re.IGNORECASE,
)
# What an envelope adds before the first line of a stream.
# "Stderr: bad option"; "<output>"; not "Stderr: "
_STREAM = re.compile(r"(?:Output|Stdout|Stderr|STDERR|stderr|Error): (?=\S)|<output>")
# No error message is longer. The limits bound the time that patterns take on hostile output.
_MAX_LINE = 1000
_MAX_LINES = 40
# Output with more terminal codes comes from a progress bar or a game, so its beginning is enough.
_MAX_TERMINAL_CODES = 4_000
# Codex returns a command's output as JSON.
# `{"output": "ok", "metadata": {"exit_code": 0}}`; not `{"result": "ok"}`
_ENVELOPE = re.compile(r'\s*\{\s*"(?:output|stdout)"\s*:')


@dataclass(frozen=True)
class CleanedText:
    """The text of a result as seen by the rules, with a map back to the original text."""

    text: str
    pieces: tuple[tuple[int, int], ...]
    """(start in `text`, start in the original) of each piece that was copied unchanged, in order."""
    is_cut: bool
    envelope: str = ""
    """The original, if it was JSON and `text` is the output inside it. `pieces` then has positions in that output."""

    @staticmethod
    def of(original: str) -> CleanedText:
        """Clean a result, after unwrapping it if it is a JSON envelope."""
        inner = _unwrap_envelope(original)
        if inner is not None:
            return replace(CleanedText.of(inner), envelope=original)
        if len(original) <= _MAX_HEAD + _MAX_TAIL:
            return _remove_terminal_codes(original, 0, is_cut=False)
        head = _remove_terminal_codes(original[:_MAX_HEAD], 0, is_cut=True)
        tail = _remove_terminal_codes(original[-_MAX_TAIL:], len(original) - _MAX_TAIL, is_cut=True)
        offset = len(head.text) + len(_GAP)
        pieces = (*head.pieces, *((start + offset, original_start) for start, original_start in tail.pieces))
        return CleanedText(head.text + _GAP + tail.text, pieces, is_cut=True)

    @cached_property
    def lowercase_text(self) -> str:
        """The text in lower case, for fast searches. Its positions may be shifted: "İ" becomes two characters."""
        return self.text.lower()

    @cached_property
    def start(self) -> int:
        """The position where the message begins, after the harness's tag and a label such as "Error: "."""
        tag = _TAG.match(self.text)
        label = _LABEL.match(self.text, tag.end() if tag else 0)
        return label.end() if label else 0

    @property
    def is_labelled(self) -> bool:
        """Whether the text begins with a tag or a label such as "Error: "."""
        return bool(self.text[: self.start].strip())

    @cached_property
    def is_tagged(self) -> bool:
        """Whether the harness marked the result as its own message."""
        return _TAG.match(self.text) is not None

    def has_any(self, needles: tuple[str, ...]) -> bool:
        """Return whether the text contains one of these lower-case words.

        Answers are cached, since many rules share words.
        """
        cache, lowercase_text = self._needle_cache, self.lowercase_text
        for needle in needles:
            is_present = cache.get(needle)
            if is_present is None:
                is_present = cache[needle] = needle in lowercase_text
            if is_present:
                return True
        return False

    @cached_property
    def _needle_cache(self) -> dict[str, bool]:
        return {}

    @property
    def last_line(self) -> str:
        """The last line that is not blank."""
        return self.text.rstrip().rpartition("\n")[2][:_MAX_LINE]

    def lines_with(self, needles: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        """Yield (start, line) for the lines that contain one of these words, in order.

        At most `_MAX_LINES` lines are considered for each word.
        """
        text = self.text
        # If lower case changes the length of the text, positions in it would be wrong, so the search is case-sensitive.
        lowercase_text = self.lowercase_text if len(self.lowercase_text) == len(text) else text
        starts: set[int] = set()
        for needle in needles:
            if self._needle_cache.get(needle) is False:
                continue
            position, number = lowercase_text.find(needle), 0
            while position >= 0 and number < _MAX_LINES:
                starts.add(text.rfind("\n", 0, position) + 1)
                end = text.find("\n", position)
                position, number = (lowercase_text.find(needle, end) if end >= 0 else -1), number + 1
        for start in sorted(starts):
            end = text.find("\n", start)
            line = text[start : min(end if end >= 0 else len(text), start + _MAX_LINE)]
            label = _STREAM.match(line)
            skipped = label.end() if label else 0
            yield start + skipped, line[skipped:]

    def first_and_last_lines(self, number: int) -> CleanedText:
        """Return the first and the last `number` lines."""
        head = _nth_line_end(self.text, number)
        tail = _nth_line_start(self.text, number)
        if head >= tail:
            return self
        offset = head + len(_GAP) - tail
        first = (piece for piece in self.pieces if piece[0] < head)
        last = ((start + offset, original_start) for start, original_start in self.pieces if start > tail)
        pieces = (*first, (tail + offset, self._original_position(tail)), *last)
        return CleanedText(self.text[:head] + _GAP + self.text[tail:], pieces, self.is_cut, self.envelope)

    def to_original(self, start: int, end: int) -> tuple[int, int]:
        """Map a span in this text to a span in the original."""
        if self.envelope:
            # The original is JSON, in which the span is escaped. If it is missing, the evidence is the whole text.
            quoted = json.dumps(self.text[start:end], ensure_ascii=False)[1:-1]
            position = self.envelope.find(quoted)
            return (position, position + len(quoted)) if position >= 0 else (0, len(self.envelope))
        begin = self._original_position(start)
        return begin, self._original_position(end - 1) + 1 if end > start else begin

    def position_from_original(self, position: int) -> int:
        """Map a position in the original to this text. Return 0 if the position cannot be determined."""
        if self.envelope:
            quoted = self.envelope[position : position + 40].partition("\\")[0]
            return max(0, self.text.find(quoted))
        starts = reversed(self.pieces)
        return next((start + position - original for start, original in starts if original <= position), 0)

    def _original_position(self, position: int) -> int:
        # The second element of the key sorts after all real ones, so a piece that starts here is included.
        start, original_start = self.pieces[max(0, bisect_right(self.pieces, (position, 1 << 62)) - 1)]
        return original_start + position - start


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


def _unwrap_envelope(original: str) -> str | None:
    """Return the output inside a JSON envelope, after a line with the exit code, or None if there is no envelope."""
    if not _ENVELOPE.match(original) or len(original) > _MAX_HEAD + _MAX_TAIL:
        return None
    try:
        value = orjson.loads(original)
    except ValueError:  # also raised for JSON that is nested too deeply
        return None
    output = value.get("output", value.get("stdout"))
    if isinstance(output, str) and isinstance(value.get("stderr"), str):
        output = f"{output}\n{value['stderr']}" if output else value["stderr"]
    metadata = value.get("metadata")
    code = metadata.get("exit_code") if isinstance(metadata, dict) else value.get("exit_code")
    if not isinstance(output, str):
        return None
    return f"Exit code {code}\n{output}" if isinstance(code, int) else output


def _remove_terminal_codes(original: str, offset: int, *, is_cut: bool) -> CleanedText:
    """Remove terminal codes. `offset` is the position where `original` begins in the full result."""
    num_codes = sum(map(original.count, "\x1b\r\x00"))
    if not num_codes:
        return CleanedText(original, ((0, offset),), is_cut)
    if num_codes > _MAX_TERMINAL_CODES and not is_cut:
        return _remove_terminal_codes(original[: _MAX_TERMINAL_CODES * 4], offset, is_cut=True)
    if num_codes > _MAX_TERMINAL_CODES:
        original = original[:_MAX_TERMINAL_CODES]
    parts: list[str] = []
    pieces: list[tuple[int, int]] = [(0, offset)]
    cursor = length = 0
    for code in _TERMINAL_CODE.finditer(original):
        parts.append(original[cursor : code.start()])
        length += code.start() - cursor
        if code[0].startswith("\r"):
            pieces.append((length, offset + code.start()))
            parts.append("\n")
            length += 1
        cursor = code.end()
        pieces.append((length, offset + cursor))
    parts.append(original[cursor:])
    return CleanedText("".join(parts), tuple(pieces), is_cut)
