"""Groups of one batch exchanged for those of another, padded to other widths: what is counted stays the same."""

from __future__ import annotations

import random
import re
from typing import Any, Literal

import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from composer_replication.errors import InputError
from composer_replication.trainer.rollouts.resample import ImagesBySample, _merge_groups
from refusals import refusal

PAD = 99
PER_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


def row(draw: random.Random, number: int) -> dict[str, Any]:
    """One rollout before padding; its tokens are its own."""
    prompt, completion = draw.randint(1, 5), draw.randint(1, 6)
    is_truncated = draw.random() < 0.2
    return {
        "prompt": [1000 * number + i for i in range(prompt)],
        "completion": [1000 * number + 500 + i for i in range(completion)],
        "counts": [int(not is_truncated)] * completion,
        "tool": [int(draw.random() < 0.7) * int(not is_truncated) for _ in range(completion)],
        "advantage": draw.gauss(0, 1),
        **{key: [draw.gauss(0, 1) for _ in range(completion)] for key in (*PER_TOKEN, "ratio")},
        "sites": [number] * draw.randint(0, 3),
    }


def padded(rows: list[list[Any]], width: int, value: float, side: Literal["left", "right"]) -> torch.Tensor:
    fill = [[value] * (width - len(each)) for each in rows]
    return torch.tensor([[*f, *r] if side == "left" else [*r, *f] for r, f in zip(rows, fill, strict=True)])


def batch_of(
    rows: list[dict[str, Any]], *, ratios: str = "token", width: tuple[int, int] | None = None
) -> dict[str, Any]:
    """What TRL makes of rollouts, in its order of keys; `width` is that of a wider batch."""
    prompts, completions = width or (max(len(r["prompt"]) for r in rows), max(len(r["completion"]) for r in rows))
    right = {key: padded([r[key] for r in rows], completions, 0.0, "right") for key in PER_TOKEN}
    by_token = padded([r["ratio"] for r in rows], completions, 1.0, "right")
    by_sequence = torch.tensor([[sum(r["ratio"])] for r in rows])
    mask = padded([r["counts"] for r in rows], completions, 0, "right")
    tool = padded([r["tool"] for r in rows], completions, 1, "right")
    return {
        "prompt_ids": padded([r["prompt"] for r in rows], prompts, PAD, "left"),
        "prompt_mask": padded([[1] * len(r["prompt"]) for r in rows], prompts, 0, "left"),
        "completion_ids": padded([r["completion"] for r in rows], completions, PAD, "right"),
        "completion_mask": mask,
        "advantages": torch.tensor([r["advantage"] for r in rows]),
        "num_items_in_batch": (mask * tool).sum(),
        "old_per_token_logps": right["old_per_token_logps"],
        "importance_sampling_ratio": by_token if ratios == "token" else by_sequence,
        "sampling_per_token_logps": right["sampling_per_token_logps"],
        "ref_per_token_logps": right["ref_per_token_logps"],
        "tool_mask": tool,
        "sites": [r["sites"] for r in rows],
    }


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert list(left) == list(right)
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[key].dtype, key
            assert torch.equal(value, right[key]), key
        else:
            assert value == right[key], key


@given(st.integers(0, 10**9), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["token", "sequence"]))
def test_a_merged_batch_is_the_batch_of_the_merged_rollouts(seed: int, size: int, num_groups: int, ratios: str) -> None:
    draw = random.Random(seed)
    old = [row(draw, number) for number in range(size * num_groups)]
    new = [row(draw, 100 + number) for number in range(size * draw.randint(1, num_groups))]
    places = draw.sample(range(num_groups), draw.randint(0, len(new) // size))
    groups = [(place, number) for number, place in enumerate(places)]
    chosen = list(old)
    for place, number in groups:
        chosen[place * size : (place + 1) * size] = new[number * size : (number + 1) * size]
    one, other = batch_of(old, ratios=ratios), batch_of(new, ratios=ratios)
    width = tuple(max(each[key].shape[1] for each in (one, other)) for key in ("prompt_ids", "completion_ids"))
    merged = _merge_groups(one, other, groups, size, pad_id=PAD)
    assert_same(merged, batch_of(chosen, ratios=ratios, width=(width[0], width[1])))


def two_batches() -> tuple[dict[str, Any], dict[str, Any]]:
    draw = random.Random(3)
    return batch_of([row(draw, number) for number in range(4)]), batch_of([row(draw, 9), row(draw, 8)])


def test_the_batches_that_are_merged_stay_as_they_were() -> None:
    (one, other), (one_again, other_again) = two_batches(), two_batches()
    _merge_groups(one, other, [(1, 0)], 2, pad_id=PAD)
    assert_same(one, one_again)
    assert_same(other, other_again)


def test_a_batch_without_a_tool_mask_is_all_the_models_own_tokens() -> None:
    one, other = two_batches()
    del other["tool_mask"]
    merged = _merge_groups(one, other, [(1, 0)], 2, pad_id=PAD)
    assert merged["tool_mask"][2:].eq(1).all()
    counted = (merged["completion_mask"] * merged["tool_mask"]).sum()
    assert torch.equal(merged["num_items_in_batch"], counted)


def test_advantages_of_single_tokens_are_padded_and_those_of_rollouts_are_not() -> None:
    one, other = two_batches()
    for batch in (one, other):
        batch["advantages"] = batch["advantages"][:, None] * batch["completion_mask"]
    merged = _merge_groups(one, other, [(0, 0)], 2, pad_id=PAD)
    assert merged["advantages"].shape == merged["completion_ids"].shape
    assert torch.equal(merged["advantages"].sum(1)[:2], other["advantages"].sum(1))


def test_the_count_of_a_batch_is_that_of_all_processes() -> None:
    one, other = two_batches()
    alone = _merge_groups(one, other, [(0, 0)], 2, pad_id=PAD)["num_items_in_batch"]
    both = _merge_groups(one, other, [(0, 0)], 2, pad_id=PAD, total=lambda count: count + 5)["num_items_in_batch"]
    assert (both - alone).item() == 5


def test_types_of_prompt_and_completion_are_padded_on_their_own_sides() -> None:
    one, other = two_batches()
    for batch in (one, other):
        both = [batch["prompt_mask"] * 2, batch["completion_mask"] * 3]
        batch["token_type_ids"] = torch.cat(both, dim=1)
    merged = _merge_groups(one, other, [(1, 0)], 2, pad_id=PAD)
    expected = torch.cat([merged["prompt_mask"] * 2, merged["completion_mask"] * 3], dim=1)
    assert torch.equal(merged["token_type_ids"], expected)


def test_images_go_with_their_rollouts() -> None:
    one, other = two_batches()
    for batch, images, first in ((one, [1, 0, 2, 1], 0.0), (other, [1, 2], 100.0)):
        grids = torch.tensor([[1, 1, 1 + number % 2] for number in range(sum(images))])
        count = int(grids.prod(-1).sum())
        batch |= {"pixel_values": first + torch.arange(count).float()[:, None].repeat(1, 3)}
        batch |= {"image_grid_thw": grids, "num_images": images}
    images = ImagesBySample(split_pixel_values_by_grid, unsplit_pixel_values_by_grid)
    merged = _merge_groups(one, other, [(0, 0)], 2, pad_id=PAD, images=images)
    assert merged["num_images"] == [1, 2, 2, 1]
    # Images have 1, 2, 1, ... rows: the old ones of rows 2 and 3 begin at their row 1.
    assert merged["pixel_values"][:, 0].tolist() == [100, 101, 102, 103, 1, 2, 3, 4, 5]
    assert merged["image_grid_thw"].tolist() == [[1, 1, n] for n in (1, 2, 1, 2, 1, 2)]


def test_batches_of_other_keys_and_groups_that_are_not_there_are_refused() -> None:
    one, other = two_batches()
    with refusal(InputError, what="group", got="2") as refused:
        _merge_groups(one, other, [(2, 0)], 2, pad_id=PAD)
    assert re.findall(r"\d+", refused.value.expected) == ["0", "1"]
    del other["ref_per_token_logps"]
    with refusal(InputError, got="['ref_per_token_logps']"):
        _merge_groups(one, other, [(0, 0)], 2, pad_id=PAD)
