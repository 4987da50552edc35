"""One episode: calls and their outcomes, and the reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from composer_replication.envs.workspace import words
from composer_replication.envs.workspace.files import ROOT, Files
from composer_replication.envs.workspace.sandbox import TestRunner, shared_runner
from composer_replication.envs.workspace.schemas import SCHEMAS, as_mapping, clean, issues
from composer_replication.envs.workspace.task import Task
from composer_replication.envs.workspace.tools import Toolbox
from composer_replication.envs.workspace.words import Outcome
from composer_replication.errors import SandboxError, explain

CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What an episode spent. `tokens` is text shown by tools, at four characters a token."""

    calls: int
    failed_calls: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Reward:
    """`value` is 1 when every test passes, else half the share of broken tests that pass now, 0 if another broke."""

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
        self._before: dict[str, bool] | None = None
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
        """What the files are worth now; asked of expressions of which the agent has seen a part."""
        before, now = self._tests_before(), self._passing(self._answers(self.files))
        broken = [test for test, passes in before.items() if not passes]
        kept_whole = all(now[test] for test, passes in before.items() if passes)
        solved = all(now.values())
        partial = 0.5 * sum(now[test] for test in broken) / max(len(broken), 1) if kept_whole else 0.0
        effort = Effort(
            calls=self.calls,
            failed_calls=self._failed_calls,
            tokens=math.ceil(self._characters / CHARACTERS_PER_TOKEN),
        )
        return Reward(
            value=1.0 if solved else partial, solved=solved, passed=sum(now.values()), total=len(now), effort=effort
        )

    def _tests_before(self) -> dict[str, bool]:
        if self._before is None:
            files = self.task.files
            answers = self._answers(files) or self._answers(files)  # nothing hostile in them: a lost one is chance
            if not answers:
                what, fix = (
                    f"checks of task {self.task.seed}",
                    "No reward can be given: see that the machine has memory and time.",
                )
                raise SandboxError(explain(what, got="no answer, twice", expected="a value for each", fix=fix))
            self._before = self._passing(answers)
        return self._before

    def _answers(self, files: Mapping[str, str]) -> list[str]:
        return self._get_runner().values(files, [(check.module, check.expression) for check in self.task.checks])

    def _passing(self, answers: list[str]) -> dict[str, bool]:
        """Each test by name, and whether all of its checks hold; none does where there was no answer."""
        checks = self.task.checks
        passes = {check.test: True for check in checks}
        for check, answer in zip(checks, answers or [None] * len(checks), strict=True):
            passes[check.test] &= answer == check.expected
        return passes

    def _outcome(self, name: object, arguments: object) -> Outcome:
        if self.finished:
            return words.thrown(None, "The session has ended.")
        if not isinstance(name, str) or name not in SCHEMAS:
            return words.unknown_tool(clean(str(name))[:100] if isinstance(name, str) else type(name).__name__)
        call_arguments = as_mapping(arguments)
        if call_arguments is None:
            return words.not_an_object(name)
        unfit = issues(name, call_arguments)
        if unfit:
            return words.invalid_arguments(name, unfit)
        if name == "Finish":
            self.finished = True
            return Outcome(text="Done.")
        return self._tools.use(name, call_arguments)

    def _get_runner(self) -> TestRunner:
        return self._runner or shared_runner()
