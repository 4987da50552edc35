"""Windows over a sequence that is too long for one pass, packs of trees that share a row, and lengths to pad to.

All of it is counting. A window [first, end) of a sequence becomes one tree: its own tokens, the trunk, and beside them
the branches of its targets. Windows overlap, for context; a target is in exactly one of them, whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer_replication.errors import InputError, explain

LONGER_THAN_WINDOW = "longer_than_window"
SHORT_CONTEXT = "short_context"
CUT_IN_MESSAGE = "cut_in_message"
_TILE, _RUNGS = 128, 8


class Branch(NamedTuple):
    """Tokens beside the trunk: they leave it at `at`. A window that begins later has that many fewer of them."""

    at: int
    length: int


@dataclass(frozen=True, slots=True)
class Target:
    """What a window must hold: the trunk from `first` on (the header, and a token that predicts) to `end`."""

    first: int
    end: int
    branches: tuple[Branch, ...] = ()

    def tokens_beside(self, begin: int) -> int:
        """Tokens of its branches in a window that begins there."""
        return sum(branch.length - max(0, begin - branch.at) for branch in self.branches)

    @property
    def reach(self) -> int:
        """Where its longest path ends, counted as a position of the trunk."""
        return max(self.end, *(branch.at + branch.length for branch in self.branches), 0)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [first, end) of the trunk, the targets computed there, and how large a tree they make at most."""

    first: int
    end: int
    targets: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Every target is in one window or in `dropped`, with the reason.

    `counts` has the drops by reason, the targets with less context than asked for (`short_context`), and the windows
    that begin inside a message because no message began at a place that would do (`cut_in_message`).
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
    """Windows of at most `budget` tree tokens, no path of which is longer than `max_length`.

    Targets are taken by their end, and a window takes them as long as they fit. The first window begins where the
    sequence does, if its first target fits so. Another begins at one of `cuts` (where messages begin): the last that
    leaves its first target `overlap` tokens of context before it. If that target does not fit so, at the first cut with
    which it does; if there is none before the target, anywhere. A target that fits in no window is dropped, never cut.
    """
    rules = _WindowRules(budget, overlap, max_length, sorted({0, *cuts}))
    rules.check(targets)
    windows: list[_Open] = []
    dropped: dict[int, str] = {}
    num_short = 0
    for index in sorted(range(len(targets)), key=lambda index: (targets[index].end, index)):
        target = targets[index]
        if not rules.fits(target, target.first):
            dropped[index] = LONGER_THAN_WINDOW
            continue
        if not windows or not rules.can_join(target, windows[-1]):
            begin = rules.begin(target) if windows or not rules.fits(target, 0) else 0
            windows.append(_Open(begin, begin, 0, []))
        windows[-1].add(index, target)
        num_short += windows[-1].first > rules.wanted(target)
    num_inside = sum(window.first not in rules.legal for window in windows)
    counts = {LONGER_THAN_WINDOW: len(dropped), SHORT_CONTEXT: num_short, CUT_IN_MESSAGE: num_inside}
    return WindowPlan(tuple(window.closed() for window in windows), dropped, {key: n for key, n in counts.items() if n})


@dataclass(slots=True)
class _Open:
    """A window that may still take targets; the branches' tokens are counted as they come."""

    first: int
    end: int
    beside: int
    targets: list[int]

    def add(self, index: int, target: Target) -> None:
        self.targets.append(index)
        self.end = target.end
        self.beside += target.tokens_beside(self.first)

    def closed(self) -> Window:
        return Window(self.first, self.end, tuple(self.targets), self.end - self.first + self.beside)


class _WindowRules:
    """What fits, and where a window begins. A later begin never needs more tokens, so all searches are by halves."""

    def __init__(self, budget: int, overlap: int, max_length: int | None, cuts: list[int]) -> None:
        for name, value, least in (("budget", budget, 1), ("overlap", overlap, 0), ("max_length", max_length, 1)):
            if value is not None and value < least:
                raise InputError(explain(name, got=value, expected=f"{least} or more"))
        if cuts[0] < 0:
            raise InputError(explain("cut position", got=cuts[0], expected="0 or more"))
        self.budget, self.overlap, self.cuts, self.legal = budget, overlap, cuts, frozenset(cuts)
        self.max_length = budget if max_length is None else min(budget, max_length)  # a path is part of the tree

    @staticmethod
    def check(targets: Sequence[Target]) -> None:
        for number, target in enumerate(targets):
            if not 0 <= target.first < target.end:
                got = f"first {target.first}, end {target.end}"
                raise InputError(explain(f"target {number}", got=got, expected="0 <= first < end"))
            for at, length in target.branches:
                # A branch that leaves the trunk before the target has a copy of what lies between.
                if not 0 <= at <= target.end or length < 1 or at + length < target.first:
                    expected = f"a branch at 0 to {target.end} with tokens that reach {target.first}"
                    raise InputError(explain(f"target {number}", got=f"branch ({at}, {length})", expected=expected))

    def fits(self, target: Target, begin: int, beside: int = 0) -> bool:
        """Whether a window that begins there holds the target, beside the branch tokens of others."""
        tokens = target.end - begin + target.tokens_beside(begin) + beside
        return tokens <= self.budget and target.reach - begin <= self.max_length

    def wanted(self, target: Target) -> int:
        """The last begin that leaves the target its context."""
        return max(0, target.first - self.overlap)

    def can_join(self, target: Target, window: _Open) -> bool:
        """Whether the window has as much context for it as one of its own would give, and room."""
        has_context = window.first <= self.wanted(target) or window.first <= self.begin(target)
        return has_context and self.fits(target, window.first, window.beside)

    def begin(self, target: Target) -> int:
        """Where a window of its own begins."""
        begin = self.cuts[bisect_right(self.cuts, self.wanted(target)) - 1]
        if self.fits(target, begin):
            return begin
        least = bisect_left(range(target.first), True, key=lambda begin: self.fits(target, begin))
        cut = bisect_left(self.cuts, least)
        if cut < len(self.cuts) and self.cuts[cut] < target.first:
            return self.cuts[cut]
        return max(least, self.wanted(target))


def plan_packs(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Items by number, in packs of at most `budget`: largest first, each into the fullest pack that has room."""
    for number, size in enumerate(sizes):
        if not 1 <= size <= budget:
            fix = "Plan its windows with a smaller budget."
            raise InputError(explain(f"size of item {number}", got=size, expected=f"1 to {budget}", fix=fix))
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of each pack, in order
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
    """The length to pad to: a multiple of 128, and from 1,024 on one of eight for each doubling.

    A kernel that is compiled for a length meets few of them, and padding is less than an eighth of the length.
    """
    if length < 1:
        raise InputError(explain("length", got=length, expected="1 or more"))
    octave = 1 << (max(length, _TILE * _RUNGS) - 1).bit_length() - 1
    step = max(_TILE, octave // _RUNGS)
    return -(-length // step) * step
