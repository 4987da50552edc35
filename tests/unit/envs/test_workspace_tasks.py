"""Every generated task can be solved, is not solved yet, and is the same on any machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import asdict
from functools import cache

import pytest

from composer_replication.envs.workspace import Edit, TestRunner, Workspace, generate_task
from composer_replication.envs.workspace.generate import FAMILIES, _edits_between
from composer_replication.errors import InputError
from refusals import refusal

DIFFICULTIES = ("easy", "medium", "hard")
NUM_SEEDS = 1000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 25


@cache
def runner():
    return TestRunner()


def solved(task):
    """The files after the solution; what each edit replaces stands there once."""
    files = dict(task.files)
    for edit in task.solution:
        assert files[edit.path].count(edit.old) == 1
        files[edit.path] = files[edit.path].replace(edit.old, edit.new)
    return files


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_a_task_fails_before_its_solution_and_passes_after_it(difficulty):
    for seed in range(NUM_SEEDS):
        task = generate_task(seed, difficulty=difficulty)
        questions = [(each.module, each.expression) for each in task.checks]
        expected = [each.expected for each in task.checks]
        assert runner().values(task.files, questions) != expected, task
        assert runner().values(solved(task), questions) == expected, task
        tests = [name for name in task.files if name.startswith("tests/")]
        assert runner().run_tests(task.files, tests).failed > 0, task
        report = runner().run_tests(solved(task), tests)
        assert (report.failed, report.passed) == (0, len({each.test for each in task.checks})), task


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("seed", range(1000, 1004))
def test_the_solution_solves_through_the_tools(seed, difficulty):
    task = generate_task(seed, difficulty=difficulty)
    workspace = Workspace(task)
    assert (workspace.reward().value, workspace.reward().solved) == (0.0, False)
    for edit in task.solution:
        path = f"{workspace.root}/{edit.path}"
        assert not workspace.call("Read", {"file_path": path}).failed
        edited = workspace.call("Edit", {"file_path": path, "old_string": edit.old, "new_string": edit.new})
        assert edited.text == f"The file {path} has been updated successfully."
    assert "failed" not in workspace.call("RunTests", {}).text
    workspace.call("Finish", {})
    reward = workspace.reward()
    assert (reward.value, reward.solved, reward.passed) == (1.0, True, reward.total)
    assert (reward.effort.calls, reward.effort.failed_calls) == (2 * len(task.solution) + 2, 0)
    assert reward == workspace.reward()


def test_a_case_that_the_fault_passes_by_luck_is_not_shown():
    """-5 + 5 is 0, which is also what the missing branch would have returned."""
    task = generate_task(727)
    assert task.family == "missing_branch"
    tests = [name for name in task.files if name.startswith("tests/")]
    assert runner().run_tests(task.files, tests).failed == 1


def test_half_of_a_solution_is_worth_less_than_half_and_breaking_something_nothing():
    two = next(
        task
        for task in (generate_task(seed, difficulty="hard") for seed in range(100))
        if len({edit.path for edit in task.solution}) == 2
    )
    workspace = Workspace(two)
    first = two.solution[0]
    path = f"/workspace/{first.path}"
    workspace.call("Read", {"file_path": path})
    workspace.call("Edit", {"file_path": path, "old_string": first.old, "new_string": first.new})
    assert 0 < workspace.reward().value <= 0.5
    other = next(name for name in two.files if name.endswith(".py") and "tests" not in name and name != first.path)
    workspace.call("Read", {"file_path": f"/workspace/{other}"})
    workspace.call("Write", {"file_path": f"/workspace/{other}", "content": "raise SystemExit\n"})
    assert workspace.reward().value == 0


def test_seeds_are_tasks_of_their_own_and_the_same_on_any_machine():
    tasks = [generate_task(seed, difficulty=difficulty) for difficulty in DIFFICULTIES for seed in range(50)]
    assert len({json.dumps(dict(task.files)) for task in tasks}) == len(tasks)
    assert tasks[7] == generate_task(7)
    text = json.dumps([asdict(task) for task in tasks], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "1da3207fc273effb"


def test_all_families_come_up_alone_on_easy_and_together_on_hard():
    easy = Counter(generate_task(seed).family for seed in range(600))
    assert set(easy) == set(FAMILIES) - {"files_disagree"}
    assert min(easy.values()) > 600 / len(easy) / 2
    hard = [generate_task(seed, difficulty="hard").family.split("+") for seed in range(200)]
    assert {len(each) for each in hard} == {2, 3}
    assert {name for each in hard for name in each} == set(FAMILIES)


def test_easy_is_small_and_says_what_and_where():
    for seed in range(200):
        task = generate_task(seed)
        code = [name for name in task.files if name.endswith(".py")]
        assert len(code) <= 6
        assert max(len(task.files[name].splitlines()) for name in code) <= 25
        assert max(len(line) for name in code for line in task.files[name].splitlines()) <= 110
        assert task.solution[0].path in task.prompt
        assert len(task.prompt) <= 200


def test_some_easy_tasks_have_a_line_that_alone_is_ambiguous():
    lines = [
        (task.files[edit.path], edit.old.splitlines())
        for task in map(generate_task, range(200))
        for edit in task.solution
    ]
    assert sum(text.count(old[-1]) > 1 for text, old in lines) >= 10


def test_edits_between_texts_are_clear_and_lead_there():
    before = {"a.py": "x = 1\nx = 1\ny = 2\n", "same.py": "z\n"}
    after = {"a.py": "top\nx = 1\nx = 3\ny = 2\nend\n", "same.py": "z\n", "new.py": "n\n"}
    files = dict(before)
    edits = _edits_between(before, after)
    for edit in edits:
        text = files.get(edit.path, "")
        assert not edit.old or text.count(edit.old) == 1
        files[edit.path] = text.replace(edit.old, edit.new) if edit.old else edit.new
    assert files == after
    assert edits[-1] == Edit(path="new.py", old="", new="n\n")


def test_a_difficulty_that_is_none_is_said():
    with refusal(InputError, what="difficulty", got="'brutal'") as caught:
        generate_task(0, difficulty="brutal")  # type: ignore[arg-type]
    assert all(name in caught.value.expected for name in ("easy", "medium", "hard"))
