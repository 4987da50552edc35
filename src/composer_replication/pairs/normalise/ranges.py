"""What data-juicer's filters have in common: a number about a text, and the range it has to lie in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Judge = Callable[[str], bool]
"""Whether a text is kept. It may remember what it has seen, so each pass over the pairs has its own."""


@dataclass(frozen=True, kw_only=True)
class RangeFilter:
    """The parameters every filter takes.

    A limit of None is no limit. `reversed_range` keeps what lies outside; a limit that belongs to the range then
    belongs to the outside.
    """

    min_closed_interval: bool = True
    max_closed_interval: bool = True
    reversed_range: bool = False

    def is_kept(self, value: float, low: float | None, high: float | None) -> bool:
        """Whether a number is in the range, or outside where the range is reversed."""
        low_belongs = self.min_closed_interval != self.reversed_range
        high_belongs = self.max_closed_interval != self.reversed_range
        is_inside = (low is None or value > low or (low_belongs and value == low)) and (
            high is None or value < high or (high_belongs and value == high)
        )
        return is_inside != self.reversed_range
