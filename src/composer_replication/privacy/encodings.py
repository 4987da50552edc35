"""Find text inside encodings: base64 (both alphabets, wrapped, UTF-16, gzip), hex, percent encoding, streams, escapes.

An encoded run is decoded and its plain text is scanned like any other text; if the text contains a secret, the whole
run is redacted. `_Stream` and `RewrittenText` map spans in decoded text back to the original text.
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
# `cGFzc3dvcmQ9aHVudGVyMg==`; not `hunter2`.
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{12,}={0,2}")
# `70617373776f72643d68756e74657232`; not `x70617373776f7264`.
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:[0-9a-fA-F]{2}){12,}(?![0-9A-Za-z])")
# base64(1) wraps lines at 76 characters, PEM at 64. The line break may be a literal backslash-n, and a tool may have
# added line numbers.
_BREAK = r"(?:\r?\n|\\r\\n|\\n)[ \t]*+(?:\d{1,6}+[→:|\t][ \t]*+)?+"
# Two lines of base64, here with a line number:
# `QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWZnaGlqa2xtbm9wcXJzdHV2\n  2→d3h5eg==`.
_WRAPPED = re.compile(
    rf"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{{60,80}}+(?:{_BREAK}[A-Za-z0-9+/]{{60,80}}+)*"
    rf"{_BREAK}[A-Za-z0-9+/]{{4,80}}={{0,2}}"
)
# What to drop from wrapped base64: `QUJD\n  2→d3h5` -> `\n  2→`.
_NUMBERING = re.compile(r"(?:\\r)?\\n|\s+(?:\d{1,6}[→:|\t])?|\d{1,6}[→|]")
# `x%2Dy?z` -> `x%2Dy`.
_ADDRESS = re.compile(r"[^\0\s\"'`<>\\&?#;,]*")
# `%2F`; not `%zz`.
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")
_MAX_LEAD_CHARS = 2000  # maximum distance from the start of an address to a percent sign
# `a%2Fb/c` -> `a%2Fb`.
_COMPONENT = re.compile(r"[A-Za-z0-9_.~+*!%-]+")
_MAX_ENCODED = 200_000
_GZIP = "H4sI"  # the magic number of gzip, in base64
_MAX_UNPACKED = 1 << 16


class DecodedText(NamedTuple):
    """An encoded run in a text, and the text that it decodes to."""

    start: int
    end: int
    text: str

    def is_plain(self) -> bool:
        """Return whether the decoded text is long enough and entirely printable, which random bytes never are."""
        return len(self.text) >= 12 and "".join(self.text.split()).isprintable() and "\ufffd" not in self.text


def _decode_printable(data: bytes) -> str | None:
    """Return the text in decoded bytes, or None for binary data."""
    odd = data.translate(None, _PRINTABLE)
    if data[1:16:2].count(0) >= 6:
        return data.decode("utf-16-le", "replace").lstrip("\ufeff")
    if data[0:16:2].count(0) >= 6:
        return data.decode("utf-16-be", "replace").lstrip("\ufeff")
    if len(odd) > len(data) * 0.25:
        return None
    return data.decode("utf-8", "replace")


def _decode_base64(run: str) -> str | None:
    """Return the text that a base64 run encodes, or None if the run is not base64-encoded text."""
    body = run.rstrip("=")
    if len(body) % 4 == 1:
        body = body[:-1]
    try:
        if body.startswith(_GZIP):
            return _decode_printable(zlib.decompressobj(wbits=31).decompress(_decode_b64(body), _MAX_UNPACKED))
        if (
            len(body) > 32 and _decode_printable(_decode_b64(body[:32])) is None
        ):  # most runs are words, as their first bytes show
            return None
        return _decode_printable(_decode_b64(body))
    except (binascii.Error, ValueError, zlib.error):
        return None


def _decode_b64(body: str) -> bytes:
    return base64.b64decode(body.replace("-", "+").replace("_", "/") + "=" * (-len(body) % 4), validate=True)


def decode_run(run: str) -> tuple[DecodedText, ...]:
    """Return every part of a run that decodes to text."""
    return tuple(_decoded(run))


def _decoded(run: str) -> Iterator[DecodedText]:
    for match in _BASE64.finditer(run):
        start, piece = match.start(), match[0]
        if len(piece) > _MAX_ENCODED:
            continue
        if (text := _decode_base64(piece)) is not None:
            yield DecodedText(start, match.end(), text)
            continue
        # A prefix joined by a slash, a dash or an underscore shifts the alignment.
        for split in ("/", "_", "-"):
            if split in piece:
                cursor = start
                for part in piece.split(split):
                    if len(part) >= 16 and (text := _decode_base64(part)) is not None:
                        yield DecodedText(cursor, cursor + len(part), text)
                    cursor += len(part) + 1
    for match in _HEX.finditer(run):
        if len(match[0]) <= _MAX_ENCODED and (text := _decode_printable(bytes.fromhex(match[0]))) is not None:
            yield DecodedText(match.start(), match.end(), text)


def decode_wrapped_base64(text: str, starts: list[int]) -> Iterator[DecodedText]:
    """Yield base64 that extends over several lines, decoded as a whole. `starts` has the positions at which its
    lines may begin.
    """
    done = 0
    for start in starts:
        match = _WRAPPED.match(text, start) if start >= done else None
        if match is None:
            continue
        joined = _NUMBERING.sub("", match[0])
        done = match.end()
        if len(joined) <= _MAX_ENCODED and (plain := _decode_base64(joined)) is not None:
            yield DecodedText(start, match.end(), plain)


def decode_percent_encoding(text: str) -> Iterator[DecodedText]:
    """Yield the decoded percent-encoded parts of addresses, and each address decoded as a whole.

    The whole address is needed in case a separator inside a secret is not encoded.
    """
    for begin, end in _addresses(text):
        address = text[begin:end]
        for piece in _COMPONENT.finditer(address):
            start = begin + piece.start()
            if "%" in piece[0]:
                yield DecodedText(start, start + len(piece[0]), unquote_plus(piece[0]))
        yield DecodedText(begin, end, unquote(address))


def _addresses(text: str) -> Iterator[tuple[int, int]]:
    """Yield the bounds of words that contain percent signs. The search starts at the signs, because few words have
    any.
    """
    done = 0
    for percent in _PERCENT.finditer(text):
        if percent.start() < done:
            continue
        lead = _ADDRESS.match(text[max(done, percent.start() - _MAX_LEAD_CHARS) : percent.start()][::-1])
        rest = _ADDRESS.match(text, percent.start())
        begin, done = percent.start() - (lead.end() if lead else 0), rest.end() if rest else percent.end()
        if done - begin <= _MAX_ENCODED:
            yield begin, done


# Streams: the pieces of a message are joined and scanned as one text. Only secrets that cross pieces count.

_MIN_LINES = 5
_MIN_EVENTS = 3  # for server-sent events, which are easy to distinguish from other lines
_HEAD_CHARS = 3  # common prefix of the lines in a stream: `dat`, `{"t`, `0:"`
_MAX_LINE_CHARS = 600
_MAX_LINES_BETWEEN = 3  # between two lines of a stream, such as `event: delta` and an empty line
_MAX_PIECE_CHARS = 60
_ID_PREFIX_CHARS = 4
_BORDER = "\n\0\n"
# The content of `{"text": "kest"}` -> `kest`.
_STRING = re.compile(rb'"((?:[^"\\\n]|\\.)*+)"')
# Numbers (digits are already zeros) and blanks, which may differ from line to line: `000.00`, `  `.
_NUMBER = re.compile(rb"0+(?:\.0+)?| +")
_DIGITS_AS_ZERO = bytes(48 if 48 <= code <= 57 else code for code in range(256))


class _Stream(NamedTuple):
    """A message that is split over several lines of a text, a few characters per line, as in server-sent events.

        data: {"type": "text_delta", "text": "kest"}
        data: {"type": "text_delta", "text": "rel-48"}

    `pieces` has the bounds of the pieces in the text, `offsets` their positions in the joined `text`.
    """

    pieces: list[tuple[int, int]]
    offsets: list[int]
    text: str

    def to_source_spans(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield the parts of each span in the original text, one per piece. Spans within a single piece are skipped."""
        for span in spans:
            first = bisect_right(self.offsets, span.start) - 1
            last = bisect_right(self.offsets, span.end - 1) - 1
            for index in range(first, last + 1) if last > first else ():
                begin, end = self.pieces[index]
                offset = self.offsets[index]
                yield Span(begin + max(0, span.start - offset), min(end, begin + span.end - offset), span.kind)


def find_streams(text: str, flat: bytes) -> Iterator[_Stream]:
    """Yield the messages that are split over several lines of a text. `flat` is the text encoded in Latin-1, with
    one byte per character.
    """
    num_breaks = flat.count(b"\n")
    if num_breaks < _MIN_EVENTS - 1 or flat.count(b'"') < num_breaks:  # code has fewer quotes than lines
        return
    lines = flat.translate(_DIGITS_AS_ZERO).split(b"\n")
    heads = Counter([line[:_HEAD_CHARS] for line in lines])
    likely = {head for head, count in heads.items() if count >= _min_lines_to_detect(head) and head.strip()}
    if not likely:
        return
    groups: dict[bytes, list[tuple[int, int]]] = {}  # head -> number and start of each line
    start = 0
    for number, line in enumerate(lines):
        if line[:_HEAD_CHARS] in likely and len(line) <= _MAX_LINE_CHARS and b'"' in line:
            groups.setdefault(line[:_HEAD_CHARS], []).append((number, start))
        start += len(line) + 1
    for head, group in groups.items():
        for run in _runs(lines, group, _min_lines_to_detect(head)):
            if (pieces := _pieces(flat, run)) is not None:
                yield _join_pieces(text, pieces)


def _min_lines_to_detect(head: bytes) -> int:
    return _MIN_EVENTS if head == b"dat" else _MIN_LINES


def _runs(lines: list[bytes], group: list[tuple[int, int]], fewest: int) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of lines with the same form, which differ only in numbers and string contents, as the bounds of
    each line.
    """
    run: list[tuple[int, int]] = []
    form, last = b"", -1
    for number, start in group:
        line = lines[number]
        line_form = _NUMBER.sub(b"0", _STRING.sub(b'""', line))
        is_apart = number - last > _MAX_LINES_BETWEEN or any(b"\0" in between for between in lines[last + 1 : number])
        if run and (line_form != form or is_apart):
            if len(run) >= fewest:
                yield run
            run = []
        run.append((start, start + len(line)))
        form, last = line_form, number
    if len(run) >= fewest:
        yield run


def _pieces(flat: bytes, run: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return the bounds of the string field that varies most between lines, one per line; None if no short string
    varies enough.
    """
    rows = [[match.span(1) for match in _STRING.finditer(flat, *bounds)] for bounds in run]
    best: list[tuple[int, int]] | None = None
    most = _MIN_EVENTS - 1
    for column in zip(*rows, strict=False):
        values = [flat[begin:end].translate(_DIGITS_AS_ZERO) for begin, end in column]
        is_prose = any(b" " in value for value in values)  # names and ids have no blanks
        if (
            not is_prose or len({value[:_ID_PREFIX_CHARS] for value in values}) == 1
        ):  # ids of the same kind have a common prefix
            continue
        is_in_pieces = statistics.median(map(len, values)) <= _MAX_PIECE_CHARS
        if is_in_pieces and len(set(values)) > most:
            best, most = list(column), len(set(values))
    return best


def _join_pieces(text: str, pieces: list[tuple[int, int]]) -> _Stream:
    parts, offsets, length = [_BORDER], list[int](), len(_BORDER)
    for begin, end in pieces:
        offsets.append(length)
        parts.append(text[begin:end])
        length += end - begin
    return _Stream(pieces, offsets, "".join([*parts, _BORDER]))


# Views of a text as the receiving program sees it: with continued lines joined and `\u0026` and `\/` as characters,
# or without the terminal colors between a name and its value.

_Edit = tuple[int, int, str]  # start, end, replacement
# The pattern starts with the backslash that all these escapes have: a literal prefix makes the search fast.
# `a\\u0026b` -> `26`, `a\\/b` -> `/`, and the continued line in `zk39\\\n  Qx81` -> `\\\n  `.
_ESCAPE = re.compile(
    r"\\(?:(?<=[^\0\s\\]\\)z?(?:\r?\n|\\\\n)(?:[ \t]*\d{1,6}[→:|\t]|\+|-(?=[ \t]))?[ \t]*(?=[^\0\s\\])"
    r"|\\{0,2}u00([2-7][0-9a-fA-F])|\\{0,2}(/))"
)
# `&#x26;` -> `26`, `&#38;` -> `38`; not `&amp;`.
_ENTITY = re.compile(r"&#(?:[xX]([2-7][0-9a-fA-F])|(3[2-9]|[4-9]\d|1[01]\d|12[0-6]));")
# `ENC[AES256_GCM,data:zk39,type:str]`, `$ANSIBLE_VAULT;1.1;AES256\n3039`; not `ENC[x]`.
_ENCRYPTED = re.compile(
    r"ENC\[[A-Z0-9_]{3,20},[^\0\]\n]{0,4000}\]|ANSIBLE_VAULT;[^\0\n]{0,40}(?:(?:\n|\\n)[ \t]*+[0-9a-f]++)++"
)
# `\x1b[31m`, `\\u001b[0m`; not `[31m`.
_COLOR = re.compile(r"(?:\x1b|\\{1,4}(?:u001[bB]|x1[bB]|033|e))\[[0-9;:?]{0,20}[A-Za-z]")
# In a text printed as JSON, or in a script: `\\u001b[0m`, `\\033[31m`; not `\x1b[31m`.
_ESCAPED_COLOR = re.compile(r"\\(?:u001[bB]|x1[bB]|033|e)\[")
# `hunter2 next` -> `hunter2`.
_WORD_REST = re.compile(r"[^\0\s]*")
_COLOR_LEAD, _COLOR_REACH, _MAX_COLOR_DISTANCE = 100, 400, 60  # characters around a name with colors nearby


class RewrittenText:
    """An edited copy of a text that can map spans back to the original text."""

    def __init__(self, text: str, edits: Iterable[_Edit]) -> None:
        pieces: list[str] = []
        self._positions, self._origins = [0], [0]
        self._ends: dict[int, int] = {}  # position of a replaced character -> end of its escape
        cursor = length = 0
        for start, end, written in edits:
            pieces += [text[cursor:start], written]
            length += start - cursor
            if written:  # the character comes from the whole escape
                self._mark(length, start)
                self._ends[length] = end
                length += len(written)
            self._mark(length, end)
            cursor = end
        self.text = "".join([*pieces, text[cursor:]])

    def _mark(self, position: int, origin: int) -> None:
        self._positions.append(position)
        self._origins.append(origin)

    def to_source_spans(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Map spans in the edited text to spans in the original text."""
        for start, end, kind in spans:
            # If the last character was an escape, the whole escape belongs to the secret.
            yield Span(self._origin(start), self._ends.get(end - 1) or self._origin(end - 1) + 1, kind)

    def _origin(self, position: int) -> int:
        index = bisect_right(self._positions, position) - 1
        return self._origins[index] + position - self._positions[index]


def unescape(text: str) -> RewrittenText | None:
    """Return the text without line continuations and JSON escapes, or None if it has none."""
    edits: list[_Edit] = []
    if "\\" in text:
        matches = _ESCAPE.finditer(text)
        edits += [(*match.span(), chr(int(match[1], 16)) if match[1] else match[2] or "") for match in matches]
    if "&#" in text:
        edits += [(*match.span(), _entity_character(match)) for match in _ENTITY.finditer(text)]
    return RewrittenText(text, sorted(edits)) if edits else None


def _entity_character(entity: re.Match[str]) -> str:
    return chr(int(entity[1], 16) if entity[1] else int(entity[2]))


def encrypted_blocks(text: str) -> list[tuple[int, int]]:
    """Return the bounds of blocks encrypted by sops or ansible-vault, which look random but contain no usable
    secret.
    """
    if "ENC[" not in text and "_VAULT;" not in text:
        return []
    return [match.span() for match in _ENCRYPTED.finditer(text)]


def has_colors(text: str) -> bool:
    """Return whether a text contains terminal colors, as escape characters or as printed escapes."""
    return "\x1b" in text or ("\\" in text and _ESCAPED_COLOR.search(text) is not None)


def remove_colors(text: str, lower: bytes, words: Iterable[bytes]) -> RewrittenText | None:
    """Return the text around trigger words near a color code, without the color codes; None if no such word occurs."""
    positions = sorted({at for word in words for at in _words_near_colors(text, lower, word)})
    edits: list[_Edit] = []
    done = 0
    for at in positions:
        if at < done:
            continue
        begin, reach = max(done, at - _COLOR_LEAD), min(len(text), at + _COLOR_REACH)
        rest = _WORD_REST.match(text, reach)
        end = rest.end() if rest else reach
        edits.append((done, begin, "\n"))
        edits += [(*match.span(), "") for match in _COLOR.finditer(text, begin, end)]
        done = end
    return RewrittenText(text, [*edits, (done, len(text), "\n")]) if edits else None


def _words_near_colors(text: str, lower: bytes, word: bytes) -> Iterator[int]:
    at = lower.find(word)
    while at >= 0:
        if _COLOR.search(text, at, at + _MAX_COLOR_DISTANCE):
            yield at
        at = lower.find(word, at + len(word))
