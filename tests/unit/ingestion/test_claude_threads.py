"""Wrong message ids, inline sub-agents at work at once, rewinds to the start: each record stays in its own thread."""

from __future__ import annotations

from time import process_time

import pytest
from claude_records import Log, call, text
from test_claude_damage import compacted, of, read, texts, turns

from composer_replication.ingestion.formats.claude_code.links import GUESSED, NO_BOUNDARY, NO_PARENT, ORPHAN
from composer_replication.ingestion.formats.claude_code.record import SHARED


@pytest.mark.parametrize("taken", ["n2", "n0", "m1"])
def test_a_message_id_of_a_context_before_costs_nothing_and_is_counted(tmp_path, taken):
    log = compacted()
    whole, _ = read(tmp_path / "s-1.jsonl", log.lines())
    of(log, "g")["message"]["id"] = taken
    found, report = read(tmp_path / "s-1.jsonl", log.lines())
    assert list(map(texts, found)) == list(map(texts, whole))
    assert dict(report.skipped) == {SHARED: 1}


@pytest.mark.parametrize(("record", "taken"), [("a0", "n2"), ("e2", "m0"), ("a1", "n0")])
def test_a_message_id_of_another_turn_moves_nothing(tmp_path, record, taken):
    log = turns(3)
    [whole], _ = read(tmp_path / "s-1.jsonl", log.lines())
    of(log, record)["message"]["id"] = taken
    [found], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert texts(found) == texts(whole)
    assert [len(turn.calls) for turn in found.turns] == [len(turn.calls) for turn in whole.turns]
    assert dict(report.skipped) == {SHARED: 1}


def test_of_two_messages_with_one_id_that_with_more_records_keeps_it(tmp_path):
    log = turns(1)
    log.user("again")
    for at in range(3):
        log.assistant("long", text(f"part {at}"))
    of(log, "e0")["message"]["id"] = "long"
    [found], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert [turn.id for turn in found.turns if turn.text.startswith("part")] == ["long"]
    assert dict(report.skipped) == {SHARED: 1}


@pytest.mark.parametrize(("requests", "number"), [(("r1", "r1"), 3), (("r1", "r2"), 4), (("r1", None), 3)])
def test_within_a_turn_the_request_id_tells_messages_apart(tmp_path, requests, number):
    log = turns(1)
    for name, request in zip(("a0", "e0"), requests, strict=True):
        of(log, name)["message"]["id"] = "one"
        of(log, name)["requestId"] = request
    [found], _ = read(tmp_path / "s-1.jsonl", log.lines())
    assert len(found.turns) == number


def test_an_earlier_result_is_not_taken_for_that_of_a_call_behind_a_compaction(tmp_path):
    log = compacted()
    of(log, "g")["message"]["content"] = [call("c2", path="2.py")]
    before, behind = read(tmp_path / "s-1.jsonl", log.lines())[0]
    assert ["content 2"] in texts(before)
    assert ["content 2"] not in texts(behind)


def test_a_compaction_that_lost_its_boundary_still_parts_two_contexts(tmp_path):
    log = compacted()
    whole, _ = read(tmp_path / "s-1.jsonl", log.lines())
    log.records.remove(of(log, "b"))
    found, report = read(tmp_path / "s-1.jsonl", log.lines())
    assert list(map(texts, found)) == list(map(texts, whole))
    assert [each.parent.kind if each.parent else None for each in found] == [None, "compaction"]
    assert dict(report.skipped) == {ORPHAN: 1, NO_BOUNDARY: 1}


def agents_at_work(num_steps=4):
    log = Log()
    log.user("go")
    asked = log.assistant("k", call("t1", "Task", prompt="task A"), call("t2", "Task", prompt="task B"))
    for name in "AB":
        log.user(f"task {name}", parent=None, isSidechain=True, uuid=f"{name}r0")
    for at in range(1, num_steps + 1):
        for name in "AB":
            fields = {"parent": f"{name}r{at - 1}", "isSidechain": True, "uuid": f"{name}a{at}"}
            log.assistant(f"{name}m{at}", call(f"{name}c{at}"), **fields)
            log.result(f"{name}c{at}", f"{name} {at}", parent=f"{name}a{at}", isSidechain=True, uuid=f"{name}r{at}")
    for name in "AB":
        fields = {"parent": f"{name}r{num_steps}", "isSidechain": True, "uuid": f"{name}e"}
        log.assistant(f"{name}e", text(f"{name} done"), **fields)
    for name in ("t1", "t2"):
        log.result(name, f"done {name}", parent=asked)
    return log


@pytest.mark.parametrize(
    ("record", "named", "counted"),
    [
        ("Ar2", "Ba1", GUESSED),
        ("Ar2", None, NO_PARENT),
        ("Ar2", "nobody", ORPHAN),
        ("Ar2", "u1", GUESSED),
        ("Ba3", "Aa1", GUESSED),
        ("Ba3", None, NO_PARENT),
        ("Ae", "nobody", ORPHAN),
        ("Br0", "Ar0", GUESSED),
    ],
)
def test_a_wrong_link_of_an_agent_at_work_beside_another_costs_nothing(tmp_path, record, named, counted):
    log = agents_at_work()
    whole, _ = read(tmp_path / "s-1.jsonl", log.lines())
    assert [len(each.turns) for each in whole] == [3, 10, 10]
    of(log, record)["parentUuid"] = named
    found, report = read(tmp_path / "s-1.jsonl", log.lines())
    assert list(map(texts, found)) == list(map(texts, whole))
    assert [each.parent for each in found] == [each.parent for each in whole]
    assert dict(report.skipped) == {counted: 1}


@pytest.mark.parametrize("dropped", ["Aa1", "Aa2", "Ar2", "Br3", "Ba4"])
def test_a_dropped_line_of_an_agent_at_work_beside_another_costs_only_itself(tmp_path, dropped):
    log = agents_at_work()
    whole, _ = read(tmp_path / "s-1.jsonl", log.lines())
    log.records.remove(of(log, dropped))
    found, report = read(tmp_path / "s-1.jsonl", log.lines())
    assert [len(each.turns) for each in found] == [3, *(9 if name == dropped[0] else 10 for name in "AB")]
    for before, after in zip(whole, found, strict=True):
        told = [said for said in texts(before) if said and said in texts(after)]
        assert [said for said in texts(after) if said] == told
        assert after.parent == before.parent
    assert report.skipped[ORPHAN] == 1


def test_a_log_whose_sidechain_has_no_links_is_one_conversation_beside_the_main_one(tmp_path):
    log = turns(1)
    log.user("look", isSidechain=True)
    log.assistant("s1", call("x1"), isSidechain=True)
    log.result("x1", "seen", isSidechain=True)
    log.assistant("s2", text("there"), isSidechain=True)
    for record in log.records:
        record.pop("parentUuid")
    assert [len(each.turns) for each in read(tmp_path / "s-1.jsonl", log.lines())[0]] == [4, 4]


@pytest.mark.parametrize(("tokens", "kept", "counted"), [(15_010, 0, "rewound branch"), (25_200, 12, NO_PARENT)])
def test_token_counts_tell_a_rewind_to_the_first_prompt_from_a_missing_parent(tmp_path, tokens, kept, counted):
    log = turns(3)
    for at in range(3):
        for number, name in enumerate((f"a{at}", f"e{at}")):
            usage = {"input_tokens": 15_000 + 5_000 * at + 100 * number, "output_tokens": 50}
            of(log, name)["message"]["usage"] = usage
    log.user("rather so", parent=None)
    log.assistant("y", text("as you like"), usage={"input_tokens": tokens, "output_tokens": 5})
    [found], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert texts(found)[kept:] == ["rather so", "as you like"]
    assert dict(report.skipped) == {counted: 1 if kept else 12}


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_resume_that_leaves_only_unanswered_calls_behind_is_believed(tmp_path, is_answered):
    log = turns(2)
    log.user("go on")
    log.assistant("k", call("c8", path="8.py"))
    seen = log.result("c8", "content 8")
    log.assistant("z", text("let me"))
    log.assistant("z", call("c9", path="9.py"))
    if is_answered:
        log.result("c9", "content 9")
    log.user("continue please", parent=seen)
    log.assistant("y", text("so be it"))
    [found], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert ("let me" in texts(found)) is is_answered
    assert dict(report.skipped) == ({GUESSED: 1} if is_answered else {"rewound branch": 2})


def all_name_an_early_result(number):
    log = Log()
    log.user("root")
    log.assistant("m", call("c0"))
    named = log.result("c0", "x")
    log.assistant("n", text("seen"))
    for at in range(number):
        log.user(f"prompt {at}", parent=named)
        log.assistant(f"m{at}", text("said"), usage={"input_tokens": 9_000} if at == number - 1 else None)
    return log


def results_in_reverse(number):
    log = Log()
    log.user("root")
    for at in range(number):
        log.assistant(f"m{at}", call(f"c{at}"), uuid=f"w{at}")
    for at in reversed(range(number)):
        log.result(f"c{at}", "x", parent=f"w{at}")
    return log


def a_long_message_left_again_and_again(number):
    log = Log()
    log.user("root")
    first = log.assistant("m", call("c"))
    for at in range(number):
        log.assistant("m", call(f"c{at}"), uuid=f"w{at}")
    for at in range(number):
        log.result(f"c{at}", "x", parent=first)
        log.assistant("m", text("on"), parent=f"w{number - 1}")
    return log


def attachments_in_a_row(number):
    log = turns(1)
    for _ in range(2 * number):
        log.add("attachment", attachment={"type": "queued_command", "prompt": "hurry"})
    return log


@pytest.mark.parametrize(
    "hostile", [all_name_an_early_result, results_in_reverse, a_long_message_left_again_and_again, attachments_in_a_row]
)
def test_links_that_all_go_back_take_a_time_like_the_length_of_the_log(tmp_path, hostile):
    """Ten times the records, ten times the time; a hundred times where every record walks up the whole log."""

    def seconds(number):
        data = hostile(number).lines()
        start = process_time()
        read(tmp_path / "s-1.jsonl", data)
        return process_time() - start

    seconds(50)
    short, long = seconds(200), seconds(2_000)
    assert long < 40 * short + 0.2


@pytest.mark.parametrize(("parent", "begins_inside"), [(None, None), ("lost", True)])
def test_a_log_that_begins_in_the_middle_says_so(tmp_path, parent, begins_inside):
    log = turns(2)
    log.records[0]["parentUuid"] = parent
    [found], _ = read(tmp_path / "s-1.jsonl", log.lines())
    assert found.extra.get("begins_inside") is begins_inside
