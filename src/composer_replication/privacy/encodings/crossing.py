"""What was found over line ends: whether it is one value, and what else of it stands beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from composer_replication.privacy.encodings.wraps import NEW_LINE, ODD, WORDS, WRAPPED_DATA
from composer_replication.privacy.named.harmless import is_uncommon
from composer_replication.privacy.named.names import Strength, name_strength
from composer_replication.privacy.rules import Span, is_strong
from composer_replication.privacy.shapes.entropy import HEX_KIND, KIND, is_public_id, is_wordy
from composer_replication.privacy.shapes.surroundings import names_a_secret

_LEAD = 300  # before a secret
_MOST_SPANS, _MOST_PIECES = 64, 8  # more are a dump: every line of it is found by itself
_LINE_START = re.compile(r"(?:\n|\\n)[ \t+>|\"']*\Z")
_TO_NEXT = r"[\\=`]{0,2}(?:\r?\n|\\n)[ \t]{0,60}+(?:\d{1,6}[→:|\t][ \t]{0,60}+)?+[+>|│]?[ \t]{0,60}+"
_NEXT_PIECE = re.compile(rf"{_TO_NEXT}(?P<piece>[A-Za-z0-9+/_.~-]{{4,200}})(?![:=])")
_LAST_PIECE = re.compile(rf"(?<![A-Za-z0-9+/_.~-])(?P<piece>[A-Za-z0-9+/_.~-]{{4,100}}){_TO_NEXT}\Z")
_ID_BEFORE = re.compile(r"(?<![\w./-])(?=[A-Za-z/]*\d)[A-Za-z0-9/]{5,60}:\Z")  # a number that belongs to a token
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


def beside(text: str, spans: Sequence[Span]) -> Iterator[Span]:
    """The odd words on the other side of the line ends that secrets touch: parts of them, too short to tell alone."""
    for span in spans if len(spans) <= _MOST_SPANS else ():
        end = span.end
        for _ in range(_MOST_PIECES):
            match = _NEXT_PIECE.match(text, end)
            if match is None or not _is_part(text, *match.span("piece")):
                break
            yield Span(*match.span("piece"), span.kind)
            end = match.end()
        begin = max(0, span.start - _LEAD)
        if span.kind in (KIND, HEX_KIND) and (match := _ID_BEFORE.search(text, begin, span.start)):
            yield Span(match.start(), span.start, span.kind)
        if (match := _LAST_PIECE.search(text, begin, span.start)) and _is_part(text, *match.span("piece")):
            yield Span(*match.span("piece"), span.kind)


def _is_part(text: str, begin: int, end: int) -> bool:
    piece = text[begin:end]
    if not ODD.search(piece) or is_public_id(piece) or NEW_LINE.match(text[begin : end + 1]):
        return False
    return not WORDS.fullmatch(piece) or is_uncommon(piece)


def _is_words(value: str) -> bool:
    """Whether two known words stand beside a line end, which joined are a word that nobody knows."""
    return not is_strong(value) and not any(map(is_uncommon, _LINE_END.split(value)))


def _is_told(text: str, span: Span) -> bool:
    """Whether a value that stands first on its line, behind a name on the line before, is none of the words that do."""
    first = _LINE_START.search(text, max(0, span.start - 40), span.start)
    return not first or text[span.end : span.end + 1] in ("'", '"') or is_strong(text[span.start : span.end])


def _is_one(text: str, span: Span, left: str, rest: str) -> bool:
    """Random characters over two lines with nothing that names them: one value, or two of a list, or a file."""
    right = rest.removeprefix("\\n").strip("\n\r\t +>-|│")
    if _HEX_TAIL.search(left) and not _HEX_HEAD.match(right):  # a digest that ends with its line
        return False
    if names_a_secret(text[max(0, span.start - _SECRET_LINE) : span.start]):
        return True
    if span.kind == HEX_KIND or is_wordy(left) or is_wordy(right):
        return False
    return min(len(left), len(right)) < WRAPPED_DATA and not (WORDS.fullmatch(left) or WORDS.fullmatch(right))
