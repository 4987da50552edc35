"""A small coding workspace: files in memory, a coding agent's tools, generated tasks, and tests that determine the
reward.

task            a task's files, solution and checks; the tools' schemas; the nouns that tasks are made of
generate        generates a task from a seed
files           the files in memory
workspace       one episode: calls, their outcomes in the words of a harness, and the reward
regex           regular expressions in bounded time
sandbox         runs tests in an isolated process
sandbox_server  the isolated process, which forks for every run
in_sandbox      runs tests inside the sandbox
"""

from composer_replication.envs.workspace.generate import generate_task
from composer_replication.envs.workspace.sandbox import TestRunner
from composer_replication.envs.workspace.task import TOOLS, Check, Difficulty, Edit, Task
from composer_replication.envs.workspace.workspace import Effort, Outcome, Reward, Workspace

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
