"""A conversation's calls in order: what the judge said of each before it ran, and what really happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from composer_replication.sites import find_error_sites
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shown_texts import AGENT_EXIT
from composer_replication.sites.judge.checkout import Checkout, EarlierSessions, PathKnowledge
from composer_replication.sites.judge.judge import Judge, Judgement, Says
from composer_replication.types import (
    Conversation,
    ErrorSite,
    ToolCall,
    ToolResult,
    Turn,
)

_RESUMED_REPLY = "No response requested."  # what Claude Code writes where a session goes on after it was left


@dataclass(frozen=True, slots=True)
class JudgedCall:
    """A call, the verdict before it ran, and what came back; `site` is None where it worked, `result` where none came.

    `judge` (and its `state`) is that of this moment until the next call is asked for: at a turn's first call it knows
    exactly what the model had been shown when it decided.
    """

    turn: Turn
    call: ToolCall
    judgement: Judgement
    result: ToolResult | None
    site: ErrorSite | None
    judge: Judge


def judged_calls(
    conversation: Conversation,
    *,
    sites: Mapping[str, ErrorSite] | None = None,
    project: PathKnowledge | None = None,
    checkout: Checkout | None = None,
) -> Iterator[JudgedCall]:
    """Every call, judged by what was there before it. Calls of one turn run one after the other, as agents run them.

    `sites` are its failures by the id of the call, where somebody else has classed them.
    """
    failures = sites if sites is not None else {site.call_id: site for site in find_error_sites(conversation)}
    judge = Judge(SessionState(conversation.cwd), project=project, checkout=checkout)
    if conversation.extra.get("begins_inside"):  # what was read before is in no log
        judge.state.texts.is_continued = True
    for turn, call, result, site in _calls(conversation, failures, judge.state):
        yield JudgedCall(turn, call, judge.verdict(call), result, site, judge)


def state_at_end(conversation: Conversation) -> SessionState:
    """What a whole conversation has shown, with failures as the log flags them."""
    state = SessionState(conversation.cwd)
    for _ in _calls(conversation, {}, state):
        pass
    return state


def earlier_sessions(conversations: Iterable[Conversation]) -> EarlierSessions:
    """What each of them has shown by its end, for those that began later."""
    sessions = EarlierSessions()
    for conversation in conversations:
        sessions.add(conversation, state_at_end(conversation))
    sessions.sort()
    return sessions


def _calls(
    conversation: Conversation, failures: Mapping[str, ErrorSite], state: SessionState
) -> Iterator[tuple[Turn, ToolCall, ToolResult | None, ErrorSite | None]]:
    """Every call with what came back; the state is told of it only when the next one is asked for."""
    results = {result.call_id: result for turn in conversation.turns for result in turn.results}
    for turn in conversation.turns:
        for call in turn.calls:
            result, site = results.get(call.id), failures.get(call.id)
            yield turn, call, result, site
            if result is not None:
                failed = site is not None if result.is_error is None else result.is_error
                state.add(call, result.text, failed=failed, kind=site.kind if site else "")
        if turn.role != "assistant":
            state.add_message(turn.text)
        elif turn.text.strip() == _RESUMED_REPLY:
            state.add_message(AGENT_EXIT)


# The judge against what really happened: by rule, by kind of failure, and in all.
#
# A failure that was the user's, the harness's or the work's own is no question to the judge, and counts neither way.
# Only `fails` is a prediction. It is right where the call failed, in whatever way.

_BLAMES_LEFT_OUT = frozenset({"user", "harness", "task"})
_ORDER: tuple[Says, ...] = ("fails", "risky", "ok", "unknown")


@dataclass(frozen=True, slots=True)
class RuleScore:
    """How often one rule spoke, how often the call then failed, and how often in the way that was said."""

    says: Says
    rule: str
    kind: str
    said: int
    failed: int
    num_of_kind: int

    @property
    def share_failed(self) -> float:
        return self.failed / self.said


@dataclass(frozen=True, slots=True)
class KindScore:
    """How many failures of one kind there were, and how many were predicted."""

    kind: str
    failures: int
    predicted: int


class Score:
    """Grows call by call."""

    def __init__(self, calls: Iterable[JudgedCall] = ()) -> None:
        self.num_calls = self.num_good = self.num_left_out = 0
        self._num_calls_by_verdict: Counter[tuple[Says, str, str]] = Counter()
        self._num_failed_by_verdict: Counter[tuple[Says, str, str]] = Counter()
        self._num_of_kind_by_verdict: Counter[tuple[Says, str, str]] = Counter()
        self._kinds: Counter[str] = Counter()
        self._predicted: Counter[str] = Counter()
        for call in calls:
            self.add(call)

    def add(self, judged: JudgedCall) -> None:
        """A call with its verdict; one without a result says nothing."""
        if judged.result is None:
            return
        self.num_calls += 1
        site, judgement = judged.site, judged.judgement
        if site is not None and site.blame in _BLAMES_LEFT_OUT:
            self.num_left_out += 1
            return
        key = (judgement.says, judgement.rule, judgement.kind)
        self._num_calls_by_verdict[key] += 1
        if site is None:
            self.num_good += 1
            return
        self._num_failed_by_verdict[key] += 1
        self._num_of_kind_by_verdict[key] += site.kind == judgement.kind
        self._kinds[site.kind] += 1
        self._predicted[site.kind] += judgement.says == "fails"

    @property
    def num_failures(self) -> int:
        return self._kinds.total()

    @property
    def num_predicted(self) -> int:
        return self._predicted.total()

    @property
    def num_false(self) -> int:
        """Good calls of which it was said that they fail."""
        return sum(row.said - row.failed for row in self.rules if row.says == "fails")

    @property
    def precision(self) -> float | None:
        """None where nothing was predicted."""
        num_predictions = self.num_predicted + self.num_false
        return self.num_predicted / num_predictions if num_predictions else None

    @property
    def share_predicted(self) -> float | None:
        return self.num_predicted / self.num_failures if self.num_failures else None

    @property
    def false_per_thousand(self) -> float | None:
        """False alarms per 1,000 good calls."""
        return 1000 * self.num_false / self.num_good if self.num_good else None

    @property
    def rules(self) -> list[RuleScore]:
        """Predictions first, then what may well fail, what works, and what nobody can say."""
        rows = [
            RuleScore(*key, count, self._num_failed_by_verdict[key], self._num_of_kind_by_verdict[key])
            for key, count in self._num_calls_by_verdict.items()
        ]
        return sorted(rows, key=lambda row: (_ORDER.index(row.says), -row.said, row.rule, row.kind))

    @property
    def kinds(self) -> list[KindScore]:
        return [KindScore(kind, number, self._predicted[kind]) for kind, number in self._kinds.most_common()]
