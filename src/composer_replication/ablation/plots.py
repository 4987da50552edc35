"""Plots of an experiment as SVG files, by matplotlib: the same results give the same bytes."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from composer_replication.ablation.jobs import Results
from composer_replication.ablation.table import Figure, figures_of
from composer_replication.atomic import atomic_write_text
from composer_replication.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = "plots"
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "composer-replication",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same measures everywhere
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
}
_COLOURS = ("#1f5fa8", "#c8501e", "#3c8c4b", "#8a4fa3", "#7a6a1f", "#2f8f99", "#b23a6b", "#555555")


def write_plots(found: Results, folder: Path) -> list[str]:
    """All plots into `folder`/plots; their paths from `folder`. Those of an earlier call that are not made again go."""
    primary = found.frozen.experiment.primary
    figures = figures_of(found, {primary: found.frozen.metrics[primary]})
    drawn: dict[str, str] = {}
    alone, against = (
        [figure for figure in figures if (figure.against is None) == is_alone] for is_alone in (True, False)
    )
    if alone:
        drawn["primary"] = _intervals(alone, primary, zero=False)
    if against:
        drawn["differences"] = _intervals(against, f"{primary}: difference", zero=True)
    for name in sorted({name for result in found.results for point in result.curve for name in point}):
        if name not in ("rollouts", "step"):
            drawn[f"curve-{name.replace('/', '-').replace(':', '-')}"] = _curves(found, name)
    plots_folder = folder / FOLDER
    plots_folder.mkdir(exist_ok=True)
    for path in plots_folder.glob("*.svg"):
        if path.stem not in drawn:
            path.unlink()
    for name, text in drawn.items():
        atomic_write_text(plots_folder / f"{name}.svg", text)
    return [f"{FOLDER}/{name}.svg" for name in drawn]


def _intervals(figures: Sequence[Figure], label: str, *, zero: bool) -> str:
    def draw(axes: Axes) -> None:
        names = [figure.arm if figure.against is None else f"{figure.arm} - {figure.against}" for figure in figures]
        for row, (figure, colour) in enumerate(zip(reversed(figures), _cycle(len(figures))[::-1], strict=True)):
            if figure.value.low is not None and figure.value.high is not None:
                axes.plot([figure.value.low, figure.value.high], [row, row], color=colour, linewidth=2)
            axes.plot([figure.value.estimate], [row], "o", color=colour)
        if zero:
            axes.axvline(0, color="#888888", linewidth=1)
        axes.set_yticks(range(len(figures)), names[::-1])
        axes.set_ylim(-0.6, len(figures) - 0.4)
        axes.set_xlabel(label)

    return _svg(draw, height=1.0 + 0.36 * len(figures), left=0.3)


def _curves(study: Results, name: str) -> str:
    """The mean over seeds of each arm, over rollouts where there are some, else over steps."""
    over = "rollouts" if any("rollouts" in point for result in study.results for point in result.curve) else "step"

    def draw(axes: Axes) -> None:
        for arm, colour in zip(study.frozen.arms, _cycle(len(study.frozen.arms)), strict=True):
            points: dict[float, list[float]] = defaultdict(list)
            for result in study.of_arm(arm):
                for point in result.curve:
                    if name in point:
                        points[point.get(over, point.get("step", 0))].append(point[name])
            if points:
                positions = sorted(points)
                marker = "o" if len(positions) == 1 else None
                axes.plot(
                    positions,
                    [fmean(points[position]) for position in positions],
                    color=colour,
                    label=arm,
                    marker=marker,
                )
        axes.set_xlabel(over if over == "rollouts" else "steps")
        axes.set_ylabel(name)
        axes.legend(frameon=False, fontsize=8)

    return _svg(draw, height=3.2, left=0.12)


def _cycle(number: int) -> list[str]:
    return [_COLOURS[at % len(_COLOURS)] for at in range(number)]


def _svg(draw: Callable[[Axes], None], *, height: float, left: float) -> str:
    matplotlib = require("matplotlib", extra="report")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(_STYLE):
        figure, text = Canvas(figsize=(7.0, height), facecolor="white"), io.StringIO()
        FigureCanvasSVG(figure)
        bottom = 0.55 / height
        draw(figure.add_axes((left, bottom, 0.97 - left, 0.95 - bottom)))
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
