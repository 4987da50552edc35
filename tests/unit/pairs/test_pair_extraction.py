"""States and answers to pairs: one per state at most, a teacher's own text, reasons for everything that is left out."""

from __future__ import annotations

import json
from itertools import product

import pytest
from action_forms import CWD

from composer_replication.errors import InputError
from composer_replication.pairs import extract_dpo_pairs, save_pairs
from composer_replication.pairs.extract import extract_pairs
from composer_replication.teacher_replay.replay import _StateVotes
from refusals import refusal

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "look"}]


def use(command: str) -> str:
    return f"[TOOL_USE] name=Bash input={json.dumps({'command': command})}"


def state(state_id: str = "s::0001", student: str = "", **others: object):
    return {"state_id": state_id, "messages": MESSAGES, "student_action": student or use("cat a.py"), **others}


def answer(teacher: str, text: str | None, state_id: str = "s::0001", error: str | None = None, **others: object):
    numbers = {"latency_s": 0.1, "prompt_tokens": 1, "completion_tokens": 1, "cost_usd": 0.0}
    return {"state_id": state_id, "teacher_slug": teacher, "response_text": text, "error": error, **numbers, **others}


def message(command: str, text: str | None = None) -> dict[str, object]:
    function = {"name": "Bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_the_most_agreed_action_wins_and_chosen_is_the_first_teachers_own_text():
    answers = [answer("x", use("pwd")), answer("y", use("ls -la")), answer("z", f"Look.\n{use('ls  -al')}")]
    (pair,) = extract_dpo_pairs([state()], answers)
    assert pair == {
        "state_id": "s::0001",
        "state_messages": MESSAGES,
        "chosen": use("ls -la"),
        "rejected": use("cat a.py"),
        "n_teachers_agreeing": 2,
    }


def test_the_order_of_teachers_decides_whose_text_is_chosen():
    answers = [answer("z", f"Z.\n{use('ls')}"), answer("y", f"Y.\n{use('ls')}")]
    (first,) = extract_dpo_pairs([state()], answers)
    (second,) = extract_dpo_pairs([state()], answers, teachers=["y", "z"])
    assert (first["chosen"], second["chosen"]) == (f"Z.\n{use('ls')}", f"Y.\n{use('ls')}")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([], "not_asked"),
        ([answer("x", None, error="timeout"), answer("y", "")], "no_votes"),
        ([answer("x", use("ls")), answer("y", use("pwd"))], "below_threshold"),
        ([answer("x", use("a")), answer("y", use("b")), answer("z", use("a")), answer("w", use("b"))], "tie"),
        ([answer("x", use("cat ./a.py")), answer("y", use("cat 'a.py'"))], "agrees_with_student"),
    ],
)
def test_a_state_without_a_pair_has_a_reason(answers, reason):
    found = extract_pairs([state()], answers)
    assert found.pairs == []
    assert dict(found.report.drops) == {reason: 1}


def test_a_threshold_of_one_takes_a_single_teacher_and_three_needs_three():
    answers = [answer("x", use("ls")), answer("y", use("ls"))]
    assert len(extract_dpo_pairs([state()], answers[:1], 1)) == 1
    assert extract_dpo_pairs([state()], answers, agreement_threshold=3) == []


def test_a_structured_message_goes_before_the_text_and_its_calls_are_written_into_chosen():
    answers = [
        answer("x", "I look.", message=message("ls -la", "I look.")),
        answer("y", None, message=message("ls -al")),
        answer("z", use("ls -a -l"), message=message("ls -a -l")),
    ]
    (record,) = extract_pairs([state()], answers).records
    assert record.pair["chosen"] == f"I look.\n{use('ls -la')}".replace('": "', '":"')
    assert record.pair["n_teachers_agreeing"] == 3
    (second,) = extract_pairs([state()], answers, teachers=["z"]).records
    assert second.pair["chosen"] == use("ls -a -l")


def test_a_second_answer_counts_only_after_a_failure():
    answers = [
        answer("x", None, error="reset"),
        answer("x", use("ls")),
        answer("y", use("ls")),
        answer("y", use("pwd")),
    ]
    (pair,) = extract_dpo_pairs([state()], answers)
    assert pair["n_teachers_agreeing"] == 2


def test_the_folder_of_the_session_or_of_the_state_is_what_paths_are_against():
    answers = [answer("x", use("cat b.py")), answer("y", use("cat /repo/b.py"))]
    assert extract_dpo_pairs([state()], answers) == []
    assert len(extract_dpo_pairs([state()], answers, cwd=CWD)) == 1
    assert len(extract_dpo_pairs([state(cwd=CWD)], answers)) == 1


def test_files_that_the_state_has_shown_make_equal_edits_equal():
    function = {"name": "Read", "arguments": json.dumps({"file_path": "/repo/a.py"})}
    shown = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "     1→x = 1\n     2→y = 1\n"},
    ]

    def edit(old: str, new: str) -> str:
        arguments = {"file_path": "/repo/a.py", "old_string": old, "new_string": new}
        return f"[TOOL_USE] name=Edit input={json.dumps(arguments)}"

    answers = [answer("x", edit("x = 1", "x = 2")), answer("y", edit("x = 1\ny", "x = 2\ny"))]
    assert extract_dpo_pairs([state()], answers) == []
    assert len(extract_dpo_pairs([{**state(), "messages": [*MESSAGES, *shown]}], answers)) == 1


def test_the_report_counts_states_failures_and_agreement_per_kind():
    states = [state("a"), state("b", "Done."), state("c")]
    answers = [
        *[answer(name, use("ls"), "a") for name in "xyz"],
        answer("x", "done", "b"),
        answer("y", "Not yet.", "b"),
        answer("x", None, "c", error="timeout"),
        answer("y", " ", "c"),
        answer("z", None, "c", message={"content": 3}),
        answer("x", "late", "unknown"),
    ]
    found = extract_pairs(states, answers)
    assert found.report.to_dict() == {
        "num_states": 3,
        "num_asked": 3,
        "num_pairs": 1,
        "num_unknown_states": 1,
        "drops": {"below_threshold": 1, "no_votes": 1},
        "rejected_action_worked": 0,
        "failed_replies": {"empty": 1, "error": 1, "unreadable": 1},
        "agreement": {
            "Bash": {"num_states": 2, "num_votes": 3, "with_student": 0.0, "with_each_other": 1.0, "num_consensus": 1},
            "text": {"num_states": 1, "num_votes": 2, "with_student": 0.5, "with_each_other": 0.0, "num_consensus": 0},
        },
    }
    (record,) = found.records
    assert (record.chosen_by, record.teachers, record.classes) == ("x", ("x", "y", "z"), (("x", "y", "z"),))
    assert (record.student_kind, record.chosen_kind) == ("Bash", "Bash")


def test_two_states_of_one_id_are_an_error():
    with refusal(InputError, what="state_id", got="'s::0001'"):
        extract_dpo_pairs([state(), state()], [])


def test_pairs_are_saved_one_object_a_line_in_a_folder_that_is_made(tmp_path):
    pairs = extract_dpo_pairs([state()], [answer("x", use("ls")), answer("y", use("ls"))])
    target = tmp_path / "new" / "pairs.jsonl"
    save_pairs(pairs, target)
    assert [json.loads(line) for line in target.read_text().splitlines()] == pairs
    save_pairs([], target)
    assert target.read_bytes() == b""


def test_a_pair_that_json_cannot_hold_leaves_the_old_file(tmp_path):
    target = tmp_path / "pairs.jsonl"
    save_pairs([{"a": 1}], target)
    with pytest.raises(InputError, match="pair 1"):
        save_pairs([{"a": 2}, {"a": "\ud800"}], target)
    assert target.read_bytes() == b'{"a":1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]


REPLIES = [use("ls"), use("ls ."), use("pwd"), use("cat 'a.py'"), None]


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_asking_only_while_a_vote_can_change_the_pair_gives_the_pairs_of_asking_everyone(threshold):
    votes, num_asked, total = _StateVotes(), 0, 0
    for number, replies in enumerate(product(REPLIES, repeat=3)):
        asked_state = state(f"s::{number:04d}")
        everyone = [
            answer(name, text, asked_state["state_id"], error=None if text else "timeout")
            for name, text in zip("xyz", replies, strict=True)
        ]
        asked: list = []
        while len(asked) < 3 and votes.can_change(asked_state, asked, threshold=threshold, num_teachers=3):
            asked.append(everyone[len(asked)])
        gated, full = (extract_dpo_pairs([asked_state], each, threshold, teachers="xyz") for each in (asked, everyone))
        assert [{**pair, "n_teachers_agreeing": 0} for pair in gated] == [
            {**pair, "n_teachers_agreeing": 0} for pair in full
        ]
        num_asked, total = num_asked + len(asked), total + 3
    assert num_asked < total


def test_whether_a_teacher_agrees_with_the_student_is_by_meaning_and_a_failure_agrees_with_nobody():
    votes = _StateVotes(cwd=CWD)
    assert votes.agrees_with_student(state(), answer("x", use("cat /repo/a.py")))
    assert not votes.agrees_with_student(state(), answer("x", use("cat b.py")))
    assert not votes.agrees_with_student(state(), answer("x", None, error="timeout"))
