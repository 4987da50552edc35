"""Provide the workspace as an environment of TRL: its public methods are the tools, and `reset` takes a dataset row.

A tool that fails returns the harness's message instead of raising an exception. After an exception, TRL would show the
model a different message, but `trainer/rollouts/sites.py` recognizes failures by the harness's messages. TRL would also
not count the call. Invalid arguments are passed to the workspace, which answers them with an error.

    [train.grpo]
    environment = "composer_replication.envs.trl_environment:WorkspaceEnvironment"
    dataset = "composer_replication.envs.trl_environment:easy_tasks"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_args

from composer_replication.envs.workspace import TOOLS, Difficulty, TestRunner, Workspace, generate_task
from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED
from composer_replication.errors import InputError, explain
from composer_replication.optional import require

TRAINING_SEEDS = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + 1000)
# Python types and default values by the JSON type of a tool's parameter.
_TYPES: dict[str, type] = {"string": str, "number": float, "boolean": bool}
_DEFAULTS: dict[str, object] = {"string": "", "number": 0, "boolean": False}


class WorkspaceEnvironment:
    """A workspace whose task is set by `reset`. Its tools are methods, which are added at the end of the module."""

    def __init__(self, *, runner: TestRunner | None = None, max_calls: int = 40) -> None:
        self._runner, self._max_calls = runner, max_calls
        self._workspace: Workspace | None = None

    def reset(self, *, seed: int, difficulty: Difficulty = "easy", prompt: Any = None, **_row: Any) -> str | None:
        """Start the task of a dataset row, and return its prompt unless the row contains one."""
        task = generate_task(int(seed), difficulty=difficulty)
        self._workspace = Workspace(task, runner=self._runner, max_calls=self._max_calls)
        return None if prompt else task.prompt

    def get_reward(self) -> float:
        """Return the reward for the current files."""
        return self._require_workspace().reward().value

    def _require_workspace(self) -> Workspace:
        if self._workspace is None:
            fix = "The trainer calls reset() with the columns of the dataset: add a column named seed."
            raise InputError(explain("workspace", got="no task", expected="reset(seed=...) before any call", fix=fix))
        return self._workspace


def task_rows(seeds: Iterable[int], *, difficulty: Difficulty = "easy", system: str = "") -> list[dict[str, Any]]:
    """Return one dataset row per seed: prompt, seed and difficulty. Raises InputError for an unknown difficulty."""
    if difficulty not in get_args(Difficulty):
        raise InputError(explain("difficulty", got=repr(difficulty), expected=" or ".join(get_args(Difficulty))))
    system_messages = [{"role": "system", "content": system}] if system else []
    return [
        {
            "prompt": [
                *system_messages,
                {"role": "user", "content": generate_task(seed, difficulty=difficulty).prompt},
            ],
            "seed": seed,
            "difficulty": difficulty,
        }
        for seed in seeds
    ]


def easy_tasks() -> Any:
    """Return 1,000 easy training tasks as a `datasets.Dataset`, for the option `train.grpo.dataset`."""
    return require("datasets", extra="train").Dataset.from_list(task_rows(TRAINING_SEEDS))


def medium_tasks() -> Any:
    """Return 1,000 training tasks of medium difficulty."""
    return require("datasets", extra="train").Dataset.from_list(task_rows(TRAINING_SEEDS, difficulty="medium"))


def hard_tasks() -> Any:
    """Return 1,000 hard training tasks."""
    return require("datasets", extra="train").Dataset.from_list(task_rows(TRAINING_SEEDS, difficulty="hard"))


def _make_tool(schema: dict[str, Any]) -> Callable[..., str]:
    """Return a tool as a method whose signature, types and Google-style docstring give TRL its schema."""
    name, properties = schema["name"], schema["parameters"]["properties"]
    required = schema["parameters"]["required"]

    def tool(self: WorkspaceEnvironment, /, **arguments: Any) -> str:
        return self._require_workspace().call(name, arguments).text

    # TRL derives a tool's schema from its signature and its docstring.
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


# Methods are generated, so that `TOOLS` is the only definition of the tools.
for _tool in TOOLS:
    setattr(WorkspaceEnvironment, _tool["function"]["name"], _make_tool(_tool["function"]))
