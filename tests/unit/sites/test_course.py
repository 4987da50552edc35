"""What the calls around a failure say about it: done again, changed by others, looked for before writing, refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.sites import find_error_sites
from composer_replication.sites.verdict_revision import repeated_refusals
from session_pieces import Session

NO_FILE = "<tool_use_error>File does not exist.</tool_use_error>"
STALE = "<tool_use_error>File has been modified since read, either by the user or by a linter.</tool_use_error>"
SPAWN = "ENOENT: no such file or directory, posix_spawn '/opt/agent'"
REJECTED = " ! [rejected]        main -> main (non-fast-forward)\nerror: failed to push some refs to 'host:a/b.git'"
UNFORMATTED = "PreToolUse:Bash hook error: {}: code is not formatted, run the formatter first"


def _last(session: Session):
    return find_error_sites(session.conversation())[-1]


@pytest.mark.parametrize(
    ("command", "blame"),
    [
        (None, "unknown"),
        ("gofmt -w .", "unknown"),  # a formatter changes what nobody named
        ("cat src/a.go", "unknown"),
        ("git add src/a.go && git commit -m x", "unknown"),  # though a hook may have formatted it
        ("gofmt -w src/a.go", "model"),
        ("sed -i s/x/y/ src/a.go", "model"),
        ("git checkout main", "model"),
        ("sed -i s/x/y/ src/b.go", "unknown"),
    ],
)
def test_an_edit_of_a_file_that_changed_is_the_models_only_if_the_model_changed_it(command, blame):
    session = Session()
    session.call("Read", "1\tx", file_path="/repo/src/a.go")
    if command:
        session.call("Bash", "", command=command)
    session.call("Edit", STALE, is_error=True, file_path="/repo/src/a.go", old_string="x", new_string="y")
    assert _last(session).blame == blame


def test_a_command_before_the_last_read_does_not_make_a_file_stale():
    session = Session()
    session.call("Bash", "", command="sed -i s/x/y/ src/a.go")
    session.call("Read", "1\tx", file_path="/repo/src/a.go")
    session.call("Edit", STALE, is_error=True, file_path="/repo/src/a.go", old_string="x", new_string="y")
    assert _last(session).blame == "unknown"


@pytest.mark.parametrize(
    ("said", "writes", "blame"),
    [
        ("Let me look around.", True, "task"),
        ("Let me look around.", False, "model"),
        ("Next: create `src/plan.md` with the steps", False, "task"),
        ("- src/plan.md (new)", False, "task"),
        ("I read src/plan.md and create the task list", False, "model"),
    ],
)
def test_a_look_at_a_file_that_is_to_be_written_is_a_question(said, writes, blame):
    session = Session().says(said)
    session.call("Read", NO_FILE, is_error=True, file_path="/repo/src/plan.md")
    if writes:
        session.call("Write", "done", file_path="/repo/src/plan.md", content="x")
    assert find_error_sites(session.conversation())[0].blame == blame


def test_a_look_with_a_command_at_a_file_that_is_written_later_is_a_question_too():
    session = Session()
    session.call(
        "Bash", "Exit code 1\ncat: docs/plan.md: No such file or directory", is_error=True, command="cat docs/plan.md"
    )
    session.call("Write", "done", file_path="/srv/docs/plan.md", content="x")
    site = find_error_sites(replace(session.conversation(), cwd="/srv"))[0]
    assert (site.kind, site.blame) == ("shell_path_missing", "task")


def test_text_that_was_copied_rightly_is_gone_by_a_command_of_ones_own():
    for command, blame in (("sed -i s/x/y/ a.py", "model"), ("pytest", "unknown")):
        session = Session()
        session.call("Read", "     1→x = 1\n", file_path="/srv/a.py")
        session.call("Bash", "", command=command)
        text = "<tool_use_error>String to replace not found in file.</tool_use_error>"
        session.call("Edit", text, is_error=True, file_path="/srv/a.py", old_string="x = 1", new_string="z")
        assert _last(session).blame == blame


def test_what_becomes_of_an_exclamation_mark_is_known_after_the_first_time():
    session = Session()
    for number in (1, 2):
        text = "Exit code 1\nfailed to parse jq expression (line 1)\n    a \\!= 1"
        session.call("Bash", text, is_error=True, command=f"gh api x/{number} --jq 'a != 1'")
    assert [site.blame for site in find_error_sites(session.conversation())] == ["task", "model"]


def test_an_edit_of_a_missing_file_is_no_question_even_if_it_is_written_later():
    session = Session()
    session.call("Edit", NO_FILE, is_error=True, file_path="/repo/a.md", old_string="x", new_string="y")
    session.call("Write", "done", file_path="/repo/a.md", content="x")
    assert find_error_sites(session.conversation())[0].blame == "model"


def test_a_path_that_was_missing_is_missing_until_somebody_says_otherwise():
    session = Session().user("see /repo/notes.md")
    session.call("Read", NO_FILE, is_error=True, file_path="/repo/notes.md")
    session.call("Bash", "", command="make")
    session.call("Read", NO_FILE, is_error=True, file_path="/repo/notes.md")
    assert [site.blame for site in find_error_sites(session.conversation())] == ["unknown", "model"]
    session.user("it is there now")
    session.call("Read", NO_FILE, is_error=True, file_path="/repo/notes.md")
    assert _last(session).blame == "unknown"


@pytest.mark.parametrize(("between", "blame"), [("git status", "model"), ("cat a.txt", "model"), ("git fetch", "task")])
def test_looking_changes_nothing_so_the_same_call_again_is_the_models(between, blame):
    session = Session()
    for _ in range(2):
        session.call("Bash", "Exit code 1\nGraphQL: merging is blocked", is_error=True, command="gh pr merge 7")
        session.call("Bash", "ok", command=between)
    assert _last(session).blame == blame


@pytest.mark.parametrize(
    ("second", "between", "blame"),
    [
        ("a.go:3:1: undefined: x", "cat a.go", "model"),
        ("a.go:3:1: undefined: x", "sed -i s/x/y/ a.go", "task"),
        ("a.go:4:1: undefined: y", "cat a.go", "task"),
    ],
)
def test_a_build_that_nothing_was_changed_for_fails_as_before(second, between, blame):
    session = Session()
    session.call("Bash", "Exit code 1\n# shop\na.go:3:1: undefined: x", is_error=True, command="go build ./...")
    session.call("Bash", "", command=between)
    session.call("Bash", f"Exit code 1\n# shop\n{second}", is_error=True, command="go build ./...")
    assert [site.blame for site in find_error_sites(session.conversation())] == ["task", blame]


@pytest.mark.parametrize(("between", "blame"), [("go build ./...", "model"), ("brew install golangci-lint", "env")])
def test_a_program_that_was_shown_to_be_missing_is_missing_until_something_is_installed(between, blame):
    session = Session()
    for folder in ("a", "b"):
        text = "Exit code 127\n(eval):1: command not found: golangci-lint"
        session.call("Bash", text, is_error=True, command=f"golangci-lint run ./{folder}")
        session.call("Bash", "", command=between)
    assert [site.blame for site in find_error_sites(session.conversation())] == ["env", blame]


def test_a_tool_that_is_broken_is_broken_whatever_it_is_asked_for():
    session = Session()
    for path in ("/repo", "/repo/a", "/repo/b"):
        session.call("Grep", SPAWN, is_error=True, pattern="x", path=path)
    session.call("Glob", SPAWN, is_error=True, pattern="*")
    assert [site.blame for site in find_error_sites(session.conversation())] == ["harness"] * 2 + ["model", "harness"]
    again = Session()
    for _ in range(2):
        again.call("Grep", SPAWN, is_error=True, pattern="x", path="/repo")
    assert [site.blame for site in find_error_sites(again.conversation())] == ["harness", "model"]


@pytest.mark.parametrize(
    ("before", "push", "blame"),
    [
        ("git commit --amend --no-edit", "git push", "model"),
        ("git rebase main", "git push origin main", "model"),
        ("git commit -m x", "git push", "unknown"),  # somebody else may have pushed
        ("git rebase main", "git push --force-with-lease", "unknown"),
    ],
)
def test_a_push_of_commits_that_the_session_had_rewritten(before, push, blame):
    session = Session()
    session.call("Bash", "", command=before)
    session.call("Bash", f"Exit code 1\n{REJECTED}", is_error=True, command=push)
    assert _last(session).blame == blame


@pytest.mark.parametrize(
    ("command", "text", "blame"),
    [
        ("D=$(mktemp -d)\ncat $D/notes.md", "cat: /notes.md: No such file or directory", "unknown"),
        ("cat $D/notes.md", "cat: /notes.md: No such file or directory", "unknown"),  # set by an earlier command
        ("cat $OTHER/notes.md", "cat: /notes.md: No such file or directory", "model"),
        ("D=/srv; cat $D/notes.md", "cat: /srv/notes.md: No such file or directory", "model"),
        ("for f in a b; do gh pr view $f $f; done", "accepts at most 1 arg(s), received 2", "unknown"),
    ],
)
def test_a_variable_that_had_been_set_and_was_empty_is_the_shells_doing(command, text, blame):
    session = Session()
    session.call("Bash", "", command="export D=/srv")
    session.call("Bash", f"Exit code 1\n{text}", is_error=True, command=command)
    assert _last(session).blame == blame


@pytest.mark.parametrize(("folder", "blame"), [("/srv/shop", "model"), ("/srv/gh", "unknown")])
def test_an_option_that_the_program_of_the_project_lacks_is_not_a_slip(folder, blame):
    session = Session()
    session.call("Bash", "Exit code 1\nunknown flag: --stat", is_error=True, command="gh pr diff 4 --stat")
    (site,) = find_error_sites(replace(session.conversation(), cwd=folder))
    assert site.blame == blame


@pytest.mark.parametrize("tool", ["Grep", "Glob"])
def test_a_relative_path_of_a_file_tool_is_seen_from_where_the_shell_stands(tool):
    session = Session().user("look at app/store")
    session.call("Bash", "--- FAIL: TestX\nFAIL", is_error=False, command="cd app/store && go test . | grep FAIL")
    session.call(
        tool, "<tool_use_error>Path does not exist: app/store</tool_use_error>", is_error=True, path="app/store"
    )
    site = find_error_sites(replace(session.conversation(), cwd="/repo"))[-1]
    assert (site.kind, site.blame) == ("wrong_folder", "model")


@pytest.mark.parametrize(
    "said", ["No stderr output", "python3: can't open file '/u/check.py'", "sh: jq: command not found"]
)
def test_a_hook_that_cannot_run_is_no_gate_however_often_it_fails(said):
    session = Session()
    for name in ("a", "b"):
        session.call("Bash", f"PreToolUse:Bash hook error: [check.sh]: {said}", is_error=True, command=f"deploy {name}")
    refusals = []
    assert not any(site.is_kept for site in find_error_sites(session.conversation(), refusals=refusals))
    assert refusals == []


def test_what_a_command_says_itself_is_no_part_of_why_it_was_refused():
    session = Session()
    for first, second in (("sleep 30", "cat out.log"), ("sleep 5", "tail -20 build.log")):
        text = f"<tool_use_error>Blocked: {first} followed by: {second}. To wait, run it aside.</tool_use_error>"
        session.call("Bash", text, is_error=True, command=f"{first}; {second}")
    sites = find_error_sites(session.conversation())
    assert [(site.kind, site.blame) for site in sites] == [("hook_blocked", "harness"), ("hook_blocked", "model")]


@pytest.mark.parametrize(
    ("command", "is_kept"), [("git commit --no-verify -m x", True), ("HUSKY=0 git push", True), ("git push", False)]
)
def test_going_round_a_gate_is_the_models_when_it_is_refused(command, is_kept):
    session = Session()
    session.call("Bash", "PreToolUse:Bash hook error: checks must not be left out", is_error=True, command=command)
    assert _last(session).is_kept is is_kept


def _refused(name: str, time: str, cwd: str = "/srv/shop", message: str = UNFORMATTED):
    session = Session(identity=name)
    session.call("Bash", message.format(f"src/{name}1.go"), is_error=True, command=f"deploy {name}")
    conversation = session.conversation()
    turns = tuple(replace(turn, timestamp=time or None) for turn in conversation.turns)
    return replace(conversation, turns=turns, cwd=cwd)


def _conventions(*conversations):
    refusals = []
    for conversation in conversations:
        assert not any(site.is_kept for site in find_error_sites(conversation, refusals=refusals))
    later = repeated_refusals(refusals)
    assert later == repeated_refusals(reversed(refusals))  # the order of files is no order
    return {site.conversation_id for site in later.values() if site.is_kept and site.blame == "model"}


def test_what_a_gate_refuses_in_a_later_session_of_the_project_is_a_convention():
    first, second = _refused("a", "2026-02-01T10:00:00Z"), _refused("b", "2026-02-02T10:00:00Z")
    third = _refused("c", "2026-02-03T10:00:00Z", cwd="/srv/shop/.worktrees/2")
    assert _conventions(second, third, first) == {"b", "c"}
    elsewhere = _refused("d", "2026-02-04T10:00:00Z", cwd="/srv/other")
    differently = _refused("e", "2026-02-04T10:00:00Z", message="PreToolUse:Bash hook error: no force pushes {}")
    timeless = _refused("f", "")
    assert _conventions(first, elsewhere, differently, timeless) == set()
