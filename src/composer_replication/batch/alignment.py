"""Convert marked tokens to the rows that predict them, and check that student and teacher rows agree.

A mask marks *tokens*; a loss needs the *rows that predict them*, one position earlier. For padded batches that shift
happens only here. Index pairs (N, 2) of (sequence, position) name the predicting row directly. In a padded batch
(B, T), sequence * T + position is the index of a row, and `Sequences.next_tokens` returns the tokens that rows predict.

Shape suffixes: B batch, T time, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_replication.errors import AlignmentError, InputError, ShapeError, explain

# The value that PyTorch's cross_entropy and Hugging Face's collators use for labels that do not count.
IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids (B, T) with an optional boolean attention mask."""

    input_ids: Tensor
    attention_mask: Tensor | None = None

    @property
    def width(self) -> int:
        """The padded length T."""
        return self.input_ids.shape[1]

    def next_tokens(self, rows_N: Tensor) -> Tensor:
        """Return the token that each row predicts."""
        return self.input_ids.flatten()[rows_N + 1]

    def rows_predicting(self, counted_BT: Tensor) -> Tensor:
        """Return the indices of the rows that predict the marked tokens, in ascending order."""
        # No row predicts the first real token of a sequence, so a mark there selects nothing.
        targets = counted_BT[:, 1:]
        if self.attention_mask is not None:
            targets = targets & self.attention_mask[:, :-1]
        sequence, position = targets.nonzero(as_tuple=True)
        return sequence * self.width + position

    def index_pairs_to_rows(self, index: Tensor, name: str) -> Tensor:
        """Convert index pairs (N, 2) to row indices (N,). Raises on pairs outside the batch or at padding."""
        if index.dim() != 2 or index.shape[1] != 2 or index.is_floating_point() or index.dtype == torch.bool:
            raise ShapeError(explain(name, got=f"{tuple(index.shape)} {index.dtype}", expected="(N, 2) integers"))
        sequence, position = index.long().unbind(1)
        batch, length = self.input_ids.shape
        # The last position of a sequence predicts nothing, hence `length - 1`.
        outside = (sequence < 0) | (sequence >= batch) | (position < 0) | (position >= length - 1)
        if bool(outside.any()):
            n = int(outside.nonzero()[0, 0])
            expected = f"sequence 0..{batch - 1}, position 0..{length - 2} (the row before a token)"
            raise InputError(explain(f"{name}[{n}] out of range", got=index[n].tolist(), expected=expected))
        if self.attention_mask is not None:
            marked = torch.zeros_like(self.attention_mask)
            marked[sequence, position] = marked[sequence, position + 1] = True
            self.check_not_in_padding(marked, name)
        return sequence * length + position

    def check_not_in_padding(self, counted_BT: Tensor, name: str) -> None:
        """Raise InputError if a mask marks padding."""
        mask = self.attention_mask
        if mask is not None and bool((counted_BT & ~mask).any()):
            raise InputError(
                explain(f"{name} marks padding", got="a 1 where attention_mask is 0", expected="real tokens only")
            )

    def longest(self) -> Tensor:
        """Return the token ids of the longest sequence, without its padding."""
        if self.attention_mask is None:
            return self.input_ids[0]
        is_token = self.attention_mask.bool()
        index = int(is_token.sum(1).argmax())
        return self.input_ids[index][is_token[index]]

    def stack(self, below: Sequences) -> Sequences:
        """Concatenate two batches of sequences, right-padded to the larger width."""
        width = max(self.width, below.width)
        ids = torch.cat([pad_right(batch.input_ids, width) for batch in (self, below)])
        # Right padding comes after every real token, so causal attention needs no mask for it.
        if self.attention_mask is None and below.attention_mask is None:
            return Sequences(ids)
        masks = [
            torch.ones_like(batch.input_ids, dtype=torch.bool) if batch.attention_mask is None else batch.attention_mask
            for batch in (self, below)
        ]
        return Sequences(ids, torch.cat([pad_right(mask, width) for mask in masks]))


def pad_right(values_BT: Tensor, width: int) -> Tensor:
    """Pad the rows on the right with zeros (False) to `width`."""
    return torch.nn.functional.pad(values_BT, (0, width - values_BT.shape[1]))


def pad_rows(rows: Sequence[Sequence[int]], value: int, *, at_left: bool = False) -> Tensor:
    """Stack rows of ids into one (B, T) tensor, padded with `value` to the longest row."""
    width = max(map(len, rows))
    paddings = [[value] * (width - len(row)) for row in rows]
    padded = [[*padding, *row] if at_left else [*row, *padding] for row, padding in zip(rows, paddings, strict=True)]
    return torch.tensor(padded, dtype=torch.int64)


def token_mask(mask: Tensor, shape: torch.Size, name: str) -> Tensor:
    """Convert a mask to booleans: 1 and True become True; 0, False and -100 become False. Raises InputError on any
    other value.

    All other code leaves the meaning of -100 to this function.
    """
    if mask.shape != shape:
        raise ShapeError(
            explain(f"{name} shape", got=tuple(mask.shape), expected=f"{tuple(shape)}, the shape of its ids")
        )
    if mask.dtype == torch.bool:
        return mask
    counted = mask == 1
    invalid = ~(counted | (mask == 0) | (mask == IGNORE_INDEX))
    if bool(invalid.any()):
        expected = f"1 on tokens that count, 0 or {IGNORE_INDEX} elsewhere"
        raise InputError(explain(f"{name} values", got=mask[invalid][0].item(), expected=expected))
    return counted


def check_alignment(student: Sequences, student_rows: Tensor, teacher: Sequences, teacher_rows: Tensor) -> None:
    """Raise AlignmentError unless row n of the student and row n of the teacher predict the same token, for every n."""
    if len(student_rows) != len(teacher_rows):
        lengths = (len(student_rows), len(teacher_rows))
        raise ShapeError(explain("sdpo index pairs", got=lengths, expected="equal lengths"))
    student_targets, teacher_targets = student.next_tokens(student_rows), teacher.next_tokens(teacher_rows)
    differs = (student_targets != teacher_targets).nonzero()[:, 0]
    # With an off-by-one error in the indices, every row would be trained towards the wrong token.
    if differs.numel():
        n = int(differs[0])
        where = f"student {divmod(int(student_rows[n]), student.width)}"
        where += f" and teacher {divmod(int(teacher_rows[n]), teacher.width)}"
        ratio = f"{differs.numel()} of {len(student_targets)}"
        raise AlignmentError(
            explain(
                f"index pair {n}: {where} predict different tokens ({ratio} pairs do)",
                got=f"token ids {int(student_targets[n])} and {int(teacher_targets[n])}",
                expected="the same token",
                fix="Both indices name the row *before* the target token; pass index pairs when the lengths differ.",
            )
        )


def positions_in_sites(*sides: Tensor) -> Tensor:
    """Return each row's position within its error site: 0, 1, 2, ... counted from the site's first token.

    `sides` are the row indices of the student and of the teacher. A new site begins wherever the student's or the
    teacher's indices are not consecutive. This rule separates all sites: two hints for one turn have separate contexts,
    two turns have at least a header between them, and the last row of a sequence predicts nothing.
    """
    index_N = torch.arange(sides[0].numel(), device=sides[0].device)
    is_consecutive = torch.ones_like(index_N[1:], dtype=torch.bool)
    for rows_N in sides:
        is_consecutive &= rows_N[1:] == rows_N[:-1] + 1
    start_N = index_N.clone()
    start_N[1:].masked_fill_(is_consecutive, 0)
    # The running maximum carries the index of each site's first row forward to all of its rows.
    return index_N - start_N.cummax(0).values if index_N.numel() else index_N
