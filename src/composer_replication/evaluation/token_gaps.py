"""By token of an erring turn: how much likelier the hint makes it, before training and after.

    gap(token) = log p(token | hint, context) - log p(token | context)

This is what channel 2 teaches: where the gap is below zero the model with the hint would not have written the token,
and once it is learnt the gap is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.render.encode import token_texts
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.taught_turns import Part, hinted_turn
from composer_replication.evaluation.decisions import digest_of
from composer_replication.evaluation.forced import Kept, numbers
from composer_replication.objective.reference import Response, token_logprobs
from composer_replication.sessions.phases import Phase, tell_phase

if TYPE_CHECKING:
    from composer_replication.evaluation.held_out import HeldOut

_MOST_TOKENS = 512


class GapSite(NamedTuple):
    """A site's target tokens behind the context alone, and behind the context with its hint."""

    site_id: str
    conversation_id: str
    turn: int
    side: str
    tokens: list[str]
    plain: Response
    hinted: Response


def gap_sites(
    renderer: Renderer, held: HeldOut, *, most: int, context: int, placement: Placement, part: Part
) -> list[GapSite]:
    """Sites of held-out sessions, then of learnt ones, `most` of them; a hint without a place in a template is none."""
    sites: list[GapSite] = []
    for site in _sites(renderer, held, context, placement, part):
        if len(sites) == most:
            break
        sites.append(site)
    return sites


def _sites(renderer: Renderer, held: HeldOut, context: int, placement: Placement, part: Part) -> Iterator[GapSite]:
    for session in (*held.sessions, *held.learnt):
        for site in session.rendered.sites:
            first = max(0, site.span.header_start - context)
            options: dict[str, Any] = {"placement": placement, "part": part, "first": first}
            turn = hinted_turn(renderer, site.rendered, site.span, site.hint, **options)
            if isinstance(turn, str):
                continue
            end = min(turn.end, turn.start + _MOST_TOKENS)
            ids = site.rendered.ids
            yield GapSite(
                site.site.id,
                session.conversation.id,
                site.number,
                session.side,
                [_shown(text) for text in token_texts(renderer.tokenizer, ids[turn.start : end])],
                (ids[first:end], turn.start - first),
                (turn.context.ids[: turn.teacher_start + end - turn.start], turn.teacher_start),
            )


def _shown(text: str) -> str:
    """Half of a character, as a token may be, has no text of its own."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def gaps_of(model: nn.Module, weights: str, sites: Sequence[GapSite], kept: Kept, *, arm: str) -> list[list[float]]:
    """A list of gaps a site."""
    gaps: list[list[float]] = []
    for number, site in enumerate(sites):
        tell_phase(Phase(name=f"token gaps, {arm}", done=number, total=len(sites), items="sites", kept_in=kept.path))
        key = f"{weights}:gaps:{digest_of([site.plain, site.hinted])}"
        kept_gaps = kept.get(key)
        gaps.append(kept_gaps if kept_gaps is not None else kept.put(key, numbers(_gaps(model, site))))
    tell_phase(Phase(name=f"token gaps, {arm}", done=len(sites), total=len(sites), items="sites", kept_in=kept.path))
    return gaps


def _gaps(model: nn.Module, site: GapSite) -> list[float]:
    plain, hinted = token_logprobs(model, [site.plain, site.hinted])
    return [round(gap, 4) for gap in (hinted - plain).tolist()]


def gap_rows(sites: Sequence[GapSite], gaps: Mapping[str, list[list[float]]]) -> list[dict[str, Any]]:
    """One row a site."""
    return [
        {
            "site_id": site.site_id,
            "conversation_id": site.conversation_id,
            "turn": site.turn,
            "side": site.side,
            "tokens": site.tokens,
            "before": gaps["before"][number],
            "after": gaps["after"][number],
        }
        for number, site in enumerate(sites)
    ]
