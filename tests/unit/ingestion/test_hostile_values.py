"""Values that JSON readers take and JSON writers refuse, planted in every format: nothing unwritable comes out."""

from __future__ import annotations

import json

import pytest
from format_sessions import SAID, SESSIONS
from session_bytes import ingest

from composer_replication.action_text import action_text
from composer_replication.canonical_json import encode
from composer_replication.ingestion import registry
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.privacy import Scrubber
from composer_replication.runs import files as rows

UNWRITABLE = {
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "infinite float": b"1e999",
    "integer of 80 bits": b"1208925819614629174706176",
    "integer of 400 digits": b"9" * 400,
    "largest of 64 bits": b"18446744073709551615",
    "lone surrogate": rb'"half \ud83d an emoji"',
    "lone surrogate in the other half": rb'"\udc00"',
    "lone surrogate as a key": rb'{"\ud800": 1}',
    "escaped backslash before a pair": rb'"\\\ud83d\ude00"',
}
DEEP = {
    f"{depth} x {opening.decode()}": (depth, opening) for depth in (60, 300, 1000, 5000) for opening in (b"[", b'{"a":')
}

READABLE_DEPTH = 1000  # beyond this the parser stops, and what it stops in is damage like any other
READABLE = {name: each for name, each in DEEP.items() if each[0] <= READABLE_DEPTH}


def nested(depth, opening):
    return opening * depth + b"1" + {b"[": b"]"}.get(opening, b"}") * depth


def check(session, folder, data):
    """The file read, every conversation written in every way there is, and what stands around the value still there."""
    conversations, report = ingest(session.module, folder, data, session.name)
    scope = Scrubber().scope()
    for conversation in conversations:
        encode(rows.conversation_to_row(conversation), where="row")
        encode(rows.conversation_to_row(scrub_conversation(conversation, scope)), where="row")
        encode(to_atif(conversation), where="document")
        for turn in conversation.turns:
            action_text(turn)
    said = {turn.text for conversation in conversations for turn in conversation.turns}
    assert said.issuperset(SAID)
    assert registry.detect(folder / session.name) is session.module
    return conversations, report


def calls(conversations):
    return [call for each in conversations for turn in each.turns for call in turn.calls]


every_format = pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)


@every_format
@pytest.mark.parametrize("value", UNWRITABLE.values(), ids=UNWRITABLE)
def test_values_json_cannot_hold_cost_nothing_but_themselves(tmp_path, session, value):
    for planted in ({"arguments": b'{"x": %b}' % value}, {"beside": b'{"x": [%b]}' % value}):
        conversations, report = check(session, tmp_path, session.file(**planted))
        assert {call.id for call in calls(conversations)} == {"c1"}
        assert not report.skipped


@every_format
@pytest.mark.parametrize("value", UNWRITABLE.values(), ids=UNWRITABLE)
def test_arguments_that_are_text_stay_the_text_they_were(tmp_path, session, value):
    text = b'{"x": %b}' % value
    conversations, report = check(session, tmp_path, session.file(arguments=json.dumps(text.decode()).encode()))
    for call in calls(conversations):
        assert call.raw_arguments in (None, text.decode())
        assert call.raw_arguments is not None or call.arguments
    assert {call.id for call in calls(conversations)} == {"c1"}
    assert not report.skipped


@every_format
@pytest.mark.parametrize(("depth", "opening"), DEEP.values(), ids=DEEP)
def test_deep_arguments_are_counted_with_their_place_and_cost_only_their_record(tmp_path, session, depth, opening):
    data = session.file(arguments=b'{"x": %b}' % nested(depth, opening))
    conversations, report = check(session, tmp_path, data)
    assert not calls(conversations)
    reasons = set(report.skipped) - {"tool result without its call", "orphan attached to the record before it"}
    if depth <= READABLE_DEPTH or session.is_lines:
        assert reasons == {"nested too deeply"}
    assert all(skip.file == session.name and skip.line > 0 for skip in report.skips)
    assert reasons


@every_format
@pytest.mark.parametrize(("depth", "opening"), DEEP.values(), ids=DEEP)
def test_deep_arguments_that_are_text_stay_text(tmp_path, session, depth, opening):
    text = b'{"x": %b}' % nested(depth, opening)
    conversations, report = check(session, tmp_path, session.file(arguments=json.dumps(text.decode()).encode()))
    assert {call.raw_arguments for call in calls(conversations)} == {text.decode()}
    assert not report.skipped


@every_format
@pytest.mark.parametrize(("depth", "opening"), READABLE.values(), ids=READABLE)
def test_deep_values_beside_the_messages_are_counted_and_cost_no_message(tmp_path, session, depth, opening):
    conversations, report = check(session, tmp_path, session.file(beside=nested(depth, opening)))
    assert {call.id for call in calls(conversations)} == {"c1"}
    assert set(report.skipped) <= {"nested too deeply"}
