"""Write table.md and the plots: what was asked and predicted, the results, and what they cost.

Everything comes from results.json, without torch, and the same file gives the same bytes. A metric of an arm is
R = times * sum of `of` / sum of `per`, over the units of all its seeds. An interval needs a value per unit and seed
whose mean is the metric; to first order that is how much each one moves it:

    z = R + (times * of - R * per) / mean(per)
    difference to another arm   R - R' + (z - R) - (z' - R')       unit by unit and seed by seed: paired
    ratio, on the log scale     log(R / R') + (z - R) / R - (z' - R') / R'

`evaluation.figures.repeated_interval` takes seeds as repeats and units as sessions, so the variation of both counts.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_replication.atomic import atomic_write_text
from composer_replication.errors import MissingExtraError
from composer_replication.evaluation.ablation.job import Result
from composer_replication.evaluation.ablation.jobs import AblationResults, Breaches, breaches_of, spent_by
from composer_replication.evaluation.ablation.plan import Metric
from composer_replication.evaluation.figures import Interval, repeated_interval
from composer_replication.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SPENT = ("rollouts", "steps", "tokens", "seconds")
# Column heads of the tables that compare arms.
AGAINST = ("arm", "against", "figure", "difference", "ratio", "that is", "predicted", "so")
# The page's last paragraph; published tables contain it, so it stays as it is.
_HOW = (
    "Intervals are of 95%, over seeds and units, paired by both where two arms are compared. Of {number} comparisons "
    "some leave zero by luck; the figure that was named beforehand is {primary}."
)


def page_of(study: AblationResults, plots: Iterable[str] = ()) -> str:
    """Return the whole page; `plots` are the paths, relative to the page, of the plots that it shows."""
    figures = figures_of(study, study.frozen.metrics)
    kinds = figures_of(study, metrics_by_kind(study))
    breaches = breaches_of(study)
    lines = [
        f"# {_text(study.frozen.experiment.question)}",
        "",
        *_about(study),
        *_warnings(study, breaches),
        *_section("Arms and predictions", ("arm", "what", "settings", "predicted"), _arm_rows(study)),
        *_section("Against each other", AGAINST, against_rows(study, figures, [study.frozen.experiment.primary])),
        *_section("Figures", ("figure", *study.frozen.arms), figure_rows(study, figures)),
        *_section("Other figures against each other", AGAINST, against_rows(study, figures, _others(study))),
        *_section("By kind", ("figure", *study.frozen.arms), figure_rows(study, kinds)),
        *_section("By kind, against each other", AGAINST[:6], [row[:6] for row in against_rows(study, kinds)]),
        *_section("Reached", ("arm", "curve", "to reach", "seeds that did", "rollouts or steps"), _reach_rows(study)),
        *_section("Spent by a job", ("arm", "seeds", *_SPENT, "budget"), _spent_rows(study, breaches)),
        *(line for path in plots for line in (f"![{path}]({path})", "")),
        _HOW.format(
            number=sum(figure.against is not None for figure in figures), primary=study.frozen.experiment.primary
        ),
    ]
    return "\n".join(lines) + "\n"


def write_page(study: AblationResults, folder: Path) -> Path:
    """Write table.md and its plots, and return the page's path. Without matplotlib the page has no plots."""
    try:
        plots = _write_plots(study, folder)
    except MissingExtraError:
        plots = []
    path = folder / "table.md"
    atomic_write_text(path, page_of(study, plots))
    return path


def as_json(study: AblationResults) -> dict[str, Any]:
    """Return the page's content for programs."""
    figures = [*figures_of(study, study.frozen.metrics), *figures_of(study, metrics_by_kind(study))]
    return {
        "question": study.frozen.experiment.question,
        "primary": study.frozen.experiment.primary,
        "arms": {name: asdict(arm) for name, arm in study.frozen.arms.items()},
        "figures": [_plain(figure) for figure in figures],
        "breaches": breaches_of(study),
        "failed": [failure._asdict() for failure in study.failed],
        "missing": [job._asdict() for job in study.missing],
    }


def _plain(figure: _MetricFigure) -> dict[str, Any]:
    fields = figure._asdict()
    return fields | {key: value._asdict() for key, value in fields.items() if isinstance(value, Interval)}


def _about(study: AblationResults) -> Iterator[str]:
    experiment = study.frozen.experiment
    units = {len(result.units) for result in study.results}
    number = f"{min(units)} to {max(units)}" if len(units) > 1 else f"{next(iter(units), 0)}"
    seeds = sorted({result.seed for result in study.results})
    yield (
        f"World: {experiment.world}. {len(study.frozen.arms)} arms, seeds {', '.join(map(str, seeds)) or 'none yet'}, "
        f"{number} held-out units. Primary figure: {experiment.primary} ({experiment.primary_direction} is better)."
    )
    frozen = sorted({arm.frozen for arm in study.frozen.arms.values()})
    yield f"Predictions were frozen on {' and '.join(frozen)}, each before the first job of its arm."
    if len(seeds) == 1:
        yield "One seed alone: the luck of a training is in none of the intervals."
    yield ""


def _warnings(study: AblationResults, breaches: Breaches) -> Iterator[str]:
    for arm, sentences in breaches.items():
        yield from (f"- **Not equal: {arm}**, {sentence}." for sentence in sentences)
    for failure in study.failed:
        yield f"- **Failed: {failure.arm}, seed {failure.seed}**: {_text(' '.join(failure.last_lines))}"
    if study.missing:
        jobs = ", ".join(f"{job.arm} {job.seed}" for job in study.missing)
        yield f"- Not run yet: {jobs}."
    yield ""


def _others(study: AblationResults) -> list[str]:
    return [name for name in study.frozen.metrics if name != study.frozen.experiment.primary]


def _arm_rows(study: AblationResults) -> Iterator[Sequence[str]]:
    for name, arm in study.frozen.arms.items():
        settings = ", ".join(f"{key}={value}" for key, value in arm.settings.items())
        control = f" Control of {arm.control_of}." if arm.control_of else ""
        exempt = f" Outside of the budget: {arm.exempt}" if arm.exempt else ""
        yield name, f"{arm.about}{control}{exempt}", settings or "those of all arms", arm.predict


def against_rows(
    study: AblationResults, figures: Iterable[_MetricFigure], names: Sequence[str] | None = None
) -> Iterator[Sequence[str]]:
    """Yield the rows of comparisons; only the primary metric has a prediction in one word."""
    for figure in figures:
        if figure.against is None or (names is not None and figure.metric not in names):
            continue
        arm, is_primary = study.frozen.arms[figure.arm], figure.metric == study.frozen.experiment.primary
        expected = arm.expect if figure.against == study.frozen.experiment.baseline else arm.expect_control
        prediction = (expected, _outcome(expected, figure.verdict)) if expected and is_primary else ("", "")
        ratio = "" if figure.ratio is None else _shown(figure.ratio, "")
        yield figure.arm, figure.against, figure.metric, _shown(figure.value, "+"), ratio, figure.verdict, *prediction


def _outcome(expected: str, verdict: str) -> str:
    # arms.toml predicts "same" where a table says "no difference".
    came = {"no difference": "same"}.get(verdict, verdict)
    if came not in ("better", "worse", "same"):
        return "open"
    if came == expected:
        # An interval with 0 in it does not show equality.
        return "not contradicted" if came == "same" else "as predicted"
    return "not shown" if came == "same" else "**otherwise**"


def figure_rows(study: AblationResults, figures: Sequence[_MetricFigure]) -> Iterator[Sequence[str]]:
    alone = {(figure.metric, figure.arm): figure.value for figure in figures if figure.against is None}
    for name in dict.fromkeys(metric for metric, _ in alone):
        values = (alone.get((name, arm)) for arm in study.frozen.arms)
        metric = study.frozen.metrics.get(name)
        label = f"{name}: {metric.label}" if metric is not None and metric.label else name
        yield label, *("" if value is None else _shown(value, "") for value in values)


def _reach_rows(study: AblationResults) -> Iterator[Sequence[str]]:
    for curve, value in study.frozen.experiment.reach.items():
        for arm in study.frozen.arms:
            results = study.of_arm(arm)
            positions = [_first(result.curve, curve, value) for result in results]
            reached = [position for position in positions if position is not None]
            if results:
                mean = f"{fmean(reached):,.0f}" if reached else "never"
                yield arm, curve, f"{value:g}", f"{len(reached)} of {len(results)}", mean


def _first(points: Iterable[Mapping[str, float]], name: str, value: float) -> float | None:
    """Return where a curve first reaches `value`, in rollouts if it has them, else in steps."""
    return next((point.get("rollouts", point["step"]) for point in points if point.get(name, -1e300) >= value), None)


def _spent_rows(study: AblationResults, breaches: Breaches) -> Iterator[Sequence[str]]:
    for name, arm in study.frozen.arms.items():
        results = study.of_arm(name)
        if results:
            verdict = "**not equal**" if name in breaches else f"exempt: {arm.exempt}" if arm.exempt else "equal"
            yield (
                name,
                str(len(results)),
                *(f"{fmean(spent_by(results, quantity)):,.0f}" for quantity in _SPENT),
                verdict,
            )


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a heading and a table, or nothing if there are no rows."""
    cells = [[_text(cell) for cell in row] for row in rows]
    if not cells:
        return []
    lines = [columns, ["---"] * len(columns), *cells]
    return [f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""]


def _text(text: str) -> str:
    """Return text on one line that cannot open a cell, link or tag; our own bold text stays."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def _shown(value: Interval, sign: str) -> str:
    around = "" if value.low is None else f" ({value.low:{sign}.3g} to {value.high:{sign}.3g})"
    return f"{value.estimate:{sign}.3g}{around}"


# ---- metrics with intervals

Array = NDArray[np.float64]


class _MetricFigure(NamedTuple):
    """One metric of one arm, or of an arm compared with another; `ratio` if both are positive."""

    metric: str
    arm: str
    against: str | None
    seeds: int
    units: int
    value: Interval
    ratio: Interval | None = None
    verdict: str = ""
    """better, worse or no difference, if the metric has a better direction; empty for an arm alone."""


class _Grid(NamedTuple):
    """The sums of one metric, with a row per seed and a column per unit."""

    seeds: tuple[int, ...]
    units: tuple[str, ...]
    of: Array
    per: Array


def figures_of(study: AblationResults, metrics: Mapping[str, Metric]) -> list[_MetricFigure]:
    """Return every metric of every arm, then every comparison; metrics without sums in any job are left out."""
    figures: list[_MetricFigure] = []
    for name, metric in metrics.items():
        grids = {arm: _grid(study.of_arm(arm), name, metric) for arm in study.frozen.arms}
        known_grids = {arm: grid for arm, grid in grids.items() if grid is not None}
        figures += [_alone(name, arm, grid) for arm, grid in known_grids.items()]
        pairs = [
            (arm, other_arm)
            for arm in known_grids
            for other_arm in study.frozen.compared_with(arm)
            if other_arm in known_grids
        ]
        figures += [
            figure
            for arm, other_arm in pairs
            if (figure := _against(name, metric, arm, other_arm, known_grids[arm], known_grids[other_arm]))
        ]
    return figures


def metrics_by_kind(study: AblationResults) -> dict[str, Metric]:
    """Return the metrics of single kinds that jobs report, such as `failing_calls:edit_no_match`."""
    names = {name for result in study.results for unit in result.units for name in unit.metrics}
    by_kind: dict[str, Metric] = {}
    for name, metric in study.frozen.metrics.items():
        for sum_name in sorted(candidate for candidate in names if candidate.startswith(f"{metric.of or name}:")):
            kind = sum_name.partition(":")[2]
            # A kind has its own denominator if jobs report one, such as the sites of that kind.
            per = f"{metric.per}:{kind}" if metric.per and f"{metric.per}:{kind}" in names else metric.per
            options = {"times": metric.times, "better": metric.better}
            by_kind[f"{name}:{kind}"] = Metric(of=sum_name, per=per, **options)
    return by_kind


def _grid(results: Sequence[Result], name: str, metric: Metric) -> _Grid | None:
    """Return the sums, or None if there are none or the seeds have different units and cannot be paired."""
    units = {tuple(sorted(unit.unit for unit in result.units)) for result in results}
    # Comparing different tasks or sessions would measure their difficulty.
    if len(units) != 1 or not any((metric.of or name) in unit.metrics for result in results for unit in result.units):
        return None
    ordered = [sorted(result.units) for result in results]
    of = np.array([[unit.metrics.get(metric.of or name, 0.0) for unit in row] for row in ordered], dtype=np.float64)
    per = np.ones_like(of)
    if metric.per is not None:
        per = np.array([[unit.metrics.get(metric.per, 0.0) for unit in row] for row in ordered], dtype=np.float64)
    if not per.sum():
        return None
    return _Grid(tuple(result.seed for result in results), next(iter(units)), metric.times * of, per)


def _ratio(grid: _Grid) -> float:
    return float(grid.of.sum() / grid.per.sum())


def _moves(grid: _Grid) -> Array:
    """Return how much each unit and seed moves the metric; the mean is 0."""
    return (grid.of - _ratio(grid) * grid.per) / grid.per.mean()


def _alone(name: str, arm: str, grid: _Grid) -> _MetricFigure:
    value = _interval(_ratio(grid), _moves(grid), grid.units)
    return _MetricFigure(name, arm, None, len(grid.seeds), len(grid.units), value)


def _against(name: str, metric: Metric, arm: str, other_arm: str, mine: _Grid, theirs: _Grid) -> _MetricFigure | None:
    """Return the comparison, paired by seed and unit, over the seeds that both have."""
    seeds = tuple(seed for seed in mine.seeds if seed in theirs.seeds)
    if not seeds or mine.units != theirs.units:
        return None
    one, two = (_only(grid, seeds) for grid in (mine, theirs))
    if not one.per.sum() or not two.per.sum():
        return None
    value = _interval(_ratio(one) - _ratio(two), _moves(one) - _moves(two), one.units)
    ratio = None
    # Sums that can be negative, such as changes of log-probs, have no meaningful ratio.
    if min(one.of.min(), two.of.min()) >= 0 and _ratio(one) > 0 and _ratio(two) > 0:
        # The derivative of log R is 1 / R.
        moves = _moves(one) / _ratio(one) - _moves(two) / _ratio(two)
        ratio = _exponential(_interval(math.log(_ratio(one) / _ratio(two)), moves, one.units))
    return _MetricFigure(name, arm, other_arm, len(seeds), len(one.units), value, ratio, _word(value, metric))


def _only(grid: _Grid, seeds: Sequence[int]) -> _Grid:
    rows = [grid.seeds.index(seed) for seed in seeds]
    return _Grid(tuple(seeds), grid.units, grid.of[rows], grid.per[rows])


def _interval(estimate: float, moves: Array, units: Sequence[str]) -> Interval:
    """Return the interval of an estimate: the moves average 0, so they vary as the estimate does."""
    around = repeated_interval((estimate + moves).tolist(), units)
    shift = estimate - around.estimate  # rounding error
    low, high = (None if bound is None else bound + shift for bound in (around.low, around.high))
    return around._replace(estimate=estimate, low=low, high=high)


def _exponential(value: Interval) -> Interval:
    low, high = (None if bound is None else math.exp(bound) for bound in (value.low, value.high))
    return value._replace(estimate=math.exp(value.estimate), low=low, high=high)


def _word(value: Interval, metric: Metric) -> str:
    if value.low is None or metric.better is None:
        return "no interval" if value.low is None else ""
    if not value.excludes_zero:
        return "no difference"
    return "better" if (value.estimate > 0) == (metric.better == "up") else "worse"


# ---- plots

FOLDER = "plots"
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "composer-replication",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same text widths everywhere
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
}
# One per arm; a ninth arm has the first color again.
_COLOURS = ("#1f5fa8", "#c8501e", "#3c8c4b", "#8a4fa3", "#7a6a1f", "#2f8f99", "#b23a6b", "#555555")


def _write_plots(study: AblationResults, folder: Path) -> list[str]:
    """Write all plots into `folder`/plots and return their paths relative to `folder`; delete plots
    that are outdated.
    """
    primary = study.frozen.experiment.primary
    figures = figures_of(study, {primary: study.frozen.metrics[primary]})
    svgs: dict[str, str] = {}
    alone, against = (
        [figure for figure in figures if (figure.against is None) == is_alone] for is_alone in (True, False)
    )
    if alone:
        svgs["primary"] = _intervals(alone, primary, zero=False)
    if against:
        svgs["differences"] = _intervals(against, f"{primary}: difference", zero=True)
    for name in sorted({name for result in study.results for point in result.curve for name in point}):
        if name not in ("rollouts", "step"):
            svgs[f"curve-{name.replace('/', '-').replace(':', '-')}"] = _curves(study, name)
    plots_folder = folder / FOLDER
    plots_folder.mkdir(exist_ok=True)
    for path in plots_folder.glob("*.svg"):
        if path.stem not in svgs:
            path.unlink()
    for name, text in svgs.items():
        atomic_write_text(plots_folder / f"{name}.svg", text)
    return [f"{FOLDER}/{name}.svg" for name in svgs]


def _intervals(figures: Sequence[_MetricFigure], label: str, *, zero: bool) -> str:
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

    return _svg(draw, height=1.0 + 0.36 * len(figures), left_margin=0.3)


def _curves(study: AblationResults, name: str) -> str:
    """Return a plot of each arm's mean over seeds, over rollouts if there are any, else over steps."""
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

    return _svg(draw, height=3.2, left_margin=0.12)


def _cycle(number: int) -> list[str]:
    return [_COLOURS[at % len(_COLOURS)] for at in range(number)]


def _svg(draw: Callable[[Axes], None], *, height: float, left_margin: float) -> str:
    matplotlib = require("matplotlib", extra="report")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(_STYLE):
        figure, text = Canvas(figsize=(7.0, height), facecolor="white"), io.StringIO()
        FigureCanvasSVG(figure)
        # Room for the labels of the axis, in inches.
        bottom = 0.55 / height
        draw(figure.add_axes((left_margin, bottom, 0.97 - left_margin, 0.95 - bottom)))
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
