"""Define failure rules, the kinds of failure with their usual blame, and the verdict on a result.

A rule describes the messages of one kind of failure in the results of some tools. Create custom rules with `rule()` and
register them with `register_rule()`; they are tried before the built-in ones.

    register_rule(rule("network", r"^broker unavailable", "broker", channels="shell", where="start"))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from composer_replication.errors import InputError, explain
from composer_replication.sites.actions.shell_command import Command
from composer_replication.sites.actions.tools import Channel
from composer_replication.sites.cleaned_text import CleanedText
from composer_replication.types import Blame

MatchPosition = Literal["start", "line", "end"]
CHANNELS: tuple[Channel, ...] = ("shell", "file", "other")
LineFilter = Callable[[str], bool]
# Maximum number of characters in a message; the limit bounds the time a pattern takes.
_MAX_LINE = 1000
_MAX_TAIL = 300
_MAX_EVIDENCE = 300
# A blank line, the closing tag of an envelope, or the end of the text: "\n\n"; "</error>"
_MESSAGE_END = re.compile(r"\n\s*\n|\s*</|\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """A rule that recognizes the messages of one kind of failure in the results of some tools.

    The fields are validated on creation. An invalid field raises InputError.
    """

    kind: str
    pattern: re.Pattern[str]
    needles: tuple[str, ...]
    """Lower-case words. Every match contains at least one, so searching for them first makes most rules cheap."""
    channels: tuple[Channel, ...] = ("shell", "file", "other")
    where: MatchPosition = "line"
    """Where the pattern is tried: on every line with a needle, at the start of the message, or near the end."""
    blame: Blame | None = None
    """Who is to blame. None: the usual blame for this kind."""
    confidence: float = 0.9
    accept: Callable[[re.Match[str], Command], bool] | None = None
    """A final check of a match, which can compare it with the command that was run."""

    def __post_init__(self) -> None:
        if self.kind not in USUAL_BLAME and self.blame is None:
            expected = f"one of {', '.join(USUAL_BLAME)}, or a new kind with `blame` set"
            raise InputError(explain("rule, kind", got=repr(self.kind), expected=expected))
        if self.blame is not None and self.blame not in BLAMES:
            raise InputError(explain("rule, blame", got=repr(self.blame), expected=f"one of {', '.join(BLAMES)}"))
        if not 0 < self.confidence <= 1:
            raise InputError(
                explain("rule, confidence", got=self.confidence, expected="a number above 0 and at most 1")
            )
        if not self.needles or any(needle != needle.lower() for needle in self.needles):
            raise InputError(
                explain(
                    "rule, needles", got=self.needles, expected="at least one lower-case word that every match contains"
                )
            )
        if self.pattern.flags & re.DOTALL:
            raise InputError(
                "rule, pattern: dot must not match a newline, or a match could join unrelated lines. Remove re.DOTALL."
            )

    @property
    def whose(self) -> Blame:
        """Who is to blame: the rule's own `blame`, or else the usual one for its kind."""
        return self.blame or USUAL_BLAME[self.kind]

    def matches(
        self, view: CleanedText, command: Command, is_own: LineFilter | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield the text spans that match this rule. If `is_own` is given, only lines that it accepts are searched."""
        if not view.has_any(self.needles):
            return
        for start, line in self._candidates(view):
            if is_own is not None and not is_own(line):
                continue
            match = self.pattern.match(line) if self.where == "start" else self.pattern.search(line)
            if match is not None and (self.accept is None or self.accept(match, command)):
                yield self._span(match, start)

    def _span(self, match: re.Match[str], offset: int) -> tuple[int, int]:
        """Return the span to show as evidence.

        If `where` is `line`, it is the whole line; otherwise it is the message up to its end.
        """
        if self.where == "line":
            return offset, offset + max(len(match.string.rstrip()), match.end())
        end = _MESSAGE_END.search(match.string, match.end())
        limit = min(len(match.string), match.start() + _MAX_EVIDENCE)
        return offset + match.start(), offset + max(match.end(), min(end.start() if end else limit, limit))

    def _candidates(self, view: CleanedText) -> Iterator[tuple[int, str]]:
        """Yield (start, text) for each part of the text on which the pattern is tried."""
        if self.where == "start":
            yield view.start, view.text[view.start : view.start + _MAX_LINE]
        elif self.where == "end":
            begin = max(0, len(view.text) - _MAX_TAIL)
            yield begin, view.text[begin:]
        else:
            yield from view.lines_with(self.needles)


def rule(
    kind: str,
    pattern: str,
    *needles: str,
    channels: str = "shell file other",
    where: MatchPosition = "line",
    ignore_case: bool = True,
    blame: Blame | None = None,
    confidence: float = 0.9,
    accept: Callable[[re.Match[str], Command], bool] | None = None,
) -> FailureRule:
    """Return a rule built from strings. `channels` is separated by blanks; `^` and `$` match at line boundaries."""
    words = channels.split()
    chosen = tuple[Channel, ...](channel for channel in CHANNELS if channel in words)
    # For example, r"^broker unavailable" matches "Broker unavailable: retry later".
    return FailureRule(
        kind=kind,
        pattern=re.compile(pattern, re.MULTILINE | (re.IGNORECASE if ignore_case else 0)),
        needles=needles,
        channels=chosen,
        where=where,
        blame=blame,
        confidence=confidence,
        accept=accept,
    )


_registered: list[FailureRule] = []


def register_rule(rule: FailureRule) -> None:
    """Register a rule, which is tried before the built-in rules and after all rules that were registered earlier."""
    if not isinstance(rule, FailureRule):
        raise InputError(explain("rule", got=type(rule).__name__, expected="a FailureRule, as returned by `rule(...)`"))
    _registered.append(rule)


def unregister_rule(rule: FailureRule) -> None:
    """Remove a rule that `register_rule` added. Raises InputError if it is not registered."""
    if rule not in _registered:
        raise InputError(explain("rule", got=rule.kind, expected="a registered rule"))
    _registered.remove(rule)


def registered_rules() -> tuple[FailureRule, ...]:
    """Return the registered rules, in the order in which they are tried."""
    return tuple(_registered)


# (kind, usual blame, meaning). Only failures caused by the model are trained on. Files, config keys and the hint
# templates use the kinds, so they are data.
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
    """The classification of one result. If it is not a failure, `kind` is empty and `reason` says why not."""

    kind: str
    blame: Blame
    confidence: float
    span: tuple[int, int]
    """The evidence: (start, end) in the original text of the result."""
    is_soft: bool
    """Whether the log does not mark the result as an error."""
    reason: str

    @property
    def is_failure(self) -> bool:
        return self.kind != ""
