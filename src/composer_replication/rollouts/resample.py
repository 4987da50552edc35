"""Groups of rollouts whose rewards are all equal: counted, and on request drawn again.

Such a group has advantages of 0 and teaches nothing. `resample` is the whole decision: it asks for new rollouts of the
groups that need them, takes those that came out unequal into the batch, and tries again at most `max_resamples` times.
Everything is decided from the rewards of all processes, so every process decides alike, and each of them draws the same
number of groups: one that needs fewer draws others too and throws them away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.loss.grpo import grouped
from composer_replication.rollouts.merge import ImagesBySample, Total, here_alone, merge_groups

Batch = dict[str, Any]
# Rewards are sums of fp32 numbers: what differs by less came out of rounding.
_RELATIVE_TOLERANCE = 1e-6


class Drawn(NamedTuple):
    """New rollouts: this process's batch, and the rewards of all processes in the order of their ranks."""

    batch: Batch
    rewards: Tensor


@dataclass(frozen=True, kw_only=True)
class ResampleReport:
    """What was found and done, over all processes."""

    groups: int
    equal_before: int
    equal_after: int
    drawn: int
    rounds: int

    def metrics(self) -> dict[str, float]:
        """Shares for the log; `groups/equal_after` is what still teaches nothing."""
        return {
            "groups/equal": self.equal_before / max(self.groups, 1),
            "groups/equal_after": self.equal_after / max(self.groups, 1),
            "groups/drawn_again": float(self.drawn),
            "groups/resample_rounds": float(self.rounds),
        }


def equal_reward_groups(rewards: Tensor | Sequence[float], num_generations: int) -> Tensor:
    """For each group of consecutive rewards, whether they are all equal (up to rounding).

    A NaN is a rollout that no reward function judged. It takes no part, and a group with fewer than two rewards is
    equal: TRL's frac_reward_zero_std does not count those, though their advantages are 0 as well.
    """
    groups_GN = grouped(torch.as_tensor(rewards, dtype=torch.float32), num_generations)
    judged_GN = ~groups_GN.isnan()
    highest_G = groups_GN.masked_fill(~judged_GN, -torch.inf).amax(1)
    lowest_G = groups_GN.masked_fill(~judged_GN, torch.inf).amin(1)
    scale_G = torch.maximum(highest_G.abs(), lowest_G.abs()).clamp(min=1.0)
    is_judged_G = judged_GN.sum(1) >= 2
    return ~is_judged_G | (highest_G - lowest_G <= _RELATIVE_TOLERANCE * scale_G)


def groups_to_draw(equal_G: Tensor, *, num_processes: int = 1, rank: int = 0) -> list[int]:
    """This process's groups to draw again, by their local numbers: its equal ones, then others to fill up.

    Every process gets as many as the one that needs most; none if no group is equal.
    """
    if equal_G.numel() % num_processes:
        raise InputError(
            explain(
                "groups of rollouts",
                got=f"{equal_G.numel()} over {num_processes} processes",
                expected="the same number on each process",
                fix="Dynamic sampling needs per_device_train_batch_size x steps_per_generation to be a multiple of "
                "num_generations",
            )
        )
    equal_PL = equal_G.view(num_processes, -1)
    count = int(equal_PL.sum(1).max()) if equal_PL.numel() else 0
    mine = equal_PL[rank].tolist() if count else []
    return sorted(range(len(mine)), key=lambda group: not mine[group])[:count]


def rows_of_groups(rows: Sequence[Any], groups: Sequence[int], num_generations: int) -> list[Any]:
    """The rows of those groups, in the order of `groups`."""
    return [row for group in groups for row in rows[group * num_generations : (group + 1) * num_generations]]


def resample(
    batch: Batch,
    rewards: Tensor,
    draw: Callable[[list[int]], Drawn],
    *,
    num_generations: int,
    max_resamples: int,
    pad_id: int,
    num_processes: int = 1,
    rank: int = 0,
    total: Total = here_alone,
    images: ImagesBySample | None = None,
) -> tuple[Batch, Tensor, ResampleReport]:
    """The batch, and the rewards of all processes, after at most `max_resamples` rounds of drawing.

    `draw(groups)` generates and scores rollouts for the prompts of those local groups, in that order. `total` adds up a
    0-dim tensor over all processes. `images` is for batches with pixels.
    """
    equal_G = equal_reward_groups(rewards, num_generations)
    before, drawn, rounds = int(equal_G.sum()), 0, 0
    while rounds < max_resamples and bool(equal_G.any()):
        plan = [groups_to_draw(equal_G, num_processes=num_processes, rank=process) for process in range(num_processes)]
        new = draw(plan[rank])
        rounds, drawn = rounds + 1, drawn + sum(map(len, plan))
        slots = _taken(equal_G, equal_reward_groups(new.rewards, num_generations), plan)
        batch = merge_groups(batch, new.batch, slots[rank], num_generations, pad_id=pad_id, total=total, images=images)
        rewards = _merged_rewards(rewards, new.rewards, slots, num_generations)
        equal_G = equal_reward_groups(rewards, num_generations)
    report = ResampleReport(
        groups=equal_G.numel(), equal_before=before, equal_after=int(equal_G.sum()), drawn=drawn, rounds=rounds
    )
    return batch, rewards, report


def _taken(equal_G: Tensor, new_equal_G: Tensor, plan: list[list[int]]) -> list[list[tuple[int, int]]]:
    """For each process, (local group, number among its new ones) where an equal group got an unequal one."""
    local = equal_G.numel() // len(plan)
    slots: list[list[tuple[int, int]]] = []
    first_new = 0
    for rank, groups in enumerate(plan):
        pairs = [(group, number) for number, group in enumerate(groups)]
        is_wanted = [bool(equal_G[rank * local + group]) and not bool(new_equal_G[first_new + n]) for group, n in pairs]
        slots.append([pair for pair, is_exchanged in zip(pairs, is_wanted, strict=True) if is_exchanged])
        first_new += len(groups)
    return slots


def _merged_rewards(rewards: Tensor, new: Tensor, slots: list[list[tuple[int, int]]], num_generations: int) -> Tensor:
    merged_GN = grouped(rewards, num_generations).clone()
    new_GN = grouped(new, num_generations)
    local, drawn = merged_GN.shape[0] // len(slots), new_GN.shape[0] // len(slots)
    for rank, pairs in enumerate(slots):
        for group, number in pairs:
            merged_GN[rank * local + group] = new_GN[rank * drawn + number]
    return merged_GN.reshape(-1)
