"""Values broken by the end of a line: by a newline, a terminal, an indent, the sign of a diff, a number, a backslash.

Around such an end the text is joined and looked at once more. An end is taken for a break only for a reason: a long odd
run that touches it, a name or an option that stands before it without its value, or an address whose password
follows. Line ends in texts that are JSON are two characters, and count too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set

from composer_replication.privacy.encodings import RewrittenText
from composer_replication.privacy.entropy import (
    HEX_KIND,
    KIND,
    is_public_id,
    is_wordy,
)
from composer_replication.privacy.names import (
    Strength,
    is_uncommon,
    is_word,
    name_strength,
)
from composer_replication.privacy.rules import Span, is_strong, word_set
from composer_replication.privacy.surroundings import names_a_secret

_Edit = tuple[int, int, str]
Joint = tuple[int, int]  # from the last character before a line end to the first one behind it
# Keys so short that the halves of one are no long runs. The words are looked for in small letters, as all triggers.
SHORT_KEYS = frozenset((b"akia", b"asia", b"glpat", b"ltai"))
_SHORT_KEY = re.compile(r"(?:AKIA|ASIA|LTAI|glpat-)[A-Za-z0-9_-]{0,30}")
_LINE_ENDS = ("\n", "\r\n", "\\\n", "`\n", "\\n", "\\\\n", "\\\\\\n")
_LINE_BEFORE = re.compile(r"(?:\n|\\n)[ \t`]*(?:\d{1,6}[→:|\t][ \t]*)?[+>│|-]?[ \t]*\Z")
_FIRST_OF_END = frozenset("\n\r\\`")
_NO_VALUE = frozenset(("", "\n", *"()[]{}<>,;|\"'"))
_NO_NAME = frozenset("#*/|<>({[")
_INDENT = 60
_AFTER_END = re.compile(r"(?:\r?\n|\\{1,2}n)[ \t`]*(?:\d{1,6}[→:|\t][ \t]*)?(?P<sign>[+>│|-][ \t]*)?")
_PIECE = re.compile(r"[^\0\s\"'`,;(){}\[\]<>|]{1,200}")
_SIGN = re.compile(r"[\])\"'`]{0,3}[ \t]{0,3}[:=\"'`]")
DIGEST = re.compile(r"(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})")
_ALNUM = re.compile(r"[A-Za-z0-9]")
# A digit, or capitals where no word has them.
ODD = re.compile(r"[0-9]|[a-z][A-Z]{2}|[a-z][A-Z][a-z][A-Z]|[A-Z]{2}[a-z][A-Z]")
WORDS = re.compile(
    r"(?:[./_=~$+:@#-]*+(?:[A-Z]?[a-z]{1,20}+(?:[A-Z][a-z]{1,20}+)*+|[A-Z]{1,20}+|[0-9]{1,6}+)(?=[./_=~$+:@#!?-]|$))++[./_=~$+:@#!?-]*+"
)
# `NAME=value` and `name: value` begin something new.
NEW_LINE = re.compile(
    r"[A-Za-z_][\w.-]{1,60}(?:=(?!=?\Z)|:)|\*\*|//|#|\.\.|\+\+|--|\d{1,6}(?:→|[.)]\Z)|/\w+/|\d{4}[-/]\d\d[-/]\d\d"
)
_STATEMENT = re.compile(r"([A-Za-z_][\w.-]{1,60})\s?[=:]|\[?\d{4}[-/]\d\d[-/]\d\d")  # or the date of a log line
_DATA = re.compile(r"(?:[A-Za-z0-9+/]{57,}+(?:\r?\n|\\n)[ \t]*+)++[A-Za-z0-9+/=]*+")  # the lines of a file in base64
_LOGIN = re.compile(
    r"://[^\0\s/@\"'`<>\\]{0,100}(?P<end>\r?\n|\\n)[ \t+>|]{0,40}(?:\d{1,6}[→:|\t][ \t]{0,9})?[^\0\s/\"'`<>\\]{0,100}"
    r"(?:\n[ \t+>|]{0,40}[^\0\s/\"'`<>\\]{1,100}){0,3}@"
)
# An address that is cut before its user: `postgres:` and `//ada:...`.
SCHEMES = frozenset(
    word.encode()
    for word in word_set("postgres postgresql mysql mongodb redis rediss amqp amqps mariadb mssql ftp smtp")
)
_SCHEME = re.compile(r"[a-z]:/?(?P<end>\r?\n|\\n)[ \t+>|]{0,40}/{1,2}[^\0\s/]")
_LEAD, _REACH = 300, 240  # around a joint
_MOST_LINES = 8  # of one width, on each side of a joint
_SHORTEST_WORD = 5
_NARROWEST = 20  # no terminal is narrower
_SHORTEST = 20  # characters of a value that nothing names
_APART = "\n\0\n"
_MOST_JOINTS = 2000
WRAPPED_DATA = 57  # lines of base64 at least as long on both sides are those of a file


def touches_end(text: str, end: int) -> bool:
    """Whether a line ends where a run does: then the run alone does not tell what it is."""
    return text[end : end + 1] in _FIRST_OF_END and text.startswith(_LINE_ENDS, end)


def broken(
    text: str,
    active: Set[bytes],
    runs: Sequence[tuple[int, str]],
    names: Sequence[int],
    calls: Sequence[int],
) -> tuple[RewrittenText, bool] | None:
    """What stands around broken words, without the breaks and without the rest of the text; None when there is none.

    `runs`: long runs of key characters that are no words; `names` and `calls`: where names and programs end that have
    a line end where their value is. The second part says whether there is such a name: then a value counts that
    does not itself cross a line end.
    """
    named_ends = {*_open(text, names), *_open(text, calls, words=True)} if names or calls else set()
    if "@" in text:
        named_ends.update(_logins(text))
        if not active.isdisjoint(SCHEMES):
            named_ends.update(_schemes(text))
    ends = set(_beside_runs(text, runs)) if runs else set()
    if not active.isdisjoint(SHORT_KEYS):
        ends.update(_behind_short_keys(text))
    odd = set(_of_one_value(text, ends)) if ends else set()
    if not named_ends and not odd:
        return None
    joints = sorted({joint for line_end in named_ends | odd for joint in _chain(text, line_end)})[:_MOST_JOINTS]
    return RewrittenText(text, _edits(text, joints)), bool(named_ends)


def _edits(text: str, joints: Iterable[Joint]) -> list[_Edit]:
    edits: list[_Edit] = []
    done = 0
    last = 0
    for start, end in joints:
        if start < last:  # the same line end, read in two ways
            continue
        last = end
        if edits:
            edits.pop()  # the rest of the text, which does not end here
        if start > done or not edits:
            begin = max(done, text.rfind("\n", max(0, start - _LEAD), start) + 1, start - _LEAD)
            edits.append((done, begin, _APART))
        newline = text.find("\n", end, end + _REACH)
        done = newline if newline >= 0 else min(len(text), end + _REACH)
        edits += [(start, end, ""), (done, len(text), _APART)]
    return edits


def _beside_runs(text: str, runs: Sequence[tuple[int, str]]) -> Iterator[int]:
    """The line ends before and behind runs, where what stands on their other side could belong to a value."""
    for begin, run in runs:
        end = begin + len(run)
        if touches_end(text, end):
            behind = end + 1 + (text[end] != "\n")
            if text[behind : behind + 1] not in _NO_VALUE:
                yield end
        lead = text[max(0, begin - _INDENT) : begin]
        bare = lead.rstrip(" \t`+>│|-0123456789→:")
        if bare.endswith(("\n", "\\n")):
            at = begin - len(lead) + len(bare) - 1 - (bare[-1] == "n")
            if text[at - 1 : at] not in _NO_VALUE and _LINE_BEFORE.match(text, at, begin):
                yield at


def _behind_short_keys(text: str) -> Iterator[int]:
    for match in _SHORT_KEY.finditer(text):
        if touches_end(text, match.end()):
            yield match.end()


def _of_one_value(text: str, ends: Set[int]) -> Iterator[Joint]:
    """The line ends with odd characters around them that could be those of one value."""
    joined = skip = 0  # where the last joint ends; up to where a file in base64 goes on
    for at in sorted(ends):
        joint = _joint_at(text, at) if at >= skip else None
        if joint is None:
            continue
        start, end = joint
        line = _line_start(text, start)
        data = _DATA.match(text, line) if joined != line else None
        if data and data.end() > end + WRAPPED_DATA and not names_a_secret(text[max(0, line - 80) : line].rstrip()):
            skip = data.end()
            continue
        if (data := _DATA.match(text, end)) and not names_a_secret(text[line:start]):
            skip = data.end()
        elif _may_be_one(text, line, start, end):
            joined = end
            yield joint


def _line_start(text: str, start: int) -> int:
    """Where the line begins that ends at `start`; its end may be that of JSON, two characters."""
    lead = max(0, start - _LEAD)
    newline = text.rfind("\n", lead, start) + 1
    written = text.rfind("\\n", lead, start) + 2 if text.startswith("\\", start) else 0
    return max(newline, written if written > 1 else 0, lead)


def _may_be_one(text: str, line: int, start: int, end: int) -> bool:
    """Whether the pieces around a line end could be one broken value: not two words, two paths or two statements."""
    ahead = _PIECE.match(text, end)
    if ahead is None or NEW_LINE.match(ahead[0]):
        return False
    back = _PIECE.match(text[max(line, start - 200) : start][::-1])
    if back is None:
        return False
    left_piece, right = back[0][::-1], ahead[0]
    if not (ODD.search(left_piece) or ODD.search(right)) or not _ALNUM.search(right) or not right.isascii():
        return False
    if _is_plain_word(left_piece) or _is_plain_word(right):
        return False
    if is_public_id(left_piece.rpartition("=")[2]) or is_public_id(right):
        return False
    if DIGEST.fullmatch(left_piece) and right.isalpha():  # the next word of a list
        return False
    if _is_named(text[line : start - len(left_piece)], left_piece):
        return True
    if DIGEST.fullmatch(left_piece) or DIGEST.fullmatch(right):
        return False
    both = len(left_piece) + len(right)
    return both >= _SHORTEST and not (WORDS.fullmatch(left_piece) and WORDS.fullmatch(right))


def _is_plain_word(piece: str) -> bool:
    """Return whether a piece is a word of a language or of code: random letters as long are none."""
    return len(piece) >= _SHORTEST_WORD and piece.isalpha() and (piece.islower() or piece.isupper()) and is_word(piece)


def _is_named(lead: str, left_piece: str) -> bool:
    """Whether a secret's name stands before the first piece, with a sign between them."""
    name, sign, _ = left_piece.rpartition("=")
    if sign and names_a_secret(name):
        return True
    lead = lead.rstrip(" \t\"'`")
    return lead.endswith((":", "=")) and names_a_secret(lead)


def _open(text: str, names: Sequence[int], *, words: bool = False) -> Iterator[Joint]:
    """The line ends behind names that have no value, or half of one, on their line. `words`: behind programs."""
    for name in names:
        newline, written = text.find("\n", name, name + _REACH), text.find("\\n", name, name + _REACH)
        at = min(newline, written) if newline >= 0 and written >= 0 else max(newline, written)
        if at < 0 or not (joint := _joint_at(text, at, blanks=True)):
            continue
        between = text[name:at]
        cut_name = not between.strip("\"'`\\\r \t")
        if (
            not cut_name
            and not words
            and not text[name - 1].isspace()  # a value behind a word for `is`
            and not _SIGN.match(between)
            and text[text.rfind(" ", 0, name) + 1 : name][:1] != "-"
        ):
            continue  # words behind a name
        following = _STATEMENT.match(text, joint[1])
        if cut_name and text[joint[1] : joint[1] + 1] in _NO_NAME:
            continue
        if not following or (cut_name and following[1] and name_strength(following[1]) < Strength.TOKEN):
            yield joint


def _joint_at(text: str, at: int, *, blanks: bool = False) -> Joint | None:
    """The joint for the line end at `at`, or None where nothing follows. `blanks`: words may be parted by it, too."""
    while text.startswith(("\\\n", "\\\\", "`\n", "\r"), at):  # the sign of a continued line stands before the end
        at += 1
    match = _AFTER_END.match(text, at)
    if match is None:
        return None
    lead = text[max(0, at - 4) : at]
    start = at - (len(lead) - len(lead.rstrip("\\\r`")))
    sign = match.start("sign")
    end = match.end() if sign < 0 or _has_sign(text, _line_start(text, start), text[sign]) else sign
    if blanks:
        indent = len(text[at:end]) - len(text[at:end].rstrip(" "))
        end -= indent % 2  # a blank of the text itself stands behind the line end
    return (start, end) if text[end : end + 1] not in ("", "\0", "\n") else None


def _has_sign(text: str, line: int, sign: str) -> bool:
    """Whether lines before have the same sign in front of them."""
    if text.startswith(sign, line) or text.startswith(sign):
        return True
    return text.find("\n" + sign, max(0, line - _LEAD), line) >= 0


def _logins(text: str) -> Iterator[Joint]:
    for match in _LOGIN.finditer(text) if "@" in text else ():
        if joint := _joint_at(text, match.start("end")):
            yield joint


def _schemes(text: str) -> Iterator[Joint]:
    for match in _SCHEME.finditer(text):
        if joint := _joint_at(text, match.start("end")):
            yield joint


def _chain(text: str, joint: Joint) -> Iterator[Joint]:
    """A joint, and those around it where a terminal broke its lines: all of one width."""
    yield joint
    start, end = joint
    mark = "\\n" if text.startswith("\\", start) else "\n"
    line = _line_start(text, start)
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
        begin = _line_start(text, before)
        if before - begin != width and not (mark == "\\n" and before - begin > width):
            break
        yield before, line
        line = begin


# What was found over line ends: whether it is one value.
_LINE_START = re.compile(r"(?:\n|\\n)[ \t+>|\"']*\Z")
_HEX_TAIL = re.compile(r"(?<![0-9a-z])[0-9a-f]{16,}$")
_HEX_HEAD = re.compile(r"[0-9a-f]+(?![A-Za-z])")
_ASSIGNED = re.compile(r"\s{0,3}(?:=(?!=)|:(?=\s|\Z))")
_LINE_END = re.compile(r"\\*[\r\n]\s*[+>|-]?\s*|\\+n\s*")
_SECRET_LINE = 160


def crossing(text: str, spans: Iterable[Span], named: bool) -> Iterator[Span]:
    """Of what was found in the joined text, led back: what crosses a line end and is no listing.

    Where a name was broken, what stands behind it counts, too.
    """
    for span in spans:
        value = text[span.start : span.end]
        is_cut = "\n" in value and _ASSIGNED.match(text, span.end) is not None
        if is_cut:  # its last line is the name of something else
            value = value[: value.rfind("\n")].rstrip()
            span = Span(span.start, span.start + len(value), span.kind)
        if name_strength(value[value.rfind("\n") + 1 :].strip()) >= Strength.TOKEN and "\n" in value:  # the next name
            continue
        if any(NEW_LINE.match(line.strip()) for line in value.split("\n")[1:]):
            continue
        ends = [at for mark in ("\n", "\\n") if (at := value.find(mark)) >= 0]
        random = span.kind in (KIND, HEX_KIND, "KEY_VALUE")
        if not ends:
            if is_cut and not _LINE_START.search(text, max(0, span.start - 40), span.start):
                continue  # its name is on the same line, where it was judged
            if named and not random and _is_told(text, span):
                yield span
        elif (not random and not _is_words(value)) or (
            random and _is_one(text, span, value[: min(ends)].rstrip("\\\r"), value[min(ends) :])
        ):
            yield span


def _is_words(value: str) -> bool:
    """Whether two known words stand beside a line end, which joined are a word that nobody knows."""
    return not is_strong(value) and not any(map(is_uncommon, _LINE_END.split(value)))


def _is_told(text: str, span: Span) -> bool:
    """Whether a value that stands first on its line, behind a name on the line before, is none of the words that do."""
    first = _LINE_START.search(text, max(0, span.start - 40), span.start)
    return not first or text[span.end : span.end + 1] in ("'", '"') or is_strong(text[span.start : span.end])


def _is_one(text: str, span: Span, left_piece: str, rest: str) -> bool:
    """Random characters over two lines with nothing that names them: one value, or two of a list, or a file."""
    right = rest.removeprefix("\\n").strip("\n\r\t +>-|│")
    if _HEX_TAIL.search(left_piece) and not _HEX_HEAD.match(right):  # a digest that ends with its line
        return False
    if names_a_secret(text[max(0, span.start - _SECRET_LINE) : span.start]):
        return True
    if span.kind == HEX_KIND or is_wordy(left_piece) or is_wordy(right):
        return False
    return min(len(left_piece), len(right)) < WRAPPED_DATA and not (
        WORDS.fullmatch(left_piece) or WORDS.fullmatch(right)
    )
