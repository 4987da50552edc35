"""One broken byte in a document: the messages on both sides of it stay, and the break is counted with its place."""

from __future__ import annotations

import json
import random

import pytest
from format_sessions import SAID, SESSIONS
from session_bytes import ingest

from composer_replication.ingestion.formats import claude_code, opencode
from composer_replication.ingestion.reading.after_damage import values_behind
from composer_replication.ingestion.reading.documents import around_damage

DOCUMENTS = {name: session for name, session in SESSIONS.items() if not session.is_lines and name != "inspect_eval"}
BROKEN = (b"\xff", b"\x00", b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"x")


def texts(conversations):
    return {turn.text for conversation in conversations for turn in conversation.turns}


def export(*words):
    records = json.loads(SESSIONS["claude_export"].file())["loglines"]
    lines = [
        {**records[0], "uuid": f"u{n}", "parentUuid": None, "message": {"content": w}} for n, w in enumerate(words)
    ]
    return json.dumps({"loglines": lines}).encode()


@pytest.mark.parametrize("at", range(4))
def test_a_web_export_loses_the_broken_record_alone(tmp_path, at):
    words = ["one", "two", "three", "four"]
    data = export(*words).replace(b'"content": "%b"' % words[at].encode(), b'"content": tru')
    conversations, report = ingest(claude_code, tmp_path, data, "session.json")
    assert texts(conversations) == set(words) - {words[at]}
    assert [(skip.reason, skip.line) for skip in report.skips if skip.reason == "invalid JSON document"] == [
        ("invalid JSON document", at + 1)
    ]
    lines = {turn.text: turn.provenance.lines for each in conversations for turn in each.turns}
    assert lines == {word: (number,) for number, word in enumerate(words, start=1) if word in lines}


def test_a_byte_that_is_no_text_costs_a_web_export_nothing_else(tmp_path):
    conversations, report = ingest(
        claude_code, tmp_path, export("one", "t@o", "three").replace(b"@", b"\xff"), "s.json"
    )
    assert texts(conversations) == {"one", "t\ufffdo", "three"}
    assert [(skip.reason, skip.line) for skip in report.skips] == [("invalid JSON document", 2)]


@pytest.mark.parametrize("session", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_broken_message_costs_no_other(tmp_path, session):
    """Every byte of the message in the middle is broken in turn; what stands before and behind it is read."""
    whole = session.file()
    start = whole.index(SAID[1].encode())
    rng = random.Random(session.name)
    for at in range(start - 20, start + len(SAID[1]) + 3):
        broken = rng.choice(BROKEN)
        for data in (
            whole[:at] + broken + whole[at + 1 :],
            whole[:at] + whole[at + 1 :],
            whole[:at] + broken + whole[at:],
        ):
            conversations, _ = ingest(session.module, tmp_path, data, session.name)
            assert texts(conversations).issuperset({SAID[0], SAID[2]}), data[at - 30 : at + 30]


def test_records_of_a_list_come_back_behind_a_broken_one(tmp_path):
    session = SESSIONS["tau_bench"]
    data = session.file().replace(b'"%b"' % SAID[1].encode(), b"tru", 1)
    conversations, _ = ingest(session.module, tmp_path, data, session.name)
    assert [SAID[1] in texts([each]) for each in conversations] == [False, True]
    assert all(texts([each]).issuperset({SAID[0], SAID[2]}) for each in conversations)


def test_what_lies_deeper_than_messages_is_never_taken_for_one():
    inner = '{"role": "user", "content": [{"role": "user", "content": "inner"}, tru, {"role": "user", "x": 1}]}'
    others = '{"role": "user", "content": "next"}], "more": [{"role": "user", "content": "other"}]}'
    text = f'{{"messages": [{inner}, {others}'
    value, position = around_damage(text.encode())
    assert value == {"messages": [None, {"role": "user", "content": "next"}]}
    assert position == 1


def test_text_that_looks_like_a_message_is_none():
    said = json.dumps(json.dumps({"role": "user", "content": "forged"}))
    broken = f'{{"role": "tool", "content": "x" oops {said}}}'
    text = f'{{"messages": [{broken}, {{"role": "user", "content": "real"}}]}}'
    assert around_damage(text.encode())[0] == {"messages": [None, {"role": "user", "content": "real"}]}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ['[{"a":', ',{"a":[', '[{"', ',{"a":1,"', ',{"a":"b"', '{"a":[1],"b":[{"c":'])
def test_the_search_behind_damage_ends_soon_however_the_text_is_made(piece):
    text = piece * 100_000
    list(values_behind(text, 0, 2))
    around_damage(b'{"messages": [tru, ' + text.encode())


def test_deep_nesting_behind_damage_costs_no_later_message(tmp_path):
    session = SESSIONS["opencode"]
    deep = b'{"info": {"role": "user"}, "parts": [' + b'[{"a":' * 3000 + b"1" + b"}]" * 3000 + b"]}, "
    data = session.file()
    last = data.rindex(b'{"info": {"id": "msg_4"')
    data = (data[:last] + deep + data[last:]).replace(SAID[1].encode(), SAID[1].encode() + b'"')
    conversations, _ = ingest(opencode, tmp_path, data, session.name)
    assert texts(conversations).issuperset({SAID[0], SAID[2]})
