"""Choose unrelated hints for erring turns of rollouts: hints about another kind of error than the turn's.

Unrelated hints come from other turns in the batch, or from earlier batches. For the hint gate and the contrast they are
added to a turn's own hint (`add_unrelated_hints`); in a control they replace it (`replace_by_unrelated_hints`). The
same seed gives the same hints.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from composer_replication.batch.hint_placement import draw_unrelated_hints

if TYPE_CHECKING:
    from composer_replication.trainer.rollouts.hint_distillation import ErringTurn, ErringTurnFinder, ErringTurns


def replace_by_unrelated_hints(finder: ErringTurnFinder, rollouts: Sequence[ErringTurns], seed: str) -> None:
    """Replace each turn's hint by the hint for a turn with another kind of error; drop turns without one."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    chosen = iter(draw_unrelated_hints(turns, [turn.kind for turn in turns], seed=seed))
    for rollout in rollouts:
        own_turns, rollout.turns = rollout.turns, []
        for turn in own_turns:
            other_turn = next(chosen)
            if other_turn is None or isinstance(
                hinted := finder.place_hint(rollout.sequence, turn.turn_id, other_turn.hint), str
            ):
                rollout.counts["dropped:no_hint_of_another_kind"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            rollout.turns.append(
                turn._replace(
                    teacher_ids=ids, teacher_start=hinted.teacher_start, hint=other_turn.hint, hint_kind=other_turn.kind
                )
            )


def add_unrelated_hints(
    finder: ErringTurnFinder, rollouts: Sequence[ErringTurns], seed: str, earlier_hints: Mapping[str, str] | None = None
) -> None:
    """Add an unrelated hint to each turn; `earlier_hints` are hints from earlier batches, by kind.

    The kinds in a batch are paired at random, so that two kinds are compared in both directions. In a control, where
    `replace_by_unrelated_hints` has already replaced a turn's hint, the added hint matches neither the kind of the
    turn's error nor the kind of the replaced hint. Otherwise the contrast could subtract the effect of the right hint,
    and the control would learn the error.
    """
    hints: dict[str, list[str]] = {kind: [hint] for kind, hint in (earlier_hints or {}).items()}
    in_batch: dict[str, list[str]] = {}
    for turn in (turn for rollout in rollouts for turn in rollout.turns):
        in_batch.setdefault(turn.kind_of_hint, []).append(turn.hint)
    hints |= in_batch
    rng = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    partners = _paired_kinds(sorted(in_batch), sorted(hints), rng)
    for rollout in rollouts:
        for number, turn in enumerate(rollout.turns):
            wrong = _unrelated_hint(turn, partners[turn.kind_of_hint], hints, rng)
            if wrong is None or isinstance(hinted := finder.place_hint(rollout.sequence, turn.turn_id, wrong[1]), str):
                rollout.counts["without_contrast"] += 1
                continue
            ids = torch.tensor(hinted.ids)
            rollout.turns[number] = turn._replace(wrong_ids=ids, wrong_start=hinted.teacher_start, wrong_kind=wrong[0])


def _paired_kinds(kinds: list[str], all_kinds: Sequence[str], rng: random.Random) -> dict[str, str | None]:
    """Return a random partner for each kind. Partners are mutual, except that a kind left over gets any other kind,
    or None.
    """
    rng.shuffle(kinds)
    partners: dict[str, str | None] = {}
    for first, second in zip(kinds[::2], kinds[1::2], strict=False):
        partners |= {first: second, second: first}
    for kind in kinds[len(partners) :]:
        other_kinds = [candidate for candidate in all_kinds if candidate != kind]
        partners[kind] = rng.choice(other_kinds) if other_kinds else None
    return partners


def _unrelated_hint(
    turn: ErringTurn, partner: str | None, hints: Mapping[str, Sequence[str]], rng: random.Random
) -> tuple[str, str] | None:
    """Return the kind and text of an unrelated hint, or None if there is none.

    The hint is about the partner's kind of error if possible, otherwise about any other kind.
    """
    other_hints = {kind: [hint for hint in kind_hints if hint != turn.hint] for kind, kind_hints in hints.items()}
    kinds = sorted(
        kind for kind, kind_hints in other_hints.items() if kind_hints and kind not in (turn.kind, turn.kind_of_hint)
    )
    if not kinds:
        return None
    kind = partner if partner in kinds else rng.choice(kinds)
    return kind, rng.choice(other_hints[kind])
