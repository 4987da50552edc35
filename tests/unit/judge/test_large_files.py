"""Files that are too large to be shown at once: read whole, or changed behind the agent's back."""

from __future__ import annotations

import os
import subprocess

import pytest

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.judge import Judge, Repository
from composer_replication.types import ToolCall

LINE = "\tif err := check(item, number); err != nil {\n"  # 16 words and signs, with its end
LARGE, SMALL = LINE * 1500, LINE * 1000


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    (folder / "src" / "app").mkdir(parents=True)
    (folder / "src" / "app" / "large.go").write_text(LARGE)
    (folder / "src" / "app" / "small.go").write_text(SMALL)
    (folder / "src" / "app" / "long.go").write_text(LINE.replace("(item, number)", "()") * 2200)
    (folder / "src" / "app" / "words.txt").write_text("word,\n" * 9000)
    (folder / "src" / "app" / "prose.md").write_text("Considerable quantities of remarkable sentences. " * 2000)
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_COMMITTER_DATE": "2026-01-01T10:00:00Z"}
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env=os.environ | names | settings)
    return Repository(folder).at("2026-01-02T00:00:00Z")


def call(name, **arguments):
    return ToolCall(id="c", name=name, arguments=arguments)


def read(name="large.go", **more):
    return call("Read", file_path=f"/repo/src/app/{name}", **more)


def edit(name="large.go", old="check(item, number)"):
    return call("Edit", file_path=f"/repo/src/app/{name}", old_string=old, new_string="z", replace_all=True)


def bash(command):
    return call("Bash", command=command)


def after(*calls):
    state = SessionState("/repo")
    for made in calls:
        state.add(made, f"     5→{LINE}" if made.name == "Read" else "", failed=False)
    return state


PART = read(offset=5, limit=1)


@pytest.mark.parametrize(
    ("before", "asked", "says"),
    [
        ([], read(), "fails"),
        ([PART], read(), "fails"),  # a part was shown: that says nothing of the whole
        ([read()], read(), "ok"),
        ([], read(limit=100), "ok"),
        ([], read("small.go"), "ok"),
        ([], read("long.go"), "fails"),  # its first 2,000 lines would fit, but all of a file is counted
        ([], read("words.txt"), "ok"),  # of lines so short nobody has measured what a word takes
        ([], read("prose.md"), "ok"),  # more characters than the large one, fewer words and signs
    ],
)
def test_a_file_of_too_many_words_and_signs_is_not_read_at_once(checkout, before, asked, says):
    judgement = Judge(after(*before), checkout=checkout).verdict(asked)
    assert judgement.says == says
    assert (judgement.rule == "too_large") is (says == "fails")


def test_a_file_of_another_project_that_is_called_alike_may_be_small(checkout):
    others = [call("Read", file_path=f"/repo/web/x/{name}.js") for name in "abcd"]
    assert Judge(after(*others), checkout=checkout).verdict(read()).says != "fails"


CHANGES = [
    "cat >> src/app/large.go <<'E'\nx\nE",
    "sed -i s/a/b/ src/app/large.go",
    "mv new.go src/app/large.go",
]


@pytest.mark.parametrize("command", CHANGES)
def test_a_large_file_that_a_command_changed_counts_as_unread(checkout, command):
    judgement = Judge(after(PART, bash(command)), checkout=checkout).verdict(edit())
    assert (judgement.says, judgement.rule, judgement.kind) == ("fails", "changed_and_too_large", "edit_not_read")


@pytest.mark.parametrize(
    "calls",
    [
        [PART],
        [bash(CHANGES[0]), PART],  # read since
        [PART, bash(CHANGES[0]), PART],
        [PART, bash("cat >> src/app/other.go <<'E'\nsrc/app/large.go in another format\nE")],
        [PART, bash("grep -n fmt src/app/large.go > found.txt")],
        [PART, bash("gofmt -l .")],
    ],
)
def test_a_large_file_that_nothing_changed_is_known_as_it_was_read(checkout, calls):
    assert Judge(after(*calls), checkout=checkout).verdict(edit()).says != "fails"


def test_a_small_file_is_looked_at_again_by_the_agent_and_other_agents_ask_for_no_reading(checkout):
    state = after(read("small.go", offset=5, limit=1), bash("sed -i s/a/b/ src/app/small.go"))
    assert Judge(state, checkout=checkout).verdict(edit("small.go")).says != "fails"
    other = call("replace", file_path="/repo/src/app/large.go", old_string="nil", new_string="z")
    assert Judge(after(PART, bash(CHANGES[0])), checkout=checkout).verdict(other).says != "fails"
