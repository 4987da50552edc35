"""Damage for Claude Code logs: what bytes, fields and lines can suffer, seeded, and always one record at a time."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

_HOLE = "@@hole@@"
_QUOTED_HOLE = json.dumps(_HOLE).encode()


@dataclass(frozen=True)
class Damaged:
    """The lines of a log after damage, each with the number of the line it still is (None: it may be anything now)."""

    what: str
    lines: list[tuple[bytes, int | None]]

    def file(self):
        return b"".join(line + b"\n" for line, _ in self.lines)

    def intact(self):
        """Line number in the new file -> line number in the old one, both from 1."""
        number, found = 1, {}
        for line, was in self.lines:
            if was is not None:
                found[number] = was
            number += 1 + line.count(b"\n")
        return found

    def moved(self):
        """Numbers of lines that do not stand where they stood: between which others, the file does not say."""
        if "swap" in self.what:
            return {was for at, (_, was) in enumerate(self.lines, start=1) if was != at}
        number_of = Counter(was for _, was in self.lines)
        return {was for was, number in number_of.items() if was is not None and number > 1}

    def _touched(self, log):
        """The records that were damaged, as they were."""
        whole = {was for _, was in self.lines} - self.moved()
        return [json.loads(line) for number, line in enumerate(log, start=1) if number not in whole]

    def of_one_message(self, log):
        """Lines of the messages that lost a record: what is left of them stands where it was written."""
        ids = {message_id(record) for record in self._touched(log)} - {None}
        return {number for number, line in enumerate(log, start=1) if message_id(json.loads(line)) in ids}

    def without_any_link(self, log):
        """Lines of results in nameless sidechains whose calls were damaged: nothing else said where they belong."""
        calls = {each for record in self._touched(log) for each in _ids(record, "tool_use", "id")}
        records = [json.loads(line) for line in log] if calls else []
        nameless = {at: each for at, each in enumerate(records, 1) if each.get("isSidechain") and "agentId" not in each}
        return {at for at, record in nameless.items() if calls & set(_ids(record, "tool_result", "tool_use_id"))}


def _span(rng, line):
    start = rng.randrange(len(line) + 1)
    return start, min(len(line), start + rng.choice((1, 1, 2, 5, 40)))


def flip_bits(rng, line):
    data = bytearray(line)
    for _ in range(rng.choice((1, 1, 1, 3, 16))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def delete_bytes(rng, line):
    start, end = _span(rng, line)
    return line[:start] + line[end:]


def insert_bytes(rng, line):
    at, extra = rng.randrange(len(line) + 1), rng.randbytes(rng.choice((1, 2, 8)))
    return line[:at] + rng.choice((extra, b"\n", b'"', b"}", b"\\", b"\xef\xbb\xbf", b"\r")) + line[at:]


def truncate(rng, line):
    return line[: rng.randrange(len(line))]


def insert_nuls(rng, line):
    start, end = _span(rng, line)
    return rng.choice((line[:start] + b"\x00" * (end - start + 1) + line[end:], b"\x00" * len(line)))


def break_utf8(rng, line):
    at = rng.randrange(len(line) + 1)
    return line[:at] + rng.choice((b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\\ud800")) + line[at:]


def _nested(depth, opening=b"[", core=b"1", closing=b"]"):
    return opening * depth + core + closing * depth


HUGE = (b"1" * 400, b"-" + b"9" * 400, b"1e999", b"-1e999", b"18446744073709551616", b"1e-999", b"-9223372036854775808")
DEEP = tuple(
    _nested(depth, *each)
    for depth in (10, 200, 400, 700, 1000, 5000)
    for each in (
        (b"[",),
        (b'{"text":', b'"x"', b"}"),
        (b'{"type":"text","text":', b"[1]", b"}"),
        (b'[{"content":', b"[]", b"}]"),
    )
)
WRONG = (b"null", b"true", b"0", b"-1", b"1.5", b'""', b'"\\u0000"', b'"text"', b"[]", b"{}", b"[null]", b'{"a":[]}')
WRONG += (b"[[]]", b'["text"]', b'[{"type":"text"}]', b'[{"type":"tool_use"}]', b'[{"type":"tool_result"}]')
WRONG += (
    b'{"type":{}}',
    b'[{"type":[]}]',
    b'[{"type":"tool_use","id":[]}]',
    b'[{"type":"tool_result","tool_use_id":{}}]',
)


def field_paths(value, path=()):
    """The path of every field and list item below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from field_paths(each, (*path, key))


def with_field(line, path, raw):
    """The line with raw bytes in place of one field; None removes it."""
    record = json.loads(line)
    holder = record
    for key in path[:-1]:
        holder = holder[key]
    if raw is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = _HOLE
    return json.dumps(record).encode().replace(_QUOTED_HOLE, raw or b"")


def _in_a_field(values):
    def damage(rng, line):
        paths = list(field_paths(json.loads(line)))
        return with_field(line, rng.choice(paths), rng.choice(values)) if paths else b""

    return damage


ONE_LINE = {
    "flip bits": flip_bits,
    "delete bytes": delete_bytes,
    "insert bytes": insert_bytes,
    "truncate": truncate,
    "NUL bytes": insert_nuls,
    "invalid UTF-8": break_utf8,
    "huge number": _in_a_field(HUGE),
    "deep nesting": _in_a_field(DEEP),
    "null": _in_a_field((b"null",)),
    "no such field": _in_a_field((None,)),
    "wrong type": _in_a_field(WRONG),
}


def _swap(rng, lines):
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]


def _duplicate(rng, lines):
    """The same bytes at two places: nothing says which is the record and which its copy, so either may be read."""
    at = rng.randrange(len(lines))
    lines.insert(rng.randrange(at, len(lines)) + 1, lines[at])


def _drop(rng, lines):
    del lines[rng.randrange(len(lines))]


def _steal_identity(rng, lines):
    """A record that carries another's uuid, with a message of its own: not the record it claims to be."""
    at, victim = rng.randrange(len(lines)), json.loads(rng.choice(lines)[0])
    record = json.loads(lines[at][0])
    if record.get("uuid") != victim.get("uuid"):
        lines[at] = (json.dumps({**record, "uuid": victim.get("uuid")}).encode(), None)


def _linked(lines):
    """Places of records that others can name."""
    return [at for at, (line, _) in enumerate(lines) if b'"uuid"' in line and b'"parentUuid"' in line]


def _name_another_parent(rng, lines):
    places = _linked(lines)
    at, named = rng.choice(places), json.loads(lines[rng.choice(places)][0])["uuid"]
    lines[at] = (json.dumps({**json.loads(lines[at][0]), "parentUuid": named}).encode(), None)


def _name_another_message(rng, lines):
    """An assistant's record with the message id of another one."""
    places = [at for at, (line, _) in enumerate(lines) if message_id(json.loads(line)) is not None]
    at, other = rng.choice(places), json.loads(lines[rng.choice(places)][0])
    lines[at] = (with_field(lines[at][0], ("message", "id"), json.dumps(message_id(other)).encode()), None)


def message_id(record):
    message = record.get("message") if record.get("type") == "assistant" else None
    return message.get("id") if isinstance(message, dict) else None


def _ids(record, kind, field):
    message = record.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    blocks = content if isinstance(content, list) else []
    return [each.get(field) for each in blocks if isinstance(each, dict) and each.get("type") == kind]


def _copy_earlier(rng, lines):
    at = rng.choice(_linked(lines))
    lines.insert(rng.randrange(at + 1), lines[at])  # either may be the one that is kept


def _swap_neighbours(rng, lines):
    at = rng.randrange(len(lines) - 1)
    lines[at : at + 2] = lines[at + 1], lines[at]


# What may be wrong with a link, or with the place of a record that others name.
LINKS = {"wrong parent": _name_another_parent, "copy earlier": _copy_earlier, "swap neighbours": _swap_neighbours}
LINKS |= {"wrong message id": _name_another_message}
MANY_LINES = {
    "swap lines": _swap,
    "duplicate a line": _duplicate,
    "drop a line": _drop,
    "steal a uuid": _steal_identity,
}
KINDS = (*ONE_LINE, *MANY_LINES)
MANY_LINES |= LINKS


def damaged(rng, kind, log):
    """One damage of this kind at a random place of a log, given as a list of lines."""
    lines = [(line, number) for number, line in enumerate(log, start=1)]
    if kind in MANY_LINES:
        MANY_LINES[kind](rng, lines)
    else:
        at = rng.randrange(len(lines))
        lines[at] = (ONE_LINE[kind](rng, lines[at][0]), None)
    return Damaged(kind, lines)


def with_line(log, at, line, what):
    """The log with one line replaced by a damaged one."""
    lines = [(each, number) for number, each in enumerate(log, start=1)]
    lines[at] = (line, None)
    return Damaged(what, lines)
