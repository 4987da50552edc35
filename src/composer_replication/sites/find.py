"""Find the error sites in a conversation: its failed calls, each with its kind, blame and evidence.

`classify` decides about each result in isolation. `VerdictReviser` then revises verdicts using earlier turns, and
`retyped_commands` using later ones. A site belongs to the assistant turn that made the call.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from composer_replication.errors import InputError
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import Command
from composer_replication.sites.actions.tools import command_text, tool_channel
from composer_replication.sites.classify import classify
from composer_replication.sites.cleaned_text import CleanedText
from composer_replication.sites.retyped_commands import blame_retyped_commands
from composer_replication.sites.rule import FailureRule, Verdict, registered_rules
from composer_replication.sites.user_corrections import (
    apply_correction,
    correction_verdict,
    find_user_text,
    is_correction,
)
from composer_replication.sites.verdict_revision import Refusal, VerdictReviser, first_refusal, refused_check
from composer_replication.types import Conversation, ErrorSite, ToolCall, ToolResult, Turn

# Failures with lower confidence are shown but not trained on: most soft failures, and kinds that are often not the
# model's fault.
MIN_CONFIDENCE = 0.5
_MAX_EVIDENCE = 200
NO_FAILURE = "no_failure"
INTERRUPTED = "[Request interrupted by user"
_FAILURE_WORDS = ("error", "fail", "exception", "traceback", "not found", "no such", "denied", "fatal", "cannot")
# Number of characters at each end of a long result that are searched for error words.
_MAX_SEARCHED = 4000
# "cd src && make" -> "cd src"; not "make && cd src"
_LEADING_CD = re.compile(r"\s*(cd [\w./~-]{1,300})\s*(?:&&|;|\n)")
# mini-swe-agent logs no calls: the command is in the text, and the next message is its output.
# "```bash\nls src\n```" -> "ls src\n"; not "```python\nx = 1\n```"
_COMMAND_BLOCK = re.compile(r"```(?:bash|sh|mswea_bash_command)\n(.*?)```", re.DOTALL)


def find_error_sites(
    conversation: Conversation,
    *,
    min_confidence: float = MIN_CONFIDENCE,
    extra_rules: Iterable[FailureRule] = (),
    passed_over: list[ErrorSite] | None = None,
    refusals: list[Refusal] | None = None,
) -> list[ErrorSite]:
    """Return every failed call in the conversation, in order; `is_kept` marks those that are trained on.

    Args:
        conversation: A conversation from a session.
        min_confidence: Sites with lower confidence are not kept.
        extra_rules: Rules that are tried before the registered and the built-in ones.
        passed_over: A list to which false alarms are added: sites of kind `no_failure`, each with its reason.
        refusals: A list to which the first refusal by each check is added. `verdict_revision.repeated_refusals` later
            finds those that were not the first in their project.

    Raises:
        InputError: `min_confidence` is not between 0 and 1.
    """
    if not 0 <= min_confidence <= 1:
        raise InputError(f"min_confidence: got {min_confidence}, expected a number from 0 to 1")
    rules = (*extra_rules, *registered_rules())
    finder = _SiteFinder(conversation, min_confidence, rules, [] if passed_over is None else passed_over)
    sites = blame_retyped_commands(conversation, list(finder.sites()), min_confidence=min_confidence)
    if refusals is not None:
        refusals += finder.refusals
    return sites


@dataclass(frozen=True, slots=True)
class _AnsweredCall:
    """A call with its result."""

    turn: Turn
    call: ToolCall
    result_turn: Turn
    result: ToolResult


class _SiteFinder:
    """A single pass over a conversation, which remembers what the earlier turns showed."""

    def __init__(
        self,
        conversation: Conversation,
        min_confidence: float,
        rules: tuple[FailureRule, ...],
        passed_over: list[ErrorSite],
    ) -> None:
        self._conversation, self._min_confidence, self._rules = conversation, min_confidence, rules
        self._false_alarms = passed_over
        self._state = SessionState(conversation.cwd)
        self._reviser = VerdictReviser(conversation)
        self.refusals: list[Refusal] = []
        self._refused_checks: set[str] = set()
        self._stopped_turn: Turn | None = None  # the turn that the user stopped, until the next message
        self._num_results: Counter[str] = Counter()  # per call: damaged logs may contain several

    def sites(self) -> Iterator[ErrorSite]:
        """Yield the error sites, and collect false alarms and refusals along the way."""
        for answered in self._answered_calls():
            if isinstance(answered, _AnsweredCall):
                site = self._classify_call(answered)
                if site is not None:
                    yield site
            else:
                yield answered

    def _answered_calls(self) -> Iterator[_AnsweredCall | ErrorSite]:
        """Yield the answered calls in the order of their results, and the sites of interruptions between them."""
        calls_by_id: dict[str, tuple[Turn, ToolCall]] = {}
        open_calls: dict[str, tuple[Turn, ToolCall]] = {}
        assistant_turn: Turn | None = None
        for number, turn in enumerate(self._conversation.turns):
            self._reviser.begin_turn(number, turn.text, turn.calls)
            if turn.role == "assistant":
                assistant_turn = turn
                calls_by_id |= {call.id: (turn, call) for call in turn.calls}
                open_calls |= {call.id: (turn, call) for call in turn.calls}
            for result in turn.results:
                if result.call_id not in calls_by_id:
                    orphan = ToolCall(id=result.call_id, name="", arguments={})
                    self._add_false_alarm(_AnsweredCall(turn, orphan, turn, result), "a result without its call")
                    continue
                open_calls.pop(result.call_id, None)
                yield _AnsweredCall(*calls_by_id[result.call_id], turn, result)
            if turn.role == "user" and assistant_turn is not None:
                yield from self._find_in_user_message(turn, assistant_turn, next(iter(open_calls), ""))
            if turn.role != "assistant" and not _is_observation(self._conversation, turn):
                self._state.add_message(turn.text)
                self._reviser.add_message(turn.text)
        for turn, call in open_calls.values():
            empty_result = ToolResult(call_id=call.id, text="", is_error=None)
            self._add_false_alarm(_AnsweredCall(turn, call, turn, empty_result), "a call without a result")

    def _find_in_user_message(
        self, turn: Turn, assistant_turn: Turn, call_id: str
    ) -> Iterator[_AnsweredCall | ErrorSite]:
        """Yield the interruption, rejected call or command output that a user message contains.

        `assistant_turn` is the turn that the message responds to, and `call_id` is its first call without a result, or
        "".
        """
        if turn.text.startswith(INTERRUPTED):
            verdict = Verdict("user_interrupt", "user", 0.98, (0, len(INTERRUPTED)), False, "the user's own words")
            call = ToolCall(id=call_id, name="", arguments={})
            self._stopped_turn = assistant_turn
            yield self._make_site(
                _AnsweredCall(assistant_turn, call, turn, ToolResult(call_id=call_id, text=turn.text, is_error=None)),
                verdict,
            )
        elif self._stopped_turn is assistant_turn and turn.origin == "human":
            self._stopped_turn = None
            yield from self._find_correction_after_stop(turn, assistant_turn)
        elif _is_observation(self._conversation, turn):
            command = _COMMAND_BLOCK.search(assistant_turn.text)
            call = ToolCall(id=assistant_turn.id, name="bash", arguments={"command": command[1] if command else ""})
            yield _AnsweredCall(
                assistant_turn, call, turn, ToolResult(call_id=assistant_turn.id, text=turn.text, is_error=None)
            )

    def _find_correction_after_stop(self, turn: Turn, assistant_turn: Turn) -> Iterator[ErrorSite]:
        """Yield the site of the last call in a stopped turn, if the next message clearly rejects it."""
        words = find_user_text(turn.text)
        if words is not None and assistant_turn.calls and is_correction(turn.text[slice(*words)], is_explicit=True):
            call = assistant_turn.calls[-1]
            result = ToolResult(call_id=call.id, text=turn.text, is_error=None)
            yield self._make_site(_AnsweredCall(assistant_turn, call, turn, result), correction_verdict(words))

    def _classify_call(self, answered: _AnsweredCall) -> ErrorSite | None:
        call, result = answered.call, answered.result
        verdict = classify(
            call.name, call.arguments, result.text, result.is_error, before=self._state, extra_rules=self._rules
        )
        verdict = apply_correction(verdict, result.text)
        self._state.add(call, result.text, failed=verdict.is_failure)
        first_cd = _LEADING_CD.match(_call_command(call))
        if verdict.is_soft and result.is_error is False and first_cd is not None:
            # The log does not mark an error, so the `cd` succeeded and the shell stays in that folder.
            cd_call = ToolCall(id=call.id, name=call.name, arguments={"command": first_cd[1]})
            self._state.add(cd_call, "", failed=False)
        revised = self._reviser.revise(call, result, verdict)
        if not revised.is_failure:
            if _looks_like_failure(result.text) and (result.is_error is None or tool_channel(call.name) == "shell"):
                self._add_false_alarm(answered, revised.reason)
            return None
        site = self._reviser.count_repeats(self._make_site(answered, revised), call, result)
        check = refused_check(verdict, Command.of(_call_command(call)), result.text)
        if check and check not in self._refused_checks and revised.blame != "model":
            self.refusals.append(first_refusal(self._conversation, check, site, min_confidence=self._min_confidence))
        self._refused_checks.add(check)
        return site

    def _add_false_alarm(self, answered: _AnsweredCall, reason: str) -> None:
        self._false_alarms.append(self._make_site(answered, Verdict(NO_FAILURE, "unknown", 0.0, (0, 0), False, reason)))

    def _make_site(self, answered: _AnsweredCall, verdict: Verdict) -> ErrorSite:
        turn, call, text = answered.turn, answered.call, answered.result.text
        link = self._conversation.parent
        reason = self._exclusion_reason(turn, verdict)
        start, end = verdict.span
        evidence = CleanedText.of(text[start:end] if end > start else text.lstrip().partition("\n")[0]).text
        self._num_results[call.id] += 1
        parts = (self._conversation.id, turn.id, call.id, answered.result_turn.id, str(self._num_results[call.id]))
        return ErrorSite(
            id=_site_id(*parts),
            conversation_id=self._conversation.id,
            turn_id=turn.id,
            call_id=call.id,
            result_turn_id=answered.result_turn.id,
            tool=call.name,
            kind=verdict.kind,
            blame=verdict.blame,
            confidence=round(verdict.confidence, 3),
            evidence=verdict.span,
            evidence_text=evidence[:_MAX_EVIDENCE].strip(),
            is_soft=verdict.is_soft,
            is_rewound=link is not None and link.kind == "branch",
            repeats=0,
            repeat_of=None,
            between=0,
            is_kept=reason is None,
            reason=reason or verdict.reason,
        )

    def _exclusion_reason(self, turn: Turn, verdict: Verdict) -> str | None:
        """Return the reason not to train on a site, or None to train on it. The reasons are stored in sites.jsonl."""
        if verdict.kind == NO_FAILURE:
            return verdict.reason
        if verdict.blame != "model":
            return f"blame {verdict.blame}: {verdict.reason}"
        if turn.origin == "copied":
            return "copied history: the turn is taught where it was written"
        if verdict.confidence < self._min_confidence:
            return f"confidence below {self._min_confidence:g}" + (" (soft failure)" if verdict.is_soft else "")
        return None


def _site_id(*parts: str) -> str:
    """Return an id that is short enough to type and identical in every run."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _call_command(call: ToolCall) -> str:
    return command_text(call.name, call.arguments)


def _is_observation(conversation: Conversation, turn: Turn) -> bool:
    """Return whether a user message is a command's output, as mini-swe-agent logs it."""
    return conversation.format == "mini_sweagent" and turn.text.lstrip().startswith("<returncode>")


def _looks_like_failure(text: str) -> bool:
    """Return whether a successful result looks like a failure. Such results are listed as false alarms."""
    excerpt = (text if len(text) <= 2 * _MAX_SEARCHED else text[:_MAX_SEARCHED] + text[-_MAX_SEARCHED:]).lower()
    return any(word in excerpt for word in _FAILURE_WORDS)
