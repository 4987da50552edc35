"""A session of any length as tree batches: what its channels ask for is planned into windows, each window one tree."""

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
    hinted_turn,
    why_no_target,
)
from composer_replication.batch.render.messages import num_same
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
    """Trees of at most `budget` tokens that hold every response, site and pair of a session once.

    `responses` are the turns of channel 1; without a list, all of them. `part="call"` teaches a site's calls alone (the
    whole turn where it has none). See `plan_windows` for overlap and max_length. An empty hint makes the teacher's
    context the student's own.
    """
    for name, value, allowed in (("placement", placement, PLACEMENTS), ("part", part, PARTS)):
        if value not in allowed:
            raise InputError(explain(name, got=repr(value), expected=f"one of {allowed}"))
    session = _SessionRows(renderer, rendered, placement, part)
    members = session.members(rendered.spans if responses is None else responses, sites, pairs)
    cuts = [span.header_start for span in rendered.spans]

    def planned() -> WindowPlan:
        targets = [member.target for member in members]
        return plan_windows(targets, budget=budget, overlap=overlap, cuts=cuts, max_length=max_length)

    plan = planned()
    if session.drop_wrong_hints(members, plan.dropped):
        plan = planned()
    for index, reason in plan.dropped.items():
        session.dropped[members[index].item] = reason
    windows = [session.window(window, [members[index] for index in window.targets], device) for window in plan.windows]
    counts = session.notes + Counter(session.dropped.values())
    counts += Counter({name: plan.counts.get(name, 0) for name in (SHORT_CONTEXT, CUT_IN_MESSAGE)})
    return _SessionBatches(tuple(window for window in windows if window is not None), session.dropped, counts)


class _Member(NamedTuple):
    item: Item
    target: Target
    given: TurnSpan | SiteHint | TokenPair


class _SessionRows:
    def __init__(self, renderer: Renderer, rendered: RenderedSequence, placement: Placement, part: Part) -> None:
        self.renderer, self.rendered = renderer, rendered
        self.placement: Placement = placement
        self.part: Part = part
        self.headers = [span.header_start for span in rendered.spans]
        self.dropped: dict[Item, str] = {}
        self.notes: Counter[str] = Counter()
        self.no_contrast: dict[Item, str] = {}  # sites whose wrong hint cannot be, and why
        self.has_wrong_hints = False

    def members(
        self, responses: Sequence[TurnSpan], sites: Sequence[SiteHint], pairs: Sequence[TokenPair]
    ) -> list[_Member]:
        """Everything that was asked for and can be, with the tokens it needs."""
        known_spans = set(self.rendered.spans)
        for span in (*responses, *(site.span for site in sites)):
            if span not in known_spans:
                got = f"turn {span.turn_id} at {span.start}, of another rendering"
                raise InputError(explain("turn", got=got, expected=f"one of {self.rendered.conversation_id}'s spans"))
        if len({pair.references is None for pair in pairs}) > 1:
            raise InputError(explain("references", got="some pairs' only", expected="all of the pairs', or none"))
        self.has_wrong_hints = any(site.wrong_hint is not None for site in sites)
        channels = ((_RESPONSES, responses), (_SITES, sites), (_PAIRS, pairs))
        everything = [
            (Item(channel, number), request)
            for channel, requests in channels
            for number, request in enumerate(requests)
        ]
        members: list[_Member] = []
        for item, request in everything:
            target = self._target(request)
            if isinstance(target, str):
                self.dropped[item] = target
                continue
            if isinstance(request, SiteHint) and request.wrong_hint:
                target = self._with_wrong_hint(item, request.span, request.wrong_hint, target)
            members.append(_Member(item, target, request))
        return members

    def _with_wrong_hint(self, item: Item, span: TurnSpan, wrong_hint: str, target: Target) -> Target:
        """With one more branch, or as it is where the wrong hint cannot be placed."""
        hinted = self._hinted(span, wrong_hint, target)
        if isinstance(hinted, str):
            self.no_contrast[item] = hinted
            return target
        return Target(hinted.first, hinted.end, (*target.branches, *hinted.branches))

    def drop_wrong_hints(self, members: list[_Member], dropped: Mapping[int, str]) -> bool:
        """Take the wrong hint from sites that had no room; whether there were any, and windows are planned again."""
        changed = False
        for index, reason in dropped.items():
            item, _, request = members[index]
            if isinstance(request, SiteHint) and request.wrong_hint and item not in self.no_contrast:
                target = self._target(request)
                if not isinstance(target, str):
                    self.no_contrast[item] = reason
                    members[index] = _Member(item, target, request)
                    changed = True
        return changed

    def _target(self, request: TurnSpan | SiteHint | TokenPair) -> Target | str:
        """The tokens it needs, or why it cannot be."""
        if isinstance(request, TokenPair):
            return self._pair_target(request)
        span = request.span if isinstance(request, SiteHint) else request
        if reason := why_no_target(span):
            return reason
        target = Target(min(span.header_start, span.start - 1), span.end)
        return self._hinted(span, request.hint, target) if isinstance(request, SiteHint) and request.hint else target

    def _hinted(self, span: TurnSpan, hint: str, target: Target) -> Target | str:
        """A turn with the branch that its hinted copy is."""
        # A hint's place and size are the same in every window that has the message before the turn; only a hint at the
        # head depends on where it begins. So the long way from the start is gone for those alone.
        near = self._end_of_turn_before(span)
        begin = 0 if self.placement == "head" else near
        turn = self._turn(span, hint, begin, self.placement)
        if begin and (turn == HINT_HAS_NO_PLACE or _is_at_head(turn)):
            begin, turn = 0, self._turn(span, hint, 0, self.placement)
        if isinstance(turn, str):
            return turn
        at, size, first = begin + turn.context.hint_start, _hint_size(turn), target.first
        if turn.context.placement == "in_last_message":
            first = min(first, at)  # or the window would begin after the hint's place
        elif _is_at_head(turn):
            # A window that begins after the last question has the hint in another form, at worst the longer one.
            late = self._turn(span, hint, near, "before_turn")
            size = max(size, 0 if isinstance(late, str) else _hint_size(late))
        return Target(first, target.end, (Branch(at, size + target.end - at),))

    def _end_of_turn_before(self, span: TurnSpan) -> int:
        before = bisect_left(self.headers, span.header_start) - 1
        return self.rendered.spans[before].end if before >= 0 else 0

    def _pair_target(self, pair: TokenPair) -> Target:
        for ids, start in ((pair.chosen_ids, pair.chosen_start), (pair.rejected_ids, pair.rejected_start)):
            if not 0 < start < len(ids):
                raise InputError(explain("start of a response", got=start, expected=f"1 to {len(ids) - 1}"))
        begin = min(pair.chosen_start, pair.rejected_start)
        header = bisect_left(self.headers, begin) - 1
        first = self.headers[header] if header >= 0 else begin - 1
        branches: list[Branch] = []
        end = first + 1
        for ids in (pair.chosen_ids, pair.rejected_ids):
            at = num_same(list(ids), self.rendered.ids)
            end = max(end, at)
            branches += [Branch(at, len(ids) - at)] if at < len(ids) else []
        return Target(first, end, tuple(branches))

    def window(self, window: Window, members: list[_Member], device: str | torch.device) -> _SessionWindow | None:
        """One window's tree; None where nothing of it could be placed."""
        trunk_end = max(
            (member.target.end for member in members if member.item.channel != _PAIRS), default=window.first
        )
        trunk = self.rendered.ids[window.first : trunk_end]  # one list: the tree takes it once
        into = SessionTargets()
        for member in members:
            self._put(member, into, window.first, trunk)
        items = tuple(member.item for member in members if member.item not in self.dropped)
        return _SessionWindow(window.first, window.end, items, into.build(device)) if items else None

    def _put(self, member: _Member, into: SessionTargets, first: int, trunk: list[int]) -> None:
        request = member.given
        if isinstance(request, TokenPair):
            self.notes[REFERENCE_SAW_MORE] += int(first > 0 and request.references is not None)
            sides = request.chosen_ids[first:], request.chosen_start - first, request.rejected_ids[first:]
            into.add_pair(*sides, request.rejected_start - first, references=request.references)
        elif isinstance(request, SiteHint):
            self._put_site(member.item, request, into, first, trunk)
        else:
            into.add_response(trunk, request.start - first, request.end - first)

    def _put_site(self, item: Item, site: SiteHint, into: SessionTargets, first: int, trunk: list[int]) -> None:
        turn = self._turn(site.span, site.hint, first, self.placement)
        if isinstance(turn, str):
            self.dropped[item] = turn
            return
        used = turn.context.placement
        self.notes[f"placement:{self.placement}->{used}"] += used != self.placement
        self.notes["whole_turn_without_call"] += self.part == "call" and turn.is_whole
        contrast = self._contrast(item, site, first)
        into.add_site(
            trunk,
            turn.start - first,
            turn.end - first,
            turn.context.ids,
            turn.teacher_start,
            contrast_ids=None if contrast is None else contrast.context.ids,
            contrast_start=None if contrast is None else contrast.teacher_start,
        )

    def _contrast(self, item: Item, site: SiteHint, first: int) -> HintedTurn | None:
        """The context with the wrong hint; why a site has none is counted where others have one."""
        if site.wrong_hint is None:
            self.notes[NO_WRONG_HINT] += self.has_wrong_hints
            return None
        turn = self.no_contrast.get(item) or self._turn(site.span, site.wrong_hint, first, self.placement)
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


# What a session's channels ask for, and the windows that hold it.

REFERENCE_SAW_MORE = "reference_saw_more_context"
NO_WRONG_HINT = "no_wrong_hint"
WRONG_HINT = "wrong_hint:"


class SiteHint(NamedTuple):
    """An erring turn and what to say before it; a turn may have several.

    `wrong_hint` is one of a site of another kind (`batch.taught_turns.wrong_hints`), for `RowWeighting.contrast`.
    """

    span: TurnSpan
    hint: str
    wrong_hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPair:
    """Two sequences from the session's first token on: the same state, then a response from its start to the end."""

    chosen_ids: Sequence[int]
    chosen_start: int
    rejected_ids: Sequence[int]
    rejected_start: int
    references: tuple[float, float] | None = None


class Item(NamedTuple):
    """What a channel was given: the channel's name, and the number in the caller's list."""

    channel: str
    number: int


@dataclass(frozen=True, eq=False, slots=True)
class _SessionWindow:
    """The tree of tokens [first, end) of the session, and what is computed there."""

    first: int
    end: int
    items: tuple[Item, ...]
    batch: TreeBatch


@dataclass(frozen=True, eq=False, slots=True)
class _SessionBatches:
    """The windows, what is in none of them and why, and counts of the reasons and of everything else worth knowing.

    Besides those of `batch.windows.Plan`: `hint_makes_no_tokens`, `hint_has_no_place` (the template takes it nowhere),
    `nothing_before_it` (no row predicts its first token), `placement:<asked>-><used>`, `reference_saw_more_context`
    (pairs whose references are those of the whole session, while the window has a part of it),
    `whole_turn_without_call` (sites where only the calls are wanted, and none is known). Sites that stay, but
    without a contrast: `no_wrong_hint` (where other sites were given one) and `wrong_hint:<why it was dropped>`.
    """

    windows: tuple[_SessionWindow, ...]
    dropped: Mapping[Item, str]
    counts: Counter[str]

    @property
    def batches(self) -> list[TreeBatch]:
        return [window.batch for window in self.windows]
