"""Values broken by the end of a line: by a newline, a terminal, an indent, the sign of a diff, a number, a backslash.

Around such an end the text is joined and looked at once more. An end is taken for a break only for a reason: odd
characters on one side of it, a name or an option that stands before it without its value, a word for a secret that is
cut in two, or an address whose password goes on. Line ends in texts that are JSON are two characters, and count too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set

from composer_replication.privacy.entropy import HEX_KIND, KIND, is_public_id, is_wordy, names_a_secret
from composer_replication.privacy.fragments import broken_words
from composer_replication.privacy.rules import Span, is_strong
from composer_replication.privacy.views import View

_Edit = tuple[int, int, str]
Joint = tuple[int, int]  # from the last character before a line end to the first one behind it
_CHAR = rb"[A-Za-z0-9+/=_.~$!@#%^&*:?-]"
# What a reader or a diff writes before a line. An arrow is one byte here, and an unknown one.
_PREFIX = rb"[ \t\r\\`]*+(?:\d{1,6}[?\t|:][ \t]*+)?+(?P<sign>[+>|-][ \t]*+)?+"
# Letters and digits mixed, or capitals where no word has them.
_MIXED = (
    rb"(?=[A-Za-z]{0,14}[0-9])(?=[0-9]{0,8}[A-Za-z])|(?=" + _CHAR + rb"{0,6}(?:[a-z][A-Z]{2}|[a-z][A-Z][a-z][A-Z]))"
)


def _odd_end(mark: bytes) -> re.Pattern[bytes]:
    """A line end with odd characters on one side of it. It starts with the end: that is what makes the search fast."""
    digits = b"|".join(rb"(?<=[0-9]%b{%d}%b)" % (_CHAR, distance, mark) for distance in range(13))
    long = rb"(?<=%b{9}%b)" % (_CHAR, mark)
    return re.compile(
        rb"%b(?<=%b%b)(?:(?P<left>%b(?:%b))%b(?=%b)|%b(?=%b{6})(?:%b))"
        % (mark, _CHAR, mark, long, digits, _PREFIX.replace(b"sign", b"sign1"), _CHAR, _PREFIX, _CHAR, _MIXED)
    )


_REAL, _WRITTEN = rb"\n", rb"\\n"
_ODD_ENDS = ((b"\n", "\n", _odd_end(_REAL)), (b"\\n", "\\n", _odd_end(_WRITTEN)))
# The same characters in another order: the sign of a continued line, or half of an end, goes behind the end.
_REORDERED = ((b"\r\n", b"\n\r"), (b"`\n", b"\n`"), (b"\\\\n", b"\\n\\"))
_AFTER_END = re.compile(r"(?:\r?\n|\\{1,2}n)[ \t`]*(?:\d{1,6}[→:|\t][ \t]*)?(?P<sign>[+>│|-][ \t]*)?")
_LINE_START = re.compile(r"(?:\n|\\n)[ \t+>|\"']*\Z")
_PIECE = re.compile(r"[^\0\s\"'`,;(){}\[\]<>|]{1,200}")
_ODD = re.compile(r"[0-9]|[a-z][A-Z]{2}|[a-z][A-Z][a-z][A-Z]|[A-Z]{2}[a-z][A-Z]")
_WORDS = re.compile(
    r"(?:[./_=~$+:@#-]*+(?:[A-Z]?[a-z]{1,20}+(?:[A-Z][a-z]{1,20}+)*+|[A-Z]{1,20}+|[0-9]{1,6}+)(?=[./_=~$+:@#!?-]|$))++[./_=~$+:@#!?-]*+"
)
# `NAME=value` and `name: value` begin something new.
_NEW_LINE = re.compile(r"[A-Za-z_][\w.-]{1,60}(?:=(?!=?\Z)|:)|\*\*|//|#|\.\.|\+\+|--|\d{1,6}(?:→|[.)]\Z)|/\w+/")
_STATEMENT = re.compile(r"[A-Za-z_][\w.-]{1,60}\s?[=:]")
_DATA = re.compile(r"(?:[A-Za-z0-9+/]{57,}+(?:\r?\n|\\n)[ \t]*+)++[A-Za-z0-9+/=]*+")  # the lines of a file in base64
_LOGIN = re.compile(
    r"://[^\0\s/@\"'`<>\\]{0,100}(?P<end>\r?\n|\\n)[ \t+>|]{0,40}[^\0\s/\"'`<>\\]{0,100}(?:\n[ \t+>|]{0,40}[^\0\s/\"'`<>\\]{1,100}){0,3}@"
)
_LEAD, _REACH = 300, 240  # around a joint
_MOST_LINES = 8  # of one width, on each side of a joint
_NARROWEST = 20  # no terminal is narrower
_APART = "\n\0\n"
_MOST_JOINTS = 2000
_WRAPPED_DATA = 57  # lines of base64 at least as long on both sides are those of a file
_SECRET_LINE = 160


def broken(
    text: str, flat: bytes, lower: bytes, active: Set[bytes], open_names: Iterable[int]
) -> tuple[View, bool] | None:
    """What stands around broken words, without the breaks and without the rest of the text; None when there is none.

    `open_names`: where names and options end that have a line end where their value is. The second part says whether
    a name was broken: then a value counts that does not itself cross a line end.
    """
    named = {*_open(text, open_names), *broken_words(lower, active), *_logins(text)}
    odd = set(_odd(text, flat))
    if not named and not odd:
        return None
    joints = sorted({joint for each in named | odd for joint in _chain(text, each)})[:_MOST_JOINTS]
    return View(text, _edits(text, joints)), bool(named)


def _edits(text: str, joints: list[Joint]) -> list[_Edit]:
    edits: list[_Edit] = []
    done = 0
    for start, end in joints:
        if start > done or not edits:
            begin = max(done, text.rfind("\n", max(0, start - _LEAD), start) + 1, start - _LEAD)
            edits.append((done, begin, _APART))
        else:
            edits.pop()
        newline = text.find("\n", end, end + _REACH)
        done = newline if newline >= 0 else min(len(text), end + _REACH)
        edits += [(start, end, ""), (done, len(text), _APART)]
    return edits


def _odd(text: str, flat: bytes) -> Iterator[Joint]:
    for mark, written, pattern in _ODD_ENDS:
        if mark not in flat:
            continue
        ordered = flat
        for old, new in _REORDERED:
            if old in ordered:
                ordered = ordered.replace(old, new)
        joined = skip = 0  # where the last joint ends; up to where a file goes on
        for match in pattern.finditer(ordered):
            start = match.start()
            line = _line_start(text, start, written)
            end = _without_sign(text, line, match)
            if start < skip:
                continue
            if joined != line and (data := _DATA.match(text, line)) and data.end() > end + _WRAPPED_DATA:
                if not names_a_secret(text[max(0, line - 80) : line].rstrip()):
                    skip = data.end()
                    continue
            if _may_be_one(text, line, start, end):
                joined = end
                yield start, end


def _line_start(text: str, start: int, mark: str) -> int:
    return max(text.rfind(mark, max(0, start - _LEAD), start) + len(mark), start - _LEAD, 0)


def _without_sign(text: str, line: int, match: re.Match[bytes]) -> int:
    """Where the next line begins: the sign of a diff or a quotation is left out where the line before has it too."""
    at = max(match.start("sign"), match.start("sign1"))
    return match.end() if at < 0 or _has_sign(text, line, text[at]) else at


def _has_sign(text: str, line: int, sign: str) -> bool:
    """Whether lines before have the same sign in front of them."""
    return (
        text.startswith(sign, line) or text.startswith(sign) or text.find("\n" + sign, max(0, line - _LEAD), line) >= 0
    )


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


def _open(text: str, names: Iterable[int]) -> Iterator[Joint]:
    """The line ends behind names and options that have no value, or half of one, on their line."""
    for name in names:
        newline, written = text.find("\n", name, name + _REACH), text.find("\\n", name, name + _REACH)
        at = min(newline, written) if newline >= 0 and written >= 0 else max(newline, written)
        if at < 0 or not (joint := _joint_at(text, at)):
            continue
        if not text[name:at].strip("\"'`\\\r]) \t") or not _STATEMENT.match(text, joint[1]):  # the name itself goes on
            yield joint


def _joint_at(text: str, at: int) -> Joint | None:
    match = _AFTER_END.match(text, at)
    if match is None:
        return None
    start = at - (len(signs) - len(signs.rstrip("\\\r`")) if (signs := text[max(0, at - 4) : at]) else 0)
    sign = match.start("sign")
    line = _line_start(text, start, "\\n" if text[at] == "\\" else "\n")
    end = match.end() if sign < 0 or _has_sign(text, line, text[sign]) else sign
    indent = len(text[at:end]) - len(text[at:end].rstrip(" "))
    end -= indent % 2  # a blank of the text itself stands behind the line end
    return (start, end) if text[end : end + 1] not in ("", "\0", "\n") else None


def _logins(text: str) -> Iterator[Joint]:
    for match in _LOGIN.finditer(text) if "://" in text and "@" in text else ():
        if joint := _joint_at(text, match.start("end")):
            yield joint


def _chain(text: str, joint: Joint) -> Iterator[Joint]:
    """A joint, and those around it where a terminal broke its lines: all of one width."""
    yield joint
    start, end = joint
    mark = "\\n" if text.startswith("\\n", start) else "\n"
    line = _line_start(text, start, mark)
    width = start - line
    if width < _NARROWEST or width >= _LEAD:
        return
    first = end
    for _ in range(_MOST_LINES):
        if not text.startswith(mark, first + width) or text.find("\n", first, first + width) >= 0:
            break
        yield first + width, first + width + len(mark)
        first += width + len(mark)
    for _ in range(_MOST_LINES):
        before = line - len(mark)
        if before <= 0 or not text.startswith(mark, before):
            break
        begin = _line_start(text, before, mark)
        if before - begin != width and not (mark == "\\n" and before - begin > width):
            break
        yield before, line
        line = begin


def crossing(text: str, spans: Iterable[Span], named: bool) -> Iterator[Span]:
    """Of what was found in the joined text, led back: what crosses a line end and is no listing.

    Where a name was broken, what stands behind it counts, too.
    """
    for span in spans:
        value = text[span.start : span.end]
        ends = [at for mark in ("\n", "\\n") if (at := value.find(mark)) >= 0]
        random = span.kind in (KIND, HEX_KIND)
        if not ends:
            if named and not random and _is_told(text, span):
                yield span
        elif not random or _is_one(text, span, value[: min(ends)].rstrip("\\\r"), value[min(ends) :]):
            yield span


def _is_told(text: str, span: Span) -> bool:
    """Whether a value that stands first on its line, behind a name on the line before, is none of the words that do."""
    first = _LINE_START.search(text, max(0, span.start - 40), span.start)
    return not first or text[span.end : span.end + 1] in ("'", '"') or is_strong(text[span.start : span.end])


def _is_one(text: str, span: Span, left: str, rest: str) -> bool:
    """Random characters over two lines with nothing that names them: one value, or two of a list, or a file."""
    right = rest.removeprefix("\\n").strip("\n\r\t +>-|│")
    if names_a_secret(text[max(0, span.start - _SECRET_LINE) : span.start]):
        return True
    if span.kind == HEX_KIND or is_wordy(left) or is_wordy(right):
        return False
    return min(len(left), len(right)) < _WRAPPED_DATA and not (_WORDS.fullmatch(left) or _WORDS.fullmatch(right))
