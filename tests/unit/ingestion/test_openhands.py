"""OpenHands: events, pairs and bare events; calls by model response; errors only where the format flags them."""

from __future__ import annotations

import json

from small_formats import flipped, read_bytes, read_json, read_path, replaced, sample, tally

from composer_replication.ingestion.formats import openhands


def _metadata(call_id, name, *calls, response="r1", text="Thinking."):
    made = [{"id": id, "type": "function", "function": {"name": tool, "arguments": args}} for id, tool, args in calls]
    message = {"role": "assistant", "content": text, "tool_calls": made}
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}
    answer = {"id": response, "model": "m-1", "choices": [{"message": message}], "usage": usage}
    return {"tool_call_metadata": {"function_name": name, "tool_call_id": call_id, "model_response": answer}}


BOTH = (("c1", "execute_bash", '{"command": "ls"}'), ("c2", "edit", '{"path": "a"}'))
EVENTS = [
    {"id": 0, "source": "agent", "action": "system", "args": {"content": "SYSTEM", "openhands_version": "0.35.0"}},
    {"id": 1, "source": "user", "action": "message", "args": {"content": "TASK"}, "timestamp": "2025-04-30T16:32:54.7"},
    {"id": 2, "source": "user", "action": "recall", "args": {"query": "TASK"}},
    {
        "id": 3,
        "source": "environment",
        "observation": "recall",
        "content": "Added workspace context",
        "extras": {"microagent_knowledge": [{"name": "git", "content": "USE GIT"}]},
    },
    {"id": 4, "source": "agent", "action": "run", "args": {"command": "ls"}, **_metadata("c1", "execute_bash", *BOTH)},
    {
        "id": 5,
        "source": "agent",
        "observation": "run",
        "cause": 4,
        "content": "boom",
        "success": False,
        **_metadata("c1", "execute_bash", *BOTH),
    },
    {"id": 6, "source": "agent", "action": "edit", "args": {"path": "a"}, **_metadata("c2", "edit", *BOTH)},
    {"id": 7, "source": "agent", "observation": "edit", "cause": 6, "content": "ERROR: no match", "extras": {}},
    {"id": 8, "source": "agent", "observation": "error", "content": "no such parameter", "extras": {}},
    {"id": 9, "source": "agent", "action": "message", "args": {"content": "DONE"}},
]


def _line(**record):
    return json.dumps({"instance_id": "repo-1", "test_result": {}, **record}).encode() + b"\n"


def test_events_of_one_response_are_one_turn(tmp_path):
    (conversation,), report = read_bytes(openhands, tmp_path, "out.jsonl", _line(history=EVENTS))
    turns = conversation.turns
    assert (conversation.id, conversation.agent_version) == ("repo-1", "0.35.0")
    assert [(turn.role, turn.origin, turn.text) for turn in turns[:3]] == [
        ("system", "meta", "SYSTEM"),
        ("user", "human", "TASK"),
        ("user", "meta", "USE GIT"),
    ]
    asked, answered, stray, last = turns[3:]
    assert (asked.text, asked.model, asked.extra) == ("Thinking.", "m-1", {"response_id": "r1"})
    assert [(call.id, call.arguments) for call in asked.calls] == [("c1", {"command": "ls"}), ("c2", {"path": "a"})]
    assert (asked.usage.input_tokens, asked.usage.cache_read_tokens, asked.usage.output_tokens) == (60, 40, 7)
    assert [(each.call_id, each.is_error) for each in answered.results] == [("c1", True), ("c2", None)]
    assert [(each.call_id, each.is_error, each.text) for each in stray.results] == [("", True, "no such parameter")]
    assert (last.role, last.text, last.usage) == ("assistant", "DONE", None)
    assert dict(report.skipped) == {"tool result without its call": 1}
    assert turns[1].timestamp == "2025-04-30T16:32:54.7"
    assert {turn.provenance.lines for turn in turns} == {(1,)}


def test_pairs_and_bare_events(tmp_path):
    run = {"action": "run", "args": {"command": "ls", "thought": "List.", "hidden": False}}
    output = {"observation": "run", "content": "a.py", "extras": {"exit_code": 2}}
    task = {"source": "user", "action": "message", "args": {"content": "TASK"}}
    pairs = [[task, {"observation": "null", "content": ""}], [run, output], [{"action": "finish", "args": {}}, None]]
    bare = [task, run, output, {"action": "finish", "args": {}}]
    for history in (pairs, bare):
        (conversation,), report = read_bytes(openhands, tmp_path, "out.jsonl", _line(history=history))
        assert [turn.role for turn in conversation.turns] == ["user", "assistant", "tool", "assistant"]
        asked = conversation.turns[1]
        assert (asked.text, asked.calls[0].name, asked.calls[0].arguments) == ("List.", "run", {"command": "ls"})
        (result,) = conversation.turns[2].results
        assert (result.call_id, result.text, result.is_error) == (asked.calls[0].id, "a.py", True)
        assert not report.skipped


def test_a_saved_trajectory_is_the_list_itself(tmp_path):
    (conversation,), _ = read_json(openhands, tmp_path, "run-7.json", EVENTS)
    assert conversation.id == "run-7"
    assert [turn.provenance.lines for turn in conversation.turns[:4]] == [(1,), (2,), (4,), (5,)]


def test_several_runs_of_one_instance_have_their_own_ids(tmp_path):
    conversations, _ = read_bytes(
        openhands, tmp_path, "out.jsonl", _line(history=EVENTS) + b"{bad\n" + _line(history=EVENTS)
    )
    assert [each.id for each in conversations] == ["repo-1", "repo-1#2"]
    assert conversations[1].turns[0].provenance.lines == (3,)


def test_sample_counts():
    path = sample("openhands_multi_swe_bench_output.jsonl")
    assistants = others = calls = results = errors = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        for event in json.loads(line)["history"]:
            kind = event.get("action")
            made_by_model = kind is not None and "tool_call_metadata" in event
            assistants += made_by_model
            calls += made_by_model and event["tool_call_metadata"]["total_calls_in_response"]
            others += kind in ("system", "message") and not made_by_model
            others += event.get("observation") == "recall" and bool(event["extras"]["microagent_knowledge"])
            results += "observation" in event and event["observation"] != "recall"
            errors += event.get("observation") == "error" or event.get("success") is False
    conversations, report = read_path(openhands, path)
    assert len(conversations) == 3
    assert tally(conversations) == (assistants, others, calls, results, errors)
    assert (assistants, errors) == (105, 21)
    assert dict(report.skipped) == {"tool result without its call": 2}


def test_sniff(tmp_path):
    assert openhands.sniff(_line(history=EVENTS), tmp_path / "out.jsonl")
    assert openhands.sniff(_line(history=[[EVENTS[4], EVENTS[5]]])[:200], tmp_path / "out.jsonl")
    assert openhands.sniff(json.dumps(EVENTS).encode(), tmp_path / "run.json")
    assert not openhands.sniff(b'{"history": [{"role": "user", "action": "x", "content": ""}]}', tmp_path / "x.json")
    assert not openhands.sniff(b'{"type": "user", "source": "x", "args": 1}', tmp_path / "x.jsonl")


def test_junk_costs_no_neighbour(tmp_path):
    for index, history in replaced(EVENTS):
        conversations, _ = read_bytes(openhands, tmp_path, "out.jsonl", _line(history=history))
        texts = {turn.text for each in conversations for turn in each.turns}
        said = {
            event["args"]["content"]
            for n, event in enumerate(EVENTS)
            if n != index and "content" in event.get("args", {})
        }
        assert said <= texts
        assert index in (4, 6) or "Thinking." in texts
    whole = _line(history=EVENTS)
    for data in (b"", b"null", b"[]", b'{"history": 3}', *flipped(whole, 200)):
        read_bytes(openhands, tmp_path, "out.jsonl", data)
        conversations, _ = read_bytes(openhands, tmp_path, "out.jsonl", data.replace(b"\n", b" ") + b"\n" + whole)
        assert len(conversations[-1].turns) == 7
        openhands.sniff(data, tmp_path / "out.jsonl")
