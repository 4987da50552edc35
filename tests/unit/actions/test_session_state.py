"""What a session had shown so far: the same whenever it is asked, and every call looked at once."""

from __future__ import annotations

import pytest

from composer_replication.sites.actions import session_state
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.types import ToolCall

FILE = "     1→import os\n     2→\n     3→def total(items):\n"


def call(name, **arguments):
    return ToolCall(id="c", name=name, arguments=arguments)


STEPS = [
    (call("Read", file_path="/repo/a.py"), FILE, False),
    (call("Grep", pattern="total", path="/repo/b.py"), "12:def total(items):", False),
    (call("Bash", command="ls src"), "src/cart.py\nsrc/shop.py", False),
    (call("Bash", command="make build"), "error", True),
    (call("Edit", file_path="/repo/a.py", old_string="import os\n", new_string=""), "done", False),
    (call("Bash", command="rm src/shop.py && cd src"), "", False),
    (call("Bash", command="pytest -q"), "1 passed", False),
]


def answers(state):
    return {
        "tools": {name: set(each) for name, each in state.tools.items()},
        "read": dict(state.read),
        "who": state.reader,
        "text": state.texts.get("/repo/a.py").text,
        "programs": set(state.programs),
        "build_failed": state.build_failed,
        "shown": [state.has_shown(path) for path in ("src/cart.py", "src/shop.py", "/repo/b.py", "nowhere.py")],
        "files": dict(state.files),
        "shell_moved": state.may_have_left_cwd,
        "is_there": [state.paths.status(path).exists for path in ("/repo/a.py", "/repo/never.py")],
    }


def test_it_says_the_same_whenever_it_is_asked():
    seldom, often = SessionState("/repo"), SessionState("/repo")
    for made, text, failed in STEPS:
        for state in (seldom, often):
            state.add(made, text, failed=failed)
        answers(often)
    found = answers(seldom)
    assert found == answers(often)
    assert found == {
        "tools": {
            "Read": {"file_path"},
            "Grep": {"pattern", "path"},
            "Bash": {"command"},
            "Edit": {"file_path", "old_string", "new_string"},
        },
        "read": {},  # what the edited file holds was not shown, and a search is no look
        "who": "Read",
        "text": "\ndef total(items):",
        "programs": {"ls", "rm", "cd", "pytest"},
        "build_failed": True,
        "shown": [True, False, True, False],
        "files": {},  # `rm` may have changed any of them
        "shell_moved": True,
        "is_there": [True, None],
    }


def test_an_edit_is_followed_in_a_file_that_was_shown_whole_until_somebody_else_changes_it():
    state = SessionState("/repo")
    for made, text, failed in (STEPS[0], STEPS[4]):
        state.add(made, text, failed=failed)
    assert state.files == {"/repo/a.py": "\ndef total(items):\n"}
    state.add_message("Note: /repo/a.py was modified, either by the user or by a linter.")
    assert state.files == {}


def test_every_call_is_read_once_however_often_it_is_asked(monkeypatch):
    class Counted(session_state.Command):
        count = 0

        @staticmethod
        def of(text):
            Counted.count += 1
            return session_state_command(text)

    session_state_command = session_state.Command.of
    monkeypatch.setattr(session_state, "Command", Counted)
    state = SessionState()
    for number in range(200):
        state.add(call("Bash", command=f"ls {number}"), "", failed=False)
        assert not state.build_failed
        assert "ls" in state.programs
    assert Counted.count == 200


@pytest.mark.parametrize(("path", "is_shown"), [("cart.py", True), ("./src/cart.py", True), ("art.py", False)])
def test_a_path_is_shown_by_itself_or_as_the_end_of_a_longer_one(path, is_shown):
    state = SessionState()
    state.add_message("Look at /repo/src/cart.py, please.")
    assert state.has_shown(path) is is_shown
