"""Convert a session of any length to tree batches: assign its targets to windows, and build one tree per window."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from composer_replication.batch.hint_placement import (
    HINT_HAS_NO_PLACE,
    PARTS,
    PLACEMENTS,
    HintedTurn,
    Part,
    Placement,
    exclusion_reason,
    hinted_turn,
)
from composer_replication.batch.render.pieces import common_prefix_length
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.tree_batch import CHANNELS, SessionTargets, TreeBatch
from composer_replication.batch.windows import (
    CUT_IN_MESSAGE,
    SHORT_CONTEXT,
    Branch,
    Target,
    Window,
    WindowPlan,
    plan_windows,
)
from composer_replication.errors import InputError, explain

_RESPONSES, _SITES, _PAIRS = CHANNELS


def session_batches(
    renderer: Renderer,
    rendered: RenderedSequence,
    *,
    budget: int,
    overlap: int = 0,
    responses: Sequence[TurnSpan] | None = None,
    sites: Sequence[SiteHint] = (),
    pairs: Sequence[TokenPair] = (),
    placement: Placement = "before_turn",
    part: Part = "turn",
    max_length: int | None = None,
    device: str | torch.device = "cpu",
) -> _SessionBatches:
    """Build trees of at most `budget` tokens that together contain every response, site and pair of a session once.

    `responses` are the turns that channel 1 (GRPO) trains on, by default all turns. With `part="call"` only the calls
    of an erring turn are trained on, or the whole turn if it has none. If a hint is empty, the teacher's context equals
    the student's. See `plan_windows` for `overlap` and `max_length`.
    """
    for name, value, allowed in (("placement", placement, PLACEMENTS), ("part", part, PARTS)):
        if value not in allowed:
            raise InputError(explain(name, got=repr(value), expected=f"one of {allowed}"))
    session = _SessionRows(renderer, rendered, placement, part)
    planned = session.plan_requests(rendered.spans if responses is None else responses, sites, pairs)
    cuts = [span.header_start for span in rendered.spans]

    def make_plan() -> WindowPlan:
        targets = [member.target for member in planned]
        return plan_windows(targets, budget=budget, overlap=overlap, cuts=cuts, max_length=max_length)

    plan = make_plan()
    # A site that does not fit together with its unrelated hint may fit without it.
    if session.drop_unrelated_hints(planned, plan.dropped):
        plan = make_plan()
    for index, reason in plan.dropped.items():
        session.dropped[planned[index].item] = reason
    windows = [
        session.build_window(window, [planned[index] for index in window.targets], device) for window in plan.windows
    ]
    counts = session.notes + Counter(session.dropped.values())
    counts += Counter({name: plan.counts.get(name, 0) for name in (SHORT_CONTEXT, CUT_IN_MESSAGE)})
    return _SessionBatches(tuple(window for window in windows if window is not None), session.dropped, counts)


class _PlannedRequest(NamedTuple):
    """A response, site or pair of the session, with the tokens that its window must contain."""

    item: Item
    target: Target
    request: TurnSpan | SiteHint | TokenPair


class _SessionRows:
    """Converts the requested responses, sites and pairs of one session to rows of trees."""

    def __init__(self, renderer: Renderer, rendered: RenderedSequence, placement: Placement, part: Part) -> None:
        self.renderer, self.rendered = renderer, rendered
        self.placement: Placement = placement
        self.part: Part = part
        self.headers = [span.header_start for span in rendered.spans]
        self.dropped: dict[Item, str] = {}
        self.notes: Counter[str] = Counter()
        self.contrast_failures: dict[Item, str] = {}  # sites whose unrelated hint cannot be used, and why
        self.has_unrelated_hints = False

    def plan_requests(
        self, responses: Sequence[TurnSpan], sites: Sequence[SiteHint], pairs: Sequence[TokenPair]
    ) -> list[_PlannedRequest]:
        """Return the requests that can be trained on, each with the tokens it needs; record the others in `dropped`."""
        known_spans = set(self.rendered.spans)
        for span in (*responses, *(site.span for site in sites)):
            if span not in known_spans:
                got = f"turn {span.turn_id} at {span.start}, from another rendering"
                expected = f"a span of conversation {self.rendered.conversation_id}"
                raise InputError(explain("turn", got=got, expected=expected))
        if len({pair.references is None for pair in pairs}) > 1:
            raise InputError(explain("reference log-probs", got="some pairs only", expected="all pairs, or none"))
        self.has_unrelated_hints = any(site.unrelated_hint is not None for site in sites)
        channels = ((_RESPONSES, responses), (_SITES, sites), (_PAIRS, pairs))
        numbered_requests = [
            (Item(channel, number), request)
            for channel, requests in channels
            for number, request in enumerate(requests)
        ]
        planned: list[_PlannedRequest] = []
        for item, request in numbered_requests:
            target = self._target(request)
            if isinstance(target, str):
                self.dropped[item] = target
                continue
            if isinstance(request, SiteHint) and request.unrelated_hint:
                target = self._add_unrelated_hint(item, request.span, request.unrelated_hint, target)
            planned.append(_PlannedRequest(item, target, request))
        return planned

    def _add_unrelated_hint(self, item: Item, span: TurnSpan, unrelated_hint: str, target: Target) -> Target:
        """Add a branch for the unrelated hint to the target; return the target unchanged if that hint cannot be
        placed.
        """
        hinted = self._hinted_target(span, unrelated_hint, target)
        if isinstance(hinted, str):
            self.contrast_failures[item] = hinted
            return target
        return Target(hinted.first, hinted.end, (*target.branches, *hinted.branches))

    def drop_unrelated_hints(self, planned: list[_PlannedRequest], dropped: Mapping[int, str]) -> bool:
        """Remove the unrelated hint from sites that fit into no window; return whether any site changed."""
        changed = False
        for index, reason in dropped.items():
            item, _, request = planned[index]
            if isinstance(request, SiteHint) and request.unrelated_hint and item not in self.contrast_failures:
                target = self._target(request)
                if not isinstance(target, str):
                    self.contrast_failures[item] = reason
                    planned[index] = _PlannedRequest(item, target, request)
                    changed = True
        return changed

    def _target(self, request: TurnSpan | SiteHint | TokenPair) -> Target | str:
        """Return the tokens that a request needs, or the reason why it cannot be trained on."""
        if isinstance(request, TokenPair):
            return self._pair_target(request)
        span = request.span if isinstance(request, SiteHint) else request
        if reason := exclusion_reason(span):
            return reason
        target = Target(min(span.header_start, span.start - 1), span.end)
        return (
            self._hinted_target(span, request.hint, target)
            if isinstance(request, SiteHint) and request.hint
            else target
        )

    def _hinted_target(self, span: TurnSpan, hint: str, target: Target) -> Target | str:
        """Add a branch for the turn's hinted copy to the target; return the reason if the hint cannot be placed."""
        # A hint's position and size are the same in every window that contains the message before the turn, so it is
        # enough to place it in that short context. Only a hint at the head depends on where the window begins.
        context_start = self._end_of_turn_before(span)
        first_token = 0 if self.placement == "head" else context_start
        turn = self._turn(span, hint, first_token, self.placement)
        if first_token and (turn == HINT_HAS_NO_PLACE or _is_at_head(turn)):
            first_token, turn = 0, self._turn(span, hint, 0, self.placement)
        if isinstance(turn, str):
            return turn
        at, size, first = first_token + turn.context.hint_start, _hint_size(turn), target.first
        if turn.context.placement == "in_last_message":
            first = min(first, at)  # otherwise the window could begin after the hint's position
        elif _is_at_head(turn):
            # In a window that begins after the last user message, the hint is placed before the turn, which may take
            # more tokens.
            late_turn = self._turn(span, hint, context_start, "before_turn")
            size = max(size, 0 if isinstance(late_turn, str) else _hint_size(late_turn))
        return Target(first, target.end, (Branch(at, size + target.end - at),))

    def _end_of_turn_before(self, span: TurnSpan) -> int:
        """Return the position at which the previous assistant turn ends; 0 if no turn precedes."""
        index = bisect_left(self.headers, span.header_start) - 1
        return self.rendered.spans[index].end if index >= 0 else 0

    def _pair_target(self, pair: TokenPair) -> Target:
        """Return the target of a pair: tokens that its answers share with the session belong to the trunk, all
        others to branches.
        """
        for ids, start in ((pair.chosen_ids, pair.chosen_start), (pair.rejected_ids, pair.rejected_start)):
            if not 0 < start < len(ids):
                raise InputError(explain("start of a response", got=start, expected=f"1 to {len(ids) - 1}"))
        begin = min(pair.chosen_start, pair.rejected_start)
        header = bisect_left(self.headers, begin) - 1
        first = self.headers[header] if header >= 0 else begin - 1
        branches: list[Branch] = []
        end = first + 1
        for ids in (pair.chosen_ids, pair.rejected_ids):
            at = common_prefix_length(list(ids), self.rendered.ids)
            end = max(end, at)
            branches += [Branch(at, len(ids) - at)] if at < len(ids) else []
        return Target(first, end, tuple(branches))

    def build_window(
        self, window: Window, planned: list[_PlannedRequest], device: str | torch.device
    ) -> _SessionWindow | None:
        """Build the tree of one window; return None if none of its hints could be placed."""
        trunk_end = max(
            (member.target.end for member in planned if member.item.channel != _PAIRS), default=window.first
        )
        # All requests share one list object, which `SessionTargets` recognizes and adds only once.
        trunk = self.rendered.ids[window.first : trunk_end]
        tree_targets = SessionTargets()
        for member in planned:
            self._add_request(member, tree_targets, window.first, trunk)
        items = tuple(member.item for member in planned if member.item not in self.dropped)
        return _SessionWindow(window.first, window.end, items, tree_targets.build(device)) if items else None

    def _add_request(
        self, planned: _PlannedRequest, tree_targets: SessionTargets, first: int, trunk: list[int]
    ) -> None:
        """Add a request to the tree of a window that begins at token `first` of the session."""
        request = planned.request
        if isinstance(request, TokenPair):
            # Reference log-probs were computed with the whole session as context.
            self.notes[REFERENCE_SAW_MORE] += int(first > 0 and request.references is not None)
            sides = request.chosen_ids[first:], request.chosen_start - first, request.rejected_ids[first:]
            tree_targets.add_pair(*sides, request.rejected_start - first, references=request.references)
        elif isinstance(request, SiteHint):
            self._add_site(planned.item, request, tree_targets, first, trunk)
        else:
            tree_targets.add_response(trunk, request.start - first, request.end - first)

    def _add_site(self, item: Item, site: SiteHint, tree_targets: SessionTargets, first: int, trunk: list[int]) -> None:
        turn = self._turn(site.span, site.hint, first, self.placement)
        if isinstance(turn, str):
            self.dropped[item] = turn
            return
        used = turn.context.placement
        self.notes[f"placement:{self.placement}->{used}"] += used != self.placement
        self.notes["whole_turn_without_call"] += self.part == "call" and turn.is_whole
        contrast = self._contrast(item, site, first)
        tree_targets.add_site(
            trunk,
            turn.start - first,
            turn.end - first,
            turn.context.ids,
            turn.teacher_start,
            contrast_ids=None if contrast is None else contrast.context.ids,
            contrast_start=None if contrast is None else contrast.teacher_start,
        )

    def _contrast(self, item: Item, site: SiteHint, first: int) -> HintedTurn | None:
        """Return the turn with its unrelated hint; if it has none, count the reason and return None."""
        # A missing hint counts only if other sites have one: otherwise the contrast is off.
        if site.unrelated_hint is None:
            self.notes[NO_WRONG_HINT] += self.has_unrelated_hints
            return None
        turn = self.contrast_failures.get(item) or self._turn(site.span, site.unrelated_hint, first, self.placement)
        if isinstance(turn, str):
            self.notes[WRONG_HINT + turn] += 1
            return None
        return turn

    def _turn(self, span: TurnSpan, hint: str, first: int, placement: Placement) -> HintedTurn | str:
        return hinted_turn(self.renderer, self.rendered, span, hint, placement=placement, part=self.part, first=first)


def _hint_size(turn: HintedTurn) -> int:
    return turn.context.hint_end - turn.context.hint_start


def _is_at_head(turn: HintedTurn | str) -> bool:
    return not isinstance(turn, str) and turn.context.placement == "head"


# Keys of `_SessionBatches.counts`, which reports show: data, not wording.
REFERENCE_SAW_MORE = "reference_saw_more_context"
NO_WRONG_HINT = "no_wrong_hint"
WRONG_HINT = "wrong_hint:"


class SiteHint(NamedTuple):
    """An erring turn and one of its hints.

    `unrelated_hint` is the hint of a site with another kind of error, for `RowWeighting.contrast` (see
    `hint_placement.draw_unrelated_hints`).
    """

    span: TurnSpan
    hint: str
    unrelated_hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPair:
    """A preference pair: two sequences that begin with the session's first token, share a state, and end with different
    responses.

    `references` are the log-probs of the chosen and the rejected response under the reference model.
    """

    chosen_ids: Sequence[int]
    chosen_start: int
    rejected_ids: Sequence[int]
    rejected_start: int
    references: tuple[float, float] | None = None


class Item(NamedTuple):
    """Identifies a request by its channel and its index in the list that the caller passed for that channel."""

    channel: str
    number: int


@dataclass(frozen=True, eq=False, slots=True)
class _SessionWindow:
    """The tree of the session's tokens [first, end), and the requests whose loss is computed in it."""

    first: int
    end: int
    items: tuple[Item, ...]
    batch: TreeBatch


@dataclass(frozen=True, eq=False, slots=True)
class _SessionBatches:
    """The windows of a session, the reason for every dropped request, and counts.

    `counts` has the counts of `WindowPlan` and these:

        hint_makes_no_tokens          the hint is empty after tokenization
        hint_has_no_place             the template allows the hint nowhere
        nothing_before_it             no row predicts the turn's first token
        placement:<asked>-><used>     another placement was used than requested
        reference_saw_more_context    pairs whose reference log-probs were computed on the whole session
        whole_turn_without_call       sites with `part="call"` whose turn has no located calls
        no_wrong_hint                 sites without an unrelated hint, if other sites have one
        wrong_hint:<reason>           sites whose unrelated hint was dropped
    """

    windows: tuple[_SessionWindow, ...]
    dropped: Mapping[Item, str]
    counts: Counter[str]

    @property
    def batches(self) -> list[TreeBatch]:
        """The trees of all windows, in order."""
        return [window.batch for window in self.windows]
