"""One logged session as token ids, made once: which turns, sites and pairs each channel may have, drops by name.

Windows, proofs and references are made of what is here. The conversation itself is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from composer_replication.actions.parse import answer_turn
from composer_replication.actions.write import turn_of
from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.pair_tokens import compared_ids
from composer_replication.batch.render.decision import CallWords, Decision, decide_against
from composer_replication.batch.render.renderer import (
    RenderedSequence,
    Renderer,
    TurnSpan,
    thinking_counts,
)
from composer_replication.batch.session_records import TokenPair
from composer_replication.batch.taught_turns import Part, why_no_target
from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.runs.pairs import LoggedPair
from composer_replication.sessions.good_turns import GoodTurns, good_turns, taught_otherwise
from composer_replication.sessions.read_run import LoggedSession
from composer_replication.types import Conversation, ErrorSite

Responses = Literal["good", "all", "none"]
RESPONSES: tuple[Responses, ...] = ("good", "all", "none")
NOT_RENDERED = "not_rendered"
NOT_IN_RENDERING = "turn_not_in_rendering"
NO_SUCH_TURN = "pair_of_no_such_turn"
_RESPONSES, _SITES, _PAIRS = CHANNELS
_known_ids: dict[int, int] = {}


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """How sessions are cut and what is taken from them.

    `responses` are the turns of channel 1: those that nothing speaks against (`good`, see `good_turns`, which also
    reads `work_failures`), all of the model's own that no pair rejects and no kept site blames, or none. Turns that
    were copied from another conversation are never among them. `use_sites` and `use_pairs` switch channels 2 and 3.
    With `contrast` a site also has the hint of a site of another kind, as a wrong one. The rest is that of
    `session_batches`.
    """

    budget: int
    overlap: int = 0
    responses: Responses = "good"
    work_failures: bool = False
    use_sites: bool = True
    use_pairs: bool = True
    placement: Placement = "before_turn"
    part: Part = "turn"
    max_length: int | None = None
    contrast: bool = False

    def __post_init__(self) -> None:
        if self.responses not in RESPONSES:
            raise InputError(explain("responses", got=repr(self.responses), expected=f"one of {RESPONSES}"))


class KeptSite(NamedTuple):
    """A site that may teach, its hint, where its turn stands, which tokens decide its call; the turn's number."""

    site: ErrorSite
    hint: str
    rendered: RenderedSequence
    span: TurnSpan
    decision: Decision
    number: int


class CallPlace(NamedTuple):
    """Where a good turn with a call stands, what its first call is known by, and the turn's number."""

    rendered: RenderedSequence
    span: TurnSpan
    words: CallWords
    number: int


class PairSide(NamedTuple):
    """A response from its start on, after the first tokens of its session and what else stands before it."""

    num_shared: int
    rest: list[int]
    start: int

    @classmethod
    def of(cls, ids: list[int], start: int, session: list[int]) -> PairSide:
        """Most of a pair's context is the session's own: many pairs would hold it many times."""
        shared = start if ids[:start] == session[:start] else 0
        return cls(shared, ids[shared:], start)

    def ids(self, session: list[int]) -> list[int]:
        return [*session[: self.num_shared], *self.rest]


class KeptPair(NamedTuple):
    """A pair as token ids, and where its turn, `turn_id`, stands; `kind`: whose it is, and which tools it weighs."""

    state_id: str
    rendered: RenderedSequence
    chosen: PairSide
    rejected: PairSide
    kind: str = ""
    turn_id: str = ""

    def tokens(self) -> TokenPair:
        chosen, rejected = (side.ids(self.rendered.ids) for side in (self.chosen, self.rejected))
        return TokenPair(
            chosen_ids=chosen,
            chosen_start=self.chosen.start,
            rejected_ids=rejected,
            rejected_start=self.rejected.start,
        )


@dataclass(eq=False, slots=True, kw_only=True)
class RenderedSession:
    """The token ids of one conversation, and what may be learned in them.

    `responses` are ids of turns. `good_calls` are good turns with a call, whether channel 1 learns them or not. `hints`
    are those of all sites that may teach (id, kind, text): wrong hints are drawn from them. `counts` says what there
    is, `drops` what is missing, as `channel: reason`.
    """

    conversation_id: str
    models: frozenset[str]
    sequences: list[RenderedSequence]
    responses: frozenset[str] = frozenset()
    good_calls: list[CallPlace] = field(default_factory=list[CallPlace])
    sites: list[KeptSite] = field(default_factory=list[KeptSite])
    pairs: list[KeptPair] = field(default_factory=list[KeptPair])
    hints: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    counts: Counter[str] = field(default_factory=Counter[str])
    drops: Counter[str] = field(default_factory=Counter[str])


def render_session(renderer: Renderer, session: LoggedSession, settings: WindowSettings) -> RenderedSession:
    """What the channels that are on may have of a session."""
    conversation = session.conversation
    rendered_session = RenderedSession(conversation_id=conversation.id, models=models_of(conversation), sequences=[])
    rendered_session.counts["conversations"] += 1
    try:
        rendered_session.sequences = [_with_shared_ids(sequence) for sequence in renderer.render(conversation)]
    except AlignmentError:  # a template that puts one message's text into another's turn: of no use for any
        raise
    except InputError:  # no turns, or none that this template can show
        rendered_session.drops[f"conversations: {NOT_RENDERED}"] += 1
    rendered_session.counts.update(thinking_counts(rendered_session.sequences))
    if settings.use_sites:
        _keep_sites(rendered_session, session, renderer)
    if settings.use_pairs:
        _keep_pairs(rendered_session, session, renderer)
    good = good_turns(session, work_failures=settings.work_failures)
    rendered_session.good_calls = _good_calls(rendered_session, conversation, good.good)
    rendered_session.responses = _responses(rendered_session, session, settings, good)
    return rendered_session


def models_of(conversation: Conversation) -> frozenset[str]:
    """Names of the models that wrote its turns; an empty one where a turn does not say."""
    return frozenset(turn.model or "" for turn in conversation.turns if turn.role == "assistant")


def _with_shared_ids(sequence: RenderedSequence) -> RenderedSequence:
    """One number object for each id: a list of them then takes 8 bytes a token, and not 36."""
    return replace(sequence, ids=[_known_ids.setdefault(token_id, token_id) for token_id in sequence.ids])


def _keep_sites(into: RenderedSession, session: LoggedSession, renderer: Renderer) -> None:
    """Sites that may teach and have a hint, in the order of the session; the others are counted."""
    turns = {turn.id: (number, turn) for number, turn in enumerate(session.conversation.turns)}
    spans_by_turn = {span.turn_id: (rendered, span) for rendered in into.sequences for span in rendered.spans}
    for site, hint in session.sites:
        if not site.is_kept:
            continue
        if hint is not None:
            into.hints.append((site.id, site.kind, hint.text))
        if hint is None or not hint.text.strip():
            into.drops[f"{_SITES}: without_hint"] += 1
        elif site.turn_id not in spans_by_turn:
            into.drops[f"{_SITES}: {NOT_IN_RENDERING}"] += 1
        else:
            rendered, span = spans_by_turn[site.turn_id]
            number, turn = turns[site.turn_id]
            call_number = next((at for at, call in enumerate(turn.calls) if call.id == site.call_id), 0)
            options = {"format_name": session.conversation.format, "right": session.right_call(site)}
            decision = decide_against(renderer, rendered, span, turn, call_number, **options)
            into.sites.append(KeptSite(site, hint.text, rendered, span, decision, number))


def _good_calls(into: RenderedSession, conversation: Conversation, good: frozenset[str]) -> list[CallPlace]:
    turns = enumerate(conversation.turns)
    calls = {turn.id: (CallWords.of(turn.calls[0]), at) for at, turn in turns if turn.id in good and turn.calls}
    return [
        CallPlace(rendered, span, *calls[span.turn_id])
        for rendered in into.sequences
        for span in rendered.spans
        if span.turn_id in calls and not why_no_target(span)
    ]


def _responses(
    into: RenderedSession, session: LoggedSession, settings: WindowSettings, good_turns: GoodTurns
) -> frozenset[str]:
    """Ids of the turns of channel 1; the model's other turns are counted by what speaks against them."""
    if settings.responses == "none":
        return frozenset()
    if settings.responses == "all":
        own_ids = {turn.id for turn in session.conversation.turns if turn.origin == "model"}
        return frozenset(own_ids - taught_otherwise(session))
    into.counts.update(model_turns=len(good_turns.good) + len(good_turns.not_good), good_turns=len(good_turns.good))
    into.drops.update(f"{_RESPONSES}: {reason}" for reason in good_turns.not_good.values())
    return good_turns.good


def _keep_pairs(into: RenderedSession, session: LoggedSession, renderer: Renderer) -> None:
    turns = session.conversation.turns
    assistant_indices = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    spans_by_turn = {span.turn_id: (rendered, span) for rendered in into.sequences for span in rendered.spans}
    for pair in session.pairs:
        index = assistant_indices[pair.turn_number] if 0 <= pair.turn_number < len(assistant_indices) else None
        outcome: KeptPair | str = NO_SUCH_TURN
        if index is not None:
            location = spans_by_turn.get(turns[index].id)
            outcome = _pair(renderer, session.conversation, index, pair, *location) if location else NOT_IN_RENDERING
        if isinstance(outcome, KeptPair):
            into.pairs.append(outcome)
        else:
            into.drops[f"{_PAIRS}: {outcome}"] += 1


def _pair(
    renderer: Renderer,
    conversation: Conversation,
    index: int,
    pair: LoggedPair,
    rendered: RenderedSequence,
    span: TurnSpan,
) -> KeptPair | str:
    """Chosen against rejected; or why not. A logged turn's side is the session itself where the contexts agree."""
    before, logged = conversation.turns[:index], conversation.turns[index]
    name, location = f"{pair.state_id}:chosen", (rendered, span)
    if pair.rejected is not None:  # one call of the turn, or none of it
        logged, location = turn_of(pair.rejected, turn_id=f"{pair.state_id}:rejected"), None
    answer = answer_turn(pair.chosen, turn_id=name) if pair.action is None else turn_of(pair.action, turn_id=name)
    options = {"conversation_id": pair.state_id, "format_name": conversation.format}  # for the session's tools
    try:
        sides = compared_ids(renderer, before, answer, logged, **options, logged=location)
    except InputError:
        return NOT_RENDERED
    if isinstance(sides, str):
        return sides
    kind = " ".join([pair.source, *(call.name for turn in (answer, logged) for call in turn.calls)])
    chosen, rejected = (PairSide.of(ids, start, rendered.ids) for ids, start in sides)
    return KeptPair(pair.state_id, rendered, chosen, rejected, kind, span.turn_id)


def ids_said(sessions: Iterable[RenderedSession]) -> set[int]:
    """Ids of all tokens that stand in turns of the model's own."""
    spoken_ids: set[int] = set()
    for sequence in (rendered for session in sessions for rendered in session.sequences):
        spoken_ids.update(*(sequence.ids[span.start : span.end] for span in sequence.spans))
    return spoken_ids
