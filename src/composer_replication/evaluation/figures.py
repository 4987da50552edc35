"""Compute metrics: means over sites or states, with intervals over sessions.

    forced_gap        change of good calls - change of the erring decision      (difference in differences)
    forced_correction change of the right call - change of the erring decision
    sampled_*         change of a property of the actions sampled at held-out states

A change is after - before; changes in log-probs are in nats/token. The control has the same metrics with its own
weights as `after`. The `difference` is the trained model's change minus the control's, site by site. If the control has
several shuffles, its change and the difference are means over the shuffles.

Values from the same session are correlated, so intervals are computed over sessions. The estimate m is the mean of all
values. With S_g and n_g the sum and number of values of session g, e_g = S_g - m n_g, N = sum n_g and G sessions,

    se^2   = sum e_g^2 / (1 - n_g / N) / N^2                        the division corrects for sessions with a large
                                                                    share of the values, which pull m towards themselves
    radius = half of t(0.975, df) se + half of the bootstrap's      df: Bell and McCaffrey's, from the unequal sizes
                                                                    bootstrap: 95% quantile of |m* - m| / se*,
                                                                    times se
    times 1 + 4 skew^2, at most 1.15                                skew: that of m, from the skewness of the values

The two halves fail in different cases: the t interval covers too rarely when values are skewed, and the bootstrap when
sessions are few and unequal. A percentile bootstrap covers only 75 to 88% with up to 12 sessions. The last factor is
needed because a few sessions seldom reveal the long tail of the distribution of sessions, while the individual values
do.

If the same sites were measured several times (a control with several shuffles, or trainings with several seeds), the
interval also covers the variation between the repeats:

    se^2 = se_sessions^2 + se_repeats^2      df: Satterthwaite's; with two repeats the two radii add in quadrature

The formulas were chosen by simulation (docs/decisions/0019).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_replication.runs.files import control_name, controls_among

FigureArm = Literal["after", "control", "difference"]
Row = Mapping[str, Any]
Over = Literal["session", "project"]
"""The unit of an interval: a session, or a whole project if the split holds out projects."""
Better = Literal["higher", "lower"]


class _MetricInfo(NamedTuple):
    """The label and unit of a metric, and which direction is better."""

    label: str
    unit: str
    better: Better


NATS = "nats a token"
METRICS: dict[str, _MetricInfo] = {
    "forced_gap": _MetricInfo("Good calls against errors, change of log-prob", NATS, "higher"),
    "forced_correction": _MetricInfo("Right calls against errors, change of log-prob", NATS, "higher"),
    "forced_erring": _MetricInfo("Errors, change of log-prob", NATS, "lower"),
    "forced_good": _MetricInfo("Good calls, change of log-prob", NATS, "higher"),
    "sampled_failures": _MetricInfo("Drawn actions that would fail or cannot be read", "per 1,000", "lower"),
    "sampled_unparsed": _MetricInfo("Drawn calls that cannot be read or do not end", "per 1,000", "lower"),
    "sampled_no_call": _MetricInfo("Drawn actions without a call", "per 1,000", "lower"),
    "sampled_unknown_tool": _MetricInfo("Drawn calls of tools that are not there", "per 1,000", "lower"),
    "sampled_agreement": _MetricInfo(
        "Drawn actions that do what the session did at good states", "per 1,000", "higher"
    ),
    "sampled_corrected": _MetricInfo(
        "Drawn actions that do what was right where the session erred", "per 1,000", "higher"
    ),
    "sampled_looks": _MetricInfo("Drawn actions that only look", "per 1,000", "lower"),
    "sampled_length": _MetricInfo("Length of drawn actions", "tokens", "lower"),
    "loss_good_turns": _MetricInfo("Loss on good turns", NATS, "lower"),
}
# Metrics that are shown by kind of error as well.
BY_KIND = ("forced_gap", "forced_correction", "sampled_failures")


class Value(NamedTuple):
    """The contribution of one error site or state to a metric.

    `change` maps each arm to its change since before training.
    """

    session: str
    kind: str | None
    change: Mapping[str, float]


def forced_values(rows: Iterable[Row]) -> dict[str, list[Value]]:
    """Return, for each metric, the values of the scored decisions, one value per error site."""
    by_site: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_site[row["site_id"]][row["role"]].append(row)
    values: dict[str, list[Value]] = {name: [] for name in METRICS if name.startswith("forced_")}
    for roles in by_site.values():
        erring = roles["erring"][0]
        # By role, then by arm.
        changes = {role: _mean_changes(role_rows) for role, role_rows in roles.items()}

        def add(
            name: str, change: Callable[[str], float], first: Row = erring, arms: Iterable[str] = changes["erring"]
        ):
            values[name].append(Value(first["session"], first["kind"], {arm: change(arm) for arm in arms}))

        add("forced_erring", lambda arm, by=changes: by["erring"][arm])
        if "good" in changes:
            add("forced_good", lambda arm, by=changes: by["good"][arm])
            add("forced_gap", lambda arm, by=changes: by["good"][arm] - by["erring"][arm])
        if "correction" in changes:
            add("forced_correction", lambda arm, by=changes: by["correction"][arm] - by["erring"][arm])
    return values


def _mean_changes(rows: Sequence[Row]) -> dict[str, float]:
    """Return, for each arm, the mean change of these decisions. Each shuffle of the control is a separate arm."""
    changes = {"after": fmean(row["after"] - row["before"] for row in rows)}
    for shuffle in range(len(rows[0]["controls"] or ())):
        changes[control_name(shuffle + 1)] = fmean(row["controls"][shuffle] - row["before"] for row in rows)
    return changes


def figures_of(
    values: Mapping[str, Sequence[Value]], *, primary: str, seed: int, arms: Sequence[FigureArm], over: Over = "session"
) -> list[dict[str, Any]]:
    """Return the record's `figures`: every metric over all sites, then the metrics in `BY_KIND` for each kind of error.

    `is_primary` marks the metric on which the verdict is based. `over` says whether `Value.session` names sessions or
    projects.
    """
    figures: list[dict[str, Any]] = []
    for name, metric_values in values.items():
        for arm in arms:
            if metric_values and (arm == "after" or controls_among(metric_values[0].change)):
                figures.append(
                    _figure(name, arm, metric_values, None, seed) | {"is_primary": name == primary and arm == "after"}
                )
    for name in BY_KIND:
        metric_values = values.get(name, ())
        for kind in sorted({value.kind for value in metric_values if value.kind is not None}):
            kind_values = [value for value in metric_values if value.kind == kind]
            figures += [_figure(name, arm, kind_values, kind, seed) | {"is_primary": False} for arm in arms]
    return [figure | {"over": over} for figure in figures]


def _figure(name: str, arm: FigureArm, values: Sequence[Value], kind: str | None, seed: int) -> dict[str, Any]:
    metric = METRICS[name]
    interval = interval_of(values, arm, seed)
    return {
        "name": name,
        "arm": arm,
        "label": metric.label,
        "unit": metric.unit,
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "n": interval.num_values,
        "sessions": interval.num_sessions,
        "better": metric.better,
        "kind": kind,
        "shuffles": None if arm == "after" else interval.num_repeats,
    }


def interval_of(values: Sequence[Value], arm: FigureArm, seed: int) -> Interval:
    """Return the interval of a metric for one arm, or for the difference between the trained model and the control.

    For the control and the difference, the interval also covers the variation between shuffles of the control.
    """
    names = ["after"] if arm == "after" else controls_among(values[0].change)
    changes = [
        [value.change["after"] - value.change[name] if arm == "difference" else value.change[name] for value in values]
        for name in names
    ]
    return repeated_interval(changes, [value.session for value in values], seed=seed)


# ---- intervals

# 999 + 1 is divisible by 20, so the 95% quantile of the resamples is one of them, without interpolation.
_RESAMPLES = 999
# The coverage of the intervals, and the share of repeats that detect the smallest effect.
_LEVEL, _POWER = 0.95, 0.8
# With very few sessions a resample may have almost no spread, so the bootstrap's radius has to be limited.
_MAX_BOOTSTRAP_RATIO = 1.4
_SKEW_FACTOR, _MAX_SKEW_WIDENING = 4.0, 0.15
# The rounding error, relative to the mean, of values that are all equal.
_NO_SPREAD = 1e-9
Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean with its 95% interval, and the smallest effect that 80% of repeated evaluations would detect.

    `low` and `high` are None if there are fewer than two sessions, or if all values are equal but not 0. If all values
    are 0, both are 0. `num_repeats` is the number of times that the same sites were measured. With one repeat, the
    interval does not cover the variation between repeats.
    """

    estimate: float
    low: float | None
    high: float | None
    num_values: int
    num_sessions: int
    smallest: float | None = None
    num_repeats: int = 1

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


class _Spread(NamedTuple):
    """A standard error, its degrees of freedom, and the radius of its 95% interval."""

    error: float
    freedom: float
    radius: float


def repeated_interval(repeats: Sequence[Sequence[float]], sessions: Sequence[str], *, seed: int = 0) -> Interval:
    """Return the mean over repeated measurements of the same sites, with an interval that covers sessions and
    repeats.

    Each repeat has one value per site. `sessions` names the session of each site.
    """
    table = np.asarray(repeats, dtype=np.float64)
    values: list[float] = table.mean(axis=0).tolist()
    mean, num_repeats = math.fsum(values) / len(values), len(table)
    counts = {"num_values": len(values), "num_sessions": len(set(sessions)), "num_repeats": num_repeats}
    if counts["num_sessions"] < 2:
        return Interval(mean, None, None, **counts)
    spread = _session_spread(values, sessions, mean, seed)
    if num_repeats > 1:
        repeats_error = float(table.mean(axis=1).std(ddof=1)) / math.sqrt(num_repeats)
        spread = _add_repeats(spread, repeats_error, num_repeats)
    # Equal values other than 0 would give an interval of width 0, which claims too much.
    if mean and spread.error <= _NO_SPREAD * abs(mean):
        return Interval(mean, None, None, **counts)
    # At this distance from 0 the interval excludes 0 with probability 0.8.
    smallest = spread.radius + _t_quantile(_POWER, spread.freedom) * spread.error
    return Interval(mean, mean - spread.radius, mean + spread.radius, smallest=smallest, **counts)


def _session_spread(values: Sequence[float], sessions: Sequence[str], mean: float, seed: int) -> _Spread:
    sums, sizes = _sums_and_sizes(values, sessions)
    residuals, shares = sums - mean * sizes, sizes / sizes.sum()
    error = math.sqrt(float((residuals**2 / (1 - shares)).sum())) / float(sizes.sum())
    correlation = _intraclass_correlation(values, sums, sizes)
    freedom = _degrees_of_freedom(sizes, correlation)
    t_radius = _t_quantile(0.5 + _LEVEL / 2, freedom) * error
    bootstrap_radius = min(_bootstrap_radius(sums, sizes, mean, seed), _MAX_BOOTSTRAP_RATIO * t_radius)
    widening = 1 + min(_SKEW_FACTOR * _squared_skew(values, sizes, correlation), _MAX_SKEW_WIDENING)
    return _Spread(error, freedom, widening * (t_radius + bootstrap_radius) / 2)


def _add_repeats(sessions: _Spread, error: float, num_repeats: int) -> _Spread:
    """Return the combined spread over sessions and repeats; `error` is the standard error over repeats.

    Both parts contain the noise of a single measurement, so the interval is conservative: slightly too wide.
    """
    total_error = math.hypot(sessions.error, error)
    if not total_error:
        return sessions
    freedom = total_error**4 / (sessions.error**4 / sessions.freedom + error**4 / (num_repeats - 1))
    if num_repeats == 2:  # one degree of freedom: Satterthwaite's interval covers 88% if repeats dominate
        repeats_radius = _t_quantile(0.5 + _LEVEL / 2, 1) * error
        return _Spread(total_error, freedom, math.hypot(sessions.radius, repeats_radius))
    t_radius = _t_quantile(0.5 + _LEVEL / 2, sessions.freedom) * sessions.error
    # The bootstrap and the skewness widened the radius over sessions; their error is widened by the same factor.
    widened_error = sessions.error * (sessions.radius / t_radius if t_radius else 1.0)
    radius = _t_quantile(0.5 + _LEVEL / 2, freedom) * math.hypot(widened_error, error)
    return _Spread(total_error, freedom, radius)


def _sums_and_sizes(values: Sequence[float], sessions: Sequence[str]) -> tuple[Array, Array]:
    """Return the sum and the number of values of each session.

    The sessions are sorted by name, so that the bootstrap does not depend on their original order.
    """
    names = sorted(set(sessions))
    positions = {name: at for at, name in enumerate(names)}
    sums, sizes = np.zeros(len(names)), np.zeros(len(names))
    for value, session in zip(values, sessions, strict=True):
        sums[positions[session]] += value
        sizes[positions[session]] += 1
    return sums, sizes


def _intraclass_correlation(values: Sequence[float], sums: Array, sizes: Array) -> float:
    """Return the intraclass correlation of values within sessions, from 0 to 1, moved a third of the way towards 1.

    This shift is a safety margin, because an estimate from few sessions is unreliable.
    """
    num_values, num_groups = float(sizes.sum()), len(sizes)
    if num_values <= num_groups:
        return 1.0
    # Analysis of variance with unequal group sizes: mean squares within and between sessions.
    inner = float(np.square(np.asarray(values)).sum()) - float((sums**2 / sizes).sum())
    within = max(0.0, inner) / (num_values - num_groups)
    between = float((sizes * (sums / sizes - sums.sum() / num_values) ** 2).sum()) / (num_groups - 1)
    # The effective group size where groups differ in size.
    group_size = (num_values - float((sizes**2).sum()) / num_values) / (num_groups - 1)
    session_variance = max(0.0, (between - within) / group_size)
    share = session_variance / (session_variance + within) if session_variance + within > 0 else 1.0
    return (2 * share + 1) / 3


def _squared_skew(values: Sequence[float], sizes: Array, correlation: float) -> float:
    """Return the squared skewness of the mean, assuming that session effects are as skewed as the values.

    The squared skewness expected of normal values is subtracted; for n independent values it is 6 / n.
    """
    num_values, centered = len(values), np.asarray(values) - np.mean(values)
    variance = float((centered**2).mean())
    if not variance:
        return 0.0
    value_skew = float((centered**3).mean()) / variance**1.5
    shares = sizes / num_values
    third = correlation**1.5 * float((shares**3).sum()) + (1 - correlation) ** 1.5 / num_values**2
    second = correlation * float((shares**2).sum()) + (1 - correlation) / num_values
    return max(0.0, value_skew**2 - 6 * second) * third**2 / second**3


def _degrees_of_freedom(sizes: Array, correlation: float) -> float:
    """Return Bell and McCaffrey's degrees of freedom. For G sessions of equal size, the result is G - 1."""
    num_values = float(sizes.sum())
    variance = correlation * sizes**2 + (1 - correlation) * sizes
    scale = 1 / (1 - sizes / num_values)
    # K = A (D - n v' - v n' + n n' sum v) A with n, v as shares: traces of K and K^2 without building the matrix.
    share, total = sizes / num_values, float(variance.sum())
    diagonal = scale * (variance - 2 * share * variance + share**2 * total)
    cross = _sum_of_squares(share * np.sqrt(scale), variance * np.sqrt(scale), total)
    off_diagonal = cross - float((scale**2 * (-2 * share * variance + share**2 * total) ** 2).sum())
    return max(1.0, float(diagonal.sum()) ** 2 / (float((diagonal**2).sum()) + off_diagonal))


def _sum_of_squares(share: Array, variance: Array, total: float) -> float:
    """Return the sum of the squared entries of the matrix -s_i v_j - v_i s_j + s_i s_j total.

    `share` is the vector s, and `variance` is the vector v.
    """
    ss, vv, sv = (float((a * b).sum()) for a, b in ((share, share), (variance, variance), (share, variance)))
    return 2 * ss * vv + 2 * sv**2 + total**2 * ss**2 - 4 * total * ss * sv


def _bootstrap_radius(sums: Array, sizes: Array, mean: float, seed: int) -> float:
    """Return the interval's radius from a studentized bootstrap over sessions.

    The distance of each resample's mean from `mean` is divided by the resample's own standard error.
    """
    num_groups, num_values = len(sizes), float(sizes.sum())
    draws = np.random.default_rng(seed).multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=_RESAMPLES)
    resampled_sizes = draws @ sizes
    means = (draws @ sums) / resampled_sizes
    squares = draws @ sums**2 - 2 * means * (draws @ (sums * sizes)) + means**2 * (draws @ sizes**2)
    bias_correction = num_groups / (num_groups - 1)
    # A resample of one session only has no spread; the floor keeps the division finite.
    floor = 1e-12 * float((sums**2).sum() + 1e-300)
    spreads = np.sqrt(np.maximum(squares, floor) * bias_correction) / resampled_sizes
    distances = np.sort(np.abs(means - mean) / spreads)
    spread = math.sqrt(bias_correction * float(((sums - mean * sizes) ** 2).sum())) / num_values
    return float(distances[math.ceil(_LEVEL * (_RESAMPLES + 1)) - 1]) * spread


@lru_cache(maxsize=512)
def _t_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t distribution by bisection. SciPy also provides it, but is not a dependency.

    Substituting x = sqrt(df) tan(angle) turns the density into cos(angle)^(df - 1) on a half circle, so Simpson's rule
    integrates a bounded function over a bounded interval.
    """
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)

    def cumulative(angle: float) -> float:
        angles = np.linspace(0.0, angle, 201)
        heights = np.cos(angles) ** (freedom - 1)
        weights = np.ones(201)
        # Simpson's weights 1, 4, 2, 4, ..., 4, 1 over 200 steps: times step / 3 is angle / 600.
        weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
        return 0.5 + math.exp(log_scale) * float((weights * heights).sum()) * angle / 600

    low, high = 0.0, math.pi / 2
    # 45 halvings of pi / 2 leave less than 1e-13.
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if cumulative(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
