"""Preference pairs of a trace as token ids: one context on both sides, cut on the left alike, answers always whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from composer_replication.actions.parse import answer_turn
from composer_replication.actions.write import text_follows_call
from composer_replication.batch.left_cut import LeftCut
from composer_replication.batch.pair_tokens import PairIds, ResponseIds, pair_ids
from composer_replication.batch.render import Renderer
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.types import Turn


class PairMaker:
    """Renders with one template and fits into one length; a pair that is left out is added to `counts`."""

    def __init__(self, renderer: Renderer, cut: LeftCut, counts: Counter[str], *, max_dpo_seq_len: int) -> None:
        self._renderer, self._cut, self._counts = renderer, cut, counts
        self._max_length = max_dpo_seq_len

    def pair(self, given: Mapping[str, Any], where: str) -> PairIds | None:
        """A `DPOPair` as ids, or None with a reason counted."""
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(explain(where, got=type(given).__name__, expected="a DPOPair"))
        identity = str(given.get("state_id") or where)
        answers = [_answer(given, side, where) for side in ("chosen", "rejected")]
        state = to_conversation(_field(given, "state_messages", where), conversation_id=identity)
        reason = "pair_without_state" if not state.turns else ""
        if any(not answer.text.strip() and not answer.calls for answer in answers):
            reason = "pair_without_answer"
        elif any(map(text_follows_call, answers)):
            reason = "pair_text_follows_call"
        found = None
        if not reason:
            try:
                found = pair_ids(
                    self._renderer, state.turns, *answers, conversation_id=identity, format_name=state.format
                )
            except AlignmentError:  # a template may show one state in two ways; there is nothing to compare then
                reason = "pair_contexts_differ"
        if found is not None and found.chosen == found.rejected:
            reason = "pair_of_equal_answers"
        elif found is not None:
            found = self._cut_alike(found)
            reason = "" if found is not None else "pair_longer_than_max_dpo_seq_len"
        if reason:
            self._counts[reason] += 1
            return None
        return found

    def _cut_alike(self, pair: PairIds) -> PairIds | None:
        longest = max(pair, key=lambda side: len(side.ids))
        latest = longest.start - max(1, self._cut.header_tokens)
        first = self._cut.first(longest.ids, end=len(longest.ids), limit=self._max_length, latest=max(0, latest))
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
