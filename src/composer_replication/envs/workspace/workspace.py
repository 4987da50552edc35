"""One episode: calls and their outcomes, and the reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_replication.envs.workspace import words
from composer_replication.envs.workspace.files import ROOT, Files
from composer_replication.envs.workspace.sandbox import TestRunner
from composer_replication.envs.workspace.task import Task
from composer_replication.envs.workspace.tools import TOOLS, Toolbox
from composer_replication.envs.workspace.words import Outcome

_SCHEMAS: dict[str, dict[str, Any]] = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float), "boolean": (bool,)}
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What an episode spent. `tokens` is text shown by tools, at four characters a token."""

    calls: int
    failed_calls: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Reward:
    """`value` is 1 when every check holds, else half the share of broken checks that hold now, 0 if others broke."""

    value: float
    solved: bool
    passed: int
    total: int
    effort: Effort


class Workspace:
    """One task being worked on. `call` never raises for anything a policy sends."""

    root = ROOT

    def __init__(self, task: Task, *, runner: TestRunner | None = None, max_calls: int = 40) -> None:
        self.task, self.max_calls = task, max_calls
        self.finished, self.calls = False, 0
        self._runner = runner
        self._failed_calls = self._characters = 0
        self._files = Files(task.files)
        self._tools = Toolbox(self._files, self._get_runner)

    @property
    def files(self) -> Mapping[str, str]:
        return self._files.texts

    def call(self, name: str, arguments: object) -> Outcome:
        """Uses a tool as a harness would: the arguments are checked, then the tool acts or says why not."""
        outcome = self._outcome(name, arguments)
        self.calls += 1
        self._failed_calls += outcome.failed
        self._characters += len(outcome.text)
        if self.calls >= self.max_calls:
            self.finished = True
        return outcome

    def reward(self) -> Reward:
        """What the files are worth now; asked of expressions that the agent has not seen."""
        checks = self.task.checks
        answers = self._get_runner().values(self.files, [(each.module, each.expression) for each in checks])
        holds = [given == each.expected for given, each in zip(answers or [""] * len(checks), checks, strict=True)]
        passed, total = sum(holds), len(checks)
        broken = [held for held, each in zip(holds, checks, strict=True) if each.is_broken]
        kept_whole = all(held for held, each in zip(holds, checks, strict=True) if not each.is_broken)
        partial = 0.5 * sum(broken) / len(broken) if kept_whole else 0.0
        effort = Effort(
            calls=self.calls,
            failed_calls=self._failed_calls,
            tokens=math.ceil(self._characters / CHARACTERS_PER_TOKEN),
        )
        solved = passed == total
        return Reward(value=1.0 if solved else partial, solved=solved, passed=passed, total=total, effort=effort)

    def _outcome(self, name: str, arguments: object) -> Outcome:
        if self.finished:
            return words.failure(None, "The session has ended.")
        if name not in _SCHEMAS:
            return words.unknown_tool(str(name))
        if not isinstance(arguments, Mapping):
            return words.not_an_object(name)
        issues = _issues(_SCHEMAS[name], arguments)
        if issues:
            return words.invalid_arguments(name, issues)
        if name == "Finish":
            self.finished = True
            return Outcome(text="Done.")
        return self._tools.use(name, arguments)

    def _get_runner(self) -> TestRunner:
        if self._runner is None:
            self._runner = TestRunner()
        return self._runner


def _issues(schema: Mapping[str, Any], given: Mapping[Any, Any]) -> list[str]:
    """What a harness says of arguments that do not fit the schema, one line each."""
    known = schema["properties"]
    missing = [f"The required parameter `{each}` is missing" for each in schema["required"] if each not in given]
    unexpected = [f"An unexpected parameter `{each}` was provided" for each in given if each not in known]
    wrong = [
        f"The parameter `{key}` type is expected as `{known[key]['type']}` but provided as `{_type_of(value)}`"
        for key, value in given.items()
        if key in known and not _fits(value, known[key]["type"])
    ]
    return [*missing, *unexpected, *wrong]


def _fits(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for kind, types in (("boolean", bool), ("number", (int, float)), ("string", str), ("array", (list, tuple))):
        if isinstance(value, types):
            return kind
    return "object"
