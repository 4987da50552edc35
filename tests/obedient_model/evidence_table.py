"""The figures of an experiment's results.json as the Markdown tables that the documentation prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

# 97.5% quantiles of Student's t, by the number of worlds.
_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
_TEACHERS = {"live": "live", "trust_region": "trust region"}
_COLUMNS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "erring call": lambda run: run["held_out"]["erring_call"],
    "good call": lambda run: run["held_out"]["good_call"],
    "difference": lambda run: _difference(run["held_out"], "call"),
    "at the decision": lambda run: _difference(run["held_out"], "decision"),
}


def _difference(drop: dict[str, Any], part: str) -> float | None:
    """Difference in differences: what the erring call lost beyond what good calls of the same sessions lost."""
    good = drop[f"good_{part}"]
    return None if good is None else drop[f"erring_{part}"] - good


def interval(values_by_world: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean of the worlds' means, and half the width of its 95% interval."""
    means = [mean(values) for values in values_by_world]
    return mean(means), _QUANTILE[len(means)] * stdev(means) / len(means) ** 0.5


def control_holds(right: float, shuffled: float) -> bool:
    """The right hint moves the erring call, and the shuffled one by less than a third of that, either way."""
    return right >= 0.5 and right >= 3 * abs(shuffled)


def table(results: dict[str, Any], arms: Sequence[str] | None = None, hints: Sequence[str] | None = None) -> list[str]:
    """A row per arm, teacher and hint: mean over worlds with its 95% interval, on held-out sessions."""
    lines = [
        f"| optimiser | teacher | hint | {' | '.join(_COLUMNS)} | control holds |",
        "|---|---|---|" + "---|" * (len(_COLUMNS) + 1),
    ]
    for arm, settings in results["config"]["arms"].items():
        for teacher in results["config"]["teachers"]:
            for hint in settings["hints"]:
                if arm in (arms or [arm]) and hint in (hints or [hint]):
                    cells = [_cell(results, arm, teacher, hint, column) for column in _COLUMNS.values()]
                    held = _times_held(results, arm, teacher) if hint == "shuffled" else ""
                    lines.append(f"| {arm} | {_TEACHERS[teacher]} | {hint} | {' | '.join(cells)} | {held} |")
    return lines


def world_table(results: dict[str, Any]) -> list[str]:
    """The erring call's drop on held-out sessions in every world, right hint and shuffled hint."""
    worlds = results["config"]["worlds"]
    lines = [
        f"| optimiser | teacher | {' | '.join(f'world {world}' for world in worlds)} |",
        "|---|---|" + "---|" * len(worlds),
    ]
    for arm in results["config"]["arms"]:
        for teacher in results["config"]["teachers"]:
            pairs = zip(*(_erring_by_world(results, arm, teacher, hint) for hint in ("right", "shuffled")), strict=True)
            cells = " | ".join(f"{right:.2f}, {shuffled:.2f}" for right, shuffled in pairs)
            lines.append(f"| {arm} | {_TEACHERS[teacher]} | {cells} |")
    return lines


def _by_world(results: dict[str, Any], arm: str, teacher: str, hint: str) -> list[list[dict[str, Any]]]:
    wanted = {"arm": arm, "teacher": teacher, "hint": hint}
    runs = [run for run in results["runs"] if wanted.items() <= run.items()]
    return [[run for run in runs if run["world"] == world] for world in results["config"]["worlds"]]


def _cell(results: dict[str, Any], arm: str, teacher: str, hint: str, column: Callable[..., float | None]) -> str:
    values = [[column(run) for run in runs] for runs in _by_world(results, arm, teacher, hint)]
    known = [[value for value in row if value is not None] for row in values]
    if not all(known):
        return ""
    centre, half = interval(known)
    return f"{centre:.2f} ± {half:.2f}"


def _erring_by_world(results: dict[str, Any], arm: str, teacher: str, hint: str) -> list[float]:
    groups = _by_world(results, arm, teacher, hint)
    return [mean(run["held_out"]["erring_call"] for run in runs) for runs in groups]


def _times_held(results: dict[str, Any], arm: str, teacher: str) -> str:
    pairs = list(zip(*(_erring_by_world(results, arm, teacher, hint) for hint in ("right", "shuffled")), strict=True))
    return f"{sum(control_holds(*pair) for pair in pairs)} of {len(pairs)} worlds"
