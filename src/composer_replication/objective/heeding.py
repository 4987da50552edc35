"""Does a model heed hints on some logs at all? The proofs of all their sites, counted against chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from composer_replication.objective.hint_proof import HintProof, stands_out

_FEWEST_SITES = 4
"""Of fewer all could be won by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeedVerdict:
    """Whether a model heeds hints on some logs; `heeds` is None where there are too few sites to tell.

    It does where own hints stand out from all they are compared with at more than half of the sites, and at more than
    chance has it, by two standard deviations: without an effect one of two is the larger at half of the sites, and one
    of three, where there are good calls, at a third.
    """

    num_sites: int
    over_other: int
    num_with_good: int
    num_elsewhere: int
    over_good: int
    over_both: int
    good_effect: float | None

    @property
    def by_chance(self) -> float:
        """At how many sites own hints would stand out if hints did nothing."""
        return self.num_with_good / 3 + (self.num_sites - self.num_with_good) / 2

    @property
    def num_needed(self) -> int:
        """At how many they have to."""
        deviation = math.sqrt(self.num_with_good * 2 / 9 + (self.num_sites - self.num_with_good) / 4)
        return max(self.num_sites // 2 + 1, math.ceil(self.by_chance + 2 * deviation))

    @property
    def heeds(self) -> bool | None:
        return None if self.num_sites < _FEWEST_SITES else self.over_both >= self.num_needed

    def in_words(self, *, can_warm_up: bool = True) -> str:
        """One sentence: whether it does, by which figures, and what to do if not."""
        if self.heeds is None:
            return f"whether this model heeds hints cannot be told from {self.num_sites} sites that could be compared"
        if self.heeds:
            return f"this model heeds hints on these logs: {self._figures()}"
        what = "all of what follows is so" if self.num_with_good else "what follows is so"
        counted = f"{what} at {self.over_both} sites; chance alone makes it {self.by_chance:.0f}"
        advice = "warm up first (train.warmup), " if can_warm_up else ""
        return (
            f"this model does not heed hints on these logs by more than chance: {counted}, and {self.num_needed} are "
            f"needed: {self._figures()}: channel 2 has little to teach with; {advice}use a larger model, or rely on "
            "pairs (channel 3)"
        )

    def _figures(self) -> str:
        figures = (
            f"own hints lower the erring decision more than another kind's at {_share(self.over_other, self.num_sites)}"
        )
        if self.good_effect is not None:
            elsewhere_text = f" ({self.num_elsewhere} of them by calls of other sessions, having none before it)"
            figures += (
                f", and more than they lower good calls before it in the same sessions at "
                f"{_share(self.over_good, self.num_with_good)}{elsewhere_text if self.num_elsewhere else ''}, "
                f"which they move by {self.good_effect:+.2f} nats a token"
            )
        if self.num_with_good < self.num_sites:
            figures += f"; there is no good call to compare with at {self.num_sites - self.num_with_good} sites"
        return figures


def verdict(proofs: Sequence[HintProof]) -> HeedVerdict:
    """From all sites that could be compared, kept or not; the margin plays no part."""
    compared = [proof for proof in proofs if proof.advantage is not None]
    with_good = [proof for proof in compared if proof.good_effect is not None]
    effects = [proof.good_effect or 0.0 for proof in with_good]
    return HeedVerdict(
        num_sites=len(compared),
        over_other=sum((proof.advantage or 0.0) > 0 for proof in compared),
        num_with_good=len(with_good),
        num_elsewhere=sum(proof.num_good_elsewhere > 0 for proof in with_good),
        over_good=sum((proof.advantage_over_good or 0.0) > 0 for proof in with_good),
        over_both=sum(stands_out(proof.advantage, proof.advantage_over_good) for proof in compared),
        good_effect=fmean(effects) if effects else None,
    )


def _share(number: int, total: int) -> str:
    return f"{number / total:.0%} of {total} sites"
