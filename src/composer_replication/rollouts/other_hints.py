"""Hints that do not belong to a rollout's erring turn: in place of its own, as a control, or beside it, as a contrast.

Those of a batch are drawn from its other turns, the same in every run with one seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composer_replication.batch.taught_turns import wrong_hints
from composer_replication.rollouts.sites import NO_HINT, FoundSites, RolloutSites


def exchange_hints(finder: RolloutSites, found: Sequence[FoundSites], seed: str) -> None:
    """Each taught turn after the hint of a turn of another kind instead of its own; without one it is dropped."""
    turns = [turn for each in found for turn in each.taught]
    drawn = iter(wrong_hints(turns, [turn.kind for turn in turns], seed=seed))
    for each in found:
        own, each.taught = each.taught, []
        for turn in own:
            other = next(drawn)
            hinted = NO_HINT if other is None else finder.hinted(each.sequence, turn.turn_id, other.hint)
            if other is None or isinstance(hinted, str):
                each.counts["dropped:no_hint_of_another_kind"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            each.taught.append(
                turn._replace(
                    teacher_ids=ids, teacher_start=hinted.teacher_start, hint=other.hint, hint_kind=other.kind
                )
            )


def add_wrong_hints(finder: RolloutSites, found: Sequence[FoundSites], seed: str) -> None:
    """Each taught turn also after a hint about another kind of error, where the batch has one.

    Where hints were exchanged, that is neither the kind of the turn nor that of the hint it has: against its own hint a
    control would be taught to err.
    """
    turns = [turn for each in found for turn in each.taught]
    about = [turn.hint_kind or turn.kind for turn in turns]
    drawn = iter(wrong_hints([turn.hint for turn in turns], about, nor=[turn.kind for turn in turns], seed=seed))
    for each in found:
        for number, turn in enumerate(each.taught):
            wrong = next(drawn)
            hinted = NO_HINT if wrong is None else finder.hinted(each.sequence, turn.turn_id, wrong)
            if isinstance(hinted, str):
                each.counts["without_contrast"] += 1
            else:
                ids = torch.tensor(hinted.ids)
                each.taught[number] = turn._replace(wrong_ids=ids, wrong_start=hinted.teacher_start)
