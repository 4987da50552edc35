"""What a session has shown before an action: files read, written and edited, where the shell stands."""

from __future__ import annotations

import json

import pytest
from action_forms import CWD

from composer_replication.teacher_replay.votes import _SessionContext

NUMBERED = "     1→def f():\n     2→    return 1\n     3→"
CONTENT = "def f():\n    return 1\n"


def turn(name: str, result: str, **arguments: object) -> list[dict[str, object]]:
    """A call and what came back, in the OpenAI shape."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    identity = f"{name}-{json.dumps(arguments)}"
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": identity, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": identity, "content": result},
    ]


def files(*turns: list[dict[str, object]]) -> dict[str, str]:
    messages = [{"role": "system", "content": "s"}, *(message for each in turns for message in each)]
    return dict(_SessionContext(cwd=CWD).at(messages).files)


READ = turn("Read", NUMBERED, file_path="/repo/a.py")


@pytest.mark.parametrize(
    "shown",
    [
        READ,
        turn("Read", NUMBERED.replace("→", "\t"), file_path="a.py"),
        turn("Read", NUMBERED + "\n\n<system-reminder>\nMind this.\n</system-reminder>\n", file_path="a.py"),
        turn("Read", NUMBERED.removesuffix("\n     3→"), file_path="./a.py", limit=None),
        turn("read_file", CONTENT, target_file="a.py", explanation="to see"),
        turn("read", "<file>\n00001| def f():\n00002|     return 1\n\n(End of file - total 2 lines)\n</file>",
             filePath="a.py"),
        turn("str_replace_editor", f"Here's the result of running `cat -n` on /repo/a.py:\n{NUMBERED}",
             command="view", path="/repo/a.py"),
        turn("Bash", CONTENT.rstrip(), command="cat a.py"),
        turn("Bash", "     1\tdef f():\n     2\t    return 1", command="cat -n /repo/a.py"),
        turn("shell", json.dumps({"output": CONTENT, "metadata": {"exit_code": 0}}),
             command=["bash", "-lc", "cat a.py"]),
        turn("exec_command", f"Exit code: 0\nWall time: 0.1 seconds\nOutput:\n{CONTENT}", cmd="cat a.py"),
        turn("Write", "File created successfully at: /repo/a.py", file_path="a.py", content=CONTENT),
    ],
)  # fmt: skip
def test_a_file_that_was_shown_in_full_is_known(shown):
    assert files(shown) == {"/repo/a.py": CONTENT}


@pytest.mark.parametrize(
    "shown",
    [
        turn("Read", NUMBERED, file_path="a.py", offset=1, limit=3),
        turn("Read", NUMBERED.replace("2→", "7→"), file_path="a.py"),
        turn("Read", "     5→x\n     6→y", file_path="a.py"),
        turn("Read", NUMBERED + "\n\n... [12 lines truncated] ...", file_path="a.py"),
        turn("Read", "\n".join(f"{n:6}→x" for n in range(1, 2100)), file_path="a.py"),
        turn("Read", "     1→" + "x" * 3000, file_path="a.py"),
        turn("Read", "<tool_use_error>File does not exist.</tool_use_error>", file_path="a.py"),
        turn("str_replace_editor", NUMBERED, command="view", path="a.py", view_range=[1, 3]),
        turn("Bash", CONTENT, command="head -2 a.py"),
        turn("Bash", CONTENT, command="cat a.py b.py"),
        turn("Bash", CONTENT, command="cat a.py | head"),
        turn("Bash", "cat: a.py: No such file or directory", command="cat a.py"),
        turn("Grep", "a.py:1:def f():", pattern="f", path="a.py"),
    ],
)
def test_a_file_that_was_shown_in_part_or_not_at_all_is_not_known(shown):
    assert files(shown) == {}


def test_edits_are_followed_and_the_newest_state_counts():
    edit = turn("Edit", "The file /repo/a.py has been updated.", file_path="a.py", old_string="1", new_string="2")
    assert files(READ, edit) == {"/repo/a.py": CONTENT.replace("1", "2")}
    wrong = turn("Edit", "The file has been updated.", file_path="a.py", old_string="9", new_string="2")
    assert files(READ, wrong) == {}
    refused = turn(
        "Edit", "<tool_use_error>String to replace not found in file.</tool_use_error>", file_path="a.py",
        old_string="9", new_string="2",
    )  # fmt: skip
    assert files(READ, refused) == {"/repo/a.py": CONTENT}


@pytest.mark.parametrize(
    "command", ["pytest -q", "ls -la", "git status && git add .", "mkdir -p x", "python -m pytest"]
)
def test_commands_that_leave_sources_alone_leave_what_is_known(command):
    assert files(READ, turn("Bash", "ok", command=command)) == {"/repo/a.py": CONTENT}


@pytest.mark.parametrize(
    "command", ["black .", "sed -i s/1/2/ a.py", "git checkout .", "echo x > a.py", "python fix.py", "ruff check --fix"]
)
def test_commands_that_may_change_files_make_them_unknown(command):
    assert files(READ, turn("Bash", "ok", command=command)) == {}


def test_a_note_that_a_file_was_changed_makes_it_unknown():
    note = {"role": "user", "content": "Note: /repo/a.py was modified, either by the user or by a linter."}
    assert files(READ, [note]) == {}


@pytest.mark.parametrize(
    ("command", "moved"),
    [
        ("ls", False),
        ("cd /repo && ls", False),
        ("cd src && ls", True),
        ("(cd src && ls)", False),
        ("cd src && ls && cd /repo", True),  # it may have stopped on the way
        ("cd src && ls; cd /repo", False),
        ("cd $X", True),
    ],
)
def test_whether_the_shell_may_stand_elsewhere(command, moved):
    assert _SessionContext(cwd=CWD).at(turn("Bash", "ok", command=command)).may_have_left_cwd is moved


def test_blocks_of_the_anthropic_shape_are_read_as_well():
    use = {"type": "tool_use", "id": "t", "name": "Read", "input": {"file_path": "/repo/a.py"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": NUMBERED}]}
    messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert dict(_SessionContext(cwd=CWD).at(messages).files) == {"/repo/a.py": CONTENT}
    failed = [messages[0], {"role": "user", "content": [{**result, "is_error": True, "content": "Interrupted"}]}]
    assert dict(_SessionContext(cwd=CWD).at(failed).files) == {}


def test_reading_along_gives_what_reading_anew_gives():
    edit = turn("Edit", "The file /repo/a.py has been updated.", file_path="a.py", old_string="1", new_string="2")
    other = turn("Write", "File created successfully at: /repo/b.py", file_path="b.py", content="b\n")
    messages = [*READ, *edit, *other]
    along = _SessionContext(cwd=CWD)
    orders = [*range(len(messages) + 1), 2, 6, 1, 4]
    kept = [along.at(messages[:end]) for end in orders]
    assert kept == [_SessionContext(cwd=CWD).at(messages[:end]) for end in orders]
