"""Tokens, and the rows that predict them.

A mask marks *tokens*; a loss needs the *rows that predict them*, one position earlier. That shift happens here and
nowhere else. Index pairs (N, 2) of (sequence, position) name the predicting row directly. Shape suffixes: B sequences,
T positions, N selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_replication.errors import AlignmentError, InputError, ShapeError, explain

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids (B, T) with an optional boolean attention mask."""

    input_ids: Tensor
    attention_mask: Tensor | None


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Rows of a (B, T) grid that predict the token one position later."""

    sequence_N: Tensor
    position_N: Tensor

    def __len__(self) -> int:
        return self.sequence_N.numel()

    def next_tokens(self, input_ids: Tensor) -> Tensor:
        return input_ids[self.sequence_N, self.position_N + 1]


def token_mask(mask: Tensor, shape: torch.Size, name: str) -> Tensor:
    """1 (True) counts; 0 and -100 do not; anything else is an error. The one place where -100 becomes a boolean."""
    if mask.shape != shape:
        raise ShapeError(explain(f"{name} shape", got=tuple(mask.shape), expected=f"{tuple(shape)}, as its ids"))
    if mask.dtype == torch.bool:
        return mask
    counted = mask == 1
    other = ~(counted | (mask == 0) | (mask == IGNORE_INDEX))
    if bool(other.any()):
        expected = f"1 on tokens that count, 0 or {IGNORE_INDEX} elsewhere"
        raise InputError(explain(f"{name} values", got=mask[other][0].item(), expected=expected))
    return counted


def rows_predicting(counted_BT: Tensor, sequences: Sequences) -> RowIndex:
    """Rows that predict the marked tokens; nothing predicts a first real token, so a mark there selects no row."""
    targets = counted_BT[:, 1:]
    if sequences.attention_mask is not None:
        targets = targets & sequences.attention_mask[:, :-1]
    sequence, position = targets.nonzero(as_tuple=True)
    return RowIndex(sequence, position)


def check_alignment(student_ids: Tensor, student: RowIndex, teacher_ids: Tensor, teacher: RowIndex) -> None:
    """Row n of both sides must predict the same token: a context shifted by one teaches the wrong token everywhere."""
    if len(student) != len(teacher):
        raise ShapeError(explain("sdpo index pairs", got=(len(student), len(teacher)), expected="equal lengths"))
    wanted, offered = student.next_tokens(student_ids), teacher.next_tokens(teacher_ids)
    differs = (wanted != offered).nonzero()[:, 0]
    if differs.numel():
        n = int(differs[0])
        where = f"student ({int(student.sequence_N[n])}, {int(student.position_N[n])})"
        where += f" and teacher ({int(teacher.sequence_N[n])}, {int(teacher.position_N[n])})"
        raise AlignmentError(
            explain(
                f"index pair {n}: {where} predict different tokens ({differs.numel()} of {len(student)} pairs do)",
                got=f"token ids {int(wanted[n])} and {int(offered[n])}",
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


def read_index(index: Tensor, sequences: Sequences, name: str) -> RowIndex:
    if index.dim() != 2 or index.shape[1] != 2 or index.is_floating_point() or index.dtype == torch.bool:
        raise ShapeError(explain(name, got=f"{tuple(index.shape)} {index.dtype}", expected="(N, 2) integers"))
    sequence, position = index.long().unbind(1)
    batch, length = sequences.input_ids.shape
    outside = (sequence < 0) | (sequence >= batch) | (position < 0) | (position >= length - 1)
    if bool(outside.any()):
        n = int(outside.nonzero()[0, 0])
        expected = f"sequence 0..{batch - 1}, position 0..{length - 2} (the row before a token)"
        raise InputError(explain(f"{name}[{n}] out of range", got=index[n].tolist(), expected=expected))
    rows = RowIndex(sequence, position)
    if sequences.attention_mask is not None:
        marked = torch.zeros_like(sequences.attention_mask)
        marked[sequence, position] = marked[sequence, position + 1] = True
        check_not_in_padding(marked, sequences, name)
    return rows
