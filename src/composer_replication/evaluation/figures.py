"""Rows to figures: each a mean over sites or states with an interval over sessions, for after, control and both.

    forced_gap        change of good calls - change of the erring decision      (difference in differences)
    forced_correction change of the right call - change of the erring decision
    sampled_*         of actions drawn at held-out states, after - before

A change is after - before, in nats a token. The control's figures are the same of its weights; the `difference` is
after's - control's, site by site. A control may have several shuffles, and both are then means over these.
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


# A mean over sites with an interval over sessions: what a difference is worth when sessions are few and unequal.
#
# Sites of one session are alike, so sessions are what is drawn. The estimate m is the mean of all values; with S_g and
# n_g the sum and number of values of session g, e_g = S_g - m n_g, N = sum n_g and G sessions,
#
#     se^2   = sum e_g^2 / (1 - n_g / N) / N^2                        a large session pulls m towards itself
#     radius = half of t(0.975, df) se + half of the bootstrap's      df: Bell and McCaffrey's, from the unequal sizes
#                                                                     bootstrap: 95% quantile of |m* - m| / se*,
#                                                                     times se
#     times 1 + 4 skew^2, at most 1.15                                skew: that of m, from the skewness of single
#                                                                     values
#
# Each half alone errs on one side: the first covers too seldom where values are skewed, the second where sessions are
# few and unequal; a percentile bootstrap covers 75 to 88% with up to 12 sessions. A few sessions seldom show the long
# tail of what they are drawn from; their values do.
#
# Where the same sites were measured several times over (a control with several shuffles, a training with several seeds)
# the repeats are drawn, too, and both count:
#
#     se^2 = se_sessions^2 + se_repeats^2      df: Satterthwaite's; two repeats: the two radii as sides of a right angle
#
# Chosen by simulation: decision 0019.

Word = Literal["better", "worse", "no_difference", "too_thin"]
_RESAMPLES = 999
_LEVEL, _POWER = 0.95, 0.8
_MOST_TIMES = 1.4
"""With very few sessions a resample may have almost no spread, and the bootstrap's radius no bound."""
_FOR_SKEW, _MOST_FOR_SKEW = 4.0, 0.15
_NO_SPREAD = 1e-9
"""Of the mean: what rounding leaves of values that are all the same."""
Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its 95% interval. `smallest` is seen in four of five repeats.

    Without two sessions there is none, nor where all values are the same, except that of nothing moved: 0 to 0.
    `num_repeats` is how often the same sites were measured: the luck of a single time is not in the interval.
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
    """A standard error and its degrees of freedom; `radius` is that of the 95% interval it makes."""

    error: float
    freedom: float
    radius: float


def session_interval(values: Sequence[float], sessions: Sequence[str], *, seed: int = 0) -> Interval:
    """The mean of `values`, one a site, with the interval that the sessions they are from give it."""
    return repeated_interval([values], sessions, seed=seed)


def repeated_interval(repeats: Sequence[Sequence[float]], sessions: Sequence[str], *, seed: int = 0) -> Interval:
    """The mean over repeats of the same sites, with the interval that both sessions and repeats give it.

    Each repeat has a value a site, in the order of `sessions`. One alone shows nothing of how repeats differ.
    """
    table = np.asarray(repeats, dtype=np.float64)
    values: list[float] = table.mean(axis=0).tolist()
    mean, times = math.fsum(values) / len(values), len(table)
    number = {"num_values": len(values), "num_sessions": len(set(sessions)), "num_repeats": times}
    if number["num_sessions"] < 2:
        return Interval(mean, None, None, **number)
    spread = _over_sessions(values, sessions, mean, seed)
    if times > 1:
        spread = _with_repeats(spread, float(table.mean(axis=1).std(ddof=1)) / math.sqrt(times), times)
    if mean and spread.error <= _NO_SPREAD * abs(mean):
        return Interval(mean, None, None, **number)
    smallest = spread.radius + t_quantile(_POWER, spread.freedom) * spread.error
    return Interval(mean, mean - spread.radius, mean + spread.radius, smallest=smallest, **number)


def _over_sessions(values: Sequence[float], sessions: Sequence[str], mean: float, seed: int) -> _Spread:
    sums, sizes = _by_session(values, sessions)
    residuals, shares = sums - mean * sizes, sizes / sizes.sum()
    error = math.sqrt(float((residuals**2 / (1 - shares)).sum())) / float(sizes.sum())
    alike = _alike(values, sums, sizes)
    freedom = _degrees_of_freedom(sizes, alike)
    by_t = t_quantile(0.5 + _LEVEL / 2, freedom) * error
    by_bootstrap = min(_bootstrap_radius(sums, sizes, mean, seed), _MOST_TIMES * by_t)
    wider = 1 + min(_FOR_SKEW * _squared_skew(values, sizes, alike), _MOST_FOR_SKEW)
    return _Spread(error, freedom, wider * (by_t + by_bootstrap) / 2)


def _with_repeats(sessions: _Spread, error: float, times: int) -> _Spread:
    """Sessions and repeats together; what one site does in one repeat alone is counted in both, on the safe side."""
    both = math.hypot(sessions.error, error)
    if not both:
        return sessions
    freedom = both**4 / (sessions.error**4 / sessions.freedom + error**4 / (times - 1))
    of_repeats = _Spread(error, times - 1, t_quantile(0.5 + _LEVEL / 2, times - 1) * error)
    if times == 2:  # one degree of freedom: Satterthwaite's covers 88% where repeats differ most
        return _Spread(both, freedom, math.hypot(sessions.radius, of_repeats.radius))
    usual = t_quantile(0.5 + _LEVEL / 2, sessions.freedom) * sessions.error
    stretched = sessions.error * (sessions.radius / usual if usual else 1.0)
    return _Spread(both, freedom, t_quantile(0.5 + _LEVEL / 2, freedom) * math.hypot(stretched, error))


def verdict_word(found: Interval, *, higher_is_better: bool, fewest_sessions: int) -> Word:
    """What an interval says: too few sessions, or no spread, say nothing; one that contains zero, no difference."""
    if found.num_sessions < fewest_sessions or found.low is None:
        return "too_thin"
    if not found.excludes_zero:
        return "no_difference"
    return "better" if (found.estimate > 0) == higher_is_better else "worse"


def _by_session(values: Sequence[float], sessions: Sequence[str]) -> tuple[Array, Array]:
    """Sum and number of each session's values, in the order of their names: the draws depend on nothing else."""
    names = sorted(set(sessions))
    positions = {name: at for at, name in enumerate(names)}
    sums, sizes = np.zeros(len(names)), np.zeros(len(names))
    for value, session in zip(values, sessions, strict=True):
        sums[positions[session]] += value
        sizes[positions[session]] += 1
    return sums, sizes


def _alike(values: Sequence[float], sums: Array, sizes: Array) -> float:
    """How alike the values of one session are (0 to 1): what they show, and a third of the way on; few show little."""
    number, groups = float(sizes.sum()), len(sizes)
    if number <= groups:
        return 1.0
    inner = float(np.square(np.asarray(values)).sum()) - float((sums**2 / sizes).sum())
    within = max(0.0, inner) / (number - groups)
    between = float((sizes * (sums / sizes - sums.sum() / number) ** 2).sum()) / (groups - 1)
    usual = (number - float((sizes**2).sum()) / number) / (groups - 1)
    session_variance = max(0.0, (between - within) / usual)
    share = session_variance / (session_variance + within) if session_variance + within > 0 else 1.0
    return (2 * share + 1) / 3


def _squared_skew(values: Sequence[float], sizes: Array, alike: float) -> float:
    """The squared skewness of the mean, as if a session's part of a value were as skewed as single values are.

    Of so many independent values as theirs are worth, normal ones show a square of 6 / number by chance.
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
    """Bell and McCaffrey's: how many sessions of equal size the squared residuals are worth, less one."""
    number = float(sizes.sum())
    variance = alike * sizes**2 + (1 - alike) * sizes
    scale = 1 / (1 - sizes / number)
    # K = A (D - n v' - v n' + n n' sum v) A with n, v as shares: its trace and its square's, without the matrix.
    share, total = sizes / number, float(variance.sum())
    diagonal = scale * (variance - 2 * share * variance + share**2 * total)
    cross = _square_of(share * np.sqrt(scale), variance * np.sqrt(scale), total)
    off = cross - float((scale**2 * (-2 * share * variance + share**2 * total) ** 2).sum())
    return max(1.0, float(diagonal.sum()) ** 2 / (float((diagonal**2).sum()) + off))


def _square_of(share: Array, variance: Array, total: float) -> float:
    """Sum of squares of all entries -s_i v_j - v_i s_j + s_i s_j total."""
    ss, vv, sv = (float((a * b).sum()) for a, b in ((share, share), (variance, variance), (share, variance)))
    return 2 * ss * vv + 2 * sv**2 + total**2 * ss**2 - 4 * total * ss * sv


def _bootstrap_radius(sums: Array, sizes: Array, mean: float, seed: int) -> float:
    """Sessions are drawn with replacement; how far each draw's mean lies from `mean`, by its own spread."""
    groups, number = len(sizes), float(sizes.sum())
    draws = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=_RESAMPLES)
    drawn = draws @ sizes
    means = (draws @ sums) / drawn
    squares = draws @ sums**2 - 2 * means * (draws @ (sums * sizes)) + means**2 * (draws @ sizes**2)
    usual = groups / (groups - 1)
    floor = 1e-12 * float((sums**2).sum() + 1e-300)
    spreads = np.sqrt(np.maximum(squares, floor) * usual) / drawn
    distances = np.sort(np.abs(means - mean) / spreads)
    spread = math.sqrt(usual * float(((sums - mean * sizes) ** 2).sum())) / number
    return float(distances[math.ceil(_LEVEL * (_RESAMPLES + 1)) - 1]) * spread


@lru_cache(maxsize=512)
def t_quantile(probability: float, freedom: float) -> float:
    """Of Student's t: x = sqrt(df) tan(angle), and the angle's density is cos(angle)^(df - 1) over half a circle."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)

    def below(angle: float) -> float:
        angles = np.linspace(0.0, angle, 201)
        heights = np.cos(angles) ** (freedom - 1)
        weights = np.ones(201)
        weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
        return 0.5 + math.exp(log_scale) * float((weights * heights).sum()) * angle / 600

    low, high = 0.0, math.pi / 2
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
