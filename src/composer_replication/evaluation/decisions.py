"""Read the held-out sessions of a run, choose the decisions to score at each error site, and score them.

At a site these are the erring call, its correction if the session shows one, and good calls of the same session, all
without hints and scored in one pass. A good call is compared on as many tokens as the erring one
(`batch.render.decision`). Scores are stored by weights and token ids as they are computed, so an interrupted evaluation
resumes.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import nn

from composer_replication.batch.hint_placement import exclusion_reason
from composer_replication.batch.render.decision import Decision, find_decision_against, find_matching_decision
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.errors import ArtefactCorruptError, InputError, NonFiniteError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.files import controls_among
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
# Reasons in `drops`.
NO_GOOD_CALL, NOT_RENDERED = "no_good_call_in_the_session", "correction_not_rendered"
NEAR_DUPLICATE, NO_CORRECTION = "near_duplicate", "no_correction"
# Good calls that are tried for one site, the best candidates first; bounds the time for long sessions.
_MOST_LOOKED_AT = 64


class Decided(NamedTuple):
    """One decision: its turn, and its responses, which are spans of tokens to score, each after its context."""

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
    """All decisions of one error site; they are scored together."""

    site_id: str
    kind: str
    conversation_id: str
    session: str
    decided: tuple[Decided, ...]

    @property
    def responses(self) -> list[Response]:
        return [response for decided in self.decided for response in decided.responses]


def digest_of(responses: Sequence[Response]) -> str:
    """Return a digest of the token ids and of where each response begins: the identity of a score."""
    total = hashlib.sha256()
    for ids, start in responses:
        # 64-bit integers with the lengths in front, so that no two lists of ids give the same bytes.
        total.update(array("q", [len(ids), start, *ids]).tobytes())
    return total.hexdigest()


def site_decisions(
    renderer: Renderer, held: HeldOut, *, context: int, num_good: int, drops: Counter[str]
) -> Iterator[SiteDecisions]:
    """Yield the decisions of every site in the held-out sessions.

    Left out, and counted in `drops`, are near-duplicates of training states and sites without a good call.
    """
    by_session: dict[str, list[GoodCall]] = {}
    for session in held.sessions:
        by_session.setdefault(session.session, []).extend(session.rendered.good_calls)
    for session in held.sessions:
        for site in session.rendered.sites:
            if held.is_duplicate(session.conversation.id, site.site.turn_id):
                drops[NEAR_DUPLICATE] += 1
                continue
            unseen_calls = [call for call in by_session[session.session] if not _is_seen(held, call)]
            good = list(islice(_good_calls(renderer, site, unseen_calls), num_good))
            if exclusion_reason(site.span) or not good:
                drops[exclusion_reason(site.span) or NO_GOOD_CALL] += 1
                continue
            yield _decisions(renderer, session, site, good, context, drops)


def _is_seen(held: HeldOut, call: GoodCall) -> bool:
    return held.is_duplicate(call.rendered.conversation_id, call.span.turn_id)


def _good_calls(renderer: Renderer, site: KeptSite, calls: Sequence[GoodCall]) -> Iterator[tuple[GoodCall, Decision]]:
    """Yield good calls that can be compared with the site's, from before or after it.

    Calls of the same conversation come first, among these calls of the same tool, then the nearest.
    """

    def order(candidate: GoodCall) -> tuple[bool, bool, int]:
        is_elsewhere = candidate.rendered.conversation_id != site.rendered.conversation_id
        return is_elsewhere, candidate.words.name != site.site.tool, abs(candidate.number - site.number)

    for call in sorted(calls, key=order)[:_MOST_LOOKED_AT]:
        decision = find_matching_decision(renderer, call.rendered, call.span, call.words, site.decision)
        if decision is not None and call.span.turn_id != site.span.turn_id:
            yield call, decision


def _decisions(
    renderer: Renderer,
    held: HeldOutSession,
    site: KeptSite,
    good: Sequence[tuple[GoodCall, Decision]],
    context: int,
    drops: Counter[str],
) -> SiteDecisions:
    erring_call = DecidedCall(site.rendered, site.span, site.decision)
    decided = [_decided(site, "erring", "erring", erring_call, site.number, context)]
    right = held.logged.right_call(site.site)
    if right is not None:
        corrected = _corrected_call(renderer, held.conversation, site, right)
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
    """Return where the context of a call begins.

    That is the site's own start, if the call then has between half and one and a half of the context: all decisions of
    a site that share a start share the forward pass over their common tokens.
    """
    own_start = max(0, site.span.header_start - context)
    at = call.span.header_start
    is_same = call.rendered is site.rendered or call.span.header_start == site.span.header_start
    if is_same and own_start + (context // 2 if own_start else 0) <= at <= own_start + context + context // 2:
        return own_start
    return max(0, at - context // 2)


def _corrected_call(
    renderer: Renderer, conversation: Conversation, site: KeptSite, right: ToolCall
) -> DecidedCall | None:
    """Return the erring turn with the right call in place of the failing one, or None if the template cannot show it.

    The text before the call stays the same.
    """
    turn = conversation.turns[site.number]
    # A site without a call id is about the first call of its turn.
    at = next((number for number, call in enumerate(turn.calls) if call.id == site.site.call_id), 0)
    # Errors of plain text have no call to replace.
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
    if span.turn_id != changed.id or exclusion_reason(span):
        return None
    options = {"format_name": conversation.format, "right": turn.calls[at]}
    return _with_shared_context(
        site, rendered, span, find_decision_against(renderer, rendered, span, changed, at, **options)
    )


def _with_shared_context(
    site: KeptSite, rendered: RenderedSequence, span: TurnSpan, decision: Decision
) -> DecidedCall | None:
    """Return the call only if both have the same tokens before them: in different contexts they
    could not be compared.
    """
    same = rendered.ids[: span.start] == site.rendered.ids[: site.span.start]
    return DecidedCall(rendered, span, decision) if same and decision.num_tokens else None


# ---- the held-out sessions

SIDES: tuple[Side, ...] = ("train", "validation", "test")


class HeldOutSession(NamedTuple):
    """A conversation with its rendering, its session, and its part of the split."""

    session: str
    side: Side
    logged: LoggedSession
    rendered: RenderedSession

    @property
    def conversation(self) -> Conversation:
        return self.logged.conversation


@dataclass(kw_only=True)
class HeldOut:
    """The held-out conversations, a few of the training ones, and the sessions and sites of each part of the split.

    `duplicates` are (conversation, turn) of held-out states that also occur in training sessions; nothing is scored
    there.
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
    """Read the test part of a run in one pass, and training conversations with at least `num_training_sites` sites."""
    rows_by_id = {row.conversation_id: row for row in rows}
    names = {side: {row.session for row in rows if row.side == side} for side in SIDES}
    held_out = HeldOut(
        num_sessions={side: len(names[side]) for side in SIDES},
        num_sites=dict.fromkeys(SIDES, 0),
        duplicates=frozenset((row.conversation_id, turn) for row in rows for turn in row.near_duplicates),
    )
    num_known = 0
    for logged in read_sessions(run, with_sites=True, with_pairs=False):
        placed_row = rows_by_id[logged.conversation.id]
        num_kept = sum(site.is_kept for site, _ in logged.sites)
        held_out.num_sites[placed_row.side] += num_kept
        if placed_row.side == "test":
            held = _rendered(placed_row, logged, renderer, settings)
            # Turns that are not imitated (lm_ce) are no loss to an evaluation of sites.
            drops = held.rendered.drops.items()
            held_out.drops.update({reason: number for reason, number in drops if not reason.startswith("lm_ce")})
            held_out.sessions.append(held)
        elif num_kept and num_known < num_training_sites:
            held_out.training.append(_rendered(placed_row, logged, renderer, settings))
            num_known += len(held_out.training[-1].rendered.sites)
    return held_out


def _rendered(
    placement: SplitRow, logged: LoggedSession, renderer: Renderer, settings: WindowSettings
) -> HeldOutSession:
    right = _corrections_of(logged)
    session = LoggedSession(conversation=logged.conversation, sites=logged.sites, corrections=right)
    return HeldOutSession(placement.session, placement.side, session, render_session(renderer, session, settings))


def _corrections_of(logged: LoggedSession) -> dict[str, ToolCall]:
    """Return by site id the call that the session itself shows to be right."""
    from composer_replication.pairs.corrections import ACTED, own_pairs

    # Pairs that prefer acting at once (ACTED) say nothing about how to repair a call.
    kept_ids = {site.id for site, _ in logged.sites if site.is_kept}
    failures = [site for site, _ in logged.sites]
    pairs = own_pairs(logged.conversation, failures, only=kept_ids) if kept_ids else ()
    return {pair.site_id: pair.chosen for pair in pairs if pair.source != ACTED}


# ---- scores

Scores = dict[str, list[list[float]]]
"""By arm, for each group of responses, the sum of log-probs of each response."""


class ScoreJournal:
    """The results computed so far, in a journal next to the run's artifacts.

    `close` keeps the file for the next evaluation; `remove` deletes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Any] = {}
        try:
            self._known = {str(row["key"]): row["value"] for row in read_journal(path).rows if "key" in row}
        except FileNotFoundError:
            pass
        except ArtefactCorruptError:  # nothing in it can be resumed
            path.unlink()
        self._journal = Journal(path)

    def get(self, key: str) -> Any | None:
        return self._known.get(key)

    def put(self, key: str, value: Any) -> Any:
        self._journal.append({"key": key, "value": value})
        self._known[key] = value
        return value

    def close(self) -> None:
        self._journal.close()

    def remove(self) -> None:
        """Delete the journal, once its results are in the artifacts."""
        self.close()
        self.path.unlink(missing_ok=True)


def score_groups(
    model: nn.Module,
    weights: str,
    groups: Sequence[Sequence[Response]],
    journal: ScoreJournal,
    *,
    what: str,
    items: str,
) -> list[list[float]]:
    """Return summed log-probs of each group's responses, one pass per group; `weights` identifies the model in the
    journal.
    """
    scores: list[list[float]] = []
    for number, group in enumerate(groups):
        report_phase(Phase(name=what, done=number, total=len(groups), items=items, stored_in=journal.path))
        key = f"{weights}:{digest_of(group)}"
        sums = journal.get(key)
        scores.append(sums if sums is not None else journal.put(key, numbers(response_logprobs(model, group).tolist())))
    report_phase(Phase(name=what, done=len(groups), total=len(groups), items=items, stored_in=journal.path))
    return scores


def numbers(values: list[float]) -> list[float]:
    """Return the values, or raise NonFiniteError: JSON has no NaN, and a mean over one says nothing."""
    if not all(map(math.isfinite, values)):
        raise NonFiniteError(explain("log-probs", got="NaN or infinity", expected="finite numbers"))
    return values


def evaluated_rows(sites: Iterable[SiteDecisions], scores: Scores) -> list[dict[str, Any]]:
    """Return one row per decision, with its mean log-prob per token in each arm."""
    rows: list[dict[str, Any]] = []
    for number, site in enumerate(sites):
        means = {arm: _means(site, every[number]) for arm, every in scores.items()}
        for at, decision in enumerate(site.decided):
            rows.append(
                {
                    "id": decision.id,
                    "conversation_id": decision.conversation_id,
                    "session": site.session,
                    "turn": decision.turn,
                    "turn_id": decision.turn_id,
                    "site_id": site.site_id,
                    "kind": site.kind,
                    "role": decision.role,
                    "basis": decision.basis,
                    "num_tokens": decision.num_tokens,
                    **_of_arms(means, at),
                }
            )
    return rows


def _of_arms(means: Mapping[str, list[float]], at: int) -> dict[str, float | list[float] | None]:
    """Return the value of each arm; a control with several shuffles has one for each, and their mean."""
    controls = [means[name][at] for name in controls_among(means)]
    return {
        "before": means["before"][at],
        "after": means["after"][at],
        "control": fmean(controls) if controls else None,
        "controls": controls or None,
    }


def _means(site: SiteDecisions, sums: Sequence[float]) -> list[float]:
    # A decision may have several responses; their sums follow each other in the order of `SiteDecisions.responses`.
    remaining_sums = iter(sums)
    return [sum(next(remaining_sums) for _ in decision.responses) / decision.num_tokens for decision in site.decided]
