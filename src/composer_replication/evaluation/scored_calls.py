"""Read the held-out sessions of a run, choose the decisions to score at each error site, and score them.

The decisions of a site are the erring call, its correction if the session contains one, and good calls from the same
session. All decisions are scored without hints; those that share a context are scored in one forward pass. A good call
is compared on as many tokens as the erring call (`batch.render.decision`). As soon as a score is computed, it is stored
under a key made from the weights and the token ids, so that an interrupted evaluation can resume.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import nn

from composer_replication.batch.hint_placement import exclusion_reason
from composer_replication.batch.render.decision import Decision, find_decision_against, find_matching_decision
from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import ArtefactCorruptError, InputError, NonFiniteError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.journal import Journal, read_journal
from composer_replication.runs.split import Side, SplitRow
from composer_replication.trainer.objective.hint_proof import DecidedCall
from composer_replication.trainer.objective.reference import Response, response_logprobs
from composer_replication.trainer.sessions.phases import Phase, report_phase
from composer_replication.trainer.sessions.rendering import (
    LoggedSession,
    RenderedSession,
    WindowSettings,
    read_sessions,
    render_session,
)
from composer_replication.types import Conversation, ToolCall

if TYPE_CHECKING:
    from composer_replication.trainer.sessions.rendering import GoodCall, KeptSite


Role = Literal["erring", "correction", "good"]
# Reasons that `drops` counts.
NO_GOOD_CALL, NOT_RENDERED = "no_good_call_in_the_session", "correction_not_rendered"
NEAR_DUPLICATE, NO_CORRECTION = "near_duplicate", "no_correction"
# At most so many good calls are tried for one site, the best candidates first; bounds the time for long sessions.
_MAX_CANDIDATES = 64


class ScoredDecision(NamedTuple):
    """A decision to score: its role at the error site, its turn, and the token spans of the call, each with its
    context.
    """

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
    """The decisions of one error site, which are scored together."""

    site_id: str
    kind: str
    conversation_id: str
    session: str
    decisions: tuple[ScoredDecision, ...]

    @property
    def responses(self) -> list[Response]:
        return [response for decision in self.decisions for response in decision.responses]


def digest_of(responses: Sequence[Response]) -> str:
    """Return a digest that identifies the score of these responses, from the token ids and the start of each."""
    total = hashlib.sha256()
    for ids, start in responses:
        # Lengths come first, so that no two lists of responses give the same bytes.
        total.update(array("q", [len(ids), start, *ids]).tobytes())
    return total.hexdigest()


def site_decisions(
    renderer: Renderer, held_out: HeldOut, *, context: int, num_good: int, drops: Counter[str]
) -> Iterator[SiteDecisions]:
    """Yield the decisions of every error site in the held-out sessions.

    A site is skipped, and counted in `drops`, if it is a near-duplicate of a training state or has no comparable good
    call.
    """
    by_session: dict[str, list[GoodCall]] = {}
    for session in held_out.sessions:
        by_session.setdefault(session.session, []).extend(session.rendered.good_calls)
    for session in held_out.sessions:
        for site in session.rendered.sites:
            if held_out.is_duplicate(session.conversation.id, site.site.turn_id):
                drops[NEAR_DUPLICATE] += 1
                continue
            candidates = [
                call
                for call in by_session[session.session]
                if not held_out.is_duplicate(call.rendered.conversation_id, call.span.turn_id)
            ]
            good = list(islice(_comparable_calls(renderer, site, candidates), num_good))
            if exclusion_reason(site.span) or not good:
                drops[exclusion_reason(site.span) or NO_GOOD_CALL] += 1
                continue
            yield _decisions_at(renderer, session, site, good, context, drops)


def _comparable_calls(
    renderer: Renderer, site: KeptSite, calls: Sequence[GoodCall]
) -> Iterator[tuple[GoodCall, Decision]]:
    """Yield the good calls that can be compared with the site's erring call.

    Calls from the same conversation come first, then calls of the same tool, then the nearest ones.
    """

    def sort_key(candidate: GoodCall) -> tuple[bool, bool, int]:
        is_elsewhere = candidate.rendered.conversation_id != site.rendered.conversation_id
        return is_elsewhere, candidate.words.name != site.site.tool, abs(candidate.number - site.number)

    for call in sorted(calls, key=sort_key)[:_MAX_CANDIDATES]:
        decision = find_matching_decision(renderer, call.rendered, call.span, call.words, site.decision)
        if decision is not None and call.span.turn_id != site.span.turn_id:
            yield call, decision


def _decisions_at(
    renderer: Renderer,
    session: HeldOutSession,
    site: KeptSite,
    good: Sequence[tuple[GoodCall, Decision]],
    context: int,
    drops: Counter[str],
) -> SiteDecisions:
    erring_call = DecidedCall(site.rendered, site.span, site.decision)
    decisions = [_decision_to_score(site, "erring", "erring", erring_call, site.number, context)]
    right_call = session.logged.right_call(site.site)
    if right_call is not None:
        corrected = _corrected_call(renderer, session.conversation, site, right_call)
        if corrected is None:
            drops[NOT_RENDERED] += 1
        else:
            decisions.append(_decision_to_score(site, "correction", "correction", corrected, site.number, context))
    for number, (good_call, decision) in enumerate(good):
        call = DecidedCall(good_call.rendered, good_call.span, decision)
        decisions.append(_decision_to_score(site, f"good-{number}", "good", call, good_call.number, context))
    return SiteDecisions(site.site.id, site.site.kind, session.conversation.id, session.session, tuple(decisions))


def _decision_to_score(
    site: KeptSite, name: str, role: Role, call: DecidedCall, turn: int, context: int
) -> ScoredDecision:
    first = _context_start(site, call, context)
    responses = tuple((call.rendered.ids[first:end], begin - first) for begin, end in call.decision.stretches)
    return ScoredDecision(
        f"{site.site.id}:{name}",
        role,
        call.rendered.conversation_id,
        call.span.turn_id,
        turn,
        call.decision.basis,
        responses,
    )


def _context_start(site: KeptSite, call: DecidedCall, context: int) -> int:
    """Return the position of the first token that a call's score is conditioned on.

    Decisions of a site whose contexts begin at the same token share one forward pass over their common tokens.
    Therefore a call uses the start of the erring call's context, unless its own context would then be shorter than 0.5
    or longer than 1.5 times `context`.
    """
    site_start = max(0, site.span.header_start - context)
    at = call.span.header_start
    is_same_sequence = call.rendered is site.rendered or call.span.header_start == site.span.header_start
    if (
        is_same_sequence
        and site_start + (context // 2 if site_start else 0) <= at <= site_start + context + context // 2
    ):
        return site_start
    return max(0, at - context // 2)


def _corrected_call(
    renderer: Renderer, conversation: Conversation, site: KeptSite, right_call: ToolCall
) -> DecidedCall | None:
    """Return the erring turn with the failing call replaced by the correct one, or None if the template cannot
    render it.

    The text of the turn before the call is kept.
    """
    turn = conversation.turns[site.number]
    # A site without a call id belongs to the first call of its turn.
    at = next((number for number, call in enumerate(turn.calls) if call.id == site.site.call_id), 0)
    # An error in plain text has no call to replace.
    if not turn.calls:
        return None
    calls = (*turn.calls[:at], replace(right_call, id=turn.calls[at].id), *turn.calls[at + 1 :])
    corrected_turn = replace(turn, id=f"{turn.id}:corrected", calls=calls, token_ids=None, logprobs=None)
    turns = (*conversation.turns[: site.number], corrected_turn)
    try:
        rendered = renderer.render(Conversation(id=conversation.id, format=conversation.format, turns=turns))[-1]
    except InputError:
        return None
    span = rendered.spans[-1]
    if span.turn_id != corrected_turn.id or exclusion_reason(span):
        return None
    options = {"format_name": conversation.format, "right": turn.calls[at]}
    decision = find_decision_against(renderer, rendered, span, corrected_turn, at, **options)
    # In different contexts the two calls could not be compared.
    has_same_context = rendered.ids[: span.start] == site.rendered.ids[: site.span.start]
    return DecidedCall(rendered, span, decision) if has_same_context and decision.num_tokens else None


# ---- the held-out sessions

SIDES: tuple[Side, ...] = ("train", "validation", "test")


class HeldOutSession(NamedTuple):
    """A rendered conversation, the name of its session, and the part of the split that it belongs to."""

    session: str
    side: Side
    logged: LoggedSession
    rendered: RenderedSession

    @property
    def conversation(self) -> Conversation:
        return self.logged.conversation


@dataclass(kw_only=True)
class HeldOut:
    """The held-out conversations, a few training conversations, and counts of sessions and error sites by part of the
    split.

    `duplicates` holds the (conversation, turn) ids of held-out states that also occur in training sessions. These
    states are not scored.
    """

    sessions: list[HeldOutSession] = field(default_factory=list[HeldOutSession])
    training: list[HeldOutSession] = field(default_factory=list[HeldOutSession])
    num_sessions: dict[str, int] = field(default_factory=dict[str, int])
    num_sites: dict[str, int] = field(default_factory=dict[str, int])
    duplicates: frozenset[tuple[str, str]] = frozenset()
    drops: Counter[str] = field(default_factory=Counter[str])

    def is_duplicate(self, conversation_id: str, turn_id: str) -> bool:
        return (conversation_id, turn_id) in self.duplicates


def read_held_out(
    run: RunDir,
    rows: Sequence[SplitRow],
    renderer: Renderer,
    settings: WindowSettings,
    *,
    num_training_sites: int = 0,
) -> HeldOut:
    """Return all test conversations, and training conversations until these have `num_training_sites` error sites in
    total.
    """
    rows_by_id = {row.conversation_id: row for row in rows}
    session_names = {side: {row.session for row in rows if row.side == side} for side in SIDES}
    held_out = HeldOut(
        num_sessions={side: len(session_names[side]) for side in SIDES},
        num_sites=dict.fromkeys(SIDES, 0),
        duplicates=frozenset((row.conversation_id, turn) for row in rows for turn in row.near_duplicates),
    )
    num_training = 0  # sites of the training conversations so far
    for logged in read_sessions(run, with_sites=True, with_pairs=False):
        placed_row = rows_by_id[logged.conversation.id]
        num_kept = sum(site.is_kept for site, _ in logged.sites)
        held_out.num_sites[placed_row.side] += num_kept
        if placed_row.side == "test":
            session = _render(placed_row, logged, renderer, settings)
            # Reasons why turns are not imitated (lm_ce) do not concern error sites.
            drops = session.rendered.drops.items()
            held_out.drops.update({reason: number for reason, number in drops if not reason.startswith("lm_ce")})
            held_out.sessions.append(session)
        elif num_kept and num_training < num_training_sites:
            held_out.training.append(_render(placed_row, logged, renderer, settings))
            num_training += len(held_out.training[-1].rendered.sites)
    return held_out


def _render(
    placed_row: SplitRow, logged: LoggedSession, renderer: Renderer, settings: WindowSettings
) -> HeldOutSession:
    corrections = _corrections_in(logged)
    session = LoggedSession(conversation=logged.conversation, sites=logged.sites, corrections=corrections)
    return HeldOutSession(placed_row.session, placed_row.side, session, render_session(renderer, session, settings))


def _corrections_in(logged: LoggedSession) -> dict[str, ToolCall]:
    """Map each site id to the call with which the agent corrected the error in the same session."""
    from composer_replication.pairs.corrections import ACTED, find_session_pairs

    # Pairs that prefer acting at once (ACTED) do not correct a failed call.
    kept_ids = {site.id for site, _ in logged.sites if site.is_kept}
    failures = [site for site, _ in logged.sites]
    pairs = find_session_pairs(logged.conversation, failures, only=kept_ids) if kept_ids else ()
    return {pair.site_id: pair.chosen for pair in pairs if pair.source != ACTED}


# ---- scores

Scores = dict[str, list[list[float]]]
"""By arm: for each group of responses, the summed log-probs of each response."""


class ScoreJournal:
    """A file of values computed so far, stored by key, from which an interrupted evaluation resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        try:
            self._values = {str(row["key"]): row["value"] for row in read_journal(path).rows if "key" in row}
        except FileNotFoundError:
            pass
        except ArtefactCorruptError:  # start over
            path.unlink()
        self._journal = Journal(path)

    def get(self, key: str) -> Any | None:
        return self._values.get(key)

    def put(self, key: str, value: Any) -> Any:
        self._journal.append({"key": key, "value": value})
        self._values[key] = value
        return value

    def close(self) -> None:
        self._journal.close()

    def remove(self) -> None:
        """Delete the journal. Called once its results are stored in the artifacts."""
        self.close()
        self.path.unlink(missing_ok=True)


def score_groups(
    model: nn.Module,
    weights: str,
    groups: Sequence[Sequence[Response]],
    journal: ScoreJournal,
    *,
    name: str,
    items: str,
) -> list[list[float]]:
    """Return the summed log-probs of each response, computed with one forward pass per group.

    `weights` identifies the model in the journal; `name` and `items` describe the work to progress callbacks.
    """
    scores: list[list[float]] = []
    phase = Phase(name=name, done=0, total=len(groups), items=items, stored_in=journal.path)
    for number, group in enumerate(groups):
        report_phase(replace(phase, done=number))
        key = f"{weights}:{digest_of(group)}"
        if (sums := journal.get(key)) is None:
            sums = journal.put(key, check_finite(response_logprobs(model, group).tolist()))
        scores.append(sums)
    report_phase(replace(phase, done=len(groups)))
    return scores


def check_finite(values: list[float]) -> list[float]:
    """Return the values unchanged.

    Raises NonFiniteError if one is NaN or infinite: JSON has no NaN, and any mean would be NaN.
    """
    if not all(map(math.isfinite, values)):
        raise NonFiniteError(explain("log-probs", got="NaN or infinity", expected="finite numbers"))
    return values
