"""Run one episode: answer tool calls as a coding harness does, and compute the reward of the files.

The texts of results are data: the embedded student was trained on them, and the failure rules recognize them.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_replication.envs.workspace import files as messages
from composer_replication.envs.workspace.files import MAX_FILE, ROOT, Files, Outcome, absolute, below_root
from composer_replication.envs.workspace.regex import BudgetError, PatternError, Regex
from composer_replication.envs.workspace.sandbox import TestRunner, shared_runner
from composer_replication.envs.workspace.task import SCHEMAS, Task, as_mapping, clean, issues
from composer_replication.errors import SandboxError, explain

CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What an episode spent. `tokens` estimates the text of all results, at four characters per token."""

    calls: int
    failed_calls: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward of an episode's files, with the number of tests that pass (`passed`) of all tests (`total`).

    `value` is 1 if every test passes. Otherwise it is half the share of initially failing tests that pass now, or 0 if
    a test that passed at the start fails now.
    """

    value: float
    solved: bool
    passed: int
    total: int
    effort: Effort


class Workspace:
    """One task being worked on. `call` raises nothing, whatever a policy sends."""

    root = ROOT

    def __init__(self, task: Task, *, runner: TestRunner | None = None, max_calls: int = 40) -> None:
        self.task, self.max_calls = task, max_calls
        self.finished, self.calls = False, 0
        self._runner = runner
        self._failed_calls = self._characters = 0
        self._before: dict[str, bool] | None = None
        self._files = Files(task.files)
        self._tools = _Toolbox(self._files, self._get_runner)

    @property
    def files(self) -> Mapping[str, str]:
        return self._files.texts

    def call(self, name: str, arguments: object) -> Outcome:
        """Check the arguments, use the tool, and return what a harness would show. Ends the episode at `max_calls`."""
        outcome = self._outcome(name, arguments)
        self.calls += 1
        self._failed_calls += outcome.failed
        self._characters += len(outcome.text)
        if self.calls >= self.max_calls:
            self.finished = True
        return outcome

    def reward(self) -> Reward:
        """Return the reward of the files as they are now.

        The checks evaluate expressions, only some of which are in the tests that the agent can read. Raises
        SandboxError if the sandbox cannot evaluate even the untouched files of the task.
        """
        before, now = self._tests_before(), self._passing(self._answers(self.files))
        broken = [test for test, passes in before.items() if not passes]
        nothing_broke = all(now[test] for test, passes in before.items() if passes)
        solved = all(now.values())
        # At most half: solving the task has to be worth more than any part of it.
        partial = 0.5 * sum(now[test] for test in broken) / max(len(broken), 1) if nothing_broke else 0.0
        effort = Effort(
            calls=self.calls,
            failed_calls=self._failed_calls,
            tokens=math.ceil(self._characters / CHARACTERS_PER_TOKEN),
        )
        return Reward(
            value=1.0 if solved else partial, solved=solved, passed=sum(now.values()), total=len(now), effort=effort
        )

    def _tests_before(self) -> dict[str, bool]:
        # Once per workspace: a test run takes time, and these files never change.
        if self._before is None:
            files = self.task.files
            # These files are ours and harmless, so a missing answer is chance and worth a second try.
            answers = self._answers(files) or self._answers(files)
            if not answers:
                what = f"checks of task {self.task.seed}"
                fix = "The sandbox cannot run tests; check that the machine has free memory and is not overloaded."
                raise SandboxError(explain(what, got="no answer, twice", expected="a value for each", fix=fix))
            self._before = self._passing(answers)
        return self._before

    def _answers(self, files: Mapping[str, str]) -> list[str]:
        return self._get_runner().values(files, [(check.module, check.expression) for check in self.task.checks])

    def _passing(self, answers: list[str]) -> dict[str, bool]:
        """Return for every test whether all of its checks hold. Without answers no test passes."""
        checks = self.task.checks
        passes = {check.test: True for check in checks}
        for check, answer in zip(checks, answers or [None] * len(checks), strict=True):
            passes[check.test] &= answer == check.expected
        return passes

    def _outcome(self, name: object, arguments: object) -> Outcome:
        if self.finished:
            return messages.tool_error(None, "The session has ended.")
        if not isinstance(name, str) or name not in SCHEMAS:
            return messages.unknown_tool(clean(str(name))[:100] if isinstance(name, str) else type(name).__name__)
        call_arguments = as_mapping(arguments)
        if call_arguments is None:
            return messages.not_an_object(name)
        unfit = issues(name, call_arguments)
        if unfit:
            return messages.invalid_arguments(name, unfit)
        if name == "Finish":
            self.finished = True
            return Outcome(text="Done.")
        return self._tools.use(name, call_arguments)

    def _get_runner(self) -> TestRunner:
        # Only when needed: the shared runner starts a process.
        return self._runner or shared_runner()


# Limits of results, in lines and characters.
MAX_LINES, MAX_LINE = 2000, 2000
MAX_CHARACTERS = 100_000
"""The most that one Read may show: 25,000 tokens of four characters each, as in Claude Code."""
MAX_HITS, MAX_HIT = 100, 500
TRUNCATED = "(Results are truncated. Consider using a more specific path or pattern.)"


class _Toolbox:
    """The tools over one set of files. Names, arguments and results are Claude Code's, where it has the tool.

    As Claude Code does, it remembers the text of every file that was read, and refuses edits of unread or changed ones.
    """

    def __init__(self, files: Files, runner: Callable[[], TestRunner]) -> None:
        self.files, self._runner = files, runner
        self._read: dict[str, str] = {}
        self._functions: dict[str, Callable[..., Outcome]] = {
            "LS": self.list_folder,
            "Glob": self.find_files,
            "Grep": self.find_lines,
            "Read": self.read,
            "Edit": self.edit,
            "Write": self.write,
            "RunTests": self.run_tests,
        }

    def use(self, name: str, arguments: Mapping[str, Any]) -> Outcome:
        """Use a tool; the arguments must fit its schema."""
        return self._functions[name](**arguments)

    def list_folder(self, path: str) -> Outcome:
        name = below_root(path)
        if name is None or not self.files.is_folder(name):
            return messages.folder_not_found(path)
        entries = [f"  - {entry}" for entry in self.files.entries(name)]
        return _hits([f"- {absolute(name)}/", *entries], "")

    def find_files(self, pattern: str, path: str = "") -> Outcome:
        name = below_root(path)
        if name is None or not self.files.is_folder(name):
            return messages.folder_not_found(path)
        hits = self.files.matching(name, pattern)
        if hits is None:
            return messages.invalid_glob(pattern)
        return _hits([absolute(hit) for hit in hits], "No files found")

    def find_lines(self, pattern: str, path: str = "") -> Outcome:
        name = below_root(path)
        if name is None or not (name in self.files or self.files.is_folder(name)):
            return messages.path_not_found(path)
        try:
            expression = Regex(pattern)
            hits = [
                f"{absolute(file_name)}:{number}:{line[:MAX_HIT]}"
                for file_name in ([name] if name in self.files else self.files.below(name))
                for number, line in enumerate(self.files[file_name].split("\n"), 1)
                if line and expression.matches(line)
            ]
        except PatternError as error:
            return messages.invalid_regex(str(error))
        except BudgetError:  # a pattern that would take too long ends like ripgrep's timeout
            return messages.search_timed_out()
        return _hits(hits, "No matches found")

    # The schema says "number", so offset and limit may be floats, even huge ones.
    def read(self, file_path: str, offset: float = 1, limit: float = MAX_LINES) -> Outcome:
        name = self._file(file_path)
        if isinstance(name, Outcome):
            return name
        text = self.files[name]
        self._read[name] = text
        if not text:
            return Outcome(text=messages.EMPTY)
        lines = text.split("\n")
        start = max(int(offset), 1) - 1
        if start >= len(lines):
            return Outcome(text=messages.SHORTER.format(offset=_number(offset), lines=len(lines)))
        stop = start + max(int(min(limit, MAX_LINES)), 1)
        numbered_text = "\n".join(f"{at:>6}→{line[:MAX_LINE]}" for at, line in enumerate(lines[start:stop], start + 1))
        return (
            Outcome(text=numbered_text)
            if len(numbered_text) <= MAX_CHARACTERS
            else messages.too_large(len(numbered_text) // 4)
        )

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> Outcome:
        if old_string == new_string:
            return messages.edit_noop()
        name = self._file(file_path)
        if isinstance(name, Outcome):
            # An Edit with an empty old_string creates the file, as in Claude Code.
            is_new = not old_string and name.kind == "file_not_found"
            return self.write(file_path, new_string) if is_new else name
        text = self.files[name]
        if not old_string and text.strip():
            return messages.exists_already()
        if name not in self._read:
            return messages.edit_not_read()
        if self._read[name] != text:
            return messages.edit_stale()
        count = text.count(old_string) if old_string else 1
        if count == 0:
            return messages.edit_no_match(old_string)
        if count > 1 and not replace_all:
            return messages.edit_ambiguous(count, old_string)
        if old_string and len(text) + count * (len(new_string) - len(old_string)) > MAX_FILE:
            # Refused here and not in `_put`, so that a text of that size is never built.
            return messages.cannot_write("no space", absolute(name))
        return self._put(name, text.replace(old_string, new_string) if old_string else new_string)

    def write(self, file_path: str, content: str) -> Outcome:
        # Outside the root, the harness would ask its user for permission and get none.
        name = below_root(file_path)
        if name is None:
            return messages.outside_root(file_path)
        if self.files.is_folder(name):
            return messages.is_directory("open", file_path)
        if name in self.files:
            if name not in self._read:
                return messages.edit_not_read()
            if self._read[name] != self.files[name]:
                return messages.edit_stale()
        return self._put(name, content)

    def run_tests(self) -> Outcome:
        """Format the code, as the test command of many projects does, and run all tests."""
        formatted = self.files.format_code()
        # pytest's default names: files in tests/ that begin with test_.
        paths = [path for path in self.files.below("tests") if posixpath.basename(path).startswith("test_")]
        report = self._runner().run_tests(self.files.texts, [path for path in paths if path.endswith(".py")])
        text = "\n".join([*(f"reformatted {path}" for path in formatted), report.text])
        return Outcome(text=text) if report.ended else messages.tool_error(None, text)

    def _file(self, path: str) -> str | Outcome:
        """Return the file's path below the root, or the failure if there is no such file."""
        name = below_root(path)
        if name is not None and name in self.files:
            return name
        if name is not None and self.files.is_folder(name):
            return messages.is_directory("read")
        similar = self.files.similar(path if name is None else name)
        return messages.file_not_found(absolute(similar) if similar else None)

    def _put(self, name: str, text: str) -> Outcome:
        is_new = name not in self.files
        refusal = self.files.write_refusal(name, text)
        if refusal is not None:
            return messages.cannot_write(refusal, absolute(name))
        self.files.write(name, text)
        # As in Claude Code, a file that was just written need not be read before the next edit.
        self._read[name] = text
        path = absolute(name)
        message = (
            f"File created successfully at: {path}" if is_new else f"The file {path} has been updated successfully."
        )
        return Outcome(text=message)


def _hits(lines: list[str], text_if_none: str) -> Outcome:
    return Outcome(text="\n".join(lines[:MAX_HITS] + [TRUNCATED] * (len(lines) > MAX_HITS)) or text_if_none)


def _number(value: float) -> str:
    """Return a line number as the model wrote it; huge ones in scientific notation, so that the text stays short."""
    return str(value) if abs(value) < 1e15 else f"{float(min(value, 1e300)):.3g}"
