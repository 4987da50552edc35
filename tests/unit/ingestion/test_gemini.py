"""Gemini chats: documents, logs that are folded first, and damage that costs one line or message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_records import GEMINI_META as META
from format_records import gemini_answer as answer
from format_records import gemini_tool as tool
from format_records import gemini_user as user
from session_bytes import all_fixtures, counted, fixture, head, ingest, ingest_file, jsonl, mutations, texts

from composer_replication.ingestion.formats import gemini
from composer_replication.types import Link, Usage

CALLS = [
    tool("c1", "success", {"output": "fine"}),
    tool("c2", "error", {"error": "no such file"}),
    tool("c3", "cancelled", {"rows": 1}),
    tool("c4", "executing"),
]
THOUGHTS = [{"subject": "Plan", "description": "Look first."}, {"description": "Then act."}]
TOKENS = {"input": 10, "output": 5, "cached": 4, "thoughts": 2, "tool": 0, "total": 17}
MESSAGES = [
    user("Fix it."),
    {"id": "i1", "timestamp": "t1", "type": "info", "content": "Update available"},
    answer("I look.", thoughts=THOUGHTS, toolCalls=CALLS, tokens=TOKENS),
    answer("Done.", id="a2"),
]


@pytest.mark.parametrize("as_log", [False, True])
def test_a_chat_becomes_turns_as_document_and_as_log(tmp_path, as_log):
    document = {**META, "messages": MESSAGES}
    data = jsonl(META, *MESSAGES) if as_log else json.dumps(document, indent=2).encode()
    [conversation], report = ingest(gemini, tmp_path, data)
    assert gemini.sniff(data, Path("session.json"))
    assert [(turn.id, turn.role, turn.origin, turn.text) for turn in conversation.turns] == [
        ("u1", "user", "human", "Fix it."),
        ("a1", "assistant", "model", "I look."),
        ("a1:results", "tool", "tool", ""),
        ("a2", "assistant", "model", "Done."),
    ]
    assert (conversation.id, conversation.cwd) == ("s-1", "/w")
    assert report.counts["ignored gemini info"] == 1
    assert not report.skipped


def test_thoughts_calls_results_and_tokens_stay_structured(tmp_path):
    [conversation], _ = ingest(gemini, tmp_path, jsonl(META, *MESSAGES))
    asked, answered = conversation.turns[1:3]
    assert asked.thinking == "Plan: Look first.\n\nThen act."
    assert [(call.id, call.name, call.arguments) for call in asked.calls] == [
        (id, "run", {"a": id}) for id in ("c1", "c2", "c3", "c4")
    ]
    assert [(result.call_id, result.text, result.is_error) for result in answered.results] == [
        ("c1", "fine", False),
        ("c2", "no such file", True),
        ("c3", '{"rows":1}', True),
    ]
    assert asked.usage == Usage(input_tokens=6, output_tokens=7, cache_read_tokens=4)
    assert asked.model == "gemini-x"


def test_the_last_record_of_an_id_wins_and_keeps_its_place(tmp_path):
    log = [
        META,
        user("q"),
        answer("", toolCalls=[tool("c1", "executing")]),
        user("r", "u2"),
        answer("a", toolCalls=CALLS),
    ]
    [conversation], _ = ingest(gemini, tmp_path, jsonl(*log))
    assert [turn.id for turn in conversation.turns] == ["u1", "a1", "a1:results", "u2"]
    assert conversation.turns[1].provenance.lines == (3, 5)
    assert counted([conversation])["calls"] == 4


def test_a_rewind_takes_its_message_and_everything_after_it(tmp_path):
    log = [META, user("q"), answer("a"), user("r", "u2"), {"$rewindTo": "a1"}, answer("b", "a2")]
    [conversation], report = ingest(gemini, tmp_path, jsonl(*log))
    assert texts(conversation) == ["q", "b"]
    assert report.counts["rewound messages"] == 2


def test_a_rewind_to_nowhere_takes_everything_and_is_counted(tmp_path):
    [conversation], report = ingest(gemini, tmp_path, jsonl(META, user("q"), {"$rewindTo": "x"}, user("r", "u2")))
    assert texts(conversation) == ["r"]
    assert dict(report.skipped) == {"rewind to an unknown message": 1}


def test_set_changes_the_session_and_may_correct_the_messages(tmp_path):
    log = [META, user("q"), answer("a"), {"$set": {"summary": "Title", "messages": [user("q")]}}, answer("b", "a2")]
    [conversation], _ = ingest(gemini, tmp_path, jsonl(*log))
    assert (conversation.title, texts(conversation)) == ("Title", ["q", "b"])


def test_set_with_new_messages_in_place_of_answers_begins_a_new_context(tmp_path):
    log = [META, user("q"), answer("a"), user("r", "u2"), {"$set": {"messages": [user("Sum.", "s1"), user("r", "u2")]}}]
    [before, after], _ = ingest(gemini, tmp_path, jsonl(*log, answer("b", "a2")))
    assert (texts(before), texts(after)) == (["q", "a", "r"], ["Sum.", "r", "b"])
    assert after.parent == Link(kind="compaction", conversation_id="s-1", turn_id="u2")
    assert [turn.origin for turn in after.turns] == ["human", "copied", "model"]


def test_a_broken_first_line_leaves_the_log_a_log(tmp_path):
    data = b'{"sessionId": "s-1", "proj\n' + jsonl(user("q"), answer("a"))
    [conversation], report = ingest(gemini, tmp_path, data)
    assert (conversation.id, texts(conversation)) == ("session", ["q", "a"])
    assert dict(report.skipped) == {"invalid JSON": 1}
    assert gemini.sniff(data, Path("session.jsonl"))


@pytest.mark.parametrize("indent", [None, 2])
def test_a_cut_document_keeps_every_whole_message(tmp_path, indent):
    data = json.dumps({**META, "messages": MESSAGES}, indent=indent).encode()
    [conversation], report = ingest(gemini, tmp_path, data[: data.index(b"Done.")], "session.json")
    assert texts(conversation) == ["Fix it.", "I look.", ""]
    assert dict(report.skipped) == {"invalid JSON document": 1}


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"\x00"])
def test_bytes_that_are_no_text_spoil_only_the_text_they_stand_in(tmp_path, damage):
    data = json.dumps({**META, "messages": MESSAGES}).encode().replace(b"Fix it.", damage)
    [conversation], report = ingest(gemini, tmp_path, data, "session.json")
    assert texts(conversation)[1:] == ["I look.", "", "Done."]
    assert dict(report.skipped) == {"invalid JSON document": 1}


def test_what_is_not_known_is_named(tmp_path):
    odd = [{"id": "x", "type": "dance"}, {"$push": {}}, answer("a", toolCalls=["c"])]
    [conversation], report = ingest(gemini, tmp_path, jsonl(META, user("q"), *odd))
    assert texts(conversation) == ["q", "a"]
    assert dict(report.skipped) == {
        "unknown record type dance": 1,
        "unknown record type None": 1,
        "tool call of unknown shape": 1,
    }


def test_any_value_anywhere_is_survived(tmp_path):
    marker = user("still here", "marker")
    records = [META, *MESSAGES, {"$set": {"messages": [user("q")]}}, {"$rewindTo": "a2"}]
    for place, record in enumerate(records):
        for other in mutations(record):
            data = jsonl(*records[:place], other, *records[place + 1 :], marker)
            conversations, _ = ingest(gemini, tmp_path, data)
            assert texts(conversations[-1])[-1] == "still here"
            gemini.sniff(data, Path("session.jsonl"))


def test_nesting_without_end_costs_only_its_own_message(tmp_path):
    deep = b'{"id":"x","type":"user","content":' + b"[" * 900 + b"]" * 900 + b"}\n"
    [conversation], report = ingest(gemini, tmp_path, jsonl(META) + deep + jsonl(user("q")))
    assert texts(conversation) == ["q"]
    assert dict(report.skipped) == {"nested too deeply": 1}


def test_recorded_answers_of_the_service_are_no_chat():
    recorded = {"method": "generateContentStream", "response": [{"candidates": [{"content": {"role": "model"}}]}]}
    assert not gemini.sniff(jsonl(recorded, recorded), Path("session.json"))


def test_sniff_claims_the_chats_among_the_samples_and_no_others(shared_dir):
    claimed = [path for path in all_fixtures(shared_dir) if gemini.sniff(head(path), path)]
    assert claimed == sorted(fixture(shared_dir, "other").glob("gemini_agentsview_*.json"))


def test_the_samples_hold_what_a_plain_count_finds(shared_dir):
    for path in fixture(shared_dir, "other").glob("gemini_agentsview_*.json"):
        conversations, report = ingest_file(gemini, path)
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        calls = [call for message in messages for call in message.get("toolCalls", [])]
        assert counted(conversations) == {
            "user": sum(message["type"] == "user" for message in messages),
            "system": 0,
            "assistant": sum(message["type"] == "gemini" for message in messages),
            "calls": len(calls),
            "results": sum(call["status"] in ("success", "error", "cancelled") for call in calls),
            "errors": sum(call["status"] in ("error", "cancelled") for call in calls),
        }
        assert not report.skipped
