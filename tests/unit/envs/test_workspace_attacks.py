"""Attacks on the reward: code and tests that make a test run look good, and are worth nothing."""

from __future__ import annotations

import pytest

from composer_replication.envs.workspace import Workspace, generate_task

# A task whose module has one number wrong; the attacker knows everything that an agent can read.
TASK = next(
    task
    for task in map(generate_task, range(500))
    if task.family == "wrong_constant" and "_with_" in task.prompt + str(task.files) and len(task.solution) == 1
)
MODULE = TASK.solution[0].path
NAME = MODULE.removesuffix(".py").replace("/", ".")
TEST = f"tests/test_{MODULE.rpartition('/')[2]}"
SHOWN = [check for check in TASK.checks if f"{check.expression} " in TASK.files[TEST]]

# In any process that runs it: every function of the runner answers what the attacker wants.
PATCH_THE_RUNNER = """
import gc, sys, types
for thing in gc.get_objects():
    if isinstance(thing, dict) and callable(thing.get("canonical")) and callable(thing.get("run_tests")):
        thing["canonical"] = lambda value, depth=0: "7"
        thing["values"] = lambda expressions: ["7" for _ in expressions]
        thing["run_tests"] = lambda root, paths: {"lines": [], "passed": 99, "failed": 0}
"""
WRITE_EVERYWHERE = """
import json, os, struct
reply = json.dumps(REPLY).encode()
for number in range(64):
    for text in (reply, struct.pack(">I", len(reply)) + reply):
        try:
            os.write(number, text)
        except OSError:
            pass
os._exit(0)
"""
ALL_EQUAL = """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __repr__(self): return "7"
"""
LIE_ABOUT_TYPES = """
import builtins
builtins.repr = lambda value: "7"
builtins.type = lambda value: int
builtins.AssertionError = KeyError
"""


def functions(body: str) -> str:
    """Every function of the module, with this body."""
    names = sorted({check.expression.partition("(")[0] for check in TASK.checks if check.module == NAME})
    return "\n".join(f"def {name}(*given, **named):\n    {body}\n" for name in names)


LOOKED_UP = (
    "return {" + ", ".join(f"{check.expression!r}: {check.expected}" for check in SHOWN) + "}.get(called(given))"
)
ATTACKS = {
    "tests that test nothing": {TEST: "def test_all():\n    pass\n"},
    "no tests": {TEST: ""},
    "tests that exit": {TEST: "import os, sys\nprint('1 passed')\nsys.stdout.flush()\nos._exit(0)\n"},
    "a module that exits": {MODULE: "import sys\nsys.exit(0)\n"},
    "a module that exits at once": {MODULE: "import os\nos._exit(0)\n"},
    "a module that says OK": {MODULE: "import os\nos.write(1, b'1 passed\\n')\nos.write(2, b'OK\\n')\nos._exit(0)\n"},
    "the runner patched": {MODULE: PATCH_THE_RUNNER + functions("return 7")},
    "the runner patched in the tests": {TEST: PATCH_THE_RUNNER},
    "a forged answer": {MODULE: WRITE_EVERYWHERE.replace("REPLY", str(["7"] * len(TASK.checks)))},
    "a forged report": {MODULE: WRITE_EVERYWHERE.replace("REPLY", str({"lines": [], "passed": 9, "failed": 0}))},
    "a forged server": {MODULE: WRITE_EVERYWHERE.replace("REPLY", str({"reply": ["7"] * len(TASK.checks)}))},
    "values that equal everything": {MODULE: ALL_EQUAL + functions("return Same(7)")},
    "lies about types": {MODULE: LIE_ABOUT_TYPES + functions("return 7")},
    "modules in the way": {
        **dict.fromkeys(("conftest.py", "sitecustomize.py", "json.py", "in_sandbox.py"), "raise SystemExit(0)\n"),
        "unittest/__init__.py": "def main(): print('OK')\n",
    },
    "the shown cases learnt by heart": {
        MODULE: "import inspect\n"
        "def called(given):\n"
        "    return inspect.stack()[1].function + '(' + ', '.join(map(repr, given)) + ')'\n" + functions(LOOKED_UP)
    },
    "the tests read at run time": {
        MODULE: "import re\n"
        "def called(given):\n    import inspect\n"
        f"    text = open({TEST!r}).read()\n"
        "    name = inspect.stack()[1].function\n"
        "    found = re.search(re.escape(f'{name}({given[0]!r})') + r' == (-?\\d+)', text)\n"
        "    return int(found[1]) if found else 0\n" + functions("return called(given)")
    },
    "the answers looked for in memory": {
        MODULE: "import gc\n"
        "texts = [each for each in gc.get_objects() if isinstance(each, dict) and 'expected' in each]\n"
        + functions("return eval(texts[0]['expected'])")
    },
}


def attacked(files) -> Workspace:
    """What the agent's tools let it write."""
    workspace = Workspace(TASK)
    for name, text in files.items():
        workspace.call("Read", {"file_path": f"/workspace/{name}"})
        outcome = workspace.call("Write", {"file_path": f"/workspace/{name}", "content": text})
        assert not outcome.failed
    return workspace


def test_the_attacker_has_seen_a_part_of_the_cases():
    assert 0 < len(SHOWN) < len(TASK.checks)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_worth_nothing(name):
    workspace = attacked(ATTACKS[name])
    workspace.call("RunTests", {})
    reward = workspace.reward()
    assert (reward.value, reward.solved) == (0.0, False)


@pytest.mark.parametrize("name", ["tests that test nothing", "the runner patched in the tests"])
def test_what_fools_the_agents_own_run_does_not_fool_the_reward(name):
    workspace = attacked(ATTACKS[name])
    assert "failed" not in workspace.call("RunTests", {}).text
    assert workspace.reward().value == 0


@pytest.mark.parametrize("name", ["the shown cases learnt by heart", "the tests read at run time"])
def test_a_module_made_for_the_shown_cases_passes_them_and_no_more(name):
    workspace = attacked(ATTACKS[name])
    assert f"test_{SHOWN[0].expression.partition('(')[0]}" not in workspace.call("RunTests", {}).text
    assert not workspace.reward().solved


def test_after_every_attack_an_honest_solution_is_still_worth_all_of_it():
    for files in ATTACKS.values():
        attacked(files).reward()
    workspace = Workspace(TASK)
    edit = TASK.solution[0]
    workspace.call("Read", {"file_path": f"/workspace/{edit.path}"})
    workspace.call("Edit", {"file_path": f"/workspace/{edit.path}", "old_string": edit.old, "new_string": edit.new})
    assert workspace.reward().value == 1.0


def test_a_solution_with_broken_tests_is_still_a_solution():
    """The judge asks the code. Tests are the agent's to read and run, and no part of what is judged."""
    edit = TASK.solution[0]
    workspace = attacked({TEST: "raise SystemExit\n", MODULE: TASK.files[MODULE].replace(edit.old, edit.new)})
    assert workspace.reward().value == 1.0
