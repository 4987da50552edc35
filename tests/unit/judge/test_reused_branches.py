"""Branches of which the commits say little: names used twice, squashed ones, merges that keep nothing."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.judge import Judge, Repository
from composer_replication.sites.judge.project_files import _FileHistory, _parse_merged_branches
from composer_replication.types import ToolCall

TEXT = "".join(f"line {number} of the file\n" for number in range(60))


def day(number):
    return (datetime(2025, 1, 1, tzinfo=UTC) + timedelta(days=number)).isoformat()


def git(folder, *words, on=0):
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    dates = {"GIT_AUTHOR_DATE": day(on), "GIT_COMMITTER_DATE": day(on), "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env={**os.environ, **names, **dates})


def commit(folder, on, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A", on=on)
    git(folder, "commit", "-q", "-m", "x", on=on)


def merge(folder, branch, on, *words, subject=None):
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "--no-ff", *words, "-m", subject or f"Merge branch '{branch}'", branch, on=on)
    git(folder, "branch", "-q", "-D", branch)


@pytest.fixture
def project(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, 0, {"src/pkg/a.py": TEXT + "def old_name():\n    return 1\n", "src/pkg/gone.py": "x\n"})
    return tmp_path


def at(project, on, branch=None):
    checkout = Repository(project).at(day(on), branch)
    assert checkout is not None
    return checkout


def call(name, path, **more):
    return ToolCall(id="c", name=name, arguments={"file_path": f"/repo/{path}", **more})


def test_a_name_that_was_merged_before_the_session_is_another_branch(project):
    git(project, "checkout", "-q", "-b", "dev")
    commit(project, 1, {"src/pkg/b.py": "b\n"})
    merge(project, "dev", 2)
    commit(project, 100, {"src/pkg/a.py": TEXT + "def new_name():\n    return 2\n"})
    assert "def new_name" in (at(project, 150, "dev").text("src/pkg/a.py") or "")
    state = SessionState("/repo")
    shown = "".join(f"{number + 1:6d}→line {number} of the file\n" for number in range(4, 7))
    state.add(call("Read", "src/pkg/a.py", offset=5, limit=3), shown, failed=False)
    edit = call("Edit", "src/pkg/a.py", old_string="def new_name():\n    return 2", new_string="x")
    assert Judge(state, checkout=at(project, 150, "dev")).verdict(edit).says == "ok"


def test_of_two_branches_of_a_name_the_one_that_was_merged_next_is_meant(project):
    for first, name in ((10, "mine"), (40, "theirs")):
        git(project, "checkout", "-q", "-b", "patch-1")
        commit(project, first, {f"src/pkg/{name}.py": "x\n"})
        merge(project, "patch-1", first + 10)
    assert "src/pkg/mine.py" in at(project, 15, "patch-1").files
    assert at(project, 45, "patch-1").files >= {"src/pkg/mine.py", "src/pkg/theirs.py"}


def test_however_often_a_name_was_merged_git_is_asked_about_one_of_them(project, monkeypatch):
    for number in range(6):
        git(project, "checkout", "-q", "-b", "dev")
        commit(project, 10 + number, {f"src/pkg/d{number}.py": "x\n"})
        merge(project, "dev", 10 + number)
    repository, asked = Repository(project), list[tuple[str, ...]]()
    ask = repository._git
    monkeypatch.setattr(repository, "_git", lambda *words, **more: asked.append(words) or ask(*words, **more))
    assert repository.at("2024-01-01T00:00:00+00:00", "dev") is None  # before all of them
    assert len([words for words in asked if words[:2] == ("rev-list", "-1")]) <= 6


def test_the_time_of_a_merge_is_read_with_it():
    lines = ["commit 9", "1 2\t70\tMerge pull request #3 from shop/ada/tax", "1 3\t50\tMerge branch 'ada/tax'"]
    assert _parse_merged_branches("\n".join(lines).encode()) == {"ada/tax": [(50, "3"), (70, "2")]}
    assert _parse_merged_branches(b"1 2\tsoon\tMerge branch 'x'") == {}


def test_what_the_trunk_removed_may_still_be_on_a_branch_that_nobody_finds(project):
    git(project, "rm", "-q", "src/pkg/gone.py")
    git(project, "commit", "-q", "-m", "x", on=20)
    squashed = at(project, 30, "cut-on-day-10")
    assert squashed.exists("src/pkg/gone.py") is None
    assert squashed.exists("src/pkg/never.py") is False
    assert [at(project, 30, branch).exists("src/pkg/gone.py") for branch in (None, "main")] == [False, False]
    state = SessionState("/repo")
    state.add(call("Read", "src/pkg/a.py"), "     1→x\n", failed=False)
    assert Judge(state, checkout=squashed).verdict(call("Read", "src/pkg/gone.py")).says == "unknown"


@pytest.mark.parametrize("was_there_before", [False, True])
def test_what_a_merge_dropped_was_removed_by_nobody(project, was_there_before):
    path = "src/pkg/gone.py" if was_there_before else "src/pkg/x.py"
    git(project, "rm", "-q", "src/pkg/gone.py")
    git(project, "commit", "-q", "-m", "x", on=20)
    git(project, "checkout", "-q", "-b", "feat")
    commit(project, 40, {path: "again\n"})
    merge(project, "feat", 50, "-s", "ours", subject="superseded")
    for on in (51, 90):
        assert at(project, on).exists(path) is None
        assert at(project, on, "feat").exists(path) is None


def test_a_path_was_removed_only_where_that_came_after_it_was_added():
    entry = ":0 1 00 aa A\0{}\0"
    gone = ":1 0 aa 00 D\0{}\0"
    changes = "c1\0" + entry.format("x/a") + "c2\0" + gone.format("x/a") + "c3\0" + entry.format("x/b")
    history = _FileHistory(b"5 c1\n7 c2\n9 c3\n", changes.encode())
    assert [history.removed_at(path) for path in ("x/a", "x/b", "x", "y")] == [7, None, None, 0]


def count_calls(monkeypatch, repository):
    asked = []
    ask = repository._git
    monkeypatch.setattr(repository, "_git", lambda *words, **more: asked.append(words[:2]) or ask(*words, **more))
    return asked


@pytest.mark.parametrize(("sizes", "is_asked"), [((500, 500), True), ((500, 1500), False), ((800, 800, 800), False)])
def test_texts_that_are_too_large_in_all_are_never_taken_into_memory(project, monkeypatch, sizes, is_asked):
    monkeypatch.setattr("composer_replication.sites.judge.project_files._MAX_TEXT", 1000)
    monkeypatch.setattr("composer_replication.sites.judge.project_files._MAX_TEXTS", 2000)
    for number, size in enumerate(sizes):
        commit(project, number + 1, {"data.json": str(number) * size})
    repository = Repository(project)
    checkout = repository.at(day(9))
    asked = count_calls(monkeypatch, repository)
    assert checkout is not None
    assert checkout.has_ever_held("data.json", "abc") is (False if is_asked else None)
    assert (("cat-file", "--batch") in asked) is is_asked
    assert (checkout.text("data.json") is None) is (sizes[-1] > 1000)
    assert (("cat-file", "blob") in asked) is (sizes[-1] <= 1000)


def test_few_histories_and_texts_are_kept_at_once():
    most = {"ancestors": 2, "versions": 2, "versions_without_blanks": 2, "text": 32}
    sizes = {name: getattr(Repository, name).cache_info().maxsize for name in most}
    assert all(sizes[name] <= most[name] for name in most)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("final", ["", "\n\n"])
def test_a_committed_text_is_known_whatever_its_line_ends(project, ending, final):
    checkout = at(project, 1)
    old = ending.join(["line 58 of the file", "line 59 of the file"]) + final.replace("\n", ending)
    assert checkout.has_ever_held("src/pkg/a.py", old) is True
    state = SessionState("/repo")
    shown = "    59→line 58\tof the file\n    60→line 59 of the file\n    61→# own work\n"
    state.add(call("Read", "src/pkg/a.py", offset=59, limit=3), shown, failed=False)
    judgement = Judge(state, checkout=checkout).verdict(call("Edit", "src/pkg/a.py", old_string=old, new_string="x"))
    assert (judgement.says, judgement.rule) == ("risky", "other_blanks")
