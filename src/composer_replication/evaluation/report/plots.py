"""Prepare the training for the report: the curve of each channel, the held-out loss, and the time and money spent.

matplotlib draws the plots as inline SVG in the page's colors and fonts. The same values give the same bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.evaluation.report.records import Row, RunRecords
from composer_replication.optional import require
from composer_replication.runs.lineage import channel_results, describe_channel, has_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Placeholder colors, which are replaced by variables of the style sheet, so that a plot follows the page's theme.
_COLORS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--line)",
    "#040404": "var(--one)",
    "#050505": "var(--two)",
    "#060606": "var(--three)",
    "#070707": "var(--quiet)",
    "#080808": "var(--bad)",
}
INK, MUTED, LINE, ONE, TWO, THREE, QUIET, BAD = _COLORS


_CHANNELS = {
    "lm_ce": ("Channel 1: good turns", "cross-entropy in nats a token", ONE),
    "grpo": ("Channel 1: rewards (GRPO)", "policy loss", ONE),
    "sdpo_kl": ("Channel 2: hints", "divergence from the hinted teacher", TWO),
    "sdpo_kl_logged": ("Channel 2: hints on logged sessions", "divergence from the hinted teacher", TWO),
    "trace_replay_dpo": ("Channel 3: pairs", "preference loss a pair", THREE),
}
# More points than pixels would only make the page larger.
_MAX_POINTS = 400


class _ChannelPlot(NamedTuple):
    """A channel with its curve. `steps` says in which steps the channel was trained, or why there were none."""

    name: str
    label: str
    unit: str
    weight: float | None
    steps: str
    first: float | None
    last: float | None
    svg: str


class _Training(NamedTuple):
    """The training as the page shows it.

    Its steps used `windows_seen` out of `windows` windows; both numbers are 0 if unknown.
    """

    channels: list[_ChannelPlot]
    svg_held_out: str
    steps: int | None
    warmup_steps: int
    windows_seen: int
    windows: int
    diagnosis: list[str]
    alarms: list[str]
    has_control: bool
    is_torn: bool


def training_values(records: RunRecords) -> dict[str, Any]:
    """Return the values that the page templates need to show the training and what it cost."""
    costs = _sum_teacher_costs(records)
    return {
        "training": _summarize_training(records),
        "record": records.training_record,
        "time_spent": _sum_times(records),
        "costs": costs,
        "usd": sum(cost.usd for cost in costs),
    }


def _summarize_training(records: RunRecords) -> _Training:
    """Return the training from `metrics.jsonl` and, if it has finished, `training.json`."""
    record: Row = records.training_record or {}
    rows, control = records.metrics.rows, records.control_metrics.rows
    channel_records = {channel["name"]: channel for channel in record.get("channels", ())}
    counts: Mapping[str, int] = record.get("counts") or {}
    names = [name for name in _CHANNELS if name in channel_records or has_losses(rows, name)]
    steps = record.get("steps") or _last(rows, "step")
    # A training that has not finished has no record of its channels.
    unfinished = {channel.name: vars(channel) for channel in channel_results(names, rows, {})}
    return _Training(
        channels=[
            _channel(
                name,
                rows,
                control,
                channel_records.get(name),
                describe_channel(channel_records.get(name, unfinished[name]), steps),
            )
            for name in names
        ],
        svg_held_out=_held_out_plot(rows, control),
        steps=steps,
        warmup_steps=record.get("warmup_steps") or 0,
        windows_seen=counts.get("windows_seen", 0),
        windows=counts.get("windows", 0),
        diagnosis=list(record.get("diagnosis", ())),
        alarms=list(record.get("alarms", ())),
        has_control=bool(control),
        is_torn=records.metrics.is_torn,
    )


def _channel(name: str, rows: list[Row], control: list[Row], channel_record: Row | None, steps: str) -> _ChannelPlot:
    label, unit, color = _CHANNELS[name]
    points, control_points = _points(rows, f"loss/{name}"), _points(control, f"loss/{name}")
    svg = ""
    if points:
        lines = [*([_Curve(control_points, QUIET, is_dashed=True)] if control_points else []), _Curve(points, color)]
        description = (
            f"{label}: from {points[0][1]:.3f} at step {points[0][0]} to {points[-1][1]:.3f} at {points[-1][0]}"
        )
        svg = _plot_curves(lines, name=f"curve-{name}", description=description, x_label="step")
    return _ChannelPlot(
        name=name,
        label=label,
        unit=unit,
        weight=None if channel_record is None else channel_record["weight"],
        steps=steps,
        first=points[0][1] if points else None,
        last=points[-1][1] if points else None,
        svg=svg,
    )


def _held_out_plot(rows: list[Row], control: list[Row]) -> str:
    """Return a plot of the loss on held-out sessions, or an empty string if it was not measured."""
    points, control_points = _points(rows, "eval_loss"), _points(control, "eval_loss")
    if not points:
        return ""
    lines = [*([_Curve(control_points, QUIET, is_dashed=True)] if control_points else []), _Curve(points, ONE)]
    description = f"Held-out loss from {points[0][1]:.3f} to {points[-1][1]:.3f}"
    return _plot_curves(lines, name="curve-held-out", description=description, x_label="step")


def _points(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    """Return (step, value) for the rows that have a value. Long curves are averaged over neighboring steps."""
    points = [(int(row["step"]), float(row[key])) for row in rows if row.get(key) is not None and "step" in row]
    size = math.ceil(len(points) / _MAX_POINTS)
    if size <= 1:
        return points
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _last(rows: list[Row], key: str) -> Any:
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def _sum_times(records: RunRecords) -> list[tuple[str, float]]:
    """Return the seconds spent on each part of the work, in order. A training run that was killed has recorded no time.

    Parts that took no time are listed as well, because the list shows which parts were run.
    """
    setup_seconds: Mapping[str, float] = (records.training_record or {}).get("seconds") or {}
    control = [[*setup.values(), *_runtimes(rows)] for setup, rows in records.control_times()]
    evaluation = (records.evaluation or {}).get("seconds")
    spent: dict[str, list[float]] = {name.capitalize(): [seconds] for name, seconds in setup_seconds.items()}
    spent["Training steps"] = _runtimes(records.metrics.rows)
    spent["Control"] = [seconds for shuffle in control for seconds in shuffle]
    spent["Evaluation"] = [] if evaluation is None else [float(evaluation)]
    return [(name, sum(seconds)) for name, seconds in spent.items() if seconds]


def _runtimes(rows: Iterable[Row]) -> list[float]:
    return [float(row["train_runtime"]) for row in rows if row.get("train_runtime") is not None]


class _TeacherCost(NamedTuple):
    slug: str
    calls: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    usd: float


def _sum_teacher_costs(records: RunRecords) -> list[_TeacherCost]:
    """Return the cost of each teacher model. Cached answers are counted only once.

    The row of the model that wrote hints has no token counts, because only its price is stored.
    """
    totals_by_teacher: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0.0])
    for row in records.rows("teacher_calls"):
        call = (1, row["error"] is not None, row["prompt_tokens"], row["completion_tokens"], row["cost_usd"])
        totals = totals_by_teacher[row["teacher_slug"]]
        totals_by_teacher[row["teacher_slug"]] = [total + value for total, value in zip(totals, call, strict=True)]
    costs = [
        _TeacherCost(slug, int(calls), int(errors), int(prompt), int(completion), usd)
        for slug, (calls, errors, prompt, completion, usd) in sorted(totals_by_teacher.items())
    ]
    settings = records.run.meta("sites").settings if records.sites else {}
    if isinstance(usd := settings.get("writer_usd"), float):
        costs.append(
            _TeacherCost(f"{settings.get('writer')}, hints", int(str(settings.get("writer_calls", 0))), 0, 0, 0, usd)
        )
    return costs


_STYLE: dict[str, Any] = {
    # Ids in the SVG are hashes, which would differ between runs without a fixed salt.
    "svg.hashsalt": "composer-replication",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same text widths everywhere
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.unicode_minus": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
_SIZE_INCHES, _BOTTOM = (5.0, 2.9), 0.18
# "<?xml ...?><!DOCTYPE ...><svg " -> everything before "<svg "
_HEAD = re.compile(r"\A.*?(?=<svg )", re.DOTALL)
# "  <metadata>...</metadata>" -> all of it, which names the version of matplotlib
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
# "font: 10.5px 'DejaVu Sans', sans-serif" -> "font: 10.5px" stays, the family is replaced; also "font: 700 12px Arial"
_FONT = re.compile(r"(font: (?:\d+ )?[\d.]+px) [^;\"]+")
# ' id="figure_1"' -> "figure_1"
_ID = re.compile(r' id="([^"]+)"')
# 'url(#clip1)' -> "clip1"; 'href="#mark2"' -> "mark2"; not 'href="http://...'
_REFERENCE = re.compile(r'(url\(#|href="#)([^)"]+)')


class _Curve(NamedTuple):
    """A curve: its (x, y) points in order, and its style."""

    points: Sequence[tuple[float, float]]
    color: str
    is_dashed: bool = False


def _plot_curves(lines: Sequence[_Curve], *, name: str, description: str, x_label: str) -> str:
    """Return a plot of curves over training steps. A curve with a single point is drawn as a dot."""

    def draw(axes: Axes) -> None:
        for line in lines:
            xs, ys = zip(*line.points, strict=True)
            marker = "o" if len(xs) == 1 else None
            style = (0, (4, 2.4)) if line.is_dashed else "-"
            axes.plot(xs, ys, color=line.color, linestyle=style, marker=marker, markersize=5)
        axes.set_xlabel(x_label)
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.02)
        axes.locator_params(axis="x", integer=True)

    return _figure(draw, name, description)


def scatter(groups: Mapping[str, tuple[Sequence[tuple[float, float]], str]], *, name: str, description: str) -> str:
    """Return a plot of the hint effect on good calls (x) and on the erring call (y), with one dot per site."""

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=QUIET, linewidth=0.9)
        axes.axvline(0, color=QUIET, linewidth=0.9)
        for points, color in groups.values():
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, linestyle="", marker="o", markersize=5, alpha=0.75, color=color, markeredgewidth=0)
        axes.set_xlabel("good calls: change in nats a token")
        axes.set_ylabel("erring call")

    return _figure(draw, name, description, left_margin=0.145)


def histograms(groups: Mapping[str, tuple[Sequence[float], str]], *, name: str, description: str) -> str:
    """Return histograms stacked vertically on a common axis, each with a thick line at its median."""
    low = min(min(values) for values, _ in groups.values())
    high = max(max(values) for values, _ in groups.values())
    width = max(high - low, 1e-6) / 32

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=QUIET, linewidth=0.9)
        for row, (values, color) in enumerate(reversed(list(groups.values()))):
            # One bin more than the width allows, for the largest value, which falls on the upper edge.
            counts = [0] * 33
            for value in values:
                counts[min(int((value - low) / width), 32)] += 1
            # Each histogram is scaled to its own peak, so that small groups are visible too.
            heights = [0.82 * count / max(counts) for count in counts]
            axes.bar(
                [low + (at + 0.5) * width for at in range(33)], heights, width * 0.92, row, color=color, alpha=0.55
            )
            median = sorted(values)[len(values) // 2]
            axes.plot([median, median], [row, row + 0.9], color=color, linewidth=2.4)
        axes.set_yticks([row + 0.35 for row in range(len(groups))], list(groups)[::-1])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("change in nats a token")

    return _figure(draw, name, description, left_margin=0.27)


def _figure(draw: Any, name: str, description: str, *, left_margin: float = 0.1) -> str:
    """Return a figure as SVG. `name` makes its ids unique on the page; `left_margin` is the space for labels."""
    matplotlib = require("matplotlib", extra="report")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES)
        FigureCanvasSVG(figure)
        draw(figure.add_axes((left_margin, _BOTTOM, 0.985 - left_margin, 0.96 - _BOTTOM)))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return _inline(text.getvalue(), name, description)


def _inline(svg: str, name: str, description: str) -> str:
    """Return an SVG document as an element that can be embedded in a page.

    Its ids are made unique, it takes over the page's colors and font, and it gets a description for screen readers.
    """
    from markupsafe import escape

    svg = _METADATA.sub("", _HEAD.sub("", svg))
    svg = _FONT.sub(r"\1 var(--font)", svg)
    for color, variable in _COLORS.items():
        svg = svg.replace(color, variable)
    # Ids that nothing refers to are removed to save bytes.
    used = {match[2] for match in _REFERENCE.finditer(svg)}
    svg = _ID.sub(lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", svg)
    svg = _REFERENCE.sub(rf"\1{name}-\2", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1).strip()
