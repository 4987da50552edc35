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
    """Each taught turn also after a hint about another kind of error; `known` are hints of earlier batches by kind.

    The kinds of a batch are paired by lot, so that each is compared with another both ways. Where hints were exchanged,
    it is neither the kind of the turn nor that of the hint it has: against its own a control would be taught to err.
    """
    hints: dict[str, list[str]] = {kind: [hint] for kind, hint in (known or {}).items()}
    in_batch: dict[str, list[str]] = {}
    for turn in (turn for each in found for turn in each.taught):
        in_batch.setdefault(turn.about, []).append(turn.hint)
    hints |= in_batch
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    partners = paired_kinds(sorted(in_batch), sorted(hints), draw)
    for each in found:
        for number, turn in enumerate(each.taught):
            wrong = _other_hint(turn, partners[turn.about], hints, draw)
            hinted = NO_HINT if wrong is None else finder.hinted(each.sequence, turn.turn_id, wrong[1])
            if wrong is None or isinstance(hinted, str):
                each.counts["without_contrast"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            each.taught[number] = turn._replace(wrong_ids=ids, wrong_start=hinted.teacher_start, wrong_kind=wrong[0])


def paired_kinds(kinds: list[str], all_kinds: Sequence[str], draw: random.Random) -> dict[str, str | None]:
    """Each kind's partner, whose partner it is; one that is left over has any other."""
    draw.shuffle(kinds)
    partners: dict[str, str | None] = {}
    for one, other in zip(kinds[::2], kinds[1::2], strict=False):
        partners |= {one: other, other: one}
    for kind in kinds[len(partners) :]:
        others = [each for each in all_kinds if each != kind]
        partners[kind] = draw.choice(others) if others else None
    return partners


def _other_hint(
    turn: TaughtTurn, partner: str | None, hints: Mapping[str, Sequence[str]], draw: random.Random
) -> tuple[str, str] | None:
    """A kind and a hint of it that says something else: of the partner, else of any other kind; None without one."""
    others = {kind: [hint for hint in each if hint != turn.hint] for kind, each in hints.items()}
    kinds = sorted(kind for kind, each in others.items() if each and kind not in (turn.kind, turn.about))
    if not kinds:
        return None
    kind = partner if partner in kinds else draw.choice(kinds)
    return kind, draw.choice(others[kind])
