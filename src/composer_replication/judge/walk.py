"""A conversation's calls in order: what the judge said of each before it ran, and what really happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from composer_replication.actions.session_state import SessionState
from composer_replication.judge.judge import Checkout, Judge, PathKnowledge
from composer_replication.judge.verdict import Judgement
from composer_replication.sites import find_error_sites
from composer_replication.types import Conversation, ErrorSite, ToolCall, ToolResult, Turn


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
    results = {result.call_id: result for turn in conversation.turns for result in turn.results}
    judge = Judge(SessionState(conversation.cwd), project=project, checkout=checkout)
    for turn in conversation.turns:
        for call in turn.calls:
            result, site = results.get(call.id), failures.get(call.id)
            yield JudgedCall(turn, call, judge.verdict(call), result, site, judge)
            if result is not None:
                judge.state.add(call, result.text, failed=site is not None)
        if turn.role != "assistant":
            judge.state.heard(turn.text)
