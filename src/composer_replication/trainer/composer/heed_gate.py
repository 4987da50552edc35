"""Channel 2 rests on the rollouts of a model that does not heed hints.

What it would be taught there is what any text in that place does to it: hints of another kind moved Qwen2.5-Coder-0.5B
as much as right ones, and both cost success (docs/evidence.md). So the turns of a batch are read after another kind's
hint as well, and the sums over all finished steps decide about the next one: the same, however a step is cut. Until
enough turns were compared the channel runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from composer_replication.rollouts.heeding import Heeding


class HeedGate:
    """Open where own hints win by more than luck and, without a contrast, are at least half of what a hint does."""

    def __init__(self, *, has_contrast: bool) -> None:
        self._has_contrast = has_contrast
        self._all, self._in_step = Heeding(), Heeding()
        self.is_open = True

    def add(self, heeding: Heeding) -> None:
        """The sums of a micro-step, over all processes."""
        self._in_step = self._in_step.plus(heeding)

    def after_step(self) -> str | None:
        """Decide about the next step; what there is to say where that changes."""
        self._all, self._in_step = self._all.plus(self._in_step), Heeding()
        was_open, self.is_open = self.is_open, self._decided()
        if self.is_open == was_open:
            return None
        if self.is_open:
            return f"channel 2 goes on with rollouts: {self._all.in_words()}"
        why = "by more than chance" if not self._all.wins_by_more_than_luck else "more than any text in that place"
        return (
            f"channel 2 rests on rollouts: this model does not heed hints there {why}: {self._all.in_words()}. It goes "
            "on if that changes; train.grpo.heed_gate = false teaches all the same"
        )

    def _decided(self) -> bool:
        wins = self._all.wins_by_more_than_luck
        if wins is None:
            return True
        return wins and (self._has_contrast or self._all.is_mostly_its_own)

    def state(self) -> list[list[float]]:
        return [list(self._all), list(self._in_step)]

    def load_state(self, saved: Sequence[Sequence[float]]) -> None:
        self._all, self._in_step = (Heeding(*each) for each in saved)
        self.is_open = self._decided()
