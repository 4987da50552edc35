"""Rows of token ids as the tensors of a batch: padded on the right, with masks that mark tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from composer_replication.batch.pair_tokens import PairIds, ResponseIds
from composer_replication.errors import InputError, explain
from composer_replication.trainer.traces.rows import SiteRow, StudentRow


class ReferenceLookup(Protocol):
    """The start weights' summed log-probs of both answers of a pair, found by the very ids the batch holds."""

    def lookup(
        self, chosen_ids: Sequence[int], chosen_start: int, rejected_ids: Sequence[int], rejected_start: int
    ) -> tuple[float, float]: ...


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """(B, T) with T the longest row; lengths, and never an id, say what is padding."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.int64)


def attention(rows: Sequence[Sequence[int]]) -> Tensor:
    return padded([[1] * len(row) for row in rows], 0)


def student_tensors(rows: Sequence[StudentRow], pad: int) -> dict[str, Tensor]:
    ids = [row.ids for row in rows]
    mask = torch.zeros_like(attention(ids))
    for number, row in enumerate(rows):
        for start, end in row.targets:
            mask[number, start:end] = 1
    return {"input_ids": padded(ids, pad), "attention_mask": attention(ids), "response_mask": mask}


def site_tensors(sites: Sequence[SiteRow], input_ids: Tensor, pad: int, ignore_index: int) -> dict[str, Tensor]:
    """Channel 2's keys; row n of both indices predicts the same token. The mask marks those tokens in `input_ids`."""
    mask = torch.full_like(input_ids, ignore_index)
    student: list[Tensor] = []
    teacher: list[Tensor] = []
    for number, site in enumerate(sites):
        offsets = torch.arange(len(site.ids) - site.start)
        mask[site.student_row, site.student_start + offsets] = 1
        student.append(_index(site.student_row, site.student_start - 1 + offsets))
        teacher.append(_index(number, site.start - 1 + offsets))
    ids = [site.ids for site in sites]
    return {
        "ctx_teacher_input_ids": padded(ids, pad),
        "ctx_teacher_attention_mask": attention(ids),
        "sdpo_loss_mask": mask,
        "sdpo_student_index": torch.cat(student),
        "sdpo_teacher_index": torch.cat(teacher),
    }


def pair_tensors(pairs: Sequence[PairIds], pad: int) -> dict[str, Tensor]:
    sides = {"chosen": [pair.chosen for pair in pairs], "rejected": [pair.rejected for pair in pairs]}
    return {f"dpo_{side}_{key}": value for side, rows in sides.items() for key, value in _side(rows, pad).items()}


def reference_tensors(pairs: Sequence[PairIds], reference: ReferenceLookup) -> dict[str, Tensor]:
    pair_logprobs = [reference.lookup(*pair.chosen, *pair.rejected) for pair in pairs]
    for number, values in enumerate(pair_logprobs):
        if len(values) != 2 or not all(math.isfinite(value) for value in values):
            what = f"reference log-probs of pair {number}"
            raise InputError(explain(what, got=values, expected="two finite sums, chosen and rejected"))
    chosen, rejected = torch.tensor(pair_logprobs, dtype=torch.float32).unbind(1)
    return {"dpo_chosen_ref_logprobs": chosen.clone(), "dpo_rejected_ref_logprobs": rejected.clone()}


def _side(rows: Sequence[ResponseIds], pad: int) -> dict[str, Tensor]:
    ids = [row.ids for row in rows]
    answers = [[0] * row.start + [1] * (len(row.ids) - row.start) for row in rows]
    return {"input_ids": padded(ids, pad), "attention_mask": attention(ids), "response_mask": padded(answers, 0)}


def _index(row: int, positions: Tensor) -> Tensor:
    return torch.stack([torch.full_like(positions, row), positions], dim=1)
