"""Which hint is the wrong one: that of a site of another kind. Proofs, sessions and rollouts all draw it here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from composer_replication.errors import InputError, explain

T = TypeVar("T")


def wrong_hints(hints: Sequence[T], kinds: Sequence[str], *, seed: int | str = 0) -> list[T | None]:
    """For each site the hint of one of another kind, drawn once and the same in every run; None where there is none.

    `kinds` are the sites' kinds of error. A hint may be anything that stands for one, such as its site.
    """
    if len(hints) != len(kinds):
        raise InputError(explain("hints and kinds", got=(len(hints), len(kinds)), expected="one of each for a site"))
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    others = {kind: [hint for hint, its in zip(hints, kinds, strict=True) if its != kind] for kind in set(kinds)}
    return [draw.choice(others[kind]) if others[kind] else None for kind in kinds]
