"""A mean over sites with an interval over sessions: what a difference is worth when sessions are few and unequal.

Sites of one session are alike, so sessions are what is drawn. The estimate m is the mean of all values; with S_g and
n_g the sum and number of values of session g, e_g = S_g - m n_g, N = sum n_g and G sessions,

    se^2   = sum e_g^2 / (1 - n_g / N) / N^2                        a large session pulls m towards itself
    radius = half of t(0.975, df) se + half of the bootstrap's      df: Bell and McCaffrey's, from the unequal sizes
                                                                    bootstrap: 95% quantile of |m* - m| / se*, times se

Each half alone errs on one side: the first covers too seldom where values are skewed, the second where sessions are few
and unequal; a percentile bootstrap covers 75 to 88% with up to 12 sessions. Chosen by simulation: decision 0019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Word = Literal["better", "worse", "no_difference", "too_thin"]
_RESAMPLES = 999
_LEVEL, _POWER = 0.95, 0.8
_MOST_TIMES = 1.4
"""With very few sessions a resample may have almost no spread, and the bootstrap's radius no bound."""
_NO_SPREAD = 1e-9
"""Of the mean: what rounding leaves of values that are all the same."""
Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its 95% interval. `smallest` is seen in four of five repeats.

    Without two sessions there is none, nor where all values are the same, except that of nothing moved: 0 to 0.
    """

    estimate: float
    low: float | None
    high: float | None
    num_values: int
    num_sessions: int
    smallest: float | None = None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


def session_interval(values: Sequence[float], sessions: Sequence[str], *, seed: int = 0) -> Interval:
    """The mean of `values`, one a site, with the interval that the sessions they are from give it."""
    sums, sizes = _by_session(values, sessions)
    mean = math.fsum(values) / len(values)
    if len(sizes) < 2:
        return Interval(mean, None, None, len(values), len(sizes))
    residuals = sums - mean * sizes
    shares = sizes / sizes.sum()
    spread = math.sqrt(float((residuals**2 / (1 - shares)).sum())) / float(sizes.sum())
    if mean and spread <= _NO_SPREAD * abs(mean):
        return Interval(mean, None, None, len(values), len(sizes))
    freedom = _degrees_of_freedom(sizes, _alike(values, sums, sizes))
    by_t = t_quantile(0.5 + _LEVEL / 2, freedom) * spread
    by_bootstrap = min(_bootstrap_radius(sums, sizes, mean, seed), _MOST_TIMES * by_t)
    radius = (by_t + by_bootstrap) / 2
    smallest = radius + t_quantile(_POWER, freedom) * spread
    return Interval(mean, mean - radius, mean + radius, len(values), len(sizes), smallest)


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
    place = {name: at for at, name in enumerate(names)}
    sums, sizes = np.zeros(len(names)), np.zeros(len(names))
    for value, session in zip(values, sessions, strict=True):
        sums[place[session]] += value
        sizes[place[session]] += 1
    return sums, sizes


def _alike(values: Sequence[float], sums: Array, sizes: Array) -> float:
    """How alike the values of one session are (0 to 1): what they show, and a third of the way on; few show little."""
    number, groups = float(sizes.sum()), len(sizes)
    if number <= groups:
        return 1.0
    within = (float(np.square(np.asarray(values)).sum()) - float((sums**2 / sizes).sum())) / (number - groups)
    between = float((sizes * (sums / sizes - sums.sum() / number) ** 2).sum()) / (groups - 1)
    usual = (number - float((sizes**2).sum()) / number) / (groups - 1)
    own = max(0.0, (between - within) / usual)
    share = own / (own + within) if own + within > 0 else 1.0
    return (2 * share + 1) / 3


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
