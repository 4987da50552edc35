"""Find secrets under a table heading and in slots, places that are known to contain a secret.

The first half reads tables: CSV, tab-separated, Markdown and aligned tables, and the columns in SQL INSERT or COPY
statements. Every line is read once, either as a heading because it has a key word, or as a row of the table above it.

The second half reads `places.txt`, the list of slots that contain only a secret, such as lines in known files and
arguments of known calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from composer_replication.privacy.plausible import (
    is_generated,
    is_no_secret,
    is_passphrase,
    is_plausible,
    is_random_value,
    is_unknown,
)
from composer_replication.privacy.rules import PLACEHOLDER, Span, has_digit, is_strong, word_set
from composer_replication.privacy.secret_names import Strength, name_strength

INSERT, COPY = b"insert", b"copy"
_WORDS = (b"pass", b"pwd", b"secret", b"token", b"key", b"senha", b"contrase")
# Words that are common in other lines, too: they count only in CSV or above a ruler.
_COMMON_WORDS = frozenset((b"token", b"key"))
_MAX_HEADING_CHARS = 400
_MAX_ROW_CHARS = 4000
_MAX_COLUMNS = 40
# A cell in a heading: ` **DB password** ` -> `DB password`; not `x = 1`.
_HEADING = re.compile(r"[ \t]*\\*[\"'`*]{0,3}([A-Za-z][\w .-]{0,40})\\*[\"'`*]{0,3}[ \t\r]*")
# Signs that do not occur in headings: `f(x)`, `a=b`; not `User, Password`.
_NO_HEADING = re.compile(r"[(){}\[\]=<>:/$@#%+?!&^~]")
# `|---|:---:|`, `+----+`; not `| a |`.
_RULER = re.compile(r"[\s|:+\u2500-\u257f-]+")
_RULER_STARTS = frozenset("|-+ \u251c\u2502\u2560")
# Cells separated by at least two blanks: `user name   password` -> `user name`.
_ALIGNED = re.compile(r"[^\0\s](?:[^\0\s]| (?! ))*+")
# `Username`, `e-mail`; not `password`.
_OWNER_HEADING = re.compile(r"(?i)user(?:name)?|login|e-?mail|account|host|server|service|name|benutzer|usuario|system")
_NO_CELL = word_set("yes no true false none null required optional string text hidden varchar never always")
# `0123456789ab`; not `012345678901`.
_HEX_KEY = re.compile(r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,64}")
_CELL_PADDING = " \t\r\"'`*"  # around the value in a cell
_BARS = ("|", "\u2502")
# A cell up to the next separator: in `ada,"a ""quoted"" cell, with a comma",x` the second cell is in quotes.
_CELLS = {
    sign: re.compile(
        rf'(?:\A|(?<={sign}))([ ]?"(?:[^\0"]|"")*+"(?=[ \r]*(?:{sign}|\Z))|[^\0{sign}]*+)(?={sign}|[ \r]*\Z)'
    )
    for sign in "\t,;"
}
# `INSERT INTO users (name, password) VALUES ` -> `name, password`.
_INSERT = re.compile(
    r"(?i:insert\s{1,9}(?:ignore\s{1,9})?into\s{1,9})[^\0\s(]{1,120}\s{0,9}\(([^\0()]{1,800})\)\s{0,9}(?i:values)\s{0,9}"
)
# `COPY users (name, password) FROM stdin;\n` -> `name, password`.
_COPY = re.compile(r"(?i)copy\s{1,4}[^\0\s(]{1,120}\s?\(([^\0()]{1,800})\)\s{1,4}from\s{1,4}stdin[^\0\n]{0,80}\n")
_SQL_VALUE = r"(?:\\*'((?:[^\0'\\\n]|''|\\[^\0'\n]){0,400}+)\\*'|[^\0'(),]{0,200}(?:\([^\0'()]{0,80}\))?)\s{0,9}"
# `'it''s', 2` -> `it''s`, `now(), 2` -> `now()`.
_ARGUMENT = re.compile(_SQL_VALUE)
# `, ('bob', 'x')` -> `, `.
_NEXT_ROW = re.compile(r"\s{0,9},\s{0,9}(?=\()")
_Columns = Sequence[
    tuple[int, Strength, bool]
]  # index, strength of the name, whether another column identifies the owner


def table_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Yield every secret in the columns of a table whose heading names a secret. `lower` is the lower-cased text
    encoded in Latin-1, with one byte per character.
    """
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
        begin = text.rfind("\n", max(0, at - _MAX_HEADING_CHARS), at) + 1
        end = text.find("\n", at)
        if end < 0:
            return  # no row below
        done = end
        ruled = word not in _COMMON_WORDS or text[end + 1 : end + 2] in _RULER_STARTS or text.find(",", begin, end) >= 0
        sign = _separator(text[begin:end]) if ruled and end - begin <= _MAX_HEADING_CHARS else None
        if word in _COMMON_WORDS and not (sign and (sign == "," or _RULER.match(text, end + 1))):
            sign = None
        columns = _secret_columns(text[begin:end], sign) if sign is not None else ()
        if columns:
            spans, done = _rows(text, end + 1, text[begin:end], sign or "", columns)
            yield from spans
        at = lower.find(word, max(done, end))


def _separator(heading: str) -> str:
    return next((sign for sign in "|\t,;\u2502" if sign in heading), "")


def _split_row(row: str, sign: str, heading: str) -> list[str]:
    """Split a row into cells at bars or other separators, or at the columns of an aligned heading.

    A value may contain a bar, so if the row has bars wherever the heading has them, other bars do not count.
    """
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
    """Return the columns that hold secrets; there are none if the line is code or prose rather than a heading."""
    if _NO_HEADING.search(heading):  # most lines with a key word are code
        return ()
    cells = _split_row(heading, sign, heading)
    if not 2 <= len(cells) <= _MAX_COLUMNS:
        return ()
    names = [_HEADING.fullmatch(cell) for cell in cells]
    outer = (0, len(cells) - 1) if sign in _BARS else ()  # before the first bar and after the last
    if any(name is None and (index not in outer or cells[index].strip()) for index, name in enumerate(names)):
        return ()
    labels = [name[1].strip() if name else "" for name in names]
    has_owner = any(map(_OWNER_HEADING.fullmatch, labels))
    if not sign and not has_owner:
        return ()
    strengths = [(index, name_strength(name)) for index, name in enumerate(labels)]
    has_owner = has_owner and (sign != "" or heading.isupper())
    return [(index, strength, has_owner) for index, strength in strengths if strength >= Strength.TOKEN]


def _rows(text: str, begin: int, heading: str, sign: str, columns: _Columns) -> tuple[list[Span], int]:
    """Return the secrets in the rows below a heading, and the end of the table. The table ends at the first row with
    another number of cells.
    """
    width = len(_split_row(heading, sign, heading))
    spans: list[Span] = []
    while begin < len(text):
        newline = text.find("\n", begin, begin + _MAX_ROW_CHARS)
        end = newline if newline >= 0 else min(len(text), begin + _MAX_ROW_CHARS)
        row = text[begin:end]
        rule = sign in _BARS and _RULER.fullmatch(row) is not None  # with `+` at the corners
        cells = _split_row(row, sign, heading)
        if (len(cells) != width and not rule) or not row.strip() or "\0" in row:
            break
        if not rule:
            spans += _cells(row, begin, cells, columns)
        begin = end + 1
    return spans, begin - 1


def _cells(row: str, begin: int, cells: Sequence[str], columns: _Columns) -> Iterator[Span]:
    for index, strength, has_owner in columns:
        cell = cells[index].strip(" \t\r")
        value = cell[1:-1] if cell[:1] == cell[-1:] == '"' else cell.strip(_CELL_PADDING).partition("  ")[0]
        start = begin + row.find(value, sum(map(len, cells[:index])))
        if value and _is_secret_cell(value, strength, has_owner):
            yield Span(start, start + len(value), _kind(strength))


def _is_secret_cell(value: str, strength: Strength, has_owner: bool) -> bool:
    """Return whether a cell holds a secret. A plain word counts as a password only if another column identifies the
    owner.
    """
    if is_generated(value) or (strength == Strength.PASSWORD and is_passphrase(value)):
        return PLACEHOLDER.search(value) is None
    if " " in value or not is_plausible(value, strength, True):
        return False
    if strength == Strength.PASSWORD:
        return (
            is_strong(value) or is_unknown(value) or (has_owner and value.isalpha() and value.lower() not in _NO_CELL)
        )
    return is_random_value(value) or _HEX_KEY.fullmatch(value) is not None


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
    """Return the secrets in one row of values in brackets, as in SQL, and the end of the row."""
    spans: list[Span] = []
    for index in range(_MAX_COLUMNS):
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


# A row in `places.txt` has the form: words, flag, pattern.
#
# Words: whole words of which one must occur, or `*` for the words at the beginning of the pattern, in `<...|...>`. More
# groups may follow after `&`: words, or signs with `_` for a blank, and one from each group must occur.
# Flag: `-` none; `s` only a value that cannot be a known word; `r` and `d` anything with a digit; `p` several words.
# Pattern: `@V` is the value, in quotes or bare.
# A row that begins with a number lists calls; the number is the index of the secret argument.

_SLOT_VALUE = r"(?P<q>\\*[\"'])?(?P<value>(?(q)(?:(?!(?P=q))[^\0\n]){3,200}|[^\0\s\"'`\\;|&<>]{3,200}))"
_LITERAL_ARGUMENT = (
    r"(?:Some\(|SecretStr\()?[bBrRuUNL@]{0,2}#?(?P<q>\\*[\"'`])(?P<value>(?:(?!(?P=q))[^\0\n]){3,200})(?P=q)"
)
_STRING_ARGUMENT = r"\\*\"[^\0\"\n]{0,200}\"|\\*'[^\0'\n]{0,200}'"
_EARLIER_ARGUMENT = (
    rf"(?:{_STRING_ARGUMENT}|[^\0,()\"'\n]{{1,80}}(?:\([^\0()\n]{{0,60}}\))?)\s{{0,20}},\s{{0,40}}"
    r"(?:\d{1,6}[→\t]\s{0,40})?"
)
# `$TOKEN`, `{{ token }}`, `your-token`, `env:TOKEN`, `-p`; not `hunter2`.
_NO_SLOT_VALUE = re.compile(
    r"\$\{?\w+\}?$|\$\(|\{|<|%s|\*{3}|your|pass(?:word)?$|PASSWORD$|redacted|-\w|\.{3}|env:|file:"
)
_TOO_FEW_WORDS = 2
# The beginning of a pattern, up to the first repetition: `Key Content[ \t]` -> `Key Content`.
_LITERAL_START = re.compile(r"[\w =:-]+(?![?*+{])")
# Calls that accept other strings, too, so only strong values count.
_COMMON_CALLS = frozenset(("connect", "Basic", "create_user", "AUTHENTICATE", "login_user", "FTP"))


@dataclass(frozen=True, eq=False, slots=True)
class _SlotCondition:
    """What a text must contain for any slot in a row of `places.txt`: at least one word of each group, and at least
    one of the signs.
    """

    also: tuple[frozenset[bytes], ...]
    signs: tuple[str, ...]

    def lacks(self, active: Set[bytes]) -> bool:
        return any(map(active.isdisjoint, self.also))

    def has_sign(self, text: str) -> bool:
        return not self.signs or any(map(text.__contains__, self.signs))


@dataclass(frozen=True, eq=False, slots=True)
class _Slot:
    """A place that contains only a secret: a row in `places.txt`, or one of the row's alternative beginnings."""

    flags: str
    needs: frozenset[bytes]  # words that must all occur
    gate: _SlotCondition
    head: str  # literal start of the pattern, or "": a cheap test that most texts fail
    pattern: re.Pattern[str]


_NO_CONDITION = _SlotCondition((), ())


def _read_slots() -> dict[bytes, list[_Slot]]:
    slots_by_word: dict[bytes, list[_Slot]] = {}

    def add(words: Sequence[bytes], slot: _Slot) -> None:
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
        gate = _SlotCondition(also, signs) if also or signs else _NO_CONDITION
        heads, _, rest = pattern[1:].partition(">") if pattern[0] == "<" else ("", "", pattern)
        for head in heads.split("|"):
            # The lookbehind prevents `password` from matching inside a longer word, such as `dbpassword`.
            whole = f"{head}(?<![A-Za-z0-9]{head})" if head[:1].isalnum() else head
            # The row with `<rocommunity|...>` finds the value in `rocommunity hunter2`.
            compiled = re.compile((whole + rest).replace("@V", _SLOT_VALUE))
            here = _words_of(head) if first == ["*"] else list(map(str.encode, first))
            needs = frozenset(here) if first == ["*"] else frozenset()
            literal = _LITERAL_START.match(head or pattern)
            add(here[:1] if needs else here, _Slot(flags, needs, gate, literal[0] if literal else "", compiled))
    for row in rows:
        if not row[0].isdigit():
            continue
        index, *names = row.split()
        for name in names:
            last = re.split(r"\W+", name)[-1]
            call = r"\(\s{0,40}(?:\d{1,6}[→\t]\s{0,40})?"
            # The second argument in `login_user("ada", "hunter2")` for a row "1 login_user".
            compiled = re.compile(re.escape(name) + call + _EARLIER_ARGUMENT * int(index) + _LITERAL_ARGUMENT)
            here = _words_of(name)
            add(here[:1], _Slot("s" if last in _COMMON_CALLS else "c", frozenset(here), _NO_CONDITION, name, compiled))
    return slots_by_word


def _words_of(head: str) -> list[bytes]:
    """Return the words in a literal, longest first. Every text that contains the literal contains all of these
    words.
    """
    words = sorted(set(re.findall("[a-z]+", head.lower())), key=lambda word: (-len(word), word))
    return [word.encode() for word in words]


_SLOTS_BY_WORD = _read_slots()
WHOLE_WORDS: frozenset[bytes] = frozenset(_SLOTS_BY_WORD)
GATE_WORDS: frozenset[bytes] = frozenset(
    word
    for slots in _SLOTS_BY_WORD.values()
    for slot in slots
    for group in (slot.needs, *slot.gate.also)
    for word in group
)


def slot_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Yield every secret in a slot of `places.txt`. `active` has the words that occur in the text."""
    here = sorted(active & WHOLE_WORDS)
    likely = [
        slot
        for word in here
        for slot in _SLOTS_BY_WORD[word]
        if slot.needs <= active and not (slot.gate.also and slot.gate.lacks(active))
    ]
    heads = {head for head in {slot.head for slot in likely} if head in text}
    if not heads:
        return
    passed = {_NO_CONDITION: True}  # slots from the same row share a gate, whose signs are searched for once
    for slot in dict.fromkeys(likely):
        if slot.head not in heads:
            continue
        gate = slot.gate
        if gate not in passed:
            passed[gate] = gate.has_sign(text)
        if not passed[gate]:
            continue
        for match in slot.pattern.finditer(text):
            if _is_slot_secret(match["value"], slot.flags):
                yield Span(*match.span("value"), "PASSWORD")


def _is_slot_secret(value: str, flags: str) -> bool:
    if PLACEHOLDER.search(value):
        return False
    if flags in "rd":
        return has_digit(value)
    if flags == "p":
        return len(value.split()) > _TOO_FEW_WORDS and value.replace(" ", "").isalpha()
    if _NO_SLOT_VALUE.match(value) or is_no_secret(value) or not is_plausible(value, Strength.PASSWORD, True):
        return False
    if flags == "c":
        return " " not in value
    return flags != "s" or is_strong(value) or is_unknown(value)
