"""Rows to figures: each a mean over sites or states with an interval over sessions, for after, control and both.

    forced_gap        change of good calls - change of the erring decision      (difference in differences)
    forced_correction change of the right call - change of the erring decision
    sampled_*         of actions drawn at held-out states, after - before

A change is after - before, in nats a token. The control's figures are the same of its weights; the `difference` is
after's - control's, site by site. A control may have several shuffles, and both are then means over these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

from composer_replication.evaluation.statistics import Interval, repeated_interval
from composer_replication.runs.evaluation import control_name, controls_among

FigureArm = Literal["after", "control", "difference"]
Row = Mapping[str, Any]
Over = Literal["session", "project"]
"""What is drawn for an interval: sessions, or whole projects where the split holds those out."""
Better = Literal["higher", "lower"]


class Sort(NamedTuple):
    """What a figure is called, what it is counted in, and which way is better."""

    label: str
    unit: str
    better: Better


NATS = "nats a token"
SORTS: dict[str, Sort] = {
    "forced_gap": Sort("Good calls against errors, change of log-prob", NATS, "higher"),
    "forced_correction": Sort("Right calls against errors, change of log-prob", NATS, "higher"),
    "forced_erring": Sort("Errors, change of log-prob", NATS, "lower"),
    "forced_good": Sort("Good calls, change of log-prob", NATS, "higher"),
    "sampled_failures": Sort("Drawn actions that would fail or cannot be read", "per 1,000", "lower"),
    "sampled_unparsed": Sort("Drawn calls that cannot be read or do not end", "per 1,000", "lower"),
    "sampled_no_call": Sort("Drawn actions without a call", "per 1,000", "lower"),
    "sampled_unknown_tool": Sort("Drawn calls of tools that are not there", "per 1,000", "lower"),
    "sampled_agreement": Sort("Drawn actions that do what the session did at good states", "per 1,000", "higher"),
    "sampled_corrected": Sort("Drawn actions that do what was right where the session erred", "per 1,000", "higher"),
    "sampled_looks": Sort("Drawn actions that only look", "per 1,000", "lower"),
    "sampled_length": Sort("Length of drawn actions", "tokens", "lower"),
    "loss_good_turns": Sort("Loss on good turns", NATS, "lower"),
}
BY_KIND = ("forced_gap", "forced_correction", "sampled_failures")


class Value(NamedTuple):
    """One site's or state's contribution: the change under each arm that there is."""

    session: str
    kind: str | None
    change: Mapping[str, float]


def forced_values(rows: Iterable[Row]) -> dict[str, list[Value]]:
    """By the figure's name, a value a site."""
    by_site: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_site[row["site_id"]][row["role"]].append(row)
    values: dict[str, list[Value]] = {name: [] for name in SORTS if name.startswith("forced_")}
    for roles in by_site.values():
        erring = roles["erring"][0]
        moved = {role: _moved(several) for role, several in roles.items()}

        def add(name: str, change: Callable[[str], float], first: Row = erring, arms: Iterable[str] = moved["erring"]):
            values[name].append(Value(first["session"], first["kind"], {arm: change(arm) for arm in arms}))

        add("forced_erring", lambda arm, by=moved: by["erring"][arm])
        if "good" in moved:
            add("forced_good", lambda arm, by=moved: by["good"][arm])
            add("forced_gap", lambda arm, by=moved: by["good"][arm] - by["erring"][arm])
        if "correction" in moved:
            add("forced_correction", lambda arm, by=moved: by["correction"][arm] - by["erring"][arm])
    return values


def _moved(rows: Sequence[Row]) -> dict[str, float]:
    """Mean change of these decisions under each arm, and each shuffle of the control."""
    moved = {"after": fmean(row["after"] - row["before"] for row in rows)}
    for shuffle in range(len(rows[0]["controls"] or ())):
        moved[control_name(shuffle + 1)] = fmean(row["controls"][shuffle] - row["before"] for row in rows)
    return moved


def figures_of(
    values: Mapping[str, Sequence[Value]], *, primary: str, seed: int, arms: Sequence[FigureArm], over: Over = "session"
) -> list[dict[str, Any]]:
    """Every figure over all sites, then those by kind; the primary one is marked; `over` is what sessions stand for."""
    figures: list[dict[str, Any]] = []
    for name, several in values.items():
        for arm in arms:
            if several and (arm == "after" or controls_among(several[0].change)):
                figures.append(
                    _figure(name, arm, several, None, seed) | {"is_primary": name == primary and arm == "after"}
                )
    for name in BY_KIND:
        several = values.get(name, ())
        for kind in sorted({value.kind for value in several if value.kind is not None}):
            kind_values = [value for value in several if value.kind == kind]
            figures += [_figure(name, arm, kind_values, kind, seed) | {"is_primary": False} for arm in arms]
    return [figure | {"over": over} for figure in figures]


def _figure(name: str, arm: FigureArm, values: Sequence[Value], kind: str | None, seed: int) -> dict[str, Any]:
    sort = SORTS[name]
    interval = interval_of(values, arm, seed)
    return {
        "name": name,
        "arm": arm,
        "label": sort.label,
        "unit": sort.unit,
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "n": interval.num_values,
        "sessions": interval.num_sessions,
        "better": sort.better,
        "kind": kind,
        "shuffles": None if arm == "after" else interval.num_repeats,
    }


def interval_of(values: Sequence[Value], arm: FigureArm, seed: int) -> Interval:
    """Of a control with several shuffles, and of the difference to it, the interval is over these as well."""
    names = ["after"] if arm == "after" else controls_among(values[0].change)
    changes = [
        [value.change["after"] - value.change[name] if arm == "difference" else value.change[name] for value in values]
        for name in names
    ]
    return repeated_interval(changes, [value.session for value in values], seed=seed)
