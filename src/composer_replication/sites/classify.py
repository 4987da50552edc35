"""Classify a tool result: whether the call failed, how, and who is to blame.

Rules are tried in groups. The harness's own messages, at the start of the result, come first. For a shell, the next
groups are wrong use of a program, the work itself (tests, linters, compilers), the machine, crashed programs, and the
model's slips. If matching rules within a group disagree on the blame, the model is blamed only as a last resort.

Even then, the model is not blamed if the session shows an excuse: for example, an earlier result had shown the path
that is now missing (`_find_excuses`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import Command, is_path
from composer_replication.sites.actions.tools import (
    LINE_NUMBER_PREFIX,
    OLD_TEXT_KEYS,
    Channel,
    command_text,
    is_edit,
    is_shell,
    path_argument,
    plain_name,
    tool_channel,
)
from composer_replication.sites.cleaned_text import CleanedText
from composer_replication.sites.rule import FailureRule, Verdict, rule
from composer_replication.sites.rules.by_program import rules_for_command
from composer_replication.sites.rules.environment import MACHINE, SLIPS, WITHHELD
from composer_replication.sites.rules.harness import (
    FILE_ARGUMENTS,
    HARNESS_SENTENCES,
    MISUSES,
    REFUSALS,
    SERVER_ARGUMENTS,
    TOOL_NAME,
)
from composer_replication.sites.rules.tools_and_builds import (
    BUILDS,
    CHECKS,
    EDITS,
    NOT_INSTALLED,
    OTHER_TOOLS,
    PATCHES,
    PROGRAMS,
    READS,
    TESTS,
    TOOL_FAULTS,
)
from composer_replication.sites.rules.usage import SERVICES, SYNTAX, USAGE

_WRONG_USE = (*USAGE, *SERVICES, *SYNTAX)
# Confidence multiplier for a failure in a shell result that the log does not mark as an error.
_SOFT_CONFIDENCE = 0.5
# Lower bound of the confidence if the exit status comes from another command, such as `grep` at the end of a pipe.
_HIDDEN_CONFIDENCE = 0.65
# Longer texts are output, not messages; the second limit is for file tools.
_MAX_MESSAGE = 600
_MAX_FILE_MESSAGE = 1000
# A program reports wrong arguments in its first or its last lines.
_NUM_END_LINES = 12
# Lines that a tool may print before or after the exit code, around the command's output.
_MAX_ENVELOPE_LINES = 4
# Every message about a wrong command contains one of these words. A quick test that avoids searching long output.
# "error: unknown option"; "Usage: tool FILE"; not "all done"
_HINTS_AT_WRONG_USE = re.compile(
    r"unknown|unrecogni|illegal|invalid|unsupported|usage:|no |not |missing|requires?|needs|syntax|unexpected|must"
    r"|cannot|error|expected|unmatched|bad |ambiguous|denied|outside|could",
    re.IGNORECASE,
)


def classify(
    tool: str,
    arguments: Mapping[str, Any],
    text: str,
    is_error: bool | None,
    *,
    before: SessionState | None = None,
    extra_rules: Iterable[FailureRule] = (),
) -> Verdict:
    """Return the verdict on one result of a call.

    Args:
        tool: The name of the tool.
        arguments: The arguments of the call.
        text: The result.
        is_error: The error flag in the log, or None if the format has none. Then only clear messages count as failures.
        before: What the session had shown before the call. It may excuse the model.
        extra_rules: Rules that are tried before the built-in ones.
    """
    view, channel = CleanedText.of(text), tool_channel(tool)
    # Many rules require the message to concern something in the call, so calls without a command are converted to text.
    call_text = command_text(tool, arguments) or f"{tool} {plain_name(tool)} {' '.join(map(str, arguments))}"
    result = _ToolResult(
        view,
        channel,
        Command.of(call_text),
        is_error,
        tuple(extra_rules),
        may_be_soft=is_shell(tool),
        is_edit=is_edit(tool),
    )
    verdict = result.verdict()
    return verdict if before is None else _revise_blame(verdict, tool, arguments, text, before)


@dataclass(frozen=True)
class _ToolResult:
    """A result, with the properties of its call that the rules need."""

    view: CleanedText
    channel: Channel
    command: Command
    is_error: bool | None
    extra_rules: tuple[FailureRule, ...]
    may_be_soft: bool
    """Whether the tool is a shell, whose output may contain any text."""
    is_edit: bool

    def verdict(self) -> Verdict:
        """Return the verdict of the first group with a matching rule.

        If no rule matches, the kind is `other` for a call that is marked as failed; any other call counts as
        successful.
        """
        if self.is_error is False and self.channel != "shell":
            return _no_failure("the log says that it worked")
        verdict = self._first_match(self.extra_rules) or self._classify_harness_message()
        if verdict is None and not (self.view.is_tagged and self.channel == "shell"):
            verdict = self._classify_command() if self.channel == "shell" else self._classify_tool_result()
        if verdict is not None:
            return verdict
        if self.is_error is True or self._starts_with_error():
            return Verdict("other", "unknown", 0.3, (0, 0), False, "it failed, and no rule knows why")
        return _no_failure("nothing in it says that it failed")

    def _starts_with_error(self) -> bool:
        """Return whether the text of a tool without an error flag begins with a label such as "Error: "."""
        return self.channel == "other" and self.is_error is None and self.view.is_labelled

    def _classify_harness_message(self) -> Verdict | None:
        """Return a verdict if the user or the harness refused the call, or if the harness could not run it."""
        if self.is_error is False and not self.view.is_tagged:
            return None
        verdict = self._first_match(REFUSALS) or self._classify_invalid_call()
        # Nothing was run, so the message cannot be output from a command: never soft.
        return None if verdict is None else replace(verdict, is_soft=False)

    def _classify_invalid_call(self) -> Verdict | None:
        """Return a verdict if the tool does not exist or the arguments violate its schema."""
        if self.channel == "shell" and not self.view.is_tagged:
            # If the command was run, these words may be part of its output.
            was_run = self._nonzero_exit_span is not None or (
                self.command.is_display_only and len(self.view.text) > _MAX_MESSAGE
            )
            return None if was_run else self._first_match(TOOL_NAME) or self._first_match(HARNESS_SENTENCES)
        if self.channel == "other" and self.is_error is None and not self.view.is_labelled:
            is_message = len(self.view.text) < _MAX_MESSAGE
            return self._first_match((*TOOL_NAME, *HARNESS_SENTENCES)) if is_message else None
        if self.channel == "file" and not self._may_be_tool_message:
            return None
        rules = (*TOOL_NAME, *HARNESS_SENTENCES, *FILE_ARGUMENTS, *(() if self.view.is_tagged else SERVER_ARGUMENTS))
        return self._first_match(rules)

    @property
    def _may_be_tool_message(self) -> bool:
        """Whether the text may be a file tool's own message, rather than the content of a file that it read."""
        if self.is_error is True or self.view.is_tagged or self.view.is_labelled:
            return True
        if len(self.view.text) >= _MAX_FILE_MESSAGE:
            return False
        return self.is_edit or _TOOL_MESSAGE.match(self.view.text) is not None

    def _classify_tool_result(self) -> Verdict | None:
        """Return the verdict on the result of a non-shell tool, or None if its text is not an error message."""
        if self.channel == "other":
            is_message = self.is_error is True or self.view.is_labelled
            if not is_message:
                return None
            return self._first_match(OTHER_TOOLS) or self._first_match(READS) or self._first_match(MISUSES)
        if not self._may_be_tool_message:
            return None
        is_message = self.is_error is True or self.view.is_tagged or self.view.is_labelled
        verdict = self._first_match(TOOL_FAULTS) if is_message else None
        verdict = verdict or (self._first_match(EDITS) if self.is_edit else None)
        # An edit tool may show the new text of the file, in which the rules for reading tools would find false matches.
        is_message = is_message or _TOOL_MESSAGE.match(self.view.text) is not None
        return verdict or (self._first_match((*READS, *MISUSES)) if is_message else None)

    def _classify_command(self) -> Verdict | None:
        """Return a verdict on a shell command's output, trying the groups in the order of the module docstring."""
        # Fast path for most successful results, before any pattern is tried.
        if self.is_error is not True and self.view.text.isascii() and not self.view.has_any(_FAILURE_WORDS):
            return None
        verdict = self._first_match(WITHHELD)
        verdict = verdict or (self._classify_wrong_use() if self._may_be_wrong_use else None)
        if verdict is not None:
            return verdict
        if self.command.is_display_only:
            return self._classify_display_command()
        # `grep x || true` expects failure, so neither the machine nor a slip explains it.
        is_expected = not self._has_failed and self.command.tolerates_failure
        verdict = (
            self._classify_work_failure()
            or (None if is_expected else self._classify_environment_failure())
            or self._match_outcome(PROGRAMS)
        )
        verdict = verdict or self._first_match(PATCHES) or (None if is_expected else self._classify_slip())
        return verdict or (self._unexplained_failure() if self._has_failed else None)

    def _classify_wrong_use(self) -> Verdict | None:
        """Return a verdict if the first or last lines show that the command could not work as typed."""
        ends = replace(self, view=self.view.first_and_last_lines(_NUM_END_LINES))
        verdict = ends._first_match(_WRONG_USE) or ends._first_match(rules_for_command(self.command))
        if verdict is None:
            return None
        # Some tools escape every exclamation mark, regardless of quotes: not the model's error.
        if verdict.kind == "shell_syntax" and "\\!" in self.view.text and "\\!" not in self.command.text:
            return None
        begin = self.view.position_from_original(verdict.span[0])
        text_before, message = self.view.text[:begin], self.view.text[begin:]
        if _starts_with_file_position(message):
            return None
        if verdict.kind != "shell_syntax" and _follows_failure(text_before, self.command):
            return None
        if self._has_failed or not self.may_be_soft:
            return verdict
        # The exit status may come from another command, so the message counts only if the output begins with it.
        if text_before.strip():
            return None
        return replace(verdict, confidence=max(verdict.confidence, _HIDDEN_CONFIDENCE))

    @property
    def _may_be_wrong_use(self) -> bool:
        """Whether wrong use is possible: the call failed, has no status, or its status comes from another command."""
        if self._has_failed or not self.may_be_soft:
            return True
        first_line = self.view.text.lstrip()[:200].partition("\n")[0]
        is_hidden = self.command.hides_exit_status if self.is_error is False else not self.command.is_display_only
        return is_hidden and _HINTS_AT_WRONG_USE.search(first_line) is not None

    def _classify_slip(self, is_own_line: Callable[[str], bool] | None = None) -> Verdict | None:
        """Return a verdict on a slip by the model. The model is not blamed if the rest of the result excuses it."""
        verdict = self._first_match(SLIPS, is_own_line)
        return None if verdict is None else _check_slip_excuses(verdict, self.view, self.command)

    def _classify_environment_failure(self) -> Verdict | None:
        """Return a verdict if the machine or the network caused the failure."""
        verdict = self._match_outcome(MACHINE)
        if verdict is not None and verdict.kind == "os_permission" and not self._has_failed:
            # Test output may contain "permission denied", so the message must come from a program in the command.
            return self._match_outcome(MACHINE, self.command.is_own_message)
        return verdict

    def _classify_display_command(self) -> Verdict | None:
        """Return a verdict on a command such as `cat`: only messages that begin with its name count."""
        is_own_line = self.command.is_own_message
        # A message before the end concerns one of several files, such as an unreadable one; the others were shown.
        has_succeeded = not self._has_failed and not is_own_line(self.view.last_line)
        verdict = (None if has_succeeded else self._first_match(MACHINE, is_own_line)) or self._classify_slip(
            is_own_line
        )
        is_search = any(name in ("grep", "rg") for name, _ in self.command.programs)
        # grep exits with status 1 if nothing matched.
        has_no_matches = self.is_error is not True and is_search
        return verdict or (self._unexplained_failure() if self._has_failed and not has_no_matches else None)

    def _classify_work_failure(self) -> Verdict | None:
        """Return a verdict on failed tests, checks or builds, including those that could not run without a package."""
        missing = self._match_outcome(NOT_INSTALLED)
        verdict = self._match_outcome(TESTS) or self._match_outcome(CHECKS) or self._match_outcome(BUILDS)
        if missing is not None:
            # Tests that cannot even be collected fail like other tests, but not because of the work.
            return replace(missing, kind="test_failure") if verdict and verdict.kind == "test_failure" else missing
        return verdict

    def _match_outcome(
        self, rules: Iterable[FailureRule], is_own_line: Callable[[str], bool] | None = None
    ) -> Verdict | None:
        """Return the verdict of the first matching rule, preferring rules that do not blame the model.

        If nothing marks the call as failed, only failures with which this command can end are considered.
        """
        return self._first_match(rules if self._has_failed else self._possible_outcomes(rules), is_own_line)

    def _possible_outcomes(self, rules: Iterable[FailureRule]) -> list[FailureRule]:
        """Return the rules that are consistent with how this command can end."""
        runs_commands = self.may_be_soft
        return [rule for rule in rules if _may_be_outcome(rule, self.command, self.view, runs_commands=runs_commands)]

    @cached_property
    def _nonzero_exit_span(self) -> tuple[int, int] | None:
        """The span of the line that reports a nonzero exit code, or None if there is none."""
        return next(_EXIT_RULE.matches(self.view, self.command), None)

    @cached_property
    def _reports_exit_code(self) -> bool:
        """Whether the tool reports a nonzero exit code, in its first or last lines around the output."""
        if self._nonzero_exit_span is None:
            return False
        begin, end = self._nonzero_exit_span
        text = self.view.text
        num_lines_before, num_lines_after = text.count("\n", 0, begin), text.rstrip().count("\n", end)
        return min(num_lines_before, num_lines_after) <= _MAX_ENVELOPE_LINES

    @property
    def _has_failed(self) -> bool:
        """Whether the log or an exit code marks the call as failed."""
        return self.is_error is True or self._nonzero_exit_span is not None

    def _is_entire_output(self, span: tuple[int, int]) -> bool:
        """Return whether the message is the whole result and the log has no error flag.

        Such a message was not merely displayed.
        """
        return self.is_error is None and _is_entire_output(span, self.view)

    def _unexplained_failure(self) -> Verdict:
        """Return the verdict on a failed command that no rule explains."""
        reason = "a command failed without a reason that a rule knows"
        span = self.view.to_original(*(self._nonzero_exit_span or (0, 0)))
        return Verdict("nonzero_exit", "task", 0.5, span, self._is_soft, reason)

    @property
    def _is_soft(self) -> bool:
        """Whether the log does not mark a shell result as an error, so the text may have been merely displayed."""
        return self.may_be_soft and self.is_error is not True

    def _first_match(
        self, rules: Iterable[FailureRule], is_own_line: Callable[[str], bool] | None = None
    ) -> Verdict | None:
        """Return the verdict of the first matching rule, preferring rules that do not blame the model."""
        model_verdict: Verdict | None = None
        for failure_rule in rules:
            if self.channel not in failure_rule.channels:
                continue
            span = next(failure_rule.matches(self.view, self.command, is_own_line), None)
            if span is None:
                continue
            # A refusal by the user or the harness is the whole result, so it is never soft.
            is_soft = self._is_soft and failure_rule.whose not in ("user", "harness")
            is_sure = not is_soft or self._reports_exit_code or self._is_entire_output(span)
            confidence = failure_rule.confidence * (1.0 if is_sure else _SOFT_CONFIDENCE)
            verdict = Verdict(
                failure_rule.kind,
                failure_rule.whose,
                confidence,
                self.view.to_original(*span),
                is_soft,
                f"rule {failure_rule.kind}",
            )
            if failure_rule.whose != "model":
                return verdict
            model_verdict = model_verdict or verdict
        return model_verdict


def _no_failure(reason: str) -> Verdict:
    return Verdict("", "unknown", 0.0, (0, 0), False, reason)


# ---- The rest of the result: does it excuse the model? ---------------------------------------------------------------

# A position in a file, as compilers and linters print it.
# "src/a.py:12"; "in file a b.c:3:1: expected"; not "grep: a.py: No such file"
_FILE_POSITION = re.compile(r"\s*[\w./+-]{1,200}\.\w{1,8}:\d+|.{0,200}\.\w{1,8}:\d+:\d+:")
# "make; ls"; "make || true"; not "make && ls"
_INDEPENDENT_COMMANDS = re.compile(r"[;\n]|\|\|")
# What SWE-agent's shell prints after every command: "(Open file: n/a)"; "bash-$ "
_PROMPT = re.compile(r"^\(Open file: .{0,400}\)$|^\(Current directory: .{0,400}\)$|^bash-\$\s*$", re.MULTILINE)
# An empty stream of an envelope: "Stdout: (empty)"; not "Error: no such file"
_EMPTY_STREAM = re.compile(r"^(?:Error|Stderr|Output|Stdout): (?:\(none\)|\(empty\))?\s*$", re.MULTILINE)
# Commands that are used to check whether a path exists: a missing path is a valid answer.
# "ls: a.py: No such file or directory"; not "cat: a.py: No such file or directory"
_PROBE_MESSAGE = re.compile(r"\s*(?:/\S{1,40}/)?(?:ls|find|stat|test|\[|file|du|lsd|exa|gls): ")
# Some envelopes repeat the command: "Command: make test"
_ECHOED_COMMAND = re.compile(r"^Command: .*", re.MULTILINE)
# "husky - pre-commit script failed"; not "hooked"
_HOOK = re.compile(r"husky|pre-commit|lint-staged|commit-msg|\bhook\b", re.IGNORECASE)
# A failed installation, download or build causes later steps to fail.
# "E: Unable to locate package"; "fatal: not a git repository"; not "1 error in the log"
_EARLIER_FAILURE = re.compile(
    r"^(?:E: |W: |Err:|Error|ERROR|error:|curl: \(|wget: |fatal:|npm ERR|Traceback|╷|│ Error|Warning: No )"
    r"|unable to locate"
    r"|not created successfully|is not compatible|no formula|could not (?:get lock|open lock)|returned error: \d"
    r"|pull access denied|command not found|not found in",
    re.MULTILINE | re.IGNORECASE,
)


def _check_slip_excuses(verdict: Verdict, view: CleanedText, command: Command) -> Verdict:
    """Return the verdict on a slip, without blame on the model if the result excuses it.

    Excuses are a git message that may come from a hook, an earlier failure in the command, a command that only checks
    whether a path exists, and a path that the same result shows.
    """
    if verdict.kind == "git_state":
        by_hook = _HOOK.search(view.text) is not None
        return replace(verdict, blame="unknown", reason="a hook may have said this") if by_hook else verdict
    begin = view.position_from_original(verdict.span[0])
    before = _EMPTY_STREAM.sub("", _ECHOED_COMMAND.sub("", view.text[:begin]))
    message = view.text[begin : begin + 300].partition("\n")[0]
    if _EARLIER_FAILURE.search(before) is not None:
        return replace(verdict, blame="unknown", reason="something else in the command had failed before")
    if verdict.kind == "shell_path_missing" and _PROBE_MESSAGE.match(message) is not None:
        return replace(verdict, blame="task", reason="a look whether the path is there")
    is_listed = any(is_path(word) and word in before and word in message for word in command.words)
    return replace(verdict, blame="unknown", reason="the same result shows this path") if is_listed else verdict


def _follows_failure(before: str, command: Command) -> bool:
    """Return whether an earlier command in the same line had failed, and this one ran regardless."""
    return _INDEPENDENT_COMMANDS.search(command.text) is not None and _EARLIER_FAILURE.search(before) is not None


def _starts_with_file_position(line: str) -> bool:
    """Return whether a line begins with a file position.

    Then it is a compiler message, not a message about arguments.
    """
    return _FILE_POSITION.match(line) is not None


def _is_entire_output(span: tuple[int, int], view: CleanedText) -> bool:
    """Return whether the result consists of this message and at most a shell prompt."""
    rest = view.text[: span[0]] + view.text[span[1] :]
    return not _PROMPT.sub("", rest).strip()


# ---- Logs without an error flag: is this how the command ended, or something it printed along the way? ---------------

# "Exit code: 1"; "Process exited with code 127"; "<returncode>2</returncode>"; not "Exit code: 0"
_EXIT_RULE = rule(
    "nonzero_exit",
    r"^(?:Error: )?(?:exit (?:code|status)|(?:command |process )?(?:exited|finished|failed) with (?:exit )?(?:code"
    r"|status))"
    r"[ :=]+\(?[1-9]\d{0,2}\b|^<returncode>[1-9]|^\[?(?:The )?command .{0,80}exit code:? [1-9]",
    *("exit", "returncode"),
    channels="shell",
    confidence=0.7,
)
# For each kind of failure, the commands that can end in it. Without an error flag, other failures are ignored.
_FAILING_COMMANDS = {
    # "python -m pytest -q"; "npm test"; not "ls latest"
    "test_failure": re.compile(
        r"\b(?:py\.?test|unittest|tox|nox|jest|vitest|mocha|rspec|phpunit|ctest|tests?|spec|check)\b"
    ),
    # "ruff check ."; not "ls"
    "lint_or_typecheck": re.compile(
        r"\b(?:tsc|eslint|ruff|mypy|flake8|pylint|pyright|credo|dialyzer|clippy|lint|rubocop|edit)\b"
    ),
    # "cargo build"; not "ls"
    "compile_error": re.compile(
        r"\b(?:build|compile|make|cmake|gcc|g\+\+|clang|cargo|go|javac|tsc|webpack|vite|mvn|gradle)\b"
    ),
    # "python3.11 app.py"; "./run"; not "ls"
    "python_exception": re.compile(r"\b(?:python[\d.]*|node|ruby|php|java|deno|bun|uv|poetry)\b|\./"),
    # "git clone https://example.invalid/a.git"; not "ls"
    "network": re.compile(
        r"\b(?:curl|wget|git|pip|npm|yarn|pnpm|cargo|docker|apt|apt-get|ssh|gh|go|clone|pull|push|install)\b"
    ),
    # Any command may time out: "ls"
    "timeout": re.compile(r""),
    # Any command may lack permissions: "ls"
    "os_permission": re.compile(r""),
    # "git commit -m x"; not "ls .gitignore.d"
    "git_state": re.compile(r"\bgit\b"),
}
# Every English failure message without a flag contains one of these; most output contains none. Output with non-ASCII
# characters may be in another language and is always searched.
_FAILURE_WORDS = (
    *("error", "fail", "no such", "not found", "denied", "fatal", "exit", "returncode", "exception", "traceback"),
    *("cannot", "can't", "unable", "timed out", "too long", "could not", "not ", "nothing", "reject", "problem"),
    *("is a directory", "refused", "reformat", "conflict", "ignored", "killed", "unknown", "timeout", "usage: "),
)
# "Exit code: 0"; "<returncode>0</returncode>"; not "Exit code: 1"
_EXITED_WITH_0 = re.compile(
    r"^(?:Exit code:? 0\b|<returncode>0<|Process exited with code 0\b)", re.IGNORECASE | re.MULTILINE
)
# The beginning of a failure message from a tool that reads or searches.
# "File not found: a.py"; "ENOENT: no such file or directory"; not "def f(): ..."
_TOOL_MESSAGE = re.compile(
    r"\s*(?:File \S{1,300} (?:not found|does not exist)|File (?:does not exist|not found)|ENOENT|EISDIR"
    r"|No such (?:file|tool)"
    r"|(?:The )?path \S{1,300} (?:does not exist|is a directory)|Invalid `|Directory \S{1,300} (?:not found"
    r"|does not exist)"
    r"|unsupported call"
    r"|Unknown tool|failed to parse|Tool \S{1,100} (?:is not|not found|does not)|The user|\[Request|File (?:size"
    r"|content)|Error validating"
    r"|The tool execution failed)",
    re.IGNORECASE,
)


def _may_be_outcome(failure_rule: FailureRule, command: Command, view: CleanedText, *, runs_commands: bool) -> bool:
    """Return whether the command may have ended with the failure that this rule describes."""
    cause, kind, blame = _FAILING_COMMANDS.get(failure_rule.kind), failure_rule.kind, failure_rule.whose
    # Program output often contains words from failed tests and exceptions, so only rules of higher confidence apply.
    min_confidence = 0.85 if kind in ("test_failure", "python_exception") and blame == "task" else 0.7
    if cause is None or failure_rule.confidence < min_confidence:
        return False
    if blame == "env" and kind != "timeout" and _EXITED_WITH_0.search(view.text):
        return False
    return not runs_commands or cause.search(command.text) is not None


# ---- Earlier results in the session: do they excuse the model? -------------------------------------------------------

# Reasons are stored in sites.jsonl and compared, so they are data.
_BUILD_HAD_FAILED = "the step that makes this path had failed"
# "dist/app.js"; not "distance/app.js"
_BUILD_OUTPUT = re.compile(r"(?:^|/)(?:build|dist|target|out|bin|obj|\.next|node_modules|coverage|_build)/")
# "bash: line 1: cd: src: No such file or directory"; "can't cd to src"; not "abcd: src"
_CHANGES_FOLDER = re.compile(r"(?:^|[\s:)])cd(?::\d+)?: |can't cd to|Set-Location", re.IGNORECASE)
# "cat $FILE" -> "FILE"; "cat ${FILE}" -> "FILE"
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w{0,60})\}?")
# Kinds of failure that an empty variable in the command can explain.
_ABOUT_ARGUMENTS = frozenset(
    ["shell_path_missing", "wrong_folder", "usage_error", "git_state", "api_misuse", "is_directory"]
)
# Go programs print full paths: "open /repo/a.go: no such file or directory" -> "/repo/a.go"
_PATH_IN_MESSAGE = re.compile(r"(?:stat|lstat|open|chdir) (/\S{1,400}): ")
# "bash: line 1: ./run: No such file or directory"; "/bin/sh: 1: run: not found"
_SHELL_MESSAGE = re.compile(r"\s*(?:/\S*/)?(?:bash|sh|zsh|dash)\b")


def _revise_blame(
    verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState
) -> Verdict:
    """Return the verdict, without blame on the model if the session shows that the model made no error."""
    if verdict.blame != "model":
        return verdict
    if verdict.kind in _ABOUT_ARGUMENTS and _has_empty_variable(verdict, tool, arguments, text, before):
        return replace(verdict, blame="unknown", reason="a variable that had been set was empty")
    message = text[slice(*verdict.span)]
    if verdict.kind == "shell_path_missing" and _is_in_another_folder(tool, arguments, message, before):
        return replace(verdict, kind="wrong_folder", reason="the session had shown this path from another folder")
    path = path_argument(arguments)
    if (
        verdict.kind == "file_not_found"
        and path
        and not path.startswith(("/", "~"))
        and before.was_shown_from_other_folder(path)
    ):
        return replace(verdict, kind="wrong_folder", reason="the session had shown this path from another folder")
    reason = next(_find_excuses(verdict, tool, arguments, text, before), None)
    if reason is None:
        return verdict
    return replace(verdict, blame="task" if reason == _BUILD_HAD_FAILED else "unknown", reason=reason)


def _find_excuses(
    verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState
) -> Iterator[str]:
    """Yield the reasons to excuse the model, based on what the session had shown before the call.

    If a path was shown earlier and is missing now, the model did not make it up. If a tool or command worked before, it
    exists. If text was copied from the file as last read, it was copied correctly. In these cases the actual cause
    cannot be determined.
    """
    message = text[slice(*verdict.span)]
    kind, path = verdict.kind, path_argument(arguments)
    command = Command.of(command_text(tool, arguments))
    if kind == "tool_not_found" and tool in before.tools:
        yield "this tool had answered before"
    if kind == "cmd_not_found" and any(name in before.programs and name in message for name, _ in command.programs):
        yield "this command had worked before"
    if kind == "file_not_found" and path and before.has_shown(path):
        yield "the session had shown this path"
    if kind == "shell_path_missing" and _CHANGES_FOLDER.search(message) is None:
        paths = [
            word for word in command.words if word in message and is_path(word) and _mentions_exact_path(message, word)
        ]
        if any(before.has_shown(typed_path) for typed_path in paths):
            yield "the session had shown this path"
        # A failed build also explains why a program that the shell was to run is missing.
        is_product = any(_BUILD_OUTPUT.search(typed_path) or _SHELL_MESSAGE.match(message) for typed_path in paths)
        if before.build_failed and is_product:
            yield _BUILD_HAD_FAILED
    if kind == "edit_not_read" and path and before.has_touched(path):
        yield "the session had read or written this file"
    if kind == "output_too_large" and path and not before.has_failed_on(path):
        yield "nothing had shown how large this file is"
    if kind == "api_misuse" and any(before.has_shown(url) for url in _url_arguments(arguments)):
        yield "the session had shown this address"
    if kind == "usage_error" and any(before.has_shown(name) for name in _typed_task_names(message, command)):
        yield "the session had shown this name"
    if (
        kind == "edit_no_match"
        and path
        and any(_was_shown_text(before, path, arguments.get(key)) for key in OLD_TEXT_KEYS)
    ):
        yield "the text was copied from the file as it was last read"


def _mentions_exact_path(message: str, path: str) -> bool:
    """Return whether the message concerns this path, rather than a path below it."""
    # For the path src: "cat: src: No such file"; not "cat: src/a.py: No such file"
    return re.search(rf"{re.escape(path)}(?![\w/-])", message) is not None


def _is_in_another_folder(tool: str, arguments: Mapping[str, Any], message: str, before: SessionState) -> bool:
    """Return whether the typed relative path exists, but not in the shell's current folder."""
    command = Command.of(command_text(tool, arguments))
    missing_path = _PATH_IN_MESSAGE.search(message)
    words = (word.strip("'\"").removeprefix("./").rstrip("/.") for word in command.text.split())
    is_about_paths = missing_path or _CHANGES_FOLDER.search(message)
    typed_paths = {word for word in words if word in message and (is_path(word) or is_about_paths)}
    for path in typed_paths:
        if path.startswith(("/", "~")) or not path:
            continue
        if missing_path is not None and missing_path[1].endswith(f"/{path}"):
            folder = missing_path[1].removesuffix(f"/{path}")
            if _folder_end_overlaps_path_start(folder, path):
                return True
        if before.was_shown_from_other_folder(path) or (_CHANGES_FOLDER.search(message) and before.has_shown(path)):
            return True
    return False


def _has_empty_variable(
    verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState
) -> bool:
    """Return whether a variable in the command was empty, although this command or an earlier one had set it.

    A message about a path shows what remained of the word: `cat $DIR/a.py` fails on `/a.py`. Messages about options and
    names do not show it, so for these any variable counts.
    """
    command = command_text(tool, arguments)
    variables = {
        name
        for name in _VARIABLE.findall(command)
        if _assigns_variable(name, command) or before.appeared_in_command(f"{name}=")
    }
    if not variables:
        return False
    if verdict.kind not in ("shell_path_missing", "wrong_folder", "is_directory"):
        return True
    words = {word.strip("'\"") for word in command.split() if variables.intersection(_VARIABLE.findall(word))}
    remainders = {_VARIABLE.sub("", word).strip("'\"") for word in words}
    message = re.split(r"[\s:'\"`‘’]+", text[slice(*verdict.span)])
    return any(word in message for word in remainders if word) or "" in remainders


def _assigns_variable(name: str, command: str) -> bool:
    # For DIR: "DIR=src; ls $DIR"; "for DIR in a b"; "read -r DIR"; not "ls $DIR"
    return re.search(rf"(?:^|[\s;&(]){name}=|\bfor {name} in\b|\bread (?:-\w+ )*{name}\b", command) is not None


def _folder_end_overlaps_path_start(folder: str, path: str) -> bool:
    """Return whether a folder ends with the leading folders of a path: after `cd src`, `cat src/a.py` fails."""
    names = path.split("/")
    return any(folder.endswith("/" + "/".join(names[:number])) for number in range(1, len(names) + 1))


def _url_arguments(arguments: Mapping[str, Any]) -> list[str]:
    return [
        value for value in arguments.values() if isinstance(value, str) and value.startswith(("http://", "https://"))
    ]


def _typed_task_names(message: str, command: Command) -> list[str]:
    """Return the task names, such as `test:unit`, that the message quotes from the command."""
    words = (word.strip("'\"`.,:;") for word in message.split())
    return [
        word for word in words if len(word) > 2 and not word.startswith("-") and word in command.words and ":" in word
    ]


def _was_shown_text(before: SessionState, path: str, old_text: Any) -> bool:
    """Return whether the text to replace is in the file as last read, ignoring the view's line numbers."""
    return (
        isinstance(old_text, str)
        and bool(old_text.strip())
        and old_text in LINE_NUMBER_PREFIX.sub("", before.read.get(path, ""))
    )
