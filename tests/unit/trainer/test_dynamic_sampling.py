"""Groups with equal rewards: found, drawn again, and exchanged in a batch without a trace on what is counted."""

from __future__ import annotations

import math
import random
import re
import statistics
from typing import Any, Literal

import pytest
import torch

from composer_replication.errors import InputError
from composer_replication.loss.grpo import group_advantages
from composer_replication.trainer.rollouts.resample import (
    ResampledBatch,
    _groups_to_resample,
    equal_reward_groups,
    resample,
    rows_of_groups,
)
from refusals import refusal

PAD, NAN = 99, math.nan


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([1, 1, 0, 1], [True, False]),
        ([0.1 + 0.2, 0.3, 1e-3, 0], [True, False]),  # rounding is no difference, a small reward is
        ([NAN, 1, NAN, NAN], [True, True]),  # one reward has nothing to differ from
        ([-5, -5, 1e6, 1e6 + 10], [True, False]),
        ([], []),
    ],
)
def test_a_group_is_equal_when_no_two_of_its_rewards_differ(rewards: list[float], equal: list[bool]) -> None:
    assert equal_reward_groups(rewards, 2).tolist() == equal
    assert equal_reward_groups(torch.tensor(rewards), 2).tolist() == equal


def test_nan_takes_no_part_in_a_larger_group() -> None:
    assert equal_reward_groups([NAN, 1, 1, NAN, 0, 1], 3).tolist() == [True, False]


def test_rewards_that_are_no_whole_groups_are_refused() -> None:
    with refusal(InputError, what="rewards", got="(3,)") as refused:
        equal_reward_groups([1, 2, 3], 2)
    assert re.search(r"\b2\b", refused.value.got)


def test_every_process_draws_as_many_groups_as_the_one_that_needs_most() -> None:
    equal_G = torch.tensor([False, True, True, False, False, False, False, True, False])
    assert [_groups_to_resample(equal_G, num_processes=3, rank=rank) for rank in range(3)] == [[1, 2], [0, 1], [1, 0]]
    assert _groups_to_resample(torch.zeros(4, dtype=torch.bool)) == []


def test_groups_that_lie_on_two_processes_are_refused_with_the_setting_to_change() -> None:
    with refusal(InputError, what="groups", fix="num_generations") as refused:
        _groups_to_resample(torch.ones(3, dtype=torch.bool), num_processes=2)
    assert re.search(r"\b3\b.*\b2 processes\b", refused.value.got)


def test_the_rows_of_groups_come_in_the_order_asked_for() -> None:
    assert rows_of_groups("aabbcc", [2, 0], 2) == ["c", "c", "a", "a"]


# --- the whole decision --------------------------------------------------------------------------------------------


def numbered(numbers: list[int]) -> dict[str, Any]:
    """A batch whose rows can be told apart."""
    ids = torch.tensor(numbers)[:, None]
    ones = torch.ones_like(ids)
    return {
        "prompt_ids": ids,
        "prompt_mask": ones,
        "completion_ids": ids,
        "completion_mask": ones,
        "advantages": torch.tensor(numbers, dtype=torch.float32),
        "num_items_in_batch": ones.sum(),
    }


def test_equal_groups_are_drawn_until_they_differ_or_the_rounds_are_over() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    script = iter([([10, 11, 12, 13], [0.0, 0.0, 0.0, 1.0]), ([20, 21], [1.0, 1.0])])
    asked: list[list[int]] = []

    def draw(groups: list[int]) -> ResampledBatch:
        asked.append(groups)
        numbers, found = next(script)
        return ResampledBatch(numbered(numbers), torch.tensor(found))

    batch, rewards, report = resample(
        numbered([0, 1, 2, 3, 4, 5]), rewards, draw, num_generations=2, max_resamples=2, pad_id=PAD
    )
    assert asked == [[0, 2], [0]]
    assert batch["completion_ids"][:, 0].tolist() == [0, 1, 2, 3, 12, 13]
    assert rewards.tolist() == [1, 1, 0, 1, 0, 1]
    assert report.metrics() == {
        "groups/equal": 2 / 3,
        "groups/equal_after": 1 / 3,
        "groups/drawn_again": 3.0,
        "groups/resample_rounds": 2.0,
    }


def test_a_batch_without_equal_groups_is_returned_as_it_is() -> None:
    batch = numbered([0, 1])
    same, _, report = resample(
        batch,
        torch.tensor([0.0, 1.0]),
        lambda groups: pytest.fail("drawn"),
        num_generations=2,
        max_resamples=3,
        pad_id=0,
    )
    assert same is batch
    assert (report.groups, report.equal_before, report.rounds) == (1, 0, 0)


def test_without_rounds_equal_groups_are_only_counted() -> None:
    _, _, report = resample(
        numbered([0, 1]),
        torch.ones(2),
        lambda groups: pytest.fail("drawn"),
        num_generations=2,
        max_resamples=0,
        pad_id=0,
    )
    assert (report.equal_before, report.equal_after, report.drawn) == (1, 1, 0)


def test_processes_decide_alike_and_together_as_one_would() -> None:
    """Two processes with two groups each against one with four; the second has nothing to draw and draws along."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    new_rewards = {0: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.5, 0.5], 3: [0.7, 0.1]}
    asked: list[list[int]] = []

    def process(rank: int) -> tuple[dict[str, Any], torch.Tensor, Any]:
        def draw(groups: list[int]) -> ResampledBatch:
            asked.append(groups)
            plan = [
                _groups_to_resample(equal_reward_groups(seen[0], 2), num_processes=2, rank=each) for each in range(2)
            ]
            numbers = [100 + 10 * (2 * rank + group) + i for group in groups for i in range(2)]
            found = [value for each, groups_ in enumerate(plan) for g in groups_ for value in new_rewards[2 * each + g]]
            merged = seen[0].clone()
            merged[:2] = torch.tensor(new_rewards[0])
            seen[0] = merged
            return ResampledBatch(numbered(numbers), torch.tensor(found))

        seen = [rewards]
        rows = list(range(4 * rank, 4 * rank + 4))
        return resample(
            numbered(rows), rewards, draw, num_generations=2, max_resamples=2, pad_id=PAD, num_processes=2, rank=rank
        )

    (first, first_rewards, report), (second, second_rewards, same_report) = process(0), process(1)
    assert asked == [[0, 1], [1], [0, 1], [0]]
    assert first["completion_ids"][:, 0].tolist() == [100, 101, 2, 3]
    assert second["completion_ids"][:, 0].tolist() == [4, 5, 6, 7]  # what it drew along is thrown away
    assert first_rewards.tolist() == second_rewards.tolist() == pytest.approx([0, 1, 0, 0, 0, 1, 1, 0])
    assert report == same_report
    assert (report.equal_before, report.equal_after, report.drawn) == (2, 1, 6)


# --- advantages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_a_slow_reference(scale: Literal["group", "batch", "none"]) -> None:
    draw = random.Random(1)
    rewards = [NAN if draw.random() < 0.2 else draw.gauss(0, 2) for _ in range(24)]
    judged = [reward for reward in rewards if not math.isnan(reward)]
    expected: list[float] = []
    for first in range(0, 24, 6):
        group = [reward for reward in rewards[first : first + 6] if not math.isnan(reward)]
        divisor = {"group": statistics.stdev(group) + 1e-4, "batch": statistics.stdev(judged) + 1e-4, "none": 1.0}
        mean = statistics.fmean(group)
        expected += [0.0 if math.isnan(r) else (r - mean) / divisor[scale] for r in rewards[first : first + 6]]
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), 6, scale)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_group_with_one_judged_rollout_has_no_advantage() -> None:
    for scale in ("group", "none"):
        assert group_advantages(torch.tensor([NAN, 3.0, 1.0, 2.0]), 2, scale)[:2].tolist() == [0.0, 0.0]
