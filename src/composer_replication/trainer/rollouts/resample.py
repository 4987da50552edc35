"""Count groups of rollouts whose rewards are all equal, and on request resample them (DAPO's dynamic sampling).

Such a group has advantages of 0, so nothing is learned from it. `resample` requests new rollouts for these groups, puts
those with unequal rewards into the batch, and repeats this at most `max_resamples` times. All decisions are based on
the rewards of all processes, so every process decides alike and samples the same number of groups. A process that needs
fewer samples other groups as well, and discards them.

The old and the new batch were padded separately: prompts on the left, completions on the right, each to its own width.
`_merge_groups` pads rows to the wider of the two, with the same padding values as TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss.grpo import reshape_to_groups

Batch = dict[str, Any]
Total = Callable[[Tensor], Tensor]
# Rewards are sums of fp32 numbers, so a smaller difference is rounding.
_RELATIVE_TOLERANCE = 1e-6
# TRL's padding values; None means pad_id.
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
# Keys with one column per token of prompt and completion together.
_BOTH_PARTS = ("token_type_ids", "mm_token_type_ids")
_COUNT = "num_items_in_batch"


class ResampledBatch(NamedTuple):
    """New rollouts: this process's batch, and the rewards of all processes in rank order."""

    batch: Batch
    rewards: Tensor


@dataclass(frozen=True, kw_only=True)
class _ResampleReport:
    """The number of groups, how many had equal rewards before and after resampling, and how many were resampled."""

    groups: int
    equal_before: int
    equal_after: int
    drawn: int
    rounds: int

    def metrics(self) -> dict[str, float]:
        """Return the report as metrics. `groups/equal_after` is the fraction of groups left with equal rewards."""
        return {
            "groups/equal": self.equal_before / max(self.groups, 1),
            "groups/equal_after": self.equal_after / max(self.groups, 1),
            "groups/drawn_again": float(self.drawn),
            "groups/resample_rounds": float(self.rounds),
        }


def equal_reward_groups(rewards: Tensor | Sequence[float], num_generations: int) -> Tensor:
    """Return, for each group of consecutive rewards, whether all its rewards are equal, up to rounding.

    A NaN means that no reward function judged the rollout, and is ignored. A group with fewer than two rewards counts
    as equal. TRL's frac_reward_zero_std does not count such groups, although their advantages are 0 as well.
    """
    groups_GN = reshape_to_groups(torch.as_tensor(rewards, dtype=torch.float32), num_generations)
    judged_GN = ~groups_GN.isnan()
    highest_G = groups_GN.masked_fill(~judged_GN, -torch.inf).amax(1)
    lowest_G = groups_GN.masked_fill(~judged_GN, torch.inf).amin(1)
    # Relative to the larger reward, with a lower bound of 1e-6 because rewards around 0 have rounding errors too.
    scale_G = torch.maximum(highest_G.abs(), lowest_G.abs()).clamp(min=1.0)
    is_judged_G = judged_GN.sum(1) >= 2
    return ~is_judged_G | (highest_G - lowest_G <= _RELATIVE_TOLERANCE * scale_G)


def _groups_to_resample(equal_G: Tensor, *, num_processes: int = 1, rank: int = 0) -> list[int]:
    """Return the local indices of the groups that this process resamples: those with equal rewards, then others.

    Every process resamples as many groups as the process with the most equal-reward groups.
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
    is_equal = equal_PL[rank].tolist() if count else []
    # False sorts before True, so groups with equal rewards come first.
    return sorted(range(len(is_equal)), key=lambda group: not is_equal[group])[:count]


def rows_of_groups(rows: Sequence[Any], groups: Sequence[int], num_generations: int) -> list[Any]:
    """Return the rows of these groups, in the order of `groups`."""
    return [row for group in groups for row in rows[group * num_generations : (group + 1) * num_generations]]


def _single_process_total(count: Tensor) -> Tensor:
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
    total: Total = _single_process_total,
    images: ImagesBySample | None = None,
) -> tuple[Batch, Tensor, _ResampleReport]:
    """Resample groups with equal rewards, and return the batch, the rewards of all processes and a report.

    There are at most `max_resamples` rounds. `draw(groups)` generates and scores rollouts for the prompts of these
    local groups, in that order. `total` sums a 0-d tensor over all processes. `images` is required for batches with
    pixels.
    """
    equal_G = equal_reward_groups(rewards, num_generations)
    before, drawn, rounds = int(equal_G.sum()), 0, 0
    while rounds < max_resamples and bool(equal_G.any()):
        # The groups of all processes, because every process merges the rewards of all of them.
        plan = [
            _groups_to_resample(equal_G, num_processes=num_processes, rank=process) for process in range(num_processes)
        ]
        new = draw(plan[rank])
        rounds, drawn = rounds + 1, drawn + sum(map(len, plan))
        slots = _replaceable_groups(equal_G, equal_reward_groups(new.rewards, num_generations), plan)
        batch = _merge_groups(batch, new.batch, slots[rank], num_generations, pad_id=pad_id, total=total, images=images)
        rewards = _merged_rewards(rewards, new.rewards, slots, num_generations)
        equal_G = equal_reward_groups(rewards, num_generations)
    report = _ResampleReport(
        groups=equal_G.numel(), equal_before=before, equal_after=int(equal_G.sum()), drawn=drawn, rounds=rounds
    )
    return batch, rewards, report


def _replaceable_groups(equal_G: Tensor, new_equal_G: Tensor, plan: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Return, for each process, (local group, new group) pairs where the new group replaces an equal-reward group."""
    local = equal_G.numel() // len(plan)
    slots: list[list[tuple[int, int]]] = []
    first_new = 0
    for rank, groups in enumerate(plan):
        pairs = [(group, number) for number, group in enumerate(groups)]
        slots.append(
            [
                (group, number)
                for group, number in pairs
                if bool(equal_G[rank * local + group]) and not bool(new_equal_G[first_new + number])
            ]
        )
        first_new += len(groups)
    return slots


def _merged_rewards(rewards: Tensor, new: Tensor, slots: list[list[tuple[int, int]]], num_generations: int) -> Tensor:
    merged_GN = reshape_to_groups(rewards, num_generations).clone()
    new_GN = reshape_to_groups(new, num_generations)
    local, drawn = merged_GN.shape[0] // len(slots), new_GN.shape[0] // len(slots)
    for rank, pairs in enumerate(slots):
        for group, number in pairs:
            merged_GN[rank * local + group] = new_GN[rank * drawn + number]
    return merged_GN.reshape(-1)


class ImagesBySample(NamedTuple):
    """Functions that split a batch's pixels (stored by image or tile) into one item per sample, and join them."""

    split: Callable[[Batch], Batch]
    join: Callable[[Batch], Batch]


def _merge_groups(
    batch: Batch,
    replacement: Batch,
    groups: Sequence[tuple[int, int]],
    num_generations: int,
    *,
    pad_id: int,
    total: Total = _single_process_total,
    images: ImagesBySample | None = None,
) -> Batch:
    """Return `batch` with its group `old` replaced by group `new` of `replacement`, for each (old, new) in `groups`.

    Lists with one entry per sample move with their rows, so they must not depend on the width of the padding.
    `num_items_in_batch` is recounted. Advantages move with their rows as well; if they are scaled by the whole batch,
    recompute them with `group_advantages`. `total` is called on every process, even if it replaces nothing there.
    `images` is required for batches with pixels.
    """
    old, new = (_by_sample(dict(source_batch), images) for source_batch in (batch, replacement))
    # TRL omits the mask from a batch in which no rollout called a tool.
    for with_mask, without_mask in ((old, new), (new, old)):
        if "tool_mask" in with_mask and "tool_mask" not in without_mask:
            ids = without_mask["completion_ids"]
            without_mask["tool_mask"] = torch.ones_like(ids, dtype=with_mask["tool_mask"].dtype)
    if old.keys() != new.keys():
        got = f"{sorted(old.keys() ^ new.keys())} in only one of the two"
        raise InputError(explain("batches to merge", got=got, expected="the same keys in both"))
    sources = _sources(len(old["prompt_ids"]), groups, num_generations)
    merged = {key: _merged(key, old, new, sources, pad_id) for key in old if key != _COUNT}
    if _COUNT in old:
        merged[_COUNT] = total(_loss_mask(merged).sum()).to(old[_COUNT].dtype)
    ordered = {key: merged[key] for key in old}
    return images.join(ordered) if images is not None and isinstance(ordered.get("pixel_values"), list) else ordered


def _sources(size: int, groups: Sequence[tuple[int, int]], num_generations: int) -> list[int]:
    """Return, for each row of the merged batch, its index in the concatenation of old and new rows."""
    sources = list(range(size))
    for old, new in groups:
        if not 0 <= old < size // num_generations:
            raise InputError(explain("number of a group", got=old, expected=f"0 to {size // num_generations - 1}"))
        for row in range(num_generations):
            sources[old * num_generations + row] = size + new * num_generations + row
    return sources


def _merged(key: str, old: Batch, new: Batch, sources: Sequence[int], pad_id: int) -> Any:
    old_value, new_value = old[key], new[key]
    if old_value is None:
        return None
    if isinstance(old_value, list):
        rows = [*old_value, *new_value]
        return [rows[source] for source in sources]
    # A scalar applies to the whole batch.
    if old_value.dim() == 0:
        return old_value
    old_value, new_value = _same_width(key, old, new, pad_id)
    if old_value.shape[1:] != new_value.shape[1:]:
        got = f"{tuple(old_value.shape)} and {tuple(new_value.shape)}"
        raise ShapeError(explain(f"{key} in two batches", got=got, expected="rows of the same shape"))
    return torch.cat([old_value, new_value])[torch.tensor(sources, device=old_value.device)]


def _same_width(key: str, old: Batch, new: Batch, pad_id: int) -> tuple[Tensor, Tensor]:
    """Return the values of `key` in both batches, padded to the same width if there is one column per token."""
    prompts = max(old["prompt_ids"].shape[1], new["prompt_ids"].shape[1])
    completions = max(old["completion_ids"].shape[1], new["completion_ids"].shape[1])
    if key in _PROMPT_PADDING:
        value = _PROMPT_PADDING[key]
        padding = pad_id if value is None else value
        return _padded(old[key], prompts, 0, padding), _padded(new[key], prompts, 0, padding)
    if key in _BOTH_PARTS:
        return _both_parts(key, old, prompts, completions), _both_parts(key, new, prompts, completions)
    if key in _COMPLETION_PADDING and _is_per_token(key, old) and _is_per_token(key, new):
        value = _COMPLETION_PADDING[key]
        padding = pad_id if value is None else value
        return _padded(old[key], 0, completions, padding), _padded(new[key], 0, completions, padding)
    return old[key], new[key]


def _is_per_token(key: str, batch: Batch) -> bool:
    # Ratios for whole sequences have one column; advantages have none, unless a subclass computes them per token.
    return batch[key].dim() == 2 and batch[key].shape[1] == batch["completion_ids"].shape[1]


def _padded(values: Tensor, left_to: int, right_to: int, padding: float) -> Tensor:
    missing = (max(0, left_to - values.shape[1]), max(0, right_to - values.shape[1]))
    return F.pad(values, missing, value=padding)


def _both_parts(key: str, batch: Batch, prompts: int, completions: int) -> Tensor:
    """Return the token types, with type 0 (text) as padding left of the prompts and right of the completions."""
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
        expected = "an ImagesBySample to split the pixels by sample"
        raise InputError(explain("batch with pixel_values", got="no `images`", expected=expected))
    return images.split(batch)
