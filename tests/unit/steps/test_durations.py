"""What a dry run says about time: every part that will be made, as long as its own numbers say."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from composer_replication.cli.run import _estimate_times
from composer_replication.config import CrfConfig, load
from composer_replication.evaluation.evaluate import Measurable
from composer_replication.trainer.from_config.offline import TrainingPace

PACE = TrainingPace(
    speed=1e10, weights=3_000_000, tokens=1000, windows_a_step=2
)  # 1 ms for each operation a weight and token
JUDGED = Measurable(values=10, units=6, held_out=8, sessions=8)
ALL = ("train", "control", "evaluate", "report")


def parts(*overrides, made=ALL, counts=None, seconds=80.0):
    training = SimpleNamespace(
        pace=PACE, seconds=seconds, counts={"lm_ce": 9, "sites": 40} if counts is None else counts
    )
    found = _estimate_times(load(CrfConfig, None, overrides), JUDGED, training, made)
    return {each.name: (round(each.seconds, 3), each.basis) for each in found}


def test_every_part_is_there_with_its_time_and_what_that_is_based_on():
    found = parts("run.control=true", "evaluation.samples=0", "train.optimiser.steps=5")
    assert list(found) == ["warm-up", "hint proof", "training", "control", "evaluation"]
    for name, seconds, basis in (
        ("warm-up", 1800.0, r"^150 steps\b"),
        ("hint proof", 160.0, r"^40 "),
        ("training", 80.0, r"^5 steps\b.*\b2,000 tokens\b"),
    ):
        assert found[name][0] == seconds
        assert re.search(basis, found[name][1])
    assert found["control"][0] == found["training"][0]
    turns = 3 * (10 * (2 + 4) + 8 * 4) + 2 * 2 * (10 + 40)  # mistakes with good calls, good turns; token gaps of two
    assert found["evaluation"][0] == 2.0 * turns
    assert re.search(rf"^3 models\b.*\b{turns} turns$", found["evaluation"][1])


@pytest.mark.parametrize(
    ("overrides", "options", "gone"),
    [
        (["train.warmup.mode=off"], {}, "warm-up"),
        (["train.proof.on=false"], {}, "hint proof"),
        ([], {"counts": {"lm_ce": 9}}, "hint proof"),
        ([], {"counts": {"sites": 9}}, "warm-up"),
        ([], {"made": ("control", "evaluate")}, "training"),
        ([], {"made": ("train",)}, "evaluation"),
    ],
)
def test_what_will_not_be_made_takes_no_time(overrides, options, gone):
    assert gone in parts()
    assert gone not in parts(*overrides, **options)


def test_drawn_calls_take_a_token_at_a_time_and_a_control_is_a_third_model():
    short, long = (parts(f"evaluation.new_tokens={tokens}")["evaluation"][0] for tokens in (100, 200))
    assert long - short == pytest.approx(2 * 20 * 50 * 0.048)  # models, states, half of the tokens, seconds of a step
    asked = ["evaluation.token_gaps=0"]
    assert parts("run.control=true", *asked)["evaluation"][0] == pytest.approx(1.5 * parts(*asked)["evaluation"][0])
    assert parts("run.control=true", "run.shuffles=4")["evaluation"][1].startswith("6 models ")
    assert re.search(r"\b4 calls\b.*\b192 tokens\b.*\b20 states\b", parts()["evaluation"][1])


def test_where_nobody_can_say_nothing_is_said():
    assert _estimate_times(CrfConfig(), JUDGED, SimpleNamespace(pace=None, seconds=None, counts={}), ALL) is None
