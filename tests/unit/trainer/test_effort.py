"""The effort penalty: the published formula by hand, its shape, and what of a rollout it counts."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.trainer.rollouts.effort import (
    EffortWeights,
    _effort_cost,
    _RolloutEffort,
    effort_penalty_reward,
)
from refusals import refusal

ROUNDING = 1e-12
efforts = st.floats(0, 1e6)
bends = st.floats(0, 1e3)
powers = st.one_of(st.floats(0, 5), st.floats(-1e-6, 1e-6).map(lambda small: 1.0 + small))


class Words:
    """One token a word."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [0] * len(text.split())


@pytest.mark.parametrize(
    ("x", "k", "q", "cost"),
    [
        (4.0, 2.0, 0.5, 2.0),  # (9^0.5 - 1) / (2 * 0.5)
        (3.0, 1.0, 2.0, 0.75),  # (1/4 - 1) / -1
        (7.0, 1.0, 1.0, math.log(8.0)),
        (26.0, 1.0, 2 / 3, 6.0),  # (27^(1/3) - 1) / (1/3)
        (5.0, 3.0, 0.0, 5.0),
        (5.0, 0.0, 0.7, 5.0),
        (0.0, 2.0, 0.5, 0.0),
    ],
)
def test_values_worked_by_hand(x: float, k: float, q: float, cost: float) -> None:
    assert _effort_cost(x, k=k, q=q) == pytest.approx(cost, rel=1e-14, abs=0)


@pytest.mark.parametrize("away", [1e-15, 1e-12, 1e-9, 1e-6, 1e-3, -1e-12, -1e-6])
def test_near_q_1_it_is_exact_and_has_no_step(away: float) -> None:
    x, k, q = 12.5, 0.4, 1.0 + away
    with localcontext() as context:
        context.prec = 60
        power = Decimal(1) - Decimal(q)
        exact = float(((1 + Decimal(k) * Decimal(x)) ** power - 1) / (Decimal(k) * power))
    assert _effort_cost(x, k=k, q=q) == pytest.approx(exact, rel=1e-14, abs=0)
    assert abs(_effort_cost(x, k=k, q=q) - _effort_cost(x, k=k, q=1.0)) <= 5 * abs(away)


@given(st.tuples(efforts, efforts), bends, powers)
def test_more_effort_never_costs_less(both: tuple[float, float], k: float, q: float) -> None:
    less, more = sorted(both)
    low, high = _effort_cost(less, k=k, q=q), _effort_cost(more, k=k, q=q)
    assert 0 <= low <= high * (1 + ROUNDING)
    assert high <= more * (1 + ROUNDING)


@given(st.tuples(efforts, efforts), st.floats(0, 1), bends, powers)
def test_the_cost_is_concave(both: tuple[float, float], share: float, k: float, q: float) -> None:
    one, other = both
    between = _effort_cost(share * one + (1 - share) * other, k=k, q=q)
    chord = share * _effort_cost(one, k=k, q=q) + (1 - share) * _effort_cost(other, k=k, q=q)
    assert between >= chord - ROUNDING * max(1.0, chord)


@pytest.mark.parametrize(
    ("x", "k", "q", "name", "got"),
    [
        (-1.0, 1.0, 1.0, "x", "-1.0"),
        (1.0, -1.0, 1.0, "k", "-1.0"),
        (1.0, 1.0, math.nan, "q", "nan"),
        (math.inf, 1, 1, "x", "inf"),
    ],
)
def test_what_is_no_effort_is_refused(x: float, k: float, q: float, name: str, got: str) -> None:
    with refusal(InputError, what=name, got=got):
        _effort_cost(x, k=k, q=q)


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ROLLOUT = [
    {"role": "assistant", "reasoning_content": "I must look", "content": "", "tool_calls": [call("Read ", "a b")]},
    {"role": "tool", "name": "Read", "content": "one two three four"},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "<think>so that is it</think>two calls"}],
        "tool_calls": [call("Run ", {"x": 1}), call("Run ", {"y": 22})],
    },
    {"role": "tool", "name": "Run", "content": "five"},
    {"role": "tool", "name": "Run", "content": "six"},
    {"role": "assistant", "content": "all done now"},
]


def test_a_rollout_is_counted_by_what_its_messages_hold() -> None:
    penalty = effort_penalty_reward(Words())
    # Arguments that are no text are written as JSON: {"x": 1} has two words, with the name three.
    assert penalty.effort(ROLLOUT, []) == _RolloutEffort(
        thinking=3 + 4, calls_text=3 + 3 + 3, tool_output=4 + 1 + 1, final=2 + 3, calls=3, turns=3
    )


def test_the_penalty_is_the_cost_of_the_weighed_sum() -> None:
    weights = EffortWeights(thinking=0.1, calls_text=0.2, tool_output=0.05, final=0.3, calls=1.0, turns=2.0)
    logged: dict[str, float] = {}
    penalty = effort_penalty_reward(Words(), weights=weights, k=2.0, q=0.5)
    [reward, nothing] = penalty(
        prompts=[[], []], completions=[ROLLOUT, []], completion_ids=[[1], [1]], log_metric=logged.__setitem__
    )
    x = 0.1 * 7 + 0.2 * 9 + 0.05 * 6 + 0.3 * 5 + 1.0 * 3 + 2.0 * 3
    assert reward == pytest.approx(-(math.sqrt(1 + 2 * x) - 1), rel=1e-12)
    assert nothing == 0.0
    assert logged == {"effort/x": pytest.approx(x / 2)}


@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        ("plain words", 0),
        ("<think>a b</think> c", 2),
        ("a b </think> c", 2),  # the template opened the thought
        ("c <think>a b", 2),  # cut off inside a thought
    ],
)
def test_a_completion_that_is_text_is_counted_by_its_ids(text: str, thinking: int) -> None:
    effort = effort_penalty_reward(Words()).effort(text, [7] * 10)
    assert effort == _RolloutEffort(thinking=thinking, final=10 - thinking, turns=1)


def test_trl_logs_it_under_a_name_of_its_own() -> None:
    assert effort_penalty_reward(Words()).__name__ == "effort_penalty"


def test_bad_settings_are_refused_before_the_first_rollout() -> None:
    with refusal(InputError, what="q", got="-1"):
        effort_penalty_reward(Words(), q=-1.0)
    with refusal(InputError, what="calls", got="-0.1"):
        EffortWeights(calls=-0.1)
