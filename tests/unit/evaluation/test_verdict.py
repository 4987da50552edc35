"""What the verdict says beside its word: of the control, and of what got worse."""

from __future__ import annotations

import re

import pytest

from composer_replication.evaluation.figures import METRICS, Value
from composer_replication.evaluation.verdict import _verdict_and_power

SPREAD = (-0.1, 0.05, 0.0, 0.1, -0.05, 0.02)


def values(after, control=0.0):
    """A value a session, around these means."""
    changes = ({"after": after + each, "control": control - each} for each in SPREAD)
    return [Value(f"session-{at}", "kind", change) for at, change in enumerate(changes)]


def of(every, primary="forced_gap", **settings):
    return _verdict_and_power(primary, every, **{"has_control": True, "fewest_sessions": 5, "seed": 0, **settings})


def said(every, primary="forced_gap", **settings):
    verdict, _ = of(every, primary, **settings)
    return verdict["word"], verdict["sentences"]


def remarks(every, **settings):
    return of(every, **settings)[0]["remarks"]


def beside_control(after, control=0.0, *shuffles):
    """What is said of a change beside its control: the word, the sentence, what it claims, and what its figures show.

    A control with several shuffles moved by `shuffles` in the later ones. The claim comes after the last figure.
    """
    later = {f"control-{at}": moved for at, moved in enumerate(shuffles, start=2)}
    every = [each._replace(change={**each.change, **later}) for each in values(after, control)]
    word, (_, sentence) = said({"forced_gap": every})
    *_, low, high = (float(figure) for figure in re.findall(r"[-+]\d[\d.]*", sentence))  # of the difference
    shown = "as far" if low <= 0 <= high else "less" if (low > 0) == (after > 0) else "further"
    return word, sentence, sentence.rpartition(")")[2], shown


def test_the_change_is_the_hints_only_where_the_control_moved_less_the_same_way():
    cases = {
        (1.0, 0.0): ("better", "less"),
        (1.0, 1.0): ("better", "as far"),
        (1.0, 2.0): ("better", "further"),
        (-1.0, 0.0): ("worse", "less"),
        (-1.0, -2.0): ("worse", "further"),
    }
    claims = {"less": set(), "as far": set(), "further": set()}
    for (after, control), expected in cases.items():
        word, _, claim, shown = beside_control(after, control)
        assert (word, shown) == expected
        claims[shown].add(claim)
    assert [len(each) for each in claims.values()] == [1, 1, 1]
    assert len(set().union(*claims.values())) == 3


def test_the_luck_of_shuffles_is_in_the_interval_of_several_and_of_one_it_is_said_that_it_is_not():
    _, alone, made_by_hints, _ = beside_control(1.0)
    assert re.search(r"\b1 shuffle\b", alone)
    _, lucky, claim, shown = beside_control(1.0, 0.0, 3.0, -2.5)
    assert re.search(r"\b3 shuffles\b", lucky)
    assert shown == "as far"  # one shuffle moved further than the training
    assert claim == beside_control(1.0, 1.0)[2]
    _, alike, claim, shown = beside_control(1.0, 0.0, 0.01, -0.02)
    assert (shown, claim) == ("less", made_by_hints)
    without_figures = (re.sub(r"[-+\d.]+|shuffles?", "", each) for each in (alone, alike))
    assert len(next(without_figures)) > len(next(without_figures))  # more is said of one


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
    assert re.search(r"-0\.997\b.*\bhigher\b.*\+1\b.*\blower\b", besides)
    named = [name for name in every if METRICS[name].label[1:] in besides]
    assert named == ["forced_good", "loss_good_turns"]
    assert remarks({"forced_gap": values(1.0)}, has_control=False) == []


def test_values_without_spread_are_no_proof_and_it_is_said():
    same = [Value(f"session-{at}", None, {"after": 0.1}) for at in range(6)]
    word, sentences = said({"forced_gap": same}, has_control=False)
    assert word == "too_thin"
    assert re.search(r"\b6 sites\b.*\b6 sessions\b", sentences[0])
    assert "95%" not in sentences[0]
    power = of({"forced_gap": same}, has_control=False)[1]
    assert power["smallest_effect"] is None
    assert sentences[1] == power["sentence"]
    assert not re.search(r"\d", sentences[1])


def moved(size, number=6):
    """Sites that each moved by about this much, one way or the other."""
    return [
        Value(f"session-{at}", "kind", {"after": (-1) ** at * size * (1 + at / 9), "control": 0.0})
        for at in range(number)
    ]


@pytest.mark.parametrize(("size", "num_remarks", "advises_steps"), [(0.0, 1, False), (0.002, 1, True), (0.2, 0, False)])
def test_it_is_said_when_nothing_moved(size, num_remarks, advises_steps):
    every = {"forced_gap": moved(size), "forced_erring": moved(size), "forced_good": moved(size)}
    word, sentences = said(every, has_control=False)
    assert word == "no_difference"
    told = remarks(every, has_control=False)
    assert len(told) == num_remarks
    assert ("train.optimiser.steps" in " ".join(told)) is advises_steps
    assert ("+0 to +0" in sentences[0]) is False
    assert re.search(r"\b6 sites\b.*\b6 sessions\b", sentences[0])
    assert ("95%" in sentences[0]) is (size > 0)


def test_actions_that_changed_are_a_movement():
    still = {"forced_gap": moved(0.0), "forced_erring": moved(0.0), "sampled_length": moved(5.0)}
    assert remarks(still, has_control=False) == []


@pytest.mark.parametrize(("control", "is_said"), [(1.0, True), (0.0, False)])
def test_a_control_that_moved_is_remarked_whatever_the_verdict(control, is_said):
    for after, settings in ((1.0, {}), (0.0, {}), (1.0, {"fewest_sessions": 9})):
        told = " ".join(remarks({"forced_gap": values(after, control)}, **settings))
        assert bool(re.search(r"\bcontrol\b.*\+1\b", told)) is is_said
        assert ("6 sessions" in told) is (is_said and bool(settings))  # too few to be sure of it
    assert "control" not in " ".join(remarks({"forced_gap": values(1.0, control)}, has_control=False))


def test_of_a_control_that_moved_the_other_way_it_is_remarked_that_it_did():
    (same_way,), (other_way,) = (remarks({"forced_gap": values(1.0, control)}) for control in (1.0, -1.0))
    assert re.search(r"\bcontrol\b.*-1\b", other_way)
    assert re.sub(r"[-+\d.]+", "", other_way) != re.sub(r"[-+\d.]+", "", same_way)


def test_with_too_few_sessions_no_smallest_effect_is_named():
    verdict, power = of({"forced_gap": values(1.0)}, fewest_sessions=9)
    assert verdict["word"] == "too_thin"
    assert power["smallest_effect"] is None
    assert re.findall(r"\d+", power["sentence"]) == ["9"]
    assert of({"forced_gap": values(1.0)})[1]["smallest_effect"] > 0


@pytest.mark.parametrize("name", ["forced_gap", "forced_erring"])
def test_the_figure_says_which_way_is_better(name):
    better = {"forced_gap": "higher", "forced_erring": "lower"}[name]
    assert re.search(rf"\b{better}\b.*\b95%", said({name: values(1.0)}, name)[1][0])
