"""What is scored at a site: the erring decision, the right call in its place, and good calls of the same session.

All of one site is read in one pass, as token ids up to each stretch of tokens that decides a call
(`batch.render.decision`), without any hint. Good calls are decided on as many tokens as the erring one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from composer_replication.batch.render.decision import Decision, decide_against, decide_like
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.taught_turns import why_no_target
from composer_replication.errors import InputError
from composer_replication.objective.hint_proof import DecidedCall
from composer_replication.objective.reference import Response
from composer_replication.types import Conversation, ToolCall

if TYPE_CHECKING:
    from composer_replication.evaluation.held_out import HeldOut, HeldOutSession
    from composer_replication.sessions.rendering import CallPlace, KeptSite

Role = Literal["erring", "correction", "good"]
NO_GOOD_CALL, NOT_RENDERED = "no_good_call_in_the_session", "correction_not_rendered"
NEAR_DUPLICATE, NO_CORRECTION = "near_duplicate", "no_correction"
_MOST_LOOKED_AT = 64


class Decided(NamedTuple):
    """One decision: where it stands in its session, and the tokens to score, each stretch behind its context."""

    id: str
    role: Role
    conversation_id: str
    turn_id: str
    turn: int
    basis: str
    responses: tuple[Response, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) - start for ids, start in self.responses)


class SiteDecisions(NamedTuple):
    """All decisions of one site; they are scored together."""

    site_id: str
    kind: str
    conversation_id: str
    session: str
    decided: tuple[Decided, ...]

    @property
    def responses(self) -> list[Response]:
        return [response for decided in self.decided for response in decided.responses]


def digest_of(responses: Sequence[Response]) -> str:
    """Of token ids and of where responses begin: what a score belongs to."""
    total = hashlib.sha256()
    for ids, start in responses:
        total.update(array("q", [len(ids), start, *ids]).tobytes())
    return total.hexdigest()


def site_decisions(
    renderer: Renderer, held: HeldOut, *, context: int, num_good: int, drops: Counter[str]
) -> Iterator[SiteDecisions]:
    """Of every site of the held-out sessions that is no near-duplicate of what was learnt, and has a good call."""
    by_session: dict[str, list[CallPlace]] = {}
    for session in held.sessions:
        by_session.setdefault(session.session, []).extend(session.rendered.good_calls)
    for session in held.sessions:
        for site in session.rendered.sites:
            if held.is_duplicate(session.conversation.id, site.site.turn_id):
                drops[NEAR_DUPLICATE] += 1
                continue
            unseen_calls = [call for call in by_session[session.session] if not _is_seen(held, call)]
            good = list(islice(_good_calls(renderer, site, unseen_calls), num_good))
            if why_no_target(site.span) or not good:
                drops[why_no_target(site.span) or NO_GOOD_CALL] += 1
                continue
            yield _decisions(renderer, session, site, good, context, drops)


def _is_seen(held: HeldOut, call: CallPlace) -> bool:
    return held.is_duplicate(call.rendered.conversation_id, call.span.turn_id)


def _good_calls(renderer: Renderer, site: KeptSite, calls: Sequence[CallPlace]) -> Iterator[tuple[CallPlace, Decision]]:
    """Before or after the site; those of its own conversation first, among these the same tool's, then the nearest."""

    def order(candidate: CallPlace) -> tuple[bool, bool, int]:
        is_elsewhere = candidate.rendered.conversation_id != site.rendered.conversation_id
        return is_elsewhere, candidate.words.name != site.site.tool, abs(candidate.number - site.number)

    for call in sorted(calls, key=order)[:_MOST_LOOKED_AT]:
        decision = decide_like(renderer, call.rendered, call.span, call.words, site.decision)
        if decision is not None and call.span.turn_id != site.span.turn_id:
            yield call, decision


def _decisions(
    renderer: Renderer,
    held: HeldOutSession,
    site: KeptSite,
    good: Sequence[tuple[CallPlace, Decision]],
    context: int,
    drops: Counter[str],
) -> SiteDecisions:
    erring_call = DecidedCall(site.rendered, site.span, site.decision)
    decided = [_decided(site, "erring", "erring", erring_call, site.number, context)]
    right = held.logged.right_call(site.site)
    if right is not None:
        corrected = corrected_call(renderer, held.conversation, site, right)
        if corrected is None:
            drops[NOT_RENDERED] += 1
        else:
            decided.append(_decided(site, "correction", "correction", corrected, site.number, context))
    for number, (good_call, decision) in enumerate(good):
        call = DecidedCall(good_call.rendered, good_call.span, decision)
        decided.append(_decided(site, f"good-{number}", "good", call, good_call.number, context))
    return SiteDecisions(site.site.id, site.site.kind, held.conversation.id, held.session, tuple(decided))


def _decided(site: KeptSite, name: str, role: Role, call: DecidedCall, turn: int, context: int) -> Decided:
    first = _first_token(site, call, context)
    stretches = call.decision.stretches
    responses = tuple((call.rendered.ids[first:end], begin - first) for begin, end in stretches)
    return Decided(
        f"{site.site.id}:{name}",
        role,
        call.rendered.conversation_id,
        call.span.turn_id,
        turn,
        call.decision.basis,
        responses,
    )


def _first_token(site: KeptSite, call: DecidedCall, context: int) -> int:
    """The site's own where that leaves the call at least half of the context and at most half more: all share it."""
    own_start = max(0, site.span.header_start - context)
    at = call.span.header_start
    is_same = call.rendered is site.rendered or call.span.header_start == site.span.header_start
    if is_same and own_start + (context // 2 if own_start else 0) <= at <= own_start + context + context // 2:
        return own_start
    return max(0, at - context // 2)


def corrected_call(
    renderer: Renderer, conversation: Conversation, site: KeptSite, right: ToolCall
) -> DecidedCall | None:
    """The erring turn with the right call in place of the failing one, behind the same words; None: no template."""
    turn = conversation.turns[site.number]
    at = next((number for number, call in enumerate(turn.calls) if call.id == site.site.call_id), 0)
    if not turn.calls:
        return None
    calls = (*turn.calls[:at], replace(right, id=turn.calls[at].id), *turn.calls[at + 1 :])
    changed = replace(turn, id=f"{turn.id}:corrected", calls=calls, token_ids=None, logprobs=None)
    turns = (*conversation.turns[: site.number], changed)
    try:
        rendered = renderer.render(Conversation(id=conversation.id, format=conversation.format, turns=turns))[-1]
    except InputError:
        return None
    span = rendered.spans[-1]
    if span.turn_id != changed.id or why_no_target(span):
        return None
    options = {"format_name": conversation.format, "right": turn.calls[at]}
    return _with_shared_context(site, rendered, span, decide_against(renderer, rendered, span, changed, at, **options))


def _with_shared_context(
    site: KeptSite, rendered: RenderedSequence, span: TurnSpan, decision: Decision
) -> DecidedCall | None:
    """Only where the two calls stand behind the same tokens: in another context nothing could be compared."""
    same = rendered.ids[: span.start] == site.rendered.ids[: site.span.start]
    return DecidedCall(rendered, span, decision) if same and decision.num_tokens else None
