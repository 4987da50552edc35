"""Passwords that stand near a word for one, whatever stands between them: on its line, or on the three lines below it.

What is between a name and its value differs with every program and language. So here only the value's own shape counts:
words with a number and signs among them, words with digits for letters, or random characters; never a name of code, a
path, a version, a date or an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from composer_replication.privacy.named.plausible import trimmed
from composer_replication.privacy.rules import Span
from composer_replication.privacy.shapes.human import is_shaped

# What a word for a password has in it.
_STEMS = (b"pass", b"pwd", b"pw", b"secret", b"cred", b"auth", b"psk")
# Words of their own, which speak of something that has a password.
_BESIDE = (b"login", b"assword", b"mysqli", b"wifi", b"wlan", b"eap", b"tacacs", b"radius", b"snmp", b"rocommunity",
           b"createuser", b"sendline", b"luks", b"vpn", b"pwgen", b"keystore", b"chap", b"ldap", b"kinit")  # fmt: skip
_WORDS = (*_STEMS, *_BESIDE)
WHOLE_WORDS = frozenset((*_BESIDE, b"pw"))
_OTHER_WORD = re.compile(rb"pass[abd-oq-vxz]|secretar|credit|credib|author(?!iz)|pw[a-ce-z]")
# Where a digit meets a letter or a sign: plain numbers and plain words have no such place.
_SEAM = re.compile(r"[A-Za-z_.!#$%^&*?~+-]\d|\d[A-Za-z_~!#$%^&*?+]")
_CHARACTERS = re.compile(r"[\w.!@#$%^&*?~+-]*+")
_COLOUR_END = re.compile(r"\d{1,2}m(?<=\x1b\[\dm|\[\d\dm)")
_BEFORE = frozenset("/\\")
_BEHIND = frozenset("/([@")
_SHORTEST, _LONGEST = 8, 40
_SLASHED = re.compile(r" / (?<=[\w.] / )(?P<value>[\w.!@#$%^&*?~+-]{8,40})[ \t\r]*(?![^\0\n])")
_REACH = 160  # before and behind a word on its line
_BELOW = 200
_LINES_BELOW = 3
_TRAILING = ".,;:!?)*_\"'`"


def nearby_spans(text: str, lower: bytes, active: Set[bytes]) -> Iterator[Span]:
    """Every shaped word near a word for a password."""
    if active.isdisjoint(_ACTIVE):
        return
    done = 0
    for at, end in sorted(
        window for word in _WORDS if word in active or word + b" " in active for window in _windows(text, lower, word)
    ):
        if end > done:
            yield from _shaped(text, max(at, done), end)
            done = end


def slashed_spans(text: str) -> Iterator[Span]:
    """`ada / ...` at the end of a line, as lists of logins have it."""
    if " / " in text:
        for match in _SLASHED.finditer(text):
            if is_shaped(match["value"]):
                yield Span(*match.span("value"), "USER_PASSWORD")


_ACTIVE = frozenset(form for word in _WORDS for form in (word, word + b" "))


def _windows(text: str, lower: bytes, word: bytes) -> Iterator[tuple[int, int]]:
    at = lower.find(word)
    while at >= 0:
        end = at + len(word)
        if not _OTHER_WORD.match(lower, at):
            yield _window(text, at, end)
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
    return begin, stop


def near(text: str, at: int, end: int) -> Iterator[Span]:
    """Shaped words near a word for a password that stands from `at` to `end`."""
    yield from _shaped(text, *_window(text, at, end))


def _shaped(text: str, begin: int, end: int) -> Iterator[Span]:
    while seam := _SEAM.search(text, begin, end):
        lead = _CHARACTERS.match(text[max(begin, seam.start() - _LONGEST) : seam.start()][::-1])
        start = seam.start() - (lead.end() if lead else 0)
        token = _CHARACTERS.match(text, start)
        lead_start = start  # before it stands no such character, or the word is too long
        begin = max(seam.end(), token.end() if token else 0)
        if colour := _COLOUR_END.match(text, start):
            start = colour.end()
        elif text.startswith("-p", start):
            start += 2
        if not _SHORTEST <= begin - start <= _LONGEST or text[begin : begin + 1] in _BEHIND:
            continue
        if text[start - 1 : start] in _BEFORE or _CHARACTERS.fullmatch(text[lead_start - 1 : lead_start] or " "):
            continue
        value = trimmed(text[start:begin], _TRAILING)
        if is_shaped(value):
            yield Span(start, start + len(value), "PASSWORD")
