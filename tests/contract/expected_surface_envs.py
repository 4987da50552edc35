"""The public names of the environments. Same notation as expected_surface.py."""

from __future__ import annotations

NEW_ENVS = {
    "envs.policies": {
        "AGENTS": "value",
        "CARELESS": "value",
        "EXPERT": "value",
        "MISTAKES": "value",
        "Episode": "(*, task, policy, seed, turns, reward)",
        "Finding": "(*, turn, kind, repeats, how, chosen)",
        "FlawedAgent": '(*, name="flawed", rates=<factory>, corrects=1.0)',
        "Mistake": "(name, kind, at, meaning, instead)",
        "Move": "(*, text, tool, arguments)",
        "PlayedTurn": "(*, move, outcome, mistake=None, corrects=(), could=())",
        "Policy": "protocol",
        "RememberingRunner": "(runner=None, *, max_kept=20000)",
        "Scripted": "(*, turn, mistake, kind, corrected_at)",
        "Situation": "(workspace)",
        "expected_findings": "(episode)",
        "play": "(task, policy, seed=0, *, force=None, runner=None, max_calls=40)",
        "retrace": "(task, calls, *, runner=None)",
    },
    "envs.student": {"TRAINED_CONTEXT": "value", "load_student": "(**options)", "student_folder": "()"},
    "envs.workspace": {
        "TOOLS": "value",
        "Difficulty": "(*args, **kwargs)",
        "Check": "(*, test, module, expression, expected)",
        "Edit": "(*, path, old, new)",
        "Effort": "(*, calls, failed_calls, tokens)",
        "Outcome": "(*, text, failed=False, kind=None)",
        "Reward": "(*, value, solved, passed, total, effort)",
        "Task": "(*, seed, difficulty, family, prompt, files, solution, checks)",
        "TestRunner": "(*, kind=None, seconds=4)",
        "Workspace": "(task, *, runner=None, max_calls=40)",
        "generate_task": '(seed, *, difficulty="easy")',
    },
}

MEMBERS_ENVS = {
    "Episode": {"opportunities": "property", "script": "property"},
    "FlawedAgent": {"start": "(seed, force)"},
    "Move": {"path": "property"},
    "Policy": {"name": "property", "start": "(seed, force)"},
    "RememberingRunner": {
        "close": "()",
        "kind": "property",
        "run_tests": "(files, paths)",
        "values": "(files, expressions)",
    },
    "Situation": {
        "done_edits": "()",
        "files": "property",
        "has_shown": "(path)",
        "is_over": "property",
        "is_unheard_of": "(path)",
        "next_edit": "()",
        "take": "(turn)",
    },
    "TestRunner": {"close": "()", "kind": "property", "run_tests": "(files, paths)", "values": "(files, expressions)"},
    "Workspace": {"call": "(name, arguments)", "files": "property", "reward": "()"},
}
