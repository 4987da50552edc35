"""Secrets under a heading: CSV, tab-separated and Markdown tables, and the columns of an SQL INSERT.

Every line is read once: as a heading when a key word stands in it, or as a row of the table above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from composer_replication.privacy.names import Strength, name_strength
from composer_replication.privacy.plausible import (
    is_generated,
    is_no_secret,
    is_passphrase,
    is_plausible,
    is_random_value,
    is_unknown,
)
from composer_replication.privacy.rules import (
    PLACEHOLDER,
    Span,
    has_digit,
    is_strong,
    word_set,
)

INSERT, COPY = b"insert", b"copy"
_WORDS = (b"pass", b"pwd", b"secret", b"token", b"key", b"senha", b"contrase")
_COMMON = frozenset((b"token", b"key"))  # they stand in other lines, too: only where a rule or more cells say so
_LONGEST_HEADING = 400
_LONGEST_ROW = 4000
_MOST_COLUMNS = 40
_HEADING = re.compile(r"[ \t]*\\*[\"'`*]{0,3}([A-Za-z][\w .-]{0,40})\\*[\"'`*]{0,3}[ \t\r]*")
_NO_HEADING = re.compile(r"[(){}\[\]=<>:/$@#%+?!&^~]")  # what no cell of one has
_RULE = re.compile(r"[\s|:+\u2500-\u257f-]+")
_RULE_STARTS = frozenset("|-+ \u251c\u2502\u2560")
_ALIGNED = re.compile(r"[^\0\s](?:[^\0\s]| (?! ))*+")  # cells with two blanks or more between them
_FOR_WHOM = re.compile(r"(?i)user(?:name)?|login|e-?mail|account|host|server|service|name|benutzer|usuario|system")
_NO_CELL = word_set("yes no true false none null required optional string text hidden varchar never always")
_HEX = re.compile(r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,64}")
_AROUND = " \t\r\"'`*"  # a cell
_BARS = ("|", "\u2502")
# `ada,"a ""quoted"" cell, with a sign",`: a cell and what parts it from the next.
_CELLS = {
    sign: re.compile(
        rf'(?:\A|(?<={sign}))([ ]?"(?:[^\0"]|"")*+"(?=[ \r]*(?:{sign}|\Z))|[^\0{sign}]*+)(?={sign}|[ \r]*\Z)'
    )
    for sign in "\t,;"
}
_INSERT = re.compile(
    r"(?i:insert\s{1,9}(?:ignore\s{1,9})?into\s{1,9})[^\0\s(]{1,120}\s{0,9}\(([^\0()]{1,800})\)\s{0,9}(?i:values)\s{0,9}"
)
_COPY = re.compile(r"(?i)copy\s{1,4}[^\0\s(]{1,120}\s?\(([^\0()]{1,800})\)\s{1,4}from\s{1,4}stdin[^\0\n]{0,80}\n")
_VALUE = r"(?:\\*'((?:[^\0'\\\n]|''|\\[^\0'\n]){0,400}+)\\*'|[^\0'(),]{0,200}(?:\([^\0'()]{0,80}\))?)\s{0,9}"
_ARGUMENT = re.compile(_VALUE)
_NEXT_ROW = re.compile(r"\s{0,9},\s{0,9}(?=\()")
_Columns = Sequence[tuple[int, Strength, bool]]  # which, what its name says, whether another one says for whom


def table_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Every secret that stands under a name. `lower` is the text, one byte a character, lower-cased."""
    for word in _WORDS:
        if word in active:
            yield from _tables(text, lower, word)
    if INSERT in active:
        yield from _inserts(text, lower)
    if COPY in active:
        for match in _COPY.finditer(text):
            heading = "\t".join(name.strip(' "') for name in match[1].split(","))
            if columns := _secret_columns(heading, "\t"):
                yield from _rows(text, match.end(), heading, "\t", columns)[0]


def _tables(text: str, lower: bytes, word: bytes) -> Iterator[Span]:
    at = lower.find(word)
    while at >= 0:
        begin = text.rfind("\n", max(0, at - _LONGEST_HEADING), at) + 1
        end = text.find("\n", at)
        if end < 0:
            return  # no row below
        done = end
        ruled = word not in _COMMON or text[end + 1 : end + 2] in _RULE_STARTS or text.find(",", begin, end) >= 0
        sign = _separator(text[begin:end]) if ruled and end - begin <= _LONGEST_HEADING else None
        if word in _COMMON and not (sign and (sign == "," or _RULE.match(text, end + 1))):
            sign = None
        columns = _secret_columns(text[begin:end], sign) if sign is not None else ()
        if columns:
            spans, done = _rows(text, end + 1, text[begin:end], sign or "", columns)
            yield from spans
        at = lower.find(word, max(done, end))


def _separator(heading: str) -> str:
    return next((sign for sign in "|\t,;\u2502" if sign in heading), "")


def _cut(row: str, sign: str, heading: str) -> list[str]:
    """The cells of a row: between bars or signs, where a value may have one itself, or under aligned words."""
    if sign in _BARS:
        bars = [index for index, character in enumerate(heading) if character == sign]
        if all(row[index : index + 1] == sign for index in bars):
            return [row[begin:end] for begin, end in zip([0, *(bar + 1 for bar in bars)], [*bars, None], strict=True)]
        return row.split(sign)
    if sign:
        return [match[1] for match in _CELLS[sign].finditer(row)]
    starts = [match.start() for match in _ALIGNED.finditer(heading)]
    return [row[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _secret_columns(heading: str, sign: str) -> _Columns:
    """Which columns hold secrets; none when the line is no heading: code and prose have other signs in them."""
    if _NO_HEADING.search(heading):  # most lines with such a word are code, and need not be cut
        return ()
    cells = _cut(heading, sign, heading)
    if not 2 <= len(cells) <= _MOST_COLUMNS:
        return ()
    names = [_HEADING.fullmatch(cell) for cell in cells]
    outer = (0, len(cells) - 1) if sign in _BARS else ()  # what stands outside the outer bars
    if any(name is None and (index not in outer or cells[index].strip()) for index, name in enumerate(names)):
        return ()
    labels = [name[1].strip() if name else "" for name in names]
    whom = any(map(_FOR_WHOM.fullmatch, labels))
    if not sign and not whom:
        return ()
    strengths = [(index, name_strength(name)) for index, name in enumerate(labels)]
    whom = whom and (sign != "" or heading.isupper())
    return [(index, strength, whom) for index, strength in strengths if strength >= Strength.TOKEN]


def _rows(text: str, begin: int, heading: str, sign: str, columns: _Columns) -> tuple[list[Span], int]:
    """Secrets of the rows that have as many cells as the heading, and where the table ends."""
    width = len(_cut(heading, sign, heading))
    spans: list[Span] = []
    while begin < len(text):
        newline = text.find("\n", begin, begin + _LONGEST_ROW)
        end = newline if newline >= 0 else min(len(text), begin + _LONGEST_ROW)
        row = text[begin:end]
        rule = sign in _BARS and _RULE.fullmatch(row) is not None  # with `+` where the columns meet
        cells = _cut(row, sign, heading)
        if (len(cells) != width and not rule) or not row.strip() or "\0" in row:
            break
        if not rule:
            spans += _cells(row, begin, cells, columns)
        begin = end + 1
    return spans, begin - 1


def _cells(row: str, begin: int, cells: Sequence[str], columns: _Columns) -> Iterator[Span]:
    for index, strength, whom in columns:
        cell = cells[index].strip(" \t\r")
        value = cell[1:-1] if cell[:1] == cell[-1:] == '"' else cell.strip(_AROUND).partition("  ")[0]
        start = begin + row.find(value, sum(map(len, cells[:index])))
        if value and _is_secret(value, strength, whom):
            yield Span(start, start + len(value), _kind(strength))


def _is_secret(value: str, strength: Strength, whom: bool) -> bool:
    """`whom`: another column says whose it is; then a plain word is a password, too."""
    if is_generated(value) or (strength == Strength.PASSWORD and is_passphrase(value)):
        return PLACEHOLDER.search(value) is None
    if " " in value or not is_plausible(value, strength, True):
        return False
    if strength == Strength.PASSWORD:
        return is_strong(value) or is_unknown(value) or (whom and value.isalpha() and value.lower() not in _NO_CELL)
    return is_random_value(value) or _HEX.fullmatch(value) is not None


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


# Places that hold nothing but a secret, whatever it looks like: lines of known files, arguments of known calls.
#
# `places.txt` has one row a place: whole words of which one must occur, or `*` for the words that the pattern itself
# begins with, in `<...|...>`, and behind `&` more groups of words, or of signs with `_` for a blank; a flag, or `-`;
# the pattern, in which `@V` is the value, in quotes or bare. The flag `s` wants a value that no known word could be,
# because other things stand there, too; `r` and `d` take anything with a digit in it, signs and all; `p` several
# words. A row that begins with a number names calls: which of their arguments, counted from 0, is the secret.

_PLACES_VALUE = r"(?P<q>\\*[\"'])?(?P<value>(?(q)(?:(?!(?P=q))[^\0\n]){3,200}|[^\0\s\"'`\\;|&<>]{3,200}))"
_LITERAL = r"(?:Some\(|SecretStr\()?[bBrRuUNL@]{0,2}#?(?P<q>\\*[\"'`])(?P<value>(?:(?!(?P=q))[^\0\n]){3,200})(?P=q)"
_TEXT = r"\\*\"[^\0\"\n]{0,200}\"|\\*'[^\0'\n]{0,200}'"
_PLACES_ARGUMENT = (
    rf"(?:{_TEXT}|[^\0,()\"'\n]{{1,80}}(?:\([^\0()\n]{{0,60}}\))?)\s{{0,20}},\s{{0,40}}(?:\d{{1,6}}[→\t]\s{{0,40}})?"
)
_REFERENCE = re.compile(r"\$\{?\w+\}?$|\$\(|\{|<|%s|\*{3}|your|pass(?:word)?$|PASSWORD$|redacted|-\w|\.{3}|env:|file:")
_FEWEST_WORDS = 2
_BEGINNING = re.compile(r"[\w =:-]+(?![?*+{])")  # of a pattern: what it begins with, up to what may be repeated
# Of these a call gets other texts, too.
_COMMON_CALLS = frozenset(("connect", "Basic", "create_user", "AUTHENTICATE", "login_user", "FTP"))


@dataclass(frozen=True, eq=False, slots=True)
class _Gate:
    """What a text must have besides for any place of a row: of each group of words one, and one of the signs."""

    also: tuple[frozenset[bytes], ...]
    signs: tuple[str, ...]

    def lacks(self, active: Set[bytes]) -> bool:
        return any(map(active.isdisjoint, self.also))

    def has_sign(self, text: str) -> bool:
        return not self.signs or any(map(text.__contains__, self.signs))


@dataclass(frozen=True, eq=False, slots=True)
class _SecretPlace:
    flags: str
    needs: frozenset[bytes]  # words that must all occur
    gate: _Gate
    head: str  # what the pattern begins with, or nothing: most texts with the words of a place do not have it
    pattern: re.Pattern[str]


_NO_GATE = _Gate((), ())


def _places() -> dict[bytes, list[_SecretPlace]]:
    slots_by_word: dict[bytes, list[_SecretPlace]] = {}

    def add(words: Sequence[bytes], slot: _SecretPlace) -> None:
        for word in words:
            slots_by_word.setdefault(word, []).append(slot)

    rows = Path(__file__).with_name("places.txt").read_text(encoding="utf-8").splitlines()
    for row in rows:
        if row[0].isdigit():
            continue
        words, flags, pattern = row.split(maxsplit=2)
        first, *groups = [group.split("|") for group in words.split("&")]
        also = tuple(frozenset(map(str.encode, group)) for group in groups if "".join(group).isalpha())
        signs = tuple(mark.replace("_", " ") for group in groups if not "".join(group).isalpha() for mark in group)
        gate = _Gate(also, signs) if also or signs else _NO_GATE
        heads, _, rest = pattern[1:].partition(">") if pattern[0] == "<" else ("", "", pattern)
        for head in heads.split("|"):
            # A literal, and no part of a longer word.
            whole = f"{head}(?<![A-Za-z0-9]{head})" if head[:1].isalnum() else head
            compiled = re.compile((whole + rest).replace("@V", _PLACES_VALUE))
            here = _words_of(head) if first == ["*"] else list(map(str.encode, first))
            needs = frozenset(here) if first == ["*"] else frozenset()
            literal = _BEGINNING.match(head or pattern)
            add(here[:1] if needs else here, _SecretPlace(flags, needs, gate, literal[0] if literal else "", compiled))
    for row in rows:
        if not row[0].isdigit():
            continue
        index, *names = row.split()
        for name in names:
            last = re.split(r"\W+", name)[-1]
            call = r"\(\s{0,40}(?:\d{1,6}[→\t]\s{0,40})?"
            compiled = re.compile(re.escape(name) + call + _PLACES_ARGUMENT * int(index) + _LITERAL)
            here = _words_of(name)
            add(
                here[:1], _SecretPlace("s" if last in _COMMON_CALLS else "c", frozenset(here), _NO_GATE, name, compiled)
            )
    return slots_by_word


def _words_of(head: str) -> list[bytes]:
    """The words that a text has where a literal stands in it, the longest first: all of them have to be there."""
    words = sorted(set(re.findall("[a-z]+", head.lower())), key=lambda word: (-len(word), word))
    return [word.encode() for word in words]


_PLACES = _places()
WHOLE_WORDS: frozenset[bytes] = frozenset(_PLACES)
ALSO: frozenset[bytes] = frozenset(
    word for slots in _PLACES.values() for slot in slots for group in (slot.needs, *slot.gate.also) for word in group
)


def place_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Every secret in a place for one. `active`: the whole words that occur."""
    here = sorted(active & WHOLE_WORDS)
    likely = [
        slot
        for word in here
        for slot in _PLACES[word]
        if slot.needs <= active and not (slot.gate.also and slot.gate.lacks(active))
    ]
    heads = {head for head in {slot.head for slot in likely} if head in text}
    if not heads:
        return
    passed = {_NO_GATE: True}  # the places of a row have one gate, and a sign is looked for in all of the text
    for slot in dict.fromkeys(likely):
        if slot.head not in heads:
            continue
        gate = slot.gate
        if gate not in passed:
            passed[gate] = gate.has_sign(text)
        if not passed[gate]:
            continue
        for match in slot.pattern.finditer(text):
            if _is_secret_argument(match["value"], slot.flags):
                yield Span(*match.span("value"), "PASSWORD")


def _is_secret_argument(value: str, flags: str) -> bool:
    if PLACEHOLDER.search(value):
        return False
    if flags in "rd":
        return has_digit(value)
    if flags == "p":
        return len(value.split()) > _FEWEST_WORDS and value.replace(" ", "").isalpha()
    if _REFERENCE.match(value) or is_no_secret(value) or not is_plausible(value, Strength.PASSWORD, True):
        return False
    if flags == "c":
        return " " not in value
    return flags != "s" or is_strong(value) or is_unknown(value)
