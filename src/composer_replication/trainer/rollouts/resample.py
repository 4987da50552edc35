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
from torch.nn import functional as F

from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss.grpo import grouped

Batch = dict[str, Any]
# Rewards are sums of fp32 numbers: what differs by less came out of rounding.
_RELATIVE_TOLERANCE = 1e-6


class ResampledBatch(NamedTuple):
    """New rollouts: this process's batch, and the rewards of all processes in the order of their ranks."""

    batch: Batch
    rewards: Tensor


@dataclass(frozen=True, kw_only=True)
class _ResampleReport:
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


# A batch of rollouts in which some groups are exchanged for those of another batch.
#
# The two were padded on their own: prompts on the left, completions on the right, each to its own width. Rows are
# brought to the wider of the two with what TRL pads them with; what a mask counts is the same before and after.


def _here_alone(count: Tensor) -> Tensor:
    """The total over all processes where there is one."""
    return count


def resample(
    batch: Batch,
    rewards: Tensor,
    draw: Callable[[list[int]], ResampledBatch],
    *,
    num_generations: int,
    max_resamples: int,
    pad_id: int,
    num_processes: int = 1,
    rank: int = 0,
    total: Total = _here_alone,
    images: ImagesBySample | None = None,
) -> tuple[Batch, Tensor, _ResampleReport]:
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
    report = _ResampleReport(
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


Total = Callable[[Tensor], Tensor]
# What stands in the padding; pad_id where it is None.
_PROMPT_PADDING: dict[str, float | None] = {"prompt_ids": None, "prompt_mask": 0}
_COMPLETION_PADDING: dict[str, float | None] = {
    "completion_ids": None,
    "completion_mask": 0,
    "tool_mask": 1,
    "old_per_token_logps": 0.0,
    "ref_per_token_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
    "advantages": 0.0,
}
_BOTH_PARTS = ("token_type_ids", "mm_token_type_ids")
_COUNT = "num_items_in_batch"


class ImagesBySample(NamedTuple):
    """How an engine cuts a batch's pixels, which it lays out by image or by tile, into one item a sample, and back."""

    split: Callable[[Batch], Batch]
    join: Callable[[Batch], Batch]


def merge_groups(
    batch: Batch,
    replacement: Batch,
    groups: Sequence[tuple[int, int]],
    num_generations: int,
    *,
    pad_id: int,
    total: Total = _here_alone,
    images: ImagesBySample | None = None,
) -> Batch:
    """`batch` with group `old` exchanged for `replacement`'s group `new`, for each (old, new) of `groups`.

    Per-sample lists go with their rows, and so must not depend on how wide the padding is. `num_items_in_batch` is
    counted anew. Advantages go with their rows too: where they are scaled by the whole batch, compute them again with
    `group_advantages`. `total` is called on every process, whether it exchanges anything or not.
    `images` is for batches with pixels.
    """
    old, new = (_by_sample(dict(source_batch), images) for source_batch in (batch, replacement))
    for one, other_batch in ((old, new), (new, old)):
        if "tool_mask" in other_batch and "tool_mask" not in one:
            one["tool_mask"] = torch.ones_like(one["completion_ids"], dtype=other_batch["tool_mask"].dtype)
    if old.keys() != new.keys():
        got = f"{sorted(old.keys() ^ new.keys())} in one of the two"
        raise InputError(explain("batches to merge", got=got, expected="the same keys in both"))
    sources = _sources(len(old["prompt_ids"]), groups, num_generations)
    merged = {key: _merged(key, old, new, sources, pad_id) for key in old if key != _COUNT}
    if _COUNT in old:
        merged[_COUNT] = total(_loss_mask(merged).sum()).to(old[_COUNT].dtype)
    ordered = {key: merged[key] for key in old}
    return images.join(ordered) if images is not None and isinstance(ordered.get("pixel_values"), list) else ordered


def _sources(size: int, groups: Sequence[tuple[int, int]], num_generations: int) -> list[int]:
    """For each row of the merged batch, its place in the old rows followed by the new ones."""
    sources = list(range(size))
    for old, new in groups:
        if not 0 <= old < size // num_generations:
            raise InputError(explain("group", got=old, expected=f"0 to {size // num_generations - 1}"))
        for row in range(num_generations):
            sources[old * num_generations + row] = size + new * num_generations + row
    return sources


def _merged(key: str, old: Batch, new: Batch, sources: Sequence[int], pad_id: int) -> Any:
    one, other_value = old[key], new[key]
    if one is None:
        return None
    if isinstance(one, list):
        rows = [*one, *other_value]
        return [rows[source] for source in sources]
    if one.dim() == 0:
        return one
    one, other_value = _same_width(key, old, new, pad_id)
    if one.shape[1:] != other_value.shape[1:]:
        got = f"{tuple(one.shape)} and {tuple(other_value.shape)}"
        raise ShapeError(explain(f"{key} of two batches", got=got, expected="rows of one shape"))
    return torch.cat([one, other_value])[torch.tensor(sources, device=one.device)]


def _same_width(key: str, old: Batch, new: Batch, pad_id: int) -> tuple[Tensor, Tensor]:
    """Both values of a key, padded to the wider of the two where the key has one column a token."""
    prompts = max(old["prompt_ids"].shape[1], new["prompt_ids"].shape[1])
    completions = max(old["completion_ids"].shape[1], new["completion_ids"].shape[1])
    if key in _PROMPT_PADDING:
        value = _PROMPT_PADDING[key]
        padding = pad_id if value is None else value
        return _padded(old[key], prompts, 0, padding), _padded(new[key], prompts, 0, padding)
    if key in _BOTH_PARTS:
        return _both_parts(key, old, prompts, completions), _both_parts(key, new, prompts, completions)
    if key in _COMPLETION_PADDING and _has_column_a_token(key, old) and _has_column_a_token(key, new):
        value = _COMPLETION_PADDING[key]
        padding = pad_id if value is None else value
        return _padded(old[key], 0, completions, padding), _padded(new[key], 0, completions, padding)
    return old[key], new[key]


def _has_column_a_token(key: str, batch: Batch) -> bool:
    """Ratios of whole sequences have one column, and advantages none, unless a subclass gives one a token."""
    return batch[key].dim() == 2 and batch[key].shape[1] == batch["completion_ids"].shape[1]


def _padded(values: Tensor, left_to: int, right_to: int, padding: float) -> Tensor:
    missing = (max(0, left_to - values.shape[1]), max(0, right_to - values.shape[1]))
    return F.pad(values, missing, value=padding)


def _both_parts(key: str, batch: Batch, prompts: int, completions: int) -> Tensor:
    """Prompt and completion in one row: each is padded on its own side, with the type of ordinary text."""
    width = batch["prompt_ids"].shape[1]
    types = batch[key]
    return torch.cat([_padded(types[:, :width], prompts, 0, 0), _padded(types[:, width:], 0, completions, 0)], dim=1)


def _loss_mask(batch: Batch) -> Tensor:
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def _by_sample(batch: Batch, images: ImagesBySample | None) -> Batch:
    if batch.get("pixel_values") is None:
        return batch
    if images is None:
        raise InputError(explain("batch with pixel_values", got="no `images`", expected="how they are cut by sample"))
    return images.split(batch)
