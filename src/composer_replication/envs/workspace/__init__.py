"""A pocket coding workspace: files in memory, a coding agent's tools, tasks from a seed, tests that judge.

task        what is asked, the files, the edits that solve it, and the checks that judge
vocabulary  the words that tasks are made of
kernels     small functions as templates, and what can be wrong with them
modules     functions of these kernels, and the files they stand in
edits       the edits that lead from wrong to right
generate    a task from a seed
files       the files in memory; a path never leaves the root
words       what real harnesses say when a call fails
regex/      regular expressions in bounded time
schemas     the tools' schemas, and arguments that do not fit them
tools       what each tool does
sandbox     runs tests in a process that can reach nothing
sandbox_server  that process: its walls, and a fork for every run
in_sandbox  what a run does
workspace   one episode: calls, their outcomes, the reward
"""

from composer_replication.envs.workspace.files import Outcome
from composer_replication.envs.workspace.generate import generate_task
from composer_replication.envs.workspace.sandbox import TestRunner
from composer_replication.envs.workspace.task import (
    TOOLS,
    Check,
    Difficulty,
    Edit,
    Task,
)
from composer_replication.envs.workspace.workspace import Effort, Reward, Workspace

__all__ = [
    "TOOLS",
    "Check",
    "Difficulty",
    "Edit",
    "Effort",
    "Outcome",
    "Reward",
    "Task",
    "TestRunner",
    "Workspace",
    "generate_task",
]
