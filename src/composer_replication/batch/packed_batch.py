"""Several trees in one batch, and batches that add up to one loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from composer_replication.batch.tree import pack_trees
from composer_replication.batch.tree_batch import CHANNELS, ContrastRows, PairRows, TargetRows, TreeBatch
from composer_replication.errors import InputError, explain


def denominators_of(batches: Sequence[TreeBatch]) -> dict[str, int]:
    """What `compose_loss` divides by in each of these, so that their losses add up to that of all together."""
    counts = [batch.counts() for batch in batches]
    return {name: sum(batch_counts[name] for batch_counts in counts) for name in CHANNELS}


def pack_batches(batches: Sequence[TreeBatch]) -> TreeBatch:
    """Several trees side by side as one batch; none sees another. Padding comes after packing."""
    tree = pack_trees([batch.tree for batch in batches])
    offsets = list(accumulate((len(batch.tree) for batch in batches[:-1]), initial=0))

    def joined(rows: list[Tensor]) -> Tensor:
        return torch.cat([batch_rows + offset for batch_rows, offset in zip(rows, offsets, strict=True)])

    targets = torch.cat([batch.response.targets for batch in batches])
    response = TargetRows(joined([batch.response.rows for batch in batches]), targets)
    student, teacher = (
        joined([batch.student_rows for batch in batches]),
        joined([batch.teacher_rows for batch in batches]),
    )
    pairs = [(batch.pairs, offset) for batch, offset in zip(batches, offsets, strict=True) if batch.pairs is not None]
    return TreeBatch(
        response,
        student,
        teacher,
        _joined_pairs(pairs) if pairs else None,
        tree=tree,
        target_tokens=_joined_if_all([batch.target_tokens for batch in batches]),
        site_position=_joined_if_all([batch.site_position for batch in batches]),
        contrast=_joined_contrast(batches, offsets),
        sites_without_contrast=sum(batch.sites_without_contrast for batch in batches),
    )


def _joined_if_all(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if len(tensors) == len(parts) else None


def _joined_contrast(batches: Sequence[TreeBatch], offsets: Sequence[int]) -> ContrastRows | None:
    numbers: list[Tensor] = []
    rows: list[Tensor] = []
    before = 0
    for batch, offset in zip(batches, offsets, strict=True):
        if batch.contrast is not None:
            numbers.append(batch.contrast.numbers + before)
            rows.append(batch.contrast.rows + offset)
        before += batch.student_rows.numel()
    return ContrastRows(torch.cat(numbers), torch.cat(rows)) if numbers else None


def _joined_pairs(pairs: Sequence[tuple[PairRows, int]]) -> PairRows:
    """All chosen responses, then all rejected ones, each batch's in their order."""
    total = sum(pair_rows.num_pairs for pair_rows, _ in pairs)
    numbers: list[Tensor] = []
    before = 0
    for pair_rows, _ in pairs:
        is_rejected = pair_rows.response >= pair_rows.num_pairs
        numbers.append(pair_rows.response + before + is_rejected * (total - pair_rows.num_pairs))
        before += pair_rows.num_pairs
    response, order = torch.cat(numbers).sort(stable=True)
    rows = torch.cat([pair_rows.rows + offset for pair_rows, offset in pairs])[order]
    targets = torch.cat([pair_rows.targets for pair_rows, _ in pairs])[order]
    if len({pair_rows.chosen_reference is None for pair_rows, _ in pairs}) > 1:
        raise InputError(explain("references", got="some pairs' only", expected="all of the pairs', or none"))
    if pairs[0][0].chosen_reference is None:
        return PairRows(rows, targets, response, total, None, None)
    chosen, rejected = zip(*(pair_rows.references() for pair_rows, _ in pairs), strict=True)
    return PairRows(rows, targets, response, total, torch.cat(chosen), torch.cat(rejected))
