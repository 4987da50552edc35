"""When the gate is open: own hints against others, by what was compared and by what chance does."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import pytest

from composer_replication.trainer.rollouts.hint_gate import (
    _MIN_COMPARISONS,
    HintComparison,
    HintEffect,
    HintGate,
    _HintEffectEstimator,
)
from composer_replication.trainer.rollouts.unrelated_hints import _paired_kinds


def compared(
    own: float, other: float, number: int, noise: float = 0.05, prompts: int | None = None
) -> list[HintComparison]:
    """Two kinds, each against the other, with this effect and that luck."""
    draw = random.Random(0)
    return [
        HintComparison(
            each if prompts is None else each % prompts,
            *(("a", "b") if each % 2 else ("b", "a")),
            own + draw.gauss(0, noise),
            other + draw.gauss(0, noise),
        )
        for each in range(number)
    ]


def effect_of(comparisons: Iterable[HintComparison]) -> HintEffect:
    estimator = _HintEffectEstimator()
    estimator.add(comparisons)
    return estimator.estimate()


@pytest.mark.parametrize(
    ("own", "other", "number", "has_contrast", "is_open"),
    [
        (0.3, 0.0, 19, False, None),  # too few to tell
        (0.3, 0.0, 40, False, True),
        (0.3, 0.31, 40, False, False),
        (0.3, 0.31, 40, True, False),
        (0.3, 0.25, 40, False, False),  # it does more, and most of it is what any text does
        (0.3, 0.25, 40, True, True),  # which a contrast takes off
        (0.3, 0.08, 40, False, None),  # near five times as much: as before
        (0.3, 0.04, 40, False, True),
        (0.061, 0.028, 160, False, False),  # as Qwen2.5-Coder-1.5B, which lost by it
        (0.08, 0.0, 40, False, None),  # near enough to 0.1 nats a token: as before
        (0.04, 0.0, 40, False, False),
        (-0.1, -0.3, 40, False, False),  # both make the error likelier, and that would be taught
        (0.3, -0.3, 40, False, True),
    ],
)
def test_the_gate_is_open_once_own_hints_do_more_and_mean_something(
    own: float, other: float, number: int, has_contrast: bool, is_open: bool | None
) -> None:
    """None: it cannot be told."""
    gate = HintGate(enabled=True, has_contrast=has_contrast)
    gate.add(compared(own, other, number))
    assert not gate.is_open, "until it is shown"
    told = gate.after_step(1)
    assert gate.is_open is bool(is_open)
    assert (told is None) is (is_open is None)
    if told:
        assert re.search(rf"\bchannel 2\b.*\b{number} comparisons\b", told)
        assert ("train.grpo.heed_gate" in told) is not is_open  # how to do without the gate, where it is closed
    again = HintGate(enabled=True, has_contrast=has_contrast)
    again.load_state(gate.state())
    assert again.is_open is gate.is_open
    assert gate.after_step(1) is again.after_step(1) is None, "said once"
    assert again.metrics() == gate.metrics()
    only_watched = HintGate(enabled=False, has_contrast=has_contrast)
    only_watched.add(compared(own, other, number))
    assert only_watched.after_step(1) is None
    assert only_watched.is_open


def test_the_gate_closes_and_opens_again_and_keeps_what_it_did_in_between() -> None:
    gate = HintGate(enabled=True, has_contrast=False)
    gate.add(compared(0.4, 0.0, 30))
    told = gate.after_step(1)
    assert told
    assert "train.grpo.heed_gate" not in told
    for own, is_open in ((-0.1, False), (0.4, True)):
        for _ in range(20):
            gate.add(compared(own, 0.0, 30))
            if told := gate.after_step(1):
                break
        assert told
        assert gate.is_open is is_open
        assert ("train.grpo.heed_gate" in told) is not is_open


@pytest.mark.parametrize(("own", "low", "high"), [(0.07, 1.5, 2.5), (0.045, 0.5, 1.5)])
def test_in_doubt_the_gate_stays_as_it_is_until_too_little_is_left(own: float, low: float, high: float) -> None:
    for before in (False, True):
        gate = HintGate(enabled=True, has_contrast=False)
        gate.add(compared(own, 0.0, 30, noise=0.12))
        gate.is_open = before
        gate.after_step(1)
        assert low < gate.estimator.estimate().z_score < high
        assert gate.is_open is (before and low == 1.5)


def test_an_open_gate_closes_where_what_is_left_is_what_any_text_does() -> None:
    gate = HintGate(enabled=True, has_contrast=False)
    gate.add(compared(0.3, 0.27, 40, noise=0.1))
    gate.is_open = True
    gate.after_step(1)
    assert 1.5 < gate.estimator.estimate().z_score < 2.5, "which alone would leave it open"
    assert not gate.is_open


@pytest.mark.parametrize("known", [{}, {"gates": False, "told": None}], ids=["began open", "no gate"])
def test_a_checkpoint_that_was_open_without_evidence_begins_closed(known: dict[str, Any]) -> None:
    gate = HintGate(enabled=True, has_contrast=False)
    gate.load_state({"heeding": [], "waiting": [], "last": -10, "is_open": True, **known})
    assert not gate.is_open
    heeded = HintGate(enabled=False, has_contrast=True)
    heeded.add(compared(0.3, 0.0, 40))
    heeded.after_step(1)
    gate.load_state(heeded.state())
    assert not gate.is_open
    told = gate.after_step(1)
    assert gate.is_open, "what it knows is known"
    assert told
    assert "train.grpo.heed_gate" not in told


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_what_a_text_does_wherever_it_stands_is_not_heeding(share: float) -> None:
    """Hints about a lower any turn by 0.3, those about b by 0.1; nobody reads what they say."""
    draw, effect = random.Random(1), {"a": 0.3, "b": 0.1}
    kinds = ["a" if draw.random() < share else "b" for _ in range(2000)]
    turns = [
        HintComparison(
            number,
            kind,
            other := "b" if kind == "a" else "a",
            effect[kind] + draw.gauss(0, 0.05),
            effect[other] + draw.gauss(0, 0.05),
        )
        for number, kind in enumerate(kinds)
    ]
    ignoring = effect_of(turns)
    assert ignoring.is_significant is False
    means = [turn.own_hint_nats - turn.other_hint_nats for turn in turns]
    assert share == 0.5 or abs(sum(means) / len(means)) > 0.1, "a plain mean would be fooled"
    reacting = effect_of([turn._replace(own_hint_nats=turn.own_hint_nats + 0.03) for turn in turns])
    assert reacting.is_significant is True
    assert reacting.own_hint_nats - reacting.other_hint_nats == pytest.approx(0.03, abs=0.015)
    assert reacting.is_large is ignoring.is_large is False, "most of it is what any text does"


@pytest.mark.parametrize(
    ("shares", "luck"),
    [((1, 1, 1), (1.0, 1.0, 1.0)), ((9, 1, 1), (1.0, 1.0, 1.0)), ((9, 1, 1), (0.2, 1.0, 1.0))],
)
def test_standard_errors_hold_what_chance_does(shares: tuple[int, ...], luck: tuple[float, ...]) -> None:
    """Without an effect two of them are passed upwards in about one run of forty, also where rare kinds are wild."""
    num_passed, num_decided = 0, 0
    for seed in range(1000):
        draw = random.Random(seed)
        spread = dict(zip("abc", luck, strict=True))
        estimator = _HintEffectEstimator()
        for generation in range(8):
            kinds = draw.choices("abc", shares, k=12)
            paired = dict(zip(order := draw.sample("abc", 3), [order[1], order[0], order[0]], strict=True))
            estimator.add(
                HintComparison(12 * generation + number, kind, paired[kind], draw.gauss(0, spread[kind]), 0.0)
                for number, kind in enumerate(kinds)
            )
        effect = estimator.estimate()
        num_decided += effect.num_comparisons >= _MIN_COMPARISONS
        num_passed += effect.num_comparisons >= _MIN_COMPARISONS and effect.z_score >= 2
    assert num_decided > 300
    assert num_passed <= 0.06 * num_decided


def test_one_kind_that_is_nearly_alone_says_little() -> None:
    effect = effect_of(
        HintComparison(number, *("ab" if number % 50 else "ba"), 0.3 + 0.01 * (number % 7), 0.0)
        for number in range(200)
    )
    assert effect.num_comparisons < _MIN_COMPARISONS, "four of the other kind are as good as sixteen in all"
    assert effect.is_significant is None


def test_old_comparisons_fade_and_broken_ones_are_left_out() -> None:
    gate = HintGate(enabled=True, has_contrast=False)
    for _ in range(10):
        gate.add(compared(0.1, 0.1, 60))
        gate.after_step(1)
    assert not gate.is_open
    assert 100 <= gate.estimator.estimate().num_comparisons <= 200
    steps = 0
    while not gate.is_open:
        gate.add(compared(0.5, 0.1, 60))
        gate.after_step(1)
        steps += 1
    assert steps <= 8
    before = gate.estimator.state()
    gate.add([HintComparison(1, "a", "b", float("nan"), 0.0), HintComparison(1, "b", "a", float("-inf"), 0.0)])
    gate.after_step(1)
    assert gate.estimator.state() == before


def simulated(effect: float, text: float, luck: float, seed: int) -> tuple[float, int, bool, bool]:
    """Sixty generations of eight errors of four kinds, of which one has twice the text: share of steps in which the
    gate is open, how often something is said of it, whether it is open at the end, and whether it ever is."""
    draw, gate, changes, opened = random.Random(seed), HintGate(enabled=True, has_contrast=False), 0, 0
    does = {"a": 2 * text, "b": text, "c": text, "d": text}
    for generation in range(60):
        kinds = draw.choices("abcd", (4, 2, 1, 1), k=8)
        partners = _paired_kinds(sorted(set(kinds)), "abcd", draw)
        gate.add(
            [
                HintComparison(
                    8 * generation + number,
                    kind,
                    other := str(partners[kind]),
                    does[kind] + effect + draw.gauss(0, luck),
                    does[other] + draw.gauss(0, luck),
                )
                for number, kind in enumerate(kinds)
            ]
        )
        opened += gate.is_open
        changes += gate.after_step(1) is not None
    return opened / 60, changes, gate.is_open, opened > 0


@pytest.mark.parametrize(
    ("effect", "text", "luck", "opens"),
    [
        (0.0, 0.05, 0.15, False),
        (0.0, 0.0, 0.15, False),
        (0.03, 0.02, 0.05, False),  # as real models that lost by channel 2: it is heeded, and little of it
        (0.1, 0.005, 0.15, True),
        (0.3, 0.02, 0.15, True),
    ],
)
def test_the_gate_tells_models_apart_that_heed_and_that_do_not(
    effect: float, text: float, luck: float, opens: bool
) -> None:
    runs = [simulated(effect, text, luck, seed) for seed in range(100)]
    share, changes, ends_open, ever = (sum(each[at] for each in runs) / 100 for at in range(4))
    if opens:
        assert (share >= 0.75, changes <= 1.5, ends_open >= 0.97) == (True, True, True)
    else:
        assert (share <= 0.005, ever <= 0.01, changes <= 1.5, ends_open <= 0.01) == (True, True, True, True)


def test_a_gate_that_is_taken_away_is_open_at_once() -> None:
    gate = HintGate(enabled=True, has_contrast=True)
    gate.add(compared(0.1, 0.2, 40))
    gate.after_step(1)
    assert not gate.is_open
    without = HintGate(enabled=False, has_contrast=True)
    without.load_state(gate.state())
    assert without.is_open


def test_once_enough_is_known_every_tenth_step_is_compared() -> None:
    gate = HintGate(enabled=True, has_contrast=False)
    assert gate.wants_comparisons(0)
    gate.add(compared(0.3, 0.0, 120))
    gate.after_step(1)
    asked = []
    for step in range(1, 60, 3):  # a generation every third step
        if gate.wants_comparisons(step):
            asked.append(step)
            gate.add(compared(0.3, 0.0, 4))
        assert not gate.wants_comparisons(step, is_training=False)
        gate.after_step(step + 1)
    assert asked == [13, 25, 37, 49]
    gate.after_step(100)
    assert gate.wants_comparisons(100), "a step without errors does not count as one that was compared"
    assert HintGate(enabled=False, has_contrast=True).wants_comparisons(7)


def test_rollouts_of_one_prompt_that_err_alike_count_once() -> None:
    assert effect_of(compared(0.3, 0.1, 400, prompts=40)).num_comparisons == 40
    one_way = effect_of([HintComparison(number, "a", "b", 1.0, 0.0) for number in range(50)])
    assert (one_way.num_comparisons, one_way.is_significant) == (0, None), "nothing to weigh it with"
