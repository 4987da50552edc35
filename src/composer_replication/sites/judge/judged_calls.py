"""Judge every call in a conversation in order, and compare the verdicts with the actual outcomes.

score = Score(judged_calls(conversation))
score.precision, score.share_predicted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from composer_replication.sites import find_error_sites
from composer_replication.sites.actions.file_contents import AGENT_EXIT
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.judge.judge import Judge, Judgement, Says
from composer_replication.sites.judge.project_files import Checkout, EarlierSessions, PathKnowledge
from composer_replication.types import Conversation, ErrorSite, ToolCall, ToolResult, Turn

_RESUMED_REPLY = "No response requested."  # what Claude Code writes when a session is resumed


@dataclass(frozen=True, slots=True)
class JudgedCall:
    """A call with its verdict and outcome.

    `site` is None if the call succeeded, and `result` is None if the call was not answered. `judge` and its `state` are
    valid only until the iterator is advanced. At the first call in a turn, they know exactly what the model had been
    shown when it made its decision.
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
    """Yield every call with its verdict, based only on what came before the call.

    Args:
        conversation: The conversation to judge. The calls in a turn are treated as sequential, as agents run them.
        sites: The failed calls by call id, if they are already classified.
        project: What earlier sessions in the project have shown.
        checkout: The project's files when the conversation began.
    """
    failures = sites if sites is not None else {site.call_id: site for site in find_error_sites(conversation)}
    judge = Judge(SessionState(conversation.cwd), project=project, checkout=checkout)
    if conversation.extra.get("begins_inside"):  # files may have been read before the log begins
        judge.state.texts.is_continued = True
    for turn, call, result, site in _calls_with_outcomes(conversation, failures, judge.state):
        yield JudgedCall(turn, call, judge.verdict(call), result, site, judge)


def state_at_end(conversation: Conversation) -> SessionState:
    """Return what a whole conversation has shown. A call counts as failed if the log marks it as failed."""
    state = SessionState(conversation.cwd)
    for _ in _calls_with_outcomes(conversation, {}, state):
        pass
    return state


def earlier_sessions(conversations: Iterable[Conversation]) -> EarlierSessions:
    """Return what these conversations had shown by the time they ended, for use in judging later conversations."""
    sessions = EarlierSessions()
    for conversation in conversations:
        sessions.add(conversation, state_at_end(conversation))
    sessions.sort()
    return sessions


def _calls_with_outcomes(
    conversation: Conversation, failures: Mapping[str, ErrorSite], state: SessionState
) -> Iterator[tuple[Turn, ToolCall, ToolResult | None, ErrorSite | None]]:
    """Yield every call with its result and error site. The state is updated only when the iterator is advanced."""
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
        # The log does not show that the agent was exited, only that the session was resumed, which counts as an exit.
        elif turn.text.strip() == _RESUMED_REPLY:
            state.add_message(AGENT_EXIT)


# The judge cannot foresee refusals by the user or the harness, or whether a test passes. Such failures are not scored.
_UNPREDICTABLE_BLAMES = frozenset({"user", "harness", "task"})
_VERDICT_ORDER: tuple[Says, ...] = ("fails", "risky", "ok", "unknown")


@dataclass(frozen=True, slots=True)
class RuleScore:
    """How often a rule decided (`said`), how often the call then failed, and how often with the predicted kind."""

    says: Says
    rule: str
    kind: str
    said: int
    failed: int
    num_of_kind: int

    @property
    def share_failed(self) -> float:
        """The fraction of the calls decided by this rule that failed."""
        return self.failed / self.said


@dataclass(frozen=True, slots=True)
class KindScore:
    """The number of failures of one kind, and how many of them were predicted."""

    kind: str
    failures: int
    predicted: int


class Score:
    """The accuracy of the judge: by rule, by kind of failure, and in total.

    Only the verdict `fails` is a prediction. It counts as right if the call failed, whatever the kind.
    """

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
        """Add a call with its verdict. A call without a result is ignored."""
        if judged.result is None:
            return
        self.num_calls += 1
        site, judgement = judged.site, judged.judgement
        if site is not None and site.blame in _UNPREDICTABLE_BLAMES:
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
        """The number of scored calls that failed."""
        return self._kinds.total()

    @property
    def num_predicted(self) -> int:
        """The number of failures that were predicted."""
        return self._predicted.total()

    @property
    def num_false(self) -> int:
        """The number of successful calls that were predicted to fail."""
        return sum(row.said - row.failed for row in self.rules if row.says == "fails")

    @property
    def precision(self) -> float | None:
        """The fraction of predictions that were right, or None if there were no predictions."""
        num_predictions = self.num_predicted + self.num_false
        return self.num_predicted / num_predictions if num_predictions else None

    @property
    def share_predicted(self) -> float | None:
        """The fraction of failures that were predicted (recall), or None if there were no failures."""
        return self.num_predicted / self.num_failures if self.num_failures else None

    @property
    def false_per_thousand(self) -> float | None:
        """The number of false predictions per 1,000 successful calls, or None if there were no successful calls."""
        return 1000 * self.num_false / self.num_good if self.num_good else None

    @property
    def rules(self) -> list[RuleScore]:
        """The scores of the rules, grouped by verdict in the order `fails`, `risky`, `ok`, `unknown`.

        Within each verdict, the most frequent rule comes first.
        """
        rows = [
            RuleScore(*key, count, self._num_failed_by_verdict[key], self._num_of_kind_by_verdict[key])
            for key, count in self._num_calls_by_verdict.items()
        ]
        return sorted(rows, key=lambda row: (_VERDICT_ORDER.index(row.says), -row.said, row.rule, row.kind))

    @property
    def kinds(self) -> list[KindScore]:
        """The scores by kind of failure, the most frequent first."""
        return [KindScore(kind, count, self._predicted[kind]) for kind, count in self._kinds.most_common()]
