"""OpenCode exports, written here from the documented shape: no real sample with a free licence was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_records import OPENCODE_INFO as INFO
from format_records import opencode_message as message
from format_records import opencode_text as text
from format_records import opencode_tool as tool
from session_bytes import all_fixtures, counted, head, ingest, jsonl, mutations, texts
from small_formats import read_json

from composer_replication.action_text import action_text, has_text_after_call
from composer_replication.ingestion.formats import opencode
from composer_replication.types import Link, Usage

TOKENS = {"input": 10, "output": 5, "reasoning": 2, "cache": {"read": 4, "write": 3}}


MESSAGES = [
    message("user", text("Fix it."), text("Called the Read tool.", synthetic=True), id="msg_1"),
    message(
        "assistant",
        {"type": "step-start"},
        {"type": "reasoning", "text": "I look."},
        text("Looking."),
        tool("c1", "completed", output="fine"),
        tool("c2", "error", error="no such file"),
        tool("c3", "running"),
        {"type": "step-finish", "tokens": TOKENS},
        id="msg_2",
        parentID="msg_1",
        modelID="model-x",
        tokens=TOKENS,
    ),
    message("assistant", {"type": "step-start"}, text("Done."), {"type": "step-finish"}, id="msg_3"),
]


def export(messages=MESSAGES, **info):
    return json.dumps({"info": {**INFO, **info}, "messages": messages}, indent=2).encode()


def test_an_export_becomes_turns(tmp_path):
    [conversation], report = ingest(opencode, tmp_path, export(), "session.json")
    assert [(turn.id, turn.role, turn.origin, turn.text) for turn in conversation.turns] == [
        ("msg_1", "user", "human", "Fix it.\nCalled the Read tool."),
        ("msg_2", "assistant", "model", "Looking."),
        ("msg_2:results", "tool", "tool", ""),
        ("msg_3", "assistant", "model", "Done."),
    ]
    assert (conversation.id, conversation.title, conversation.cwd) == ("ses_1", "Fix", "/w")
    assert (conversation.agent_version, conversation.parent) == ("1.0.1", None)
    assert not report.skipped
    assert counted([conversation]) == count(export())


def count(data):
    """One pass over the export."""
    messages = json.loads(data)["messages"]
    states = [part["state"]["status"] for each in messages for part in each["parts"] if part["type"] == "tool"]
    return {
        "user": sum(each["info"]["role"] == "user" for each in messages),
        "system": 0,
        "assistant": sum(each["info"]["role"] == "assistant" for each in messages),
        "calls": len(states),
        "results": sum(state in ("completed", "error") for state in states),
        "errors": states.count("error"),
    }


def test_reasoning_calls_results_and_tokens_stay_structured(tmp_path):
    [conversation], _ = ingest(opencode, tmp_path, export(), "session.json")
    asked, answered = conversation.turns[1:3]
    assert (asked.thinking, asked.model, asked.parent_id, asked.timestamp) == ("I look.", "model-x", "msg_1", "7")
    assert [(call.id, call.name, call.arguments) for call in asked.calls] == [
        (id, "read", {"path": id}) for id in ("c1", "c2", "c3")
    ]
    assert [(result.call_id, result.text, result.is_error) for result in answered.results] == [
        ("c1", "fine", False),
        ("c2", "no such file", True),
    ]
    assert asked.usage == Usage(input_tokens=10, output_tokens=7, cache_read_tokens=4, cache_creation_tokens=3)


def test_a_message_of_several_steps_is_one_turn_per_step_and_its_usage_counts_once(tmp_path):
    start = {"type": "step-start"}
    parts = [start, text("a"), tool("c1", "completed", output="x"), start, text("b")]
    data = export([message("assistant", *parts, tokens=TOKENS)])
    [conversation], _ = ingest(opencode, tmp_path, data, "session.json")
    assert [(turn.id, turn.text) for turn in conversation.turns] == [
        ("msg_1", "a"),
        ("msg_1:results", ""),
        ("msg_1#2", "b"),
    ]
    assert [turn.usage is None for turn in conversation.turns] == [True, True, False]


def test_text_the_agent_wrote_for_the_user_is_not_human(tmp_path):
    data = export([message("user", text("Reminder.", synthetic=True), text("hidden", ignored=True))])
    [conversation], report = ingest(opencode, tmp_path, data, "session.json")
    assert [(turn.origin, turn.text) for turn in conversation.turns] == [("meta", "Reminder.")]
    assert report.counts["ignored opencode text"] == 1


def test_a_summary_begins_a_new_conversation(tmp_path):
    asks_for_secret = message("user", {"type": "compaction", "auto": True}, id="msg_4")
    summary = message("assistant", text("We did a."), id="msg_5", summary=True)
    data = export([*MESSAGES, asks_for_secret, summary, message("user", text("Go on."), id="msg_6")])
    [before, after], _ = ingest(opencode, tmp_path, data, "session.json")
    assert (before.id, after.id) == ("ses_1", "ses_1:1")
    assert after.parent == Link(kind="compaction", conversation_id="ses_1", turn_id="msg_3")
    assert [(turn.origin, turn.text) for turn in after.turns] == [("summary", "We did a."), ("human", "Go on.")]


def test_a_child_session_is_linked_to_its_parent(tmp_path):
    [conversation], _ = ingest(opencode, tmp_path, export(parentID="ses_0"), "session.json")
    assert conversation.parent == Link(kind="subagent", conversation_id="ses_0")


def test_an_answer_that_failed_is_kept_with_its_error(tmp_path):
    data = export([message("user", text("q")), message("assistant", id="msg_2", error={"name": "MessageAbortedError"})])
    [conversation], _ = ingest(opencode, tmp_path, data, "session.json")
    assert conversation.turns[1].extra == {"error": {"name": "MessageAbortedError"}}


def test_what_is_not_known_is_named(tmp_path):
    odd = message("assistant", text("a"), {"type": "dance"}, "text", tool("c1", "lost"), id="msg_2")
    data = export([message("user", text("q")), None, message("elf", text("?"), id="msg_9"), odd])
    [conversation], report = ingest(opencode, tmp_path, data, "session.json")
    assert texts(conversation) == ["q", "a"]
    assert dict(report.skipped) == {
        "message is no object": 1,
        "unknown role elf": 1,
        "unknown record type part/dance": 1,
        "part is no object": 1,
        "unknown tool status lost": 1,
    }


def test_a_cut_export_keeps_every_whole_message(tmp_path):
    data = export()
    [conversation], report = ingest(opencode, tmp_path, data[: data.index(b"Done.")], "session.json")
    assert texts(conversation) == ["Fix it.\nCalled the Read tool.", "Looking.", ""]
    assert dict(report.skipped) == {"invalid JSON document": 1}


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"\x00"])
def test_bytes_that_are_no_text_spoil_only_the_text_they_stand_in(tmp_path, damage):
    [conversation], report = ingest(opencode, tmp_path, export().replace(b"Fix it.", damage), "session.json")
    assert texts(conversation)[1:] == ["Looking.", "", "Done."]
    assert dict(report.skipped) == {"invalid JSON document": 1}


def test_damage_in_the_middle_keeps_what_stands_before_it(tmp_path):
    data = export().replace(b'"Done."', b"tru")
    [conversation], report = ingest(opencode, tmp_path, data, "session.json")
    assert texts(conversation) == ["Fix it.\nCalled the Read tool.", "Looking.", ""]
    assert dict(report.skipped) == {"invalid JSON document": 1}


def test_any_value_anywhere_is_survived(tmp_path):
    marker = message("user", text("still here"), id="marker")
    for place, each in enumerate(MESSAGES):
        for other in mutations(each):
            data = export([*MESSAGES[:place], other, *MESSAGES[place + 1 :], marker])
            conversations, _ = ingest(opencode, tmp_path, data, "session.json")
            assert texts(conversations[-1])[-1] == "still here"
    for other in mutations(INFO):
        data = json.dumps({"info": other, "messages": [marker]}).encode()
        assert texts(ingest(opencode, tmp_path, data, "session.json")[0][0]) == ["still here"]
        opencode.sniff(data, Path("session.json"))


def test_nesting_without_end_costs_only_its_own_message(tmp_path):
    deep = b'{"info":{"role":"user"},"parts":[{"type":"text","text":' + b"[" * 900 + b"]" * 900 + b"}]}"
    data = (
        b'{"info":{"id":"ses_1"},"messages":[' + deep + b"," + json.dumps(message("user", text("q"))).encode() + b"]}"
    )
    [conversation], report = ingest(opencode, tmp_path, data, "session.json")
    assert texts(conversation) == ["q"]
    assert dict(report.skipped) == {"nested too deeply": 1}


def test_sniff_knows_an_export_from_openai_messages():
    assert opencode.sniff(export(), Path("session.json"))
    assert opencode.sniff(export([]), Path("session.json"))
    long = export([message("user", text("x" * 100_000))])
    assert opencode.sniff(long[: 64 * 1024], Path("session.json"))
    assert not opencode.sniff(jsonl({"info": {}, "messages": [{"role": "user", "content": "q"}]}), Path("a.json"))


def test_sniff_claims_none_of_the_other_formats_samples(shared_dir):
    assert not [path for path in all_fixtures(shared_dir) if opencode.sniff(head(path), path)]


def test_text_after_a_call_is_known_to_follow_it(tmp_path):
    tool = {"type": "tool", "callID": "c", "tool": "bash", "state": {"status": "completed", "input": {}, "output": "o"}}
    parts = [
        {"type": "reasoning", "text": "first"},
        {"type": "text", "text": "before"},
        tool,
        {"type": "reasoning", "text": "second"},
        {"type": "text", "text": "after"},
    ]
    document = {"info": {"id": "s"}, "messages": [{"info": {"id": "m", "role": "assistant"}, "parts": parts}]}
    (conversation,), _ = read_json(opencode, tmp_path, "a.json", document)
    turn = conversation.turns[0]
    assert has_text_after_call(turn)
    shown = ["[THINKING] first\n", "before", "[TOOL_USE] name=bash input={}", "[THINKING] second", "after"]
    assert action_text(turn) == "\n".join(shown)
