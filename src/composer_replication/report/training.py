"""What the training did: each channel with its curve, the held-out loss, what was diagnosed, and what it cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from composer_replication.report.plots import ONE, QUIET, THREE, TWO, Line, curves
from composer_replication.report.records import Row, RunRecords
from composer_replication.runs.lineage import channel_in_words, channel_results, has_figure

_CHANNELS = {
    "lm_ce": ("Channel 1: good turns", "cross-entropy in nats a token", ONE),
    "grpo": ("Channel 1: rewards (GRPO)", "policy loss", ONE),
    "sdpo_kl": ("Channel 2: hints", "divergence from the hinted teacher", TWO),
    "sdpo_kl_logged": ("Channel 2: hints on logged sessions", "divergence from the hinted teacher", TWO),
    "trace_replay_dpo": ("Channel 3: pairs", "preference loss a pair", THREE),
}
_MOST_POINTS = 400


class Channel(NamedTuple):
    """`steps` says in words in which steps the channel was taught, or why in none."""

    name: str
    label: str
    unit: str
    weight: float | None
    steps: str
    first: float | None
    last: float | None
    svg: str


class Training(NamedTuple):
    """`steps` as the training itself says, and how many windows they saw of how many; 0 where that is not known."""

    channels: list[Channel]
    svg_held_out: str
    steps: int | None
    warmup_steps: int
    windows_seen: int
    windows: int
    diagnosis: list[str]
    alarms: list[str]
    has_control: bool
    is_torn: bool


def training_of(records: RunRecords) -> Training:
    """From `metrics.jsonl` and, where the training has ended, `training.json`."""
    record: Row = records.training_record or {}
    rows, control = records.metrics.rows, records.control_metrics.rows
    channel_records = {channel["name"]: channel for channel in record.get("channels", ())}
    counts: Mapping[str, int] = record.get("counts") or {}
    names = [name for name in _CHANNELS if name in channel_records or has_figure(rows, name)]
    steps = record.get("steps") or _last(rows, "step")
    read = {
        channel.name: vars(channel) for channel in channel_results(names, rows, {})
    }  # of a training that has not ended
    return Training(
        channels=[
            _channel(
                name,
                rows,
                control,
                channel_records.get(name),
                channel_in_words(channel_records.get(name, read[name]), steps),
            )
            for name in names
        ],
        svg_held_out=_held_out(rows, control),
        steps=steps,
        warmup_steps=record.get("warmup_steps") or 0,
        windows_seen=counts.get("windows_seen", 0),
        windows=counts.get("windows", 0),
        diagnosis=list(record.get("diagnosis", ())),
        alarms=list(record.get("alarms", ())),
        has_control=bool(control),
        is_torn=records.metrics.is_torn,
    )


def _channel(name: str, rows: list[Row], control: list[Row], channel_record: Row | None, steps: str) -> Channel:
    label, unit, colour = _CHANNELS[name]
    points, beside = _points(rows, f"loss/{name}"), _points(control, f"loss/{name}")
    svg = ""
    if points:
        lines = [*([Line(beside, QUIET, is_dashed=True)] if beside else []), Line(points, colour)]
        described = f"{label}: from {points[0][1]:.3f} at step {points[0][0]} to {points[-1][1]:.3f} at {points[-1][0]}"
        svg = curves(lines, name=f"curve-{name}", description=described, x_label="step")
    return Channel(
        name=name,
        label=label,
        unit=unit,
        weight=None if channel_record is None else channel_record["weight"],
        steps=steps,
        first=points[0][1] if points else None,
        last=points[-1][1] if points else None,
        svg=svg,
    )


def _held_out(rows: list[Row], control: list[Row]) -> str:
    """The loss on held-out sessions, where the training measured one."""
    points, beside = _points(rows, "eval_loss"), _points(control, "eval_loss")
    if not points:
        return ""
    lines = [*([Line(beside, QUIET, is_dashed=True)] if beside else []), Line(points, ONE)]
    described = f"Held-out loss from {points[0][1]:.3f} to {points[-1][1]:.3f}"
    return curves(lines, name="curve-held-out", description=described, x_label="step")


def _points(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    """Steps with a value; of very many, means over as many neighbours as make few enough."""
    points = [(int(row["step"]), float(row[key])) for row in rows if row.get(key) is not None and "step" in row]
    size = -(-len(points) // _MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _last(rows: list[Row], key: str) -> Any:
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def time_spent(records: RunRecords) -> list[tuple[str, float]]:
    """What took how many seconds, in the order in which it was done; a training that was killed leaves no time.

    What was done in no time stands there too: which lines there are says what was done, and nothing of how fast.
    """
    before: Mapping[str, float] = (records.training_record or {}).get("seconds") or {}
    control = [[*first.values(), *_runtimes(rows)] for first, rows in records.control_times()]
    evaluation = (records.evaluation or {}).get("seconds")
    spent: dict[str, list[float]] = {name.capitalize(): [seconds] for name, seconds in before.items()}
    spent["Training steps"] = _runtimes(records.metrics.rows)
    spent["Control"] = [seconds for shuffle in control for seconds in shuffle]
    spent["Evaluation"] = [] if evaluation is None else [float(evaluation)]
    return [(name, sum(seconds)) for name, seconds in spent.items() if seconds]


def _runtimes(rows: Iterable[Row]) -> list[float]:
    return [float(row["train_runtime"]) for row in rows if row.get("train_runtime") is not None]


class AdviserCost(NamedTuple):
    slug: str
    calls: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    usd: float


def adviser_costs(records: RunRecords) -> list[AdviserCost]:
    """What asking cost, one row an adviser; answers from the store are counted once, as they were paid.

    A model that wrote hints has a row of its own, without tokens: nothing but its price is kept.
    """
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0.0])
    for row in records.rows("teacher_calls"):
        added = (1, row["error"] is not None, row["prompt_tokens"], row["completion_tokens"], row["cost_usd"])
        totals[row["teacher_slug"]] = [a + b for a, b in zip(totals[row["teacher_slug"]], added, strict=True)]
    costs = [
        AdviserCost(slug, int(calls), int(errors), int(prompt), int(completion), usd)
        for slug, (calls, errors, prompt, completion, usd) in sorted(totals.items())
    ]
    settings = records.run.meta("sites").settings if records.sites else {}
    if isinstance(usd := settings.get("writer_usd"), float):
        costs.append(
            AdviserCost(f"{settings.get('writer')}, hints", int(str(settings.get("writer_calls", 0))), 0, 0, 0, usd)
        )
    return costs
