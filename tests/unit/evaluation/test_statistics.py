"""Intervals over sessions against planted truth: how often they hold it, and what is said of an effect of zero."""

from __future__ import annotations

import numpy as np
import pytest
from planted_effects import planted, planted_repeats

from composer_replication.evaluation.figures import (
    Interval,
    _t_quantile,
    repeated_interval,
)
from composer_replication.evaluation.verdict import _verdict_word


def session_interval(values, sessions, *, seed=0):
    return repeated_interval([values], sessions, seed=seed)


# (sessions, sizes, shape): few and many, equal and very unequal, skewed.
CASES = [
    (5, "equal", "normal"),
    (8, "unequal", "normal"),
    (12, "wild", "normal"),
    (30, "unequal", "normal"),
    (8, "equal", "skewed"),
    (12, "unequal", "skewed"),
    (30, "wild", "skewed"),
]


def said_of(case, effect, number):
    """How often the interval holds the truth, and how often each word was said."""
    sessions, sizes, shape = case
    held, words = 0, {"better": 0, "worse": 0, "no_difference": 0, "too_thin": 0}
    for seed in range(number):
        rng = np.random.default_rng([seed, sessions, len(sizes), len(shape), 5])
        values, names = planted(rng, sessions=sessions, sizes=sizes, shape=shape, effect=effect)
        found = session_interval(values, names, seed=seed)
        held += found.low <= effect <= found.high
        words[_verdict_word(found, higher_is_better=True, fewest_sessions=5)] += 1
    return held / number, {word: each / number for word, each in words.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_interval_holds_the_truth_about_as_often_as_it_says(case, note):
    number = 60
    note(f"coverage of the 95% interval, {case}: {number} simulations (make test-full: 1,000)")
    held, words = said_of(case, 0.0, number)
    # 95% of 60, give or take three standard deviations of the draw.
    assert held >= 0.86, held
    assert words["no_difference"] >= 0.86, words
    assert words["too_thin"] == 0


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_an_effect_of_zero_is_called_no_difference_in_95_percent_and_more(case):
    held, words = said_of(case, 0.0, 4000)  # of 1,000 a share has a spread of 0.7 points, of these half of that
    assert 0.95 <= held <= 0.97, held
    assert words["no_difference"] == held


@pytest.mark.full
@pytest.mark.parametrize("effect", [0.8, -0.8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_over_1000_simulations_coverage_is_between_93_and_97_percent(case, effect):
    held, words = said_of(case, effect, 1000)
    assert 0.93 <= held <= 0.97, held
    if case[0] >= 12:
        assert words["better" if effect > 0 else "worse"] >= 0.6, words
        assert words["worse" if effect > 0 else "better"] == 0, words


def test_a_large_effect_is_called_by_its_sign_and_the_direction_that_is_better():
    values, names = planted(np.random.default_rng(1), sessions=20, sizes="unequal", shape="normal", effect=2.0)
    up = session_interval(values, names)
    down = session_interval([-each for each in values], names)
    assert _verdict_word(up, higher_is_better=True, fewest_sessions=5) == "better"
    assert _verdict_word(up, higher_is_better=False, fewest_sessions=5) == "worse"
    assert _verdict_word(down, higher_is_better=True, fewest_sessions=5) == "worse"
    assert (down.low, down.high) == pytest.approx((-up.high, -up.low))


def test_the_interval_depends_on_values_and_sessions_alone():
    values, names = planted(np.random.default_rng(2), sessions=9, sizes="unequal", shape="skewed", effect=0.2)
    found = session_interval(values, names, seed=3)
    order = np.random.default_rng(3).permutation(len(values))
    again = session_interval([values[at] for at in order], [names[at] for at in order], seed=3)
    assert again == pytest.approx(found)
    shifted = session_interval([each + 5.0 for each in values], names, seed=3)
    assert (shifted.low, shifted.high) == pytest.approx((found.low + 5.0, found.high + 5.0))


def test_sites_of_one_session_do_not_count_as_many_sessions():
    """Each value ten times over in its session says nothing new; as sessions of their own it would."""
    values = [0.9, 0.1, 1.3, -0.2, 0.7, 0.4]
    names = list("abcdef")
    once = session_interval(values, names)
    ten = session_interval([each for each in values for _ in range(10)], [each for each in names for _ in range(10)])
    assert (ten.low, ten.high) == pytest.approx((once.low, once.high))
    assert (ten.num_values, ten.num_sessions) == (60, 6)


# (repeats, spread of their luck): a training of which nothing is luck, as much as sessions, and mostly luck.
REPEATED = [(3, 0.0), (3, 0.3), (4, 0.1), (4, 0.3), (4, 1.0), (6, 0.3), (6, 1.0)]


def covered(repeats, luck, number, *, effect=0.0, shape="normal"):
    """Shares of simulations whose interval holds the effect: over both, and over sessions alone."""
    both = alone = 0
    for seed in range(number):
        rng = np.random.default_rng([seed, repeats, int(10 * luck), len(shape), 7])
        case = {"sessions": 20, "sizes": "unequal", "shape": shape, "effect": effect}
        rows, names = planted_repeats(rng, repeats=repeats, luck=luck, **case)
        found = repeated_interval(rows, names, seed=seed)
        both += found.low <= effect <= found.high
        found = session_interval(np.mean(rows, axis=0).tolist(), names, seed=seed)
        alone += found.low <= effect <= found.high
    return both / number, alone / number


def test_an_interval_over_repeats_holds_what_one_over_sessions_alone_does_not():
    both, alone = covered(4, 1.0, 60)
    assert both >= 0.86
    assert alone <= 0.75


@pytest.mark.full
@pytest.mark.parametrize("shape", ["normal", "skewed"])
@pytest.mark.parametrize(("repeats", "luck"), REPEATED)
def test_over_2000_simulations_the_interval_over_repeats_covers_93_to_97_percent(repeats, luck, shape):
    both, _ = covered(repeats, luck, 2000, effect=0.5, shape=shape)
    assert 0.93 <= both <= 0.97, both


@pytest.mark.full
@pytest.mark.parametrize("luck", [0.0, 0.3, 1.0])
def test_two_repeats_show_little_and_their_interval_is_rather_too_wide(luck):
    assert covered(2, luck, 1000)[0] >= 0.94


def test_repeats_that_are_the_same_add_nothing_and_one_is_the_interval_over_sessions():
    values, names = planted(np.random.default_rng(4), sessions=9, sizes="unequal", shape="normal", effect=0.2)
    alone = session_interval(values, names, seed=3)
    assert repeated_interval([values], names, seed=3) == alone
    for times in (2, 5):
        assert repeated_interval([values] * times, names, seed=3) == pytest.approx(alone._replace(num_repeats=times))


def test_luck_that_all_sites_share_widens_the_interval_by_student_s_t():
    """Sites that do not differ: the repeats' means are all there is, and their interval that of the textbook."""
    moved = [0.0, 1.0, 2.0, 5.0]
    found = repeated_interval([[each] * 6 for each in moved], list("abcdef"))
    radius = 3.182446 * np.std(moved, ddof=1) / 2
    assert (found.low, found.high) == pytest.approx((2.0 - radius, 2.0 + radius), rel=1e-5)
    assert (found.num_repeats, found.num_values, found.num_sessions) == (4, 6, 6)
    two = repeated_interval([[each] * 6 for each in moved[:2]], list("abcdef"))
    assert (two.low, two.high) == pytest.approx((0.5 - 12.7062 / 2, 0.5 + 12.7062 / 2), rel=1e-5)


def test_one_session_has_a_mean_and_no_interval_and_is_too_thin():
    found = session_interval([1.0, 2.0], ["a", "a"])
    assert found == Interval(1.5, None, None, 2, 1)
    assert _verdict_word(found, higher_is_better=True, fewest_sessions=2) == "too_thin"


def test_values_that_are_all_zero_have_an_interval_of_zero_and_no_difference():
    found = session_interval([0.0] * 12, list("aabbccddeeff"))
    assert (found.low, found.high, found.smallest) == (0.0, 0.0, 0.0)
    assert _verdict_word(found, higher_is_better=True, fewest_sessions=5) == "no_difference"


def test_the_smallest_effect_is_seen_in_about_four_of_five_repeats():
    smallest = np.median(
        [
            session_interval(
                *planted(np.random.default_rng(seed), sessions=20, sizes="equal", shape="normal", effect=0.0)
            ).smallest
            for seed in range(30)
        ]
    )
    seen = [
        session_interval(
            *planted(np.random.default_rng(seed), sessions=20, sizes="equal", shape="normal", effect=float(smallest))
        ).excludes_zero
        for seed in range(100, 200)
    ]
    assert 0.65 <= np.mean(seen) <= 0.92


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 9, 2.26216), (0.8, 9, 0.883404), (0.975, 3000, 1.960755)],
)
def test_student_s_t_as_tables_have_it(probability, freedom, expected):
    assert _t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-5)
