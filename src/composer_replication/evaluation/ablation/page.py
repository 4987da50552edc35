"""Write table.md and its plots: the question, the predictions, the results and the cost of an experiment.

Everything is computed from results.json, without torch; the same file gives the same bytes. For each arm, a metric is R
= times * sum of `of` / sum of `per`, where the sums run over the units of all seeds. An interval needs one value per
unit and seed with the metric as their mean. The first-order influence of each unit and seed on the metric provides
these values:

    z = R + (times * of - R * per) / mean(per)
    difference to another arm   R - R' + (z - R) - (z' - R')       unit by unit and seed by seed: paired
    ratio, on the log scale     log(R / R') + (z - R) / R - (z' - R') / R'

`evaluation.figures.repeated_interval` treats seeds as repeats and units as sessions, so intervals cover the variation
between seeds and between units.
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
from composer_replication.evaluation.ablation.jobs import AblationResults, Breaches, find_breaches
from composer_replication.evaluation.ablation.plan import Metric
from composer_replication.evaluation.figures import Interval, repeated_interval
from composer_replication.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SPENT = ("rollouts", "steps", "tokens", "seconds")
# The columns of the tables that compare arms.
AGAINST = ("arm", "against", "figure", "difference", "ratio", "that is", "predicted", "so")
# The last paragraph of the page. Published tables contain it, so its words do not change.
_FOOTER = (
    "Intervals are of 95%, over seeds and units, paired by both where two arms are compared. Of {number} comparisons "
    "some leave zero by luck; the figure that was named beforehand is {primary}."
)


def _make_page(study: AblationResults, plots: Iterable[str] = ()) -> str:
    """Return the page as Markdown. `plots` are the paths of the plots, relative to the page."""
    figures = compute_figures(study, study.frozen.metrics)
    kinds = compute_figures(study, _metrics_by_kind(study))
    breaches = find_breaches(study)
    lines = [
        f"# {_escape(study.frozen.experiment.question)}",
        "",
        *_summary_lines(study),
        *_warning_lines(study, breaches),
        *_table_section("Arms and predictions", ("arm", "what", "settings", "predicted"), _arm_rows(study)),
        *_table_section("Against each other", AGAINST, against_rows(study, figures, [study.frozen.experiment.primary])),
        *_table_section("Figures", ("figure", *study.frozen.arms), figure_rows(study, figures)),
        *_table_section(
            "Other figures against each other", AGAINST, against_rows(study, figures, _secondary_metrics(study))
        ),
        *_table_section("By kind", ("figure", *study.frozen.arms), figure_rows(study, kinds)),
        *_table_section("By kind, against each other", AGAINST[:6], [row[:6] for row in against_rows(study, kinds)]),
        *_table_section(
            "Reached", ("arm", "curve", "to reach", "seeds that did", "rollouts or steps"), _reach_rows(study)
        ),
        *_table_section("Spent by a job", ("arm", "seeds", *_SPENT, "budget"), _spent_rows(study, breaches)),
        *(line for path in plots for line in (f"![{path}]({path})", "")),
        _FOOTER.format(
            number=sum(figure.against is not None for figure in figures), primary=study.frozen.experiment.primary
        ),
    ]
    return "\n".join(lines) + "\n"


def write_page(study: AblationResults, folder: Path) -> Path:
    """Write table.md and its plots, and return the path of the page.

    If matplotlib is not installed, the page has no plots.
    """
    try:
        plots = _write_plots(study, folder)
    except MissingExtraError:
        plots = []
    path = folder / "table.md"
    atomic_write_text(path, _make_page(study, plots))
    return path


def as_json(study: AblationResults) -> dict[str, Any]:
    """Return the content of the page in the form that `--json` prints."""
    figures = [*compute_figures(study, study.frozen.metrics), *compute_figures(study, _metrics_by_kind(study))]
    return {
        "question": study.frozen.experiment.question,
        "primary": study.frozen.experiment.primary,
        "arms": {name: asdict(arm) for name, arm in study.frozen.arms.items()},
        "figures": [_figure_as_json(figure) for figure in figures],
        "breaches": find_breaches(study),
        "failed": [failure._asdict() for failure in study.failed],
        "missing": [job._asdict() for job in study.missing],
    }


def _figure_as_json(figure: _MetricFigure) -> dict[str, Any]:
    fields = figure._asdict()
    return fields | {key: value._asdict() for key, value in fields.items() if isinstance(value, Interval)}


def _summary_lines(study: AblationResults) -> Iterator[str]:
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


def _warning_lines(study: AblationResults, breaches: Breaches) -> Iterator[str]:
    for arm, sentences in breaches.items():
        yield from (f"- **Not equal: {arm}**, {sentence}." for sentence in sentences)
    for failure in study.failed:
        yield f"- **Failed: {failure.arm}, seed {failure.seed}**: {_escape(' '.join(failure.last_lines))}"
    if study.missing:
        jobs = ", ".join(f"{job.arm} {job.seed}" for job in study.missing)
        yield f"- Not run yet: {jobs}."
    yield ""


def _secondary_metrics(study: AblationResults) -> list[str]:
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
    """Yield the rows of the tables that compare arms, for all metrics or only those in `names`.

    Only comparisons on the primary metric have a prediction.
    """
    for figure in figures:
        if figure.against is None or (names is not None and figure.metric not in names):
            continue
        arm, is_primary = study.frozen.arms[figure.arm], figure.metric == study.frozen.experiment.primary
        expected = arm.expect if figure.against == study.frozen.experiment.baseline else arm.expect_control
        prediction = (expected, _outcome(expected, figure.verdict)) if expected and is_primary else ("", "")
        ratio = "" if figure.ratio is None else _value_text(figure.ratio, "")
        yield (
            figure.arm,
            figure.against,
            figure.metric,
            _value_text(figure.value, "+"),
            ratio,
            figure.verdict,
            *prediction,
        )


def _outcome(expected: str, verdict: str) -> str:
    # arms.toml says "same" where a table says "no difference".
    actual = {"no difference": "same"}.get(verdict, verdict)
    if actual not in ("better", "worse", "same"):
        return "open"
    if actual == expected:
        # An interval that contains 0 does not prove equality.
        return "not contradicted" if actual == "same" else "as predicted"
    return "not shown" if actual == "same" else "**otherwise**"


def figure_rows(study: AblationResults, figures: Sequence[_MetricFigure]) -> Iterator[Sequence[str]]:
    """Yield the rows of the tables that show each metric with one column per arm."""
    values_by_arm = {(figure.metric, figure.arm): figure.value for figure in figures if figure.against is None}
    for name in dict.fromkeys(metric for metric, _ in values_by_arm):
        values = (values_by_arm.get((name, arm)) for arm in study.frozen.arms)
        metric = study.frozen.metrics.get(name)
        label = f"{name}: {metric.label}" if metric is not None and metric.label else name
        yield label, *("" if value is None else _value_text(value, "") for value in values)


def _reach_rows(study: AblationResults) -> Iterator[Sequence[str]]:
    for curve, goal in study.frozen.experiment.reach.items():
        for arm in study.frozen.arms:
            results = study.of_arm(arm)
            positions = [_first_position(result.curve, curve, goal) for result in results]
            reached = [position for position in positions if position is not None]
            if results:
                mean = f"{fmean(reached):,.0f}" if reached else "never"
                yield arm, curve, f"{goal:g}", f"{len(reached)} of {len(results)}", mean


def _first_position(points: Iterable[Mapping[str, float]], name: str, goal: float) -> float | None:
    """Return the number of rollouts after which a curve first reaches `goal`, or None if it never does.

    A curve without rollouts is measured in steps.
    """
    return next((point.get("rollouts", point["step"]) for point in points if point.get(name, -1e300) >= goal), None)


def _spent_rows(study: AblationResults, breaches: Breaches) -> Iterator[Sequence[str]]:
    for arm_name, arm in study.frozen.arms.items():
        results = study.of_arm(arm_name)
        if results:
            verdict = "**not equal**" if arm_name in breaches else f"exempt: {arm.exempt}" if arm.exempt else "equal"
            yield (
                arm_name,
                str(len(results)),
                *(f"{fmean(getattr(result.spent, name) for result in results):,.0f}" for name in _SPENT),
                verdict,
            )


def _table_section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a heading and a table as lines, or no lines if the table has no rows."""
    cells = [[_escape(cell) for cell in row] for row in rows]
    if not cells:
        return []
    lines = [columns, ["---"] * len(columns), *cells]
    return [f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""]


def _escape(text: str) -> str:
    """Return the text on one line, with the characters escaped that would begin a table cell, link or tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def _value_text(value: Interval, sign: str) -> str:
    interval = "" if value.low is None else f" ({value.low:{sign}.3g} to {value.high:{sign}.3g})"
    return f"{value.estimate:{sign}.3g}{interval}"


# ---- metrics with intervals

Array = NDArray[np.float64]


class _MetricFigure(NamedTuple):
    """The value of a metric for one arm, or its difference from another arm (`against`).

    `ratio` is the ratio of the two arms' values if both values are positive.
    """

    metric: str
    arm: str
    against: str | None
    seeds: int
    units: int
    value: Interval
    ratio: Interval | None = None
    verdict: str = ""
    """"better", "worse" or "no difference" for a comparison by a metric with a better direction; otherwise empty."""


class _Grid(NamedTuple):
    """The sums from which one metric is computed, with one row per seed and one column per unit."""

    seeds: tuple[int, ...]
    units: tuple[str, ...]
    of: Array
    per: Array


def compute_figures(study: AblationResults, metrics: Mapping[str, Metric]) -> list[_MetricFigure]:
    """Return, for each metric, its values for all arms, then all comparisons between arms.

    Metrics without data are omitted.
    """
    figures: list[_MetricFigure] = []
    for name, metric in metrics.items():
        all_grids = {arm: _make_grid(study.of_arm(arm), name, metric) for arm in study.frozen.arms}
        arm_grids = {arm: grid for arm, grid in all_grids.items() if grid is not None}
        figures += [_arm_figure(name, arm, grid) for arm, grid in arm_grids.items()]
        pairs = [
            (arm, reference)
            for arm in arm_grids
            for reference in study.frozen.compared_with(arm)
            if reference in arm_grids
        ]
        figures += [
            figure
            for arm, reference in pairs
            if (figure := _compare(name, metric, arm, reference, arm_grids[arm], arm_grids[reference]))
        ]
    return figures


def _metrics_by_kind(study: AblationResults) -> dict[str, Metric]:
    """Return the metrics that jobs report for single kinds of errors, such as `failing_calls:edit_no_match`."""
    names = {name for result in study.results for unit in result.units for name in unit.metrics}
    by_kind: dict[str, Metric] = {}
    for name, metric in study.frozen.metrics.items():
        for sum_name in sorted(candidate for candidate in names if candidate.startswith(f"{metric.of or name}:")):
            kind = sum_name.partition(":")[2]
            # A kind has its own denominator, such as the number of its sites, if jobs report one.
            per = f"{metric.per}:{kind}" if metric.per and f"{metric.per}:{kind}" in names else metric.per
            options = {"times": metric.times, "better": metric.better}
            by_kind[f"{name}:{kind}"] = Metric(of=sum_name, per=per, **options)
    return by_kind


def _make_grid(results: Sequence[Result], name: str, metric: Metric) -> _Grid | None:
    """Return the sums of one metric for one arm, or None if the arm has no sums or its seeds have different units."""
    units = {tuple(sorted(unit.unit for unit in result.units)) for result in results}
    # A comparison of different tasks or sessions would measure their difficulty.
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


def _influences(grid: _Grid) -> Array:
    """Return the influence of each unit and seed on the metric. The influences have mean 0."""
    return (grid.of - _ratio(grid) * grid.per) / grid.per.mean()


def _arm_figure(name: str, arm: str, grid: _Grid) -> _MetricFigure:
    value = _interval(_ratio(grid), _influences(grid), grid.units)
    return _MetricFigure(name, arm, None, len(grid.seeds), len(grid.units), value)


def _compare(
    name: str, metric: Metric, arm: str, reference: str, arm_grid: _Grid, reference_grid: _Grid
) -> _MetricFigure | None:
    """Compare two arms over the seeds that they share, paired by seed and unit, or return None if this is
    impossible.
    """
    seeds = tuple(seed for seed in arm_grid.seeds if seed in reference_grid.seeds)
    if not seeds or arm_grid.units != reference_grid.units:
        return None
    first, second = (_select_seeds(grid, seeds) for grid in (arm_grid, reference_grid))
    if not first.per.sum() or not second.per.sum():
        return None
    value = _interval(_ratio(first) - _ratio(second), _influences(first) - _influences(second), first.units)
    ratio = None
    # Sums that may be negative, such as changes of log-probs, have no meaningful ratio.
    if min(first.of.min(), second.of.min()) >= 0 and _ratio(first) > 0 and _ratio(second) > 0:
        # The derivative of log R is 1 / R.
        influences = _influences(first) / _ratio(first) - _influences(second) / _ratio(second)
        ratio = _exp_interval(_interval(math.log(_ratio(first) / _ratio(second)), influences, first.units))
    return _MetricFigure(name, arm, reference, len(seeds), len(first.units), value, ratio, _verdict(value, metric))


def _select_seeds(grid: _Grid, seeds: Sequence[int]) -> _Grid:
    rows = [grid.seeds.index(seed) for seed in seeds]
    return _Grid(tuple(seeds), grid.units, grid.of[rows], grid.per[rows])


def _interval(estimate: float, influences: Array, units: Sequence[str]) -> Interval:
    """Return the interval of an estimate from the influences of units and seeds, which have mean 0."""
    interval = repeated_interval((estimate + influences).tolist(), units)
    shift = estimate - interval.estimate  # rounding error
    low, high = (None if bound is None else bound + shift for bound in (interval.low, interval.high))
    return interval._replace(estimate=estimate, low=low, high=high)


def _exp_interval(value: Interval) -> Interval:
    low, high = (None if bound is None else math.exp(bound) for bound in (value.low, value.high))
    return value._replace(estimate=math.exp(value.estimate), low=low, high=high)


def _verdict(value: Interval, metric: Metric) -> str:
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
# One per arm; a ninth arm gets the first color again.
_COLORS = ("#1f5fa8", "#c8501e", "#3c8c4b", "#8a4fa3", "#7a6a1f", "#2f8f99", "#b23a6b", "#555555")


def _write_plots(study: AblationResults, folder: Path) -> list[str]:
    """Write all plots to `folder`/plots, delete older plots there, and return their paths relative to `folder`."""
    primary = study.frozen.experiment.primary
    figures = compute_figures(study, {primary: study.frozen.metrics[primary]})
    svgs: dict[str, str] = {}
    arm_figures = [figure for figure in figures if figure.against is None]
    comparisons = [figure for figure in figures if figure.against is not None]
    if arm_figures:
        svgs["primary"] = _plot_intervals(arm_figures, primary, with_zero_line=False)
    if comparisons:
        svgs["differences"] = _plot_intervals(comparisons, f"{primary}: difference", with_zero_line=True)
    for name in sorted({name for result in study.results for point in result.curve for name in point}):
        if name not in ("rollouts", "step"):
            svgs[f"curve-{name.replace('/', '-').replace(':', '-')}"] = _plot_curve(study, name)
    plots_folder = folder / FOLDER
    plots_folder.mkdir(exist_ok=True)
    for path in plots_folder.glob("*.svg"):
        if path.stem not in svgs:
            path.unlink()
    for name, text in svgs.items():
        atomic_write_text(plots_folder / f"{name}.svg", text)
    return [f"{FOLDER}/{name}.svg" for name in svgs]


def _plot_intervals(figures: Sequence[_MetricFigure], label: str, *, with_zero_line: bool) -> str:
    def draw(axes: Axes) -> None:
        names = [figure.arm if figure.against is None else f"{figure.arm} - {figure.against}" for figure in figures]
        for row, (figure, color) in enumerate(zip(reversed(figures), _arm_colors(len(figures))[::-1], strict=True)):
            if figure.value.low is not None and figure.value.high is not None:
                axes.plot([figure.value.low, figure.value.high], [row, row], color=color, linewidth=2)
            axes.plot([figure.value.estimate], [row], "o", color=color)
        if with_zero_line:
            axes.axvline(0, color="#888888", linewidth=1)
        axes.set_yticks(range(len(figures)), names[::-1])
        axes.set_ylim(-0.6, len(figures) - 0.4)
        axes.set_xlabel(label)

    return _draw_svg(draw, height=1.0 + 0.36 * len(figures), left_margin=0.3)


def _plot_curve(study: AblationResults, name: str) -> str:
    """Plot one curve per arm, averaged over seeds, against rollouts (or against steps if there are no rollouts)."""
    axis = "rollouts" if any("rollouts" in point for result in study.results for point in result.curve) else "step"

    def draw(axes: Axes) -> None:
        for arm, color in zip(study.frozen.arms, _arm_colors(len(study.frozen.arms)), strict=True):
            points: dict[float, list[float]] = defaultdict(list)
            for result in study.of_arm(arm):
                for point in result.curve:
                    if name in point:
                        points[point.get(axis, point.get("step", 0))].append(point[name])
            if points:
                positions = sorted(points)
                marker = "o" if len(positions) == 1 else None
                axes.plot(
                    positions,
                    [fmean(points[position]) for position in positions],
                    color=color,
                    label=arm,
                    marker=marker,
                )
        axes.set_xlabel(axis if axis == "rollouts" else "steps")
        axes.set_ylabel(name)
        axes.legend(frameon=False, fontsize=8)

    return _draw_svg(draw, height=3.2, left_margin=0.12)


def _arm_colors(number: int) -> list[str]:
    return [_COLORS[at % len(_COLORS)] for at in range(number)]


def _draw_svg(draw: Callable[[Axes], None], *, height: float, left_margin: float) -> str:
    matplotlib = require("matplotlib", extra="report")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(_STYLE):
        figure, text = Canvas(figsize=(7.0, height), facecolor="white"), io.StringIO()
        FigureCanvasSVG(figure)
        # 0.55 inches for the labels of the axis.
        bottom = 0.55 / height
        draw(figure.add_axes((left_margin, bottom, 0.97 - left_margin, 0.95 - bottom)))
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
