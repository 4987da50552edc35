"""Calls that a session put right itself: the call that failed, and what should have been done in its place.

After most failures the log holds the right call. Not every one could have been known when the wrong one was made: so
the judge is asked at the state before the failing turn. Where it finds the text or path of the corrected call already
shown, that call is right there; where it does not, the look that came first and names what was missing is; and where
there is none, or the failing call's file had been read, there is nothing to learn from the two.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from composer_replication.actions.tools import is_edit, is_label
from composer_replication.judge.walk import JudgedCall, judged_calls
from composer_replication.pairs.correction_rules import decide
from composer_replication.pairs.failed_call import FailedCall
from composer_replication.pairs.later_calls import LaterCalls
from composer_replication.pairs.needless_looks import needless_look
from composer_replication.sites.find import NO_FAILURE, find_error_sites
from composer_replication.sites.user_words import CORRECTED
from composer_replication.types import Conversation, ErrorSite, ToolCall

How = Literal["corrected", "look_first", "looked_for_text", "looked_for_path"]
Source = Literal["correction", "user", "acted_at_once"]
ACTED: Source = "acted_at_once"


class Correction(NamedTuple):
    """The call that failed, the one to choose instead, and how the two belong together.

    Where acting at once was right, `chosen` was made and worked, and `failed` is a look that nobody made or needed.
    Both have the same id, and no words for the reader of the log: those of a corrected call answer its error.
    `turn_number` counts the assistant's turns from 0, `call_number` the calls of that turn.
    """

    site_id: str
    kind: str
    turn_number: int
    call_number: int
    failed: ToolCall
    chosen: ToolCall
    how: How
    source: Source


def correction_of(conversation: Conversation, site: ErrorSite) -> Correction | None:
    """What should have been done in place of the site's call, as far as its session knew; None where nobody can say."""
    own_corrections = own_pairs(conversation, find_error_sites(conversation), only={site.id})
    return next((correction for correction in own_corrections if correction.source != ACTED), None)


def own_pairs(
    conversation: Conversation, failures: Iterable[ErrorSite], *, only: Container[str] | None = None
) -> Iterator[Correction]:
    """What a session itself shows to be better and worse: its corrections, and calls that acted at once and were right.

    `failures` are all failures of the conversation, kept or not; `only` are ids of those to look at.
    """
    sites_by_call = {site.call_id: site for site in failures if site.kind != NO_FAILURE}
    log, turn_id = LaterCalls(conversation, sites_by_call), ""
    for judged in judged_calls(conversation, sites=sites_by_call):
        if judged.turn.id == turn_id:  # what the calls before it in the same turn brought was not known yet
            continue
        turn_id = judged.turn.id
        if judged.turn.origin != "model":
            continue
        for call_index, call in enumerate(judged.turn.calls):
            site = sites_by_call.get(call.id)
            if site is not None and site.is_kept and log.is_one(call) and (only is None or site.id in only):
                decided = decide(FailedCall(judged.judge, site, call, log, conversation.cwd))
                if decided is not None:
                    yield _correction(site, (log.turn_number(turn_id), call_index), call, *decided)
        if only is None and len(judged.turn.calls) == 1 and log.has_worked(judged.call):
            yield from _acted(judged, log.turn_number(turn_id))


def _correction(site: ErrorSite, position: tuple[int, int], call: ToolCall, chosen: ToolCall, how: How) -> Correction:
    source: Source = "user" if site.kind == CORRECTED else "correction"
    sides = (without_labels(call), replace(without_labels(chosen), id=call.id))
    return Correction(site.id, site.kind, *position, *sides, how, source)


def _acted(judged: JudgedCall, turn_number: int) -> Iterator[Correction]:
    look = needless_look(judged.call, judged.judgement, judged.judge.state)
    how: How = "looked_for_text" if is_edit(judged.call.name) else "looked_for_path"
    if look is not None:
        yield Correction("", "", turn_number, 0, look, without_labels(judged.call), how, ACTED)


def without_labels(call: ToolCall) -> ToolCall:
    """The call without words that are for the reader of the log alone."""
    arguments: dict[str, Any] = {key: value for key, value in call.arguments.items() if not is_label(call.name, key)}
    return replace(call, arguments=arguments)
