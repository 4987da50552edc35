"""Hints that do not belong to a rollout's erring turn: in place of its own, as a control, or beside it, to compare.

Those of a batch are drawn from its other turns, the same in every run with one seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from composer_replication.batch.taught_turns import wrong_hints
from composer_replication.rollouts.sites import NO_HINT, FoundSites, RolloutSites, TaughtTurn


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


def add_wrong_hints(
    finder: RolloutSites, found: Sequence[FoundSites], seed: str, known: Mapping[str, str] | None = None
) -> None:
    """Each taught turn also after a hint about another kind of error, every kind as likely; `known` are hints of
    earlier batches by kind, for those that have nothing else.

    Where hints were exchanged, that is neither the kind of the turn nor that of the hint it has: against its own hint a
    control would be taught to err.
    """
    batch = [(turn.about, turn.hint) for each in found for turn in each.taught]
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    for each in found:
        for number, turn in enumerate(each.taught):
            wrong = _drawn(turn, batch, draw) or _drawn(turn, list((known or {}).items()), draw)
            hinted = NO_HINT if wrong is None else finder.hinted(each.sequence, turn.turn_id, wrong[1])
            if wrong is None or isinstance(hinted, str):
                each.counts["without_contrast"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            each.taught[number] = turn._replace(wrong_ids=ids, wrong_start=hinted.teacher_start, wrong_kind=wrong[0])


def _drawn(turn: TaughtTurn, hints: Sequence[tuple[str, str]], draw: random.Random) -> tuple[str, str] | None:
    """A kind and a hint of it that says something else, or None."""
    by_kind: dict[str, list[str]] = {}
    for kind, hint in hints:
        if kind not in (turn.kind, turn.about) and hint != turn.hint:
            by_kind.setdefault(kind, []).append(hint)
    if not by_kind:
        return None
    kind = draw.choice(sorted(by_kind))
    return kind, draw.choice(by_kind[kind])
