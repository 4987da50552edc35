"""The held-out sessions of a run, rendered: what went wrong in them, what should have been done, what was right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from composer_replication.batch.render.renderer import Renderer
from composer_replication.runs import RunDir
from composer_replication.runs.split import PlacedConversation, Side
from composer_replication.sessions.read_run import LoggedSession, read_sessions
from composer_replication.sessions.rendering import RenderedSession, WindowSettings, render_session
from composer_replication.types import Conversation, ToolCall

SIDES: tuple[Side, ...] = ("train", "validation", "test")


class HeldOutSession(NamedTuple):
    """A conversation with its rendering, the session it is part of, and where that stands."""

    session: str
    side: Side
    logged: LoggedSession
    rendered: RenderedSession

    @property
    def conversation(self) -> Conversation:
        return self.logged.conversation


@dataclass(kw_only=True)
class HeldOut:
    """Held-out conversations, a few of those that were learnt from, and how many sessions and sites a side has.

    `duplicates` are (conversation, turn) of held-out states that stand in learnt sessions too: nothing is asked there.
    """

    sessions: list[HeldOutSession] = field(default_factory=list[HeldOutSession])
    learnt: list[HeldOutSession] = field(default_factory=list[HeldOutSession])
    num_sessions: dict[str, int] = field(default_factory=dict[str, int])
    num_sites: dict[str, int] = field(default_factory=dict[str, int])
    duplicates: frozenset[tuple[str, str]] = frozenset()
    drops: Counter[str] = field(default_factory=Counter[str])

    def is_duplicate(self, conversation_id: str, turn_id: str) -> bool:
        return (conversation_id, turn_id) in self.duplicates


def read_held_out(
    run: RunDir,
    rows: Sequence[PlacedConversation],
    renderer: Renderer,
    settings: WindowSettings,
    *,
    num_learnt_sites: int = 0,
) -> HeldOut:
    """The test side of a run, read in one pass; of the others as many conversations as hold so many sites."""
    rows_by_id = {row.conversation_id: row for row in rows}
    names = {side: {row.session for row in rows if row.side == side} for side in SIDES}
    held_out = HeldOut(
        num_sessions={side: len(names[side]) for side in SIDES},
        num_sites=dict.fromkeys(SIDES, 0),
        duplicates=frozenset((row.conversation_id, turn) for row in rows for turn in row.near_duplicates),
    )
    num_known = 0
    for logged in read_sessions(run, with_sites=True, with_pairs=False):
        placed_row = rows_by_id[logged.conversation.id]
        num_kept = sum(site.is_kept for site, _ in logged.sites)
        held_out.num_sites[placed_row.side] += num_kept
        if placed_row.side == "test":
            held = _rendered(placed_row, logged, renderer, settings)
            drops = held.rendered.drops.items()
            held_out.drops.update({reason: number for reason, number in drops if not reason.startswith("lm_ce")})
            held_out.sessions.append(held)
        elif num_kept and num_known < num_learnt_sites:
            held_out.learnt.append(_rendered(placed_row, logged, renderer, settings))
            num_known += len(held_out.learnt[-1].rendered.sites)
    return held_out


def _rendered(
    placement: PlacedConversation, logged: LoggedSession, renderer: Renderer, settings: WindowSettings
) -> HeldOutSession:
    right = corrections_of(logged)
    session = LoggedSession(conversation=logged.conversation, sites=logged.sites, corrections=right)
    return HeldOutSession(placement.session, placement.side, session, render_session(renderer, session, settings))


def corrections_of(logged: LoggedSession) -> dict[str, ToolCall]:
    """What the session itself shows should have been done, by the site's id."""
    from composer_replication.pairs.corrections import ACTED, own_pairs

    kept_ids = {site.id for site, _ in logged.sites if site.is_kept}
    failures = [site for site, _ in logged.sites]
    pairs = own_pairs(logged.conversation, failures, only=kept_ids) if kept_ids else ()
    return {pair.site_id: pair.chosen for pair in pairs if pair.source != ACTED}
