"""Secrets behind an encoding: base64 (both alphabets, wrapped lines, UTF-16, gzip), hex, percent signs.

A run is decoded and the plain text goes through the same scan; when something is found there, the whole run goes.
"""

from __future__ import annotations

import base64
import binascii
import re
import statistics
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import unquote, unquote_plus

from composer_replication.privacy.rules import Span

_PRINTABLE = bytes(range(32, 127)) + b"\t\r\n"
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{12,}={0,2}")
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:[0-9a-fA-F]{2}){12,}(?![0-9A-Za-z])")
# base64(1) wraps at 76, PEM at 64; the break may be a literal backslash-n, and a reader may have numbered the lines.
_BREAK = r"(?:\r?\n|\\r\\n|\\n)[ \t]*+(?:\d{1,6}+[→:|\t][ \t]*+)?+"
_WRAPPED = re.compile(
    rf"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{{60,80}}+(?:{_BREAK}[A-Za-z0-9+/]{{60,80}}+)*"
    rf"{_BREAK}[A-Za-z0-9+/]{{4,80}}={{0,2}}"
)
_NUMBERING = re.compile(r"(?:\\r)?\\n|\s+(?:\d{1,6}[→:|\t])?|\d{1,6}[→|]")
_ADDRESS = re.compile(r"[^\0\s\"'`<>\\&?#;,]*")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")
_LONGEST_LEAD = 2000  # this far before a percent sign the address it stands in is looked for
_COMPONENT = re.compile(r"[A-Za-z0-9_.~+*!%-]+")
_MAX_ENCODED = 200_000
_GZIP = "H4sI"  # the first bytes of gzip, in base64
_MOST_UNPACKED = 1 << 16


class Decoded(NamedTuple):
    """A run and what it says."""

    start: int
    end: int
    text: str

    def is_plain(self) -> bool:
        """Whether every character of it is one that people write. Random bytes never decode to that."""
        return len(self.text) >= 12 and "".join(self.text.split()).isprintable() and "\ufffd" not in self.text


def _readable(data: bytes) -> str | None:
    """The text in decoded bytes, or None for binary data."""
    odd = data.translate(None, _PRINTABLE)
    if data[1:16:2].count(0) >= 6:
        return data.decode("utf-16-le", "replace").lstrip("\ufeff")
    if data[0:16:2].count(0) >= 6:
        return data.decode("utf-16-be", "replace").lstrip("\ufeff")
    if len(odd) > len(data) * 0.25:
        return None
    return data.decode("utf-8", "replace")


def _decode_base64(run: str) -> str | None:
    """The text behind a base64 run, or None when it is not base64 of text."""
    body = run.rstrip("=")
    if len(body) % 4 == 1:
        body = body[:-1]
    try:
        if body.startswith(_GZIP):
            return _readable(zlib.decompressobj(wbits=31).decompress(_b64(body), _MOST_UNPACKED))
        if len(body) > 32 and _readable(_b64(body[:32])) is None:  # most runs are words: find out on the first bytes
            return None
        return _readable(_b64(body))
    except (binascii.Error, ValueError, zlib.error):
        return None


def _b64(body: str) -> bytes:
    return base64.b64decode(body.replace("-", "+").replace("_", "/") + "=" * (-len(body) % 4), validate=True)


def decoded_in_run(run: str) -> tuple[Decoded, ...]:
    """Every piece of a run of key characters that decodes to text."""
    return tuple(_decoded(run))


def _decoded(run: str) -> Iterator[Decoded]:
    for match in _BASE64.finditer(run):
        start, piece = match.start(), match[0]
        if len(piece) > _MAX_ENCODED:
            continue
        if (text := _decode_base64(piece)) is not None:
            yield Decoded(start, match.end(), text)
            continue
        # A prefix glued on with a slash, a dash or an underscore shifts the alignment.
        for split in ("/", "_", "-"):
            if split in piece:
                cursor = start
                for part in piece.split(split):
                    if len(part) >= 16 and (text := _decode_base64(part)) is not None:
                        yield Decoded(cursor, cursor + len(part), text)
                    cursor += len(part) + 1
    for match in _HEX.finditer(run):
        if len(match[0]) <= _MAX_ENCODED and (text := _readable(bytes.fromhex(match[0]))) is not None:
            yield Decoded(match.start(), match.end(), text)


def wrapped_base64(text: str, starts: list[int]) -> Iterator[Decoded]:
    """Base64 over several lines, decoded as one. `starts` are where a line of it may begin."""
    done = 0
    for start in starts:
        match = _WRAPPED.match(text, start) if start >= done else None
        if match is None:
            continue
        joined = _NUMBERING.sub("", match[0])
        done = match.end()
        if len(joined) <= _MAX_ENCODED and (plain := _decode_base64(joined)) is not None:
            yield Decoded(start, match.end(), plain)


def percent_encoded(text: str) -> Iterator[Decoded]:
    """Percent-encoded pieces of an address, then the whole of it: a separator inside a secret may stand unencoded."""
    for begin, end in _addresses(text):
        address = text[begin:end]
        for piece in _COMPONENT.finditer(address):
            start = begin + piece.start()
            if "%" in piece[0]:
                yield Decoded(start, start + len(piece[0]), unquote_plus(piece[0]))
        yield Decoded(begin, end, unquote(address))


def _addresses(text: str) -> Iterator[tuple[int, int]]:
    """The words around percent signs, found from the signs: most words have none."""
    done = 0
    for percent in _PERCENT.finditer(text):
        if percent.start() < done:
            continue
        lead = _ADDRESS.match(text[max(done, percent.start() - _LONGEST_LEAD) : percent.start()][::-1])
        rest = _ADDRESS.match(text, percent.start())
        begin, done = percent.start() - (lead.end() if lead else 0), rest.end() if rest else percent.end()
        if done - begin <= _MAX_ENCODED:
            yield begin, done


# Secrets that a stream tells piece by piece: lines of one form, each with a few characters of a message.
#
#     data: {"type": "text_delta", "text": "kest"}
#     data: {"type": "text_delta", "text": "rel-48"}
#
# The pieces are joined and scanned as one text. What is found counts where it lies across pieces; each piece of it
# goes.

_FEWEST_LINES = 5
_FEWEST_EVENTS = 3  # lines of server-sent events, which have a form of their own
_HEAD = 3  # characters that all lines of a stream begin with: `dat`, `{"t`, `0:"`
_LONGEST_LINE = 600
_MOST_BETWEEN = 3  # lines of another form between two of a stream: `event: delta` and an empty one
_LONGEST_PIECE = 60
_COMMON_HEAD = 4
_APART = "\n\0\n"
_STRING = re.compile(rb'"((?:[^"\\\n]|\\.)*+)"')
_NUMBER = re.compile(rb"0+(?:\.0+)?| +")
_DIGITS_ALIKE = bytes(48 if 48 <= code <= 57 else code for code in range(256))


class Stream(NamedTuple):
    """The pieces of one message: where they are in the text, where in the joined text, and that text."""

    pieces: list[tuple[int, int]]
    offsets: list[int]
    text: str

    def led_back(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield, for each span that lies across pieces of the joined text, its part of every piece."""
        for span in spans:
            first = bisect_right(self.offsets, span.start) - 1
            last = bisect_right(self.offsets, span.end - 1) - 1
            for index in range(first, last + 1) if last > first else ():
                begin, end = self.pieces[index]
                offset = self.offsets[index]
                yield Span(begin + max(0, span.start - offset), min(end, begin + span.end - offset), span.kind)


def streams(text: str, flat: bytes) -> Iterator[Stream]:
    """Yield the messages that lines of a text hold in pieces. `flat` is the text, one byte a character."""
    num_breaks = flat.count(b"\n")
    if num_breaks < _FEWEST_EVENTS - 1 or flat.count(b'"') < num_breaks:  # code has fewer quotes than lines
        return
    lines = flat.translate(_DIGITS_ALIKE).split(b"\n")
    heads = Counter([line[:_HEAD] for line in lines])
    likely = {head for head, count in heads.items() if count >= _fewest(head) and head.strip()}
    if not likely:
        return
    groups: dict[bytes, list[tuple[int, int]]] = {}  # by head: number and start of each line
    start = 0
    for number, line in enumerate(lines):
        if line[:_HEAD] in likely and len(line) <= _LONGEST_LINE and b'"' in line:
            groups.setdefault(line[:_HEAD], []).append((number, start))
        start += len(line) + 1
    for head, group in groups.items():
        for run in _runs(lines, group, _fewest(head)):
            if (pieces := _pieces(flat, run)) is not None:
                yield _joined(text, pieces)


def _fewest(head: bytes) -> int:
    return _FEWEST_EVENTS if head == b"dat" else _FEWEST_LINES


def _runs(lines: list[bytes], group: list[tuple[int, int]], fewest: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the bounds of successive lines of one form, where only numbers and the contents of strings differ."""
    run: list[tuple[int, int]] = []
    form, last = b"", -1
    for number, start in group:
        line = lines[number]
        line_form = _NUMBER.sub(b"0", _STRING.sub(b'""', line))
        is_apart = number - last > _MOST_BETWEEN or any(b"\0" in between for between in lines[last + 1 : number])
        if run and (line_form != form or is_apart):
            if len(run) >= fewest:
                yield run
            run = []
        run.append((start, start + len(line)))
        form, last = line_form, number
    if len(run) >= fewest:
        yield run


def _pieces(flat: bytes, run: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return the bounds of the string that differs most from line to line; None where no string is short and varied."""
    rows = [[match.span(1) for match in _STRING.finditer(flat, *bounds)] for bounds in run]
    best: list[tuple[int, int]] | None = None
    most = _FEWEST_EVENTS - 1
    for column in zip(*rows, strict=False):
        values = [flat[begin:end].translate(_DIGITS_ALIKE) for begin, end in column]
        is_prose = any(b" " in value for value in values)  # names and ids have no blanks
        if not is_prose or len({value[:_COMMON_HEAD] for value in values}) == 1:  # ids of one kind begin alike
            continue
        is_in_pieces = statistics.median(map(len, values)) <= _LONGEST_PIECE
        if is_in_pieces and len(set(values)) > most:
            best, most = list(column), len(set(values))
    return best


def _joined(text: str, pieces: list[tuple[int, int]]) -> Stream:
    parts, offsets, length = [_APART], list[int](), len(_APART)
    for begin, end in pieces:
        offsets.append(length)
        parts.append(text[begin:end])
        length += end - begin
    return Stream(pieces, offsets, "".join([*parts, _APART]))


# A text as the program that reads it sees it: lines joined behind a backslash, `\u0026` and `\/` as characters.
#
# The colours of a terminal, which stand between a name and its value, are left out around names. What is found in
# such a view is led back to where it stands in the text.

_Edit = tuple[int, int, str]  # from, to, and what is written instead
# It starts with the backslash that all of them have: that is what makes the search fast.
_ESCAPE = re.compile(
    r"\\(?:(?<=[^\0\s\\]\\)z?(?:\r?\n|\\\\n)(?:[ \t]*\d{1,6}[→:|\t]|\+|-(?=[ \t]))?[ \t]*(?=[^\0\s\\])"
    r"|\\{0,2}u00([2-7][0-9a-fA-F])|\\{0,2}(/))"
)
_ENTITY = re.compile(r"&#(?:[xX]([2-7][0-9a-fA-F])|(3[2-9]|[4-9]\d|1[01]\d|12[0-6]));")
_ENCRYPTED = re.compile(
    r"ENC\[[A-Z0-9_]{3,20},[^\0\]\n]{0,4000}\]|ANSIBLE_VAULT;[^\0\n]{0,40}(?:(?:\n|\\n)[ \t]*+[0-9a-f]++)++"
)
_COLOUR = re.compile(r"(?:\x1b|\\{1,4}(?:u001[bB]|x1[bB]|033|e))\[[0-9;:?]{0,20}[A-Za-z]")
_WRITTEN_COLOUR = re.compile(r"\\(?:u001[bB]|x1[bB]|033|e)\[")  # in a text that was printed as JSON, or in a script
_WORD_REST = re.compile(r"[^\0\s]*")
_LEAD, _REACH, _NEAR = 100, 400, 60  # around the name with colours near it


class RewrittenText:
    """A rewritten text that remembers where its parts came from."""

    def __init__(self, text: str, edits: Iterable[_Edit]) -> None:
        pieces: list[str] = []
        self._places, self._origins = [0], [0]
        self._ends: dict[int, int] = {}  # of a character that stands for an escape: where the escape ends
        cursor = length = 0
        for start, end, written in edits:
            pieces += [text[cursor:start], written]
            length += start - cursor
            if written:  # the sign itself comes from the whole of its escape
                self._mark(length, start)
                self._ends[length] = end
                length += len(written)
            self._mark(length, end)
            cursor = end
        self.text = "".join([*pieces, text[cursor:]])

    def _mark(self, position: int, origin: int) -> None:
        self._places.append(position)
        self._origins.append(origin)

    def led_back(self, spans: Iterable[Span]) -> Iterator[Span]:
        """The same spans in the text that the view was made from."""
        for start, end, kind in spans:
            # The last character may be an escape: then all of it belongs to the secret.
            yield Span(self._origin(start), self._ends.get(end - 1) or self._origin(end - 1) + 1, kind)

    def _origin(self, position: int) -> int:
        index = bisect_right(self._places, position) - 1
        return self._origins[index] + position - self._places[index]


def unescaped(text: str) -> RewrittenText | None:
    """The text without line continuations and JSON escapes, or None when it has none."""
    edits: list[_Edit] = []
    if "\\" in text:
        matches = _ESCAPE.finditer(text)
        edits += [(*match.span(), chr(int(match[1], 16)) if match[1] else match[2] or "") for match in matches]
    if "&#" in text:
        edits += [(*match.span(), _character(match)) for match in _ENTITY.finditer(text)]
    return RewrittenText(text, sorted(edits)) if edits else None


def _character(entity: re.Match[str]) -> str:
    return chr(int(entity[1], 16) if entity[1] else int(entity[2]))


def encrypted_blocks(text: str) -> list[tuple[int, int]]:
    """What sops and ansible-vault have encrypted: it is as random as a key, and nobody's secret without one."""
    if "ENC[" not in text and "_VAULT;" not in text:
        return []
    return [match.span() for match in _ENCRYPTED.finditer(text)]


def has_colours(text: str) -> bool:
    """Whether a text came from a terminal in colour, or was printed from one."""
    return "\x1b" in text or ("\\" in text and _WRITTEN_COLOUR.search(text) is not None)


def uncoloured(text: str, lower: bytes, words: Iterable[bytes]) -> RewrittenText | None:
    """What stands around the words that have a colour near them, without colours and without the rest of the text."""
    positions = sorted({at for word in words for at in _hits(text, lower, word)})
    edits: list[_Edit] = []
    done = 0
    for at in positions:
        if at < done:
            continue
        begin, reach = max(done, at - _LEAD), min(len(text), at + _REACH)
        rest = _WORD_REST.match(text, reach)
        end = rest.end() if rest else reach
        edits.append((done, begin, "\n"))
        edits += [(*match.span(), "") for match in _COLOUR.finditer(text, begin, end)]
        done = end
    return RewrittenText(text, [*edits, (done, len(text), "\n")]) if edits else None


def _hits(text: str, lower: bytes, word: bytes) -> Iterator[int]:
    at = lower.find(word)
    while at >= 0:
        if _COLOUR.search(text, at, at + _NEAR):
            yield at
        at = lower.find(word, at + len(word))
