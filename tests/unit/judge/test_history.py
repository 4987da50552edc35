"""What commits say beside the one that is checked out: branches that are gone, removed files, earlier texts."""

from __future__ import annotations

import os
import subprocess

import pytest

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.judge import Judge, Repository
from composer_replication.sites.judge.project_files import _FileHistory, _parse_merged_branches
from composer_replication.types import ToolCall

DAYS = [f"2026-01-{day:02d}T10:00:00+00:00" for day in range(1, 31)]
OLD = "".join(f"line {number}\n" for number in range(40))
NEW = OLD.replace("line 7\n", "def total(items):\n\treturn sum(items, start=0)\n")
SUMMARY = "This session is being continued from a previous conversation."


def git(folder, *words, day=1):
    when = DAYS[day - 1]
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env={**os.environ, **names, **dates})


def commit(folder, day, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "-A", day=day)
    git(folder, "commit", "-q", "-m", "x", day=day)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """main: day 1 files, day 2 one folder goes, day 20 a file goes. ada/tax: day 3, merged on day 12, and gone."""
    folder = tmp_path_factory.mktemp("project")
    git(folder, "init", "-q", "-b", "main")
    kept = {f"src__app__{name}_py": OLD for name in "abc"}
    commit(folder, 1, **kept, src__old__gone_py="x\n", src__app__late_py="x\n")
    git(folder, "rm", "-q", "src/old/gone.py")
    git(folder, "commit", "-q", "-m", "x", day=2)
    git(folder, "checkout", "-q", "-b", "ada/tax")
    commit(folder, 3, src__app__tax_py="tax\n", src__app__b_py=NEW)
    git(folder, "checkout", "-q", "main")
    commit(folder, 4, src__d_py="d\n")
    git(folder, "merge", "-q", "--no-ff", "-m", "Merge pull request #7 from shop/ada/tax", "ada/tax", day=12)
    git(folder, "branch", "-q", "-D", "ada/tax")
    git(folder, "rm", "-q", "src/app/late.py")
    git(folder, "commit", "-q", "-m", "x", day=20)
    return folder


def at(project, day, branch=None):
    checkout = Repository(project).at(DAYS[day - 1], branch)
    assert checkout is not None
    return checkout


def call(name, **arguments):
    return ToolCall(id="c", name=name, arguments=arguments)


def read(path, **more):
    return call("Read", file_path=f"/repo/{path}", **more)


def edit(old, path="src/app/b.py"):
    return call("Edit", file_path=f"/repo/{path}", old_string=old, new_string="z")


def in_project(*events):
    """A session that has shown three files of the project, then what is given: words, or calls with their results."""
    state = SessionState("/repo")
    for event in (*((read(f"src/app/{name}.py"), numbered(OLD)) for name in "abc"), *events):
        if isinstance(event, str):
            state.add_message(event)
        else:
            state.add(*event, failed=False)
    return state


def numbered(text, first=1):
    lines = text.removesuffix("\n").split("\n")
    return "".join(f"{number:6d}→{line}\n" for number, line in enumerate(lines, first))


def test_a_branch_that_was_merged_and_is_gone_is_found_by_the_words_of_the_merge(project):
    assert "src/app/tax.py" in at(project, 5, "ada/tax").files
    assert "src/d.py" not in at(project, 5, "ada/tax").files  # of main, after the branch had left it
    assert "src/app/tax.py" not in at(project, 5, "bob/tax").files
    assert "src/app/tax.py" not in at(project, 2, "ada/tax").files  # before its first commit


def test_a_branch_at_a_date_has_not_what_was_merged_into_it_later(project):
    assert "src/app/tax.py" not in at(project, 3).files  # the newest commit of that day, and not yet of main
    assert "src/app/tax.py" not in at(project, 5).files
    assert "src/app/tax.py" in at(project, 13).files


def test_names_of_merged_branches_are_read_as_git_and_hosts_write_them():
    lines = [
        "commit 9",
        "1 2\t50\tMerge pull request #3 from shop/ada/tax",
        "1 3\t50\tMerge branch 'bob-fix' into main",
        "1 4\t50\tMerge remote-tracking branch 'origin/eve'",
        "1 5 6\t50\tMerge branch 'three' at once",
        "1 7\t50\tNote: Merge branch 'quoted' is what git writes",
    ]
    found = _parse_merged_branches("\n".join(lines).encode())
    assert found == {"ada/tax": [(50, "2")], "bob-fix": [(50, "3")], "eve": [(50, "4")]}
    assert _parse_merged_branches(b"\xff\t\n\n\t") == {}


def test_what_was_removed_is_gone_unless_it_was_just_now_or_another_branch_has_it(project):
    assert [at(project, 11).exists(path) for path in ("src/old/gone.py", "src/old")] == [False, False]
    assert at(project, 4).exists("src/old/gone.py") is None  # two days after: a work tree may be behind
    assert at(project, 22).exists("src/app/late.py") is None
    assert at(project, 29).exists("src/app/late.py") is False
    assert at(project, 11).exists("src/app/tax.py") is None  # of a commit that does not lie behind main of that day


def test_a_history_that_is_cut_short_is_read_as_far_as_it_goes():
    history = _FileHistory(b"5 c1\n7 c2\n", b"c1\0:0 1 00 aa A\0x/y\0c2\0:1 0 aa 00 D\0x/y\0:1 1 aa")
    assert history.removed_at("x") == 7
    assert history.added_on_other_branch("x/y", {"c2"}) is True
    assert history.added_on_other_branch("x/y", {"c1"}) is False
    assert history.versions == {"x/y": ["aa"]}


def test_every_text_of_a_file_is_known(project):
    checkout = at(project, 2)
    assert checkout.has_ever_held("src/app/b.py", "return sum(items, start=0)") is True  # also of a later commit
    assert checkout.has_ever_held("src/app/b.py", "return sum(items,start=0)") is False
    assert checkout.has_ever_held("src/app/b.py", "return sum(items,start=0)", but_for_blanks=True) is True
    assert checkout.has_ever_held("src/app/b.py", "line 700", but_for_blanks=True) is False
    assert checkout.has_ever_held("src/app/new.py", "line 7") is None


def test_where_a_version_cannot_be_had_nothing_is_said_of_all_of_them(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, 1, a_py="first\n")
    name = subprocess.run(["git", "rev-parse", "HEAD:a.py"], cwd=tmp_path, capture_output=True, check=True).stdout
    commit(tmp_path, 2, a_py="second\n")
    assert at(tmp_path, 3).has_ever_held("a.py", "third") is False
    blob = name.decode().strip()
    (tmp_path / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    assert at(tmp_path, 3).has_ever_held("a.py", "third") is None


NOWHERE = "line 7, of which nobody has heard"


@pytest.mark.parametrize(
    ("since", "old", "expected"),
    [
        (["Go on."], NOWHERE, ("fails", "no_match_in_any_commit")),
        (["Go on."], "def total(items):", ("risky", "no_match_long_ago")),  # they may have taken it from that commit
        (["I have changed it."], NOWHERE, ("risky", "no_match_long_ago")),
        ([(call("Bash", command="ruff format ."), "")], NOWHERE, ("risky", "no_match_long_ago")),
        ([(call("Bash", command="git checkout x"), "")], NOWHERE, ("unknown", "text_not_shown")),
        (["Go on."], "line 8", ("ok", "found_in_part")),
    ],
)
def test_after_somebody_came_by_a_text_that_no_commit_has_is_made_up(project, since, old, expected):
    judgement = Judge(in_project(*since), checkout=at(project, 2)).verdict(edit(old))
    assert (judgement.says, judgement.rule) == expected
    without = Judge(in_project(*since)).verdict(edit(old))
    assert without.says != "fails"


def test_commits_of_another_project_say_nothing_of_a_file_that_is_called_alike(project):
    state = SessionState("/repo")
    for name in ("web/x/a.js", "web/x/b.js", "web/x/c.js", "web/x/d.js", "src/app/b.py"):
        state.add(read(name), numbered(OLD), failed=False)
    state.add_message("Go on.")
    assert Judge(state, checkout=at(project, 2)).verdict(edit(NOWHERE)).says == "risky"


@pytest.mark.parametrize(
    ("old", "says", "rule"),
    [
        ("def total(items):\n    return sum(items, start=0)", "fails", "other_blanks"),  # shown with a tab
        ("def total(items):\n\treturn sum(items, start=0)", "ok", "found_in_part"),
        ("sum( items", "unknown", "text_not_shown"),  # too short to be known again
        ("\treturn sum(items, start=0)\n# its end", "fails", "contradicts"),
        ("\treturn max(items, default=0)\n# its end", "unknown", "text_not_shown"),
    ],
)
def test_a_part_that_was_shown_speaks_against_a_text_that_no_commit_has(project, old, says, rule):
    shown = "def total(items):\n\treturn sum(items, start=0)\n# own work"  # so that no commit completes it
    state = SessionState("/repo")
    state.add(read("src/app/b.py", offset=8, limit=3), numbered(shown, 8), failed=False)
    judgement = Judge(state, checkout=at(project, 5)).verdict(edit(old))
    assert (judgement.says, judgement.rule) == (says, rule)
    assert Judge(state).verdict(edit(old)).says != "fails"


def test_texts_of_a_branch_are_its_own_work_and_may_have_been_read_before_a_summary(project):
    def rule(old):
        state = SessionState("/repo")
        state.add_message(SUMMARY)
        return Judge(state, checkout=at(project, 5, "ada/tax")).verdict(edit(old)).rule

    assert rule("line 30") == "not_read_since"
    assert rule("return sum(items, start=0)") == "read_before"


@pytest.mark.parametrize(
    ("named", "asked", "says"),
    [
        ("app/b.py", "app/b.py", "fails"),  # src/app/b.py is meant
        ("./app/z.py", "app/z.py", "unknown"),  # none that is committed is meant
        ("src/app/new.py", "src/app/new.py", "unknown"),
    ],
)
def test_a_name_that_is_short_for_another_file_does_not_speak_for_a_path(project, named, asked, says):
    state = in_project(f"Look at {named} once more.")
    assert Judge(state, checkout=at(project, 2)).verdict(read(asked)).says == says
    command = call("Bash", command=f"grep -n x {asked}")
    assert (Judge(state, checkout=at(project, 2)).verdict(command).rule == "file_missing") is (says == "fails")
