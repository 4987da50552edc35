"""A task: what is asked, the files, the edits that solve it, and the checks that judge.

The tests among the files are there for the agent to read and run. The reward does not run them: it asks the workspace's
code for the values of expressions that the agent has not seen, and compares them outside the process that the code ran
in. A test that was edited, a runner that was replaced, a line that says OK: none of them is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Difficulty = Literal["easy", "medium", "hard"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Replace `old`, which stands exactly once in the file at that point, by `new`. An empty `old` writes the file."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """An expression over a module of the workspace, and the value it has once the task is solved, as canonical text.

    `test` is the name of the test it belongs to. A test passes when all of its checks hold.
    """

    test: str
    module: str
    expression: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """Same seed and difficulty, same task. `files` maps paths below the root to texts, tests included."""

    seed: int
    difficulty: Difficulty
    family: str
    prompt: str
    files: Mapping[str, str]
    solution: tuple[Edit, ...]
    checks: tuple[Check, ...]
