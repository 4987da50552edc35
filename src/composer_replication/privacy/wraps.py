"""Values broken by the end of a line: by a newline, a terminal, an indent, the sign of a diff, a number, a backslash.

Only around line ends where a long word stands on one side is the text joined; what is found there counts when it crosses
such an end. Everything else has been found in the text itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from composer_replication.privacy.entropy import HEX_KIND, KIND, is_public_id, is_wordy, names_a_secret
from composer_replication.privacy.rules import Span, has_digit
from composer_replication.privacy.views import View

_Edit = tuple[int, int, str]
_CHAR = r"[A-Za-z0-9+/=_.~$!@#%^&*:?-]"
_LONG = _CHAR + "{10}"
# What a reader or a diff writes before a line.
_PREFIX = r"[ \t]{{0,60}}(?:\d{{1,6}}[→:|\t][ \t]{{0,40}})?(?P<sign{n}>[+>│|-](?=[ \t]{{0,60}}[^\0\s>|])[ \t]{{0,60}})?"
# It starts with the newline: that is what makes the search fast.
_JOINT = re.compile(
    rf"\n(?:(?:(?<={_LONG}\n)|(?<={_LONG}[\\\r]\n)){_PREFIX.format(n=1)}(?={_CHAR})|(?:(?<={_CHAR}\n)|(?<={_CHAR}[\\\r]\n)){_PREFIX.format(n=2)}(?={_LONG}))"
)
_LEFT = re.compile(r"[^\0\s\"'`,;(){}\[\]<>|]{1,200}")
_LEFT_BACK = re.compile(r"[^\0\s\"'`,;(){}\[\]<>|]{0,200}")
_WORDS = re.compile(
    r"(?:[./_=~$+:@#-]*+(?:[A-Z]?[a-z]{1,20}+(?:[A-Z][a-z]{1,20}+)*+|[A-Z]{1,20}+|[0-9]{1,6}+)(?=[./_=~$+:@#!?-]|$))++[./_=~$+:@#!?-]*+"
)
_LEAD, _REACH = 300, 240  # around a joint
_APART = "\n\0\n"
_MOST_JOINTS = 4000
# `NAME=value` and `name: value` begin something new.
_NEW_LINE = re.compile(r"[A-Za-z_][\w.-]{1,60}(?:=(?!=?\Z)|:)")
_WRAPPED_DATA = 57  # lines of base64 at least as long on both sides are those of a file
_SECRET_LINE = 160


def joined(text: str) -> View | None:
    """What stands around broken words, without the breaks and without the rest of the text; None when there is none."""
    edits: list[_Edit] = []
    done = 0
    for start, end in _joints(text):
        if start >= done or not edits:
            begin = max(done, text.rfind("\n", max(0, start - _LEAD), start) + 1, start - _LEAD)
            edits.append((done, begin, _APART))
        elif edits:
            edits.pop()
        newline = text.find("\n", end, end + _REACH)
        done = newline if newline >= 0 else min(len(text), end + _REACH)
        edits += [(start, end, ""), (done, len(text), _APART)]
        if len(edits) > _MOST_JOINTS:
            break
    return View(text, edits) if edits else None


def _joints(text: str) -> Iterator[tuple[int, int]]:
    for match in _JOINT.finditer(text):
        newline, end = match.span()
        start = newline - (text[newline - 1] in "\\\r")
        line = text.rfind("\n", max(0, start - _LEAD), start) + 1
        sign = match["sign1"] or match["sign2"] or ""
        if sign == "-" and not text.startswith("-", line):  # no line of a diff: it belongs to the value
            end -= 1
        back = _LEFT_BACK.match(text[max(0, start - 200) : start][::-1])
        left = text[start - (back.end() if back else 0) : start]
        ahead = _LEFT.match(text, end)
        right = ahead[0] if ahead else ""
        if _may_be_one(left, right) and (
            not (_WORDS.fullmatch(left) and _WORDS.fullmatch(right)) or ":" in left or names_a_secret(text[line:start])
        ):
            yield start, end


def _may_be_one(left: str, right: str) -> bool:
    """Whether two pieces could be one broken value: not two words, two paths or two statements."""
    if not (has_digit(left) or has_digit(right)) and not (_is_mixed(left) or _is_mixed(right)):
        return False
    return not (_NEW_LINE.match(right) or is_public_id(left) or is_public_id(right))


def _is_mixed(piece: str) -> bool:
    return len(piece) >= 10 and piece.isascii() and not _WORDS.fullmatch(piece)


def crossing(text: str, spans: Iterable[Span]) -> Iterator[Span]:
    """Of what was found in the joined text, led back: what crosses a line end and is no listing."""
    for span in spans:
        value = text[span.start : span.end]
        newline = value.find("\n")
        if newline < 0:
            continue
        if span.kind in (KIND, HEX_KIND) and not _is_one(text, span, value[:newline].rstrip("\\\r"), value[newline:]):
            continue
        yield span


def _is_one(text: str, span: Span, left: str, rest: str) -> bool:
    """Random characters over two lines with nothing that names them: one value, or two of a list, or a file."""
    right = rest.strip("\n\r\t +>-|│")
    if names_a_secret(text[max(0, span.start - _SECRET_LINE) : span.start]):
        return True
    if span.kind == HEX_KIND or is_wordy(left) or is_wordy(right):
        return False
    return min(len(left), len(right)) < _WRAPPED_DATA and not (_WORDS.fullmatch(left) or _WORDS.fullmatch(right))
