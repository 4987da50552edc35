"""Rendered sessions cut into windows, each one tree; it is cheap, and done again when a proof drops sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.session_batch import session_batches
from composer_replication.batch.session_records import SiteHint
from composer_replication.batch.taught_turns import wrong_hints
from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.sessions.stored_windows import StoredWindow, store_window

if TYPE_CHECKING:
    from composer_replication.sessions.rendering import RenderedSession, WindowSettings

_, _SITES, _PAIRS = CHANNELS


@dataclass(eq=False, slots=True)
class CutSessions:
    """Windows of sessions; what there is, and what was dropped, by channel and reason."""

    windows: list[StoredWindow] = field(default_factory=list[StoredWindow])
    counts: Counter[str] = field(default_factory=Counter[str])
    drops: Counter[str] = field(default_factory=Counter[str])


def cut_sessions(
    renderer: Renderer,
    sessions: Iterable[RenderedSession],
    settings: WindowSettings,
    unproved: Mapping[str, str] | None = None,
) -> CutSessions:
    """The windows of all sessions, in order; `unproved` are sites that a proof has dropped, and why."""
    sessions, cut = list(sessions), CutSessions()
    wrong = _wrong_hints(sessions) if settings.contrast else {}
    for session in sessions:
        cut.counts.update(session.counts)
        cut.drops.update(session.drops)
        _cut(renderer, session, settings, unproved or {}, wrong, cut)
    return cut


def _wrong_hints(sessions: Iterable[RenderedSession]) -> dict[str, str | None]:
    """For each site that may teach the hint of one of another kind, by the site's id."""
    hints = [hint for session in sessions for hint in session.hints]
    wrong = wrong_hints([text for _, _, text in hints], [kind for _, kind, _ in hints])
    return {site_id: text for (site_id, _, _), text in zip(hints, wrong, strict=True)}


def _cut(
    renderer: Renderer,
    session: RenderedSession,
    settings: WindowSettings,
    unproved: Mapping[str, str],
    wrong: Mapping[str, str | None],
    into: CutSessions,
) -> None:
    into.drops.update(f"{_SITES}: {unproved[site.site.id]}" for site in session.sites if site.site.id in unproved)
    for number, rendered in enumerate(session.sequences):
        sites = [site for site in session.sites if site.rendered is rendered and site.site.id not in unproved]
        pairs = [pair for pair in session.pairs if pair.rendered is rendered]
        batches = session_batches(
            renderer,
            rendered,
            budget=settings.budget,
            overlap=settings.overlap,
            responses=[span for span in rendered.spans if span.turn_id in session.responses],
            sites=[SiteHint(site.span, site.hint, wrong.get(site.site.id)) for site in sites],
            pairs=[pair.tokens() for pair in pairs],
            placement=settings.placement,
            part=settings.part,
            max_length=settings.max_length,
        )
        dropped = Counter(batches.dropped.values())
        into.counts.update({name: n for name, n in batches.counts.items() if name not in dropped})
        into.drops.update(f"{item.channel}: {reason}" for item, reason in batches.dropped.items())
        for window in batches.windows:
            stored = store_window(
                window.batch,
                conversation_id=session.conversation_id,
                sequence=number,
                span=(window.first, window.end),
                site_ids=[sites[item.number].site.id for item in window.items if item.channel == _SITES],
                state_ids=[pairs[item.number].state_id for item in window.items if item.channel == _PAIRS],
            )
            into.windows.append(stored)
            sizes = {"sites": len(stored.site_ids), "pairs": len(stored.state_ids)}
            into.counts.update(stored.counts() | sizes | {"windows": 1, "tree_tokens": stored.num_tokens})
