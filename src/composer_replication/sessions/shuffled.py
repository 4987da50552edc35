"""A control for channels 2 and 3: the same sites with hints about something else, the same pairs turned by a coin.

What such a training does to a model is what any training of this size does. Only what the real one does beyond it
belongs to what the hints and the pairs say.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from composer_replication.batch.taught_turns import wrong_hints
from composer_replication.batch.tree_batch import CHANNELS

if TYPE_CHECKING:
    from composer_replication.sessions.rendering import KeptPair, RenderedSession

_, _SITES, _ = CHANNELS
NO_OTHER_KIND = "no_hint_of_another_kind"
TURNED = "turned_pairs"


def shuffle_sessions(sessions: Iterable[RenderedSession], *, seed: int = 0) -> list[RenderedSession]:
    """Each site with the hint of one of another kind; of the pairs, and of each kind of them, half turned round.

    A site that has none of another kind beside it is left out, and counted. Nothing else changes.
    """
    sessions = list(sessions)
    sites = [site for session in sessions for site in session.sites]
    wrong = iter(wrong_hints([site.hint for site in sites], [site.site.kind for site in sites], seed=seed))
    turned = _turned([pair for session in sessions for pair in session.pairs], seed)
    return [_shuffled(session, [next(wrong) for _ in session.sites], turned) for session in sessions]


def _shuffled(session: RenderedSession, hints: list[str | None], turned: set[int]) -> RenderedSession:
    sites = [site._replace(hint=hint) for site, hint in zip(session.sites, hints, strict=True) if hint is not None]
    drops = session.drops.copy()
    if len(sites) < len(session.sites):
        drops[f"{_SITES}: {NO_OTHER_KIND}"] += len(session.sites) - len(sites)
    counts = session.counts.copy()
    counts[TURNED] = sum(id(pair) in turned for pair in session.pairs)  # also where none is: it is a control
    pairs = [
        pair._replace(chosen=pair.rejected, rejected=pair.chosen) if id(pair) in turned else pair
        for pair in session.pairs
    ]
    return replace(session, sites=sites, pairs=pairs, counts=counts, drops=drops)


def _turned(pairs: list[KeptPair], seed: int) -> set[int]:
    """Which pairs are turned: one of every two, which are of one kind wherever that is possible."""
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    order = sorted(pairs, key=lambda pair: (pair.kind, draw.random()))
    couples = [order[at : at + 2] for at in range(0, len(order), 2)]
    return {id(draw.choice(couple)) for couple in couples if len(couple) == 2}
