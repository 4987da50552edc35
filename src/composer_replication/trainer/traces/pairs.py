"""Preference pairs of a trace as token ids: one context on both sides, cut on the left alike, answers always whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from composer_replication.actions.parse import answer_turn
from composer_replication.batch.pair_tokens import PairIds, ResponseIds, compared_ids
from composer_replication.batch.render.left_cut import LeftCut
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError, explain
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
        found: PairIds | str | None = "pair_without_state"
        if state.turns:
            named = {"conversation_id": identity, "format_name": state.format}
            found = compared_ids(self._renderer, state.turns, *answers, **named)
        if not isinstance(found, str):
            found = self._cut_alike(found) or "pair_longer_than_max_dpo_seq_len"
        if isinstance(found, str):
            self._counts[f"pair_{found.removeprefix('pair_')}"] += 1
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
