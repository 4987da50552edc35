"""Whether a model heeds hints in its own rollouts: at an erring turn its own hint against a hint about something else.

Any text before a turn moves it. Only what a turn's own hint does beyond another kind's is its meaning, and all that
channel 2 can teach of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FEWEST_COMPARED = 20
"""Turns; of fewer too many are won or lost by luck."""


class Heeding(NamedTuple):
    """Sums over erring turns that were read after both hints; drops are in nats a token of the turn."""

    turns: float = 0.0
    own_wins: float = 0.0
    """At how many the teacher finds the turn less likely after its own hint than after the other."""
    own_drop: float = 0.0
    """By how much its own hint lowers the turn against no hint."""
    other_drop: float = 0.0

    def plus(self, other: Heeding) -> Heeding:
        return Heeding(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def num_needed(self) -> float:
        """Own hints win at half of the turns if they mean nothing, give or take; two deviations above is not luck."""
        return self.turns / 2 + math.sqrt(self.turns)

    @property
    def wins_by_more_than_luck(self) -> bool | None:
        """None where too few turns were compared to tell."""
        return None if self.turns < FEWEST_COMPARED else self.own_wins >= self.num_needed

    @property
    def is_mostly_its_own(self) -> bool:
        """Whether at least half of what a hint does is what no other one does."""
        return self.own_drop >= 2 * self.other_drop

    def in_words(self) -> str:
        """The figures: what was counted, over how much, and how large the effects are."""
        wins, own, other = (total / max(self.turns, 1.0) for total in self[1:])
        return (
            f"its own hint lowers an erring turn more than another kind's at {wins:.0%} of {self.turns:,.0f} turns "
            f"(by {own:+.3f} and {other:+.3f} nats a token)"
        )
