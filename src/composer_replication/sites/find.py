"""A conversation's failing calls, each with kind, blame and evidence, at the assistant turn that made the call."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.shell.command import Command
from composer_replication.actions.tools import channel_of, command_text
from composer_replication.canonical_json import encode
from composer_replication.errors import InputError
from composer_replication.sites.classify import classify
from composer_replication.sites.rule import FailureRule, registered_rules
from composer_replication.sites.taxonomy import Verdict
from composer_replication.sites.user_words import correction_verdict, corrects, own_words, with_words
from composer_replication.sites.view import View
from composer_replication.types import Conversation, ErrorSite, ToolCall, ToolResult, Turn

# Below this a failure is shown but not taught: soft failures, and kinds that are often somebody else's doing.
MIN_CONFIDENCE = 0.5
_MAX_EVIDENCE = 200
NO_FAILURE = "no_failure"
_SAID_ABOUT = frozenset({"description", "timeout", "run_in_background", "explanation"})
INTERRUPTED = "[Request interrupted by user"
_BAD_WORDS = ("error", "fail", "exception", "traceback", "not found", "no such", "denied", "fatal", "cannot")
_LOOKED_AT = 4000
_WORTH_ANOTHER_TRY = frozenset(
    ["network", "timeout", "os_permission", "test_failure", "lint_or_typecheck", "compile_error", "python_exception"]
)
_SURE = 0.7
_SAME_GATE = "a hook or gate had refused the same before"
_GATED = frozenset({("git", "commit"), ("git", "push")})
_PARTICULAR = re.compile(r"\S*[/\d.]\S*")  # paths, numbers, hashes: what differs between two refusals of one kind
# These ask again until something has happened, or run what is being worked on.
_ASKS_ON = re.compile(
    r"\b(?:sleep|watch|wait|checks?|status|logs?|ps|pgrep|curl|run|tests?|lint|build|make|compile|vet|fmt|go|cargo|npm"
    r"|python3?|node|pytest)\b"
)
# mini-swe-agent has no calls: the command stands in the text, and the next message is what it printed.
_COMMAND_BLOCK = re.compile(r"```(?:bash|sh|mswea_bash_command)\n(.*?)```", re.DOTALL)


def find_error_sites(
    conversation: Conversation,
    *,
    min_confidence: float = MIN_CONFIDENCE,
    extra_rules: Iterable[FailureRule] = (),
    passed_over: list[ErrorSite] | None = None,
) -> list[ErrorSite]:
    """Every failure of the conversation, in order; `is_kept` marks those that may be taught.

    `passed_over` takes what looked like a failure and is none: of kind `no_failure`, each with its reason.
    """
    if not 0 <= min_confidence <= 1:
        raise InputError(f"min_confidence: got {min_confidence}, expected a number from 0 to 1")
    rules = (*extra_rules, *registered_rules())
    finder = _Finder(conversation, min_confidence, rules, [] if passed_over is None else passed_over)
    return list(finder.sites())


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
        self._failed: dict[bytes, tuple[ErrorSite, int, int]] = {}  # call -> its last failure, when, and known since
        self._gates: dict[str, int] = {}  # what a hook refused -> since when that is known
        self._num_calls = 0
        self._turn = 0
        self._stopped: Turn | None = None  # the turn that the user stopped, until somebody speaks
        self._heard_at = -1  # the last turn in which somebody but the model spoke
        self._made_at: dict[str, int] = {}
        self._answers: Counter[str] = Counter()

    def sites(self) -> Iterator[ErrorSite]:
        for answered in self._answered():
            if isinstance(answered, _Answered):
                self._num_calls += 1
                site = self._judge(answered)
                if site is not None:
                    yield site
            else:
                yield answered

    def _answered(self) -> Iterator[_Answered | ErrorSite]:
        """Calls in the order of their results, and interruptions between them."""
        made: dict[str, tuple[Turn, ToolCall]] = {}
        open_calls: dict[str, tuple[Turn, ToolCall]] = {}
        last: Turn | None = None
        for number, turn in enumerate(self._conversation.turns):
            self._turn = number
            if turn.role == "assistant":
                last = turn
                made |= {call.id: (turn, call) for call in turn.calls}
                open_calls |= {call.id: (turn, call) for call in turn.calls}
                self._made_at |= {call.id: self._turn for call in turn.calls}
            for result in turn.results:
                if result.call_id not in made:
                    orphan = ToolCall(id=result.call_id, name="", arguments={})
                    self._pass_over(_Answered(turn, orphan, turn, result), "a result without its call")
                    continue
                open_calls.pop(result.call_id, None)
                yield _Answered(*made[result.call_id], turn, result)
            if turn.role == "user" and last is not None:
                yield from self._from_user(turn, last, next(iter(open_calls), ""))
            if turn.role != "assistant" and not _is_observation(self._conversation, turn):
                self._state.heard(turn.text)
                self._heard_at = number if turn.text.strip() else self._heard_at
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
        if not verdict.is_failure:
            if self._failed:
                self._failed.pop(_key(call), None)
            if _looks_bad(result.text) and (result.is_error is None or channel_of(call.name) == "shell"):
                self._pass_over(answered, verdict.reason)
            return None
        key = _key(call)
        again = self._refused_again(answered, verdict) or self._failed_again(answered, verdict, key)
        site = self._with_repeats(self._site(answered, again or verdict), key)
        self._failed[key] = (site, self._num_calls, self._turn)
        return site

    def _refused_again(self, answered: _Answered, verdict: Verdict) -> Verdict | None:
        """The verdict on a call that a hook or a gate refused for what it had refused before: a convention by now."""
        command = Command.of(command_text(answered.call.name, answered.call.arguments))
        by_git = command.only_git and any(pair in _GATED for pair in command.programs)
        if verdict.kind != "hook_blocked" and not (by_git and verdict.kind == "lint_or_typecheck"):
            return None
        start, end = verdict.span
        gate = _PARTICULAR.sub("", answered.result.text[start:end])
        known_at = self._gates.setdefault(gate, self._turn)
        if not gate.strip() or known_at >= self._made_at.get(answered.call.id, self._turn):
            return None
        return replace(verdict, kind="hook_blocked", blame="model", confidence=_SURE, reason=_SAME_GATE)

    def _failed_again(self, answered: _Answered, verdict: Verdict, key: bytes) -> Verdict | None:
        """The verdict on a call whose failure was known and that was made again with nothing done in between.

        Whatever the first failure was, the second is the model's: nothing had changed. Not where the user or the
        harness refused it, where trying again is right (networks, timeouts), or where it asks how things stand by now;
        and work that fails is never taught.
        """
        earlier, when, known_at = self._failed.get(key, (None, 0, 0))
        made_at = self._made_at.get(answered.call.id, self._turn)
        if earlier is None or earlier.kind != verdict.kind or known_at >= made_at or self._num_calls - when > 1:
            return None
        if verdict.blame in ("model", "user", "harness") or verdict.kind in _WORTH_ANOTHER_TRY or verdict.is_soft:
            return None
        if self._heard_at >= known_at or _waits_or_works(answered.call):
            return None
        reason = "the same call had just failed in the same way, and nothing was done in between"
        return replace(verdict, blame="model", confidence=max(verdict.confidence, _SURE), reason=reason)

    def _pass_over(self, answered: _Answered, reason: str) -> None:
        self._passed_over.append(self._site(answered, Verdict(NO_FAILURE, "unknown", 0.0, (0, 0), False, reason)))

    def _with_repeats(self, site: ErrorSite, key: bytes) -> ErrorSite:
        """A repetition is a call made when its failure was known: not a parallel one, and not the same one again."""
        earlier, when, known_at = self._failed.get(key, (None, 0, 0))
        made_at = self._made_at.get(site.call_id, self._turn)
        if earlier is None or earlier.kind != site.kind or known_at >= made_at:
            return site
        between = self._num_calls - when - 1
        return replace(site, repeats=earlier.repeats + 1, repeat_of=earlier.id, between=between)

    def _site(self, answered: _Answered, verdict: Verdict) -> ErrorSite:
        turn, call, text = answered.turn, answered.call, answered.result.text
        link = self._conversation.parent
        reason = self._reason_to_drop(turn, verdict)
        start, end = verdict.span
        shown = View.of(text[start:end] if end > start else text.lstrip().partition("\n")[0]).text
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
            evidence_text=shown[:_MAX_EVIDENCE].strip(),
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


def _key(call: ToolCall) -> bytes:
    """Equal for calls that ask the same of the same tool, however they describe it."""
    command = command_text(call.name, call.arguments)
    asked = command or {key: each for key, each in call.arguments.items() if key not in _SAID_ABOUT}
    try:
        return encode([call.name, asked, call.raw_arguments or ""], where="call")
    except InputError:
        return repr((call.name, call.raw_arguments, sorted(call.arguments, key=str))).encode("utf-8", "replace")


def _waits_or_works(call: ToolCall) -> bool:
    return _ASKS_ON.search(command_text(call.name, call.arguments)) is not None


def _is_observation(conversation: Conversation, turn: Turn) -> bool:
    """Whether a message of the user is what a command printed."""
    return conversation.format == "mini_sweagent" and turn.text.lstrip().startswith("<returncode>")


def _looks_bad(text: str) -> bool:
    shown = (text if len(text) <= 2 * _LOOKED_AT else text[:_LOOKED_AT] + text[-_LOOKED_AT:]).lower()
    return any(word in shown for word in _BAD_WORDS)
