"""OpenAI messages: every container they come in, tau-bench's extras kept, and damage that costs one line or message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_records import openai_call as call
from session_bytes import all_fixtures, counted, fixture, head, ingest, ingest_file, jsonl, mutations, texts

from composer_replication.ingestion.formats import openai_messages
from composer_replication.types import Usage

MESSAGES = [
    {"role": "system", "content": "Be careful."},
    {"role": "user", "content": [{"type": "text", "text": "Fix"}, {"type": "text", "text": "it."}]},
    {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call("c1"), call("c2")]},
    {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "name": "look", "content": "two"},
    {"role": "assistant", "content": "Done.", "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
]
CHAT = {"messages": MESSAGES}
TAU = {"task_id": 3, "reward": 1.0, "info": {"source": "user"}, "traj": MESSAGES, "trial": 0}


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (jsonl(CHAT), ["session"]),
        (jsonl(CHAT, TAU), ["session:0", "session:1"]),
        (json.dumps(CHAT).encode(), ["session"]),
        (json.dumps(CHAT, indent=2).encode(), ["session"]),
        (json.dumps([TAU, TAU]).encode(), ["session:0", "session:1"]),
        (json.dumps([TAU], indent=1).encode(), ["session"]),
        (json.dumps(MESSAGES).encode(), ["session"]),
        (jsonl(*MESSAGES), ["session"]),
        (jsonl({"id": "mine", **CHAT}), ["mine"]),
    ],
)
def test_every_container_gives_the_same_conversation(tmp_path, data, ids):
    conversations, report = ingest(openai_messages, tmp_path, data)
    assert [conversation.id for conversation in conversations] == ids
    for conversation in conversations:
        assert [(turn.role, turn.origin, turn.text) for turn in conversation.turns] == [
            ("system", "meta", "Be careful."),
            ("user", "human", "Fix\nit."),
            ("assistant", "model", ""),
            ("tool", "tool", ""),
            ("assistant", "model", "Done."),
        ]
    assert not report.skipped
    assert openai_messages.sniff(data, Path("session.jsonl"))


def test_calls_and_results_stay_structured(tmp_path):
    [conversation], _ = ingest(openai_messages, tmp_path, json.dumps(CHAT).encode())
    asked, answered, done = conversation.turns[2:]
    assert asked.thinking == "I look."
    assert [(each.id, each.name, each.arguments) for each in asked.calls] == [
        ("c1", "look", {"path": "a"}),
        ("c2", "look", {"path": "a"}),
    ]
    assert [(each.call_id, each.text, each.is_error) for each in answered.results] == [
        ("c1", "one", None),
        ("c2", "two", None),
    ]
    assert done.usage == Usage(input_tokens=7, output_tokens=2)


def test_reward_and_task_stay_beside_the_conversation(tmp_path):
    [conversation], _ = ingest(openai_messages, tmp_path, jsonl(TAU))
    assert conversation.extra == {"task_id": 3, "reward": 1.0, "info": {"source": "user"}, "trial": 0}


@pytest.mark.parametrize(
    ("given", "arguments", "raw"),
    [('{"a": 1}', {"a": 1}, None), ({"a": 1}, {"a": 1}, None), (None, {}, None), ("{a", {}, "{a"), ("3", {}, "3")],
)
def test_arguments_in_every_shape(tmp_path, given, arguments, raw):
    data = jsonl({"messages": [{"role": "assistant", "tool_calls": [call(arguments=given)]}]})
    [conversation], _ = ingest(openai_messages, tmp_path, data)
    [made] = conversation.turns[0].calls
    assert (made.arguments, made.raw_arguments) == (arguments, raw)


def test_custom_tools_take_text(tmp_path):
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    [conversation], _ = ingest(
        openai_messages, tmp_path, jsonl({"messages": [{"role": "assistant", "tool_calls": [custom]}]})
    )
    assert conversation.turns[0].calls[0].arguments == {"input": "*** Begin"}


def test_results_without_an_id_find_their_calls_by_name_and_order(tmp_path):
    messages = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "tool_calls": [call("c1", "g"), call("c2", "h"), call("c3", "g")]},
        {"role": "tool", "name": "h", "content": "h"},
        {"role": "tool", "name": "g", "content": "g first"},
        {"role": "tool", "content": "g second"},
    ]
    [conversation], report = ingest(openai_messages, tmp_path, jsonl({"messages": messages}))
    legacy, first, _, rest = conversation.turns
    assert first.results[0].call_id == legacy.calls[0].id
    assert [(each.call_id, each.text) for each in rest.results] == [("c2", "h"), ("c1", "g first"), ("c3", "g second")]
    assert not report.skipped


def test_what_is_not_known_is_named(tmp_path):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "elf", "content": "?"},
        "text",
        {"role": "assistant", "content": "a", "tool_calls": [None, {"id": "x"}]},
        {"role": "tool", "tool_call_id": "nobody", "content": "r"},
    ]
    [conversation], report = ingest(openai_messages, tmp_path, jsonl({"messages": messages}))
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "tool"]
    assert conversation.turns[-1].results[0].call_id == "nobody"
    assert dict(report.skipped) == {
        "unknown role elf": 1,
        "message is no object": 1,
        "tool call of unknown shape": 2,
        "tool result without its call": 1,
    }


@pytest.mark.parametrize("document", [CHAT, [TAU], MESSAGES])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_cut_document_keeps_every_whole_message(tmp_path, document, indent):
    data = json.dumps(document, indent=indent).encode()
    cut = data.index(b"Done.")
    [conversation], report = ingest(openai_messages, tmp_path, data[:cut])
    assert [turn.role for turn in conversation.turns] == ["system", "user", "assistant", "tool"]
    assert dict(report.skipped) == {"invalid JSON document": 1}


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"\x00"])
def test_bytes_that_are_no_text_spoil_only_the_text_they_stand_in(tmp_path, damage):
    data = json.dumps(CHAT, indent=2).encode().replace(b"Be careful.", b"Be " + damage)
    [conversation], report = ingest(openai_messages, tmp_path, data)
    assert texts(conversation)[1:] == ["Fix\nit.", "", "", "Done."]
    assert dict(report.skipped) == {"invalid JSON document": 1}


def test_any_value_anywhere_is_survived(tmp_path):
    marker = {"messages": [{"role": "user", "content": "still here"}]}
    for other in mutations(TAU):
        data = jsonl(other, marker)
        conversations, _ = ingest(openai_messages, tmp_path, data)
        assert texts(conversations[-1]) == ["still here"]
        openai_messages.sniff(data, Path("session.jsonl"))


def test_nesting_without_end_costs_only_its_own_message(tmp_path):
    deep = b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b'},{"role":"user","content":"q"}]}\n'
    [conversation], report = ingest(openai_messages, tmp_path, deep)
    assert texts(conversation) == ["q"]
    assert dict(report.skipped) == {"nested too deeply": 1}


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [{"info": {"role": "user"}, "parts": []}], "info": {"id": "ses_1"}},
        {"sessionId": "s", "messages": [{"id": "u", "type": "user", "content": "q"}]},
        {"type": "user", "message": {"role": "user", "content": "q"}, "uuid": "u"},
        {"type": "response_item", "payload": {"role": "user", "content": []}},
        {"history": [{"role": "user", "content": "q"}], "trajectory": []},
        {"messages": MESSAGES, "info": {}, "trajectory_format": "mini-swe-agent-1"},
    ],
)
def test_sniff_leaves_the_other_formats_alone(value):
    assert not openai_messages.sniff(jsonl(value), Path("session.jsonl"))
    assert not openai_messages.sniff(json.dumps(value, indent=2).encode(), Path("session.json"))


def test_sniff_claims_the_tau_bench_samples_and_no_others(shared_dir):
    claimed = [path.name for path in all_fixtures(shared_dir) if openai_messages.sniff(head(path), path)]
    assert claimed == ["taubench_airline_few_shot.jsonl", "taubench_gpt4o_airline_first3.json"]


def test_the_sample_holds_what_a_plain_count_finds(shared_dir):
    path = fixture(shared_dir, "other", "taubench_gpt4o_airline_first3.json")
    conversations, report = ingest_file(openai_messages, path)
    trajectories = json.loads(path.read_text(encoding="utf-8"))
    seen = {"user": 0, "system": 0, "assistant": 0, "calls": 0, "results": 0, "errors": 0}
    for each in trajectories:
        for message in each["traj"]:
            seen["results" if message["role"] == "tool" else message["role"]] += 1
            seen["calls"] += len(message.get("tool_calls") or [])
    assert counted(conversations) == seen
    assert seen["calls"] > 0
    assert [each.extra["reward"] for each in conversations] == [each["reward"] for each in trajectories]
    assert not report.skipped


def test_display_text_has_lost_its_calls_and_the_reason_says_so(shared_dir):
    path = fixture(shared_dir, "other", "taubench_airline_few_shot.jsonl")
    rows = path.read_text(encoding="utf-8").splitlines()
    assert any("assistant: None" in json.loads(row)["messages_display"] for row in rows)  # what was called is not there
    conversations, report = ingest_file(openai_messages, path)
    assert conversations == []
    assert dict(report.skipped) == {openai_messages.DISPLAY_ONLY: len(rows)}
    assert [skip.line for skip in report.skips] == list(range(1, len(rows) + 1))
