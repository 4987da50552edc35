"""Places that hold nothing but a secret, whatever it looks like: lines of known files, arguments of known calls.

`places.txt` has one row a place: whole words of which one must occur, or `*` for the words that the pattern itself
begins with, in `<...|...>`, and behind `&` more groups of words, or of signs with `_` for a blank; a flag, or `-`; the
pattern, in which `@V` is the value, in quotes or bare. The flag `s` wants a value that no known word could be, because
other things stand there, too; `r` and `d` take anything with a digit in it, signs and all; `p` several words. A row
that begins with a number names calls: which of their arguments, counted from 0, is the secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from composer_replication.privacy.named.names import Strength
from composer_replication.privacy.named.plausible import is_no_secret, is_plausible, is_unknown
from composer_replication.privacy.rules import PLACEHOLDER, Span, has_digit, is_strong

_VALUE = r"(?P<q>\\*[\"'])?(?P<value>(?(q)(?:(?!(?P=q))[^\0\n]){3,200}|[^\0\s\"'`\\;|&<>]{3,200}))"
_LITERAL = r"(?:Some\(|SecretStr\()?[bBrRuUNL@]{0,2}#?(?P<q>\\*[\"'`])(?P<value>(?:(?!(?P=q))[^\0\n]){3,200})(?P=q)"
_TEXT = r"\\*\"[^\0\"\n]{0,200}\"|\\*'[^\0'\n]{0,200}'"
_ARGUMENT = (
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
class _Place:
    flags: str
    needs: frozenset[bytes]  # words that must all occur
    gate: _Gate
    head: str  # what the pattern begins with, or nothing: most texts with the words of a place do not have it
    pattern: re.Pattern[str]


_NO_GATE = _Gate((), ())


def _places() -> dict[bytes, list[_Place]]:
    slots_by_word: dict[bytes, list[_Place]] = {}

    def add(words: Sequence[bytes], slot: _Place) -> None:
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
            compiled = re.compile((whole + rest).replace("@V", _VALUE))
            here = _words_of(head) if first == ["*"] else list(map(str.encode, first))
            needs = frozenset(here) if first == ["*"] else frozenset()
            literal = _BEGINNING.match(head or pattern)
            add(here[:1] if needs else here, _Place(flags, needs, gate, literal[0] if literal else "", compiled))
    for row in rows:
        if not row[0].isdigit():
            continue
        index, *names = row.split()
        for name in names:
            last = re.split(r"\W+", name)[-1]
            call = r"\(\s{0,40}(?:\d{1,6}[→\t]\s{0,40})?"
            compiled = re.compile(re.escape(name) + call + _ARGUMENT * int(index) + _LITERAL)
            here = _words_of(name)
            add(here[:1], _Place("s" if last in _COMMON_CALLS else "c", frozenset(here), _NO_GATE, name, compiled))
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
            if _is_secret(match["value"], slot.flags):
                yield Span(*match.span("value"), "PASSWORD")


def _is_secret(value: str, flags: str) -> bool:
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
