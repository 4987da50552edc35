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
    turns = [turn for found_sites in found for turn in found_sites.taught]
    drawn = iter(wrong_hints(turns, [turn.kind for turn in turns], seed=seed))
    for found_sites in found:
        own_turns, found_sites.taught = found_sites.taught, []
        for turn in own_turns:
            other_turn = next(drawn)
            hinted = (
                NO_HINT if other_turn is None else finder.hinted(found_sites.sequence, turn.turn_id, other_turn.hint)
            )
            if other_turn is None or isinstance(hinted, str):
                found_sites.counts["dropped:no_hint_of_another_kind"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            found_sites.taught.append(
                turn._replace(
                    teacher_ids=ids, teacher_start=hinted.teacher_start, hint=other_turn.hint, hint_kind=other_turn.kind
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
    for turn in (turn for found_sites in found for turn in found_sites.taught):
        in_batch.setdefault(turn.about, []).append(turn.hint)
    hints |= in_batch
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    partners = paired_kinds(sorted(in_batch), sorted(hints), draw)
    for found_sites in found:
        for number, turn in enumerate(found_sites.taught):
            wrong = _other_hint(turn, partners[turn.about], hints, draw)
            hinted = NO_HINT if wrong is None else finder.hinted(found_sites.sequence, turn.turn_id, wrong[1])
            if wrong is None or isinstance(hinted, str):
                found_sites.counts["without_contrast"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            found_sites.taught[number] = turn._replace(
                wrong_ids=ids, wrong_start=hinted.teacher_start, wrong_kind=wrong[0]
            )


def paired_kinds(kinds: list[str], all_kinds: Sequence[str], draw: random.Random) -> dict[str, str | None]:
    """Each kind's partner, whose partner it is; one that is left over has any other."""
    draw.shuffle(kinds)
    partners: dict[str, str | None] = {}
    for one, other_kind in zip(kinds[::2], kinds[1::2], strict=False):
        partners |= {one: other_kind, other_kind: one}
    for kind in kinds[len(partners) :]:
        other_kinds = [candidate for candidate in all_kinds if candidate != kind]
        partners[kind] = draw.choice(other_kinds) if other_kinds else None
    return partners


def _other_hint(
    turn: TaughtTurn, partner: str | None, hints: Mapping[str, Sequence[str]], draw: random.Random
) -> tuple[str, str] | None:
    """A kind and a hint of it that says something else: of the partner, else of any other kind; None without one."""
    other_hints = {kind: [hint for hint in kind_hints if hint != turn.hint] for kind, kind_hints in hints.items()}
    kinds = sorted(
        kind for kind, kind_hints in other_hints.items() if kind_hints and kind not in (turn.kind, turn.about)
    )
    if not kinds:
        return None
    kind = partner if partner in kinds else draw.choice(kinds)
    return kind, draw.choice(other_hints[kind])
