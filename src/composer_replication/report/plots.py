"""Plots by matplotlib as inline SVG: the page's own colours and letters, and the same bytes for the same figures."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stand for variables of the style sheet, so that a plot follows the page's theme.
_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--line)",
    "#040404": "var(--one)",
    "#050505": "var(--two)",
    "#060606": "var(--three)",
    "#070707": "var(--quiet)",
    "#080808": "var(--bad)",
}
INK, MUTED, LINE, ONE, TWO, THREE, QUIET, BAD = _COLOURS
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "composer-replication",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same measures everywhere
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
_HEAD = re.compile(r"\A.*?(?=<svg )", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_FONT = re.compile(r"(font: (?:\d+ )?[\d.]+px) [^;\"]+")
_ID = re.compile(r' id="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^)"]+)')


class Line(NamedTuple):
    """One curve: (x, y) points in order, and how it is drawn."""

    points: Sequence[tuple[float, float]]
    colour: str
    is_dashed: bool = False


def curves(lines: Sequence[Line], *, name: str, description: str, x_label: str) -> str:
    """Curves over the steps of a training; a single point is a dot."""

    def draw(axes: Axes) -> None:
        for line in lines:
            xs, ys = zip(*line.points, strict=True)
            marker = "o" if len(xs) == 1 else None
            style = (0, (4, 2.4)) if line.is_dashed else "-"
            axes.plot(xs, ys, color=line.colour, linestyle=style, marker=marker, markersize=5)
        axes.set_xlabel(x_label)
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.02)
        axes.locator_params(axis="x", integer=True)

    return _figure(draw, name, description)


def scatter(groups: Mapping[str, tuple[Sequence[tuple[float, float]], str]], *, name: str, description: str) -> str:
    """What a hint does to good calls (across) and to the erring one (up), a dot a site."""

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=QUIET, linewidth=0.9)
        axes.axvline(0, color=QUIET, linewidth=0.9)
        for points, colour in groups.values():
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, linestyle="", marker="o", markersize=5, alpha=0.75, color=colour, markeredgewidth=0)
        axes.set_xlabel("good calls: change in nats a token")
        axes.set_ylabel("erring call")

    return _figure(draw, name, description, left=0.145)


def histograms(groups: Mapping[str, tuple[Sequence[float], str]], *, name: str, description: str) -> str:
    """Distributions of changes above each other on one axis; the thick line of each is its median."""
    low = min(min(values) for values, _ in groups.values())
    high = max(max(values) for values, _ in groups.values())
    width = max(high - low, 1e-6) / 32

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=QUIET, linewidth=0.9)
        for row, (values, colour) in enumerate(reversed(list(groups.values()))):
            counts = [0] * 33
            for value in values:
                counts[min(int((value - low) / width), 32)] += 1
            heights = [0.82 * count / max(counts) for count in counts]
            axes.bar(
                [low + (at + 0.5) * width for at in range(33)], heights, width * 0.92, row, color=colour, alpha=0.55
            )
            middle = sorted(values)[len(values) // 2]
            axes.plot([middle, middle], [row, row + 0.9], color=colour, linewidth=2.4)
        axes.set_yticks([row + 0.35 for row in range(len(groups))], list(groups)[::-1])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("change in nats a token")

    return _figure(draw, name, description, left=0.27)


def _figure(draw: Any, name: str, description: str, *, left: float = 0.1) -> str:
    """The SVG of one figure. `name` keeps its ids apart from those of others on the page; `left` is room for labels."""
    matplotlib = require("matplotlib", extra="report")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES)
        FigureCanvasSVG(figure)
        draw(figure.add_axes((left, _BOTTOM, 0.985 - left, 0.96 - _BOTTOM)))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return _inline(text.getvalue(), name, description)


def _inline(svg: str, name: str, description: str) -> str:
    """An SVG document as a part of a page: its own ids, the page's colours and letters, words for those who listen."""
    from markupsafe import escape

    svg = _METADATA.sub("", _HEAD.sub("", svg))
    svg = _FONT.sub(r"\1 var(--font)", svg)
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, variable)
    used = {match[2] for match in _REFERENCE.finditer(svg)}
    svg = _ID.sub(lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", svg)
    svg = _REFERENCE.sub(rf"\1{name}-\2", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1).strip()
