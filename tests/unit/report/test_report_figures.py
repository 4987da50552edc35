"""Figures of the evaluation as they are drawn: on which side of 0, where on the strip, in how many digits."""

from __future__ import annotations

import re

import pytest

from composer_replication.evaluation.report.figures import (
    _ARMS,
    _SAMPLED,
    UNCHANGED,
    ReportVerdict,
    _call_mix,
    _make_figures,
    _role_changes,
    _sampled_table,
    _shuffles_sentence,
    _worse_metrics,
    signed,
)
from output_facts import lines_with


def row(
    name="forced_gap", *, arm="after", estimate=0.2, low=0.1, high=0.4, better="higher", unit="nats a token", kind=None
):
    return {
        "name": name, "arm": arm, "label": name, "unit": unit, "estimate": estimate, "low": low, "high": high, "n": 10,
        "sessions": 1, "better": better, "is_primary": name == "forced_gap", "kind": kind,
    }  # fmt: skip


def drawn(*rows):
    return _make_figures({"figures": list(rows)})


@pytest.mark.parametrize(
    ("low", "high", "better", "state"),
    [
        (0.1, 0.4, "higher", "clear"),
        (0.1, 0.4, "lower", "wrong"),
        (-0.4, -0.1, "lower", "clear"),
        (-0.4, -0.1, "higher", "wrong"),
        (-0.1, 0.4, "higher", "open"),
        (0.0, 0.4, "higher", "open"),
    ],
)
def test_an_interval_is_clear_only_on_the_better_side_of_0(low, high, better, state):
    (figure,) = drawn(row(low=low, high=high, better=better))
    assert figure.arms[0].state == state


def test_strips_of_one_unit_share_a_scale_with_0_in_the_middle():
    first, second = drawn(row(low=0.1, high=0.4), row("forced_good", low=-0.8, high=0.2, estimate=-0.3))
    assert second.arms[0].start == 50 - 46
    assert first.arms[0].start == round(50 + 46 * 0.1 / 0.8, 2)
    assert first.arms[0].width == round(46 * 0.3 / 0.8, 2)


def test_to_the_right_is_better_whatever_the_figure():
    (figure,) = drawn(row(better="lower", low=-0.4, high=-0.1, estimate=-0.2))
    assert (figure.arms[0].start, figure.arms[0].width, figure.arms[0].at) == (61.5, 34.5, 73.0)
    assert figure.arms[0].estimate == "\N{MINUS SIGN}0.200"


def test_values_that_are_all_0_are_no_interval_and_figures_without_any_change_stand_together():
    none = {"low": 0.0, "high": 0.0, "estimate": 0.0}
    shown = drawn(row(**none), row("third", **none), row("third", arm="control", **none), row("other", **none),
                  row("other", arm="control"))  # fmt: skip
    assert {each.interval for each in shown[1].arms} == {UNCHANGED}
    assert [(each.label, each.is_still) for each in shown] == [
        ("forced_gap", False),  # the primary one is shown whatever it says
        ("third", True),
        ("other", False),
    ]


def test_a_verdict_is_shown_as_a_headline_and_its_figure():
    said = ReportVerdict("better", "Better", ("It is better: good calls +1 nats.", "Then."))
    assert (said.headline, said.figure) == ("It is better.", "Good calls +1 nats.")
    bare = ReportVerdict("not_evaluated", "Not evaluated", ("Five sessions.", "Then."))
    assert (bare.headline, bare.figure) == ("Five sessions.", "")


def test_the_primary_figure_is_first_and_arms_are_in_order():
    shown = drawn(row("forced_good"), row(arm="difference"), row(arm="control"), row(arm="after"), row(kind="other"))
    assert [each.label for each in shown] == ["forced_gap", "forced_good"]
    assert [each.arm for each in shown[0].arms] == [_ARMS[arm] for arm in ("after", "control", "difference")]


def test_what_got_worse_besides_is_named_and_the_primary_and_the_control_are_not():
    wrong = {"low": -0.4, "high": -0.1, "estimate": -0.2}
    shown = drawn(row(**wrong), row("forced_good", **wrong), row("other"), row("third", arm="control", **wrong))
    assert _worse_metrics(shown) == ["forced_good (\N{MINUS SIGN}0.200 nats a token)"]


def test_a_figure_without_an_interval_is_not_known():
    (figure,) = drawn(row(low=None, high=None))
    assert (figure.arms[0].interval, figure.arms[0].state) == ("", "open")
    assert re.fullmatch(r"\D+", figure.arms[0].estimate)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.41234, "nats a token", "+0.412"),
        (-38.24, "per 1,000", "\N{MINUS SIGN}38.2"),
        (-0.00012, "nats", "\N{MINUS SIGN}0.0001"),
        (0.0000123, "nats", "0"),
        (0.04, "per 1,000", "0"),
    ],
)
def test_digits_and_signs(value, unit, text):
    assert signed(value, unit) == text


def test_what_intervals_of_a_control_are_over_is_said():
    assert _shuffles_sentence(None) == _shuffles_sentence({"figures": [{"shuffles": None}, {}]}) == ""
    of_one = _shuffles_sentence({"figures": [{"shuffles": None}, {"shuffles": 1}]})
    assert lines_with(of_one, "control", "shuffle")
    of_four = _shuffles_sentence({"figures": [{"shuffles": 4}, {"shuffles": 1}]})
    assert lines_with(of_four, "control", 4, "shuffles")
    assert "4" not in of_one


def test_changes_are_after_less_before_and_the_control_s_beside_them():
    rows = [{"role": "erring", "before": -1.0, "after": -1.5, "control": None}]
    rows += [{"role": "erring", "before": -1.0, "after": -0.5, "control": -0.75}]
    moved = _role_changes([rows])
    assert (moved.after["erring"], moved.control["erring"]) == ([-0.5, 0.5], [0.25])


def test_the_mix_of_calls_is_in_shares_and_arms_that_were_not_sampled_are_left_out():
    before = {"unparsed": 2, "calls": {"Read": 3, "Edit": 1}, "verdicts": {"fails": 1}}
    by_arm = {"before": before, "after": {"unparsed": 0, "calls": {"Read": 4}, "verdicts": {}}}
    evaluation = {"sampled": {"by_arm": {**by_arm, "control": None}}}
    assert _call_mix(evaluation) == (["before", "after"], [("Read", [0.75, 1.0]), ("Edit", [0.25, 0.0])])
    arms, ((unparsed, shares), (judged, counts)) = _sampled_table(evaluation)
    assert (arms, unparsed, shares, counts) == (["before", "after"], _SAMPLED["unparsed"], [2, 0], [1, None])
    assert lines_with(judged, "fails")
