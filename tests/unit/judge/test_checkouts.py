"""A project's files at a date, out of git's objects; a repository that wants to run something runs nothing."""

from __future__ import annotations

import os
import subprocess

import pytest

from composer_replication.errors import InputError
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.judge import Judge, Repository
from composer_replication.types import Conversation, Provenance, ToolCall, Turn

WHERE = Provenance(file="log", lines=(1,))
FIRST, SECOND, THIRD = "2026-01-01T10:00:00+00:00", "2026-01-03T10:00:00+00:00", "2026-01-05T10:00:00+00:00"
TWICE = "start\n" + "twice()\n" + "".join(f"line {number}\n" for number in range(30)) + "twice()\n"

RUNS_A_PROGRAM = [
    *(f"core.{name}" for name in ("fsmonitor", "pager", "sshCommand", "askPass", "editor", "alternateRefsCommand")),
    *("diff.external", "diff.evil.textconv", "diff.evil.command", "gpg.program", "credential.helper"),
    *("filter.evil.smudge", "filter.evil.clean", "filter.evil.process", "remote.origin.uploadpack"),
    *("pager.rev-list", "pager.ls-tree", "pager.cat-file", "uploadpack.packObjectsHook"),
]


def git(folder, *words, when=FIRST):
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env={**os.environ, **names, **dates})


def commit(folder, files, when):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "add", "-A", when=when)
    git(folder, "commit", "-q", "-m", "x", when=when)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """main: two commits; a branch with a file of its own between them; a file that was renamed away."""
    folder = tmp_path_factory.mktemp("project")
    git(folder, "init", "-q", "-b", "main")
    commit(
        folder,
        {"src/app/a.py": TWICE, "src/app/b.py": "b\n", "src/app/c.py": "c\n", "lint.yaml": "x\n", "src/d.py": ""},
        FIRST,
    )
    git(folder, "checkout", "-q", "-b", "feature/x")
    commit(folder, {"src/app/branch.py": "mine\n"}, SECOND)
    git(folder, "checkout", "-q", "main")
    commit(folder, {"src/app/late.py": "late\n"}, THIRD)
    return folder


def at(project, when="2026-01-04T00:00:00Z", branch=None):
    checkout = Repository(project).at(when, branch)
    assert checkout is not None
    return checkout


def test_files_are_those_of_the_branch_at_the_date(project):
    on_main = {"src/app/a.py", "src/app/b.py", "src/app/c.py", "src/d.py", "lint.yaml"}
    assert at(project).files == on_main
    assert at(project, branch="feature/x").files == on_main | {"src/app/branch.py"}
    assert at(project, branch="no-such-branch").files == on_main
    assert at(project, "2026-01-06T00:00:00Z").files == on_main | {"src/app/late.py"}
    assert Repository(project).at("2025-01-01T00:00:00Z") is None
    assert Repository(project).at("yesterday") is None


def test_a_file_of_another_branch_or_of_a_later_commit_may_be_there(project):
    checkout = at(project)
    assert [checkout.exists(path) for path in ("src/app/a.py", "src/app")] == [True, True]
    assert [checkout.exists(path) for path in ("src/app/branch.py", "src/app/late.py")] == [None, None]
    assert [checkout.exists(path) for path in ("src/no", "../x")] == [False, False]
    assert checkout.text("src/app/b.py") == "b\n"
    assert checkout.text("src/app/late.py") is None


def test_a_session_is_taken_at_its_beginning_and_on_its_own_branch(project):
    turn = Turn(id="t", role="user", origin="human", provenance=WHERE, timestamp="2026-01-04T00:00:00Z")
    log = Conversation(id="s", format="claude_code", turns=(turn,), extra={"git_branch": "feature/x"})
    checkout = Repository(project).before(log)
    assert checkout is not None
    assert "src/app/branch.py" in checkout.files
    assert Repository(project).before(Conversation(id="s", format="claude_code", turns=())) is None


def call(name, **arguments):
    return ToolCall(id="c", name=name, arguments=arguments)


def read(path, **more):
    return call("Read", file_path=f"/repo/{path}", **more)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("src/app/lost.py", ("fails", "not_in_checkout")),
        ("src/lost/a.py", ("fails", "not_in_checkout")),
        ("lint.yml", ("fails", "not_in_checkout")),
        ("src/app", ("fails", "a_folder")),
        ("src/app/a.py", ("ok", "in_checkout")),
        ("src/app/branch.py", ("unknown", "unseen")),
        ("src/.cache/a.py", ("unknown", "unseen")),
        ("NOTES.md", ("unknown", "unseen")),
    ],
)
def test_a_path_is_looked_up_in_the_checkout(project, path, expected):
    state = SessionState("/repo")
    for name in ("src/app/b.py", "src/app/c.py", "src/d.py"):
        state.add(read(name), "     1→x\n", failed=False)
    judgement = Judge(state, checkout=at(project)).verdict(read(path))
    assert (judgement.says, judgement.rule) == expected


@pytest.mark.parametrize(
    ("named", "asked", "says"),
    [
        ("app/a.py", "src/cli/app/a.py", "fails"),  # another file of the checkout ends alike
        ("app/z.py", "src/cli/app/z.py", "unknown"),  # none does: it may be one that nobody has committed
        ("src/cli/app/a.py", "src/cli/app/a.py", "unknown"),
    ],
)
def test_a_name_that_belongs_to_another_file_does_not_speak_for_a_path(project, named, asked, says):
    state = SessionState("/repo")
    for name in ("src/app/b.py", "src/app/c.py", "src/d.py"):
        state.add(read(name), f"     1→see {named}\n", failed=False)
    assert Judge(state, checkout=at(project)).verdict(read(asked)).says == says


def test_a_checkout_of_another_project_says_nothing(project):
    state = SessionState("/repo")
    for name in ("web/x/a.js", "web/x/b.js", "web/x/c.js"):
        state.add(read(name), "     1→x\n", failed=False)
    assert Judge(state, checkout=at(project)).verdict(read("src/app/lost.py")).says == "unknown"


def test_a_part_of_a_file_is_completed_where_it_agrees(project):
    def says(part, old):
        state = SessionState("/repo")
        state.add(read("src/app/a.py", offset=2, limit=2), part, failed=False)
        judge = Judge(state, checkout=at(project))
        edit = call("Edit", file_path="/repo/src/app/a.py", old_string=old, new_string="z")
        return judge.verdict(edit).says, judge.verdict(edit).rule

    agrees, differs = "     2→twice()\n     3→line 0\n", "     2→twice()\n     3→line 1\n"
    assert says(agrees, "twice()") == ("fails", "ambiguous_in_checkout")
    assert says(agrees, "nowhere") == ("fails", "no_match_in_checkout")
    assert says(agrees, "line 7") == ("ok", "found_in_whole_file_in_checkout")
    assert says(differs, "twice()") == ("ok", "found_in_part")
    assert says(differs, "nowhere") == ("unknown", "text_not_shown")


def test_after_a_summary_a_text_that_is_still_the_commits_had_not_been_read(project):
    def rule(old, said="This session is being continued from a previous conversation.", *, with_checkout=True):
        state = SessionState("/repo")
        state.add_message(said)
        judge = Judge(state, checkout=at(project) if with_checkout else None)
        return judge.verdict(call("Edit", file_path="/repo/src/app/a.py", old_string=old, new_string="z")).rule

    assert rule("line 7") == "not_read_since"
    assert rule("line 7, as the session has left it") == "read_before"  # it was worked on, so it was read
    assert rule("line 7", with_checkout=False) == "read_before"
    assert rule("line 7", "This session is being continued from a previous one. See @src/app/a.py") == "read_before"
    assert rule("line 7", "Go on.") == "not_read"  # without a checkout's help: all of the session is in the log


def test_a_repository_that_wants_to_run_something_runs_nothing(project, tmp_path):
    trap, sprung = tmp_path / "trap", tmp_path / "sprung"
    trap.mkdir()
    program = tmp_path / "program.sh"
    program.write_text(f'#!/bin/sh\necho "$0 $*" >> {sprung}\n')
    program.chmod(0o755)
    git(trap, "init", "-q", "-b", "main")
    commit(trap, {"src/app/a.py": TWICE, ".gitattributes": "*.py diff=evil filter=evil merge=evil\n"}, FIRST)
    commit(trap, {"src/app/gone.py": "x\n"}, SECOND)
    for key in RUNS_A_PROGRAM:
        git(trap, "config", key, str(program))
    for name in ("rev-parse", "rev-list", "ls-tree", "cat-file", "diff-tree"):
        git(trap, "config", f"alias.{name}", f"!{program}")
    for key, value in {
        "log.showSignature": "true",
        "remote.origin.url": f"ext::{program} %S",
        "remote.origin.promisor": "true",
        "remote.origin.partialclonefilter": "blob:none",
        "extensions.partialClone": "origin",
        "core.repositoryformatversion": "1",
        "protocol.ext.allow": "always",
    }.items():
        git(trap, "config", key, value)
    hooks = trap / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-checkout", "post-index-change", "reference-transaction", "fsmonitor-watchman", "pre-auto-gc"):
        (hooks / name).write_text(program.read_text())
        (hooks / name).chmod(0o755)
    blob = subprocess.run(["git", "rev-parse", "HEAD:src/app/gone.py"], cwd=trap, capture_output=True, check=True)
    name = blob.stdout.decode().strip()
    (trap / ".git" / "objects" / name[:2] / name[2:]).unlink()  # a missing object is not fetched
    subprocess.run(["git", "cat-file", "-p", name], cwd=trap, capture_output=True, check=False, timeout=60)
    assert sprung.exists()  # so the trap works: git as it comes would have run the program
    sprung.unlink()

    checkout = at(trap)
    assert "src/app/a.py" in checkout.files
    assert checkout.text("src/app/a.py") == TWICE
    assert checkout.text("src/app/gone.py") is None
    assert checkout.exists("src/app/no.py") is False
    assert Repository(trap).at("2026-01-04T00:00:00Z", "gone-branch") is not None
    assert checkout.has_ever_held("src/app/a.py", "line 7") is True
    assert checkout.has_ever_held("src/app/gone.py", "x") is None  # its object cannot be had
    assert not sprung.exists()


def test_what_is_no_repository_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(InputError, match="--repo"):
        Repository(tmp_path / "nowhere")


def test_names_that_look_like_options_are_names(project, tmp_path):
    checkout = Repository(project).at("2026-01-04T00:00:00Z", f"--output={tmp_path / 'written'}")
    assert checkout is not None
    assert not (tmp_path / "written").exists()
    assert checkout.text("--help") is None
