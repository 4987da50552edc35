"""The workspace: tools do what a coding agent's do, and fail in a harness's words."""

from __future__ import annotations

import pytest

from composer_replication.envs.workspace import Workspace, generate_task


@pytest.mark.parametrize("seed", range(3))
def test_the_solution_solves_and_nothing_else_does(seed):
    task = generate_task(seed)
    workspace = Workspace(task)
    assert workspace.reward().value == 0
    assert "failed" in workspace.call("RunTests", {}).text
    for edit in task.solution:
        path = f"{workspace.root}/{edit.path}"
        assert not workspace.call("Read", {"file_path": path}).failed
        outcome = workspace.call("Edit", {"file_path": path, "old_string": edit.old, "new_string": edit.new})
        assert not outcome.failed
    assert "failed" not in workspace.call("RunTests", {}).text
    reward = workspace.reward()
    assert (reward.value, reward.solved) == (1.0, True)
    assert reward.effort.calls == 4
