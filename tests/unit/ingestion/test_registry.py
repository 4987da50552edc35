"""Folders of mixed things: found, told apart by content, sub-agents linked, nothing lost and nothing followed twice."""

from __future__ import annotations

import json

import pytest
from claude_records import Log, call, text

from composer_replication.errors import InputError
from composer_replication.ingestion import FORMATS, ClaudeCodeIngester, IngestReport, ingest
from composer_replication.messages import ToolSchemas
from composer_replication.runs.files import conversation_from_row, conversation_to_row
from refusals import refusal


@pytest.fixture
def project(tmp_path):
    """A Claude project folder: a session, its sub-agent, another format, and things that are no sessions."""
    main = Log()
    main.user("go")
    main.assistant("m1", call("t1", "Task", prompt="look"))
    main.result("t1", "found", toolUseResult={"agentId": "abc", "status": "completed"})
    main.assistant("m2", text("done"))
    agent = Log()
    agent.user("look", isSidechain=True, agentId="abc")
    agent.assistant("a1", text("found"), isSidechain=True, agentId="abc")
    folder = tmp_path / "projects" / "-repo"
    (folder / "s-1" / "subagents").mkdir(parents=True)
    (folder / "s-1.jsonl").write_bytes(main.lines())
    (folder / "s-1" / "subagents" / "agent-abc.jsonl").write_bytes(agent.lines())
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (folder / "package.json").write_text('{"name": "x", "version": "1.0.0"}')
    (folder / "notes.txt").write_text("not a session")
    return tmp_path / "projects"


def conversations(path, **options):
    report = IngestReport()
    return {each.id: each for each in ingest([path], report, scrubber=None, **options)}, report


def test_a_mixed_folder_gives_every_session_with_sub_agents_linked_to_their_call(project):
    found, report = conversations(project)
    assert len(found) == 3
    link = found["s-1/agent-abc"].parent
    assert (link.kind, link.conversation_id, link.call_id) == ("subagent", "s-1", "t1")
    assert report.counts["files: claude_code"] == 2
    assert report.counts["files: openai_messages"] == 1
    assert report.skipped["no known format"] == 1
    assert report.counts["calls"] == 1


def test_excluded_and_ignored_files_are_not_read(project):
    assert "s-1/agent-abc" not in conversations(project, exclude=["subagents"])[0]
    (project / ".crfignore").write_text("# private\n*/s-1*\n")
    assert not any(key.startswith("s-1") for key in conversations(project)[0])


def test_links_to_folders_are_not_followed_round_and_round(project):
    (project / "-repo" / "loop").symlink_to(project)
    assert len(conversations(project)[0]) == 3


def test_a_path_without_a_session_is_an_error_that_lists_the_formats(tmp_path):
    (tmp_path / "package.json").write_text("{}")
    with refusal(InputError, what=str(tmp_path)) as error:
        conversations(tmp_path)
    assert [name for name in FORMATS if name not in error.value.fix] == []
    with refusal(InputError, what=str(tmp_path / "nowhere"), fix="~/.claude/projects"):
        conversations(tmp_path / "nowhere")


def test_rows_hold_everything_and_come_back_equal(project):
    for conversation in conversations(project)[0].values():
        row = json.loads(json.dumps(conversation_to_row(conversation)))
        assert conversation_from_row(row) == conversation


def test_schemas_are_inferred_from_calls_that_worked(tmp_path):
    log = Log()
    log.user("go")
    log.assistant("m1", call("c1", "Edit", path="a", old="x", new="y"), call("c2", "Edit", path="b", count=2))
    log.assistant("m1", call("c3", "Edit", file="wrong"))
    log.result("c1")
    log.result("c2")
    log.result("c3", "missing path", is_error=True)
    path = tmp_path / "s.jsonl"
    path.write_bytes(log.lines())
    (conversation,) = conversations(path)[0].values()
    schemas = ToolSchemas()
    schemas.add_row(conversation_to_row(conversation))
    schema = schemas.schemas()["claude_code", "Edit"]
    assert schema["required"] == ["path"]
    assert schema["properties"] == {
        "count": {"type": "integer"},
        "new": {"type": "string"},
        "old": {"type": "string"},
        "path": {"type": "string"},
    }


def test_the_known_ingester_gives_one_state_per_assistant_message_with_secrets_out(tmp_path):
    secret = "ghp_" + "a1B2" * 9
    log = Log()
    log.user(f"my token is {secret}")
    log.assistant("m1", text("I see"), call("c1", "Bash", command=f"curl -H 'Authorization: Bearer {secret}'"))
    log.result("c1", f"used {secret}")
    log.assistant("m2", text("done"))
    path = tmp_path / "s-1.jsonl"
    path.write_bytes(log.lines() + b'{"cut')
    format_module = ClaudeCodeIngester()
    states = list(format_module.ingest(path))
    assert [state["state_id"] for state in states] == ["s-1::0000", "s-1::0001"]
    assert secret not in json.dumps(states)
    assert states[0]["student_action"].startswith("I see\n[TOOL_USE] name=Bash input=")
    stats = format_module.last_stats
    assert (stats.n_states_emitted, stats.n_assistant_turns, stats.n_tool_use_blocks) == (2, 2, 1)
    assert stats.skipped_truncated_lines == 1
    assert stats.version_warnings == []
    raw = list(ClaudeCodeIngester(scrub=False).ingest(path))
    assert secret in json.dumps(raw)


def test_sub_agent_files_are_skipped_unless_asked_for(project):
    agent = project / "-repo" / "s-1" / "subagents" / "agent-abc.jsonl"
    format_module = ClaudeCodeIngester()
    assert list(format_module.ingest(agent)) == []
    assert format_module.last_stats.skipped_subagent == 2
    assert len(list(ClaudeCodeIngester(skip_sidechain=False).ingest(agent))) == 1
