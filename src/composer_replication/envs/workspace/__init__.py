"""A small coding workspace: files in memory, a coding agent's tools, tasks from a seed, tests that decide the reward.

task            a task's files, solution and checks; the tools' schemas; the nouns that tasks are made of
generate        a task from a seed
files           the files in memory
workspace       one episode: calls, their outcomes in the words of a harness, and the reward
regex           regular expressions in bounded time
sandbox         runs tests in an isolated process
sandbox_server  that process: it isolates itself and forks for every run
in_sandbox      what one run does
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
