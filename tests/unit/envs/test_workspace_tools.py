"""The tools do what a coding agent's do, fail in a harness's words, and the rules for logs know these words."""

from __future__ import annotations

import json

import pytest

from composer_replication.envs.workspace import TOOLS, Workspace
from composer_replication.sites.find import find_error_sites
from composer_replication.sites.rule import USUAL_BLAME
from composer_replication.trainer.rollouts.sites import ROLLOUT_RULES
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn
from workspace_calls import FAILING, outcome_of, path, small_task

_NOWHERE = Provenance(file="", lines=())


def sites_of(name, arguments, outcome, *, flag):
    call = ToolCall(id="call", name=name, arguments=arguments)
    result = ToolResult(call_id="call", text=outcome.text, is_error=flag)
    turns = (
        Turn(id="u", role="user", origin="human", text="Do it.", provenance=_NOWHERE),
        Turn(id="a", role="assistant", origin="model", calls=(call,), provenance=_NOWHERE),
        Turn(id="t", role="tool", origin="tool", results=(result,), provenance=_NOWHERE),
    )
    conversation = Conversation(id="c", format="rollout", turns=turns)
    return [(site.kind, site.blame) for site in find_error_sites(conversation, extra_rules=ROLLOUT_RULES)]


@pytest.mark.parametrize("flag", [True, None], ids=["with a flag", "by its words alone"])
@pytest.mark.parametrize("case", FAILING)
def test_a_failure_has_the_kind_that_the_rules_for_logs_give_it(case, flag):
    _, (name, arguments), kind = FAILING[case]
    outcome = outcome_of(case)
    assert (outcome.failed, outcome.kind) == (True, kind)
    blame = "unknown" if kind == "output_too_large" else "model"  # nobody knows a file's size before the first Read
    assert sites_of(name, arguments, outcome, flag=flag) == [(kind, blame)]


def test_every_kind_of_failure_that_file_tools_have_is_met():
    kinds = {kind for _, _, kind in FAILING.values()}
    edits = {kind for kind in USUAL_BLAME if kind.startswith("edit_")}
    assert kinds == edits | {
        *("tool_not_found", "input_validation", "file_not_found", "is_directory", "output_too_large")
    }


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Write", {"file_path": "/etc/passwd", "content": "a"}),
        ("Write", {"file_path": path("n" * 300), "content": "a"}),
        ("Write", {"file_path": path("twice.py/inside.py"), "content": "a"}),
        ("Write", {"file_path": path("huge.txt"), "content": "a" * 300_000}),
        ("Grep", {"pattern": "(x?){700}(x?){700}y", "path": path("wide.txt")}),
    ],
    ids=["outside", "a long name", "below a file", "no space", "a search without end"],
)
def test_what_is_not_the_models_doing_fails_without_a_kind(name, arguments):
    outcome = Workspace(small_task()).call(name, arguments)
    assert (outcome.failed, outcome.kind) == (True, None)
    assert [blame for _, blame in sites_of(name, arguments, outcome, flag=True) if blame == "model"] == []


def test_tests_that_fail_are_the_work_and_no_failure_of_the_call():
    outcome = Workspace(small_task()).call("RunTests", {})
    assert outcome.text.splitlines()[-1].startswith("1 failed")
    assert not outcome.failed
    assert sites_of("RunTests", {}, outcome, flag=None) == []


def test_what_worked_is_said_as_claude_code_says_it():
    workspace = Workspace(small_task(**{"notes.rst": "one\ntwo\n", "empty.rst": ""}))
    said = [
        workspace.call(name, arguments).text
        for name, arguments in [
            ("LS", {"path": path("tests")}),
            ("Glob", {"pattern": "**/*.rst"}),
            ("Glob", {"pattern": "*.{rst,txt}", "path": "/workspace"}),
            ("Glob", {"pattern": "*.zig"}),
            ("Grep", {"pattern": r"^t\w+$", "path": path("notes.rst")}),
            ("Grep", {"pattern": "nobody wrote this"}),
            ("Read", {"file_path": path("notes.rst"), "offset": 2, "limit": 1}),
            ("Read", {"file_path": "notes.rst"}),
            ("Read", {"file_path": path("empty.rst")}),
            ("Read", {"file_path": path("notes.rst"), "offset": 1e9}),
            ("Edit", {"file_path": path("notes.rst"), "old_string": "two", "new_string": "three"}),
            ("Write", {"file_path": path("more/new.rst"), "content": "new"}),
            ("Finish", {}),
        ]
    ]
    tests = [name.removeprefix("tests/") for name in workspace.files if name.startswith("tests/")]
    assert said == [
        "\n".join(["- /workspace/tests/", *(f"  - {name}" for name in tests)]),
        "/workspace/empty.rst\n/workspace/notes.rst",
        "/workspace/empty.rst\n/workspace/notes.rst\n/workspace/wide.txt",
        "No files found",
        "/workspace/notes.rst:2:two",
        "No matches found",
        "     2→two",
        "     1→one\n     2→two\n     3→",
        "<system-reminder>Warning: the file exists but the contents are empty.</system-reminder>",
        "<system-reminder>Warning: the file exists but is shorter than the provided offset (1000000000.0). "
        "The file has 3 lines.</system-reminder>",
        "The file /workspace/notes.rst has been updated successfully.",
        "File created successfully at: /workspace/more/new.rst",
        "Done.",
    ]
    assert workspace.files["notes.rst"] == "one\nthree\n"
    assert workspace.finished


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("TWICE.py", "twice.py"), ("src/twice.py", "twice.py"), ("twic.py", "twice.py"), ("far/away.rs", None)],
)
def test_a_file_that_is_not_there_is_answered_by_one_that_may_have_been_meant(wrong, meant):
    text = Workspace(small_task()).call("Read", {"file_path": path(wrong)}).text
    suggestion = f" Did you mean /workspace/{meant}?" if meant else ""
    assert text == f"<tool_use_error>File does not exist.{suggestion}</tool_use_error>"


def test_replace_all_and_an_empty_old_string_do_what_they_do_there():
    workspace = Workspace(small_task())
    workspace.call("Read", {"file_path": path("twice.py")})
    everywhere = {"file_path": path("twice.py"), "old_string": "rate", "new_string": "pace", "replace_all": True}
    assert not workspace.call("Edit", everywhere).failed
    assert workspace.files["twice.py"] == "pace = 1\npace = 1\n"
    made = {"file_path": path("made.py"), "old_string": "", "new_string": "x = 1\n"}
    assert workspace.call("Edit", made).text == "File created successfully at: /workspace/made.py"


def test_the_tests_command_formats_code_and_says_so():
    workspace = Workspace(small_task())
    workspace.call("Write", {"file_path": path("loose.py"), "content": "a = 1  \n\n\n"})
    assert workspace.call("RunTests", {}).text.splitlines()[0] == "reformatted loose.py"
    assert workspace.files["loose.py"] == "a = 1\n"


def test_a_session_that_has_ended_does_nothing_more():
    workspace = Workspace(small_task(), max_calls=1)
    workspace.call("LS", {"path": "/workspace"})
    assert workspace.finished
    assert workspace.call("Write", {"file_path": path("late.py"), "content": "a"}).failed
    assert "late.py" not in workspace.files


def test_arguments_may_come_as_json_text():
    workspace = Workspace(small_task())
    assert workspace.call("Read", json.dumps({"file_path": path("twice.py")})).text.startswith("     1→rate")
    assert workspace.call("Read", '{"file_path":').kind == "input_validation"


@pytest.mark.parametrize(
    ("value", "shown"), [(0, 1), (-5, 1), (2.9, 2), (1e300, None), (10**400, None), (float("inf"), "Infinity")]
)
def test_line_numbers_of_any_size_are_taken_and_what_is_none_is_refused(value, shown):
    outcome = Workspace(small_task()).call("Read", {"file_path": path("twice.py"), "offset": value, "limit": 10**400})
    assert outcome.failed == (shown == "Infinity")
    if isinstance(shown, int):
        assert outcome.text.startswith(f"     {shown}→rate")
    else:
        assert ("provided as `Infinity`" if shown else "shorter than the provided offset (1e+300)") in outcome.text


def test_the_schemas_are_in_the_form_of_openai():
    assert [each["function"]["name"] for each in TOOLS] == [
        *("LS", "Glob", "Grep", "Read", "Edit", "Write", "RunTests", "Finish")
    ]
    for each in TOOLS:
        schema = each["function"]["parameters"]
        assert each["type"] == "function"
        assert set(schema["required"]) <= set(schema["properties"])
