"""Figures over several experiments, looked at afterwards: t intervals over seeds, each paired with GRPO of its seed.

    python experiments/pooled.py

They stand in docs/evidence.md. Units are not drawn again here, as `table.md` does: a seed is one value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from composer_replication.evaluation.ablation.job import read_stored

HERE = Path(__file__).parent
HINTS = {
    "2026-11-17-workspace-arms-again": "sdpo_right",
    "2026-11-17-heed-gate": "gate_right",
    "2026-11-17-gate-closed-first": "gate_right",
    "2026-11-18-live-contrast": "right_region",
}
"""The small world with mended rollouts: right hints with a trust region, with and without a gate."""
REAL = {"2026-11-17-workspace-qwen/0.5b": "sdpo_right", "2026-11-17-workspace-qwen/0.5b-gate": "sdpo_right"}
EARLIER = {"2026-11-16-workspace-qwen": "sdpo_right"}
KINDS = ("tool_not_found", "file_not_found", "edit_not_read", "input_validation", "is_directory", "edit_no_match")
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 14: 2.145, 19: 2.093}
"""Student's t at 97.5%, by degrees of freedom."""


class Pair(NamedTuple):
    """Sums over the held-out tasks of one seed, of an arm and of GRPO."""

    run: str
    arm: dict[str, float]
    grpo: dict[str, float]


def pairs_of(chosen: dict[str, str]) -> list[Pair]:
    found: list[Pair] = []
    for folder, arm in chosen.items():
        results = read_stored(HERE / folder / "results.json")["results"]
        sums = {(each["arm"], each["seed"]): _sums(each["units"]) for each in results}
        seeds = [seed for name, seed in sums if name == arm]
        found += [Pair(folder, sums[arm, seed], sums["grpo", seed]) for seed in seeds]
    return found


def _sums(units: Iterable[dict[str, dict[str, float]]]) -> dict[str, float]:
    rows = [unit["metrics"] for unit in units]
    return {name: sum(row.get(name, 0.0) for row in rows) for name in {name for row in rows for name in row}}


def rate(sums: dict[str, float], name: str = "failing_calls") -> float:
    """Of 100 calls."""
    return 100 * sums.get(name, 0.0) / sums["calls"]


def log_ratio(pair: Pair) -> float:
    return math.log(rate(pair.arm) / rate(pair.grpo))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    half = _T[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return fmean(values), fmean(values) - half, fmean(values) + half


def shown(values: Sequence[float], *, as_ratio: bool = False) -> str:
    mean, low, high = (math.exp(each) if as_ratio else each for each in interval(values))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]" if as_ratio else f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def by_run(pairs: Sequence[Pair], figure: Callable[[Pair], float]) -> list[float]:
    return [
        fmean(figure(pair) for pair in pairs if pair.run == run) for run in dict.fromkeys(each.run for each in pairs)
    ]


def solved(pair: Pair) -> float:
    return pair.arm["solved"] - pair.grpo["solved"]


def main() -> None:
    pairs = pairs_of(HINTS)
    below = sum(log_ratio(each) < 0 for each in pairs)
    print(f"(a) right hints, {len(pairs)} seeds of {len(HINTS)} runs, against GRPO")
    ratios = shown([log_ratio(each) for each in pairs], as_ratio=True)
    print(f"  failing calls, times GRPO's: {ratios}, below 1 in {below}")
    print(f"  the same, a run one value:   {shown(by_run(pairs, log_ratio), as_ratio=True)}")
    print(f"  solved, points:              {shown([solved(each) for each in pairs])}")
    for kind in KINDS:
        name = f"failing_calls:{kind}"
        moved = [rate(each.arm, name) - rate(each.grpo, name) for each in pairs]
        print(f"  {kind} of 100 calls: {shown(moved)}, higher in {sum(each > 0 for each in moved)} seeds")
    for words, chosen in (("3e-6", REAL), ("and at three times that rate", REAL | EARLIER)):
        pairs = pairs_of(chosen)
        print(f"(b) 0.5B, right hints, {len(pairs)} seeds, {words}: solved {shown([solved(each) for each in pairs])}")


if __name__ == "__main__":
    main()
