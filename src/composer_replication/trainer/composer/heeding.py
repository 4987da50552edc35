"""Channel 2 rests on the rollouts of a model until that model is seen to heed hints.

What it would be taught else is what any text in that place does to it: hints of another kind moved Qwen2.5-Coder-0.5B
as much as right ones, and both cost success, most of it in the first steps (docs/evidence.md). So the turns of a batch
are read after another kind's hint as well, and all finished steps decide about the next one: the same, however a step
is cut. Until enough turns were compared the channel rests, and where it cannot be told it does what it did before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

# Whether a model heeds hints in its own rollouts: at an erring turn its own hint against a hint about something else.
#
# Any text before a turn moves it, a long one more than a short one. Only what a turn's own hint does beyond another
# kind's is its meaning, and all that channel 2 can teach of it. So each comparison of a hint of kind A with one of
# kind B is weighed with those of B with A: what either text does wherever it stands cancels.
#
#     difference(A, B) = mean over turns after a hint of kind A of  drop(own hint) - drop(a hint of kind B)
#     advantage        = mean over pairs of kinds of  (difference(A, B) + difference(B, A)) / 2
#
# Rollouts of one prompt make the same error, so those of a generation with the same two kinds count once, by their
# mean.


class HintComparison(NamedTuple):
    """One erring turn, read after two hints: by how many nats a token each lowers it against no hint."""

    prompt: int
    """Which prompt it is a rollout of."""
    kind: str
    """What its hint is about, and what the other one is."""
    other_kind: str
    own_drop: float
    other_drop: float


Gather = Callable[[list[HintComparison]], list[HintComparison]]
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
        self._waiting: list[HintComparison] = []
        self._last_compared = -_EVERY
        self.is_open = self._was_open = not gates
        self._told: bool | None = None
        """What was last said of it: that it is open, that it is closed."""

    def wants_comparisons(self, step: int, *, is_training: bool = True) -> bool:
        """Whether the rollouts of a step get another kind's hint beside their own; those of an evaluation need none."""
        is_due = self.heeding.compared < ENOUGH_COMPARED or step - self._last_compared >= _EVERY
        return self.has_contrast or (is_due and is_training)

    def add(self, comparisons: Sequence[HintComparison]) -> None:
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
        self._waiting = [HintComparison(*entry) for entry in tree["waiting"]]
        self._last_compared = int(tree["last"])
        # Open for want of a gate, or of one that began open, shows nothing: this one looks at the figures first.
        self.is_open = not self.gates or (bool(tree.get("gates")) and bool(tree["is_open"]))
        self._told = tree["told"] if self.gates and tree.get("gates") else None


FEWEST_COMPARED, ENOUGH_COMPARED = 20, 100
"""Of fewer nothing is said; from so many on more is asked of what has not shown by then."""
_SHOWN, _STILL_SHOWN = 2.5, 1.5
"""Standard errors. It is asked after every step: with two, one run of ten in which nobody heeds hints would pass."""
TIMES_OTHER, _STILL_TIMES_OTHER = 5.0, 3.0
LEAST_DROP, _STILL_LEAST_DROP = 0.1, 0.05
"""What an own hint has to do: times another kind's, and nats a token. The model that learns from channel 2 has 7 times
and 0.27 or more, those that lost by it had up to 3.2 times and 0.084 (decision 0025)."""
COMPARED, DEVIATIONS = "hints/compared", "hints/deviations"
OWN_DROP, OTHER_DROP, GATE, CONTRAST = "hints/own_drop", "hints/other_drop", "hints/gate", "hints/contrast"
"""What the figures are called in metrics."""
_FEWEST_OF_KINDS = 3
"""Comparisons of two kinds, each way: of fewer nobody knows how much they differ by luck."""


class _Cell(NamedTuple):
    """Sums over comparisons of hints of one kind with those of another; halved they stay what they are."""

    number: float = 0.0
    own: float = 0.0
    other: float = 0.0
    squares: float = 0.0
    """Of the differences of both drops."""

    @property
    def difference(self) -> float:
        return (self.own - self.other) / self.number

    @property
    def within(self) -> float:
        return max(self.squares - self.number * self.difference**2, 0.0)


class Heeding:
    """What all comparisons of a run say, late ones more than early ones."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], _Cell] = {}

    def add(self, comparisons: Iterable[HintComparison]) -> None:
        """Those of one generation."""
        alike: dict[tuple[int, str, str], list[HintComparison]] = {}
        finite = (
            comparison
            for comparison in comparisons
            if math.isfinite(comparison.own_drop) and math.isfinite(comparison.other_drop)
        )
        for comparison in sorted(finite):  # in one order, however a step was cut
            alike.setdefault(comparison[:3], []).append(comparison)
        for (_, kind, other_kind), several in alike.items():
            own_drop, other_drop = (
                fmean(getattr(comparison, name) for comparison in several) for name in ("own_drop", "other_drop")
            )
            cell = self._cells.get((kind, other_kind), _Cell())
            added = (1.0, own_drop, other_drop, (own_drop - other_drop) ** 2)
            self._cells[kind, other_kind] = _Cell(*(a + b for a, b in zip(cell, added, strict=True)))
        if self.compared > 2 * ENOUGH_COMPARED:  # what a model did long ago fades
            self._cells = {kinds: _Cell(*(total / 2 for total in cell)) for kinds, cell in self._cells.items()}

    def _pairs(self) -> list[tuple[float, _Cell, _Cell]]:
        """Kinds that were compared both ways, with their weight: what is known of both counts."""
        both_ways = [
            (one, other_kind)
            for one, other_kind in self._cells
            if one < other_kind and (other_kind, one) in self._cells
        ]
        cells = [(self._cells[one, other_kind], self._cells[other_kind, one]) for one, other_kind in sorted(both_ways)]
        enough = [pair for pair in cells if min(cell.number for cell in pair) >= _FEWEST_OF_KINDS]
        return [(1 / (1 / one.number + 1 / other_cell.number), one, other_cell) for one, other_cell in enough]

    @property
    def compared(self) -> int:
        """How many comparisons, of which as many one way as the other, would say as much."""
        return int(4 * math.fsum(weight for weight, _, _ in self._pairs()))

    @property
    def own_drop(self) -> float:
        """By how much own hints lower erring turns, in nats a token."""
        return self._mean("own")

    @property
    def other_drop(self) -> float:
        return self._mean("other")

    def _mean(self, name: str) -> float:
        pairs = self._pairs()
        sums = [weight * fmean(getattr(cell, name) / cell.number for cell in both) for weight, *both in pairs]
        return math.fsum(sums) / math.fsum(weight for weight, _, _ in pairs) if pairs else 0.0

    @property
    def deviations(self) -> float:
        """How many standard errors own hints do more than others; 0 where that is not known."""
        pairs, spread = self._pairs(), self._spread()
        total = math.fsum(weight for weight, _, _ in pairs)
        variance = math.fsum(
            weight**2 * math.fsum(max(spread, cell.within / (cell.number - 1)) / cell.number for cell in both) / 4
            for weight, *both in pairs
        )
        return (self.own_drop - self.other_drop) * total / math.sqrt(variance) if variance else 0.0

    def _spread(self) -> float:
        """The variance of comparisons of the same kinds, over all of them; no cell is taken to have less."""
        cells = [cell for cell in self._cells.values() if cell.number > 1]
        spare = math.fsum(cell.number - 1 for cell in cells)
        return math.fsum(cell.within for cell in cells) / spare if spare else 0.0

    @property
    def is_shown(self) -> bool | None:
        """Whether own hints do more than others, by enough standard errors; None where it cannot be told."""
        return shown(self.compared, self.deviations)

    @property
    def is_still_shown(self) -> bool:
        """Of what was shown before: less is enough."""
        return self.deviations >= _STILL_SHOWN

    @property
    def is_mostly_its_own(self) -> bool | None:
        """Whether a hint lowers the error by much, and five times as much as another; None where it is near to that."""
        return mostly_own(self.own_drop, self.other_drop)

    def in_words(self) -> str:
        """The figures: over how much, and how large the effects are."""
        return in_words(self.compared, self.own_drop, self.other_drop, self.deviations)

    def state(self) -> list[list[Any]]:
        return [[*kinds, *cell] for kinds, cell in self._cells.items()]

    def load_state(self, rows: Iterable[Iterable[Any]]) -> None:
        self._cells = {(kind, other_kind): _Cell(*sums) for kind, other_kind, *sums in rows}


def shown(compared: float, deviations: float) -> bool | None:
    """Two bounds, so that a model near one of them is not switched back and forth."""
    if compared < FEWEST_COMPARED:
        return None
    if deviations >= _SHOWN:
        return True
    return False if deviations < (1.0 if compared >= ENOUGH_COMPARED else 0.5) else None


def mostly_own(own_drop: float, other_drop: float) -> bool | None:
    """Two bounds here, too."""
    if own_drop < max(_STILL_LEAST_DROP, _STILL_TIMES_OTHER * other_drop):
        return False
    return True if own_drop >= max(LEAST_DROP, TIMES_OTHER * other_drop) else None


def enough_in_words() -> str:
    return f"{TIMES_OTHER:g} times what another kind's hint does, and {LEAST_DROP:g} nats a token"


def in_words(compared: float, own_drop: float, other_drop: float, deviations: float) -> str:
    return (
        f"over {compared:,.0f} comparisons its own hint lowers an erring turn by {own_drop:+.3f} nats a token and "
        f"another kind's by {other_drop:+.3f}, {deviations:+.1f} standard errors apart"
    )
