"""Intervals over sessions against planted truth: how often they hold it, and what is said of an effect of zero."""

from __future__ import annotations

import numpy as np
import pytest
from planted_effects import planted

from composer_replication.evaluation.statistics import Interval, session_interval, t_quantile, verdict_word

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
        words[verdict_word(found, higher_is_better=True, fewest_sessions=5)] += 1
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
@pytest.mark.parametrize("effect", [0.0, 0.8, -0.8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_over_1000_simulations_coverage_is_between_93_and_97_percent(case, effect):
    held, words = said_of(case, effect, 1000)
    assert 0.93 <= held <= 0.97, held
    if effect == 0.0:  # an exponential's long tail is a little more than any interval of a few sessions allows for
        assert words["no_difference"] >= (0.95 if case[2] == "normal" else 0.94), words
    elif case[0] >= 12:
        assert words["better" if effect > 0 else "worse"] >= 0.6, words
        assert words["worse" if effect > 0 else "better"] == 0, words


def test_a_large_effect_is_called_by_its_sign_and_the_direction_that_is_better():
    values, names = planted(np.random.default_rng(1), sessions=20, sizes="unequal", shape="normal", effect=2.0)
    up = session_interval(values, names)
    down = session_interval([-each for each in values], names)
    assert verdict_word(up, higher_is_better=True, fewest_sessions=5) == "better"
    assert verdict_word(up, higher_is_better=False, fewest_sessions=5) == "worse"
    assert verdict_word(down, higher_is_better=True, fewest_sessions=5) == "worse"
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


def test_one_session_has_a_mean_and_no_interval_and_is_too_thin():
    found = session_interval([1.0, 2.0], ["a", "a"])
    assert found == Interval(1.5, None, None, 2, 1)
    assert verdict_word(found, higher_is_better=True, fewest_sessions=2) == "too_thin"


def test_values_that_are_all_zero_have_an_interval_of_zero_and_no_difference():
    found = session_interval([0.0] * 12, list("aabbccddeeff"))
    assert (found.low, found.high, found.smallest) == (0.0, 0.0, 0.0)
    assert verdict_word(found, higher_is_better=True, fewest_sessions=5) == "no_difference"


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
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-5)
