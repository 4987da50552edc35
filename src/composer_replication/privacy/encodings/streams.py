"""Secrets that a stream tells piece by piece: lines of one form, each with a few characters of a message.

    data: {"type": "text_delta", "text": "kest"}
    data: {"type": "text_delta", "text": "rel-48"}

The pieces are joined and scanned as one text. What is found counts where it lies across pieces; each piece of it goes.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from composer_replication.privacy.rules import Span

_FEWEST_LINES = 5
_FEWEST_EVENTS = 3  # lines of server-sent events, which have a form of their own
_HEAD = 3  # characters that all lines of a stream begin with: `dat`, `{"t`, `0:"`
_LONGEST_LINE = 600
_MOST_BETWEEN = 3  # lines of another form between two of a stream: `event: delta` and an empty one
_LONGEST_PIECE = 60
_COMMON_HEAD = 4
_APART = "\n\0\n"
_STRING = re.compile(rb'"((?:[^"\\\n]|\\.)*+)"')
_NUMBER = re.compile(rb"0+(?:\.0+)?| +")
_DIGITS_ALIKE = bytes(48 if 48 <= code <= 57 else code for code in range(256))


class Stream(NamedTuple):
    """The pieces of one message: where they are in the text, where in the joined text, and that text."""

    pieces: list[tuple[int, int]]
    offsets: list[int]
    text: str

    def led_back(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield, for each span that lies across pieces of the joined text, its part of every piece."""
        for span in spans:
            first = bisect_right(self.offsets, span.start) - 1
            last = bisect_right(self.offsets, span.end - 1) - 1
            for index in range(first, last + 1) if last > first else ():
                begin, end = self.pieces[index]
                offset = self.offsets[index]
                yield Span(begin + max(0, span.start - offset), min(end, begin + span.end - offset), span.kind)


def streams(text: str, flat: bytes) -> Iterator[Stream]:
    """Yield the messages that lines of a text hold in pieces. `flat` is the text, one byte a character."""
    num_breaks = flat.count(b"\n")
    if num_breaks < _FEWEST_EVENTS - 1 or flat.count(b'"') < num_breaks:  # code has fewer quotes than lines
        return
    lines = flat.translate(_DIGITS_ALIKE).split(b"\n")
    heads = Counter([line[:_HEAD] for line in lines])
    likely = {head for head, count in heads.items() if count >= _fewest(head) and head.strip()}
    if not likely:
        return
    groups: dict[bytes, list[tuple[int, int]]] = {}  # by head: number and start of each line
    start = 0
    for number, line in enumerate(lines):
        if line[:_HEAD] in likely and len(line) <= _LONGEST_LINE and b'"' in line:
            groups.setdefault(line[:_HEAD], []).append((number, start))
        start += len(line) + 1
    for head, group in groups.items():
        for run in _runs(lines, group, _fewest(head)):
            if (pieces := _pieces(flat, run)) is not None:
                yield _joined(text, pieces)


def _fewest(head: bytes) -> int:
    return _FEWEST_EVENTS if head == b"dat" else _FEWEST_LINES


def _runs(lines: list[bytes], group: list[tuple[int, int]], fewest: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the bounds of successive lines of one form, where only numbers and the contents of strings differ."""
    run: list[tuple[int, int]] = []
    form, last = b"", -1
    for number, start in group:
        line = lines[number]
        line_form = _NUMBER.sub(b"0", _STRING.sub(b'""', line))
        is_apart = number - last > _MOST_BETWEEN or any(b"\0" in between for between in lines[last + 1 : number])
        if run and (line_form != form or is_apart):
            if len(run) >= fewest:
                yield run
            run = []
        run.append((start, start + len(line)))
        form, last = line_form, number
    if len(run) >= fewest:
        yield run


def _pieces(flat: bytes, run: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return the bounds of the string that differs most from line to line; None where no string is short and varied."""
    rows = [[match.span(1) for match in _STRING.finditer(flat, *bounds)] for bounds in run]
    best: list[tuple[int, int]] | None = None
    most = _FEWEST_EVENTS - 1
    for column in zip(*rows, strict=False):
        values = [flat[begin:end].translate(_DIGITS_ALIKE) for begin, end in column]
        is_prose = any(b" " in value for value in values)  # names and ids have no blanks
        if not is_prose or len({value[:_COMMON_HEAD] for value in values}) == 1:  # ids of one kind begin alike
            continue
        is_in_pieces = statistics.median(map(len, values)) <= _LONGEST_PIECE
        if is_in_pieces and len(set(values)) > most:
            best, most = list(column), len(set(values))
    return best


def _joined(text: str, pieces: list[tuple[int, int]]) -> Stream:
    parts, offsets, length = [_APART], list[int](), len(_APART)
    for begin, end in pieces:
        offsets.append(length)
        parts.append(text[begin:end])
        length += end - begin
    return Stream(pieces, offsets, "".join([*parts, _APART]))
