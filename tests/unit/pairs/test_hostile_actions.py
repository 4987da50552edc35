"""Input made to hurt: nesting, size, control characters. No crash, no quadratic time, no two alike."""

from __future__ import annotations

import json
import os

import pytest
from action_forms import CWD, bash, call, calls, key, said
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.action_text import parse_reply
from composer_replication.sites.actions.equality import ActionContext
from composer_replication.teacher_replay.votes import _SessionContext
from cpu_time import least_cpu_seconds

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
SIZE = 2**20 if IS_FULL else 2**16
LIMIT_S = 6.0 if IS_FULL else 0.5  # a megabyte takes about one; quadratic work takes minutes, a sixteenth of it seconds


def repeated(unit: str) -> str:
    return unit * (SIZE // len(unit))


def test_the_size_is_said(note):
    note(f"texts made to hurt: {SIZE:,} characters each (make test-full: {2**20:,})")
    assert len(repeated("ab")) == SIZE


COMMANDS = [
    "a ", "'a' ", '"a" ', "'a", '"', "\\", "\\ ", "$a ", "${a} ", "$(a) ", '"$(a)" ', "$(", "((", "( ", "`a` ", "`",
    "a;", "a|", "a&&", "a\n", ">f ", "2>&1 ", "<<A ", "<<A\n", "cat <<A\nx\nA\n", "{a,b} ", "[", "*", "? ", "a/", "../",
    "-a ", "--a=b ", "--a ", "A=1 ", "# x\n", "\t", "if a; then b; fi\n", "for a in b; do c; done\n", "case ", "$'a' ",
    "cd a;", "cd a && ", "(a) ", '$(cat <<\'EOF\'\nx\nEOF\n) ', "~", "!", "\r\n", "\0",
]  # fmt: skip
PROGRAMS = ["", "rm ", "find . ", "ls ", "git add ", "grep -r ", "echo ", "go test ", "env ", "sudo ", "make ", "cd "]


@pytest.mark.parametrize("unit", COMMANDS)
def test_a_megabyte_of_shell_takes_linear_time(unit):
    text = repeated(unit)
    assert least_cpu_seconds(lambda: key(bash(text)), enough=LIMIT_S) < LIMIT_S


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("unit", ["a/b ", "-name a ", "sudo python -m "])
def test_a_megabyte_of_words_for_a_known_program_takes_linear_time(program, unit):
    text = program + repeated(unit)
    assert least_cpu_seconds(lambda: key(bash(text)), enough=LIMIT_S) < LIMIT_S


TEXTS = ["*", "**a** ", "*a ", "`", "```\n", "```a\n", "``", "a\n", "<tool_call>", "</think>", "{", "[", "[TOOL_USE] ",
         "[TOOL_USE] name=a input={\n", "[THINKING] a\n", "<think>", "\u0301", "İ"]  # fmt: skip


@pytest.mark.parametrize("unit", TEXTS)
def test_a_megabyte_of_reply_takes_linear_time(unit):
    text = repeated(unit)
    assert least_cpu_seconds(lambda: key(parse_reply(text)), enough=LIMIT_S) < LIMIT_S


@pytest.mark.parametrize(
    "unit", ["x\n", "     1→x\n", "<system-reminder>", "[truncated", "@@\n-x\n+y\n", "... 1 ", "Output:\n", "a: b\n"]
)
def test_a_megabyte_of_result_takes_linear_time(unit):
    text = repeated(unit)
    for name, arguments in (("Read", {"file_path": "a"}), ("Bash", {"command": "cat a"})):
        made = {"id": "1", "function": {"name": name, "arguments": json.dumps(arguments)}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "1", "content": text},
        ]
        assert least_cpu_seconds(lambda: _SessionContext(cwd=CWD).at(messages), enough=LIMIT_S) < LIMIT_S  # noqa: B023


def test_patches_of_many_equal_lines_take_little_time():
    known = ActionContext(cwd=CWD, files={"/repo/a": "x\n" * 200_000})
    hunk = "-x\n" * 50_000
    action = call("apply_patch", input=f"*** Begin Patch\n*** Update File: a\n@@\n{hunk}+y\n*** End Patch")
    many = call(
        "apply_patch", input="*** Begin Patch\n*** Update File: a\n" + "@@\n-x\n+y\n" * 10_000 + "*** End Patch"
    )
    assert least_cpu_seconds(lambda: (key(action, known), key(many, known)), enough=LIMIT_S) < LIMIT_S


def test_many_edits_and_many_calls_take_linear_time():
    edits = [("Write", {"file_path": f"f{n}", "content": "x"}) for n in range(5000)]
    looks = [("Read", {"file_path": f"f{n}"}) for n in range(5000)]
    assert least_cpu_seconds(lambda: (key(calls(*edits)), key(calls(*looks))), enough=LIMIT_S) < LIMIT_S


def test_numbers_beyond_all_bounds_and_half_characters_have_keys():
    wide = call("any", x=10**6000)
    assert key(wide) != key(call("any", x=10**6000 + 1))
    assert key(call("any", x="\ud800")) != key(call("any", x="\ufffd"))
    assert key(call("Write", file_path="a", content="\ud800")) != key(call("Write", file_path="a", content="\udfff"))
    assert key(said("\ud800")) != key(said("\udc00"))


@given(st.text(st.characters(), max_size=40), st.text(st.characters(), max_size=40))
def test_any_two_commands_in_quotes_are_told_apart(first, second):
    keys = {key(bash("prog '{}'".format(each.replace("'", "'\\''")))) for each in (first, second)}
    assert len(keys) == len({first, second})


@given(st.text(st.sampled_from("ab -'\"\\$`|&;<>(){}*?[]~#!=\n\t\0EOF/.12"), max_size=60))
def test_no_shell_text_raises(text):
    assert key(bash(text)) == key(bash(text))
    assert key(bash(f"{text} ")) == key(bash(f"{text} "))


@given(st.text(st.sampled_from("ab '\"\\$|&;<>()\n"), max_size=30))
def test_whatever_follows_two_programs_are_two(text):
    assert key(bash(f"first {text}")) != key(bash(f"second {text}"))
