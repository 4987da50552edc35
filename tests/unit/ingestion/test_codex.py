"""Codex rollouts: only response items are read, compaction begins a new context, and damage costs one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_records import CODEX_META as META
from format_records import codex_event as event
from format_records import codex_item as item
from format_records import codex_line as line
from format_records import codex_message as message
from session_bytes import all_fixtures, counted, fixture, head, ingest, ingest_file, jsonl, mutations, texts

from composer_replication.ingestion.formats import codex
from composer_replication.types import Link, Usage

SESSION = [
    META,
    message("developer", "Be careful."),
    message("user", "<environment_context>\n<cwd>/w</cwd>\n</environment_context>"),
    message("user", "Fix it."),
    event("user_message", message="Fix it."),
    line("turn_context", {"model": "gpt-x", "cwd": "/w"}),
    item(type="reasoning", summary=[{"type": "summary_text", "text": "I look first."}], encrypted_content="gAAA"),
    event("agent_reasoning", text="I look first."),
    message("assistant", "I look.", id="msg_1"),
    event("agent_message", message="I look."),
    item(type="function_call", name="shell", arguments='{"command": ["ls"]}', call_id="c1"),
    item(type="custom_tool_call", name="apply_patch", input="*** Begin Patch", call_id="c2"),
    event("token_count", info={"last_token_usage": {"input_tokens": 9, "cached_input_tokens": 4, "output_tokens": 3}}),
    event("token_count", info={"last_token_usage": {"input_tokens": 90, "output_tokens": 30}}),
    item(type="function_call_output", call_id="c1", output="a.py"),
    item(type="custom_tool_call_output", call_id="c2", output='{"output": "no", "metadata": {"exit_code": 1}}'),
    item(type="web_search_call", status="completed", id="ws_1", action={"type": "search", "query": "q"}),
    message("assistant", "Done."),
]


def test_a_session_becomes_turns_in_the_order_of_its_response_items(tmp_path):
    [conversation], report = ingest(codex, tmp_path, jsonl(*SESSION))
    assert [(turn.role, turn.origin, turn.text) for turn in conversation.turns] == [
        ("system", "meta", "Be careful."),
        ("user", "meta", "<environment_context>\n<cwd>/w</cwd>\n</environment_context>"),
        ("user", "human", "Fix it."),
        ("assistant", "model", "I look."),
        ("tool", "tool", ""),
        ("assistant", "model", ""),
        ("assistant", "model", "Done."),
    ]
    assert (conversation.id, conversation.cwd, conversation.agent_version) == ("s-1", "/w", "0.104.0")
    assert not report.skipped
    assert report.counts["ignored event_msg"] == 5


def test_reasoning_text_and_calls_of_one_answer_are_one_turn(tmp_path):
    [conversation], _ = ingest(codex, tmp_path, jsonl(*SESSION))
    turn = conversation.turns[3]
    assert (turn.id, turn.thinking, turn.model) == ("msg_1", "I look first.", "gpt-x")
    assert [(call.id, call.name, call.arguments) for call in turn.calls] == [
        ("c1", "shell", {"command": ["ls"]}),
        ("c2", "apply_patch", {"input": "*** Begin Patch"}),
    ]
    assert turn.provenance.lines == (7, 9, 11, 12)
    assert turn.usage == Usage(input_tokens=5, output_tokens=3, cache_read_tokens=4)  # the repeated count is not added
    assert conversation.turns[5].calls[0].arguments == {"type": "search", "query": "q"}


def test_results_keep_their_flag_where_the_output_has_one(tmp_path):
    [conversation], _ = ingest(codex, tmp_path, jsonl(*SESSION))
    results = conversation.turns[4].results
    assert [(result.call_id, result.text, result.is_error) for result in results] == [
        ("c1", "a.py", None),
        ("c2", "no", True),
    ]


@pytest.mark.parametrize(
    ("output", "text", "is_error"),
    [
        ("plain", "plain", None),
        ([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb", None),
        ({"content": "no", "success": False}, "no", True),
        ('{"output": "ok", "metadata": {"exit_code": 0, "duration_seconds": 1.0}}', "ok", False),
        ('{"output": "mine", "other": 1}', '{"output": "mine", "other": 1}', None),
        ("{broken", "{broken", None),
        (None, "", None),
    ],
)
def test_outputs_in_every_shape(tmp_path, output, text, is_error):
    call = item(type="function_call", name="f", call_id="c")
    lines = jsonl(META, call, item(type="function_call_output", call_id="c", output=output))
    [conversation], _ = ingest(codex, tmp_path, lines)
    [result] = conversation.turns[-1].results
    assert (result.text, result.is_error) == (text, is_error)


@pytest.mark.parametrize(
    ("given", "arguments", "raw"),
    [
        ({"arguments": '{"a": 1}'}, {"a": 1}, None),
        ({"arguments": {"a": 1}}, {"a": 1}, None),
        ({}, {}, None),
        ({"arguments": ""}, {}, None),
        ({"arguments": '{"a": '}, {}, '{"a": '),
        ({"arguments": "[1]"}, {}, "[1]"),
    ],
)
def test_arguments_in_every_shape(tmp_path, given, arguments, raw):
    [conversation], _ = ingest(codex, tmp_path, jsonl(META, item(type="function_call", name="f", call_id="c", **given)))
    [call] = conversation.turns[0].calls
    assert (call.arguments, call.raw_arguments) == (arguments, raw)


def test_compaction_begins_a_new_conversation_linked_to_the_old_one(tmp_path):
    history = [message("user", "Fix it.")["payload"], message("user", "Prefix. We did a.")["payload"]]
    compacted = line("compacted", {"message": "We did a.", "replacement_history": history})
    lines = jsonl(
        META, message("user", "Fix it."), message("assistant", "a", id="m1"), compacted, message("assistant", "b")
    )
    [before, after], _ = ingest(codex, tmp_path, lines)
    assert (before.id, after.id, after.session_id) == ("s-1", "s-1:1", "s-1")
    assert after.parent == Link(kind="compaction", conversation_id="s-1", turn_id="m1")
    assert texts(before) == ["Fix it.", "a"]
    assert [(turn.text, turn.origin) for turn in after.turns] == [
        ("Fix it.", "copied"),
        ("Prefix. We did a.", "summary"),
        ("b", "model"),
    ]


def test_compaction_without_a_history_leaves_the_summary(tmp_path):
    lines = jsonl(META, message("user", "q"), line("compacted", {"message": "Summary."}), message("assistant", "b"))
    [_, after], _ = ingest(codex, tmp_path, lines)
    assert [(turn.role, turn.origin, turn.text) for turn in after.turns] == [
        ("user", "summary", "Summary."),
        ("assistant", "model", "b"),
    ]


def test_a_copied_answer_is_not_merged_with_a_new_one(tmp_path):
    history = [item(type="function_call", name="f", call_id="c1")["payload"]]
    compacted = line("compacted", {"message": "", "replacement_history": history})
    result = item(type="function_call_output", call_id="c1", output="x")
    lines = jsonl(META, message("user", "q"), compacted, item(type="function_call", name="g", call_id="c2"), result)
    [_, after], report = ingest(codex, tmp_path, lines)
    assert [(turn.origin, [call.id for call in turn.calls]) for turn in after.turns] == [
        ("copied", ["c1"]),
        ("model", ["c2"]),
        ("tool", []),
    ]
    assert not report.skipped


def test_what_is_not_known_is_named(tmp_path):
    odd = [
        line("news", {}),
        {"type": "response_item"},
        item(type="dance"),
        item(type="message", role="elf", content="x"),
    ]
    orphan = item(type="function_call_output", call_id="nobody", output="x")
    [conversation], report = ingest(codex, tmp_path, jsonl(META, message("user", "q"), *odd, orphan))
    assert conversation.turns[1].results[0].call_id == "nobody"
    assert dict(report.skipped) == {
        "unknown record type news": 1,
        "response_item without a payload": 1,
        "unknown record type response_item/dance": 1,
        "unknown role elf": 1,
        "tool result without its call": 1,
    }


def test_a_session_without_meta_is_named_after_its_file(tmp_path):
    [conversation], _ = ingest(codex, tmp_path, jsonl(message("user", "q")), "rollout-7.jsonl")
    assert conversation.id == "rollout-7"


def test_any_value_anywhere_is_survived(tmp_path):
    compacted = line("compacted", {"message": "s", "replacement_history": [message("user", "q")["payload"]]})
    records = [*SESSION, compacted]
    lines = [(n, other) for n, record in enumerate(records) for other in mutations(record)]
    marker = message("user", "still here")
    for place, other in lines:
        data = jsonl(*records[:place], other, marker, *records[place + 1 :])
        conversations, _ = ingest(codex, tmp_path, data)
        assert any("still here" in texts(conversation) for conversation in conversations)
        codex.sniff(data, Path("session.jsonl"))


def test_nesting_without_end_costs_only_its_own_line(tmp_path):
    deep = b'{"type":"response_item","payload":{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}}\n"
    [conversation], report = ingest(codex, tmp_path, jsonl(META) + deep + jsonl(message("user", "q")))
    assert texts(conversation) == ["q"]
    assert dict(report.skipped) == {"nested too deeply": 1}


def test_sniff_knows_a_head_that_ends_inside_its_first_line():
    meta = line("session_meta", {"id": "s", "base_instructions": {"text": "x" * 100_000}})
    assert codex.sniff(jsonl(meta)[: 64 * 1024], Path("session.jsonl"))


def test_sniff_claims_the_codex_samples_and_no_others(shared_dir):
    claimed = [path for path in all_fixtures(shared_dir) if codex.sniff(head(path), path)]
    assert claimed == sorted(fixture(shared_dir, "codex").glob("*.jsonl"))


def test_the_samples_hold_what_a_plain_count_finds(shared_dir):
    for path in sorted(fixture(shared_dir, "codex").glob("*.jsonl")):
        conversations, report = ingest_file(codex, path)
        found, expected = counted(conversations), count(path)
        assert found == expected, path.name
        assert not report.skipped


def count(path):
    """One pass over the file; consecutive items of the model are one answer unless a text comes after text or calls."""
    seen = {"user": 0, "system": 0, "assistant": 0, "calls": 0, "results": 0, "errors": 0}
    answering, has_content = False, False
    for row in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(row)
        if record["type"] != "response_item":
            continue
        payload = record["payload"]
        if payload.get("role") == "user":
            seen["user"] += 1
            answering, has_content = False, False
        elif payload.get("role") == "assistant" or payload["type"] == "function_call":
            is_text = payload.get("role") == "assistant"
            seen["calls"] += not is_text
            seen["assistant"] += not answering or (is_text and has_content)
            answering, has_content = True, True
    return seen
