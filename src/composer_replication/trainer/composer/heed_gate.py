"""Channel 2 rests on the rollouts of a model until that model is seen to heed hints.

What it would be taught else is what any text in that place does to it: hints of another kind moved Qwen2.5-Coder-0.5B
as much as right ones, and both cost success, most of it in the first steps (docs/evidence.md). So the turns of a batch
are read after another kind's hint as well, and all finished steps decide about the next one: the same, however a step
is cut. Until enough turns were compared the channel rests, and where it cannot be told it does what it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_replication.rollouts.heeding import (
    COMPARED,
    CONTRAST,
    DEVIATIONS,
    ENOUGH_COMPARED,
    FEWEST_COMPARED,
    GATE,
    OTHER_DROP,
    OWN_DROP,
    Comparison,
    Heeding,
)

Gather = Callable[[list[Comparison]], list[Comparison]]
_EVERY = 10
"""Steps between comparisons once there are enough: another context a turn is not free."""


class HeedWatch:
    """What a run's rollouts say about hints, and whether channel 2 counts in them.

    `gates`: without, it counts always. Where the teacher has the effect of a wrong hint taken off (`has_contrast`) own
    hints have to do more than others; else five times as much and not a little, as the rest would be taught with it.
    """

    def __init__(self, *, gates: bool, has_contrast: bool, gather: Gather = list) -> None:
        self.gates, self.has_contrast, self._gather = gates, has_contrast, gather
        self.heeding = Heeding()
        self._waiting: list[Comparison] = []
        self._last_compared = -_EVERY
        self.is_open = self._was_open = not gates
        self._told: bool | None = None
        """What was last said of it: that it is open, that it is closed."""

    def wants_comparisons(self, step: int, *, is_training: bool = True) -> bool:
        """Whether the rollouts of a step get another kind's hint beside their own; those of an evaluation need none."""
        is_due = self.heeding.compared < ENOUGH_COMPARED or step - self._last_compared >= _EVERY
        return self.has_contrast or (is_due and is_training)

    def add(self, comparisons: Sequence[Comparison]) -> None:
        """Those of a micro-step on this process."""
        self._waiting.extend(comparisons)

    def after_step(self, step: int, *, is_whole: bool = True) -> str | None:
        """Decide what follows `step` finished ones; what there is to say where that is new. All processes call it.

        `is_whole`: all rollouts of a generation were seen. Until then nothing is decided: one prompt's are in several
        steps then, and would count in each.
        """
        if is_whole:
            of_all = self._gather(self._waiting)
            self.heeding.add(of_all)
            self._waiting, self._last_compared = [], step if of_all else self._last_compared
        decided = self._decided() if self.gates else None
        self._was_open, self.is_open = self.is_open, self.is_open if decided is None else decided
        if decided is None or decided == self._told:
            return None
        self._told = decided
        if decided:
            return f"channel 2 runs on rollouts from here on: {self.heeding.in_words()}"
        return (
            "channel 2 rests on rollouts: this model is not seen to heed hints enough there: "
            f"{self.heeding.in_words()}. It runs once that changes; train.grpo.heed_gate = false teaches all the same"
        )

    def _decided(self) -> bool | None:
        """None: as before."""
        if self.heeding.compared < FEWEST_COMPARED:
            return None
        is_shown = self.heeding.is_still_shown if self.is_open else self.heeding.is_shown
        is_its_own = True if self.has_contrast else self.heeding.is_mostly_its_own
        if is_shown is False or is_its_own is False:
            return False
        return True if self.heeding.is_shown and is_its_own else None

    def metrics(self) -> dict[str, float]:
        """After a step: over all so far, and whether the channel counted in that one."""
        heeding = self.heeding
        figures = {COMPARED: float(heeding.compared), DEVIATIONS: heeding.deviations}
        figures |= {OWN_DROP: heeding.own_drop, OTHER_DROP: heeding.other_drop}
        figures |= {CONTRAST: 1.0} if self.has_contrast else {}
        return figures | ({GATE: float(self._was_open)} if self.gates else {})

    def state(self) -> dict[str, Any]:
        waiting = [list(comparison) for comparison in self._waiting]
        tree = {"heeding": self.heeding.state(), "waiting": waiting, "last": self._last_compared}
        return tree | {"gates": self.gates, "is_open": self.is_open, "told": self._told}

    def load_state(self, tree: Mapping[str, Any]) -> None:
        self.heeding.load_state(tree["heeding"])
        self._waiting = [Comparison(*entry) for entry in tree["waiting"]]
        self._last_compared = int(tree["last"])
        # Open for want of a gate, or of one that began open, shows nothing: this one looks at the figures first.
        self.is_open = not self.gates or (bool(tree.get("gates")) and bool(tree["is_open"]))
        self._told = tree["told"] if self.gates and tree.get("gates") else None
