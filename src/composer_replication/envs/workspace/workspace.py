"""Run one episode: answer tool calls as a coding harness does, and compute the reward of the files.

The texts of results must not change: the embedded student was trained on them, and the failure rules recognize them.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_replication.envs.workspace.files import MAX_FILE, ROOT, Files, Refusal, absolute, below_root
from composer_replication.envs.workspace.regex import BudgetError, PatternError, Regex
from composer_replication.envs.workspace.sandbox import TestRunner, shared_runner
from composer_replication.envs.workspace.task import SCHEMAS, Task, clean, find_argument_problems, parse_arguments
from composer_replication.errors import SandboxError, explain

_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a call.

    `kind` is the kind of failure as in sites/rule.py, or None if the call did not fail through the model's own error.
    """

    text: str
    failed: bool = False
    kind: str | None = None


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The cost of an episode. `tokens` estimates the length of all results, assuming four characters per token."""

    calls: int
    failed_calls: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward for an episode's files, and how many tests pass (`passed`) out of all tests (`total`).

    `value` is 1 if every test passes, and 0 if a test that passed at the start fails now. Otherwise it is half the
    fraction of initially failing tests that pass now.
    """

    value: float
    solved: bool
    passed: int
    total: int
    effort: Effort


class Workspace:
    """An episode on one task. `call` never raises, whatever a policy sends."""

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
        """The current texts of the files, keyed by path below the root."""
        return self._files.texts

    def call(self, name: str, arguments: object) -> Outcome:
        """Run a tool call, and return the result that a harness would show.

        The episode ends after `max_calls` calls.
        """
        outcome = self._outcome(name, arguments)
        self.calls += 1
        self._failed_calls += outcome.failed
        self._characters += len(outcome.text)
        if self.calls >= self.max_calls:
            self.finished = True
        return outcome

    def reward(self) -> Reward:
        """Return the reward for the current files.

        The checks evaluate expressions, some of which are not in the tests that the agent can read. Raises SandboxError
        if the sandbox cannot evaluate the task's original files.
        """
        before, now = self._initial_results(), self._test_results(self._check_values(self.files))
        broken = [test for test, passes in before.items() if not passes]
        nothing_broken = all(now[test] for test, passes in before.items() if passes)
        solved = all(now.values())
        # At most half, so that a complete solution is worth more than any part of it.
        partial = 0.5 * sum(now[test] for test in broken) / max(len(broken), 1) if nothing_broken else 0.0
        effort = Effort(
            calls=self.calls,
            failed_calls=self._failed_calls,
            tokens=math.ceil(self._characters / _CHARS_PER_TOKEN),
        )
        return Reward(
            value=1.0 if solved else partial, solved=solved, passed=sum(now.values()), total=len(now), effort=effort
        )

    def _initial_results(self) -> dict[str, bool]:
        # Computed once per workspace, because a test run takes time and these files never change.
        if self._before is None:
            files = self.task.files
            # These files are harmless, so if the sandbox gives no answer, a second try is worthwhile.
            values = self._check_values(files) or self._check_values(files)
            if not values:
                what = f"checks of task {self.task.seed}"
                fix = "The sandbox cannot run tests; check that the machine has free memory and is not overloaded."
                raise SandboxError(explain(what, got="no answer, twice", expected="a value for each", fix=fix))
            self._before = self._test_results(values)
        return self._before

    def _check_values(self, files: Mapping[str, str]) -> list[str]:
        return self._get_runner().values(files, [(check.module, check.expression) for check in self.task.checks])

    def _test_results(self, values: list[str]) -> dict[str, bool]:
        """Map each test to whether all of its checks hold. If `values` is empty, no test passes."""
        checks = self.task.checks
        passes = {check.test: True for check in checks}
        for check, value in zip(checks, values or [None] * len(checks), strict=True):
            passes[check.test] &= value == check.expected
        return passes

    def _outcome(self, name: object, arguments: object) -> Outcome:
        if self.finished:
            return _tool_error(None, "The session has ended.")
        if not isinstance(name, str) or name not in SCHEMAS:
            shown_name = clean(str(name))[:100] if isinstance(name, str) else type(name).__name__
            return _harness_error("tool_not_found", f"Error: No such tool available: {shown_name}")
        call_arguments = parse_arguments(arguments)
        if call_arguments is None:
            text = f"InputValidationError: {name} failed to parse: the arguments are not valid JSON"
            return _harness_error("input_validation", text)
        problems = find_argument_problems(name, call_arguments)
        if problems:
            return _invalid_arguments(name, problems)
        if name == "Finish":
            self.finished = True
            return Outcome(text="Done.")
        return self._tools.use(name, call_arguments)

    def _get_runner(self) -> TestRunner:
        # Only when needed: the shared runner starts a process.
        return self._runner or shared_runner()


# Limits of Read: lines, and characters of a line.
_MAX_LINES, _MAX_LINE_CHARS = 2000, 2000
# The limit of Claude Code's Read: 25,000 tokens of four characters each.
_MAX_READ_CHARS = 100_000
# Limits of searches: results, and characters of a result.
_MAX_HITS, _MAX_HIT_CHARS = 100, 500
_TRUNCATED = "(Results are truncated. Consider using a more specific path or pattern.)"


class _Toolbox:
    """The tools that work on one set of files.

    Names, arguments and results follow Claude Code for the tools that it has. Like Claude Code, the toolbox remembers
    the text of every file that was read. It refuses to edit files that were not read or have changed since.
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
        """Run a tool. The arguments must match the tool's schema."""
        return self._functions[name](**arguments)

    def list_folder(self, path: str) -> Outcome:
        name = below_root(path)
        if name is None or not self.files.is_folder(name):
            return _folder_not_found(path)
        entries = [f"  - {entry}" for entry in self.files.entries(name)]
        return _hits_outcome([f"- {absolute(name)}/", *entries], "")

    def find_files(self, pattern: str, path: str = "") -> Outcome:
        name = below_root(path)
        if name is None or not self.files.is_folder(name):
            return _folder_not_found(path)
        hits = self.files.matching(name, pattern)
        if hits is None:
            return _harness_error("input_validation", f"Invalid glob pattern: {pattern[:200]}")
        return _hits_outcome([absolute(hit) for hit in hits], "No files found")

    def find_lines(self, pattern: str, path: str = "") -> Outcome:
        name = below_root(path)
        if name is None or not (name in self.files or self.files.is_folder(name)):
            return _harness_error("file_not_found", f"Path does not exist: {path[:_MAX_PATH_LENGTH]}")
        try:
            expression = Regex(pattern)
            hits = [
                f"{absolute(file_name)}:{number}:{line[:_MAX_HIT_CHARS]}"
                for file_name in ([name] if name in self.files else self.files.below(name))
                for number, line in enumerate(self.files[file_name].split("\n"), 1)
                if line and expression.matches(line)
            ]
        except PatternError as error:
            return _harness_error("input_validation", str(error))
        except BudgetError:  # a pattern that would take too long ends like ripgrep's timeout
            return _SEARCH_TIMED_OUT
        return _hits_outcome(hits, "No matches found")

    # The schema says "number", so offset and limit may be floats, and huge.
    def read(self, file_path: str, offset: float = 1, limit: float = _MAX_LINES) -> Outcome:
        name = self._find_file(file_path)
        if isinstance(name, Outcome):
            return name
        text = self.files[name]
        self._read[name] = text
        if not text:
            return Outcome(text=_EMPTY)
        lines = text.split("\n")
        start = max(int(offset), 1) - 1
        if start >= len(lines):
            return Outcome(text=_SHORTER.format(offset=_line_number_text(offset), lines=len(lines)))
        stop = start + max(int(min(limit, _MAX_LINES)), 1)
        numbered_text = "\n".join(
            f"{at:>6}→{line[:_MAX_LINE_CHARS]}" for at, line in enumerate(lines[start:stop], start + 1)
        )
        return (
            Outcome(text=numbered_text)
            if len(numbered_text) <= _MAX_READ_CHARS
            else _too_large(len(numbered_text) // 4)
        )

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> Outcome:
        if old_string == new_string:
            return _EDIT_NOOP
        name = self._find_file(file_path)
        if isinstance(name, Outcome):
            # As in Claude Code, an Edit with an empty old_string creates the file.
            is_new = not old_string and name.kind == "file_not_found"
            return self.write(file_path, new_string) if is_new else name
        text = self.files[name]
        if not old_string and text.strip():
            return _EXISTS_ALREADY
        if name not in self._read:
            return _EDIT_NOT_READ
        if self._read[name] != text:
            return _EDIT_STALE
        count = text.count(old_string) if old_string else 1
        if count == 0:
            return _harness_error("edit_no_match", f"String to replace not found in file.\nString: {old_string}")
        if count > 1 and not replace_all:
            return _edit_ambiguous(count, old_string)
        if old_string and len(text) + count * (len(new_string) - len(old_string)) > MAX_FILE:
            # Checked here as well as in `_put`, so that a text of that size is never built.
            return _cannot_write("no space", absolute(name))
        return self._put(name, text.replace(old_string, new_string) if old_string else new_string)

    def write(self, file_path: str, content: str) -> Outcome:
        # For a file outside the root, a harness asks its user for permission, which no user grants here.
        name = below_root(file_path)
        if name is None:
            shown_path = file_path[:_MAX_PATH_LENGTH]
            text = f"Claude requested permissions to write to {shown_path}, but you haven't granted it yet."
            return _tool_error(None, text)
        if self.files.is_folder(name):
            return _is_directory("open", file_path)
        if name in self.files:
            if name not in self._read:
                return _EDIT_NOT_READ
            if self._read[name] != self.files[name]:
                return _EDIT_STALE
        return self._put(name, content)

    def run_tests(self) -> Outcome:
        """Format the code, as the test commands of many projects do, and run all tests."""
        formatted = self.files.format_code()
        # As pytest does by default: files in tests/ whose names begin with test_.
        paths = [path for path in self.files.below("tests") if posixpath.basename(path).startswith("test_")]
        report = self._runner().run_tests(self.files.texts, [path for path in paths if path.endswith(".py")])
        text = "\n".join([*(f"reformatted {path}" for path in formatted), report.text])
        return Outcome(text=text) if report.ended else _tool_error(None, text)

    def _find_file(self, path: str) -> str | Outcome:
        """Return the path of an existing file below the root, or a failed outcome if there is no such file."""
        name = below_root(path)
        if name is not None and name in self.files:
            return name
        if name is not None and self.files.is_folder(name):
            return _is_directory("read")
        similar = self.files.similar(path if name is None else name)
        suggestion = f" Did you mean {absolute(similar)}?" if similar else ""
        return _harness_error("file_not_found", f"File does not exist.{suggestion}")

    def _put(self, name: str, text: str) -> Outcome:
        is_new = name not in self.files
        refusal = self.files.write_refusal(name, text)
        if refusal is not None:
            return _cannot_write(refusal, absolute(name))
        self.files.write(name, text)
        # As in Claude Code, a file that was just written can be edited without reading it.
        self._read[name] = text
        path = absolute(name)
        message = (
            f"File created successfully at: {path}" if is_new else f"The file {path} has been updated successfully."
        )
        return Outcome(text=message)


def _hits_outcome(lines: list[str], text_if_none: str) -> Outcome:
    return Outcome(text="\n".join(lines[:_MAX_HITS] + [_TRUNCATED] * (len(lines) > _MAX_HITS)) or text_if_none)


def _line_number_text(value: float) -> str:
    """Return a line number as the model wrote it.

    Huge numbers are written in scientific notation to keep the text short.
    """
    return str(value) if abs(value) < 1e15 else f"{float(min(value, 1e300)):.3g}"


# ---- messages
# The messages of harnesses for failed calls, word for word, with the kind of failure in sites/rule.py. The texts are
# data: error rules recognize them, and the embedded student was trained on them.

MAX_TEXT, _MAX_PATH_LENGTH = 30_000, 300
_EMPTY = "<system-reminder>Warning: the file exists but the contents are empty.</system-reminder>"
_SHORTER = (
    "<system-reminder>Warning: the file exists but is shorter than the provided offset ({offset}). "
    "The file has {lines} lines.</system-reminder>"
)


def _tool_error(kind: str | None, text: str) -> Outcome:
    """Return an error from the tool or the operating system, which a harness passes on unchanged."""
    return Outcome(text=text[:MAX_TEXT], failed=True, kind=kind)


def _harness_error(kind: str, text: str) -> Outcome:
    """Return an error from a harness that did not run the call. As in real logs, its text is enclosed in tags."""
    return Outcome(text=f"<tool_use_error>{text[:MAX_TEXT]}</tool_use_error>", failed=True, kind=kind)


_SEARCH_TIMED_OUT = _tool_error(
    None,
    "Ripgrep search timed out after 20 seconds. The search may have matched files but did not complete in time. "
    "Try searching a more specific path or pattern.",
)
_EDIT_NOOP = _harness_error("edit_noop", "No changes to make: old_string and new_string are exactly the same.")
_EDIT_NOT_READ = _harness_error("edit_not_read", "File has not been read yet. Read it first before writing to it.")
_EDIT_STALE = _harness_error(
    "edit_stale",
    "File has been modified since read, either by the user or by a linter. "
    "Read it again before attempting to write it.",
)
_EXISTS_ALREADY = _harness_error("input_validation", "Cannot create new file - file already exists.")


def _invalid_arguments(tool: str, problems: list[str]) -> Outcome:
    noun = "issue" if len(problems) == 1 else "issues"
    return _harness_error(
        "input_validation", "\n".join([f"InputValidationError: {tool} failed due to the following {noun}:", *problems])
    )


def _folder_not_found(path: str) -> Outcome:
    return _harness_error("file_not_found", f"Directory does not exist: {path[:_MAX_PATH_LENGTH]}")


def _is_directory(operation: str, path: str = "") -> Outcome:
    return _harness_error(
        "is_directory", f"EISDIR: illegal operation on a directory, {operation}" + (f" '{path}'" if path else "")
    )


def _too_large(tokens: int) -> Outcome:
    return _tool_error(
        "output_too_large",
        f"File content ({tokens} tokens) exceeds maximum allowed tokens (25000). Please use offset and limit "
        "parameters to read specific portions of the file, or use the GrepTool to search for specific content.",
    )


def _cannot_write(refusal: Refusal, path: str) -> Outcome:
    """Return the operating system's error for a file that cannot be written."""
    if refusal == "null":
        shown_path = path.replace("\0", "\\x00")
        return _tool_error(
            "input_validation",
            f"The argument 'path' must be a string, Uint8Array, or URL without null bytes. Received '{shown_path}'",
        )
    messages = {
        "too long": "ENAMETOOLONG: name too long, open",
        "not a folder": "ENOTDIR: not a directory, open",
        "no space": "ENOSPC: no space left on device, write",
    }
    return _tool_error(None, f"{messages[refusal]} '{path}'")


def _edit_ambiguous(count: int, old: str) -> Outcome:
    return _harness_error(
        "edit_ambiguous",
        f"Found {count} matches of the string to replace, but replace_all is false. To replace all occurrences, set "
        "replace_all to true. To replace only one occurrence, please provide more context to uniquely identify the "
        f"instance.\nString: {old}",
    )
