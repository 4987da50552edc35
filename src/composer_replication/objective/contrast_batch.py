"""The flat keys of the contrast with a wrong hint, `RowWeighting.contrast`.

    ctx_contrast_input_ids (B'', T'')   the sites' contexts with a hint of another kind
    ctx_contrast_attention_mask         optional
    sdpo_contrast_index (N, 2)          for row n of channel 2 the row that predicts the same token; -1, -1: has none

They are read only where the switch is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from composer_replication.errors import BatchKeyError, ShapeError, explain
from composer_replication.objective.alignment import RowIndex, check_alignment, read_index
from composer_replication.objective.contract import (
    CONTRAST_KEYS,
    Batch,
    ContrastContexts,
    HintChannel,
    half_a_channel,
    present_keys,
    read_sequences,
)


def with_contrast(batch: Batch, inputs: Mapping[str, Tensor]) -> Batch:
    """The batch with its wrong hints, checked and aligned as the right ones are; without any, all sites are counted."""
    inputs = {key: value for key, value in inputs.items() if value is not None}  # pyright: ignore[reportUnnecessaryComparison]
    present = present_keys(inputs, CONTRAST_KEYS)
    if batch.hint is None:
        if present:
            raise BatchKeyError(half_a_channel("channel 2's contrast", present, "ctx_teacher_input_ids"))
        return batch
    contrast = _read(batch, batch.hint, inputs, present) if present else None
    is_first_N = batch.hint.positions() == 0
    num_sites = int(is_first_N.sum())
    num_with = 0 if contrast is None else int(is_first_N[contrast.numbers_M].sum())
    hint = replace(batch.hint, contrast=contrast, sites_without_contrast=num_sites - num_with)
    return replace(batch, hint=hint)


def _read(batch: Batch, hint: HintChannel, inputs: Mapping[str, Tensor], present: list[str]) -> ContrastContexts | None:
    missing = [key for key in ("ctx_contrast_input_ids", "sdpo_contrast_index") if key not in present]
    if missing:
        raise BatchKeyError(half_a_channel("channel 2's contrast", present, *missing))
    sequences = read_sequences(inputs, "ctx_contrast_input_ids", "ctx_contrast_attention_mask")
    index = inputs["sdpo_contrast_index"]
    if index.shape != (len(hint.student_rows), 2):
        expected = f"{(len(hint.student_rows), 2)}, a row for each of channel 2's"
        raise ShapeError(explain("sdpo_contrast_index", got=tuple(index.shape), expected=expected))
    numbers_M = (index != -1).any(-1).nonzero()[:, 0]
    rows = read_index(index[numbers_M], sequences, "sdpo_contrast_index, rows that are not -1")
    student = RowIndex(hint.student_rows.sequence_N[numbers_M], hint.student_rows.position_N[numbers_M])
    check_alignment(batch.student.input_ids, student, sequences.input_ids, rows)
    return ContrastContexts(sequences, rows, numbers_M) if len(rows) else None
