"""The public names of the environments. Same notation as expected_surface.py."""

from __future__ import annotations

NEW_ENVS = {
    "envs.workspace": {
        "TOOLS": "value",
        "Difficulty": "(*args, **kwargs)",
        "Check": "(*, test, module, expression, expected)",
        "Edit": "(*, path, old, new)",
        "Effort": "(*, calls, failed_calls, tokens)",
        "Outcome": "(*, text, failed=False, kind=None)",
        "Reward": "(*, value, solved, passed, total, effort)",
        "Task": "(*, seed, difficulty, family, prompt, files, solution, checks)",
        "TestRunner": "(*, kind=None)",
        "Workspace": "(task, *, runner=None, max_calls=40)",
        "generate_task": '(seed, *, difficulty="easy")',
    },
}

MEMBERS_ENVS = {
    "TestRunner": {"close": "()", "kind": "property", "run_tests": "(files, paths)", "values": "(files, expressions)"},
    "Workspace": {"call": "(name, arguments)", "files": "property", "reward": "()"},
}
