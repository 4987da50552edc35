"""The tools that go into a request: the agent's own, in the shape under which earlier answers are kept."""

from __future__ import annotations

import json

import pytest
from run_pieces import ingested, run_states
from two_agents import CLAUDE_ONLY, CODEX_ONLY, claude_session, tool_names, two_agents_run

from composer_replication.teacher_replay.replay import request_of
from composer_replication.teacher_replay.requests import RequestBuilder, RequestSettings
from composer_replication.teacher_replay.teachers import read_teachers

TEACHER = {"slug": "t", "base_url": "http://localhost:1/v1", "input_per_mtok": 1, "output_per_mtok": 1}
GIVEN = {"shell": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}
# Of the last state, made by version 2 of tools.jsonl: paid answers of such runs are kept under keys like these.
KEYS = {
    "inferred": "a3d00706af88e153346ef39f305abaca1d210e40262b6baac9d78ba544c33f06",
    "given": "c741f62a1b7ac95c9cfcee439da4db0d9e85d1592d022c243e6f3822a930abd6",
}


def requests_of(run):
    (teacher,) = read_teachers([TEACHER], environment={})
    builder = RequestBuilder(teacher, RequestSettings())
    return [request_of(builder, state) for state in run_states(run)]


@pytest.mark.parametrize("how", KEYS)
def test_requests_of_a_run_with_one_agent_keep_their_keys_and_bytes(tmp_path, how):
    (tmp_path / "aaaaaaaa-1111.jsonl").write_bytes(claude_session())
    run, _ = ingested(tmp_path / "run", tmp_path / "aaaaaaaa-1111.jsonl", tools=GIVEN if how == "given" else None)
    *_, last = requests_of(run)
    tools = json.loads(last.body)["tools"]
    assert [(list(each), list(each["function"])) for each in tools] == [
        (["type", "function"], ["name", "parameters"])
    ] * 3
    assert tool_names(tools) == ["Edit", "Read", "shell"]
    assert last.key.hex() == KEYS[how]


def test_a_session_is_asked_about_with_the_tools_of_its_own_agent(tmp_path):
    sent = {}
    for state in run_states(two_agents_run(tmp_path)):
        sent.setdefault(state["session_id"], []).append(state["tools"])
    assert {identity: tool_names(tools[0]) for identity, tools in sent.items()} == {
        "aaaaaaaa-1111": ["Edit", "Read", "shell"],
        "s-1": ["apply_patch", "shell"],
    }
    assert all(each is tools[0] for tools in sent.values() for each in tools)
    shells = {name: tools[0][-1]["function"]["parameters"] for name, tools in sent.items()}
    assert list(shells["aaaaaaaa-1111"]["properties"]) == ["command", "timeout"]
    assert shells["s-1"]["properties"] == {"command": {"type": "array"}, "workdir": {"type": "string"}}
    for identity, others in (("aaaaaaaa-1111", CODEX_ONLY), ("s-1", CLAUDE_ONLY)):
        assert not [name for name in others if f'"{name}"' in json.dumps(sent[identity][0])]
