"""Read logged sessions from a run directory, and render each session as token ids with the items of each channel.

A `LoggedSession` is a conversation with its error sites, hints and preference pairs. `render_session` turns it into a
`RenderedSession`: its token ids, the good turns to imitate (channel 1), the error sites with hints to distill (channel
2), the preference pairs (channel 3), and counts of what was dropped. Windows, hint checks and references are computed
from the rendered session alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from composer_replication.action_text import answer_turn, has_text_after_call, parse_action_text, turn_from_action
from composer_replication.batch.hint_placement import Part, Placement, exclusion_reason
from composer_replication.batch.pair_tokens import comparable_ids
from composer_replication.batch.render.decision import CallWords, Decision, find_decision_against
from composer_replication.batch.render.renderer import (
    TEXT_FOLLOWS_CALL,
    RenderedSequence,
    Renderer,
    TurnSpan,
    count_thinking,
)
from composer_replication.batch.session_batch import TokenPair
from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.errors import AlignmentError, InputError, StaleArtefactError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.files import LoggedPair, read_conversations, read_pairs, read_sites
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.sites.find import NO_FAILURE
from composer_replication.types import Conversation, ErrorSite, Hint, ToolCall, Turn

Responses = Literal["good", "all", "none"]
RESPONSES: tuple[Responses, ...] = ("good", "all", "none")
NOT_RENDERED = "not_rendered"
NOT_IN_RENDERING = "turn_not_in_rendering"
NO_SUCH_TURN = "pair_of_no_such_turn"
_RESPONSES, _SITES, _PAIRS = CHANNELS
# Interned ints, one per token id; see `_intern_ids`.
_int_objects: dict[int, int] = {}


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """How sessions are cut into windows, and which training items the windows have.

    `responses` selects the turns to imitate (channel 1). "good" selects good turns (see `good_turns`, which also uses
    `work_failures`), "all" selects all of the model's turns except those that a pair rejects or a site blames, and
    "none" selects no turns. Turns copied from another conversation are never selected. `use_sites` and `use_pairs`
    switch channels 2 and 3 on. With `contrast`, sites also get an unrelated hint. The other settings are passed to
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
    """An error site to train on: its hint, the span and number of its turn, and the tokens that decide its call."""

    site: ErrorSite
    hint: str
    rendered: RenderedSequence
    span: TurnSpan
    decision: Decision
    number: int


class GoodCall(NamedTuple):
    """A good turn that contains a call: the turn's span and number, and the words that identify its first call."""

    rendered: RenderedSequence
    span: TurnSpan
    words: CallWords
    number: int


class _PairSide(NamedTuple):
    """One side of a pair: the first `num_shared` tokens of its session, followed by `rest`.

    The response begins at `start`. Most of a pair's context consists of the session's tokens, and a session may have
    many pairs, so shared tokens are not stored with every pair.
    """

    num_shared: int
    rest: list[int]
    start: int

    @classmethod
    def of(cls, ids: list[int], start: int, session: list[int]) -> _PairSide:
        """Return the side with these token ids, stored without the prefix that it shares with its session."""
        shared = start if ids[:start] == session[:start] else 0
        return cls(shared, ids[shared:], start)

    def ids(self, session: list[int]) -> list[int]:
        """Return all token ids of the side."""
        return [*session[: self.num_shared], *self.rest]


class KeptPair(NamedTuple):
    """A preference pair as token ids, for the turn `turn_id`.

    `kind` consists of the pair's source and the tools that both sides call.
    """

    state_id: str
    rendered: RenderedSequence
    chosen: _PairSide
    rejected: _PairSide
    kind: str = ""
    turn_id: str = ""

    def tokens(self) -> TokenPair:
        """Return the complete token ids of both sides."""
        chosen, rejected = (side.ids(self.rendered.ids) for side in (self.chosen, self.rejected))
        return TokenPair(
            chosen_ids=chosen,
            chosen_start=self.chosen.start,
            rejected_ids=rejected,
            rejected_start=self.rejected.start,
        )


@dataclass(eq=False, slots=True, kw_only=True)
class RenderedSession:
    """The token ids of one conversation, and its training items for each channel.

    `responses` are the ids of the turns to imitate (channel 1). `good_calls` are good turns with a call, whether or not
    channel 1 trains on them. `hints` lists the hints of all kept sites as (site id, kind, text); unrelated hints are
    chosen from it. `counts` has the numbers of items, and `drops` the numbers of items that were left out, as `channel:
    reason`.
    """

    conversation_id: str
    models: frozenset[str]
    sequences: list[RenderedSequence]
    responses: frozenset[str] = frozenset()
    good_calls: list[GoodCall] = field(default_factory=list[GoodCall])
    sites: list[KeptSite] = field(default_factory=list[KeptSite])
    pairs: list[KeptPair] = field(default_factory=list[KeptPair])
    hints: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    counts: Counter[str] = field(default_factory=Counter[str])
    drops: Counter[str] = field(default_factory=Counter[str])


def render_session(renderer: Renderer, session: LoggedSession, settings: WindowSettings) -> RenderedSession:
    """Return the token ids of a session, with the items of the channels that are on."""
    conversation = session.conversation
    # "" stands for turns that name no model.
    models = frozenset(turn.model or "" for turn in conversation.turns if turn.role == "assistant")
    rendered_session = RenderedSession(conversation_id=conversation.id, models=models, sequences=[])
    rendered_session.counts["conversations"] += 1
    try:
        rendered_session.sequences = [_intern_ids(sequence) for sequence in renderer.render(conversation)]
    except AlignmentError:  # the template moves text between turns, so it would fail for every session
        raise
    except InputError:  # no turns, or none that this template can render
        rendered_session.drops[f"conversations: {NOT_RENDERED}"] += 1
    rendered_session.counts.update(count_thinking(rendered_session.sequences))
    if settings.use_sites:
        _keep_sites(rendered_session, session, renderer)
    if settings.use_pairs:
        _keep_pairs(rendered_session, session, renderer)
    good = good_turns(session, work_failures=settings.work_failures)
    rendered_session.good_calls = _good_calls(rendered_session, conversation, good.good)
    rendered_session.responses = _response_turn_ids(rendered_session, session, settings, good)
    return rendered_session


def _intern_ids(sequence: RenderedSequence) -> RenderedSequence:
    """Return the sequence with one shared int object per distinct token id.

    Its list of ids then takes 8 bytes per token instead of 36.
    """
    return replace(sequence, ids=[_int_objects.setdefault(token_id, token_id) for token_id in sequence.ids])


def _keep_sites(into: RenderedSession, session: LoggedSession, renderer: Renderer) -> None:
    """Add the session's kept sites that have a hint and a rendered turn, in order, and count those that lack either."""
    turns = {turn.id: (number, turn) for number, turn in enumerate(session.conversation.turns)}
    spans_by_turn = {span.turn_id: (rendered, span) for rendered in into.sequences for span in rendered.spans}
    for site, hint in session.sites:
        if not site.is_kept:
            continue
        # Even if the site is dropped below, its hint can still serve as the unrelated hint of another site.
        if hint is not None:
            into.hints.append((site.id, site.kind, hint.text))
        if hint is None or not hint.text.strip():
            into.drops[f"{_SITES}: without_hint"] += 1
        elif site.turn_id not in spans_by_turn:
            into.drops[f"{_SITES}: {NOT_IN_RENDERING}"] += 1
        else:
            rendered, span = spans_by_turn[site.turn_id]
            number, turn = turns[site.turn_id]
            # The first call, if the site does not identify a call in this turn.
            call_number = next((at for at, call in enumerate(turn.calls) if call.id == site.call_id), 0)
            options = {"format_name": session.conversation.format, "right": session.right_call(site)}
            decision = find_decision_against(renderer, rendered, span, turn, call_number, **options)
            into.sites.append(KeptSite(site, hint.text, rendered, span, decision, number))


def _good_calls(into: RenderedSession, conversation: Conversation, good: frozenset[str]) -> list[GoodCall]:
    turns = enumerate(conversation.turns)
    calls = {turn.id: (CallWords.from_call(turn.calls[0]), at) for at, turn in turns if turn.id in good and turn.calls}
    return [
        GoodCall(rendered, span, *calls[span.turn_id])
        for rendered in into.sequences
        for span in rendered.spans
        if span.turn_id in calls and not exclusion_reason(span)
    ]


def _response_turn_ids(
    into: RenderedSession, session: LoggedSession, settings: WindowSettings, good_turns: _SelectedTurns
) -> frozenset[str]:
    """Return the ids of the turns to imitate (channel 1), and count the other turns by the reason against them."""
    if settings.responses == "none":
        return frozenset()
    if settings.responses == "all":
        own_ids = {turn.id for turn in session.conversation.turns if turn.origin == "model"}
        # Channels 2 and 3 make these turns less likely, so channel 1 never imitates them.
        blamed_ids = {site.turn_id for site, _ in session.sites if site.is_kept}
        return frozenset(own_ids - _rejected_turn_ids(session) - blamed_ids)
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
            outcome = (
                _render_pair(renderer, session.conversation, index, pair, *location) if location else NOT_IN_RENDERING
            )
        if isinstance(outcome, KeptPair):
            into.pairs.append(outcome)
        else:
            into.drops[f"{_PAIRS}: {outcome}"] += 1


def _render_pair(
    renderer: Renderer,
    conversation: Conversation,
    index: int,
    pair: LoggedPair,
    rendered: RenderedSequence,
    span: TurnSpan,
) -> KeptPair | str:
    """Return a pair as token ids, or the reason why it cannot be used.

    The logged side reuses the session's own token ids as far as the contexts agree.
    """
    before, logged = conversation.turns[:index], conversation.turns[index]
    name, location = f"{pair.state_id}:chosen", (rendered, span)
    if pair.rejected is not None:  # the rejected side is a single call of the turn rather than the logged turn
        logged, location = turn_from_action(pair.rejected, turn_id=f"{pair.state_id}:rejected"), None
    answer = (
        answer_turn(pair.chosen, turn_id=name) if pair.action is None else turn_from_action(pair.action, turn_id=name)
    )
    # The format determines which tools the prompt lists.
    options = {"conversation_id": pair.state_id, "format_name": conversation.format}
    try:
        sides = comparable_ids(renderer, before, answer, logged, **options, logged=location)
    except InputError:
        return NOT_RENDERED
    if isinstance(sides, str):
        return sides
    kind = " ".join([pair.source, *(call.name for turn in (answer, logged) for call in turn.calls)])
    chosen, rejected = (_PairSide.of(ids, start, rendered.ids) for ids, start in sides)
    return KeptPair(pair.state_id, rendered, chosen, rejected, kind, span.turn_id)


def assistant_token_ids(sessions: Iterable[RenderedSession]) -> set[int]:
    """Return the ids of all tokens in the model's own turns."""
    spoken_ids: set[int] = set()
    for sequence in (rendered for session in sessions for rendered in session.sequences):
        spoken_ids.update(*(sequence.ids[span.start : span.end] for span in sequence.spans))
    return spoken_ids


# Reasons why channel 1 does not train on a turn. They are the names of drops in `counts` and reports.
REFUSED, BLOCKED, INTERRUPTED = "refused_call", "blocked_call", "interrupted"
FAILED, FAILED_AS_WORK = "failed_call", "call_failed_as_part_of_the_work"
REJECTED = "rejected_side_of_a_pair"
IMAGE, UNSEEN = "image_before_it", "unseen_context_before_it"
_REASON_BY_KIND = {
    "user_rejected": REFUSED,
    "user_corrected": REFUSED,
    "permission_denied": REFUSED,
    "hook_blocked": BLOCKED,
    "user_interrupt": INTERRUPTED,
}
# In order of precedence: a turn is counted under the first reason that applies.
_PRECEDENCE = (REFUSED, BLOCKED, INTERRUPTED, FAILED, FAILED_AS_WORK, REJECTED, IMAGE, UNSEEN, TEXT_FOLLOWS_CALL)
# Claude Code's message for an interrupted turn, which ends in "]" or in " for tool use]".
_INTERRUPTION = "[Request interrupted by user"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SelectedTurns:
    """The ids of the turns that channel 1 trains on, and the reasons for leaving out the model's other turns."""

    good: frozenset[str]
    not_good: dict[str, str]


def good_turns(session: LoggedSession, *, work_failures: bool = False) -> _SelectedTurns:
    """Divide the model's own turns into good turns and turns that must not be imitated (channel 1).

    A turn is not good if one of its calls failed, was refused, blocked or interrupted (according to an error site, kept
    or not, or to the error flag of the call's result), if a pair rejects it, if it follows something that a text model
    cannot see (an image, unlogged context), or if no template can render its parts in the logged order. With
    `work_failures`, a call that failed as part of the work (its site blames the task, as with failing tests) does not
    count against its turn. Turns copied from another conversation are in neither group.
    """
    reasons = {turn.id: reason for turn, reason in _TurnReasons(session, work_failures).reasons()}
    return _SelectedTurns(
        good=frozenset(turn_id for turn_id, reason in reasons.items() if not reason),
        not_good={turn_id: reason for turn_id, reason in reasons.items() if reason},
    )


def _rejected_turn_ids(session: LoggedSession) -> set[str]:
    """Return the ids of the turns that the session's pairs reject."""
    assistant_ids = [turn.id for turn in session.conversation.turns if turn.role == "assistant"]
    rejecting = (pair.turn_number for pair in session.pairs if pair.rejects_turn)
    return {assistant_ids[number] for number in rejecting if 0 <= number < len(assistant_ids)}


class _TurnReasons:
    """Decides for each of the model's turns in a session whether, and why, it must not be imitated."""

    def __init__(self, session: LoggedSession, work_failures: bool) -> None:
        self._turns, self._work_failures = session.conversation.turns, work_failures
        self._rejected = _rejected_turn_ids(session)
        self._sites: dict[str, list[ErrorSite]] = defaultdict(list)
        for site, _ in session.sites:
            if site.kind != NO_FAILURE:  # a false alarm
                self._sites[site.turn_id].append(site)
        self._flagged = _failed_calls(self._turns)

    def reasons(self) -> Iterator[tuple[Turn, str]]:
        """Yield each of the model's turns with the reason why it must not be imitated, or "" if it may be imitated."""
        has_image = False
        for number, turn in enumerate(self._turns):
            if turn.origin == "model" and turn.role == "assistant":
                objections = set(self._of_calls(turn))
                objections |= {INTERRUPTED} if self._is_interrupted(number) else set()
                objections |= {REJECTED} if turn.id in self._rejected else set()
                objections |= {IMAGE} if has_image else set()
                objections |= {UNSEEN} if turn.extra.get("unseen_context") else set()
                # A turn with its sampled ids is rendered verbatim, in any order.
                objections |= {TEXT_FOLLOWS_CALL} if not turn.token_ids and has_text_after_call(turn) else set()
                yield turn, next((reason for reason in _PRECEDENCE if reason in objections), "")
            # Images are not rendered, so the context of everything after the first image is incomplete.
            has_image = has_image or bool(turn.extra.get("images"))

    def _of_calls(self, turn: Turn) -> Iterator[str]:
        sites = self._sites[turn.id]
        for site in sites:
            if site.blame != "task":
                yield _REASON_BY_KIND.get(site.kind, FAILED)
            elif not self._work_failures:
                yield FAILED_AS_WORK
        # A failed call with a site was judged above; the flag only counts if no site explains the failure.
        explained = {site.call_id for site in sites}
        if any((turn.id, call.id) in self._flagged and call.id not in explained for call in turn.calls):
            yield FAILED

    def _is_interrupted(self, number: int) -> bool:
        """Return whether the user interrupted the agent between this turn and the agent's next turn."""
        for turn in _up_to_next_answer(self._turns[number + 1 :]):
            if turn.role == "user" and turn.text.lstrip().startswith(_INTERRUPTION):
                return True
        return False


def _failed_calls(turns: Sequence[Turn]) -> set[tuple[str, str]]:
    """Return (turn id, call id) for the calls whose results are marked as errors.

    Some logs reuse call ids; a result then belongs to the latest call with its id.
    """
    caller: dict[str, str] = {}
    failed: set[tuple[str, str]] = set()
    for turn in turns:
        caller |= {call.id: turn.id for call in turn.calls}
        failed |= {(caller.get(result.call_id, ""), result.call_id) for result in turn.results if result.is_error}
    return failed


def _up_to_next_answer(turns: Sequence[Turn]) -> Iterator[Turn]:
    for turn in turns:
        if turn.role == "assistant":
            return
        yield turn


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSession:
    """A conversation, its error sites with their hints, and its preference pairs.

    `corrections` maps site ids to the right calls, for corrections that do not come from a pair.
    """

    conversation: Conversation
    sites: Sequence[tuple[ErrorSite, Hint | None]] = ()
    pairs: Sequence[LoggedPair] = ()
    corrections: Mapping[str, ToolCall] = field(default_factory=dict[str, ToolCall])

    def right_call(self, site: ErrorSite) -> ToolCall | None:
        """Return the call that should replace a site's failed call. Returns None if none is known, or several are."""
        if site.id in self.corrections:
            return self.corrections[site.id]
        assistant_turns = [turn for turn in self.conversation.turns if turn.role == "assistant"] if self.pairs else []
        number = next((at for at, turn in enumerate(assistant_turns) if turn.id == site.turn_id), None)
        turn_pairs = [pair for pair in self.pairs if pair.turn_number == number and pair.rejects_turn]
        # A pair may reject one call of the turn or the whole turn; a whole turn identifies the call only if it has one.
        by_call = (pair for pair in turn_pairs if pair.rejected and pair.rejected.calls[0].id == site.call_id)
        whole = (
            pair
            for pair in turn_pairs
            if pair.rejected is None and number is not None and len(assistant_turns[number].calls) == 1
        )
        pair = next(by_call, None) or next(whole, None)
        if pair is None:
            return None
        calls = (pair.action or parse_action_text(pair.chosen).action).calls
        return calls[0] if len(calls) == 1 else None


def read_sessions(run: RunDir, *, with_sites: bool, with_pairs: bool) -> Iterator[LoggedSession]:
    """Yield the conversations in a run directory with their sites and pairs.

    Raises StaleArtefactError if the sites or pairs are older than their sources.
    """
    for name, used in (("sites", with_sites), ("pairs", with_pairs)):
        if used:
            _check_current(run, name)
    sites: dict[str, list[tuple[ErrorSite, Hint | None]]] = defaultdict(list)
    for site, hint in read_sites(run) if with_sites else ():
        sites[site.conversation_id].append((site, hint))
    pairs: dict[str, list[LoggedPair]] = defaultdict(list)
    for conversation_id, pair in read_pairs(run) if with_pairs else ():
        pairs[conversation_id].append(pair)
    # pop() frees the sites and pairs of sessions that have been yielded.
    for conversation in read_conversations(run):
        identity = conversation.id
        yield LoggedSession(conversation=conversation, sites=sites.pop(identity, ()), pairs=pairs.pop(identity, ()))


def _check_current(run: RunDir, name: str) -> None:
    if run.path(SPLIT).exists() and SPLIT not in {source.name for source in run.meta(name).sources}:
        fix = f"The {name} may come from held-out sessions. Run `{ARTEFACTS[name].command}` again."
        got = f"{name} from before the split"
        raise StaleArtefactError(explain(f"{run.path(name)}", got=got, expected=f"{name} from after it", fix=fix))
    stale = run.lineage(name).stale
    if stale:
        first = stale[0]
        changed = " and ".join(run.changed_sources(first))
        got = f"stale {' and '.join(stale)}, which are older than the current {changed}"
        fix = f"Run `{ARTEFACTS[first].command} {run.root}` again."
        raise StaleArtefactError(explain(f"{run.path(name)}", got=got, expected="up-to-date files", fix=fix))
