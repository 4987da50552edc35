"""Split a long sequence into windows, pack trees into batches, and choose padded lengths.

The functions here work on token counts only. A window [first, end) of a sequence becomes one tree: its own tokens are
the trunk, from which the branches of its targets (hinted copies, answers of pairs) leave. Windows overlap to give
targets context; each target lies entirely in exactly one window.
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
# Padded lengths are multiples of the first; from 1,024 on there are as many per doubling as the second says.
_TILE, _LENGTHS_PER_DOUBLING = 128, 8


class Branch(NamedTuple):
    """`length` tokens that leave the trunk at position `at`.

    In a window that begins after `at`, the branch lacks the tokens from `at` to the beginning of the window.
    """

    at: int
    length: int


@dataclass(frozen=True, slots=True)
class Target:
    """Tokens [first, end) of the trunk that must be in one window, and the branches that leave the trunk for this
    target.

    `first` is the start of the turn's header, or at the latest the token before the target, whose row predicts the
    target's first token.
    """

    first: int
    end: int
    branches: tuple[Branch, ...] = ()

    def num_branch_tokens(self, begin: int) -> int:
        """Return the number of branch tokens in a window that begins at `begin`."""
        return sum(branch.length - max(0, begin - branch.at) for branch in self.branches)

    @property
    def path_end(self) -> int:
        """The position at which the target's longest branch ends, or the end of the target on the trunk if that is
        later.
        """
        return max(self.end, *(branch.at + branch.length for branch in self.branches), 0)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [first, end) of the trunk, the indices of its targets, and an upper bound on the tokens of its tree."""

    first: int
    end: int
    targets: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The windows, and the reason why each dropped target fits into no window; every target is either in a window or
    dropped.

    `counts` has the dropped targets by reason, the targets with less context than `overlap` (`short_context`), and the
    windows that begin inside a message because no window from the start of a message fits (`cut_in_message`).
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
    """Assign targets to windows of at most `budget` tree tokens, in which no path is longer than `max_length`.

    Targets are added in order of their end, each to the current window if it fits. The first window begins with the
    sequence if its first target fits that way. Every other window begins at one of `cuts` (the starts of messages): the
    last cut that leaves its first target `overlap` tokens of context. If the target does not fit then, the window
    begins at the first cut from which it fits, or between cuts if no cut precedes the target. A target that fits into
    no window is dropped, never truncated.
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
            begin = rules.window_start(target) if windows or not rules.fits(target, 0) else 0
            windows.append(_OpenWindow(begin, begin, 0, []))
        windows[-1].add(index, target)
        num_short += windows[-1].first > rules.latest_start(target)
    num_in_message = sum(window.first not in rules.cut_positions for window in windows)
    counts = {LONGER_THAN_WINDOW: len(dropped), SHORT_CONTEXT: num_short, CUT_IN_MESSAGE: num_in_message}
    return WindowPlan(tuple(window.freeze() for window in windows), dropped, {key: n for key, n in counts.items() if n})


@dataclass(slots=True)
class _OpenWindow:
    """A window to which targets may still be added, with the number of tokens of their branches."""

    first: int
    end: int
    num_branch_tokens: int
    targets: list[int]

    def add(self, index: int, target: Target) -> None:
        """Add a target. The caller must have checked that it fits."""
        self.targets.append(index)
        self.end = target.end
        self.num_branch_tokens += target.num_branch_tokens(self.first)

    def freeze(self) -> Window:
        """Return the finished window as an immutable record."""
        return Window(self.first, self.end, tuple(self.targets), self.end - self.first + self.num_branch_tokens)


class _WindowRules:
    """Decides what fits into a window, and where a window begins."""

    def __init__(self, budget: int, overlap: int, max_length: int | None, cuts: list[int]) -> None:
        for name, value, least in (("budget", budget, 1), ("overlap", overlap, 0), ("max_length", max_length, 1)):
            if value is not None and value < least:
                raise InputError(explain(name, got=value, expected=f"{least} or more"))
        if cuts[0] < 0:
            raise InputError(explain("cut position", got=cuts[0], expected="0 or more"))
        self.budget, self.overlap, self.cuts, self.cut_positions = budget, overlap, cuts, frozenset(cuts)
        # A path is part of the tree, so it cannot be longer than the budget.
        self.max_length = budget if max_length is None else min(budget, max_length)

    @staticmethod
    def check(targets: Sequence[Target]) -> None:
        """Raise InputError if a target is empty, or if a branch ends before its target."""
        for number, target in enumerate(targets):
            if not 0 <= target.first < target.end:
                got = f"first {target.first}, end {target.end}"
                raise InputError(explain(f"target {number}", got=got, expected="0 <= first < end"))
            for at, length in target.branches:
                # A branch that leaves the trunk before the target holds a copy of the tokens in between.
                if not 0 <= at <= target.end or length < 1 or at + length < target.first:
                    expected = f"a branch at 0 to {target.end} that is long enough to reach {target.first}"
                    raise InputError(explain(f"target {number}", got=f"branch ({at}, {length})", expected=expected))

    def fits(self, target: Target, begin: int, num_other: int = 0) -> bool:
        """Return whether the target fits into a window that begins at `begin` and has `num_other` branch tokens of
        other targets.
        """
        tokens = target.end - begin + target.num_branch_tokens(begin) + num_other
        return tokens <= self.budget and target.path_end - begin <= self.max_length

    def latest_start(self, target: Target) -> int:
        """Return the last position at which a window can begin and still give the target `overlap`
        tokens of context.
        """
        return max(0, target.first - self.overlap)

    def can_join(self, target: Target, window: _OpenWindow) -> bool:
        """Return whether the target fits into the window and gets at least as much context there as in a new window."""
        has_context = window.first <= self.latest_start(target) or window.first <= self.window_start(target)
        return has_context and self.fits(target, window.first, window.num_branch_tokens)

    def window_start(self, target: Target) -> int:
        """Return the position at which a new window for the target begins."""
        begin = self.cuts[bisect_right(self.cuts, self.latest_start(target)) - 1]
        if self.fits(target, begin):
            return begin
        # Fits are monotone: a later beginning never needs more tokens. So bisection finds the first one that fits.
        earliest = bisect_left(range(target.first), True, key=lambda begin: self.fits(target, begin))
        cut = bisect_left(self.cuts, earliest)
        if cut < len(self.cuts) and self.cuts[cut] < target.first:
            return self.cuts[cut]
        return max(earliest, self.latest_start(target))


def plan_packs(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Distribute items of these sizes over packs of at most `budget` each, by best-fit decreasing; return the item
    indices of each pack.
    """
    for item, size in enumerate(sizes):
        if not 1 <= size <= budget:
            fix = "Plan its windows with a smaller budget."
            raise InputError(explain(f"size of item {item}", got=size, expected=f"1 to {budget}", fix=fix))
    packs: list[list[int]] = []
    free_packs: list[tuple[int, int]] = []  # (tokens free, index) of each pack, sorted
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        position = bisect_left(free_packs, (sizes[item], 0))
        if position == len(free_packs):
            num_free, pack = budget, len(packs)
            packs.append([])
        else:
            num_free, pack = free_packs.pop(position)
        packs[pack].append(item)
        insort(free_packs, (num_free - sizes[item], pack))
    return sorted(sorted(pack) for pack in packs)


def padded_length(length: int) -> int:
    """Round a length up, to limit the number of different lengths: to a multiple of 128 and, from 1,024 on, to one of
    eight lengths per doubling.

    Kernels that are compiled per length are then compiled for few lengths, and less than an eighth of a batch is
    padding.
    """
    if length < 1:
        raise InputError(explain("length", got=length, expected="1 or more"))
    # The largest power of two below the length: 2048 for 2049 to 4096, whose step is 256.
    octave = 1 << (max(length, _TILE * _LENGTHS_PER_DOUBLING) - 1).bit_length() - 1
    step = max(_TILE, octave // _LENGTHS_PER_DOUBLING)
    # Rounds up: -(-a // b) is the ceiling of a / b.
    return -(-length // step) * step
