"""table.md: what was asked and predicted, what came, what it cost. The same results.json gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_replication.ablation.budgets import Breaches, breaches_of, spent_by
from composer_replication.ablation.jobs import Results
from composer_replication.ablation.plots import write_plots
from composer_replication.ablation.table import Figure, figures_of, metrics_by_kind
from composer_replication.atomic import atomic_write_text
from composer_replication.errors import MissingExtraError
from composer_replication.evaluation.statistics import Interval

_SPENT = ("rollouts", "steps", "tokens", "seconds")
AGAINST = ("arm", "against", "figure", "difference", "ratio", "that is", "predicted", "so")
_HOW = (
    "Intervals are of 95%, over seeds and units, paired by both where two arms are compared. Of {number} comparisons "
    "some leave zero by luck; the figure that was named beforehand is {primary}."
)


def page_of(found: Results, plots: Iterable[str] = ()) -> str:
    """The whole page; `plots` are the files that it shows, by their paths from the page."""
    figures = figures_of(found, found.frozen.metrics)
    kinds = figures_of(found, metrics_by_kind(found))
    breaches = breaches_of(found)
    lines = [
        f"# {_text(found.frozen.experiment.question)}",
        "",
        *_about(found),
        *_warnings(found, breaches),
        *_section("Arms and predictions", ("arm", "what", "settings", "predicted"), _arm_rows(found)),
        *_section("Against each other", AGAINST, against_rows(found, figures, [found.frozen.experiment.primary])),
        *_section("Figures", ("figure", *found.frozen.arms), figure_rows(found, figures)),
        *_section("Other figures against each other", AGAINST, against_rows(found, figures, _others(found))),
        *_section("By kind", ("figure", *found.frozen.arms), figure_rows(found, kinds)),
        *_section("By kind, against each other", AGAINST[:6], [row[:6] for row in against_rows(found, kinds)]),
        *_section("Reached", ("arm", "curve", "to reach", "seeds that did", "rollouts or steps"), _reach_rows(found)),
        *_section("Spent by a job", ("arm", "seeds", *_SPENT, "budget"), _spent_rows(found, breaches)),
        *(line for path in plots for line in (f"![{path}]({path})", "")),
        _HOW.format(
            number=sum(figure.against is not None for figure in figures), primary=found.frozen.experiment.primary
        ),
    ]
    return "\n".join(lines) + "\n"


def write_page(found: Results, folder: Path) -> Path:
    """table.md and its plots, without those where matplotlib is not installed; the path of the page."""
    try:
        plots = write_plots(found, folder)
    except MissingExtraError:
        plots = []
    path = folder / "table.md"
    atomic_write_text(path, page_of(found, plots))
    return path


def as_json(found: Results) -> dict[str, Any]:
    """The same for a program."""
    figures = [*figures_of(found, found.frozen.metrics), *figures_of(found, metrics_by_kind(found))]
    return {
        "question": found.frozen.experiment.question,
        "primary": found.frozen.experiment.primary,
        "arms": {name: asdict(arm) for name, arm in found.frozen.arms.items()},
        "figures": [_plain(figure) for figure in figures],
        "breaches": breaches_of(found),
        "failed": [failure._asdict() for failure in found.failed],
        "missing": [job._asdict() for job in found.missing],
    }


def _plain(figure: Figure) -> dict[str, Any]:
    fields = figure._asdict()
    return fields | {key: value._asdict() for key, value in fields.items() if isinstance(value, Interval)}


def _about(study: Results) -> Iterator[str]:
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


def _warnings(study: Results, breaches: Breaches) -> Iterator[str]:
    for arm, sentences in breaches.items():
        yield from (f"- **Not equal: {arm}**, {sentence}." for sentence in sentences)
    for failure in study.failed:
        yield f"- **Failed: {failure.arm}, seed {failure.seed}**: {_text(' '.join(failure.last_lines))}"
    if study.missing:
        jobs = ", ".join(f"{job.arm} {job.seed}" for job in study.missing)
        yield f"- Not run yet: {jobs}."
    yield ""


def _others(study: Results) -> list[str]:
    return [name for name in study.frozen.metrics if name != study.frozen.experiment.primary]


def _arm_rows(study: Results) -> Iterator[Sequence[str]]:
    for name, arm in study.frozen.arms.items():
        settings = ", ".join(f"{key}={value}" for key, value in arm.settings.items())
        control = f" Control of {arm.control_of}." if arm.control_of else ""
        exempt = f" Outside of the budget: {arm.exempt}" if arm.exempt else ""
        yield name, f"{arm.about}{control}{exempt}", settings or "those of all arms", arm.predict


def against_rows(
    found: Results, figures: Iterable[Figure], names: Sequence[str] | None = None
) -> Iterator[Sequence[str]]:
    """What was predicted in a word is said of the primary figure alone."""
    for figure in figures:
        if figure.against is None or (names is not None and figure.metric not in names):
            continue
        arm, is_primary = found.frozen.arms[figure.arm], figure.metric == found.frozen.experiment.primary
        expected = arm.expect if figure.against == found.frozen.experiment.baseline else arm.expect_control
        prediction = (expected, _outcome(expected, figure.verdict)) if expected and is_primary else ("", "")
        ratio = "" if figure.ratio is None else _shown(figure.ratio, "")
        yield figure.arm, figure.against, figure.metric, _shown(figure.value, "+"), ratio, figure.verdict, *prediction


def _outcome(expected: str, verdict: str) -> str:
    came = {"no difference": "same"}.get(verdict, verdict)
    if came not in ("better", "worse", "same"):
        return "open"
    if came == expected:
        return "not contradicted" if came == "same" else "as predicted"  # an interval that holds 0 shows nothing equal
    return "not shown" if came == "same" else "**otherwise**"


def figure_rows(found: Results, figures: Sequence[Figure]) -> Iterator[Sequence[str]]:
    alone = {(figure.metric, figure.arm): figure.value for figure in figures if figure.against is None}
    for name in dict.fromkeys(metric for metric, _ in alone):
        values = (alone.get((name, arm)) for arm in found.frozen.arms)
        metric = found.frozen.metrics.get(name)
        label = f"{name}: {metric.label}" if metric is not None and metric.label else name
        yield label, *("" if value is None else _shown(value, "") for value in values)


def _reach_rows(study: Results) -> Iterator[Sequence[str]]:
    for curve, value in study.frozen.experiment.reach.items():
        for arm in study.frozen.arms:
            results = study.of_arm(arm)
            positions = [_first(result.curve, curve, value) for result in results]
            reached = [position for position in positions if position is not None]
            if results:
                mean = f"{fmean(reached):,.0f}" if reached else "never"
                yield arm, curve, f"{value:g}", f"{len(reached)} of {len(results)}", mean


def _first(points: Iterable[Mapping[str, float]], name: str, value: float) -> float | None:
    """Where a curve is first at least `value`: the rollouts by then, or the steps."""
    return next((point.get("rollouts", point["step"]) for point in points if point.get(name, -1e300) >= value), None)


def _spent_rows(study: Results, breaches: Breaches) -> Iterator[Sequence[str]]:
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
    """A heading and a table; nothing without rows."""
    cells = [[_text(cell) for cell in row] for row in rows]
    if not cells:
        return []
    lines = [columns, ["---"] * len(columns), *cells]
    return [f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""]


def _text(text: str) -> str:
    """In one line that opens no cell, link or tag; bold that we set ourselves stays."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def _shown(value: Interval, sign: str) -> str:
    around = "" if value.low is None else f" ({value.low:{sign}.3g} to {value.high:{sign}.3g})"
    return f"{value.estimate:{sign}.3g}{around}"
