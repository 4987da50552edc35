"""One trace as rows of token ids: the student's sequences, a hinted context for every site, preference pairs.

A sequence that is too long is cut on the left, at the start of a message where one starts in time, both sides of a pair
alike. A target is never cut: a turn, site or pair that does not fit whole is left out, and `counts` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from composer_replication.actions.parse import answer_turn
from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.pair_tokens import PairIds, ResponseIds, compared_ids
from composer_replication.batch.render.dialect import assistant, user
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.taught_turns import NOTHING_BEFORE_IT, HintedTurn, hinted_turn
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError, explain
from composer_replication.trainer.traces.segments import SegmentRenderer
from composer_replication.types import Conversation, Turn

# Why a turn, or the site at it, is no target.
LONGER, LEFT_OF_CUT = "longer_than_max_seq_len", "left_of_cut"


class StudentRow(NamedTuple):
    """A sequence of the student; its targets are the turns at [start, end)."""

    ids: list[int]
    targets: list[tuple[int, int]]


class SiteRow(NamedTuple):
    """A hinted context: its turn is ids[start:], and begins at `student_start` in the student's row of that number."""

    ids: list[int]
    start: int
    student_row: int
    student_start: int


class Hinted(NamedTuple):
    """A turn, by id, and what to say before it."""

    turn_id: str
    hint: str


class TraceRows(NamedTuple):
    """What one trace gives; a site's `student_row` counts within the trace."""

    students: list[StudentRow]
    sites: list[SiteRow]


class _Fitted(NamedTuple):
    """The tokens [first, end) of a sequence; `lost` are the turns that are no whole targets there, with the reason."""

    sequence: RenderedSequence
    first: int
    end: int
    lost: dict[str, str]


class RowMaker:
    """Renders with one template and fits into one length; what is left out is added to `counts`."""

    def __init__(
        self,
        renderer: Renderer | SegmentRenderer,
        cut: LeftCut,
        counts: Counter[str],
        *,
        max_seq_len: int,
        placement: Placement,
    ) -> None:
        self._renderer, self._cut, self._counts = renderer, cut, counts
        self._max_seq_len = max_seq_len
        self._placement: Placement = placement

    def rows(self, conversation: Conversation, hints: Sequence[Hinted]) -> TraceRows:
        """A row for each sequence that holds a whole assistant turn, and one for each hint whose turn is in them."""
        rows = TraceRows([], [])
        sequences = self._renderer.render(conversation)
        if not sequences:
            self._counts["no_assistant_turn"] += 1
        for sequence in sequences:
            fitted = self._fit(sequence)
            targets = {span.turn_id: span for span in sequence.spans if span.turn_id not in fitted.lost}
            for hinted in hints:
                if reason := fitted.lost.get(hinted.turn_id):
                    self._counts[f"site_{reason}"] += 1
                elif span := targets.get(hinted.turn_id):
                    rows.sites.extend(self._site_rows(fitted, span, hinted.hint, len(rows.students)))
            if targets:
                spans = [(span.start - fitted.first, span.end - fitted.first) for span in targets.values()]
                rows.students.append(StudentRow(sequence.ids[fitted.first : fitted.end], spans))
        return rows

    def _fit(self, sequence: RenderedSequence) -> _Fitted:
        """The end of the sequence, as much as fits; a last turn that is too long by itself is left off first."""
        spans, first = list(sequence.spans), None
        while spans and first is None:
            last = spans[-1]
            first = self._first(sequence, last, self._max_seq_len)
            if first is None:
                spans.pop()
        end = spans[-1].end if spans else 0
        lost = {
            span.turn_id: self._reason(span)
            for span in sequence.spans
            if first is None or span.end > end or span.header_start < first or span.start <= first
        }
        lost = {span.turn_id: span.no_target for span in sequence.spans if span.no_target} | lost
        self._counts.update(f"turn_{reason}" for reason in lost.values())
        if first or end < len(sequence.ids):
            self._counts["sequence_cut"] += 1
        return _Fitted(sequence, first or 0, end, lost)

    def _reason(self, span: TurnSpan) -> str:
        if span.start == 0:
            return NOTHING_BEFORE_IT
        return LONGER if span.end - _latest(span) > self._max_seq_len else LEFT_OF_CUT

    def _first(self, sequence: RenderedSequence, span: TurnSpan, limit: int) -> int | None:
        if span.start == 0:
            return None if span.end > limit else 0
        starts = sequence.message_starts
        return self._cut.first(sequence.ids, end=span.end, limit=limit, latest=_latest(span), starts=starts)

    def _site_rows(self, fitted: _Fitted, span: TurnSpan, hint: str, student_row: int) -> list[SiteRow]:
        turn = self._hinted(fitted, span, hint)
        if isinstance(turn, str):
            self._counts[turn] += 1
            return []
        used = turn.context.placement
        if used != self._placement:
            self._counts[f"placement_fell_back:{self._placement}->{used}"] += 1
        return [SiteRow(turn.ids, turn.teacher_start, student_row, turn.start - fitted.first)]

    def _hinted(self, fitted: _Fitted, span: TurnSpan, hint: str) -> HintedTurn | str:
        """The student's own context with the hint; only where both do not fit does the teacher begin later."""
        first: int | None = fitted.first
        while first is not None:
            if isinstance(self._renderer, SegmentRenderer):
                turn = self._renderer.hinted_turn(fitted.sequence, span, hint, first=first)
            else:
                turn = hinted_turn(self._renderer, fitted.sequence, span, hint, placement=self._placement, first=first)
            over = 0 if isinstance(turn, str) else len(turn.context.ids) - self._max_seq_len
            if over <= 0:
                if first > fitted.first and not isinstance(turn, str):
                    self._counts["teacher_context_cut"] += 1
                return turn
            first = self._first(fitted.sequence, span, span.end - first - over)
        return f"site_{LONGER}"


def _latest(span: TurnSpan) -> int:
    """The last token that may come first: the header is whole, and something predicts the turn's first token."""
    return min(span.header_start, span.start - 1)


class PairMaker:
    """Renders with one template and fits into one length; a pair that is left out is added to `counts`."""

    def __init__(
        self, renderer: Renderer | SegmentRenderer, cut: LeftCut, counts: Counter[str], *, max_dpo_seq_len: int
    ) -> None:
        self._renderer, self._cut, self._counts = renderer, cut, counts
        self._max_length = max_dpo_seq_len

    def pair(self, given: Mapping[str, Any], where: str) -> PairIds | None:
        """A `DPOPair` as ids, or None with a reason counted."""
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(explain(where, got=type(given).__name__, expected="a DPOPair"))
        identity = str(given.get("state_id") or where)
        answers = [_answer(given, side, where) for side in ("chosen", "rejected")]
        state = to_conversation(_field(given, "state_messages", where), conversation_id=identity)
        ids: PairIds | str = "pair_without_state"
        starts: list[int] | None = None
        renderer = self._renderer
        if state.turns and isinstance(renderer, SegmentRenderer):
            compared = renderer.compared_ids(state, *answers)
            ids, starts = (compared, None) if isinstance(compared, str) else compared
        elif state.turns and not isinstance(renderer, SegmentRenderer):
            labels = {"conversation_id": identity, "format_name": state.format}
            ids = compared_ids(renderer, state.turns, *answers, **labels)
        if not isinstance(ids, str):
            ids = self._cut_alike(ids, starts) or "pair_longer_than_max_dpo_seq_len"
        if isinstance(ids, str):
            self._counts[f"pair_{ids.removeprefix('pair_')}"] += 1
            return None
        return ids

    def _cut_alike(self, pair: PairIds, starts: Collection[int] | None) -> PairIds | None:
        longest = max(pair, key=lambda side: len(side.ids))
        latest = max(0, longest.start - max(1, self._cut.header_tokens))
        end = len(longest.ids)
        first = self._cut.first(longest.ids, end=end, limit=self._max_length, latest=latest, starts=starts)
        if first is None or any(side.start <= first for side in pair):
            return None
        if first:
            self._counts["pair_context_cut"] += 1
        return PairIds(*(ResponseIds(side.ids[first:], side.start - first) for side in pair))


def _field(pair: Mapping[str, Any], key: str, where: str) -> Any:
    if pair.get(key) is None:
        raise InputError(explain(where, got=f"keys {sorted(map(str, pair))}", expected=f"a DPOPair with {key!r}"))
    return pair[key]


def _answer(pair: Mapping[str, Any], side: str, where: str) -> Turn:
    text = _field(pair, side, where)
    if not isinstance(text, str):
        raise InputError(explain(f"{side} of {where}", got=type(text).__name__, expected="the text of an action"))
    return answer_turn(text, turn_id=f"{where}:{side}")


_WORD = "Zqword"


class LeftCut:
    """The tokens a template opens messages with, which no text can forge; found by asking it once.

    Without a template a sequence says itself where its messages start.
    """

    def __init__(self, renderer: Renderer | SegmentRenderer) -> None:
        self._openings, self._stops, self.header_tokens = frozenset[int](), frozenset[int](), 0
        if isinstance(renderer, SegmentRenderer):
            return
        self._openings = frozenset(_opening_ids(renderer))
        self._stops = frozenset(renderer.protected.ids[stop] for stop in renderer.dialect.stops)
        self.header_tokens = max(map(len, renderer.encoder.encode(renderer.dialect.headers)))

    def first(
        self, ids: Sequence[int], *, end: int, limit: int, latest: int, starts: Collection[int] | None = None
    ) -> int | None:
        """The first token of at most `limit` that stop before `end`; None where that would be later than `latest`.

        A sequence that fits is not cut. Where no message starts in time, the cut is inside one.
        """
        lowest = max(0, end - limit)
        if lowest > latest:
            return None
        if lowest == 0:
            return 0
        possible = range(lowest, latest + 1)
        if starts is not None:
            return next((at for at in possible if at in starts), lowest)
        return next((at for at in possible if self._starts_message(ids, at)), lowest)

    def _starts_message(self, ids: Sequence[int], at: int) -> bool:
        return ids[at] in self._openings if self._openings else ids[at - 1] in self._stops


def _opening_ids(renderer: Renderer) -> list[int]:
    """The first token only a template can write, of the generation prompt and of a user's message."""
    openings = [renderer.dialect.header]
    try:
        answered = renderer.template.render([user("u"), assistant("a")])
        follow_up = renderer.template.render([user("u"), assistant("a"), user(_WORD)])
    except InputError:  # a template for one question: its header is all there is to go by
        pass
    else:
        openings.append(follow_up[len(answered) :].partition(_WORD)[0] if follow_up.startswith(answered) else "")
    indices = (
        next((index for index in ids if index in renderer.encoder.protected_ids), None)
        for ids in renderer.encoder.encode(openings)
    )
    return [index for index in indices if index is not None]
