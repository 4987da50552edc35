"""A pocket coding workspace: files in memory, a coding agent's tools, tasks from a seed, tests that judge.

task        what is asked, the files, the edits that solve it, and the checks that judge
generate    a task from a seed
files       the files in memory; a path never leaves the root
words       what real harnesses say when a call fails
tools       what each tool does, and its schema
sandbox     runs tests in a process that can reach nothing
in_sandbox  the program of that process
workspace   one episode: calls, their outcomes, the reward
"""

from composer_replication.envs.workspace.generate import generate_task
from composer_replication.envs.workspace.sandbox import TestRunner
from composer_replication.envs.workspace.task import Check, Difficulty, Edit, Task
from composer_replication.envs.workspace.tools import TOOLS
from composer_replication.envs.workspace.words import Outcome
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
