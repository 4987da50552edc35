"""A conversation's calls in order: what the judge said of each before it ran, and what really happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.shown.texts import AGENT_LEFT
from composer_replication.judge.checkout import Checkout
from composer_replication.judge.earlier import EarlierSessions, PathKnowledge
from composer_replication.judge.judge import Judge
from composer_replication.judge.verdict import Judgement
from composer_replication.sites import find_error_sites
from composer_replication.types import Conversation, ErrorSite, ToolCall, ToolResult, Turn

_RESUMED = "No response requested."  # what Claude Code writes where a session goes on after it was left


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
            state.heard(turn.text)
        elif turn.text.strip() == _RESUMED:
            state.heard(AGENT_LEFT)
