"""Claude Code logs: what is merged, what is kept apart, and what must not get lost."""

from __future__ import annotations

import json

import pytest
from claude_records import Log, call, text, thinking

from composer_replication.action_text import action_text
from composer_replication.ingestion import ingest
from composer_replication.ingestion.formats import claude_code
from composer_replication.ingestion.source_files import IngestReport, SourceFile
from composer_replication.ingestion.states import states


def read(tmp_path, lines, *, name="s-1.jsonl", **options):
    path = tmp_path / name
    path.write_bytes(lines)
    report = IngestReport()
    return list(claude_code.read(SourceFile(path, name), report, **options)), report


def shape(conversation):
    return [
        (turn.role, turn.text, [c.id for c in turn.calls], [r.call_id for r in turn.results])
        for turn in conversation.turns
    ]


def test_a_message_split_over_records_is_one_turn_even_when_results_lie_between(tmp_path):
    log = Log()
    log.user("go")
    log.assistant("m1", thinking("hm"), usage={"output_tokens": 3, "input_tokens": 10})
    log.assistant("m1", text("both"), usage={"output_tokens": 3, "input_tokens": 10})
    first = log.assistant("m1", call("c1"), usage={"output_tokens": 9, "input_tokens": 10})
    log.result("c1")
    log.assistant("m1", call("c2"), parent=first, usage={"output_tokens": 9, "input_tokens": 10})
    log.result("c2", "bad", is_error=True)
    log.assistant("m2", text("done"))
    [conversation], report = read(tmp_path, log.lines())
    assert shape(conversation) == [
        ("user", "go", [], []),
        ("assistant", "both", ["c1", "c2"], []),
        ("tool", "", [], ["c1", "c2"]),
        ("assistant", "done", [], []),
    ]
    turn = conversation.turns[1]
    assert (turn.thinking, turn.model, turn.provenance.lines) == ("hm", "claude-x", (2, 3, 4, 6))
    assert (turn.usage.output_tokens, turn.usage.input_tokens) == (9, 10)  # the maximum, not the sum
    assert [result.is_error for result in conversation.turns[2].results] == [False, True]
    assert not report.skipped


def test_parents_without_a_message_do_not_cut_the_thread(tmp_path):
    log = Log()
    log.user("go")
    log.add("progress", data={})
    log.add("file-history-snapshot")
    log.assistant("m1", text("here"))
    [conversation], report = read(tmp_path, log.lines())
    assert [turn.text for turn in conversation.turns] == ["go", "here"]
    assert not report.skipped


def test_a_rewind_keeps_the_live_path_and_can_emit_the_other(tmp_path):
    log = Log()
    start = log.user("go")
    log.assistant("m1", text("wrong way"), call("c1"))
    log.result("c1", "no", is_error=True)
    log.user("other way", parent=start)
    log.assistant("m2", text("right"))
    [conversation], report = read(tmp_path, log.lines())
    assert [turn.text for turn in conversation.turns] == ["go", "other way", "right"]
    assert report.skipped["rewound branch"] == 2
    live, branch = read(tmp_path, log.lines(), with_branches=True)[0]
    assert [turn.text for turn in branch.turns] == ["wrong way", ""]
    assert (branch.parent.kind, branch.parent.conversation_id, branch.parent.turn_id) == ("branch", live.id, start)


def test_a_compaction_splits_the_session_and_links_the_parts(tmp_path):
    log = Log()
    log.user("first task")
    before = log.assistant("m1", text("long work"))
    log.add("system", parent=None, subtype="compact_boundary", logicalParentUuid=before)
    log.user("what happened so far", isCompactSummary=True)
    log.assistant("m2", text("going on"))
    (early, late), _ = read(tmp_path, log.lines())
    assert [turn.text for turn in early.turns] == ["first task", "long work"]
    assert [(turn.text, turn.origin) for turn in late.turns] == [
        ("what happened so far", "summary"),
        ("going on", "model"),
    ]
    assert (late.parent.kind, late.parent.conversation_id, late.parent.turn_id) == ("compaction", early.id, "m1")
    assert early.id != late.id


def test_inline_sidechains_are_conversations_of_their_own_linked_to_their_call(tmp_path):
    log = Log(version="1.0.98")
    log.user("go")
    main = log.assistant("m1", call("t1", "Task", prompt="look for x"))
    log.user("look for x", parent=None, isSidechain=True)
    log.assistant("a1", text("found"), isSidechain=True)
    log.result("t1", "found", parent=main)
    log.assistant("m2", text("thanks"))
    (conversation, side), _ = read(tmp_path, log.lines())
    assert [turn.text for turn in conversation.turns] == ["go", "", "", "thanks"]
    assert [turn.text for turn in side.turns] == ["look for x", "found"]
    assert (side.parent.kind, side.parent.turn_id, side.parent.call_id) == ("sidechain", "m1", "t1")


def test_meta_text_is_not_human(tmp_path):
    log = Log()
    log.user("caveat", isMeta=True)
    log.user("real")
    log.assistant("m1", text("ok"))
    [conversation], _ = read(tmp_path, log.lines())
    assert [turn.origin for turn in conversation.turns] == ["meta", "human", "model"]


def test_a_web_export_reads_like_a_log(tmp_path):
    log = Log()
    log.user("go")
    log.assistant("m1", text("ok"))
    document = json.dumps({"loglines": [*log.records, "not an object"]}).encode()
    [conversation], report = read(tmp_path, document, name="export.json")
    assert [turn.text for turn in conversation.turns] == ["go", "ok"]
    assert report.skipped == {"not a JSON object": 1}


def test_a_sub_agents_file_is_a_conversation_linked_to_its_session(tmp_path):
    log = Log()
    log.user("search", isSidechain=True, agentId="abc")
    log.assistant("m1", text("found"), isSidechain=True, agentId="abc")
    [conversation], _ = read(tmp_path, log.lines(), name="agent-abc.jsonl")
    assert [turn.text for turn in conversation.turns] == ["search", "found"]
    assert (conversation.id, conversation.parent.kind) == ("s-1/agent-abc", "subagent")
    assert conversation.parent.conversation_id == "s-1"


DAMAGE = {
    "truncated last line": lambda lines: lines + b'{"type": "user", "mess',
    "invalid JSON": lambda lines: b"{oops}\n" + lines,
    "invalid UTF-8": lambda lines: b'{"type": "\xff\xfe"}\n' + lines,
    "NUL bytes": lambda lines: b"\x00\x00\x00\n" + lines,
    "not a JSON object": lambda lines: b"[1, 2]\n" + lines,
    "unknown record type 'novel'": lambda lines: b'{"type": "novel", "uuid": "n1", "parentUuid": null}\n' + lines,
    "duplicate uuid": lambda lines: lines + lines.splitlines(keepends=True)[0],
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_damage_is_counted_with_its_place_and_costs_nothing_else(tmp_path, reason):
    log = Log()
    log.user("go")
    log.assistant("m1", text("ok"), call("c1"))
    log.result("c1")
    whole, _ = read(tmp_path, log.lines())
    damaged, report = read(tmp_path, DAMAGE[reason](log.lines()))
    assert shape(damaged[0]) == shape(whole[0])
    assert report.skipped[reason] == 1
    assert [(skip.reason, skip.file) for skip in report.skips if skip.reason == reason] == [(reason, "s-1.jsonl")]
    assert all(skip.line > 0 for skip in report.skips)


def test_orphans_cycles_and_results_without_calls_are_kept_and_counted(tmp_path):
    log = Log()
    log.user("go", parent="gone")
    log.assistant("m1", text("one"), uuid="x", parent="y")
    log.assistant("m2", text("two"), uuid="y", parent="x")
    log.result("nobody", "lost")
    log.assistant("m3", text("three"))
    [conversation], report = read(tmp_path, log.lines())
    assert [turn.text for turn in conversation.turns] == ["go", "one", "two", "", "three"]
    assert report.skipped["orphan attached to the record before it"] == 2
    assert report.skipped["tool result without its call"] == 1


def test_empty_and_foreign_files_give_nothing(tmp_path):
    assert read(tmp_path, b"")[0] == []
    assert read(tmp_path, b"\n\n")[0] == []


def test_the_action_text_keeps_the_order_of_blocks(tmp_path):
    log = Log()
    log.user("go")
    log.assistant("m1", text("first"), call("c1", "Read", path="a"), text("second"), thinking("late"))
    [conversation], _ = read(tmp_path, log.lines())
    assert action_text(conversation.turns[1]) == (
        'first\n[TOOL_USE] name=Read input={"path":"a"}\nsecond\n[THINKING] late'
    )


def test_states_hold_the_history_before_each_assistant_turn(tmp_path):
    log = Log()
    log.user("go")
    log.assistant("m1", thinking("hm"), text("look"), call("c1", path="a"))
    log.result("c1", "content")
    log.assistant("m2", text("done"))
    [conversation], _ = read(tmp_path, log.lines())
    (first, _), (second, turn) = states(conversation, system_prompt="S")
    assert [message["role"] for message in first] == ["system", "user"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "tool"]
    assert second[2]["tool_calls"][0]["function"] == {"name": "Read", "arguments": '{"path":"a"}'}
    assert "reasoning_content" not in second[2]
    assert turn.text == "done"
    kept = list(states(conversation, strip_thinking=False))[1][0]
    assert kept[2]["reasoning_content"] == "hm"


def test_a_history_limit_keeps_the_task_drops_the_oldest_first_and_never_splits_a_call_from_its_result(tmp_path):
    log = Log()
    log.user("x" * 400)
    log.assistant("m1", call("c1", path="a" * 100))
    log.result("c1", "y" * 100)
    log.user("next")
    log.assistant("m2", text("done"))
    [conversation], _ = read(tmp_path, log.lines())
    for limit, roles in (
        (10**6, ["user", "assistant", "tool", "user"]),
        (120, ["user", "user", "user"]),  # the task, what is left out, "next"
        (0, ["user", "user", "user"]),
    ):
        messages, _ = list(states(conversation, max_history_tokens=limit))[1]
        assert [message["role"] for message in messages[1:]] == roles, limit


def test_results_of_calls_the_service_runs_belong_to_them_sideways_too(tmp_path):
    """Parallel results are siblings: only the calls they answer tie them to the path that went on."""
    log = Log()
    log.user("go")
    first = log.assistant("m1", {**call("s1", "web_search", query="a"), "type": "server_tool_use"})
    second = log.assistant("m1", {**call("s2", "web_search", query="b"), "type": "server_tool_use"})
    log.result("s1", "one", parent=first)
    log.result("s2", "two", parent=second)
    log.assistant("m2", text("done"))
    [conversation], report = read(tmp_path, log.lines())
    assert [call.id for call in conversation.turns[1].calls] == ["s1", "s2"]
    assert [result.text for turn in conversation.turns for result in turn.results] == ["one", "two"]
    assert not report.skipped


@pytest.mark.parametrize("agent", [["abc"], {"id": "abc"}, 7, True, None, "", [[[]]], {"a": {"b": []}}])
@pytest.mark.parametrize("call_id", ["t1", ["t1"], {"id": "t1"}, 7, None])
def test_agents_are_named_by_texts_or_not_at_all(tmp_path, agent, call_id):
    log = Log()
    log.user("go")
    log.assistant("m1", {**call("t1", "Task"), "id": call_id})
    log.result(call_id, "found", toolUseResult={"agentId": agent})
    log.assistant("m2", text("done"))
    path = tmp_path / "s-1.jsonl"
    path.write_bytes(log.lines())
    conversations = list(ingest([path], IngestReport(), scrubber=None))
    for turn in conversations[0].turns:
        agents = turn.extra.get("agents", {})
        assert all(isinstance(each, str) for pair in agents.items() for each in pair)
    assert conversations[0].turns[-1].text == "done"
