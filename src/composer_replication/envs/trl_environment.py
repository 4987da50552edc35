"""The workspace as an environment of TRL: its public methods are the tools, `reset` takes a row of the dataset.

A failure is returned as text, in the harness's own words, and not raised: TRL would show the model a dict of its own in
their place, and count no call. `trainer/rollouts/sites.py` finds the failures by these words. Arguments that do not fit
reach the workspace as they are, because it is the workspace that says what is wrong with them.

    [train.grpo]
    environment = "composer_replication.envs.trl_environment:WorkspaceEnvironment"
    dataset = "composer_replication.envs.trl_environment:easy_tasks"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_args

from composer_replication.envs.workspace import (
    TOOLS,
    Difficulty,
    TestRunner,
    Workspace,
    generate_task,
)
from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED
from composer_replication.errors import InputError, explain
from composer_replication.optional import require

TRAINING_SEEDS = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + 1000)
_TYPES: dict[str, type] = {"string": str, "number": float, "boolean": bool}
_DEFAULTS: dict[str, object] = {"string": "", "number": 0, "boolean": False}


class WorkspaceEnvironment:
    """One workspace at a time; `reset(seed=..., difficulty=...)` starts a task. The tools are added below."""

    def __init__(self, *, runner: TestRunner | None = None, max_calls: int = 40) -> None:
        self._runner, self._max_calls = runner, max_calls
        self._workspace: Workspace | None = None

    def reset(self, *, seed: int, difficulty: Difficulty = "easy", prompt: Any = None, **_row: Any) -> str | None:
        """Starts the task of a row. Where the row has no prompt, the task's is what the model reads."""
        task = generate_task(int(seed), difficulty=difficulty)
        self._workspace = Workspace(task, runner=self._runner, max_calls=self._max_calls)
        return None if prompt else task.prompt

    def get_reward(self) -> float:
        """What the files are worth now."""
        return self._started().reward().value

    def _started(self) -> Workspace:
        if self._workspace is None:
            fix = "The trainer resets an environment with the row's columns: give it one named seed."
            raise InputError(explain("workspace", got="no task", expected="reset(seed=...) before any call", fix=fix))
        return self._workspace


def task_rows(seeds: Iterable[int], *, difficulty: Difficulty = "easy", system: str = "") -> list[dict[str, Any]]:
    """A dataset's rows: the prompt of each task, its seed and its difficulty."""
    if difficulty not in get_args(Difficulty):
        raise InputError(explain("difficulty", got=repr(difficulty), expected=" or ".join(get_args(Difficulty))))
    first = [{"role": "system", "content": system}] if system else []
    return [
        {
            "prompt": [*first, {"role": "user", "content": generate_task(seed, difficulty=difficulty).prompt}],
            "seed": seed,
            "difficulty": difficulty,
        }
        for seed in seeds
    ]


def easy_tasks() -> Any:
    """A thousand easy tasks as a `datasets.Dataset`, none kept for evaluation; what `train.grpo.dataset` may name."""
    return require("datasets", extra="train").Dataset.from_list(task_rows(TRAINING_SEEDS))


def _medium_tasks() -> Any:
    """A thousand tasks of medium difficulty."""
    return require("datasets", extra="train").Dataset.from_list(task_rows(TRAINING_SEEDS, difficulty="medium"))


def _hard_tasks() -> Any:
    """A thousand hard tasks."""
    return require("datasets", extra="train").Dataset.from_list(task_rows(TRAINING_SEEDS, difficulty="hard"))


def _method(schema: dict[str, Any]) -> Callable[..., str]:
    """A tool as a method with the signature, types and Google docstring that TRL makes its schema of."""
    name, properties = schema["name"], schema["parameters"]["properties"]
    required = schema["parameters"]["required"]

    def tool(self: WorkspaceEnvironment, /, **given: Any) -> str:
        return self._started().call(name, given).text

    lines = [f"    {key}: {value['description']}" for key, value in properties.items()]
    tool.__name__, tool.__qualname__ = name, f"{WorkspaceEnvironment.__name__}.{name}"
    tool.__doc__ = "\n".join([schema["description"], *(["", "Args:", *lines] if lines else [])])
    tool.__annotations__ = {key: _TYPES[value["type"]] for key, value in properties.items()} | {"return": str}
    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if key in required else _DEFAULTS[value["type"]],
            annotation=_TYPES[value["type"]],
        )
        for key, value in properties.items()
    ]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    tool.__dict__["__signature__"] = inspect.Signature([self_parameter, *parameters], return_annotation=str)
    return tool


for _tool in TOOLS:
    setattr(WorkspaceEnvironment, _tool["function"]["name"], _method(_tool["function"]))
