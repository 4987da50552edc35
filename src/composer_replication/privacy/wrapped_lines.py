"""Find values interrupted by a line end, possibly with an indent, a diff sign, a line number or a backslash.

The text around such a line end is joined and scanned again. Lines are joined only for a reason: a long suspicious run
next to the line end, a name or an option whose value is missing on its line, or an address whose password is on the
next line. In JSON text, a line end may be a two-character escape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set

from composer_replication.privacy.encodings import RewrittenText
from composer_replication.privacy.entropy import HEX_KIND, KIND, is_public_id, is_wordy
from composer_replication.privacy.public_values import mentions_secret
from composer_replication.privacy.rules import Span, is_strong, word_set
from composer_replication.privacy.secret_names import Strength, is_uncommon, is_word, name_strength

_Edit = tuple[int, int, str]
_Joint = tuple[int, int]  # from the end of a line to the first character of the next line
# Keys so short that their halves are not long runs. Triggers are lower-cased.
SHORT_KEYS = frozenset((b"akia", b"asia", b"glpat", b"ltai"))
# `AKIAQX81`, `glpat-zk39`; not `akia`.
_SHORT_KEY = re.compile(r"(?:AKIA|ASIA|LTAI|glpat-)[A-Za-z0-9_-]{0,30}")
_LINE_ENDS = ("\n", "\r\n", "\\\n", "`\n", "\\n", "\\\\n", "\\\\\\n")
# Line numbers and signs before a run: `\n  12→`, `\n+ `; not `\nx = `.
_LINE_START_BEFORE_RUN = re.compile(r"(?:\n|\\n)[ \t`]*(?:\d{1,6}[→:|\t][ \t]*)?[+>│|-]?[ \t]*\Z")
_LINE_END_STARTS = frozenset("\n\r\\`")
_NO_VALUE = frozenset(("", "\n", *"()[]{}<>,;|\"'"))
_NO_NAME = frozenset("#*/|<>({[")
_MAX_INDENT = 60
# A line end with the indent, number and sign of the next line: `\n  12→`, `\n+   `, `\\n  `; not `x`.
_AFTER_END = re.compile(r"(?:\r?\n|\\{1,2}n)[ \t`]*(?:\d{1,6}[→:|\t][ \t]*)?(?P<sign>[+>│|-][ \t]*)?")
# `zk39Qx81, next` -> `zk39Qx81`.
_WORD_PIECE = re.compile(r"[^\0\s\"'`,;(){}\[\]<>|]{1,200}")
# `": `, ` = `; not ` and`.
_SIGN = re.compile(r"[\])\"'`]{0,3}[ \t]{0,3}[:=\"'`]")
# An MD5, SHA-1 or SHA-256 hash: `0123456789abcdef0123456789abcdef`; not `0123456789abcdef`.
_DIGEST = re.compile(r"(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})")
# `a7`; not `--`.
_ALNUM = re.compile(r"[A-Za-z0-9]")
# A digit, or unusual capitals: `zk3`, `abCD`, `aBcD`; not `tokenStore`.
_ODD = re.compile(r"[0-9]|[a-z][A-Z]{2}|[a-z][A-Z][a-z][A-Z]|[A-Z]{2}[a-z][A-Z]")
# Words and small numbers between separators: `src/auth/token-store:12`, `2024-05`; not `zk39Qx81`.
_WORDS = re.compile(
    r"(?:[./_=~$+:@#-]*+(?:[A-Z]?[a-z]{1,20}+(?:[A-Z][a-z]{1,20}+)*+|[A-Z]{1,20}+|[0-9]{1,6}+)(?=[./_=~$+:@#!?-]|$))++[./_=~$+:@#!?-]*+"
)
# The beginning of a new statement, which cannot continue a value: `NAME=value`, `name: x`, `// note`, `2024-05-01`;
# not `zk39Qx81`.
_NEW_STATEMENT = re.compile(
    r"[A-Za-z_][\w.-]{1,60}(?:=(?!=?\Z)|:)|\*\*|//|#|\.\.|\+\+|--|\d{1,6}(?:→|[.)]\Z)|/\w+/|\d{4}[-/]\d\d[-/]\d\d"
)
# A statement or the date of a log line: `db_host = x` -> `db_host`, `[2024-05-01 12:00]`; not `zk39 x`.
_STATEMENT = re.compile(r"([A-Za-z_][\w.-]{1,60})\s?[=:]|\[?\d{4}[-/]\d\d[-/]\d\d")
# A file in base64, with lines of 57 characters or more, as in
# `QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWZnaGlqa2xtbm9wcXJzdHV2\nd3h5`.
_BASE64_LINES = re.compile(r"(?:[A-Za-z0-9+/]{57,}+(?:\r?\n|\\n)[ \t]*+)++[A-Za-z0-9+/=]*+")
# An address interrupted before its password: `postgres://ada:\n  hunter2@db` -> `\n`.
_LOGIN = re.compile(
    r"://[^\0\s/@\"'`<>\\]{0,100}(?P<end>\r?\n|\\n)[ \t+>|]{0,40}(?:\d{1,6}[→:|\t][ \t]{0,9})?[^\0\s/\"'`<>\\]{0,100}"
    r"(?:\n[ \t+>|]{0,40}[^\0\s/\"'`<>\\]{1,100}){0,3}@"
)
SCHEMES = frozenset(
    word.encode()
    for word in word_set("postgres postgresql mysql mongodb redis rediss amqp amqps mariadb mssql ftp smtp")
)
# An address interrupted before its user: `postgres:\n  //ada:hunter2@db` -> `\n`.
_SCHEME = re.compile(r"[a-z]:/?(?P<end>\r?\n|\\n)[ \t+>|]{0,40}/{1,2}[^\0\s/]")
_LEAD, _REACH = 300, 240  # characters that are read around a joint
_MAX_LINES = 8  # wrapped lines on each side of a joint
_MIN_WORD_CHARS = 5
_MIN_WIDTH = 20  # of a terminal
_MIN_VALUE_CHARS = 20  # for a value without a name
_BORDER = "\n\0\n"
_MAX_JOINTS = 2000
_FILE_LINE_CHARS = 57  # base64 with lines this long on both sides is a file


def _touches_end(text: str, end: int) -> bool:
    """Return whether a run touches a line end, so that it may be only half of a value."""
    return text[end : end + 1] in _LINE_END_STARTS and text.startswith(_LINE_ENDS, end)


def join_broken_lines(
    text: str,
    active: Set[bytes],
    runs: Sequence[tuple[int, str]],
    names: Sequence[int],
    calls: Sequence[int],
) -> tuple[RewrittenText, bool] | None:
    """Return the text around interrupted words, with their lines joined and all other text left out, and whether a name
    is interrupted; None if there is nothing to join.

    `runs` has long suspicious runs of key characters; `names` and `calls` have the ends of names and programs that are
    followed by a line end instead of their value. If a name is interrupted, even values that do not cross a line end
    themselves count.
    """
    named_ends = (
        {*_joints_after_names(text, names), *_joints_after_names(text, calls, words=True)} if names or calls else set()
    )
    if "@" in text:
        named_ends.update(_logins(text))
        if not active.isdisjoint(SCHEMES):
            named_ends.update(_schemes(text))
    ends = set(_line_ends_at_runs(text, runs)) if runs else set()
    if not active.isdisjoint(SHORT_KEYS):
        ends.update(_line_ends_after_short_keys(text))
    odd = set(_joints_in_values(text, ends)) if ends else set()
    if not named_ends and not odd:
        return None
    joints = sorted({joint for line_end in named_ends | odd for joint in _chain(text, line_end)})[:_MAX_JOINTS]
    return RewrittenText(text, _edits(text, joints)), bool(named_ends)


def _edits(text: str, joints: Iterable[_Joint]) -> list[_Edit]:
    edits: list[_Edit] = []
    done = 0
    last = 0
    for start, end in joints:
        if start < last:  # the same line end, found twice
            continue
        last = end
        if edits:
            edits.pop()  # the edit that dropped the text after the previous joint
        if start > done or not edits:
            begin = max(done, text.rfind("\n", max(0, start - _LEAD), start) + 1, start - _LEAD)
            edits.append((done, begin, _BORDER))
        newline = text.find("\n", end, end + _REACH)
        done = newline if newline >= 0 else min(len(text), end + _REACH)
        edits += [(start, end, ""), (done, len(text), _BORDER)]
    return edits


def _line_ends_at_runs(text: str, runs: Sequence[tuple[int, str]]) -> Iterator[int]:
    """Yield the line ends next to suspicious runs, if the text beyond the line end could belong to the same value."""
    for begin, run in runs:
        end = begin + len(run)
        if _touches_end(text, end):
            behind = end + 1 + (text[end] != "\n")
            if text[behind : behind + 1] not in _NO_VALUE:
                yield end
        lead = text[max(0, begin - _MAX_INDENT) : begin]
        bare = lead.rstrip(" \t`+>│|-0123456789→:")
        if bare.endswith(("\n", "\\n")):
            at = begin - len(lead) + len(bare) - 1 - (bare[-1] == "n")
            if text[at - 1 : at] not in _NO_VALUE and _LINE_START_BEFORE_RUN.match(text, at, begin):
                yield at


def _line_ends_after_short_keys(text: str) -> Iterator[int]:
    for match in _SHORT_KEY.finditer(text):
        if _touches_end(text, match.end()):
            yield match.end()


def _joints_in_values(text: str, ends: Set[int]) -> Iterator[_Joint]:
    """Yield the line ends at which a single value seems to be interrupted. The lines of base64 files are skipped."""
    joined = skip = 0  # end of the last joint; end of a base64 file
    for at in sorted(ends):
        joint = _joint_at(text, at) if at >= skip else None
        if joint is None:
            continue
        start, end = joint
        line = _line_start(text, start)
        data = _BASE64_LINES.match(text, line) if joined != line else None
        if (
            data
            and data.end() > end + _FILE_LINE_CHARS
            and not mentions_secret(text[max(0, line - 80) : line].rstrip())
        ):
            skip = data.end()
            continue
        if (data := _BASE64_LINES.match(text, end)) and not mentions_secret(text[line:start]):
            skip = data.end()
        elif _may_be_one_value(text, line, start, end):
            joined = end
            yield joint


def _line_start(text: str, start: int) -> int:
    """Return the start of the line that ends at position `start`. The line end before it may be a two-character JSON
    escape.
    """
    lead = max(0, start - _LEAD)
    newline = text.rfind("\n", lead, start) + 1
    written = text.rfind("\\n", lead, start) + 2 if text.startswith("\\", start) else 0
    return max(newline, written if written > 1 else 0, lead)


def _may_be_one_value(text: str, line: int, start: int, end: int) -> bool:
    """Return whether the text before and after a line end could be one value rather than two words, paths or
    statements.
    """
    ahead = _WORD_PIECE.match(text, end)
    if ahead is None or _NEW_STATEMENT.match(ahead[0]):
        return False
    back = _WORD_PIECE.match(text[max(line, start - 200) : start][::-1])
    if back is None:
        return False
    left_piece, right = back[0][::-1], ahead[0]
    if not (_ODD.search(left_piece) or _ODD.search(right)) or not _ALNUM.search(right) or not right.isascii():
        return False
    if _is_plain_word(left_piece) or _is_plain_word(right):
        return False
    if is_public_id(left_piece.rpartition("=")[2]) or is_public_id(right):
        return False
    if _DIGEST.fullmatch(left_piece) and right.isalpha():  # the next word in a list
        return False
    if _has_secret_name(text[line : start - len(left_piece)], left_piece):
        return True
    if _DIGEST.fullmatch(left_piece) or _DIGEST.fullmatch(right):
        return False
    both = len(left_piece) + len(right)
    return both >= _MIN_VALUE_CHARS and not (_WORDS.fullmatch(left_piece) and _WORDS.fullmatch(right))


def _is_plain_word(piece: str) -> bool:
    """Return whether a piece of text is a word of a language or of code, unlike random letters of the same length."""
    return len(piece) >= _MIN_WORD_CHARS and piece.isalpha() and (piece.islower() or piece.isupper()) and is_word(piece)


def _has_secret_name(lead: str, left_piece: str) -> bool:
    """Return whether a secret's name and a sign come before the first piece of an interrupted value."""
    name, sign, _ = left_piece.rpartition("=")
    if sign and mentions_secret(name):
        return True
    lead = lead.rstrip(" \t\"'`")
    return lead.endswith((":", "=")) and mentions_secret(lead)


def _joints_after_names(text: str, names: Sequence[int], *, words: bool = False) -> Iterator[_Joint]:
    """Yield the line ends after names whose value is missing or incomplete on the name's line.

    With `words`, `names` has the ends of program names, and more words may follow before the line end.
    """
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
            and not text[name - 1].isspace()  # a value after a word for "is"
            and not _SIGN.match(between)
            and text[text.rfind(" ", 0, name) + 1 : name][:1] != "-"
        ):
            continue  # more words after a name
        following = _STATEMENT.match(text, joint[1])
        if cut_name and text[joint[1] : joint[1] + 1] in _NO_NAME:
            continue
        if not following or (cut_name and following[1] and name_strength(following[1]) < Strength.TOKEN):
            yield joint


def _joint_at(text: str, at: int, *, blanks: bool = False) -> _Joint | None:
    """Return the bounds of the text to remove at the line end at `at` (a joint), or None at the end of the text.

    With `blanks`, the line end may also separate words.
    """
    while text.startswith(("\\\n", "\\\\", "`\n", "\r"), at):  # a continuation sign precedes the line end
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
        end -= indent % 2  # an odd number: one blank belongs to the text
    return (start, end) if text[end : end + 1] not in ("", "\0", "\n") else None


def _has_sign(text: str, line: int, sign: str) -> bool:
    """Return whether an earlier line begins with the same sign, as the lines of a diff do."""
    if text.startswith(sign, line) or text.startswith(sign):
        return True
    return text.find("\n" + sign, max(0, line - _LEAD), line) >= 0


def _logins(text: str) -> Iterator[_Joint]:
    for match in _LOGIN.finditer(text) if "@" in text else ():
        if joint := _joint_at(text, match.start("end")):
            yield joint


def _schemes(text: str) -> Iterator[_Joint]:
    for match in _SCHEME.finditer(text):
        if joint := _joint_at(text, match.start("end")):
            yield joint


def _chain(text: str, joint: _Joint) -> Iterator[_Joint]:
    """Yield a line end to join, and those before and after it if a terminal wrapped the lines at the same width."""
    yield joint
    start, end = joint
    mark = "\\n" if text.startswith("\\", start) else "\n"
    line = _line_start(text, start)
    width = start - line
    if width < _MIN_WIDTH or width >= _LEAD:
        return
    first = end
    for _ in range(_MAX_LINES):
        if not text.startswith(mark, first + width) or text.find("\n", first, first + width) >= 0:
            break
        yield first + width, first + width + len(mark)
        first += width + len(mark)
    for _ in range(_MAX_LINES):
        before = line - len(mark)
        if before <= 0 or not text.startswith(mark, before):
            break
        begin = _line_start(text, before)
        if before - begin != width and not (mark == "\\n" and before - begin > width):
            break
        yield before, line
        line = begin


# `\n  `, `\n+ "`; not `x = `.
_LINE_START = re.compile(r"(?:\n|\\n)[ \t+>|\"']*\Z")
# `sha 0123456789abcdef` -> `0123456789abcdef`.
_HEX_TAIL = re.compile(r"(?<![0-9a-z])[0-9a-f]{16,}$")
# `89ab cd` -> `89ab`; not `abxy`.
_HEX_HEAD = re.compile(r"[0-9a-f]+(?![A-Za-z])")
# ` = x`, `: x`; not ` == x`.
_ASSIGNED = re.compile(r"\s{0,3}(?:=(?!=)|:(?=\s|\Z))")
# `zk39\n  + Qx81` -> `\n  + `, `zk39\\nQx81` -> `\\n`.
_LINE_END = re.compile(r"\\*[\r\n]\s*[+>|-]?\s*|\\+n\s*")
_MAX_NAME_DISTANCE = 160


def spans_across_lines(text: str, spans: Iterable[Span], has_broken_name: bool) -> Iterator[Span]:
    """Yield the spans in joined text that cross a line end and are not lines of a listing.

    If a name was interrupted, spans after it count even if they do not cross a line end.
    """
    for span in spans:
        value = text[span.start : span.end]
        is_cut = "\n" in value and _ASSIGNED.match(text, span.end) is not None
        if is_cut:  # its last line is the name of another value
            value = value[: value.rfind("\n")].rstrip()
            span = Span(span.start, span.start + len(value), span.kind)
        if name_strength(value[value.rfind("\n") + 1 :].strip()) >= Strength.TOKEN and "\n" in value:  # the next name
            continue
        if any(_NEW_STATEMENT.match(line.strip()) for line in value.split("\n")[1:]):
            continue
        ends = [at for mark in ("\n", "\\n") if (at := value.find(mark)) >= 0]
        random = span.kind in (KIND, HEX_KIND, "KEY_VALUE")
        if not ends:
            if is_cut and not _LINE_START.search(text, max(0, span.start - 40), span.start):
                continue  # its name is on the same line, where the first scan rejected it
            if has_broken_name and not random and _is_stated(text, span):
                yield span
        elif (not random and not _is_two_words(value)) or (
            random and _is_one_random_value(text, span, value[: min(ends)].rstrip("\\\r"), value[min(ends) :])
        ):
            yield span


def _is_two_words(value: str) -> bool:
    """Return whether the joined value consists of two known words, which only look unknown when joined."""
    return not is_strong(value) and not any(map(is_uncommon, _LINE_END.split(value)))


def _is_stated(text: str, span: Span) -> bool:
    """Return whether a value whose name is on the previous line is not just an ordinary word at the start of its
    line.
    """
    first = _LINE_START.search(text, max(0, span.start - 40), span.start)
    return not first or text[span.end : span.end + 1] in ("'", '"') or is_strong(text[span.start : span.end])


def _is_one_random_value(text: str, span: Span, left_piece: str, rest: str) -> bool:
    """Return whether random characters on two lines are a single value rather than two list entries or part of a
    file.
    """
    right = rest.removeprefix("\\n").strip("\n\r\t +>-|│")
    if _HEX_TAIL.search(left_piece) and not _HEX_HEAD.match(right):  # a digest at the end of its line
        return False
    if mentions_secret(text[max(0, span.start - _MAX_NAME_DISTANCE) : span.start]):
        return True
    if span.kind == HEX_KIND or is_wordy(left_piece) or is_wordy(right):
        return False
    return min(len(left_piece), len(right)) < _FILE_LINE_CHARS and not (
        _WORDS.fullmatch(left_piece) or _WORDS.fullmatch(right)
    )
