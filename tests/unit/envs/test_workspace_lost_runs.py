"""Runs that gave no answer, or one that is no text, and what is never made of them."""

from __future__ import annotations

import os
import tracemalloc

from composer_replication.envs.policies import RememberingRunner
from composer_replication.envs.workspace import TestRunner, Workspace, generate_task
from composer_replication.envs.workspace.sandbox import TestReport
from composer_replication.errors import SandboxError
from refusals import refusal
from workspace_calls import path


class LosingRunner(TestRunner):
    """Loses its first answers, then works."""

    __test__ = False

    def __init__(self, num_lost):
        super().__init__(seconds=1)
        self.num_lost, self.num_asked = num_lost, 0

    def values(self, files, expressions):
        self.num_asked += 1
        return [] if self.num_asked <= self.num_lost else super().values(files, expressions)

    def run_tests(self, files, paths):
        self.num_asked += 1
        return TestReport(text="", ended=False) if self.num_asked <= self.num_lost else TestReport(text="ran")


def test_a_lost_answer_for_the_tasks_own_files_is_asked_again_and_never_a_reward():
    task = generate_task(1)
    expected = Workspace(task).reward()
    assert Workspace(task, runner=LosingRunner(1)).reward() == expected
    workspace = Workspace(task, runner=LosingRunner(2))
    with refusal(SandboxError, what="task 1"):
        workspace.reward()
    assert workspace.reward() == expected


def test_a_lost_run_is_not_remembered():
    runner = RememberingRunner(LosingRunner(1))
    assert runner.values({"a.py": "x = 1"}, [("a", "x")]) == []
    assert runner.values({"a.py": "x = 1"}, [("a", "x")]) == ["1"]
    runner = RememberingRunner(LosingRunner(1))
    assert [runner.run_tests({}, []).ended for _ in range(2)] == [False, True]


def test_half_a_surrogate_pair_is_no_part_of_an_answer():
    runner = TestRunner(seconds=1)
    text = "def test_a():\n    raise ValueError('\\ud800')\n"
    report = runner.run_tests({"tests/test_a.py": text}, ["tests/test_a.py"])
    assert report.text == "FAILED tests/test_a.py::test_a - ValueError: ?\n1 failed"
    odd = "import builtins\nbuiltins.repr = lambda value: '\\udfff'\n"
    assert runner.values({"a.py": odd}, [("a", "1")]) == ["?"]
    runner.close()


def test_an_edit_that_makes_a_huge_file_is_refused_before_it_is_made():
    workspace = Workspace(generate_task(1))
    workspace.call("Write", {"file_path": path("large.txt"), "content": "a" * 10_000})
    change = {"old_string": "a", "new_string": "b" * 10_000, "replace_all": True}
    tracemalloc.start()
    outcome = workspace.call("Edit", {"file_path": path("large.txt"), **change})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome.failed
    assert "ENOSPC" in outcome.text
    assert peak < 2**20
    assert workspace.files["large.txt"] == "a" * 10_000


def test_a_fork_does_not_inherit_a_lock_that_is_held():
    runner = TestRunner(seconds=1)
    with runner._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if runner._lock.acquire(timeout=1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
