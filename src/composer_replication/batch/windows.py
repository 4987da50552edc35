"""Plan windows over a sequence that is too long for one pass, packs of trees for one batch, and lengths to pad to.

Nothing here touches tokens; it only counts them. A window [first, end) of a sequence becomes one tree: its own tokens
are the trunk, from which the branches of its targets (hinted copies, sides of pairs) leave. Windows overlap, to give
targets context; each target is in exactly one window, whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer_replication.errors import InputError, explain

# Keys of counts, which reports show: data, not wording.
LONGER_THAN_WINDOW = "longer_than_window"
SHORT_CONTEXT = "short_context"
CUT_IN_MESSAGE = "cut_in_message"
# Padded lengths are multiples of the first, and at least the second of them are in each doubling (see `bucket`).
_TILE, _LENGTHS_PER_DOUBLING = 128, 8


class Branch(NamedTuple):
    """Tokens that leave the trunk at `at`. A window that begins after that has as many fewer of them."""

    at: int
    length: int


@dataclass(frozen=True, slots=True)
class Target:
    """What a window must hold: the trunk from `first` (the header, or at least one token that predicts) to `end`."""

    first: int
    end: int
    branches: tuple[Branch, ...] = ()

    def tokens_beside(self, begin: int) -> int:
        """Return the number of branch tokens in a window that begins there."""
        return sum(branch.length - max(0, begin - branch.at) for branch in self.branches)

    @property
    def reach(self) -> int:
        """The position at which the longest path ends."""
        return max(self.end, *(branch.at + branch.length for branch in self.branches), 0)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [first, end) of the trunk, the indices of the targets computed there, and the tree's maximum size."""

    first: int
    end: int
    targets: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The windows, and the targets that fit in none of them with the reason; every target is in one of the two.

    `counts` has the dropped targets by reason, the targets with less context than `overlap` (`short_context`), and the
    windows that begin inside a message because no start of a message would do (`cut_in_message`).
    """

    windows: tuple[Window, ...]
    dropped: Mapping[int, str]
    counts: Mapping[str, int]


def plan_windows(
    targets: Sequence[Target],
    *,
    budget: int,
    overlap: int = 0,
    cuts: Sequence[int] = (),
    max_length: int | None = None,
) -> WindowPlan:
    """Return windows of at most `budget` tree tokens, in which no path is longer than `max_length`.

    Targets are added in order of their end, each to the current window as long as it fits. The first window begins with
    the sequence if its first target fits that way. Every other window begins at one of `cuts` (the starts of messages):
    the last one that leaves its first target `overlap` tokens of context. If the target does not fit that way, the
    window begins at the first cut at which it does, or anywhere if there is no such cut before the target. A target
    that fits in no window is dropped, never cut.
    """
    rules = _WindowRules(budget, overlap, max_length, sorted({0, *cuts}))
    rules.check(targets)
    windows: list[_OpenWindow] = []
    dropped: dict[int, str] = {}
    num_short = 0
    for index in sorted(range(len(targets)), key=lambda index: (targets[index].end, index)):
        target = targets[index]
        if not rules.fits(target, target.first):
            dropped[index] = LONGER_THAN_WINDOW
            continue
        if not windows or not rules.can_join(target, windows[-1]):
            begin = rules.begin(target) if windows or not rules.fits(target, 0) else 0
            windows.append(_OpenWindow(begin, begin, 0, []))
        windows[-1].add(index, target)
        num_short += windows[-1].first > rules.latest_begin(target)
    num_inside = sum(window.first not in rules.legal for window in windows)
    counts = {LONGER_THAN_WINDOW: len(dropped), SHORT_CONTEXT: num_short, CUT_IN_MESSAGE: num_inside}
    return WindowPlan(tuple(window.closed() for window in windows), dropped, {key: n for key, n in counts.items() if n})


@dataclass(slots=True)
class _OpenWindow:
    """A window that may still get targets. `beside` counts the tokens of their branches."""

    first: int
    end: int
    beside: int
    targets: list[int]

    def add(self, index: int, target: Target) -> None:
        """Add a target that fits."""
        self.targets.append(index)
        self.end = target.end
        self.beside += target.tokens_beside(self.first)

    def closed(self) -> Window:
        """Return the finished window."""
        return Window(self.first, self.end, tuple(self.targets), self.end - self.first + self.beside)


class _WindowRules:
    """What fits into a window, and where one begins."""

    def __init__(self, budget: int, overlap: int, max_length: int | None, cuts: list[int]) -> None:
        for name, value, least in (("budget", budget, 1), ("overlap", overlap, 0), ("max_length", max_length, 1)):
            if value is not None and value < least:
                raise InputError(explain(name, got=value, expected=f"{least} or more"))
        if cuts[0] < 0:
            raise InputError(explain("cut position", got=cuts[0], expected="0 or more"))
        self.budget, self.overlap, self.cuts, self.legal = budget, overlap, cuts, frozenset(cuts)
        # A path is part of the tree, so it cannot be longer than the budget.
        self.max_length = budget if max_length is None else min(budget, max_length)

    @staticmethod
    def check(targets: Sequence[Target]) -> None:
        """Raise InputError if a target is empty or has a branch that does not reach it."""
        for number, target in enumerate(targets):
            if not 0 <= target.first < target.end:
                got = f"first {target.first}, end {target.end}"
                raise InputError(explain(f"target {number}", got=got, expected="0 <= first < end"))
            for at, length in target.branches:
                # A branch that leaves the trunk before the target holds a copy of the tokens in between.
                if not 0 <= at <= target.end or length < 1 or at + length < target.first:
                    expected = f"a branch at 0 to {target.end} with tokens that reach {target.first}"
                    raise InputError(explain(f"target {number}", got=f"branch ({at}, {length})", expected=expected))

    def fits(self, target: Target, begin: int, beside: int = 0) -> bool:
        """Return whether a window from `begin` can hold the target and `beside` branch tokens of other targets."""
        tokens = target.end - begin + target.tokens_beside(begin) + beside
        return tokens <= self.budget and target.reach - begin <= self.max_length

    def latest_begin(self, target: Target) -> int:
        """Return the last position at which a window may begin to give the target its context."""
        return max(0, target.first - self.overlap)

    def can_join(self, target: Target, window: _OpenWindow) -> bool:
        """Return whether the window has room for the target, and as much context as a new window would have."""
        has_context = window.first <= self.latest_begin(target) or window.first <= self.begin(target)
        return has_context and self.fits(target, window.first, window.beside)

    def begin(self, target: Target) -> int:
        """Return where a new window for the target begins."""
        begin = self.cuts[bisect_right(self.cuts, self.latest_begin(target)) - 1]
        if self.fits(target, begin):
            return begin
        # A window that begins later never needs more tokens, so the first begin that fits can be found by bisection.
        least = bisect_left(range(target.first), True, key=lambda begin: self.fits(target, begin))
        cut = bisect_left(self.cuts, least)
        if cut < len(self.cuts) and self.cuts[cut] < target.first:
            return self.cuts[cut]
        return max(least, self.latest_begin(target))


def plan_packs(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Return item indices in packs of at most `budget`, by best fit: largest first, each into the fullest pack."""
    for number, size in enumerate(sizes):
        if not 1 <= size <= budget:
            fix = "Plan its windows with a smaller budget."
            raise InputError(explain(f"size of item {number}", got=size, expected=f"1 to {budget}", fix=fix))
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, index) of each pack, sorted
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        at = bisect_left(room, (sizes[number], 0))
        if at == len(room):
            free_room, pack = budget, len(packs)
            packs.append([])
        else:
            free_room, pack = room.pop(at)
        packs[pack].append(number)
        insort(room, (free_room - sizes[number], pack))
    return sorted(sorted(pack) for pack in packs)


def bucket(length: int) -> int:
    """Return the length to pad to: a multiple of 128, and from 1,024 on one of eight lengths per doubling.

    So a kernel that is compiled per length is compiled for few lengths, and padding is less than an eighth of a length.
    """
    if length < 1:
        raise InputError(explain("length", got=length, expected="1 or more"))
    # The largest power of two below the length: 2048 for 2049 to 4096, whose step is 256.
    octave = 1 << (max(length, _TILE * _LENGTHS_PER_DOUBLING) - 1).bit_length() - 1
    step = max(_TILE, octave // _LENGTHS_PER_DOUBLING)
    # Rounds up: -(-a // b) is the ceiling of a / b.
    return -(-length // step) * step
