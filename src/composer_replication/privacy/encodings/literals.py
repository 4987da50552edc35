"""Values that a program puts together: string literals with an operator, a line end or a comment between them; and
scalars that YAML folds over lines.

Around such a joint the text is joined and looked at once more. A joint counts where no blank stands beside it, as in
the middle of a value and never in a sentence, and where the literals have odd characters or a name of a secret.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from composer_replication.privacy.encodings.views import View
from composer_replication.privacy.encodings.wraps import DIGEST, ODD
from composer_replication.privacy.rules import Span
from composer_replication.privacy.shapes.surroundings import names_a_secret

# In a text that is JSON, quotes, tabs and line ends are written with backslashes before them.
_BLANKS = rb"(?:[ \t]|\\{1,3}t|/\*[^*\n\0]{0,80}\*/)*+"
_BREAK = rb"(?:(?:\\{1,3}r)?+(?:\r?\n|\\{1,3}n))"
_SIGN = rb"(?:\d{1,6}[?:|\t][ \t]*+)?+(?:[+>|-](?=[ \t\"'`\\$\w]))?+"  # an arrow is a question mark in one byte
_END = rb"(?:(?:#|//|--)[^\n\0\\]{0,120}+)?+" + _BREAK + rb"[ \t]*+" + _SIGN + _BLANKS
_CONTINUED = rb"(?:(?:\\{1,4}|[`_])(?=" + _BREAK + rb"))"
_AGAIN = rb"[;]?+" + _END + rb"\$?+(?P<name>[A-Za-z_][\w.]{0,40}+)[ \t]*+(?:[+.&~]=|\|\|=|<<)[ \t]*+"
_OPERATORS = rb"\+{1,2}|\.{1,2}(?=[ \t\r\n\"'`\\])|&|<>|<<|\|\||~|\^|\}\$\{|\)?\.(?:append|concat|push_str|plus)\("
_PREFIX = rb"(?P<prefix>(?<=[ \t\n+])(?:[fFrRbBuUL]{1,2}|[@$]))?+"
# What may stand beside a joint: no blank, which ends a word of a sentence, and no bracket.
_INSIDE = rb"A-Za-z0-9!@#$%^&*_+./~=:?\x80-\xff-"


def _joints(quote: bytes, operators: bytes) -> re.Pattern[bytes]:
    """From the quote at the end of a literal to the one that opens the next.

    The quote comes first: a pattern that begins with one character is searched for fast.
    """
    ends = rb"(?:" + _END + rb"){0,3}+"
    written = rb"(?:\.\w{1,12}\(\)[ \t]*+)?+(?:" + operators + rb")" + _BLANKS + _CONTINUED + rb"?"
    gap = _BLANKS + ends + rb"(?:(?P<operator>" + written + rb"|" + _CONTINUED + rb")" + _BLANKS + ends + rb")?+"
    comma = b"," if operators.endswith(b",") else b""
    # What can follow the quote at all, directly or behind blanks: most quotes go no further.
    signs, pairs = rb"\r\n\\+.&~^" + comma + quote, rb"/[/*]|<[<>]|\|\||\)\.|\}\$"
    blanks = rb"[ \t]++(?:[" + signs + rb"#_`@$]|" + pairs + rb"|--|[fFrRbBuUL]{1,2}+[\\" + quote + rb"])"
    follows = rb"(?=[" + signs + rb";]|" + pairs + rb"|" + blanks + rb")"
    begin = quote + follows + rb"(?<=[" + _INSIDE + rb"\\]" + quote + rb")"
    end = rb"\\{0,3}" + quote + rb"(?=[" + _INSIDE + rb"])"
    return re.compile(begin + rb"(?:" + _AGAIN + rb"|" + gap + _PREFIX + rb")" + end)


_JOINTS = {quote: (_joints(quote, _OPERATORS), _joints(quote, _OPERATORS + rb"|,")) for quote in (b'"', b"'", b"`")}
WHOLE_WORDS = frozenset((b"concat", b"paste", b"join"))  # what puts the items of a list together
_CALLS = (b"oncat(", b"oncat!(", b"ONCAT(", b"paste0(", b"'.join(", b'".join(', b"join('", b'join("', b"join(\\")
_IN_LIST = re.compile(r"(?:[Cc]oncat!?|CONCAT|paste0|[Jj]oin)[^\0\w\n]{1,24}\Z")
_OF_LIST = re.compile(r"[^\0\n]{0,200}?\]\s{0,3}\.join\(\\{0,3}[\"'`]\\{0,3}[\"'`]\)")
_BEFORE_CHAIN = re.compile(r"(?:\n[ \t]*+\d{1,6}[→:|\t]|\n[+>|-]|\\{1,3}[nt]|\s)++\Z")
_OPENS = frozenset("=(:,+>[{&|<~^")
_LINE = r"(?:\r?\n|\\{1,3}n)[ \t]*+(?:\d{1,6}[→:|\t])?+[+>|-]?+"
_LEAD_CUT = re.compile(rf"(?:=>?|<-|:)(?P<cut>(?:(?!<-)[^\0=:#\n]){{0,60}}+(?:{_LINE}[ \t]*+)?+\\{{0,3}}+)\Z")
_WORD = r"[!-\[\]-~]{1,200}+"
_FOLDED = re.compile(
    r":[ \t]*+(?P<block>[>|][+-]?\d?[ \t]*+)?+(?P<first>(?:\r?\n|\\{1,3}n)(?:[ \t]*+\d{1,6}[→:|\t])?+[+>|-]?+"
    rf"(?P<indent>[ \t]{{1,40}}+))(?P<lines>{_WORD}"
    rf"(?:(?:\r?\n|\\{{1,3}}n)(?:[ \t]*+\d{{1,6}}[→:|\t])?+[+>|-]?+(?P=indent){_WORD}){{1,40}}+)(?=\r?\n|\\{{1,3}}n|\Z)"
)
_BLOCKS = (b": >", b": |")
_FOLDS = re.compile(rb":(?: [>|]|\r?\n|\\\\?n)")
_LINE_END = re.compile(rf"{_LINE}[ \t]*+")
_LEAD, _REACH, _LONGEST, _MOST_CHAINS = 160, 240, 400, 500
_APART = "\n\0\n"


class _Chain(NamedTuple):
    """Joints that follow each other, what is cut out besides, and from where to where the text around them is read."""

    begin: int
    end: int
    joints: list[tuple[int, int]]
    cut: tuple[int, int]


class PutTogether(NamedTuple):
    """A text in which literals and folded lines are joined, without what stands far from them."""

    view: View
    joints: list[tuple[int, int]]

    def touching(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Of what was found in the view: what lies across a joint, begins or ends at one, led back to the text."""
        starts = [start for start, _ in self.joints]
        for span in self.view.led_back(spans):
            last = bisect_right(starts, span.end) - 1
            if last >= 0 and span.start <= self.joints[last][1]:
                yield span


def put_together(text: str, flat: bytes, active: Set[bytes]) -> PutTogether | None:
    """What stands around joined literals and folded scalars; None when there are none. `flat`: a byte a character."""
    lists = not active.isdisjoint(WHOLE_WORDS) and any(word in flat for word in _CALLS)
    has_folds = _FOLDS.search(flat) is not None if active else any(mark in flat for mark in _BLOCKS)
    folded = _folded(text) if has_folds else ()
    chains = sorted([*_literals(text, flat, lists), *folded])[:_MOST_CHAINS]
    edits: list[tuple[int, int, str]] = []
    joints: list[tuple[int, int]] = []
    done = 0
    for chain in chains:
        if joints and chain.joints[0][0] < joints[-1][1]:  # the same lines, read in two ways
            continue
        begin = max(chain.begin, joints[-1][1] if joints else 0)
        edits.append((min(done, begin), begin, _APART))
        if chain.cut[0] >= begin:
            edits.append((*chain.cut, " "))
        edits += [(*joint, "") for joint in chain.joints]
        joints += chain.joints
        done = chain.end
    return PutTogether(View(text, [*edits, (done, len(text), _APART)]), joints) if joints else None


def _literals(text: str, flat: bytes, lists: bool) -> Iterator[_Chain]:
    for quote, patterns in _JOINTS.items():
        chain: list[tuple[int, int]] = []
        opened = last = 0
        for match in patterns[lists].finditer(flat) if quote in flat else ():
            start, end = match.span()
            start -= len(text[max(0, start - 3) : start]) - len(text[max(0, start - 3) : start].rstrip("\\"))
            begins = text.rfind(quote.decode(), max(0, start - _LONGEST), start) + 1
            goes_on = bool(chain) and begins == last
            if not goes_on and chain:
                yield _around(text, opened, chain)
                chain = []
            if _is_joint(text, match, begins, start, goes_on=goes_on):
                opened = opened if goes_on else begins - 1
                chain.append((start, end))
                last = end
        if chain:
            yield _around(text, opened, chain)


def _is_joint(text: str, match: re.Match[bytes], begins: int, start: int, *, goes_on: bool) -> bool:
    """Whether the two literals may be parts of one value: written without a blank between them, and not two words."""
    end = match.end()
    if not begins:
        return False
    lead = text[max(0, begins - 1 - _LEAD) : begins - 1].rstrip("\\")
    bare = _BEFORE_CHAIN.sub("", lead.rstrip("fFrRbBuUL@$"))
    if (match["operator"] or b"").startswith(b",") and not (
        goes_on or _IN_LIST.search(lead) or _OF_LIST.match(text, end)
    ):
        return False
    if match["name"] and match["name"].decode("latin-1") not in lead:
        return False
    if goes_on:
        return True
    # A backslash at the end of a line is three in JSON.
    is_written = match["operator"] or match["name"] or match["prefix"] or rb"\\\n" in match[0]
    if not is_written and (match[0][:1] == b"`" or bare[-1:] not in _OPENS):  # the lines of a list
        return False
    if names_a_secret(bare.rstrip("([{ =:")):
        return True
    left, right = text[begins:start].rpartition(" ")[2], text[end : end + _LONGEST].partition(text[end - 1])[0]
    is_odd = ODD.search(left + right.partition(" ")[0]) is not None
    return is_odd and not any(DIGEST.fullmatch(each.lower()) for each in (left, right))


def _around(text: str, opened: int, joints: list[tuple[int, int]]) -> _Chain:
    """From a line before the first literal to the end of the line of the last one; what stands between sign and literal
    is cut out: a bracket, a call, a line end."""
    end = joints[-1][1]
    newline = text.find("\n", end, end + _REACH)
    begin = max(0, opened - _LEAD)
    begin = (text.find("\n", begin, opened) + 1 or begin) if begin else 0
    cut = _LEAD_CUT.search(text, begin, opened)
    return _Chain(
        begin, newline if newline >= 0 else min(len(text), end + _REACH), joints, cut.span("cut") if cut else (-1, -1)
    )


def _folded(text: str) -> Iterator[_Chain]:
    """Scalars of YAML with one word on each of their lines."""
    for match in _FOLDED.finditer(text):
        begin = match.start()
        for _ in range(2):  # its own line and one more: `name:` and `value:`; of long ones the end
            lead = max(0, begin - _LEAD)
            begin = max(lead, text.rfind("\n", lead, begin))
        begin += text[begin] == "\n"
        if match["block"] or names_a_secret(text[begin : match.start()]):
            ends = list(_LINE_END.finditer(text, *match.span("lines")))
            yield _Chain(begin, match.end(), [each.span() for each in ends], (match.start() + 1, match.end("first")))
