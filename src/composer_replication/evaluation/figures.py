"""Turn rows into metrics: means over sites or states with intervals over sessions.

    forced_gap        change of good calls - change of the erring decision      (difference in differences)
    forced_correction change of the right call - change of the erring decision
    sampled_*         of actions sampled at held-out states, after - before

A change is after - before, in nats/token. The control's metrics are those of its weights; the `difference` is the
trained model's minus the control's, site by site. With several shuffles of the control, both are means over these.

Sites of one session are alike, so the interval is over sessions. The estimate m is the mean of all values; with S_g and
n_g the sum and number of values of session g, e_g = S_g - m n_g, N = sum n_g and G sessions,

    se^2   = sum e_g^2 / (1 - n_g / N) / N^2                        a large session pulls m towards itself
    radius = half of t(0.975, df) se + half of the bootstrap's      df: Bell and McCaffrey's, from the unequal sizes
                                                                    bootstrap: 95% quantile of |m* - m| / se*,
                                                                    times se
    times 1 + 4 skew^2, at most 1.15                                skew: that of m, from the skewness of single
                                                                    values

Each half alone errs on one side: the first covers too seldom when values are skewed, the second when sessions are few
and unequal. A percentile bootstrap covers 75 to 88% with up to 12 sessions. A few sessions seldom show the long tail of
their distribution; their values do.

If the same sites were measured several times (a control with several shuffles, a training with several seeds), the
variation between these repeats counts too:

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


class Sort(NamedTuple):
    """How a metric is shown: its label, its unit, and which direction is better."""

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
# Metrics that are shown by kind of error as well.
BY_KIND = ("forced_gap", "forced_correction", "sampled_failures")


class Value(NamedTuple):
    """The contribution of one site or state to a metric: its change in every arm."""

    session: str
    kind: str | None
    change: Mapping[str, float]


def forced_values(rows: Iterable[Row]) -> dict[str, list[Value]]:
    """Return the values of the metrics on scored decisions, by metric, with one value per site."""
    by_site: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_site[row["site_id"]][row["role"]].append(row)
    values: dict[str, list[Value]] = {name: [] for name in SORTS if name.startswith("forced_")}
    for roles in by_site.values():
        erring = roles["erring"][0]
        # By role, then by arm.
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
    """Return the mean change of these decisions in each arm and each shuffle of the control."""
    moved = {"after": fmean(row["after"] - row["before"] for row in rows)}
    for shuffle in range(len(rows[0]["controls"] or ())):
        moved[control_name(shuffle + 1)] = fmean(row["controls"][shuffle] - row["before"] for row in rows)
    return moved


def figures_of(
    values: Mapping[str, Sequence[Value]], *, primary: str, seed: int, arms: Sequence[FigureArm], over: Over = "session"
) -> list[dict[str, Any]]:
    """Return every metric over all sites, then some of them by kind of error.

    `is_primary` marks the one that the verdict is about; `over` says what a session of `values` is.
    """
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
    """Return the interval of one arm, or of the difference between the trained model and the control.

    The control and the difference have one value per site and shuffle, so their interval is over shuffles as well.
    """
    names = ["after"] if arm == "after" else controls_among(values[0].change)
    changes = [
        [value.change["after"] - value.change[name] if arm == "difference" else value.change[name] for value in values]
        for name in names
    ]
    return repeated_interval(changes, [value.session for value in values], seed=seed)


# ---- intervals

Word = Literal["better", "worse", "no_difference", "too_thin"]
# 999 + 1 is divisible by 20, so the 95% quantile of the resamples is one of them.
_RESAMPLES = 999
# Coverage of the intervals; share of repeats that detect the smallest effect.
_LEVEL, _POWER = 0.95, 0.8
_MAX_BOOTSTRAP_RATIO = 1.4
"""With very few sessions a resample may have almost no spread, so the bootstrap's radius would be unbounded."""
_SKEW_FACTOR, _MAX_SKEW_WIDENING = 4.0, 0.15
_NO_SPREAD = 1e-9
"""Relative to the mean: the rounding error of values that are all equal."""
Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its 95% interval; an effect of size `smallest` is detected in 80% of repeats.

    With fewer than two sessions there is no interval, nor if all values are equal, except when all are 0: then it is 0
    to 0. `num_repeats` is how often the same sites were measured; the variation of a single measurement is not in the
    interval.
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


def session_interval(values: Sequence[float], sessions: Sequence[str], *, seed: int = 0) -> Interval:
    """Return the mean of `values`, one per site, with its interval over their sessions."""
    return repeated_interval([values], sessions, seed=seed)


def repeated_interval(repeats: Sequence[Sequence[float]], sessions: Sequence[str], *, seed: int = 0) -> Interval:
    """Return the mean over repeats of the same sites, with an interval over both sessions and repeats.

    Each repeat has one value per site, in the order of `sessions`. A single repeat says nothing about their variation.
    """
    table = np.asarray(repeats, dtype=np.float64)
    values: list[float] = table.mean(axis=0).tolist()
    mean, times = math.fsum(values) / len(values), len(table)
    number = {"num_values": len(values), "num_sessions": len(set(sessions)), "num_repeats": times}
    if number["num_sessions"] < 2:
        return Interval(mean, None, None, **number)
    spread = _session_spread(values, sessions, mean, seed)
    if times > 1:
        spread = _add_repeats(spread, float(table.mean(axis=1).std(ddof=1)) / math.sqrt(times), times)
    # Equal values other than 0 would get an interval of width 0, which claims too much.
    if mean and spread.error <= _NO_SPREAD * abs(mean):
        return Interval(mean, None, None, **number)
    # The usual power formula: the interval excludes 0 with probability 0.8 at this distance.
    smallest = spread.radius + t_quantile(_POWER, spread.freedom) * spread.error
    return Interval(mean, mean - spread.radius, mean + spread.radius, smallest=smallest, **number)


def _session_spread(values: Sequence[float], sessions: Sequence[str], mean: float, seed: int) -> _Spread:
    sums, sizes = _by_session(values, sessions)
    residuals, shares = sums - mean * sizes, sizes / sizes.sum()
    error = math.sqrt(float((residuals**2 / (1 - shares)).sum())) / float(sizes.sum())
    alike = _intraclass_correlation(values, sums, sizes)
    freedom = _degrees_of_freedom(sizes, alike)
    by_t = t_quantile(0.5 + _LEVEL / 2, freedom) * error
    by_bootstrap = min(_bootstrap_radius(sums, sizes, mean, seed), _MAX_BOOTSTRAP_RATIO * by_t)
    wider = 1 + min(_SKEW_FACTOR * _squared_skew(values, sizes, alike), _MAX_SKEW_WIDENING)
    return _Spread(error, freedom, wider * (by_t + by_bootstrap) / 2)


def _add_repeats(sessions: _Spread, error: float, times: int) -> _Spread:
    """Return the spread over sessions and repeats together.

    The noise of one site in one repeat is counted in both, which errs on the safe side.
    """
    both = math.hypot(sessions.error, error)
    if not both:
        return sessions
    freedom = both**4 / (sessions.error**4 / sessions.freedom + error**4 / (times - 1))
    of_repeats = _Spread(error, times - 1, t_quantile(0.5 + _LEVEL / 2, times - 1) * error)
    if times == 2:  # one degree of freedom: Satterthwaite's interval covers 88% if repeats dominate
        return _Spread(both, freedom, math.hypot(sessions.radius, of_repeats.radius))
    usual = t_quantile(0.5 + _LEVEL / 2, sessions.freedom) * sessions.error
    # The bootstrap and skewness widened the radius of sessions; their error is widened alike before both are added.
    stretched = sessions.error * (sessions.radius / usual if usual else 1.0)
    return _Spread(both, freedom, t_quantile(0.5 + _LEVEL / 2, freedom) * math.hypot(stretched, error))


def verdict_word(interval: Interval, *, higher_is_better: bool, fewest_sessions: int) -> Word:
    """Return what an interval says: `too_thin` with too few sessions or no interval,
    `no_difference` if it contains 0.
    """
    if interval.num_sessions < fewest_sessions or interval.low is None:
        return "too_thin"
    if not interval.excludes_zero:
        return "no_difference"
    return "better" if (interval.estimate > 0) == higher_is_better else "worse"


def _by_session(values: Sequence[float], sessions: Sequence[str]) -> tuple[Array, Array]:
    """Return the sum and number of values per session, sorted by name so that the bootstrap depends on nothing else."""
    names = sorted(set(sessions))
    positions = {name: at for at, name in enumerate(names)}
    sums, sizes = np.zeros(len(names)), np.zeros(len(names))
    for value, session in zip(values, sessions, strict=True):
        sums[positions[session]] += value
        sizes[positions[session]] += 1
    return sums, sizes


def _intraclass_correlation(values: Sequence[float], sums: Array, sizes: Array) -> float:
    """Return the intraclass correlation of a session's values, from 0 to 1, moved a third of the way to 1.

    The shift is a safety margin: few sessions estimate it badly.
    """
    number, groups = float(sizes.sum()), len(sizes)
    if number <= groups:
        return 1.0
    # Analysis of variance with unequal group sizes: mean squares within and between sessions.
    inner = float(np.square(np.asarray(values)).sum()) - float((sums**2 / sizes).sum())
    within = max(0.0, inner) / (number - groups)
    between = float((sizes * (sums / sizes - sums.sum() / number) ** 2).sum()) / (groups - 1)
    # What takes the place of the group size when groups differ in size.
    usual = (number - float((sizes**2).sum()) / number) / (groups - 1)
    session_variance = max(0.0, (between - within) / usual)
    share = session_variance / (session_variance + within) if session_variance + within > 0 else 1.0
    return (2 * share + 1) / 3


def _squared_skew(values: Sequence[float], sizes: Array, alike: float) -> float:
    """Return the squared skewness of the mean, as if the session's part of a value were as skewed as single values.

    What normal values show by chance is subtracted: 6 / n for n independent values.
    """
    number, centred = len(values), np.asarray(values) - np.mean(values)
    variance = float((centred**2).mean())
    if not variance:
        return 0.0
    of_values = float((centred**3).mean()) / variance**1.5
    shares = sizes / number
    third = alike**1.5 * float((shares**3).sum()) + (1 - alike) ** 1.5 / number**2
    second = alike * float((shares**2).sum()) + (1 - alike) / number
    return max(0.0, of_values**2 - 6 * second) * third**2 / second**3


def _degrees_of_freedom(sizes: Array, alike: float) -> float:
    """Return Bell and McCaffrey's degrees of freedom: the number of equally large sessions the residuals are worth,
    less 1.
    """
    number = float(sizes.sum())
    variance = alike * sizes**2 + (1 - alike) * sizes
    scale = 1 / (1 - sizes / number)
    # K = A (D - n v' - v n' + n n' sum v) A with n, v as shares: its trace and that of its square, without the matrix.
    share, total = sizes / number, float(variance.sum())
    diagonal = scale * (variance - 2 * share * variance + share**2 * total)
    cross = _square_of(share * np.sqrt(scale), variance * np.sqrt(scale), total)
    off = cross - float((scale**2 * (-2 * share * variance + share**2 * total) ** 2).sum())
    return max(1.0, float(diagonal.sum()) ** 2 / (float((diagonal**2).sum()) + off))


def _square_of(share: Array, variance: Array, total: float) -> float:
    """Return the sum of squares of all entries -s_i v_j - v_i s_j + s_i s_j total."""
    ss, vv, sv = (float((a * b).sum()) for a, b in ((share, share), (variance, variance), (share, variance)))
    return 2 * ss * vv + 2 * sv**2 + total**2 * ss**2 - 4 * total * ss * sv


def _bootstrap_radius(sums: Array, sizes: Array, mean: float, seed: int) -> float:
    """Return the radius by a studentized bootstrap over sessions.

    Each resample's distance from `mean` is divided by its own standard error.
    """
    groups, number = len(sizes), float(sizes.sum())
    draws = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=_RESAMPLES)
    resampled_sizes = draws @ sizes
    means = (draws @ sums) / resampled_sizes
    squares = draws @ sums**2 - 2 * means * (draws @ (sums * sizes)) + means**2 * (draws @ sizes**2)
    usual = groups / (groups - 1)
    # A resample that draws one session only has no spread; the floor keeps the division finite.
    floor = 1e-12 * float((sums**2).sum() + 1e-300)
    spreads = np.sqrt(np.maximum(squares, floor) * usual) / resampled_sizes
    distances = np.sort(np.abs(means - mean) / spreads)
    spread = math.sqrt(usual * float(((sums - mean * sizes) ** 2).sum())) / number
    return float(distances[math.ceil(_LEVEL * (_RESAMPLES + 1)) - 1]) * spread


@lru_cache(maxsize=512)
def t_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t, by bisection.

    With x = sqrt(df) tan(angle), the density of the angle is cos(angle)^(df - 1) over half a circle, so Simpson's rule
    integrates a bounded function over a bounded interval.
    """
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)

    def below(angle: float) -> float:
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
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
