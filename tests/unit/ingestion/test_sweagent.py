"""SWE-agent: history with function calls, history with actions in the text, and the trajectory alone."""

from __future__ import annotations

import json

from small_formats import flipped, read_bytes, read_json, read_path, replaced, sample, tally

from composer_replication.ingestion.formats import sweagent


def _call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY = [
    {"role": "system", "content": "SETTING", "agent": "main", "message_type": "system_prompt"},
    {"role": "user", "content": "a demonstration", "is_demo": True, "agent": "main"},
    {"role": "user", "content": "ISSUE", "agent": "main", "message_type": "observation"},
    {
        "role": "assistant",
        "content": "Look.",
        "thought": "Look.",
        "action": "find_file a.py",
        "agent": "main",
        "tool_calls": [_call("c1", "find_file", '{"file_name": "a.py"}')],
        "message_type": "action",
        "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
    },
    {
        "role": "tool",
        "content": [{"type": "text", "text": "found"}],
        "tool_call_ids": ["c1"],
        "message_type": "observation",
    },
    {"role": "assistant", "content": "Edit.", "tool_calls": [_call("c2", "edit", "{broken")], "message_type": "action"},
    {"role": "tool", "content": "no", "tool_call_ids": ["c9"], "message_type": "observation"},
]
STEPS = [
    {
        "action": "ls -F\n",
        "observation": "a.py\n",
        "response": "List.\n```\nls -F\n```",
        "thought": "List.",
        "state": "{}",
    },
    {"action": "", "observation": "No action found.", "response": "Hm.", "thought": "Hm.", "state": "{}"},
    {"action": "submit", "observation": None, "response": "Done.", "thought": "Done.", "state": "{}"},
]


def test_history_with_function_calls(tmp_path):
    document = {
        "environment": "swe_main",
        "trajectory": STEPS,
        "history": HISTORY,
        "info": {"exit_status": "submitted"},
    }
    (conversation,), report = read_json(sweagent, tmp_path, "repo__1.traj", document)
    turns = conversation.turns
    assert conversation.id == "repo__1"
    assert [(turn.role, turn.origin) for turn in turns[:4]] == [
        ("system", "meta"),
        ("user", "copied"),
        ("user", "human"),
        ("assistant", "model"),
    ]
    assert (turns[3].text, turns[3].thinking) == ("Look.", "hm")
    assert (turns[3].calls[0].name, turns[3].calls[0].arguments) == ("find_file", {"file_name": "a.py"})
    assert [(each.call_id, each.text, each.is_error) for each in turns[4].results] == [("c1", "found", None)]
    assert (turns[5].calls[0].arguments, turns[5].calls[0].raw_arguments) == ({}, "{broken")
    assert turns[6].results[0].call_id == "c9"
    assert dict(report.skipped) == {"tool result without its call": 1}
    assert conversation.extra == {"exit_status": "submitted", "environment": "swe_main"}


def test_actions_without_function_calls_are_shell_lines(tmp_path):
    history = [
        {"role": "user", "content": "ISSUE", "message_type": "observation"},
        {"role": "assistant", "content": "List.\n```\nls\n```", "thought": "List.", "action": "ls"},
        {"role": "user", "content": "a.py", "message_type": "observation"},
        {"role": "user", "content": "also mind this"},
    ]
    (conversation,), report = read_json(sweagent, tmp_path, "a.traj", {"history": history})
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "tool", "user"]
    asked = conversation.turns[1]
    assert (asked.text, asked.calls[0].name, asked.calls[0].arguments) == ("List.", "bash", {"input": "ls"})
    assert asked.extra == {"content": "List.\n```\nls\n```"}
    assert conversation.turns[2].results[0].call_id == asked.calls[0].id
    assert not report.skipped


def test_trajectory_alone(tmp_path):
    (conversation,), report = read_json(sweagent, tmp_path, "a.traj", {"trajectory": STEPS, "history": []})
    assert [turn.role for turn in conversation.turns] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert conversation.turns[0].calls[0].arguments == {"input": "ls -F\n"}
    assert conversation.turns[0].extra == {"content": STEPS[0]["response"], "state": "{}"}
    assert conversation.turns[1].results[0].text == "a.py\n"
    assert tally([conversation]) == (3, 1, 2, 1, 0)
    assert not report.skipped


def test_every_attempt_is_a_conversation(tmp_path):
    attempt = {"history": HISTORY}
    conversations, _ = read_json(sweagent, tmp_path, "a.traj", {"attempts": [attempt, 3, attempt], **attempt})
    assert [each.id for each in conversations] == ["a:0", "a:1"]


def test_sample_counts():
    path = sample("sweagent_function_calling_simple.traj")
    history = json.loads(path.read_text())["history"]
    roles = [message["role"] for message in history]
    calls = sum(len(message.get("tool_calls") or []) for message in history)
    results = sum(len(message["tool_call_ids"]) for message in history if message["role"] == "tool")
    conversations, report = read_path(sweagent, path)
    assert tally(conversations) == (
        roles.count("assistant"),
        roles.count("system") + roles.count("user"),
        calls,
        results,
        0,
    )
    assert [turn.text for turn in conversations[0].turns if turn.role == "assistant"] == [
        message["content"] for message in history if message["role"] == "assistant"
    ]
    assert not report.skipped


def test_sniff(tmp_path):
    assert sweagent.sniff(json.dumps({"history": HISTORY}).encode(), tmp_path / "x.json")
    assert sweagent.sniff(json.dumps({"trajectory": STEPS}).encode()[:60], tmp_path / "x.traj")
    assert not sweagent.sniff(b'{"history": [{"action": "run", "args": {}}]}', tmp_path / "x.json")
    assert not sweagent.sniff(b"[]", tmp_path / "x.traj")


def test_junk_costs_no_neighbour(tmp_path):
    for index, history in replaced(HISTORY):
        conversations, report = read_json(sweagent, tmp_path, "a.traj", {"history": history})
        texts = {turn.text for each in conversations for turn in each.turns}
        kept = {each["content"] for n, each in enumerate(HISTORY) if n != index and each["role"] != "tool"}
        assert kept <= texts
        assert sum(report.skipped.values()) >= 1
    for _, steps in replaced(STEPS):
        read_json(sweagent, tmp_path, "a.traj", {"trajectory": steps})
    whole = json.dumps({"history": HISTORY, "trajectory": STEPS}).encode()
    for data in (b"", b"null", b"[]", b'{"history": 3}', b'{"attempts": 3}', *flipped(whole, 200)):
        read_bytes(sweagent, tmp_path, "a.traj", data)
        sweagent.sniff(data, tmp_path / "a.traj")


def test_a_cut_document_keeps_its_whole_messages(tmp_path):
    whole = json.dumps({"history": HISTORY}).encode()
    (conversation,), report = read_bytes(sweagent, tmp_path, "a.traj", whole[:-10])
    assert [turn.text for turn in conversation.turns][:3] == ["SETTING", "a demonstration", "ISSUE"]
    assert report.skipped["invalid JSON document"] == 1
