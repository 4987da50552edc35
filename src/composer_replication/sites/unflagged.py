"""Where a log has no flag: what says that a call failed, and which failures can be how a command ended.

Without a flag a failure has to be the outcome of what was run, not something that was printed on the way.
"""

from __future__ import annotations

import re

from composer_replication.actions.shell.command import Command
from composer_replication.sites.rule import FailureRule, rule
from composer_replication.sites.view import View

EXIT = rule(
    "nonzero_exit",
    r"^(?:Error: )?(?:exit (?:code|status)|(?:command |process )?(?:exited|finished|failed) with (?:exit )?(?:code"
    r"|status))"
    r"[ :=]+\(?[1-9]\d{0,2}\b|^<returncode>[1-9]|^\[?(?:The )?command .{0,80}exit code:? [1-9]",
    *("exit", "returncode"),
    channels="shell",
    confidence=0.7,
)
_RUNS = {
    "test_failure": re.compile(
        r"\b(?:py\.?test|unittest|tox|nox|jest|vitest|mocha|rspec|phpunit|ctest|tests?|spec|check)\b"
    ),
    "lint_or_typecheck": re.compile(
        r"\b(?:tsc|eslint|ruff|mypy|flake8|pylint|pyright|credo|dialyzer|clippy|lint|rubocop|edit)\b"
    ),
    "compile_error": re.compile(
        r"\b(?:build|compile|make|cmake|gcc|g\+\+|clang|cargo|go|javac|tsc|webpack|vite|mvn|gradle)\b"
    ),
    "python_exception": re.compile(r"\b(?:python[\d.]*|node|ruby|php|java|deno|bun|uv|poetry)\b|\./"),
    "network": re.compile(
        r"\b(?:curl|wget|git|pip|npm|yarn|pnpm|cargo|docker|apt|apt-get|ssh|gh|go|clone|pull|push|install)\b"
    ),
    "timeout": re.compile(r""),
    "os_permission": re.compile(r""),
    "git_state": re.compile(r"\bgit\b"),
}
# One of these is in every English message of a failure that carries no flag; most output has none of them.
TROUBLE = (
    *("error", "fail", "no such", "not found", "denied", "fatal", "exit", "returncode", "exception", "traceback"),
    *("cannot", "can't", "unable", "timed out", "too long", "could not", "not ", "nothing", "reject", "problem"),
    *("is a directory", "refused", "reformat", "conflict", "ignored", "killed", "unknown", "timeout", "usage: "),
)
_WORKED = re.compile(r"^(?:Exit code:? 0\b|<returncode>0<|Process exited with code 0\b)", re.IGNORECASE | re.MULTILINE)
# Sentences with which tools that read and find begin a failure, where the format has no flag.
FULL_MESSAGE = re.compile(
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


def may_end_in(each: FailureRule, command: Command, view: View, *, runs_commands: bool) -> bool:
    """Whether this failure can be how the command ended."""
    runs = _RUNS.get(each.kind)
    least = 0.85 if each.kind in ("test_failure", "python_exception") and each.whose == "task" else 0.7
    if runs is None or each.confidence < least:
        return False
    if each.whose == "env" and each.kind != "timeout" and _WORKED.search(view.text):
        return False
    return not runs_commands or runs.search(command.text) is not None
