"""Whether a model heeds hints in its own rollouts: at an erring turn its own hint against a hint about something else.

Any text before a turn moves it, a long one more than a short one. Only what a turn's own hint does beyond another
kind's is its meaning, and all that channel 2 can teach of it. So each comparison of a hint of kind A with one of kind B
is weighed with those of B with A: what either text does wherever it stands cancels.

    difference(A, B) = mean over turns after a hint of kind A of  drop(own hint) - drop(a hint of kind B)
    advantage        = mean over pairs of kinds of  (difference(A, B) + difference(B, A)) / 2

Rollouts of one prompt make the same error, so those of a step with the same two kinds count once, by their mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

FEWEST_COMPARED, ENOUGH_COMPARED = 20, 100
"""Of fewer nothing is said; of more, what has not shown by then is taken not to be there."""


class Comparison(NamedTuple):
    """One erring turn, read after two hints: by how many nats a token each lowers it against no hint."""

    prompt: int
    """Which prompt it is a rollout of."""
    kind: str
    """What its hint is about, and what the other one is."""
    other_kind: str
    own_drop: float
    other_drop: float


class Heeding:
    """Sums over all comparisons of a run."""

    def __init__(self) -> None:
        self._by_kinds: dict[tuple[str, str], tuple[float, float, float]] = {}
        self._own, self._other, self._count = 0.0, 0.0, 0

    def add(self, comparisons: Iterable[Comparison]) -> None:
        """Those of one step."""
        alike: dict[tuple[int, str, str], list[Comparison]] = {}
        for each in sorted(comparisons):  # in one order, however the step was cut
            alike.setdefault(each[:3], []).append(each)
        for (_, *kinds), several in alike.items():
            own, other = (fmean(getattr(each, name) for each in several) for name in ("own_drop", "other_drop"))
            number, total, squares = self._by_kinds.get((kinds[0], kinds[1]), (0, 0.0, 0.0))
            difference = own - other
            self._by_kinds[kinds[0], kinds[1]] = (number + 1, total + difference, squares + difference**2)
            self._own, self._other, self._count = self._own + own, self._other + other, self._count + 1

    @property
    def compared(self) -> int:
        """How many comparisons there are whose opposite exists."""
        return round(sum(sums[0] for (one, other), sums in self._by_kinds.items() if (other, one) in self._by_kinds))

    @property
    def own_drop(self) -> float:
        """By how much own hints lower erring turns, in nats a token."""
        return self._own / max(self._count, 1)

    @property
    def other_drop(self) -> float:
        return self._other / max(self._count, 1)

    @property
    def advantage(self) -> tuple[float, float]:
        """How much more own hints lower erring turns than others, and the standard error of that."""
        both_ways = [(one, other) for one, other in self._by_kinds if one < other and (other, one) in self._by_kinds]
        if not both_ways:
            return 0.0, math.inf
        pairs = [(self._by_kinds[one, other], self._by_kinds[other, one]) for one, other in both_ways]
        weights = [1 / sum(1 / number for number, _, _ in pair) for pair in pairs]
        means = [fmean(total / number for number, total, _ in pair) for pair in pairs]
        mean = math.fsum(weight * each for weight, each in zip(weights, means, strict=True)) / math.fsum(weights)
        return mean, math.sqrt(self._variance() / (4 * math.fsum(weights)))

    def _variance(self) -> float:
        """Of comparisons of the same kinds, over all kinds; unknown where none was made twice."""
        cells = [each for each in self._by_kinds.values() if each[0] > 1]
        spare = sum(number - 1 for number, _, _ in cells)
        within = math.fsum(squares - total**2 / number for number, total, squares in cells)
        return max(within, 0.0) / spare if spare else math.inf

    @property
    def deviations(self) -> float:
        """The advantage in standard errors."""
        mean, error = self.advantage
        return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0

    @property
    def is_shown(self) -> bool | None:
        """Whether own hints do more than others: by two standard errors; None where it cannot be told yet."""
        if self.compared < FEWEST_COMPARED:
            return None
        if self.deviations >= 2:
            return True
        return False if self.deviations < 0.5 or self.compared >= ENOUGH_COMPARED else None

    @property
    def is_mostly_its_own(self) -> bool | None:
        """Whether a hint lowers the error, and by twice as much as another does; None where it is near to that."""
        if self.own_drop <= 0 or self.own_drop < 1.5 * self.other_drop:
            return False
        return True if self.own_drop >= 2 * self.other_drop else None

    def in_words(self) -> str:
        """The figures: over how much, and how large the effects are."""
        return in_words(self.compared, self.own_drop, self.other_drop, self.deviations)

    def state(self) -> dict[str, Any]:
        by_kinds = [[*kinds, *sums] for kinds, sums in self._by_kinds.items()]
        return {"by_kinds": by_kinds, "sums": [self._own, self._other, self._count]}

    def load_state(self, tree: Mapping[str, Any]) -> None:
        self._by_kinds = {(a, b): (number, total, squares) for a, b, number, total, squares in tree["by_kinds"]}
        self._own, self._other, self._count = tree["sums"]


def in_words(compared: float, own_drop: float, other_drop: float, deviations: float) -> str:
    return (
        f"over {compared:,.0f} comparisons its own hint lowers an erring turn by {own_drop:+.3f} nats a token and "
        f"another kind's by {other_drop:+.3f}; with like kinds weighed alike {deviations:+.1f} standard errors apart"
    )
