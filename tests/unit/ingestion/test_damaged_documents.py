"""One broken byte in a document: the whole messages before it stay, and the break is counted with its place.

Logs of lines lose the broken line alone; a document is one value, and what stands behind a break is not guessed at.
"""

from __future__ import annotations

import json
import random

import pytest
from format_sessions import SAID, SESSIONS
from session_bytes import ingest

from composer_replication.ingestion.formats import claude_code
from composer_replication.ingestion.json_documents import salvage_messages

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
def test_a_web_export_keeps_the_records_before_the_broken_one(tmp_path, at):
    words = ["one", "two", "three", "four"]
    data = export(*words).replace(b'"content": "%b"' % words[at].encode(), b'"content": tru')
    conversations, report = ingest(claude_code, tmp_path, data, "session.json")
    assert texts(conversations) == set(words[:at])
    assert [(skip.reason, skip.line) for skip in report.skips if skip.reason == "invalid JSON document"] == [
        ("invalid JSON document", at + 1)
    ]
    lines = {turn.text: turn.provenance.lines for each in conversations for turn in each.turns}
    assert lines == {word: (number,) for number, word in enumerate(words[:at], start=1)}


def test_a_byte_that_is_no_text_costs_a_web_export_nothing_else(tmp_path):
    conversations, report = ingest(
        claude_code, tmp_path, export("one", "t@o", "three").replace(b"@", b"\xff"), "s.json"
    )
    assert texts(conversations) == {"one", "t\ufffdo", "three"}
    assert [(skip.reason, skip.line) for skip in report.skips] == [("invalid JSON document", 2)]


@pytest.mark.parametrize("session", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_broken_message_costs_none_before_it(tmp_path, session):
    """Every byte of the message in the middle is broken in turn."""
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
            assert SAID[0] in texts(conversations), data[at - 30 : at + 30]


def test_records_of_a_list_stay_that_stand_before_a_broken_one(tmp_path):
    session = SESSIONS["tau_bench"]
    whole = session.file()
    last = whole.rindex(SAID[1].encode())
    assert whole.index(SAID[1].encode()) < last
    data = whole[: last - 1] + b"tru" + whole[last + len(SAID[1]) + 1 :]
    conversations, _ = ingest(session.module, tmp_path, data, session.name)
    assert [SAID[1] in texts([each]) for each in conversations] == [True, False]
    assert [SAID[2] in texts([each]) for each in conversations] == [True, False]


def test_what_lies_deeper_than_messages_is_never_taken_for_one():
    inner = '{"role": "user", "content": [{"role": "user", "content": "inner"}, tru, {"role": "user", "x": 1}]}'
    text = f'{{"messages": [{{"role": "user", "content": "first"}}, {inner}]}}'
    assert salvage_messages(text.encode()) == ({"messages": [{"role": "user", "content": "first"}]}, 2)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ['[{"a":', ',{"a":[', '[{"', ',{"a":1,"', ',{"a":"b"', '{"a":[1],"b":[{"c":'])
def test_looking_for_the_damage_ends_soon_however_the_text_is_made(piece):
    salvage_messages(b'{"messages": [tru, ' + (piece * 100_000).encode())
    salvage_messages(b'{"messages": [' + (piece * 100_000).encode())
