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
    return {name: sum(each[name] for each in counts) for name in CHANNELS}


def pack_batches(batches: Sequence[TreeBatch]) -> TreeBatch:
    """Several trees side by side as one batch; none sees another. Padding comes after packing."""
    tree = pack_trees([batch.tree for batch in batches])
    offsets = list(accumulate((len(batch.tree) for batch in batches[:-1]), initial=0))

    def joined(rows: list[Tensor]) -> Tensor:
        return torch.cat([each + offset for each, offset in zip(rows, offsets, strict=True)])

    targets = torch.cat([batch.response.targets for batch in batches])
    response = TargetRows(joined([batch.response.rows for batch in batches]), targets)
    student, teacher = joined([each.student_rows for each in batches]), joined([each.teacher_rows for each in batches])
    pairs = [(batch.pairs, offset) for batch, offset in zip(batches, offsets, strict=True) if batch.pairs is not None]
    return TreeBatch(
        response,
        student,
        teacher,
        _joined_pairs(pairs) if pairs else None,
        tree=tree,
        target_tokens=_joined_if_all([each.target_tokens for each in batches]),
        site_position=_joined_if_all([each.site_position for each in batches]),
        contrast=_joined_contrast(batches, offsets),
        sites_without_contrast=sum(each.sites_without_contrast for each in batches),
    )


def _joined_if_all(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [each for each in parts if each is not None]
    return torch.cat(known) if len(known) == len(parts) else None


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
    total = sum(each.num_pairs for each, _ in pairs)
    numbers: list[Tensor] = []
    before = 0
    for each, _ in pairs:
        is_rejected = each.response >= each.num_pairs
        numbers.append(each.response + before + is_rejected * (total - each.num_pairs))
        before += each.num_pairs
    response, order = torch.cat(numbers).sort(stable=True)
    rows = torch.cat([each.rows + offset for each, offset in pairs])[order]
    targets = torch.cat([each.targets for each, _ in pairs])[order]
    if len({each.chosen_reference is None for each, _ in pairs}) > 1:
        raise InputError(explain("references", got="some pairs' only", expected="all of the pairs', or none"))
    if pairs[0][0].chosen_reference is None:
        return PairRows(rows, targets, response, total, None, None)
    chosen, rejected = zip(*(each.references() for each, _ in pairs), strict=True)
    return PairRows(rows, targets, response, total, torch.cat(chosen), torch.cat(rejected))
