"""One logged session into windows: which turns, sites and pairs each channel gets, and what is left out by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from composer_replication.actions.parse import answer_turn
from composer_replication.actions.write import text_follows_call
from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.pair_tokens import pair_ids, response_ids
from composer_replication.batch.render import (
    TEXT_FOLLOWS_CALL,
    RenderedSequence,
    Renderer,
    TurnSpan,
    thinking_counts,
)
from composer_replication.batch.session_batch import Part, session_batches
from composer_replication.batch.session_records import SiteHint, TokenPair
from composer_replication.batch.wrong_hints import wrong_hints
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.objective.components import CHANNELS
from composer_replication.sessions.good_turns import good_turns, taught_otherwise
from composer_replication.sessions.source import LoggedPair, LoggedSession
from composer_replication.sessions.stored import StoredWindow, store_window
from composer_replication.types import Conversation, ErrorSite

Responses = Literal["good", "all", "none"]
RESPONSES: tuple[Responses, ...] = ("good", "all", "none")
NOT_RENDERED = "not_rendered"
NOT_IN_RENDERING = "turn_not_in_rendering"
WITHOUT_ANSWER = "pair_without_answer"
EQUAL_ANSWERS = "pair_of_equal_answers"
CONTEXTS_DIFFER = "pair_contexts_differ"
NO_SUCH_TURN = "pair_of_no_such_turn"
_RESPONSES, _SITES, _PAIRS = CHANNELS


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
    """A site that may teach, its hint, and where its turn stands."""

    site: ErrorSite
    hint: str
    rendered: RenderedSequence
    span: TurnSpan


def wrong_hints_of(sessions: Iterable[LoggedSession]) -> dict[str, str | None]:
    """For each site that may teach the hint of one of another kind, by the site's id."""
    sites = [(site, hint.text) for each in sessions for site, hint in each.sites if site.is_kept and hint is not None]
    found = wrong_hints([text for _, text in sites], [site.kind for site, _ in sites])
    return {site.id: wrong for (site, _), wrong in zip(sites, found, strict=True)}


@dataclass
class WindowMaker:
    """Makes windows of sessions, and counts: what there was, and what was dropped, by channel and reason."""

    renderer: Renderer
    settings: WindowSettings
    unproved: Mapping[str, str] = field(default_factory=dict[str, str])
    """Sites that a proof has dropped, and why."""
    wrong: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Wrong hints by site, where a contrast is wanted."""
    counts: Counter[str] = field(default_factory=Counter[str])
    drops: Counter[str] = field(default_factory=Counter[str])

    def windows(self, session: LoggedSession) -> Iterator[StoredWindow]:
        sequences = self._rendered(session.conversation)
        sites = self.kept_sites(session, sequences)
        found = self._pairs(session, sequences) if self.settings.use_pairs else []
        responses = self._responses(session)
        for number, rendered in enumerate(sequences):
            own_sites = [each for each in sites if each.rendered is rendered]
            own_pairs = [(pair, tokens) for pair, at, tokens in found if at == number]
            made = session_batches(
                self.renderer,
                rendered,
                budget=self.settings.budget,
                overlap=self.settings.overlap,
                responses=[span for span in rendered.spans if span.turn_id in responses],
                sites=[SiteHint(each.span, each.hint, self.wrong.get(each.site.id)) for each in own_sites],
                pairs=[tokens for _, tokens in own_pairs],
                placement=self.settings.placement,
                part=self.settings.part,
                max_length=self.settings.max_length,
            )
            dropped = Counter(made.dropped.values())
            self.counts.update({name: n for name, n in made.counts.items() if name not in dropped})
            self.drops.update(f"{item.channel}: {reason}" for item, reason in made.dropped.items())
            for window in made.windows:
                ids = {
                    _SITES: [own_sites[item.number].site.id for item in window.items if item.channel == _SITES],
                    _PAIRS: [own_pairs[item.number][0].state_id for item in window.items if item.channel == _PAIRS],
                }
                stored = store_window(
                    window.batch,
                    conversation_id=session.conversation.id,
                    sequence=number,
                    span=(window.first, window.end),
                    site_ids=ids[_SITES],
                    state_ids=ids[_PAIRS],
                )
                self._count(stored)
                yield stored

    def kept_sites(self, session: LoggedSession, sequences: Sequence[RenderedSequence] | None = None) -> list[KeptSite]:
        """Sites that may teach and have a hint, in the order of the session; the others are counted."""
        if not self.settings.use_sites:
            return []
        sequences = self._rendered(session.conversation) if sequences is None else sequences
        places = {span.turn_id: (rendered, span) for rendered in sequences for span in rendered.spans}
        kept: list[KeptSite] = []
        for site, hint in session.sites:
            if not site.is_kept:
                continue
            reason = self.unproved.get(site.id, "") if hint is not None and hint.text.strip() else "without_hint"
            if not reason and site.turn_id not in places:
                reason = NOT_IN_RENDERING
            if reason:
                self.drops[f"{_SITES}: {reason}"] += 1
            elif hint is not None:
                kept.append(KeptSite(site, hint.text, *places[site.turn_id]))
        return kept

    def _rendered(self, conversation: Conversation) -> list[RenderedSequence]:
        self.counts["conversations"] += 1
        try:
            sequences = self.renderer.render(conversation)
        except AlignmentError:  # a template that puts one message's text into another's turn: of no use for any
            raise
        except InputError:  # no turns, or none that this template can show
            self.drops[f"conversations: {NOT_RENDERED}"] += 1
            return []
        self.counts.update(thinking_counts(sequences))
        return sequences

    def _responses(self, session: LoggedSession) -> frozenset[str]:
        """Ids of the turns of channel 1; the model's other turns are counted by what speaks against them."""
        if self.settings.responses == "none":
            return frozenset()
        if self.settings.responses == "all":
            own = {turn.id for turn in session.conversation.turns if turn.origin == "model"}
            return frozenset(own - taught_otherwise(session))
        found = good_turns(session, work_failures=self.settings.work_failures)
        self.counts.update(model_turns=len(found.good) + len(found.not_good), good_turns=len(found.good))
        self.drops.update(f"{_RESPONSES}: {reason}" for reason in found.not_good.values())
        return found.good

    def _pairs(
        self, session: LoggedSession, sequences: Sequence[RenderedSequence]
    ) -> list[tuple[LoggedPair, int, TokenPair]]:
        """Each pair with the sequence it belongs to."""
        turns = session.conversation.turns
        asked = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        places = {span.turn_id: (number, span) for number, each in enumerate(sequences) for span in each.spans}
        found: list[tuple[LoggedPair, int, TokenPair]] = []
        for pair in session.pairs:
            index = asked[pair.turn_number] if 0 <= pair.turn_number < len(asked) else None
            reason = NO_SUCH_TURN if index is None else NOT_IN_RENDERING if turns[index].id not in places else ""
            if index is not None and not reason:
                number, span = places[turns[index].id]
                made = self._pair(session.conversation, index, pair, sequences[number], span)
                if isinstance(made, TokenPair):
                    found.append((pair, number, made))
                    continue
                reason = made
            self.drops[f"{_PAIRS}: {reason}"] += 1
        return found

    def _pair(
        self, conversation: Conversation, index: int, pair: LoggedPair, rendered: RenderedSequence, span: TurnSpan
    ) -> TokenPair | str:
        """Chosen against logged; or why not. The logged side is the session itself where the contexts agree."""
        before, logged = conversation.turns[:index], conversation.turns[index]
        answer = answer_turn(pair.chosen, turn_id=f"{pair.state_id}:chosen")
        if any(not each.text.strip() and not each.calls for each in (answer, logged)):
            return WITHOUT_ANSWER
        if any(map(text_follows_call, (answer, logged))):
            return TEXT_FOLLOWS_CALL
        chosen_turn, rejected_turn = self.renderer.thinking.alike(answer, logged)
        is_in_session = rejected_turn == logged or span.thinking not in ("target", "context")
        try:
            named = {"conversation_id": pair.state_id, "format_name": conversation.format}  # for the session's tools
            chosen = response_ids(self.renderer, before, chosen_turn, **named)
            rejected_ids, start = rendered.ids[: span.end], span.start
            if not is_in_session or chosen.start != start or chosen.ids[:start] != rejected_ids[:start]:
                chosen, rejected = pair_ids(self.renderer, before, answer, logged, **named)
                rejected_ids, start = rejected.ids, rejected.start
        except AlignmentError:
            return CONTEXTS_DIFFER
        except InputError:
            return NOT_RENDERED
        if chosen.ids == rejected_ids:
            return EQUAL_ANSWERS
        return TokenPair(
            chosen_ids=chosen.ids, chosen_start=chosen.start, rejected_ids=rejected_ids, rejected_start=start
        )

    def _count(self, window: StoredWindow) -> None:
        self.counts.update(window.counts())
        self.counts.update(
            windows=1, tree_tokens=window.num_tokens, sites=len(window.site_ids), pairs=len(window.state_ids)
        )
