"""Values broken by the end of a line: by a newline, a terminal, an indent, the sign of a diff, a number, a backslash.

Only around line ends where a long word stands on one side is the text joined; what is found there counts when it
crosses such an end. Everything else has been found in the text itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from composer_replication.privacy.entropy import HEX_KIND, KIND, is_public_id, is_wordy, names_a_secret
from composer_replication.privacy.rules import Span
from composer_replication.privacy.views import View

_Edit = tuple[int, int, str]
_CHAR = r"[A-Za-z0-9+/=_.~$!@#%^&*:?-]"
_LONG = _CHAR + "{10}"
# What a reader or a diff writes before a line.
_PREFIX = r"[ \t]{{0,60}}(?:\d{{1,6}}[→:|\t][ \t]{{0,40}})?(?P<sign{n}>[+>│|-](?=[ \t]{{0,60}}[^\0\s>|])[ \t]{{0,60}})?"
# It starts with the newline: that is what makes the search fast.
_JOINT = re.compile(
    rf"\n(?<=[A-Za-z0-9+/=_.~$!@#%^&*:?\\\r-]\n)(?:(?:(?<={_LONG}\n)|(?<={_LONG}[\\\r]\n)){_PREFIX.format(n=1)}(?={_CHAR})|(?:(?<={_CHAR}\n)|(?<={_CHAR}[\\\r]\n)){_PREFIX.format(n=2)}(?={_LONG}))"
)
_PIECE = re.compile(r"[^\0\s\"'`,;(){}\[\]<>|]{1,200}")
# A digit, or capitals where no word has them.
_ODD = re.compile(r"[0-9]|[a-z][A-Z]{2}|[a-z][A-Z][a-z][A-Z]|[A-Z]{2}[a-z][A-Z]")
_NEAR = 40
_DIGIT = re.compile("[0-9]")
_WORDS = re.compile(
    r"(?:[./_=~$+:@#-]*+(?:[A-Z]?[a-z]{1,20}+(?:[A-Z][a-z]{1,20}+)*+|[A-Z]{1,20}+|[0-9]{1,6}+)(?=[./_=~$+:@#!?-]|$))++[./_=~$+:@#!?-]*+"
)
_LEAD, _REACH = 300, 240  # around a joint
_APART = "\n\0\n"
_MOST_JOINTS = 4000
# `NAME=value` and `name: value` begin something new.
_NEW_LINE = re.compile(r"[A-Za-z_][\w.-]{1,60}(?:=(?!=?\Z)|:)|\*\*|//|#|\.\.|\+\+|--|\d{1,6}(?:→|[.)]\Z)|/\w+/")
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
        near = text[max(0, start - _NEAR) : start] + text[end : end + _NEAR]
        if not _DIGIT.search(near) and (near.islower() or not _ODD.search(near)):  # words, as everywhere
            continue
        line = text.rfind("\n", max(0, start - _LEAD), start) + 1
        sign = match["sign1"] or match["sign2"]
        if sign == "-" and not text.startswith("-", line):  # no line of a diff: it belongs to the value
            end -= 1
        if _may_be_one(text, line, start, end):
            yield start, end


def _may_be_one(text: str, line: int, start: int, end: int) -> bool:
    """Whether the pieces around a line end could be one broken value: not two words, two paths or two statements."""
    ahead = _PIECE.match(text, end)
    if ahead is None or _NEW_LINE.match(ahead[0]):
        return False
    back = _PIECE.match(text[max(line, start - 200) : start][::-1])
    if back is None:
        return False
    left, right = back[0][::-1], ahead[0]
    if not _ODD.search(left) and not _ODD.search(right):
        return False
    if is_public_id(left) or is_public_id(right):
        return False
    return (
        not (_WORDS.fullmatch(left) and _WORDS.fullmatch(right)) or ":" in left[:-1] or names_a_secret(text[line:start])
    )


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
