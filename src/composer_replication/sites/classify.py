"""One result: did it fail, how, and whose doing was it.

Rules are tried in groups, and a group is tried only where its words can be meant: the harness's own messages where a
result starts; then, for a shell, the work (tests, linters, compilers) before the machine, programs after it, and the
model's slips last. Where rules of different blame agree, the model is the last to be blamed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.shell.command import Command
from composer_replication.actions.tools import Channel, channel_of, command_text, is_edit, is_shell, plain_name
from composer_replication.sites.excuses import reconsidered
from composer_replication.sites.rule import FailureRule
from composer_replication.sites.rules.files import EDITS, ELSEWHERE, FAULTS, PATCHES, READS
from composer_replication.sites.rules.harness import (
    FILE_ARGUMENTS,
    MISUSES,
    OWN_WORDS,
    REFUSALS,
    SERVER_ARGUMENTS,
    TOOL_NAME,
)
from composer_replication.sites.rules.machine import MACHINE, WITHHELD
from composer_replication.sites.rules.own_words import own_words
from composer_replication.sites.rules.services import SERVICES
from composer_replication.sites.rules.slips import SLIPS
from composer_replication.sites.rules.syntax import SYNTAX
from composer_replication.sites.rules.usage import USAGE
from composer_replication.sites.rules.work import BUILDS, CHECKS, MISSING, PROGRAMS, TESTS
from composer_replication.sites.surroundings import follows_trouble, is_all, names_a_place, weighed
from composer_replication.sites.taxonomy import Verdict as Verdict
from composer_replication.sites.unflagged import EXIT, FULL_MESSAGE, TROUBLE, may_end_in
from composer_replication.sites.view import View

_TYPED = (*USAGE, *SERVICES, *SYNTAX)
_SOFT_CONFIDENCE = 0.5
_HIDDEN_CONFIDENCE = 0.65
_ONE_MESSAGE = 600
_NEAR_AN_END = 12
_ENVELOPE_LINES = 4
_MAY_BE_TYPED = re.compile(
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
    """`is_error` is None where the format has no flag: then the text alone decides, and only clear cases count."""
    view, channel = View.of(text), channel_of(tool)
    # What the call itself says: a message about anything else is not about the call.
    call_text = command_text(tool, arguments) or f"{tool} {plain_name(tool)} {' '.join(map(str, arguments))}"
    result = _Result(
        view,
        channel,
        Command.of(call_text),
        is_error,
        tuple(extra_rules),
        may_be_soft=is_shell(tool),
        is_edit=is_edit(tool),
    )
    verdict = result.verdict()
    return verdict if before is None else reconsidered(verdict, tool, arguments, text, before)


@dataclass(frozen=True)
class _Result:
    view: View
    channel: Channel
    command: Command
    is_error: bool | None
    extra_rules: tuple[FailureRule, ...]
    may_be_soft: bool
    is_edit: bool

    def verdict(self) -> Verdict:
        if self.is_error is False and self.channel != "shell":
            return _no_failure("the log says that it worked")
        verdict = self._first(self.extra_rules) or self._from_harness()
        if verdict is None and not (self.view.is_tagged and self.channel == "shell"):
            verdict = self._from_shell() if self.channel == "shell" else self._from_tool()
        if verdict is not None:
            return verdict
        if self.is_error is True or self._begins_with_error():
            return Verdict("other", "unknown", 0.3, (0, 0), False, "it failed, and no rule knows why")
        return _no_failure("nothing in it says that it failed")

    def _begins_with_error(self) -> bool:
        return self.channel == "other" and self.is_error is None and self.view.is_labelled

    def _from_harness(self) -> Verdict | None:
        if self.is_error is False and not self.view.is_tagged:
            return None
        verdict = self._first(REFUSALS) or self._about_the_call()
        # Nothing was run, so it is no soft failure.
        return None if verdict is None else replace(verdict, is_soft=False)

    def _about_the_call(self) -> Verdict | None:
        """No such tool, arguments that do not fit; by rules for whoever may say so here."""
        if self.channel == "shell" and not self.view.is_tagged:
            was_run = self._exit is not None or (self.command.only_shows and len(self.view.text) > _ONE_MESSAGE)
            return None if was_run else self._first(TOOL_NAME) or self._first(OWN_WORDS)
        if self.channel == "other" and self.is_error is None and not self.view.is_labelled:
            is_message = len(self.view.text) < _ONE_MESSAGE
            return self._first((*TOOL_NAME, *OWN_WORDS)) if is_message else None
        if self.channel == "file" and not self._may_speak:
            return None
        rules = (*TOOL_NAME, *OWN_WORDS, *FILE_ARGUMENTS, *(() if self.view.is_tagged else SERVER_ARGUMENTS))
        return self._first(rules)

    @property
    def _may_speak(self) -> bool:
        """Whether a file tool's text can be a message: what was read or found may begin with any words, too."""
        if self.is_error is True or self.view.is_tagged or self.view.is_labelled:
            return True
        return len(self.view.text) < 1000 and (self.is_edit or FULL_MESSAGE.match(self.view.text) is not None)

    def _from_tool(self) -> Verdict | None:
        if self.channel == "other":
            may_speak = self.is_error is True or self.view.is_labelled
            return (self._first(ELSEWHERE) or self._first(READS) or self._first(MISUSES)) if may_speak else None
        if not self._may_speak:
            return None
        is_message = self.is_error is True or self.view.is_tagged or self.view.is_labelled
        verdict = self._first(FAULTS) if is_message else None
        verdict = verdict or (self._first(EDITS) if self.is_edit else None)
        may_read = is_message or FULL_MESSAGE.match(self.view.text) is not None
        return verdict or (self._first((*READS, *MISUSES)) if may_read else None)

    def _from_shell(self) -> Verdict | None:
        if self.is_error is not True and self.view.text.isascii() and not self.view.has_any(TROUBLE):
            return None
        verdict = self._first(WITHHELD)
        verdict = verdict or (self._as_typed() if self._may_be_typed_wrongly else None)
        if verdict is not None:
            return verdict
        if self.command.only_shows:
            return self._from_reader()
        is_expected = not self._failed and self.command.expects_failure
        verdict = self._work() or (None if is_expected else self._from_machine()) or self._outcome(PROGRAMS)
        verdict = verdict or self._first(PATCHES) or (None if is_expected else self._slip())
        return verdict or (self._fallback() if self._failed else None)

    def _as_typed(self) -> Verdict | None:
        """A command that could not work as it was typed says so at once, or as the last thing it does."""
        ends = replace(self, view=self.view.ends(_NEAR_AN_END))
        verdict = ends._first(_TYPED) or ends._first(own_words(self.command))
        if verdict is None or (
            verdict.kind == "shell_syntax" and "\\!" in self.view.text and "\\!" not in self.command.text
        ):
            return None  # some tools put a backslash before each exclamation mark, whatever the quotes
        begin = self.view.here(verdict.span[0])
        first, rest = self.view.text[:begin], self.view.text[begin:]
        if names_a_place(rest):
            return None
        if verdict.kind != "shell_syntax" and follows_trouble(first, self.command):
            return None
        if not self._failed and self.may_be_soft:
            return self._behind_a_pipe(verdict, first)
        return verdict

    def _behind_a_pipe(self, verdict: Verdict, first: str) -> Verdict | None:
        """The same where the status is that of another command: only if it is the first thing that was printed."""
        if first.strip():
            return None
        return replace(verdict, confidence=max(verdict.confidence, _HIDDEN_CONFIDENCE))

    @property
    def _may_be_typed_wrongly(self) -> bool:
        """Whether it is worth asking: it failed, has no status, or one that is another's."""
        if self._failed or not self.may_be_soft:
            return True
        begins = self.view.text.lstrip()[:200].partition("\n")[0]
        is_hidden = self.command.hides_status if self.is_error is False else not self.command.only_shows
        return is_hidden and _MAY_BE_TYPED.search(begins) is not None

    def _slip(self, is_own: Callable[[str], bool] | None = None) -> Verdict | None:
        """The model's own, unless something else in the same result speaks against it."""
        verdict = self._first(SLIPS, is_own)
        return None if verdict is None else weighed(verdict, self.view, self.command)

    def _from_machine(self) -> Verdict | None:
        verdict = self._outcome(MACHINE)
        if verdict is not None and verdict.kind == "os_permission" and not self._failed:
            return self._outcome(MACHINE, self.command.is_own)  # a test may well be called "permission denied"
        return verdict

    def _from_reader(self) -> Verdict | None:
        """What it shows is somebody else's text; only a message in its own name is its own."""
        is_own = self.command.is_own
        ended_well = not self._failed and not is_own(self.view.last_line)  # with trouble on the way, perhaps
        verdict = (None if ended_well else self._first(MACHINE, is_own)) or self._slip(is_own)
        searches = any(name in ("grep", "rg") for name, _ in self.command.programs)
        found_nothing = self.is_error is not True and searches  # an answer, though its status is 1
        return verdict or (self._fallback() if self._failed and not found_nothing else None)

    def _work(self) -> Verdict | None:
        missing = self._outcome(MISSING)
        verdict = self._outcome(TESTS) or self._outcome(CHECKS) or self._outcome(BUILDS)
        if missing is not None:
            # Tests that cannot even be collected fail like tests, but not because of the work.
            return replace(missing, kind="test_failure") if verdict and verdict.kind == "test_failure" else missing
        return verdict

    def _outcome(self, rules: Iterable[FailureRule], is_own: Callable[[str], bool] | None = None) -> Verdict | None:
        """`_first` among the rules that, without a flag, can be how this command ended and not something it printed."""
        return self._first(rules if self._failed else self._endings(rules), is_own)

    def _endings(self, rules: Iterable[FailureRule]) -> list[FailureRule]:
        runs_commands = self.may_be_soft
        return [rule for rule in rules if may_end_in(rule, self.command, self.view, runs_commands=runs_commands)]

    @cached_property
    def _exit(self) -> tuple[int, int] | None:
        return next(EXIT.matches(self.view, self.command), None)

    @cached_property
    def _states_exit(self) -> bool:
        """Whether the tool itself says that the command failed: in its first or its last lines, around the output."""
        if self._exit is None:
            return False
        begin, end = self._exit
        text = self.view.text
        return text.count("\n", 0, begin) <= _ENVELOPE_LINES or text.rstrip().count("\n", end) <= _ENVELOPE_LINES

    @property
    def _failed(self) -> bool:
        return self.is_error is True or self._exit is not None

    def _is_whole(self, span: tuple[int, int]) -> bool:
        """Where the format has no flag: a message that is all that came back is no text that was shown."""
        return self.is_error is None and is_all(span, self.view)

    def _fallback(self) -> Verdict:
        reason = "a command failed without a reason that a rule knows"
        return Verdict("nonzero_exit", "task", 0.5, self.view.place(*(self._exit or (0, 0))), self._is_soft, reason)

    @property
    def _is_soft(self) -> bool:
        return self.may_be_soft and self.is_error is not True

    def _first(self, rules: Iterable[FailureRule], is_own: Callable[[str], bool] | None = None) -> Verdict | None:
        """The first rule that matches; of several blames within a group, one that is not the model's."""
        model_verdict: Verdict | None = None
        for rule in rules:
            if self.channel not in rule.channels:
                continue
            span = next(rule.matches(self.view, self.command, is_own), None)
            if span is None:
                continue
            is_soft = self._is_soft and rule.whose not in ("user", "harness")
            is_sure = not is_soft or self._states_exit or self._is_whole(span)
            confidence = rule.confidence * (1.0 if is_sure else _SOFT_CONFIDENCE)
            verdict = Verdict(rule.kind, rule.whose, confidence, self.view.place(*span), is_soft, f"rule {rule.kind}")
            if rule.whose != "model":
                return verdict
            model_verdict = model_verdict or verdict
        return model_verdict


def _no_failure(reason: str) -> Verdict:
    return Verdict("", "unknown", 0.0, (0, 0), False, reason)
