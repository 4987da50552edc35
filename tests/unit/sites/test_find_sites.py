"""Sites of whole conversations: which turn, what was repeated, who interrupted, what was passed over and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.errors import InputError
from composer_replication.sites import find_error_sites, register_rule, rule, unregister_rule
from composer_replication.types import ToolResult, Turn
from refusals import refusal
from session_pieces import HERE, Session, branch

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
NO_FILE = "<tool_use_error>File does not exist.</tool_use_error>"


def test_a_site_belongs_to_the_assistant_turn_that_made_the_call_not_to_the_result():
    session = Session().user("go")
    session.calls(
        [("Read", {"file_path": "/a"}, "text", None, None), ("Edit", {"file_path": "/b"}, NOT_READ, True, None)]
    )
    (site,) = find_error_sites(session.conversation())
    assert (site.turn_id, site.result_turn_id, site.call_id, site.tool) == ("t1", "t2", "c1-1", "Edit")
    assert (site.kind, site.blame, site.is_kept) == ("edit_not_read", "model", True)
    start, end = site.evidence
    assert NOT_READ[start:end].startswith("File has not been read yet")


def test_results_that_arrive_late_and_out_of_order_find_their_call():
    session = Session()
    session.calls([("Edit", {"file_path": "/a"}, None, None, None), ("Read", {"file_path": "/b"}, None, None, None)])
    session.says("thinking aloud")
    results = (
        ToolResult(call_id="c0-1", text=NO_FILE, is_error=True),
        ToolResult(call_id="c0-0", text=NOT_READ, is_error=True),
    )
    session.add(Turn(id="late", role="tool", origin="tool", results=results, provenance=HERE))
    found = find_error_sites(session.conversation())
    assert [(site.turn_id, site.call_id, site.kind) for site in found] == [
        ("t0", "c0-1", "file_not_found"),
        ("t0", "c0-0", "edit_not_read"),
    ]


def test_a_file_that_was_only_searched_has_not_been_read():
    for tool, blame in (("Grep", "model"), ("Read", "unknown")):
        session = Session()
        session.call(tool, "12:def total(items):", **{"path" if tool == "Grep" else "file_path": "/repo/a.py"})
        session.call("Edit", NOT_READ, is_error=True, file_path="/repo/a.py", old_string="a", new_string="b")
        (site,) = find_error_sites(session.conversation())
        assert (site.kind, site.blame) == ("edit_not_read", blame)


def test_the_same_call_failing_again_the_same_way_is_counted_with_what_lies_between():
    session = Session()
    session.call("Read", NO_FILE, is_error=True, file_path="/x")
    session.call("Glob", "/y", pattern="*")
    session.call("Read", NO_FILE, is_error=True, file_path="/x")
    session.call("Read", NO_FILE, is_error=True, file_path="/x")
    session.call("Read", NO_FILE, is_error=True, file_path="/other")
    first, second, third, other = find_error_sites(session.conversation())
    assert [(site.repeats, site.between) for site in (first, second, third, other)] == [(0, 0), (1, 1), (2, 0), (0, 0)]
    assert (second.repeat_of, third.repeat_of) == (first.id, second.id)


def test_a_call_that_worked_in_between_or_failed_differently_is_no_repetition():
    session = Session()
    session.call("Bash", "Exit code 1\n1 failed", is_error=True, command="pytest")
    session.call("Bash", "1 passed", is_error=False, command="pytest")
    session.call("Bash", "Exit code 1\n1 failed", is_error=True, command="pytest")
    session.call("Edit", NOT_READ, is_error=True, file_path="/a", old_string="x", new_string="y")
    session.call(
        "Edit", "String to replace not found in file.", is_error=True, file_path="/a", old_string="x", new_string="y"
    )
    assert [site.repeats for site in find_error_sites(session.conversation())] == [0, 0, 0, 0]


def test_interruptions_and_rejections_are_the_users():
    session = Session()
    session.call("Bash", None, command="sleep 100")
    session.user("[Request interrupted by user for tool use]")
    session.call(
        "Bash", "The user doesn't want to proceed with this tool use. The tool use was rejected.", is_error=True
    )
    passed_over = []
    found = find_error_sites(session.conversation(), passed_over=passed_over)
    assert [(site.kind, site.blame, site.is_kept, site.turn_id) for site in found] == [
        ("user_interrupt", "user", False, "t0"),
        ("user_rejected", "user", False, "t2"),
    ]
    assert found[0].call_id == "c0-0"
    assert [(each.kind, each.turn_id, each.call_id) for each in passed_over] == [("no_failure", "t0", "c0-0")]
    assert passed_over[0].reason


def test_every_failure_that_is_not_kept_says_why():
    session = Session()
    session.call("Bash", "Exit code 1\n=== 3 failed, 2 passed ===", is_error=True, command="pytest")
    session.call(
        "Bash", "cat: nothere.txt: No such file or directory", is_error=False, command="cat nothere.txt | head"
    )
    session.call("Read", NO_FILE, is_error=True, file_path="/x", origin="copied")
    found = find_error_sites(session.conversation())
    assert [(site.is_kept, site.is_soft) for site in found] == [(False, False), (False, True), (False, False)]
    for site, facts in zip(found, (("task", "test_failure"), ("confidence", "0.5"), ("copied",)), strict=True):
        assert [fact for fact in facts if fact not in site.reason] == []


def test_soft_failures_are_kept_when_asked_for():
    session = Session()
    session.call(
        "Bash", "cat: nothere.txt: No such file or directory", is_error=False, command="cat nothere.txt | head"
    )
    (site,) = find_error_sites(session.conversation(), min_confidence=0.4)
    assert site.is_kept
    with pytest.raises(InputError, match="min_confidence"):
        find_error_sites(session.conversation(), min_confidence=1.5)


def test_failures_on_a_rewound_branch_are_tagged():
    session = Session(parent=branch())
    session.call("Read", NO_FILE, is_error=True, file_path="/x")
    (site,) = find_error_sites(session.conversation())
    assert site.is_rewound


def test_a_result_without_its_call_and_one_call_answered_twice():
    session = Session()
    session.call("Read", NO_FILE, is_error=True, file_path="/x")
    again = ToolResult(call_id="c0-0", text=NO_FILE, is_error=True)
    orphan = ToolResult(call_id="nobody", text=NO_FILE, is_error=True)
    session.add(Turn(id="more", role="tool", origin="tool", results=(again, orphan), provenance=HERE))
    passed_over = []
    found = find_error_sites(session.conversation(), passed_over=passed_over)
    assert [(site.turn_id, site.repeats) for site in found] == [("t0", 0), ("t0", 0)]
    assert len({site.id for site in found}) == 2
    assert [(each.kind, each.turn_id, each.call_id) for each in passed_over] == [("no_failure", "more", "nobody")]
    assert passed_over[0].reason


def test_observations_of_an_agent_without_calls_are_read_from_its_text():
    session = Session(format="mini_sweagent")
    session.says("Let me look.\n\n```bash\ncat src/missing.py\n```")
    session.user("<returncode>1</returncode>\n<output>\ncat: src/missing.py: No such file or directory\n</output>")
    (site,) = find_error_sites(session.conversation(), min_confidence=0.4)
    assert (site.kind, site.blame, site.is_soft, site.turn_id) == ("shell_path_missing", "model", True, "t0")


def test_a_path_that_was_there_before_is_not_held_against_the_model():
    session = Session()
    session.call("Read", "1\ttext", file_path="/repo/notes.md")
    session.call("Bash", "Exit code 1\ncat: notes.md: No such file or directory", is_error=True, command="cat notes.md")
    (site,) = find_error_sites(session.conversation())
    assert (site.kind, site.blame, site.is_kept) == ("shell_path_missing", "unknown", False)
    removed = Session()
    removed.call("Read", "1\ttext", file_path="/repo/notes.md")
    removed.call("Bash", "", command="rm notes.md")
    removed.call("Bash", "Exit code 1\ncat: notes.md: No such file or directory", is_error=True, command="cat notes.md")
    (site,) = find_error_sites(removed.conversation())
    assert site.blame == "model"


def test_a_program_that_a_failed_build_did_not_make_is_the_work():
    session = Session()
    session.call("Bash", "Exit code 2\nmake: *** [all] Error 1", is_error=True, command="make")
    session.call("Bash", "Exit code 127\nbash: ./app: No such file or directory", is_error=True, command="./app --help")
    assert [site.blame for site in find_error_sites(session.conversation())] == ["task", "task"]


def test_custom_rules_go_first_and_can_be_taken_back():
    session = Session()
    session.call("deploy", "Error: tickets used up for team red", is_error=True)
    mine = rule("quota", r"tickets used up", "tickets", where="start", blame="env", confidence=0.8)
    (site,) = find_error_sites(session.conversation(), extra_rules=[mine])
    assert (site.kind, site.blame, site.confidence) == ("quota", "env", 0.8)
    register_rule(mine)
    try:
        assert find_error_sites(session.conversation())[0].kind == "quota"
    finally:
        unregister_rule(mine)
    assert find_error_sites(session.conversation())[0].kind == "other"
    with refusal(InputError, what="rule", got=mine.kind):
        unregister_rule(mine)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"kind": "no_such_kind"}, "kind"),
        ({"confidence": 0.0}, "confidence"),
        ({"blame": "nobody"}, "blame"),
        ({"needles": ()}, "needles"),
        ({"needles": ("Upper",)}, "needles"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(wrong, name):
    good = {"kind": "other", "blame": None, "confidence": 0.5, "needles": ("x",)} | wrong
    with refusal(InputError, what=name, got=str(wrong[name])):
        rule(good["kind"], "x", *good["needles"], blame=good["blame"], confidence=good["confidence"])


def test_ids_are_short_and_the_same_every_time():
    session = Session()
    session.call("Read", NO_FILE, is_error=True, file_path="/x")
    first, second = (find_error_sites(session.conversation())[0] for _ in range(2))
    assert first == second
    assert len(first.id) == 12
    elsewhere = replace(session.conversation(), id="another")
    assert find_error_sites(elsewhere)[0].id != first.id


def test_what_looks_bad_in_a_format_without_flags_and_is_no_failure_is_counted():
    session = Session(format="codex")
    session.call("shell", "src/log.py:3: raise ValueError('error')", command="rg -n error src")
    passed_over = []
    assert find_error_sites(session.conversation(), passed_over=passed_over) == []
    assert [(each.kind, each.turn_id, each.is_kept) for each in passed_over] == [("no_failure", "t0", False)]
    assert passed_over[0].reason


def test_what_the_session_showed_is_not_held_against_the_model():
    told = Session().user("Read the output in /srv/tasks/b1.output when it is done")
    told.call("Read", NO_FILE, is_error=True, file_path="/srv/tasks/b1.output")
    read = Session()
    read.call("Read", "1\tx", file_path="/repo/a.py")
    read.call("Read", NO_FILE, is_error=True, file_path="/repo/a.py")
    worked = Session()
    worked.call("mcp__db__query", "3 rows", sql="select 1")
    worked.call("mcp__db__query", "Error: No such tool available: mcp__db__query", is_error=True, sql="select 1")
    command = Session()
    command.call("Bash", "a.py", command="rg -l x")
    command.call("Bash", "Exit code 127\nbash: rg: command not found", is_error=True, command="rg -l y")
    copied = Session()
    copied.call("Read", "     1→x = 1\n     2→y = 2\n", file_path="/repo/a.py")
    message = "<tool_use_error>String to replace not found in file.</tool_use_error>"
    copied.call("Edit", message, is_error=True, file_path="/repo/a.py", old_string="x = 1\ny = 2", new_string="z")
    for session in (told, read, worked, command, copied):
        (site,) = find_error_sites(session.conversation())
        assert (site.blame, site.is_kept) == ("unknown", False), site


def test_adding_files_to_git_is_not_removing_them():
    session = Session()
    session.call("Bash", "x = 1", command="cat src/app.py")
    session.call("Bash", "[main 1] x", command="git add . && git commit -m wip")
    session.call(
        "Bash", "Exit code 1\ncat: src/app.py: No such file or directory", is_error=True, command="cat src/app.py"
    )
    (site,) = find_error_sites(session.conversation())
    assert site.blame == "unknown"


def test_parallel_calls_that_fail_alike_are_no_repetition_and_a_new_description_does_not_hide_one():
    session = Session()
    session.calls(
        [("Read", {"file_path": "/x"}, NO_FILE, True, None), ("Read", {"file_path": "/x"}, NO_FILE, True, None)]
    )
    assert [site.repeats for site in find_error_sites(session.conversation())] == [0, 0]
    said = Session()
    for words in ("look", "look again"):
        text = "Exit code 1\ncat: nope.md: No such file or directory"
        said.call("Bash", text, is_error=True, command="cat nope.md", description=words)
    assert [site.repeats for site in find_error_sites(said.conversation())] == [0, 1]
