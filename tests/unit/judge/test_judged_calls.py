"""Walking a conversation: each call is judged by what was there before it, and by nothing that comes later."""

from __future__ import annotations

from dataclasses import replace

from composer_replication.sites.judge import judged_calls
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn

WHERE = Provenance(file="log", lines=(1,))


def said(number, text="", *calls):
    return Turn(id=f"t{number}", role="assistant", origin="model", text=text, calls=calls, provenance=WHERE)


def brought(number, *results):
    return Turn(id=f"t{number}", role="tool", origin="tool", results=results, provenance=WHERE)


def read(number, path):
    return ToolCall(id=f"c{number}", name="Read", arguments={"file_path": path})


def edit(number, path, old, new):
    arguments = {"file_path": path, "old_string": old, "new_string": new}
    return ToolCall(id=f"c{number}", name="Edit", arguments=arguments)


def result(number, text, *, is_error=False):
    return ToolResult(call_id=f"c{number}", text=text, is_error=is_error)


TURNS = (
    said(0, "", read(0, "/repo/a.py")),
    brought(1, result(0, "     1→x = 1\n     2→y = 2\n")),
    said(2, "", edit(1, "/repo/a.py", "x = 1", "x = 1"), edit(2, "/repo/a.py", "x = 1", "x = 2")),
    brought(3, result(1, "No changes to make: old_string and new_string are exactly the same.", is_error=True)),
    brought(4, result(2, "The file has been updated.")),
    said(5, "", read(3, "/repo/b.py")),
)


def talk(turns=TURNS):
    return Conversation(id="s", format="claude_code", turns=turns, cwd="/repo")


def test_each_call_comes_with_what_was_said_of_it_and_what_happened():
    calls = list(judged_calls(talk()))
    assert [each.call.id for each in calls] == ["c0", "c1", "c2", "c3"]
    noop = calls[1]
    assert (noop.judgement.says, noop.judgement.rule, noop.judgement.kind) == ("fails", "edit_noop", "edit_noop")
    assert noop.site is not None
    assert noop.site.kind == "edit_noop"
    assert calls[2].site is None
    assert calls[3].result is None


def test_a_verdict_does_not_change_with_what_comes_later():
    every = list(judged_calls(talk()))
    for number in range(1, len(TURNS) + 1):
        begun = list(judged_calls(talk(TURNS[:number])))
        assert [each.judgement for each in begun] == [each.judgement for each in every[: len(begun)]]


def test_the_state_of_a_moment_knows_what_was_shown_before_it():
    shown = [each.judge.state.has_shown_text("/repo/a.py", "y = 2") for each in judged_calls(talk())]
    assert shown == [False, True, True, True]


def test_the_plan_that_a_session_carries_out_lies_in_its_plans_file():
    def rule(words, path):
        asked = Turn(id="u", role="user", origin="human", text=words, provenance=WHERE)
        write = ToolCall(id="w", name="Write", arguments={"file_path": path, "content": "# Plan"})
        return next(judged_calls(talk((asked, said(0, "", write))))).judgement.rule

    plan = "/srv/u/.claude/plans/calm-tree.md"
    assert rule("Implement the following plan:\n# Plan", plan) == "plan_is_there"
    assert rule("Implement the following plan:\n# Plan", "/repo/plans/calm-tree.md") == "new_file"
    assert rule("Make a plan.", plan) == "new_file"


def test_what_a_log_that_begins_in_the_middle_has_not_read_may_have_been_read_before():
    edit = {"file_path": "/repo/z.py", "old_string": "a", "new_string": "b"}
    call = ToolCall(id="e", name="Edit", arguments=edit)
    turn = Turn(id="e", role="assistant", origin="model", calls=(call,), provenance=WHERE)
    log = Conversation(id="s", format="claude_code", turns=(turn,), cwd="/repo")
    assert [each.judgement.rule for each in judged_calls(log)] == ["not_read"]
    inside = replace(log, extra={"begins_inside": True})
    assert [(each.judgement.says, each.judgement.rule) for each in judged_calls(inside)] == [("unknown", "read_before")]


def test_arguments_that_are_no_json_fail():
    call = ToolCall(id="c9", name="Read", arguments={}, raw_arguments="{file")
    (judged,) = judged_calls(talk((said(0, "", call),)))
    judgement = judged.judgement
    assert (judgement.says, judgement.rule, judgement.kind) == ("fails", "arguments_no_json", "input_validation")
