"""ATIF: documents of others read, our conversations written and read back as they were."""

from __future__ import annotations

import json
from dataclasses import replace

import orjson
from atif_checks import assert_same, validate, written
from small_formats import JUNK, flipped, read_bytes, read_json, replaced

from composer_replication.canonical_json import encode
from composer_replication.ingestion.formats import atif
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.runs.files import conversation_to_row
from composer_replication.types import Conversation, Link, Provenance, ToolCall, ToolResult, Turn, Usage

FOREIGN = {
    "schema_version": "ATIF-v1.8",
    "session_id": "run-1",
    "trajectory_id": "main",
    "agent": {"name": "other-agent", "version": "1.2", "model_name": "m-1", "tool_definitions": [{"type": "function"}]},
    "notes": "by hand",
    "steps": [
        {"step_id": 1, "source": "system", "message": "SYSTEM"},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "TASK"}], "is_copied_context": True},
        {
            "step_id": 3,
            "source": "agent",
            "timestamp": "2026-05-16T12:00:00Z",
            "message": "Asking.",
            "reasoning_content": "hm",
            "reasoning_effort": "high",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "task", "arguments": {"prompt": "p"}},
                {"tool_call_id": "c2", "function_name": "ls", "arguments": {}},
            ],
            "observation": {
                "results": [
                    {"source_call_id": "c1", "subagent_trajectory_ref": [{"trajectory_id": "sub"}]},
                    {"source_call_id": "c2", "content": "no", "extra": {"is_error": True}},
                ]
            },
            "metrics": {
                "prompt_tokens": 100,
                "cached_tokens": 40,
                "completion_tokens": 3,
                "cost_usd": 0.5,
                "prompt_token_ids": [1, 2],
                "completion_token_ids": [7, 8, 9],
                "logprobs": [-0.5, -1, -2.25],
            },
            "extra": {"theirs": 1},
        },
        {"step_id": 4, "source": "agent", "message": "dispatched", "llm_call_count": 0},
        {"step_id": 5, "source": "system", "message": "", "observation": {"results": [{"content": "restarted"}]}},
    ],
    "subagent_trajectories": [
        {
            "schema_version": "ATIF-v1.8",
            "trajectory_id": "sub",
            "agent": {"name": "other-agent", "version": "1.2"},
            "steps": [{"step_id": 1, "source": "user", "message": "p"}],
        }
    ],
}


def test_a_document_of_somebody_else(tmp_path):
    (main, sub), report = read_json(atif, tmp_path, "x.json", FOREIGN)
    system, user, asked, answered, dispatched, restarted = main.turns
    assert (main.id, main.session_id, main.agent_version, main.format) == ("main", "run-1", "1.2", "atif")
    assert main.extra["atif"]["notes"] == "by hand"
    assert (system.origin, user.origin, user.text, dispatched.origin) == ("meta", "copied", "TASK", "meta")
    assert (asked.text, asked.thinking, asked.model, asked.timestamp) == (
        "Asking.",
        "hm",
        "m-1",
        "2026-05-16T12:00:00Z",
    )
    assert asked.usage == Usage(input_tokens=60, output_tokens=3, cache_read_tokens=40)
    assert (asked.token_ids, asked.logprobs) == ((7, 8, 9), (-0.5, -1.0, -2.25))
    assert asked.extra["atif"] == {
        "reasoning_effort": "high",
        "cost_usd": 0.5,
        "prompt_token_ids": [1, 2],
        "extra": {"theirs": 1},
    }
    assert [(each.call_id, each.text, each.is_error) for each in answered.results] == [
        ("c1", "", None),
        ("c2", "no", True),
    ]
    assert (restarted.role, restarted.results[0].text, restarted.results[0].call_id) == ("tool", "restarted", "")
    assert sub.parent == Link(kind="subagent", conversation_id="main", turn_id=asked.id, call_id="c1")
    assert dict(report.skipped) == {"tool result without its call": 1}


def test_a_document_of_somebody_else_is_written_back_whole(tmp_path):
    (main, sub), _ = read_json(atif, tmp_path, "x.json", FOREIGN)
    document = to_atif(main, subagents=[sub])
    validate(document)
    theirs, ours = json.loads(json.dumps(FOREIGN)), json.loads(json.dumps(document))
    assert ours["agent"].items() >= {k: v for k, v in theirs["agent"].items() if k != "model_name"}.items()
    assert ours["notes"] == "by hand"
    step, was = ours["steps"][2], theirs["steps"][2]
    assert (step["tool_calls"], step["metrics"], step["reasoning_effort"]) == (
        was["tool_calls"],
        was["metrics"],
        "high",
    )
    assert step["observation"]["results"][0]["subagent_trajectory_ref"] == [{"trajectory_id": "sub"}]
    assert ours["steps"][1]["message"] == theirs["steps"][1]["message"]
    again, _ = read_bytes(atif, tmp_path, "out.json", orjson.dumps(document))
    assert [to_atif(again[0], subagents=again[1:])] == [document]


def test_subagents_are_linked_to_their_call(tmp_path):
    def turn(id, **fields):
        return Turn(id=id, provenance=Provenance(file="f", lines=(1,)), **fields)

    call = ToolCall(id="c1", name="task", arguments={})
    answer = ToolResult(call_id="c1", text="ok", is_error=False)
    parent = Conversation(
        id="p",
        format="claude_code",
        turns=(
            turn("a", role="assistant", origin="model", calls=(call,)),
            turn("r", role="tool", origin="tool", results=(answer,)),
        ),
    )
    link = Link(kind="subagent", conversation_id="p", turn_id="r", call_id="c1")
    said = turn("u", role="user", origin="copied", text="copied")
    child = Conversation(id="k", format="claude_code", turns=(said,), parent=link)
    grandchild = replace(child, id="g", parent=Link(kind="sidechain", conversation_id="k"))
    circle = replace(child, id="p", parent=Link(kind="branch", conversation_id="g"))
    document = to_atif(parent, subagents=[child, grandchild, circle])
    validate(document)
    assert document["subagent_trajectories"][0]["steps"][0]["is_copied_context"] is True
    read, report = written(parent, tmp_path, [child, grandchild, circle])
    for each, was in zip(read, (parent, child, grandchild), strict=True):
        assert_same(each, was)
    assert not report.skipped


def test_infinite_logprobs_stay_in_the_document_and_never_reach_a_turn(tmp_path):
    where = Provenance(file="f", lines=(1,))
    turn = Turn(id="a", role="assistant", origin="model", logprobs=(float("-inf"), -1.5), provenance=where)
    document = to_atif(Conversation(id="c", format="atif", turns=(turn,)))
    (read,), _ = read_json(atif, tmp_path, "out.json", document)
    assert read.turns[0].logprobs is None
    encode(conversation_to_row(read), where="row")
    assert to_atif(read) == document


def test_what_the_schema_cannot_hold_survives(tmp_path):
    where = Provenance(file="f", lines=(3, 4))
    call = ToolCall(id="c1", name="x", arguments={}, raw_arguments="{broken")
    turns = (
        Turn(id="s", role="system", origin="meta", thinking="odd", model="m", timestamp="yesterday", provenance=where),
        Turn(
            id="a",
            role="assistant",
            origin="model",
            calls=(call,),
            token_ids=(1, 2),
            logprobs=(-0.25, -1.5),
            usage=Usage(input_tokens=1, output_tokens=2, cache_read_tokens=3, cache_creation_tokens=4),
            provenance=where,
            extra={"blocks": [["text", 3]]},
        ),
        Turn(
            id="r9",
            role="tool",
            origin="tool",
            results=(ToolResult(call_id="c9", text="?", is_error=True),),
            provenance=where,
        ),
        Turn(
            id="r1",
            role="tool",
            origin="tool",
            results=(ToolResult(call_id="c1", text="", is_error=None),),
            provenance=where,
        ),
    )
    conversation = Conversation(id="x", format="codex", turns=turns, title="t", cwd="/repo", extra={"k": [1]})
    validate(to_atif(conversation))
    (read,), report = written(conversation, tmp_path)
    assert_same(read, conversation)
    assert dict(report.skipped) == {"tool result without its call": 1}


def test_sniff(tmp_path):
    assert atif.sniff(json.dumps(FOREIGN).encode(), tmp_path / "x.json")
    assert atif.sniff(json.dumps({"steps": FOREIGN["steps"]}).encode()[:300], tmp_path / "x.json")
    assert not atif.sniff(b'{"schema_version": "1", "messages": []}', tmp_path / "x.json")
    assert not atif.sniff(b"", tmp_path / "x.json")


def test_junk_costs_no_neighbour(tmp_path):
    steps = FOREIGN["steps"]
    for index, changed in replaced(steps):
        (main, *_), _ = read_json(atif, tmp_path, "x.json", {**FOREIGN, "steps": changed})
        texts = {turn.text for turn in main.turns}
        expected = {"SYSTEM", "TASK", "Asking.", "dispatched"}
        assert len(expected - texts) <= (index < 4)
    for junk in JUNK:
        for field in steps[2].keys() - {"source", "step_id"}:
            read, _ = read_json(
                atif, tmp_path, "x.json", {**FOREIGN, "steps": [steps[0], {**steps[2], field: junk}, steps[3]]}
            )
            assert {"SYSTEM", "dispatched"} <= {turn.text for turn in read[0].turns}
        ours = {
            "composer_replication": dict.fromkeys(("id", "role", "tool_turns", "extra", "read_from", "origin"), junk)
        }
        read, _ = read_json(
            atif, tmp_path, "x.json", {**FOREIGN, "extra": ours, "steps": [{**steps[2], "extra": ours}]}
        )
        assert [call.id for call in read[0].turns[0].calls] == ["c1", "c2"]
        for field in FOREIGN.keys() - {"steps"}:
            read, _ = read_json(atif, tmp_path, "x.json", {**FOREIGN, field: junk})
            assert len(read[0].turns) == 6
    for data in (b"", b"null", b"[]", b'{"steps": 3}', *flipped(json.dumps(FOREIGN).encode(), 300)):
        read_bytes(atif, tmp_path, "x.json", data)
        atif.sniff(data, tmp_path / "x.json")


def test_deeply_nested_subagents_do_not_break_the_stack(tmp_path):
    document = {"trajectory_id": "leaf", "steps": [{"source": "user", "message": "hi"}]}
    for index in range(400):
        document = {"trajectory_id": f"t{index}", "steps": document["steps"], "subagent_trajectories": [document]}
    conversations, _ = read_json(atif, tmp_path, "x.json", document)
    assert len(conversations) == 401
