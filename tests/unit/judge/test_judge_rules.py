"""One planted session a rule, and beside it the one that differs in what matters: there it must not say `fails`."""

from __future__ import annotations

import pytest

from composer_replication.sites import classify
from composer_replication.sites.actions.known_paths import PathStatus
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.judge import Judge
from composer_replication.types import ToolCall

A_PY = "     1→import os\n     2→\n     3→x = 1\n     4→y = 2\n     5→x = 1\n"
PART = "    40→def late():\n    41→    return compute_the_total(items)\n    42→\n"
MISSING = "<tool_use_error>File does not exist.</tool_use_error>"
NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
AGENTS = "Agent type 'fixer' not found. Available agents: Bash, general-purpose, reviewer"
LISTING = "total 8\ndrwxr-xr-x 2 u u 4096 Jan 1 10:00 src\n-rw-r--r-- 1 u u 12 Jan 1 10:00 setup.py"


def call(name, **arguments):
    return ToolCall(id="c", name=name, arguments=arguments)


def read(path="/repo/a.py", **more):
    return call("Read", file_path=path, **more)


def edit(old, new="z", path="/repo/a.py", **more):
    return call("Edit", file_path=path, old_string=old, new_string=new, **more)


def write(path):
    return call("Write", file_path=path, content="")


def bash(command):
    return call("Bash", command=command)


def worked(made, text=""):
    return made, text, False


def failed(made, text):
    return made, text, True


SHOWN = worked(read(), A_PY)
NO_PY = failed(read("/repo/no.py"), MISSING)
GREP_FAILED = failed(bash("grep --frob x"), "Exit code 2\ngrep: unrecognized option '--frob'")
TESTS_FAILED = failed(bash("npx vitest run"), "Exit code 1\n 1 failed | 3 passed (4)\nTests failed")
TOO_LARGE = failed(read(), "File content (30000 tokens) exceeds maximum allowed tokens (25000).")
SHOWN_IN_PART = worked(read(offset=40, limit=3), PART)
UPDATED = "The file /repo/a.py has been updated."
MOVED = worked(bash("cd src && ls"), "shop.py")
SHOP = worked(read("/repo/src/shop.py"), A_PY)

RULES = [
    ("schema", [], call("Grep", pattern="x", file_path="/repo/a.py"), [], call("Grep", pattern="x", path="/repo")),
    ("schema", [], call("Read", path="/repo/a.py"), [], call("mcp__files__read", path="/repo/a.py")),
    ("edit_noop", [SHOWN], edit("y = 2", "y = 2"), [SHOWN], edit("y = 2", "y = 3")),
    ("no_match", [SHOWN], edit("z = 9"), [SHOWN], edit("y = 2")),
    ("no_match", [SHOWN], edit("z = 9"), [SHOWN_IN_PART], edit("z = 9")),
    ("no_match", [SHOWN], edit("z = 9"), [SHOWN, worked(bash("git checkout main"))], edit("z = 9")),
    ("no_match", [SHOWN], edit("z = 9"), [SHOWN, worked(bash("sed -i s/y/z/ a.py"))], edit("z = 9")),
    ("no_match", [SHOWN], edit("z = 9"), [SHOWN, worked(edit("y = 2", "z = 9"), UPDATED)], edit("z = 9")),
    ("no_match", [SHOWN, worked(edit("y = 2", "y = 3"), UPDATED)], edit("y = 2"), [SHOWN], edit("y = 2")),
    ("ambiguous", [SHOWN], edit("x = 1"), [SHOWN], edit("x = 1", replace_all=True)),
    ("ambiguous", [SHOWN], edit("x = 1"), [SHOWN], edit("x = 1\ny = 2")),
    ("ambiguous", [worked(call("Write", file_path="/repo/a.py", content="k\nk\n"))], edit("k"), [SHOWN], edit("y")),
    ("not_read", [], edit("y = 2"), [SHOWN], edit("y = 2")),
    ("not_read", [], edit("y = 2"), ["Look at @a.py, please."], edit("y = 2")),
    ("not_read", [], edit("y = 2"), ["This session is being continued from a previous conversation."], edit("y = 2")),
    ("not_read", [worked(bash("cat /repo/a.py"), "y = 2")], edit("y = 2"), [SHOWN], edit("y = 2")),
    ("not_read", [SHOWN, failed(edit("y"), NOT_READ)], edit("y"), [failed(edit("y"), NOT_READ), SHOWN], edit("y = 2")),
    ("not_read", [SHOWN_IN_PART, "<command-name>/exit</command-name>"], edit("l"), [SHOWN_IN_PART], edit("def late")),
    ("not_read", [SHOWN_IN_PART, "<command-name>/exit</command-name>"], edit("l"),
     [SHOWN, "<command-name>/exit</command-name>"], edit("y = 2")),
    ("not_read", [worked(call("Glob", pattern="*.py"), "/repo/a.py")], write("/repo/a.py"), [], write("/repo/new.py")),
    ("not_read", [], edit("y = 2"), [], call("replace", file_path="/repo/a.py", old_string="y", new_string="z")),
    ("not_read", [worked(call("LS", path="/repo"), "- /repo/\n  - a.py")], edit("y = 2"), [SHOWN], edit("y = 2")),
    ("failed_before", [NO_PY], read("/repo/no.py", limit=5), [], read("/repo/no.py")),
    ("failed_before", [NO_PY], read("/repo/no.py", limit=5),
     [NO_PY, worked(bash("touch no.py"))], read("/repo/no.py", limit=5)),
    ("failed_before", [NO_PY], read("/repo/no.py", limit=5),
     [NO_PY, worked(write("/repo/no.py"))],
     read("/repo/no.py", limit=5)),
    ("failed_before", [NO_PY], read("/repo/no.py", limit=5), [NO_PY, "no.py is there."], read("/repo/no.py", limit=5)),
    ("not_listed", [worked(bash("ls -la"), LISTING)], read("/repo/lib/a.py"), [worked(bash("ls -la"), LISTING)],
     read("/repo/src/a.py")),
    ("not_listed", [worked(bash("ls"), "src\nsetup.py")], read("/repo/lib.py"),
     [worked(bash("ls"), "src\nsetup.py"), worked(bash("cp setup.py lib.py"))], read("/repo/lib.py")),
    ("not_globbed", [worked(call("Glob", pattern="**/*.py"), "/repo/a.py")], read("/repo/src/b.py"),
     [worked(call("Glob", pattern="**/*.py"), "/repo/a.py")], read("/repo/src/b.go")),
    ("not_globbed", [worked(call("Glob", pattern="**/*.py"), "/repo/a.py")], read("/repo/src/b.py"),
     [worked(call("Glob", pattern="**/*.py"), "/repo/a.py\n(Results are truncated)")], read("/repo/src/b.py")),
    ("below_a_file", [SHOWN], read("/repo/a.py/b.py"), [SHOWN], read("/repo/a/b.py")),
    ("a_folder", [SHOP], read("/repo/src"), [SHOP], call("Grep", pattern="x", path="/repo/src")),
    ("a_folder", [worked(call("LS", path="/repo/src"), "- /repo/src/\n  - a.py")], read("/repo/src"), [],
     read("/repo/src/a.py")),
    ("from_another_folder", [SHOP, MOVED], call("Grep", pattern="x", path="src/shop.py"), [SHOP],
     call("Grep", pattern="x", path="src/shop.py")),
    ("too_large", [TOO_LARGE], read(limit=None),
     [TOO_LARGE], read(limit=100)),
    ("same_again", [GREP_FAILED], bash("grep --frob x"),
     [GREP_FAILED, worked(bash("make"))], bash("grep --frob x")),
    ("same_again", [GREP_FAILED], bash("grep --frob x"),
     [GREP_FAILED, "It is there now."], bash("grep --frob x")),
    ("same_again", [GREP_FAILED], bash("grep --frob x"), [TESTS_FAILED], bash("npx vitest run")),
    ("cd_missing", [SHOP, MOVED], bash("cd src && make"), [SHOP], bash("cd src && make")),
    ("cd_missing", [failed(bash("cd lib"), "cd: lib: No such file or directory")], bash("cd lib && make"),
     [failed(read("/repo/lib/a.py"), MISSING)], bash("cd lib && make")),
    ("file_missing", [NO_PY], bash("wc -l no.py"), [NO_PY],
     bash("wc -l no.py || true")),
    ("file_missing", [NO_PY], bash("cat no.py"), [NO_PY],
     bash("ls no.py && cat no.py")),
    ("file_missing", [NO_PY], bash("cat no.py"), [NO_PY],
     bash("cat no.py 2>/dev/null")),
    ("file_missing", [NO_PY], bash("python3 no.py"), [NO_PY], bash("python3 run.py no.py")),
    ("file_missing", [NO_PY], bash("chmod +x no.py"), [NO_PY], bash("touch no.py")),
    ("from_another_folder", [SHOP, MOVED], bash("pytest src/shop.py"), [SHOP], bash("pytest src/shop.py")),
    ("no_such_program", [failed(bash("rg x"), "zsh: command not found: rg")], bash("cd src && rg y"),
     [failed(bash("rg x"), "zsh: command not found: rg")], bash("grep rg y")),
    ("unknown_name", [failed(call("Task", subagent_type="fixer"), AGENTS)], call("Task", subagent_type="writer"),
     [failed(call("Task", subagent_type="fixer"), AGENTS)], call("Task", subagent_type="reviewer")),
    ("unknown_name", [failed(call("Skill", skill="commit"), "<tool_use_error>Unknown skill: commit</tool_use_error>")],
     call("Skill", skill="commit", args="x"), [], call("Skill", skill="commit", args="x")),
    ("unknown_name", [], call("Skill", skill="compact"), [worked(call("Skill", skill="compact"))],
     call("Skill", skill="compact")),
    ("unknown_name", [], call("Skill", skill="compact"), [], call("Skill", skill="review")),
]  # fmt: skip


def judge_after(events):
    state = SessionState("/repo")
    for event in events:
        if isinstance(event, str):
            state.add_message(event)
        else:
            made, text, has_failed = event
            verdict = classify(made.name, made.arguments, text, has_failed, before=state)
            state.add(made, text, failed=has_failed, kind=verdict.kind)
    return Judge(state)


@pytest.mark.parametrize(("rule", "before", "made", "other_before", "other"), RULES, ids=[each[0] for each in RULES])
def test_a_rule_speaks_where_it_should_and_only_there(rule, before, made, other_before, other):
    judgement = judge_after(before).verdict(made)
    assert (judgement.says, judgement.rule) == ("fails", rule)
    assert judgement.kind
    assert judgement.why
    assert judge_after(other_before).verdict(other).says != "fails"


@pytest.mark.parametrize("command", ["go build ./...", "make", "python -c 'raise SystemExit(1)'", "git push", "curl x"])
def test_what_a_command_does_is_unknown_and_said_to_be(command):
    judgement = judge_after([SHOWN]).verdict(bash(command))
    assert (judgement.says, judgement.rule) == ("unknown", "shell")


def test_what_may_well_fail_is_no_prediction():
    contradicted = "    return compute_the_total(items)\nreturn"
    assert judge_after([SHOWN_IN_PART]).verdict(edit(contradicted)).says == "risky"
    formatted = [SHOWN, worked(bash("gofmt -w ."))]
    assert judge_after(formatted).verdict(edit("z = 9")).says == "risky"


def test_an_edit_of_text_that_was_shown_is_ok():
    assert judge_after([SHOWN]).verdict(edit("y = 2")).rule == "found_in_whole_file"
    assert judge_after([SHOWN_IN_PART]).verdict(edit("def late():")).rule == "found_in_part"


class NothingIsThere:
    """Earlier sessions that know of no file at all."""

    def standing(self, relative, shown):
        return PathStatus(False, "missing_in_earlier_session")

    def is_too_large(self, relative, shown):
        return False


def test_a_source_that_was_wrong_once_is_not_believed_again():
    state = SessionState("/repo")
    judge = Judge(state, project=NothingIsThere())
    assert judge.verdict(read("/repo/one.py")).rule == "missing_in_earlier_session"
    state.add(read("/repo/one.py"), A_PY, failed=False)
    assert judge.verdict(read("/repo/two.py")).says == "unknown"


class SkillsAreThere:
    """Earlier sessions that have used every skill."""

    def has_name(self, name, shown):
        return True


def test_a_skill_that_earlier_sessions_have_used_is_there_whatever_the_agent_calls_its_own():
    judge = Judge(SessionState("/repo"), project=SkillsAreThere())
    assert judge.verdict(call("Skill", skill="compact")).says == "ok"


@pytest.mark.parametrize(
    ("name", "says"), [("status", "risky"), ("memory", "risky"), ("model", "risky"), ("clear", "fails")]
)
def test_a_command_of_the_agents_own_may_also_be_somebodys_skill(name, says):
    judgement = Judge(SessionState("/repo")).verdict(call("Skill", skill=name))
    assert (judgement.says, judgement.rule) == (says, "unknown_name")
