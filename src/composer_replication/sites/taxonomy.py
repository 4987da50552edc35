"""What can go wrong with a tool call, and whose doing it usually is. Only a failure that is the model's may be taught.

The kinds are those of the design's table, in its order, with what the labelled set and real logs asked for besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from composer_replication.types import Blame

_TABLE: tuple[tuple[str, Blame, str], ...] = (
    ("user_rejected", "user", "the user refused the call"),
    ("user_corrected", "model", "the user refused the call, or stopped it, and said what to do instead"),
    ("user_interrupt", "user", "the user stopped the agent"),
    ("permission_denied", "harness", "the agent's own permission rules refused the call"),
    ("hook_blocked", "harness", "a hook refused or failed the call"),
    ("sibling_cancelled", "harness", "another call of the same turn failed, so this one was not run"),
    ("tool_not_found", "model", "no tool has this name"),
    ("input_validation", "model", "the arguments do not fit the tool's schema"),
    ("edit_not_read", "model", "a file was to be changed that had not been read"),
    ("edit_stale", "model", "a file was to be changed that had changed since it was read"),
    ("edit_no_match", "model", "the text to replace is not in the file"),
    ("edit_ambiguous", "model", "the text to replace is in the file more than once"),
    ("edit_noop", "model", "the replacement is what was there"),
    ("file_not_found", "model", "a file tool was given a path that does not exist"),
    ("is_directory", "model", "a folder was given where a file is needed"),
    ("output_too_large", "model", "more was asked for than a result can hold"),
    ("timeout", "env", "it took too long"),
    ("network", "env", "something outside could not be reached, or refused"),
    ("cmd_not_found", "model", "the shell knows no such command"),
    ("shell_path_missing", "model", "a shell command names a path that does not exist"),
    ("wrong_folder", "model", "a path that is there, but not from the folder the shell stands in"),
    ("usage_error", "model", "a program was given an option, an argument or a name that it does not have"),
    ("shell_syntax", "model", "the shell, or a program written on the command line, cannot read what was typed"),
    ("api_misuse", "model", "a service has no such endpoint, or does not take what was sent"),
    ("os_permission", "env", "the operating system refused"),
    ("git_state", "model", "git cannot do this in the state the repository is in"),
    ("test_failure", "task", "tests fail: that is the work"),
    ("lint_or_typecheck", "task", "a linter or type checker found something: that is the work"),
    ("compile_error", "task", "it does not compile: that is the work"),
    ("python_exception", "task", "a program ended in an exception"),
    ("nonzero_exit", "task", "a command failed without a reason that a rule knows"),
    ("other", "unknown", "it failed, and no rule knows why"),
)

KINDS: Mapping[str, str] = MappingProxyType({kind: meaning for kind, _, meaning in _TABLE})
USUAL_BLAME: Mapping[str, Blame] = MappingProxyType({kind: blame for kind, blame, _ in _TABLE})
BLAMES: tuple[Blame, ...] = ("model", "harness", "task", "user", "env", "unknown")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a result is. Where it is no failure, `kind` is empty and `reason` says what spoke against one."""

    kind: str
    blame: Blame
    confidence: float
    span: tuple[int, int]
    is_soft: bool
    reason: str

    @property
    def is_failure(self) -> bool:
        return self.kind != ""
