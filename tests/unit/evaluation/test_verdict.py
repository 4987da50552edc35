"""What the verdict says beside its word: of the control, and of what got worse."""

from __future__ import annotations

import pytest

from composer_replication.evaluation.figures import Value
from composer_replication.evaluation.verdict import verdict_of

SPREAD = (-0.1, 0.05, 0.0, 0.1, -0.05, 0.02)


def values(after, control=0.0):
    """A value a session, around these means."""
    changes = ({"after": after + each, "control": control - each} for each in SPREAD)
    return [Value(f"session-{at}", "kind", change) for at, change in enumerate(changes)]


def said(every, primary="forced_gap", **settings):
    verdict, _ = verdict_of(primary, every, **{"has_control": True, "fewest_sessions": 5, "seed": 0, **settings})
    return verdict["word"], verdict["sentences"]


@pytest.mark.parametrize(
    ("after", "control", "word", "expected"),
    [
        (1.0, 0.0, "better", "what the hints and pairs say made the change"),
        (1.0, 1.0, "better", "any training of this kind may have done it"),
        (1.0, 2.0, "better", "the control moved further"),
        (-1.0, 0.0, "worse", "what the hints and pairs say made the change"),
        (-1.0, -2.0, "worse", "the control moved further"),
    ],
)
def test_the_change_is_the_hints_only_where_the_control_moved_less_the_same_way(after, control, word, expected):
    got, sentences = said({"forced_gap": values(after, control)})
    assert got == word
    claims = ("made the change", "any training", "moved further")
    assert [each for each in claims if each in sentences[1]] == [each for each in claims if each in expected]


def test_the_luck_of_shuffles_is_in_the_interval_of_several_and_of_one_it_is_said_that_it_is_not():
    one = values(1.0)
    assert "over 1 shuffle, whose luck it leaves out)" in said({"forced_gap": one})[1][1]
    lucky = [each._replace(change={**each.change, "control-2": 3.0, "control-3": -2.5}) for each in one]
    sentence = said({"forced_gap": lucky})[1][1]
    assert "over 3 shuffles)" in sentence
    assert "any training of this kind may have done it" in sentence  # one shuffle moved further than the training
    alike = [each._replace(change={**each.change, "control-2": 0.01, "control-3": -0.02}) for each in one]
    assert "made the change" in said({"forced_gap": alike})[1][1]


def test_what_got_worse_besides_is_named_and_what_did_not_is_not():
    every = {
        "forced_gap": values(1.0),
        "forced_good": values(-1.0),
        "loss_good_turns": values(1.0),
        "sampled_unparsed": values(-1.0),
        "sampled_failures": values(0.0),
    }
    word, sentences = said(every, has_control=False)
    assert word == "better"
    besides = sentences[1].partition("Worse besides: ")[2]
    assert "good calls: change of log-prob -0.997 nats a token" in besides
    assert "loss on good turns +1 nats a token" in besides
    assert "drawn" not in besides
    assert "Worse besides" not in said({"forced_gap": values(1.0)}, has_control=False)[1][1]


def test_values_without_spread_are_no_proof_and_it_is_said():
    same = [Value(f"session-{at}", None, {"after": 0.1}) for at in range(6)]
    word, sentences = said({"forced_gap": same}, has_control=False)
    assert word == "too_thin"
    assert "the same in all 6 sites of 6 sessions" in sentences[0]
    assert "no spread" in sentences[1]
