"""Passwords that stand near a word for one, whatever stands between them: on its line, or on the three lines below it.

What is between a name and its value differs with every program and language. So here only the value's own shape counts:
words with a number and signs among them, words that nobody knows, or random characters; never a name of code, a path, a
version, a date or an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from functools import lru_cache

from composer_replication.privacy.named.plausible import trimmed
from composer_replication.privacy.rules import Span
from composer_replication.privacy.shapes.human import is_shaped, is_unfamiliar

# What a word for a password has in it.
_STEMS = (
    b"pass",
    b"pwd",
    b"pw",
    b"psk",
    b"secret",
    b"cred",
    b"auth",
    b"login",
    b"assword",
    b"vpn",
    b"benutzer",
    b"typed",
    b"logging",
    b"keystore",
)
_FOR_PASSWORDS = frozenset((b"pass", b"pwd", b"pw", b"psk", b"login", b"assword"))
WHOLE_WORDS = frozenset((b"login", b"pw", b"assword", b"vpn", b"benutzer", b"keystore"))
_ACTIVE = frozenset(form for word in _STEMS for form in (word, word + b" "))
_OTHER_WORD = re.compile(rb"pass[abd-oq-vxz]|secretar|credit|credib|author(?!iz)|pw[a-ce-z]")
_NO_PASSWORD = re.compile(rb"\n[ \t]*pass\n\Z|(?:by|com|sur|tres|com)pass.?\Z")  # a statement, and other words
# A word with a digit or a sign in it.
_SIGNS = r"\w.!@#$%^&*?~+-"
_TOKEN = re.compile(rf"(?<![{_SIGNS}])[^\W\d_]*+[\d_.!@#$%^&*?~+-][{_SIGNS}]*+")
_CHARACTER = re.compile(rf"[{_SIGNS}]")
_COLOUR_END = re.compile(r"\d{1,2}m(?<=\x1b\[\dm|\[\d\dm)")
_OF_ID = re.compile(r"(?i)(?:id|user(?:name)?)\\*[\"']?\s?[:=]?\s?\\*[\"']?\Z")  # `"_id":"`, `user "`
_BEFORE = frozenset("/\\")
_BEHIND = frozenset("/([@")
_SHORTEST, _LONGEST = 8, 40
_REACH = 160  # before and behind a word on its line
_BELOW = 200
_LINES_BELOW = 3
_TRAILING = ".,;:!?)*_\"'`"
_Window = tuple[int, int, bool]  # from, to, and whether the word is one for passwords alone


def nearby_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Every shaped word near a word for a password."""
    if active.isdisjoint(_ACTIVE):
        return
    done = 0
    words = [word for word in _STEMS if word in active or word + b" " in active]
    for at, end, wordy in sorted(window for word in words for window in _windows(text, lower, word)):
        if end > done:
            yield from _shaped(text, max(at, done), end, wordy)
            done = end


def near(text: str, at: int, end: int) -> Iterator[Span]:
    """Shaped words near a word for a password that stands from `at` to `end`."""
    yield from _shaped(text, *_window(text, at, end), True)


def _windows(text: str, lower: bytes, word: bytes) -> Iterator[_Window]:
    at = lower.find(word)
    while at >= 0:
        end = at + len(word)
        if not _OTHER_WORD.match(lower, at) and not (
            word == b"pass" and _NO_PASSWORD.search(lower, max(0, at - 40), end + 1)
        ):
            begin, stop = _window(text, at, end)
            yield begin, stop, word in _FOR_PASSWORDS
            newline = text.find("\n", end, end + _REACH)
            end = newline if newline >= 0 else end + _REACH
        at = lower.find(word, end)


def _window(text: str, at: int, end: int) -> tuple[int, int]:
    """The line of a word and the lines below it."""
    begin = max(text.rfind("\n", max(0, at - _REACH), at) + 1, at - _REACH, 0)
    newline = text.find("\n", end, end + _REACH)
    stop = newline if newline >= 0 else min(len(text), end + _REACH)
    for _ in range(_LINES_BELOW if newline >= 0 else 0):
        following = text.find("\n", stop + 1, stop + _BELOW)
        stop = following if following >= 0 else min(len(text), stop + _BELOW)
        if following < 0:
            break
    border = text.find("\0", end, stop)
    return begin, border if border >= 0 else stop


def _shaped(text: str, begin: int, end: int, wordy: bool) -> Iterator[Span]:
    for token in _TOKEN.finditer(text, begin, end):
        start, stop = token.span()
        if colour := _COLOUR_END.match(text, start):
            start = colour.end()
        elif text.startswith("-p", start):
            start += 2
        if not _SHORTEST <= stop - start <= _LONGEST or text[stop : stop + 1] in _BEHIND:
            continue
        if text[start - 1 : start] in _BEFORE or (stop == end and _CHARACTER.match(text, stop)):
            continue
        if _OF_ID.search(text, max(0, start - 24), start):
            continue
        value = trimmed(text[start:stop], _TRAILING)
        if _looks(value, wordy):
            yield Span(start, start + len(value), "PASSWORD")


@lru_cache(maxsize=1 << 12)
def _looks(value: str, wordy: bool) -> bool:
    """Whether a word is a password by its looks; a session repeats its words."""
    return is_shaped(value) or (wordy and is_unfamiliar(value))
