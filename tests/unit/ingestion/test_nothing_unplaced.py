"""What every format keeps or counts: results of thought/action logs, calls without an answer, copies."""

from __future__ import annotations

import shutil

import pytest
from claude_records import Log, call, text
from run_pieces import ingested, stored
from small_formats import JUNK, read_json
from test_claude_beside import Session
from test_claude_code import read

from composer_replication.ingestion.formats import sweagent
from composer_replication.ingestion.session_sources import OLDER
from composer_replication.ingestion.source_files import _count_unplaced, count_contents
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn


def test_thought_and_action_logs_of_older_versions_keep_every_result(tmp_path):
    """They do not say of a message that it is an observation, and the last one is in the trajectory alone."""
    history = [
        {"role": "system", "content": "SETTING", "agent": "primary"},
        {"role": "user", "content": "a demonstration", "agent": "primary", "is_demo": True},
        {"role": "user", "content": "ISSUE", "agent": "primary"},
    ]
    steps = []
    for number in range(20):
        action = "submit" if number == 19 else f"open {number}"
        said = {
            "role": "assistant",
            "content": f"T{number}\n```\n{action}\n```",
            "thought": f"T{number}",
            "action": action,
        }
        history += [{**said, "agent": "primary"}, {"role": "user", "content": f"O{number}", "agent": "primary"}]
        steps.append({"action": action, "observation": f"O{number}", "thought": f"T{number}"})
    del history[-1]
    (conversation,), report = read_json(sweagent, tmp_path, "a.traj", {"history": history, "trajectory": steps})
    results = {result.call_id: result.text for turn in conversation.turns for result in turn.results}
    calls = [each for turn in conversation.turns for each in turn.calls]
    assert [results[each.id] for each in calls] == [f"O{number}" for number in range(20)]
    assert [turn.text for turn in conversation.turns if turn.role == "user"] == ["a demonstration", "ISSUE"]
    assert not _count_unplaced(conversation)
    assert not report.skipped


def test_another_step_at_the_end_is_no_result_of_the_last_action(tmp_path):
    history = [{"role": "assistant", "content": "x", "thought": "x", "action": "ls", "agent": "a"}]
    steps = [{"action": "pwd", "observation": "/"}]
    (conversation,), _ = read_json(sweagent, tmp_path, "a.traj", {"history": history, "trajectory": steps})
    assert dict(_count_unplaced(conversation)) == {"calls in flight at the end of a log": 1}


def turns_of(*steps):
    where = Provenance(file="f", lines=(1,))
    origins = {"user": "human", "assistant": "model", "tool": "tool"}
    return Conversation(
        id="c",
        format="f",
        turns=tuple(
            Turn(
                id=str(number),
                role=role,
                origin=origins[role],
                text=said if role == "user" else "",
                calls=tuple(ToolCall(id=each, name="t", arguments={}) for each in said if role == "assistant"),
                results=tuple(ToolResult(call_id=each, text="", is_error=None) for each in said if role == "tool"),
                provenance=where,
            )
            for number, (role, said) in enumerate(steps)
        ),
    )


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([("assistant", "ab"), ("tool", "ab")], {}),
        ([("assistant", "ab"), ("tool", "a"), ("assistant", "c")], {"calls without a result": 1, "flight": 1}),
        ([("assistant", "ab"), ("tool", "a")], {"flight": 1}),
        ([("assistant", "a"), ("user", "[Request interrupted by user for tool use]")], {"interrupted": 1}),
        ([("assistant", "a"), ("user", "what?")], {"calls without a result": 1}),
        ([("assistant", "a"), ("tool", "aa")], {"second results of a call": 1}),
        ([("assistant", "a"), ("tool", "a"), ("assistant", "a"), ("tool", "a")], {}),
    ],
)
def test_calls_without_a_result_are_counted_by_what_became_of_them(steps, expected):
    names = {"flight": "calls in flight at the end of a log", "interrupted": "calls that the user interrupted"}
    conversation = turns_of(*steps)
    wanted = {names.get(name, name): number for name, number in expected.items()}
    assert dict(_count_unplaced(conversation)) == wanted
    assert {name: count_contents(conversation)[name] for name in wanted} == wanted


def test_the_summary_of_an_ingest_says_so_by_format(tmp_path):
    log = Log(session="lost")
    log.user("go")
    log.assistant("m1", call("t1"))
    log.assistant("m2", text("on"), call("t2"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "lost.jsonl").write_bytes(log.lines())
    run, summary = ingested(tmp_path / "run", tmp_path / "logs")
    told = [(each.format, each.what, each.number) for each in summary.unplaced]
    assert told == [
        ("claude_code", "calls without a result", 1),
        ("claude_code", "calls in flight at the end of a log", 1),
    ]
    assert run.meta("conversations").counts["calls without a result"] == 1
    _, again = ingested(run.root, tmp_path / "logs")
    assert (again.num_reused, again.unplaced) == (1, summary.unplaced)


LONG = "Please look at every file of the project and tell me in a few words what it is for. " * 6


def grown(number_of_answers, *, is_split=False, session="5e55-10-a"):
    log = Log(session=session)
    log.user(LONG, uuid="11111111-2222-3333-4444-555555555555")
    for number in range(number_of_answers):
        log.assistant(f"msg_{number:016d}", text(f"answer {number}"), call(f"t{number}", "Bash", command="ls"))
        log.result(f"t{number}", f"files {number}")
    if is_split:
        log.assistant("msg_9999999999999999", text("half"))
    return log


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_session_under_two_names_is_one_and_the_longer_one_stays(tmp_path, names):
    old, new = names
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"{old}.jsonl").write_bytes(grown(2).lines())
    (tmp_path / "logs" / f"{new}.jsonl").write_bytes(grown(5).lines())
    run, summary = ingested(tmp_path / "run", tmp_path / "logs")
    assert list(stored(run)) == [new]
    assert {each.reason: each.number for each in summary.skipped} == {OLDER: 1}


def test_a_copy_cut_in_the_middle_of_a_message_is_an_older_copy_too(tmp_path):
    (tmp_path / "logs").mkdir()
    whole = grown(3, is_split=True)
    whole.assistant("msg_9999999999999999", text("and the rest"), call("t9", "Bash", command="ls"))
    whole.result("t9")
    (tmp_path / "logs" / "a.jsonl").write_bytes(grown(3, is_split=True).lines())
    (tmp_path / "logs" / "b.jsonl").write_bytes(whole.lines())
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    assert list(stored(run)) == ["b"]


def test_equal_parts_before_a_compaction_do_not_hide_that_the_rest_went_on(tmp_path):
    def parted(num_answers):
        log = grown(3)
        log.add("system", parent=None, subtype="compact_boundary", logicalParentUuid=log.last)
        log.user("Summary of it all. " * 30, isCompactSummary=True, uuid="66666666-7777-8888-9999-000000000000")
        for number in range(num_answers):
            log.assistant(f"msg_after_{number:08d}", text(f"later {number}"))
        return log

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.jsonl").write_bytes(parted(1).lines())
    (tmp_path / "logs" / "b.jsonl").write_bytes(parted(4).lines())
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    assert list(stored(run)) == ["b#0", "b#1"]


def test_sessions_that_only_begin_alike_both_stay(tmp_path):
    (tmp_path / "logs").mkdir()
    first, second = grown(2), grown(2)
    first.assistant("msg_aaaaaaaaaaaaaaaa", text("one way"))
    second.assistant("msg_bbbbbbbbbbbbbbbb", text("another way"))
    second.result("nobody")
    (tmp_path / "logs" / "a.jsonl").write_bytes(first.lines())
    (tmp_path / "logs" / "b.jsonl").write_bytes(second.lines())
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    assert list(stored(run)) == ["a", "b"]
    shutil.rmtree(run.root)


def test_wrong_values_in_the_queue_and_in_attachments_never_raise(tmp_path):
    log = Session()
    log.user("go")
    log.queue("enqueue", "x")
    log.attach("queued_command", prompt="y", origin={"kind": "human"}, commandMode="prompt")
    log.attach("file", filename="a", content={"type": "text", "file": {"content": "c"}})
    log.attach("todo_reminder", content=[{"content": "t", "status": "s"}])
    log.queue("remove", "x", reason="absorbed_mid_turn")
    log.assistant("m1", text("done"))
    for number, record in enumerate(log.records[1:-1], start=1):
        holders = [record, *(value for value in record.values() if isinstance(value, dict))]
        for holder in holders:
            for key in list(holder):
                for junk in (*JUNK, {"type": {}}, [{"type": {}, "status": []}]):
                    before, holder[key] = holder[key], junk
                    found, _ = read(tmp_path, log.lines())
                    texts = [turn.text for each in found for turn in each.turns]
                    assert (texts[0], texts[-1]) == ("go", "done"), (number, key, junk)
                    holder[key] = before
