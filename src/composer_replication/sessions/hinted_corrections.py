"""Hint, then what worked: the corrections of erring turns as turns for channel 1, in the context with the site's hint.

A small model that has never seen a hint does not heed one. These turns show it what a hint is followed by; they are for
a warm-up, since the steps after it teach what to do *without* a hint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.taught_turns import hinted_turn
from composer_replication.batch.tree_batch import CHANNELS

if TYPE_CHECKING:
    from composer_replication.sessions.rendering import KeptPair, KeptSite, RenderedSession

HINTED_CORRECTIONS = "hinted_corrections"
OTHER_CONTEXT = "correction_in_another_context"
_SOURCES = frozenset({"correction", "user"})
_RESPONSES = CHANNELS[0]


def with_hinted_corrections(
    renderer: Renderer, session: RenderedSession, *, placement: Placement = "before_turn"
) -> RenderedSession:
    """The session with a sequence more for every site that has a correction; what cannot be is among the drops."""
    sequences: list[RenderedSequence] = []
    drops: Counter[str] = Counter()
    for site in session.sites:
        for pair in session.pairs:
            if not _is_of(pair, site):
                continue
            corrected = _sequence(renderer, site, pair, placement, f"{site.site.id}:{len(sequences)}")
            if isinstance(corrected, str):
                drops[f"{_RESPONSES}: {corrected}"] += 1
            else:
                sequences.append(corrected)
    return replace(
        session,
        sequences=[*session.sequences, *sequences],
        responses=session.responses | {sequence.spans[-1].turn_id for sequence in sequences},
        counts=session.counts + Counter({HINTED_CORRECTIONS: len(sequences)}),
        drops=session.drops + drops,
    )


def _is_of(pair: KeptPair, site: KeptSite) -> bool:
    """Whether the pair's rejected side is the site's turn, and its chosen one what the session itself made of it."""
    is_correction = pair.kind.partition(" ")[0] in _SOURCES
    return is_correction and pair.rendered is site.rendered and pair.turn_id == site.span.turn_id


def _sequence(
    renderer: Renderer, site: KeptSite, pair: KeptPair, placement: Placement, name: str
) -> RenderedSequence | str:
    """The session up to the turn, the hint, and the correction; or why not."""
    chosen, span = pair.chosen, site.span
    if (chosen.num_shared, chosen.start) != (span.start, span.start):
        return OTHER_CONTEXT
    hinted = hinted_turn(renderer, site.rendered, span, site.hint, placement=placement)
    if isinstance(hinted, str):
        return hinted
    context = hinted.context
    ids = [*context.ids[: context.start], *chosen.rest]
    before = [turn_span for turn_span in site.rendered.spans if turn_span.end <= context.hint_start]
    corrected = TurnSpan(
        turn_id=f"{name}:corrected",
        header_start=context.start - (span.start - span.header_start),
        start=context.start,
        end=len(ids),
        call_start=None,
        call_end=None,
        text="",
        previous_role=span.previous_role,
        is_verbatim=False,
    )
    return RenderedSequence(
        conversation_id=site.rendered.conversation_id, ids=ids, spans=[*before, corrected], notes={}
    )
