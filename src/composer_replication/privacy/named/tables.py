"""Secrets under a heading: CSV, tab-separated and Markdown tables, and the columns of an SQL INSERT.

Every line is read once: as a heading when a key word stands in it, or as a row of the table above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set

from composer_replication.privacy.named.names import Strength, name_strength
from composer_replication.privacy.named.plausible import is_passphrase, is_plausible, is_random_value, is_unknown
from composer_replication.privacy.rules import Span, is_strong

INSERT = b"insert"
_WORDS = (b"pass", b"pwd", b"secret")  # under `token` and `key` stand random strings, which are found as such
_LONGEST_HEADING = 400
_LONGEST_ROW = 4000
_MOST_COLUMNS = 40
_HEADING = re.compile(r"[ \t]*\\*[\"'`*]{0,3}([A-Za-z][\w .-]{0,40})\\*[\"'`*]{0,3}[ \t\r]*")
_RULE = re.compile(r"[\s|:+-]+")
_AROUND = " \t\r\"'`*"  # a cell
_INSERT = re.compile(
    r"(?i:insert\s{1,9}(?:ignore\s{1,9})?into\s{1,9})[^\0\s(]{1,120}\s{0,9}\(([^\0()]{1,800})\)\s{0,9}(?i:values)\s{0,9}"
)
_VALUE = r"(?:\\*'((?:[^\0'\\\n]|''|\\[^\0'\n]){0,400}+)\\*'|[^\0'(),]{0,200}(?:\([^\0'()]{0,80}\))?)\s{0,9}"
_ARGUMENT = re.compile(_VALUE)
_NEXT_ROW = re.compile(r"\s{0,9},\s{0,9}(?=\()")
_Columns = Sequence[tuple[int, Strength]]


def table_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Every secret that stands under a name. `lower` is the text, one byte a character, lower-cased."""
    for word in _WORDS:
        if word in active:
            yield from _tables(text, lower, word)
    if INSERT in active:
        yield from _inserts(text, lower)


def _tables(text: str, lower: bytes, word: bytes) -> Iterator[Span]:
    at = lower.find(word)
    while at >= 0:
        begin = text.rfind("\n", max(0, at - _LONGEST_HEADING), at) + 1
        end = text.find("\n", at)
        if end < 0:
            return  # no row below
        done = end
        if end - begin <= _LONGEST_HEADING and (sign := _separator(text[begin:end])):
            columns = _secret_columns(text[begin:end], sign)
            if columns:
                spans, done = _rows(text, end + 1, sign, columns, text.count(sign, begin, end))
                yield from spans
        at = lower.find(word, max(done, end))


def _separator(heading: str) -> str:
    return next((sign for sign in "|\t,;" if sign in heading), "")


def _secret_columns(heading: str, sign: str) -> _Columns:
    """Which columns hold secrets; none when the line is no heading: code and prose have other signs in them."""
    cells = heading.split(sign)
    if not 2 <= len(cells) <= _MOST_COLUMNS:
        return ()
    names = [_HEADING.fullmatch(cell) for cell in cells]
    outer = (0, len(cells) - 1) if sign == "|" else ()  # what stands outside the outer bars
    if any(name is None and (index not in outer or cells[index].strip()) for index, name in enumerate(names)):
        return ()
    strengths = [(index, name_strength(name[1].strip())) for index, name in enumerate(names) if name]
    return [(index, strength) for index, strength in strengths if strength >= Strength.TOKEN]


def _rows(text: str, begin: int, sign: str, columns: _Columns, signs: int) -> tuple[list[Span], int]:
    """Secrets of the rows that have as many cells as the heading, and where the table ends."""
    spans: list[Span] = []
    while begin < len(text):
        newline = text.find("\n", begin, begin + _LONGEST_ROW)
        end = newline if newline >= 0 else min(len(text), begin + _LONGEST_ROW)
        row = text[begin:end]
        rule = sign == "|" and _RULE.fullmatch(row) is not None  # with `+` where the columns meet
        if (row.count(sign) != signs and not rule) or not row or "\0" in row:
            break
        if not rule:
            spans += _cells(row, begin, sign, columns)
        begin = end + 1
    return spans, begin - 1


def _cells(row: str, begin: int, sign: str, columns: _Columns) -> Iterator[Span]:
    cells = row.split(sign)
    for index, strength in columns:
        value = cells[index].strip(_AROUND)
        start = begin + sum(len(each) + 1 for each in cells[:index]) + cells[index].find(value)
        if _is_secret(value, strength):
            yield Span(start, start + len(value), _kind(strength))


def _is_secret(value: str, strength: Strength) -> bool:
    if strength == Strength.PASSWORD and is_passphrase(value):
        return True
    if " " in value or not is_plausible(value, strength, True):
        return False
    return is_strong(value) or is_unknown(value) if strength == Strength.PASSWORD else is_random_value(value)


def _inserts(text: str, lower: bytes) -> Iterator[Span]:
    at = lower.find(INSERT)
    while at >= 0:
        match = _INSERT.match(text, at)
        if match is None:
            at = lower.find(INSERT, at + len(INSERT))
            continue
        names = [name.strip(' \t\n\r"`[]') for name in match[1].split(",")]
        columns = {
            index: strength for index, name in enumerate(names) if (strength := name_strength(name)) >= Strength.TOKEN
        }
        position = match.end()
        while columns and text.startswith("(", position):
            spans, position = _arguments(text, position + 1, columns)
            yield from spans
            following = _NEXT_ROW.match(text, position)
            position = following.end() if following else position
        at = lower.find(INSERT, position)


def _arguments(text: str, position: int, columns: dict[int, Strength]) -> tuple[list[Span], int]:
    """Secrets of one row in brackets, and where it ends."""
    spans: list[Span] = []
    for index in range(_MOST_COLUMNS):
        position += len(text[position : position + 9]) - len(text[position : position + 9].lstrip())
        argument = _ARGUMENT.match(text, position)
        if argument is None:
            break
        strength, value = columns.get(index, Strength.NONE), argument[1]
        if strength and value and is_plausible(value, strength, True):
            spans.append(Span(*argument.span(1), _kind(strength)))
        position = argument.end()
        if not text.startswith(",", position):
            break
        position += 1
    return spans, position + text.startswith(")", position)


def _kind(strength: Strength) -> str:
    return "PASSWORD" if strength == Strength.PASSWORD else "SECRET"
