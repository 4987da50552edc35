"""A conversation's failing calls, each with kind, blame and evidence, at the assistant turn that made the call."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from composer_replication.errors import InputError
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import Command
from composer_replication.sites.actions.tools import channel_of, command_text
from composer_replication.sites.classify import classify
from composer_replication.sites.course import (
    Course,
    Refusal,
    gate_of,
    refusal,
)
from composer_replication.sites.retyped import as_retyped
from composer_replication.sites.rule import FailureRule, Verdict, registered_rules
from composer_replication.sites.user_words import (
    correction_verdict,
    corrects,
    own_words,
    with_words,
)
from composer_replication.sites.view import CleanedText
from composer_replication.types import (
    Conversation,
    ErrorSite,
    ToolCall,
    ToolResult,
    Turn,
)

# Below this a failure is shown but not taught: soft failures, and kinds that are often somebody else's doing.
MIN_CONFIDENCE = 0.5
_MAX_EVIDENCE = 200
NO_FAILURE = "no_failure"
INTERRUPTED = "[Request interrupted by user"
_BAD_WORDS = ("error", "fail", "exception", "traceback", "not found", "no such", "denied", "fatal", "cannot")
_LOOKED_AT = 4000
# mini-swe-agent has no calls: the command stands in the text, and the next message is what it printed.
_GOES_FIRST = re.compile(r"\s*(cd [\w./~-]{1,300})\s*(?:&&|;|\n)")
_COMMAND_BLOCK = re.compile(r"```(?:bash|sh|mswea_bash_command)\n(.*?)```", re.DOTALL)


def find_error_sites(
    conversation: Conversation,
    *,
    min_confidence: float = MIN_CONFIDENCE,
    extra_rules: Iterable[FailureRule] = (),
    passed_over: list[ErrorSite] | None = None,
    refusals: list[Refusal] | None = None,
) -> list[ErrorSite]:
    """Every failure of the conversation, in order; `is_kept` marks those that may be taught.

    `passed_over` takes what looked like a failure and is none: of kind `no_failure`, each with its reason. `refusals`
    takes the first refusal of every gate: which of them were not the first of their project, `gates.conventions` says.
    """
    if not 0 <= min_confidence <= 1:
        raise InputError(f"min_confidence: got {min_confidence}, expected a number from 0 to 1")
    rules = (*extra_rules, *registered_rules())
    finder = _Finder(conversation, min_confidence, rules, [] if passed_over is None else passed_over)
    sites = as_retyped(conversation, list(finder.sites()), min_confidence=min_confidence)
    if refusals is not None:
        refusals += finder.refusals
    return sites


@dataclass(frozen=True, slots=True)
class _Answered:
    """A call with what came back."""

    turn: Turn
    call: ToolCall
    result_turn: Turn
    result: ToolResult


class _Finder:
    def __init__(
        self,
        conversation: Conversation,
        min_confidence: float,
        rules: tuple[FailureRule, ...],
        passed_over: list[ErrorSite],
    ) -> None:
        self._conversation, self._min_confidence, self._rules = conversation, min_confidence, rules
        self._passed_over = passed_over
        self._state = SessionState(conversation.cwd)
        self._course = Course(conversation)
        self.refusals: list[Refusal] = []
        self._seen_gates: set[str] = set()
        self._stopped: Turn | None = None  # the turn that the user stopped, until somebody speaks
        self._answers: Counter[str] = Counter()

    def sites(self) -> Iterator[ErrorSite]:
        for answered in self._answered():
            if isinstance(answered, _Answered):
                site = self._judge(answered)
                if site is not None:
                    yield site
            else:
                yield answered

    def _answered(self) -> Iterator[_Answered | ErrorSite]:
        """Calls in the order of their results, and interruptions between them."""
        calls_by_id: dict[str, tuple[Turn, ToolCall]] = {}
        open_calls: dict[str, tuple[Turn, ToolCall]] = {}
        last: Turn | None = None
        for number, turn in enumerate(self._conversation.turns):
            self._course.at(number, turn.text, turn.calls)
            if turn.role == "assistant":
                last = turn
                calls_by_id |= {call.id: (turn, call) for call in turn.calls}
                open_calls |= {call.id: (turn, call) for call in turn.calls}
            for result in turn.results:
                if result.call_id not in calls_by_id:
                    orphan = ToolCall(id=result.call_id, name="", arguments={})
                    self._pass_over(_Answered(turn, orphan, turn, result), "a result without its call")
                    continue
                open_calls.pop(result.call_id, None)
                yield _Answered(*calls_by_id[result.call_id], turn, result)
            if turn.role == "user" and last is not None:
                yield from self._from_user(turn, last, next(iter(open_calls), ""))
            if turn.role != "assistant" and not _is_observation(self._conversation, turn):
                self._state.add_message(turn.text)
                self._course.heard(turn.text)
        for turn, call in open_calls.values():
            nothing = ToolResult(call_id=call.id, text="", is_error=None)
            self._pass_over(_Answered(turn, call, turn, nothing), "a call without a result")

    def _from_user(self, turn: Turn, last: Turn, call_id: str) -> Iterator[_Answered | ErrorSite]:
        if turn.text.startswith(INTERRUPTED):
            verdict = Verdict("user_interrupt", "user", 0.98, (0, len(INTERRUPTED)), False, "the user's own words")
            call = ToolCall(id=call_id, name="", arguments={})
            self._stopped = last
            yield self._site(
                _Answered(last, call, turn, ToolResult(call_id=call_id, text=turn.text, is_error=None)), verdict
            )
        elif self._stopped is last and turn.origin == "human":
            self._stopped = None
            yield from self._said_after_stop(turn, last)
        elif _is_observation(self._conversation, turn):
            command = _COMMAND_BLOCK.search(last.text)
            call = ToolCall(id=last.id, name="bash", arguments={"command": command[1] if command else ""})
            yield _Answered(last, call, turn, ToolResult(call_id=last.id, text=turn.text, is_error=None))

    def _said_after_stop(self, turn: Turn, last: Turn) -> Iterator[ErrorSite]:
        """The site of a stopped turn's last call, where the words that follow plainly turn it down."""
        words = own_words(turn.text)
        if words is not None and last.calls and corrects(turn.text[slice(*words)], plainly=True):
            call = last.calls[-1]
            result = ToolResult(call_id=call.id, text=turn.text, is_error=None)
            yield self._site(_Answered(last, call, turn, result), correction_verdict(words))

    def _judge(self, answered: _Answered) -> ErrorSite | None:
        call, result = answered.call, answered.result
        verdict = classify(
            call.name, call.arguments, result.text, result.is_error, before=self._state, extra_rules=self._rules
        )
        verdict = with_words(verdict, result.text)
        self._state.add(call, result.text, failed=verdict.is_failure)
        if verdict.is_soft and result.is_error is False and (went := _GOES_FIRST.match(_command(call))) is not None:
            there = ToolCall(id=call.id, name=call.name, arguments={"command": went[1]})
            self._state.add(there, "", failed=False)  # its status was good, so the shell stays where it went
        judged = self._course.judge(call, result, verdict)
        if not judged.is_failure:
            if _looks_bad(result.text) and (result.is_error is None or channel_of(call.name) == "shell"):
                self._pass_over(answered, judged.reason)
            return None
        site = self._course.counted(self._site(answered, judged), call, result)
        gate = gate_of(verdict, Command.of(_command(call)), result.text)
        if gate and gate not in self._seen_gates and judged.blame != "model":
            kept_from = self._min_confidence
            self.refusals.append(refusal(self._conversation, gate, site, min_confidence=kept_from))
        self._seen_gates.add(gate)
        return site

    def _pass_over(self, answered: _Answered, reason: str) -> None:
        self._passed_over.append(self._site(answered, Verdict(NO_FAILURE, "unknown", 0.0, (0, 0), False, reason)))

    def _site(self, answered: _Answered, verdict: Verdict) -> ErrorSite:
        turn, call, text = answered.turn, answered.call, answered.result.text
        link = self._conversation.parent
        reason = self._reason_to_drop(turn, verdict)
        start, end = verdict.span
        evidence = CleanedText.of(text[start:end] if end > start else text.lstrip().partition("\n")[0]).text
        self._answers[call.id] += 1
        parts = (self._conversation.id, turn.id, call.id, answered.result_turn.id, str(self._answers[call.id]))
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

    def _reason_to_drop(self, turn: Turn, verdict: Verdict) -> str | None:
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
    """Short enough to type, and the same in every run."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _command(call: ToolCall) -> str:
    return command_text(call.name, call.arguments)


def _is_observation(conversation: Conversation, turn: Turn) -> bool:
    """Whether a message of the user is what a command printed."""
    return conversation.format == "mini_sweagent" and turn.text.lstrip().startswith("<returncode>")


def _looks_bad(text: str) -> bool:
    excerpt = (text if len(text) <= 2 * _LOOKED_AT else text[:_LOOKED_AT] + text[-_LOOKED_AT:]).lower()
    return any(word in excerpt for word in _BAD_WORDS)
