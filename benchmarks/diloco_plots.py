"""Draw the plots of docs/concepts/diloco-scale.md as SVG; the same results give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from composer_replication.atomic import atomic_write_text
from diloco_scale import KILLS, PAYLOADS, PLACES, scenario
from diloco_simulation import SimulatedRun, simulate_bucket, simulate_direct

REPLICAS = (8, 16, 32, 64, 128, 256, 512)
ROUNDS = 8
COLOURS = ("#1f5fa8", "#c8501e", "#3c8c4b", "#8a4fa3")
STYLE: Any = {
    "svg.hashsalt": "composer-replication",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
}


def draw(folder: Path) -> None:
    """Draw wall time, cost and kills, each into a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = {
        (payload, place, replicas, kind): simulate(scenario(replicas, payload, place, num_rounds=ROUNDS))
        for payload in PAYLOADS
        for place in PLACES
        for replicas in REPLICAS
        for kind, simulate in (("bucket", simulate_bucket), ("ring", simulate_direct))
    }
    with mpl.rc_context(STYLE):
        _write(
            folder / "diloco-wait.svg",
            _by_place(runs, lambda run: run.waiting_s, "seconds of a round without training"),
        )
        _write(folder / "diloco-cost.svg", _costs(runs))
        _write(folder / "diloco-kills.svg", _kills())


def _by_place(runs: dict[tuple, SimulatedRun], value: Callable[[SimulatedRun], float], label: str) -> Figure:
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    axes = figure.subplots(1, len(PLACES), sharey=True)
    for axis, place in zip(axes, PLACES, strict=True):
        for payload, colour in zip(PAYLOADS, COLOURS, strict=True):
            for kind, line in (("bucket", "-"), ("ring", ":")):
                seen = [value(runs[payload, place, replicas, kind]) for replicas in REPLICAS]
                name = payload if kind == "bucket" else None
                axis.plot(REPLICAS, seen, line, color=colour, label=name, marker="o", markersize=3)
        _replicas(axis, place)
        axis.set_yscale("log")
    axes[0].set_ylabel(label)
    axes[-1].legend(title="solid: bucket, dotted: ring", fontsize=7, title_fontsize=7)
    return figure


def _costs(runs: dict[tuple, SimulatedRun]) -> Figure:
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    axes = figure.subplots(1, len(PLACES), sharey=True)
    for axis, place in zip(axes, PLACES, strict=True):
        for payload, colour in zip(PAYLOADS, COLOURS, strict=True):
            seen = [runs[payload, place, replicas, "bucket"] for replicas in REPLICAS]
            shares = [100 * run.bucket_dollars / run.machine_dollars for run in seen]
            axis.plot(REPLICAS, shares, color=colour, label=payload, marker="o", markersize=3)
        axis.axhline(10, color="#999999", linewidth=1)
        _replicas(axis, place)
        axis.set_yscale("log")
    axes[0].set_ylabel("the bucket's cost, % of the machines'")
    axes[-1].legend(fontsize=7)
    return figure


def _kills() -> Figure:
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    shown = (8, 64, 512)
    axes = figure.subplots(1, len(shown), sharey=True)
    for axis, replicas in zip(axes, shown, strict=True):
        for payload, colour in zip(("LoRA, bf16", "full, int4"), COLOURS, strict=False):
            for kind, simulate, line in (("bucket", simulate_bucket, "-"), ("ring", simulate_direct, ":")):
                asked = [scenario(replicas, payload, "internet, 1 Gb/s", kills) for kills in KILLS]
                shares = [100 * simulate(each).useful_share for each in asked]
                name = payload if kind == "bucket" else None
                axis.plot(KILLS, shares, line, color=colour, label=name, marker="o", markersize=3)
        axis.set_title(f"{replicas} replicas, internet", fontsize=9)
        axis.set_xlabel("kills of a machine an hour")
        axis.set_ylim(0, 100)
    axes[0].set_ylabel("training that counted, %")
    axes[0].legend(title="solid: bucket, dotted: ring", fontsize=7, title_fontsize=7)
    return figure


def _replicas(axis: Any, place: str) -> None:
    axis.set_title(place, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_xticks((8, 32, 128, 512), ("8", "32", "128", "512"))
    axis.set_xlabel("replicas")


def _write(path: Path, figure: Figure) -> None:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    atomic_write_text(path, "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")
