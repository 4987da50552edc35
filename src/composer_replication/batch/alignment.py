"""Tokens, and the rows that predict them.

A mask marks *tokens*; a loss needs the *rows that predict them*, one position earlier. That shift happens here and
nowhere else. Index pairs (N, 2) of (sequence, position) name the predicting row directly. Row sequence * T + position
of a padded batch (B, T) is what a loss is given: `Sequences.next_tokens` are the tokens that such rows predict.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_replication.errors import (
    AlignmentError,
    InputError,
    ShapeError,
    explain,
)

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids (B, T) with an optional boolean attention mask."""

    input_ids: Tensor
    attention_mask: Tensor | None = None

    @property
    def width(self) -> int:
        return self.input_ids.shape[1]

    def next_tokens(self, rows_N: Tensor) -> Tensor:
        return self.input_ids.flatten()[rows_N + 1]

    def longest(self) -> Tensor:
        """The ids of the sequence with most real tokens."""
        if self.attention_mask is None:
            return self.input_ids[0]
        real = self.attention_mask.bool()
        number = int(real.sum(1).argmax())
        return self.input_ids[number][real[number]]

    def above(self, other: Sequences) -> Sequences:
        """Both batches as one. Right padding lies behind every real token, so causal attention needs no mask for it."""
        width = max(self.width, other.width)
        ids = torch.cat([widened(batch.input_ids, width) for batch in (self, other)])
        if self.attention_mask is None and other.attention_mask is None:
            return Sequences(ids)
        masks = [
            torch.ones_like(batch.input_ids, dtype=torch.bool) if batch.attention_mask is None else batch.attention_mask
            for batch in (self, other)
        ]
        return Sequences(ids, torch.cat([widened(mask, width) for mask in masks]))


def widened(values_BT: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values_BT, (0, width - values_BT.shape[1]))


def token_mask(mask: Tensor, shape: torch.Size, name: str) -> Tensor:
    """1 (True) counts; 0 and -100 do not; anything else is an error. The one place where -100 becomes a boolean."""
    if mask.shape != shape:
        raise ShapeError(explain(f"{name} shape", got=tuple(mask.shape), expected=f"{tuple(shape)}, as its ids"))
    if mask.dtype == torch.bool:
        return mask
    counted = mask == 1
    invalid = ~(counted | (mask == 0) | (mask == IGNORE_INDEX))
    if bool(invalid.any()):
        expected = f"1 on tokens that count, 0 or {IGNORE_INDEX} elsewhere"
        raise InputError(explain(f"{name} values", got=mask[invalid][0].item(), expected=expected))
    return counted


def rows_predicting(counted_BT: Tensor, sequences: Sequences) -> Tensor:
    """Rows that predict the marked tokens; nothing predicts a first real token, so a mark there selects no row."""
    targets = counted_BT[:, 1:]
    if sequences.attention_mask is not None:
        targets = targets & sequences.attention_mask[:, :-1]
    sequence, position = targets.nonzero(as_tuple=True)
    return sequence * sequences.width + position


def check_alignment(student: Sequences, student_rows: Tensor, teacher: Sequences, teacher_rows: Tensor) -> None:
    """Row n of both sides must predict the same token: a context shifted by one teaches the wrong token everywhere."""
    if len(student_rows) != len(teacher_rows):
        lengths = (len(student_rows), len(teacher_rows))
        raise ShapeError(explain("sdpo index pairs", got=lengths, expected="equal lengths"))
    targets, offered = student.next_tokens(student_rows), teacher.next_tokens(teacher_rows)
    differs = (targets != offered).nonzero()[:, 0]
    if differs.numel():
        n = int(differs[0])
        where = f"student {divmod(int(student_rows[n]), student.width)}"
        where += f" and teacher {divmod(int(teacher_rows[n]), teacher.width)}"
        raise AlignmentError(
            explain(
                f"index pair {n}: {where} predict different tokens ({differs.numel()} of {len(targets)} pairs do)",
                got=f"token ids {int(targets[n])} and {int(offered[n])}",
                expected="the same token",
                fix="Both indices name the row *before* the target token; give index pairs when the lengths differ.",
            )
        )


def check_not_in_padding(counted: Tensor, sequences: Sequences, name: str) -> None:
    mask = sequences.attention_mask
    if mask is not None and bool((counted & ~mask).any()):
        raise InputError(
            explain(f"{name} marks padding", got="a 1 where attention_mask is 0", expected="real tokens only")
        )


def read_index(index: Tensor, sequences: Sequences, name: str) -> Tensor:
    if index.dim() != 2 or index.shape[1] != 2 or index.is_floating_point() or index.dtype == torch.bool:
        raise ShapeError(explain(name, got=f"{tuple(index.shape)} {index.dtype}", expected="(N, 2) integers"))
    sequence, position = index.long().unbind(1)
    batch, length = sequences.input_ids.shape
    outside = (sequence < 0) | (sequence >= batch) | (position < 0) | (position >= length - 1)
    if bool(outside.any()):
        n = int(outside.nonzero()[0, 0])
        expected = f"sequence 0..{batch - 1}, position 0..{length - 2} (the row before a token)"
        raise InputError(explain(f"{name}[{n}] out of range", got=index[n].tolist(), expected=expected))
    if sequences.attention_mask is not None:
        marked = torch.zeros_like(sequences.attention_mask)
        marked[sequence, position] = marked[sequence, position + 1] = True
        check_not_in_padding(marked, sequences, name)
    return sequence * length + position


def positions_in_sites(*sides: Tensor) -> Tensor:
    """j of every row, from the rows on each side, student and teacher.

    A site begins where a side does not go on with the next row. Two hints for one turn have two contexts, two turns
    have at least a header between them, and the last row of a sequence predicts nothing.
    """
    number_N = torch.arange(sides[0].numel(), device=sides[0].device)
    goes_on = torch.ones_like(number_N[1:], dtype=torch.bool)
    for rows_N in sides:
        goes_on &= rows_N[1:] == rows_N[:-1] + 1
    begin_N = number_N.clone()
    begin_N[1:].masked_fill_(goes_on, 0)
    return number_N - begin_N.cummax(0).values if number_N.numel() else number_N
