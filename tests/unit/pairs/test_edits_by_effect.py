"""Edits of a file that is known count by what they leave; of one that is not, by their arguments."""

from __future__ import annotations

import pytest
from action_forms import CWD, call, calls, key

from composer_replication.sites.actions.edits import _read_patch, compute_changes, edit_operations
from composer_replication.sites.actions.equality import ActionContext

TEXT = "import os\n\n\ndef f(a):\n    return a + 1\n\n\ndef g(a):\n    return a + 1\n"
AFTER = TEXT.replace("def f(a):\n    return a + 1", "def f(a):\n    return a + 2")
KNOWN = ActionContext(cwd=CWD, files={"/repo/m.py": TEXT, "/repo/n.py": "n = 1\n"})
UNKNOWN = ActionContext(cwd=CWD)

CODEX = """*** Begin Patch
*** Update File: m.py
@@ def f(a):
-    return a + 1
+    return a + 2
*** End Patch"""
UNIFIED = "\n".join(
    [
        "--- a/m.py",
        "+++ b/m.py",
        "@@ -3,4 +3,4 @@",
        " ",
        " def f(a):",
        "-    return a + 1",
        "+    return a + 2",
        " ",
        "",
    ]
)
SHORT = ("def f(a):\n    return a + 1", "def f(a):\n    return a + 2")
LONG = ("os\n\n\ndef f(a):\n    return a + 1\n\n", "os\n\n\ndef f(a):\n    return a + 2\n\n")


def edit(old: str, new: str, path: str = "/repo/m.py", **others: object) -> tuple[str, dict[str, object]]:
    return "Edit", {"file_path": path, "old_string": old, "new_string": new, **others}


EQUAL_EFFECTS = [
    calls(edit(*SHORT)),
    calls(edit(*LONG)),
    calls(edit(*SHORT, path="m.py", replace_all=True)),
    calls(edit("def f(a):\n    return a + 1", "TODO"), edit("TODO", "def f(a):\n    return a + 2")),
    calls(("MultiEdit", {"file_path": "m.py", "edits": [
        {"old_string": "f(a):\n    return a", "new_string": "f(a):\n    return 9"},
        {"old_string": "9 + 1", "new_string": "a + 2"}]})),
    call("Write", file_path="m.py", content=AFTER),
    call("str_replace_editor", command="str_replace", path="/repo/m.py", old_str=SHORT[0], new_str=SHORT[1]),
    call("str_replace_based_edit_tool", command="str_replace", path="m.py", old_str=LONG[0], new_str=LONG[1]),
    call("edit", filePath="/repo/m.py", oldString=SHORT[0], newString=SHORT[1]),
    call("replace", file_path="m.py", old_string=SHORT[0], new_string=SHORT[1], instruction="raise it"),
    call("apply_patch", input=CODEX),
    call("apply_patch", patch=UNIFIED),
    call("shell", command=["apply_patch", CODEX]),
    call("Bash", command=f"apply_patch <<'EOF'\n{CODEX}\nEOF"),
]  # fmt: skip
OTHER_EFFECTS = [
    calls(edit("return a + 1", "return a + 2", replace_all=True)),
    calls(edit("def g(a):\n    return a + 1", "def g(a):\n    return a + 2")),
    calls(edit(SHORT[0], "def f(a):\n    return a + 2 ")),
    call("Write", file_path="m.py", content=AFTER + "\n"),
    call("Write", file_path="n.py", content=AFTER),
    calls(edit(*SHORT), edit("n = 1", "n = 2", path="n.py")),
    calls(edit("return a + 1", "return a + 2")),  # not unique: it would fail
    calls(edit("return a - 1", "return a + 2")),  # not there
]


def test_edits_written_differently_that_leave_the_same_file_are_the_same():
    assert len({key(action, KNOWN) for action in EQUAL_EFFECTS}) == 1


def test_edits_that_leave_other_files_or_fail_are_all_different():
    assert len({key(action, KNOWN) for action in [EQUAL_EFFECTS[0], *OTHER_EFFECTS]}) == 1 + len(OTHER_EFFECTS)


def test_edits_of_a_file_that_is_not_known_are_compared_by_their_arguments():
    assert key(calls(edit(*SHORT)), UNKNOWN) != key(calls(edit(*LONG)), UNKNOWN)
    assert key(calls(edit(*SHORT)), UNKNOWN) == key(calls(edit(*SHORT, path="m.py", replace_all=False)), UNKNOWN)


def test_one_replacement_is_the_same_by_either_tool_whatever_the_file_holds():
    one = {"old_string": SHORT[0], "new_string": SHORT[1]}
    assert key(calls(edit(*SHORT)), UNKNOWN) == key(call("MultiEdit", file_path="m.py", edits=[one]), UNKNOWN)
    two = call("MultiEdit", file_path="m.py", edits=[one, {"old_string": "a", "new_string": "b"}])
    assert key(calls(edit(*SHORT), edit("a", "b")), UNKNOWN) != key(two, UNKNOWN)


def test_edits_of_several_files_may_come_in_any_order():
    first, second = edit(*SHORT), edit("n = 1", "n = 2", path="n.py")
    assert key(calls(first, second), KNOWN) == key(calls(second, first), KNOWN)
    assert key(calls(first, second), UNKNOWN) != key(calls(second, first), UNKNOWN)


def test_a_command_between_two_edits_parts_them_and_makes_the_files_unknown():
    run = ("Bash", {"command": "make"})
    second = [edit(*SHORT), edit(*LONG)]
    assert len({key(calls(run, each), KNOWN) for each in second}) == 2
    assert len({key(calls(each, run), KNOWN) for each in second}) == 1
    assert key(calls(second[0], run), KNOWN) != key(calls(run, second[0]), KNOWN)


def test_a_parameter_that_is_not_understood_leaves_the_arguments_to_decide():
    assert edit_operations(call("edit_file", path="a", edits=[], dryRun=True).calls[0], CWD) is None
    assert edit_operations(call("Edit", file_path="a", old_string="x", new_string="y", fuzzy=1).calls[0], CWD) is None


@pytest.mark.parametrize(
    ("tool", "arguments", "changes"),
    [
        ("str_replace_editor", {"command": "create", "path": "new.py", "file_text": "x\n"}, {"/repo/new.py": "x\n"}),
        ("str_replace_editor", {"command": "create", "path": "m.py", "file_text": "x\n"}, None),
        ("str_replace_editor", {"command": "insert", "path": "n.py", "insert_line": 0, "new_str": "# n"},
         {"/repo/n.py": "# n\nn = 1\n"}),
        ("str_replace_editor", {"command": "insert", "path": "n.py", "insert_line": 9, "new_str": "# n"}, None),
        ("apply_patch", {"input": "*** Begin Patch\n*** Delete File: n.py\n*** End Patch"}, {"/repo/n.py": None}),
        ("apply_patch", {"input": "*** Begin Patch\n*** Add File: x\n+1\n+2\n*** End Patch"}, {"/repo/x": "1\n2\n"}),
        ("apply_patch", {"input": "*** Begin Patch\n*** Add File: n.py\n+1\n*** End Patch"}, None),
        ("apply_patch",
         {"input": "*** Begin Patch\n*** Update File: n.py\n*** Move to: o.py\n@@\n-n = 1\n+n = 2\n*** End Patch"},
         {"/repo/n.py": None, "/repo/o.py": "n = 2\n"}),
        ("apply_patch", {"input": "*** Begin Patch\n*** Update File: n.py\n@@\n-n = 3\n+n = 2\n*** End Patch"}, None),
        ("apply_patch", {"input": "--- /dev/null\n+++ b/x.py\n@@ -0,0 +1,2 @@\n+a\n+b\n"}, {"/repo/x.py": "a\nb\n"}),
        ("apply_patch", {"input": "--- a/n.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-n = 1\n"}, {"/repo/n.py": None}),
        ("apply_patch",
         {"input": "*** Begin Patch\n*** Update File: m.py\n@@\n-    return a + 1\n+    return 0\n*** End of File\n"
                   "*** End Patch"},
         {"/repo/m.py": TEXT.removesuffix("a + 1\n") + "0\n"}),
        # Off by two lines, and there is only one place it can mean.
        ("apply_patch", {"input": "--- a/n.py\n+++ b/n.py\n@@ -3 +3 @@\n-n = 1\n+n = 2\n"}, {"/repo/n.py": "n = 2\n"}),
    ],
)  # fmt: skip
def test_what_single_operations_leave(tool, arguments, changes):
    operations = edit_operations(call(tool, **arguments).calls[0], CWD)
    assert operations is not None
    assert compute_changes(operations, KNOWN.files) == changes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no patch",
        "*** Begin Patch\n*** End Patch",
        "*** Begin Patch\n*** Update File: a\n-x\n+y",
        "*** Begin Patch\n*** Delete File: a\nx\n*** End Patch",
        "--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1,9 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n",
    ],
)
def test_a_patch_that_is_not_surely_read_is_no_patch(text):
    assert _read_patch(text) is None


def test_a_changed_byte_of_the_content_changes_the_key():
    keys = {key(call("Write", file_path="x", content=AFTER[:place] + "#" + AFTER[place:])) for place in range(20)}
    assert len(keys) == 20
