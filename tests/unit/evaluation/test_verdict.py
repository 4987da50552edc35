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


def of(every, primary="forced_gap", **settings):
    return verdict_of(primary, every, **{"has_control": True, "fewest_sessions": 5, "seed": 0, **settings})


def said(every, primary="forced_gap", **settings):
    verdict, _ = of(every, primary, **settings)
    return verdict["word"], verdict["sentences"]


def remarks(every, **settings):
    return of(every, **settings)[0]["remarks"]


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
    assert said(every, has_control=False)[0] == "better"
    (besides,) = remarks(every, has_control=False)
    assert besides.startswith("Worse besides: ")
    assert "good calls, change of log-prob -0.997 nats a token (higher is better)" in besides
    assert "loss on good turns +1 nats a token (lower is better)" in besides
    assert "drawn" not in besides
    assert remarks({"forced_gap": values(1.0)}, has_control=False) == []


def test_values_without_spread_are_no_proof_and_it_is_said():
    same = [Value(f"session-{at}", None, {"after": 0.1}) for at in range(6)]
    word, sentences = said({"forced_gap": same}, has_control=False)
    assert word == "too_thin"
    assert "the same in all 6 sites of 6 sessions" in sentences[0]
    assert "no spread" in sentences[1]


def moved(size, number=6):
    """Sites that each moved by about this much, one way or the other."""
    return [
        Value(f"session-{at}", "kind", {"after": (-1) ** at * size * (1 + at / 9), "control": 0.0})
        for at in range(number)
    ]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0.0, "Nothing moved"), (0.002, "Training hardly moved the model"), (0.2, None)],
)
def test_it_is_said_when_nothing_moved(size, expected):
    every = {"forced_gap": moved(size), "forced_erring": moved(size), "forced_good": moved(size)}
    word, sentences = said(every, has_control=False)
    assert word == "no_difference"
    told = [each for each in remarks(every, has_control=False) if "moved" in each]
    assert (told == []) is (expected is None)
    assert all(each.startswith(expected) for each in told)
    assert ("+0 to +0" in sentences[0]) is False
    assert ("the same in all 6 sites of 6 sessions" in sentences[0]) is (size == 0)


def test_actions_that_changed_are_a_movement():
    still = {"forced_gap": moved(0.0), "forced_erring": moved(0.0), "sampled_length": moved(5.0)}
    assert remarks(still, has_control=False) == []


@pytest.mark.parametrize(("control", "is_said"), [(1.0, True), (0.0, False)])
def test_a_control_that_moved_is_remarked_whatever_the_verdict(control, is_said):
    for after, settings in ((1.0, {}), (0.0, {}), (1.0, {"fewest_sessions": 9})):
        told = " ".join(remarks({"forced_gap": values(after, control)}, **settings))
        assert ("The shuffled control moved this figure too" in told) is is_said
        assert ("too few" in told) is (is_said and bool(settings))
        assert "the other way" not in told
    assert "too, the other way, by -1" in " ".join(remarks({"forced_gap": values(1.0, -1.0)}))
    assert "control" not in " ".join(remarks({"forced_gap": values(1.0, control)}, has_control=False))


def test_with_too_few_sessions_no_smallest_effect_is_named():
    verdict, power = of({"forced_gap": values(1.0)}, fewest_sessions=9)
    assert verdict["word"] == "too_thin"
    assert power["smallest_effect"] is None
    assert power["sentence"] == "No smallest effect is named: errors in 9 held-out sessions are needed for that."
    assert of({"forced_gap": values(1.0)})[1]["smallest_effect"] > 0


@pytest.mark.parametrize("name", ["forced_gap", "forced_erring"])
def test_the_figure_says_which_way_is_better(name):
    better = {"forced_gap": "higher", "forced_erring": "lower"}[name]
    assert f"nats a token ({better} is better), 95% interval" in said({name: values(1.0)}, name)[1][0]
