"""Which texts show that a path is there: the path itself, not one that merely looks like it."""

from __future__ import annotations

import pytest

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.types import ToolCall

PATH = "/repo/store/save"


def _state(command, output, tool="Bash"):
    state = SessionState("/repo")
    arguments = {"command": command} if tool == "Bash" else {"path": command, "pattern": "*.go"}
    state.add(ToolCall(id="1", name=tool, arguments=arguments), output, failed=False)
    return state


@pytest.mark.parametrize(
    ("output", "is_shown"),
    [
        ("/repo/store/save", True),
        ("see /repo/store/save.", True),
        ("/repo/store/save/disk.go", True),
        ("/repo/store/save.go", False),  # a file beside it
        ("/repo/store/saved", False),
        ("store/save", True),
        ("./store/save", True),
        ("+++ b/store/save", True),
        ("repo/store/save", True),  # from the folder above
        ("cmd/store/save", False),  # another folder of the project
        ("/repo/cmd/store/save", False),
        ("/other/clone/store/save", True),  # the same in a copy
        ("https://host.dev/o/r/blob/main/store/save", True),
        ("/repo/cmd/store/save and store/save", True),
    ],
)
def test_a_path_is_shown_by_its_own_name(output, is_shown):
    assert _state("git ls-files", output).has_shown(PATH) is is_shown


@pytest.mark.parametrize(
    ("command", "output", "is_shown"),
    [
        ("cat store/save", "x = 1", True),
        ("cd /repo && cat store/save", "x = 1", True),
        ("cat store/save 2>/dev/null", "", False),
        ("cat store/save || echo none", "none", False),
        ("ls store/save | head -3", "", False),
    ],
)
def test_a_command_shows_what_it_names_only_if_it_would_have_failed_otherwise(command, output, is_shown):
    assert _state(command, output).has_shown(PATH) is is_shown


@pytest.mark.parametrize(("output", "is_shown"), [("/repo/store/save/a.go", True), ("No files found", False)])
def test_a_search_that_finds_nothing_shows_no_folder(output, is_shown):
    assert _state(PATH, output, tool="Glob").has_shown(PATH) is is_shown
