"""What tests of the workspace share: one failing call of each kind, and a session that makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from composer_replication.envs.workspace import Outcome, Task, Workspace, generate_task

ROOT = "/workspace"
CALM = {"twice.py": "rate = 1\nrate = 1\n", "wide.txt": "\n".join(["x" * 1900] * 60) + "\n"}
"""Files beside the task's: a line that stands twice, and more than one Read may show."""

Call = tuple[str, dict[str, Any]]


def path(name: str) -> str:
    return f"{ROOT}/{name}"


def small_task(**files: str) -> Task:
    task = generate_task(0)
    return replace(task, files={**task.files, **CALM, **files})


def _edit(old: str, new: str, name: str = "twice.py") -> Call:
    return "Edit", {"file_path": path(name), "old_string": old, "new_string": new}


_READ: Call = ("Read", {"file_path": path("twice.py")})
# What is done first, the call that fails, its kind.
FAILING: dict[str, tuple[tuple[Call, ...], Call, str]] = {
    "a path that is not there": ((), ("Read", {"file_path": path("nowhere.py")}), "file_not_found"),
    "a file to edit that is not there": ((), _edit("a", "b", "nowhere.py"), "file_not_found"),
    "a folder to list that is not there": ((), ("LS", {"path": path("nowhere")}), "file_not_found"),
    "a folder to search that is not there": (
        (),
        ("Glob", {"pattern": "*.py", "path": path("nowhere")}),
        "file_not_found",
    ),
    "a path to search that is not there": ((), ("Grep", {"pattern": "a", "path": path("nowhere")}), "file_not_found"),
    "a folder read": ((), ("Read", {"file_path": path("tests")}), "is_directory"),
    "a folder written": ((), ("Write", {"file_path": path("tests"), "content": "a"}), "is_directory"),
    "too much read": ((), ("Read", {"file_path": path("wide.txt")}), "output_too_large"),
    "edited unread": ((), _edit("rate", "pace"), "edit_not_read"),
    "written unread": ((), ("Write", {"file_path": path("twice.py"), "content": "a"}), "edit_not_read"),
    "not unique": ((_READ,), _edit("rate = 1", "rate = 2"), "edit_ambiguous"),
    "not there": ((_READ,), _edit("rate = 3", "rate = 2"), "edit_no_match"),
    "nothing to change": ((_READ,), _edit("rate = 1", "rate = 1"), "edit_noop"),
    "reformatted since": (
        (_READ, _edit("rate = 1\nrate = 1", "rate = 2  "), ("RunTests", {})),
        _edit("rate = 2", "rate = 3"),
        "edit_stale",
    ),
    "created, but it is there": ((_READ,), _edit("", "a"), "input_validation"),
    "no such tool": ((), ("ReadFile", {"file_path": path("twice.py")}), "tool_not_found"),
    "an argument missing": ((), ("Read", {}), "input_validation"),
    "an argument too many": ((), ("Read", {"file_path": path("twice.py"), "lines": 3}), "input_validation"),
    "a wrong type": ((), ("Read", {"file_path": path("twice.py"), "offset": "3"}), "input_validation"),
    "no regular expression": ((), ("Grep", {"pattern": "(a"}), "input_validation"),
    "no glob": ((), ("Glob", {"pattern": "{a,b}" * 9}), "input_validation"),
    "a null byte": ((), ("Write", {"file_path": path("a\0b.py"), "content": "a"}), "input_validation"),
}


def outcome_of(case: str) -> Outcome:
    """The failing call of a case, in a workspace of its own."""
    before, (name, arguments), _ = FAILING[case]
    workspace = Workspace(small_task())
    for tool, given in before:
        assert not workspace.call(tool, given).failed
    return workspace.call(name, arguments)
