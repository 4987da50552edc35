"""Check the documented keys of a batch, and convert them to the rows that each channel's loss is computed on.

The contrast with an unrelated hint (`RowWeighting.contrast`) has its own keys, read only if the contrast is on:

    ctx_contrast_input_ids (B'', T'')   the sites' contexts with an unrelated hint (for another kind of error)
    ctx_contrast_attention_mask         optional
    sdpo_contrast_index (N, 2)          for row n of channel 2, the row that predicts the same token; (-1, -1): no row

Shape suffixes: N rows of channel 2, M of them with a contrast.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from composer_replication.batch.alignment import (
    Sequences,
    check_alignment,
    pad_right,
    positions_in_sites,
    token_mask,
)
from composer_replication.batch.tree_batch import ContrastRows, FlatBatch, PairRows, TargetRows
from composer_replication.errors import BatchKeyError, InputError, ShapeError, explain

# The keys are documented in docs/reference/compose_loss.md; users build such batches themselves.
STUDENT_KEYS = ("input_ids", "response_mask", "attention_mask")
HINT_KEYS = (
    "ctx_teacher_input_ids",
    "ctx_teacher_attention_mask",
    "sdpo_loss_mask",
    "sdpo_student_index",
    "sdpo_teacher_index",
)
CONTRAST_KEYS = ("ctx_contrast_input_ids", "ctx_contrast_attention_mask", "sdpo_contrast_index")
PAIR_REQUIRED = (
    "dpo_chosen_input_ids",
    "dpo_chosen_response_mask",
    "dpo_rejected_input_ids",
    "dpo_rejected_response_mask",
)
PAIR_REFERENCE = ("dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs")
ID_KEYS = (
    "input_ids",
    "ctx_teacher_input_ids",
    "ctx_contrast_input_ids",
    "dpo_chosen_input_ids",
    "dpo_rejected_input_ids",
)
PAIR_SIDES = ("chosen", "rejected")
PAIR_OPTIONAL = ("dpo_chosen_attention_mask", "dpo_rejected_attention_mask")


def _read_sequences(inputs: Mapping[str, Tensor], ids_key: str, mask_key: str) -> Sequences:
    ids = inputs[ids_key]
    if ids.dim() != 2 or not ids.numel():
        raise ShapeError(explain(f"{ids_key} shape", got=tuple(ids.shape), expected="(B, T) with B and T above 0"))
    if ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(explain(f"{ids_key} dtype", got=ids.dtype, expected="int64 or int32"))
    mask = inputs.get(mask_key)
    return Sequences(ids, None if mask is None else token_mask(mask, ids.shape, mask_key))


class NeededChannels(NamedTuple):
    """The optional inputs that a training step needs.

    These are the inputs of channel 2 (hint distillation) and of channel 3 (preference pairs), the reference log-probs
    of the pairs, and the contrast with an unrelated hint.
    """

    hints: bool = True
    pairs: bool = True
    reference: bool = True
    contrast: bool = False


class _HintRows(NamedTuple):
    """The rows of channel 2 (hint distillation): row n of the student and row n of the teacher predict the same
    token.
    """

    teacher: Sequences
    student_rows: Tensor
    teacher_rows: Tensor


def read_flat_batch(inputs: Mapping[str, Tensor], num_embeddings: int, needed: NeededChannels) -> FlatBatch:
    """Check a batch's inputs and return a FlatBatch with the rows of every needed channel.

    All checks run here, before the first forward pass. A key whose value is None counts as absent.
    """
    inputs = check_inputs(inputs, num_embeddings)
    student, response_rows = _read_student(inputs)
    response = TargetRows(response_rows, student.next_tokens(response_rows))
    hint = _read_hints(inputs, student) if needed.hints else None
    pair_sequences, pairs = read_pairs(inputs, needs_reference=needed.reference) if needed.pairs else (None, None)
    if hint is None:
        if needed.hints and needed.contrast and (present := _present_keys(inputs, CONTRAST_KEYS)):
            raise BatchKeyError(_explain_missing_keys("channel 2's contrast", present, "ctx_teacher_input_ids"))
        no_rows = response_rows[:0]
        return FlatBatch(response, no_rows, no_rows, pairs, sequences=student, pair_sequences=pair_sequences)
    position_N = positions_in_sites(hint.student_rows, hint.teacher_rows)
    contrast_contexts, contrast = _read_contrast(inputs, student, hint) if needed.contrast else (None, None)
    # Each site is counted once, by its first row.
    is_first_N = position_N == 0
    lacks_contrast_N = is_first_N if contrast is None else is_first_N.index_fill(0, contrast.numbers, False)
    return FlatBatch(
        response,
        hint.student_rows,
        hint.teacher_rows,
        pairs,
        target_tokens=student.next_tokens(hint.student_rows),
        site_position=position_N,
        contrast=contrast,
        sites_without_contrast=int(lacks_contrast_N.sum()) if needed.contrast else 0,
        sequences=student,
        contexts=hint.teacher,
        contrast_contexts=contrast_contexts,
        pair_sequences=pair_sequences,
    )


def check_inputs(inputs: Mapping[str, Tensor], num_embeddings: int) -> dict[str, Tensor]:
    """Return the inputs that are not None. Raises on unknown keys and on token ids outside the vocabulary."""
    tensors = {key: value for key, value in inputs.items() if value is not None}  # pyright: ignore[reportUnnecessaryComparison]
    _check_keys(tensors)
    _check_ids_in_vocabulary(tensors, num_embeddings)
    return tensors


def _check_keys(inputs: Mapping[str, Tensor]) -> None:
    """Raise on unknown keys that begin with one of this package's prefixes, and on values that are not tensors."""
    # A misspelled key with one of our prefixes would silently switch off its channel. Other keys are not ours to judge.
    known_keys = {*STUDENT_KEYS, *HINT_KEYS, *CONTRAST_KEYS, *PAIR_REQUIRED, *PAIR_REFERENCE, *PAIR_OPTIONAL}
    for key, value in inputs.items():
        if key in known_keys and not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(explain(key, got=type(value).__name__, expected="a tensor"))
        if key == "position_ids":
            fix = "Remove it: positions are derived from the attention mask."
            raise BatchKeyError(explain("batch key", got=repr(key), expected="no such key", fix=fix))
        if key not in known_keys and key.startswith(("dpo_", "sdpo_", "ctx_teacher", "ctx_contrast")):
            close = difflib.get_close_matches(key, known_keys, n=1)
            fix = f"Did you mean {close[0]!r}?" if close else ""
            raise BatchKeyError(explain("batch key", got=repr(key), expected=f"one of {sorted(known_keys)}", fix=fix))


def _check_ids_in_vocabulary(inputs: Mapping[str, Tensor], num_embeddings: int) -> None:
    """Raise InputError if a token id, including one at padding, has no embedding."""
    # On CUDA an index out of range triggers a device-side assert, after which the process can no longer use the GPU.
    for key in ID_KEYS:
        ids = inputs.get(key)
        if ids is None or ids.is_floating_point():
            continue
        outside = ((ids < 0) | (ids >= num_embeddings)).nonzero()
        if outside.numel():
            where = tuple(outside[0].tolist())
            raise InputError(
                explain(
                    f"{key}{list(where)} out of range ({outside.shape[0]} such ids)",
                    got=int(ids[where]),
                    expected=f"0..{num_embeddings - 1}",
                    fix="Pad with any valid token id, and set attention_mask to 0 there.",
                )
            )


def _read_student(inputs: Mapping[str, Tensor]) -> tuple[Sequences, Tensor]:
    """Return the student's sequences and the rows that predict response tokens."""
    missing = [key for key in ("input_ids", "response_mask") if key not in inputs]
    if missing:
        raise BatchKeyError(explain("batch keys", got=sorted(inputs), expected=f"also {missing}"))
    student = _read_sequences(inputs, "input_ids", "attention_mask")
    counted = token_mask(inputs["response_mask"], student.input_ids.shape, "response_mask")
    student.check_not_in_padding(counted, "response_mask")
    return student, student.rows_predicting(counted)


def _read_hints(inputs: Mapping[str, Tensor], student: Sequences) -> _HintRows | None:
    """Return the inputs of channel 2 (hint distillation), or None if all its keys are absent or empty."""
    present = _present_keys(inputs, HINT_KEYS)
    if not present:
        return None
    if "ctx_teacher_input_ids" not in present:
        raise BatchKeyError(_explain_missing_keys("channel 2 (SDPO)", present, "ctx_teacher_input_ids"))
    # Index pairs match student rows to teacher rows. Without them both sides must have the same shape and share a mask.
    teacher = _read_sequences(inputs, "ctx_teacher_input_ids", "ctx_teacher_attention_mask")
    index_keys = {"sdpo_student_index", "sdpo_teacher_index"}
    if present_keys := index_keys & set(inputs):
        if present_keys != index_keys:
            raise BatchKeyError(_explain_missing_keys("channel 2 (SDPO)", present, *sorted(index_keys - present_keys)))
        student_rows = student.index_pairs_to_rows(inputs["sdpo_student_index"], "sdpo_student_index")
        teacher_rows = teacher.index_pairs_to_rows(inputs["sdpo_teacher_index"], "sdpo_teacher_index")
        _check_mask_matches_rows(inputs, student, student_rows)
    else:
        student_rows = teacher_rows = _rows_without_index_pairs(inputs, student, teacher)
    check_alignment(student, student_rows, teacher, teacher_rows)
    return _HintRows(teacher, student_rows, teacher_rows) if len(student_rows) else None


def _read_contrast(
    inputs: Mapping[str, Tensor], student: Sequences, hint: _HintRows
) -> tuple[Sequences | None, ContrastRows | None]:
    """Return the contexts with unrelated hints and their rows, after the same checks as for the hinted contexts."""
    present = _present_keys(inputs, CONTRAST_KEYS)
    if not present:
        return None, None
    if missing := [key for key in ("ctx_contrast_input_ids", "sdpo_contrast_index") if key not in present]:
        raise BatchKeyError(_explain_missing_keys("channel 2's contrast", present, *missing))
    sequences = _read_sequences(inputs, "ctx_contrast_input_ids", "ctx_contrast_attention_mask")
    index, num_rows = inputs["sdpo_contrast_index"], len(hint.student_rows)
    if index.shape != (num_rows, 2):
        expected = f"{(num_rows, 2)}, one pair for each row of channel 2"
        raise ShapeError(explain("sdpo_contrast_index", got=tuple(index.shape), expected=expected))
    # (-1, -1) marks rows of sites without an unrelated hint.
    positions_M = (index != -1).any(-1).nonzero()[:, 0]
    rows = sequences.index_pairs_to_rows(index[positions_M], "sdpo_contrast_index, rows that are not -1")
    check_alignment(student, hint.student_rows[positions_M], sequences, rows)
    return (sequences, ContrastRows(positions_M, rows)) if len(rows) else (None, None)


def read_pairs(
    inputs: Mapping[str, Tensor], *, needs_reference: bool
) -> tuple[Sequences, PairRows] | tuple[None, None]:
    """Return the sequences and rows of channel 3 (preference pairs), with the chosen sequences first; return None
    for both if all its keys are absent or empty.
    """
    present = _present_keys(inputs, (*PAIR_REQUIRED, *PAIR_REFERENCE, *PAIR_OPTIONAL))
    if not present:
        return None, None
    required = (*PAIR_REQUIRED, *PAIR_REFERENCE) if needs_reference else PAIR_REQUIRED
    if missing := [key for key in required if key not in present]:
        fix = " Compute them once with the frozen initial model." if set(missing) <= set(PAIR_REFERENCE) else ""
        raise BatchKeyError(_explain_missing_keys("channel 3 (DPO)", present, *missing) + fix)
    (chosen, chosen_counted), (rejected, rejected_counted) = (_read_side(inputs, side) for side in PAIR_SIDES)
    num_pairs = chosen.input_ids.shape[0]
    if num_pairs != rejected.input_ids.shape[0]:
        counts = (num_pairs, rejected.input_ids.shape[0])
        raise ShapeError(explain("dpo_chosen and dpo_rejected sequences", got=counts, expected="equal numbers"))
    # One batch of both sides needs one forward pass instead of two.
    stacked = chosen.stack(rejected)
    counted = torch.cat([pad_right(mask, stacked.width) for mask in (chosen_counted, rejected_counted)])
    rows = stacked.rows_predicting(counted)
    references = [_read_reference(inputs, side, num_pairs) if needs_reference else None for side in PAIR_SIDES]
    return stacked, PairRows(rows, stacked.next_tokens(rows), rows // stacked.width, num_pairs, *references)


def _present_keys(inputs: Mapping[str, Tensor], keys: tuple[str, ...]) -> list[str]:
    # An empty tensor counts as an absent key: there is nothing to compute.
    return [key for key in keys if key in inputs and inputs[key].numel() > 0]


def _explain_missing_keys(channel: str, present: list[str], *missing: str) -> str:
    fix = "Pass all of them or none, or set the weight of the channel to 0."
    return explain(f"{channel} has only some of its keys", got=present, expected=f"also {', '.join(missing)}", fix=fix)


def _check_mask_matches_rows(inputs: Mapping[str, Tensor], student: Sequences, rows: Tensor) -> None:
    """Raise BatchKeyError if the inputs contain a mask as well as index pairs, and the mask marks other tokens than
    the pairs.
    """
    if (mask := inputs.get("sdpo_loss_mask")) is None:
        return
    counted = token_mask(mask, student.input_ids.shape, "sdpo_loss_mask")
    predicted = torch.zeros_like(counted)
    predicted.view(-1)[rows + 1] = True
    if not torch.equal(predicted[:, 1:], counted[:, 1:]):
        counts = f"{int(counted[:, 1:].sum())} marked tokens, {int(predicted.sum())} indexed ones"
        raise BatchKeyError(
            explain(
                "sdpo_loss_mask and sdpo_student_index", got=counts, expected="the same tokens", fix="Pass only one."
            )
        )


def _rows_without_index_pairs(inputs: Mapping[str, Tensor], student: Sequences, teacher: Sequences) -> Tensor:
    """Return the rows of channel 2 (hint distillation) for a batch without index pairs, in which student and teacher
    have the same token at the same position.
    """
    shape = student.input_ids.shape
    if teacher.input_ids.shape != shape:
        raise ShapeError(
            explain(
                "ctx_teacher_input_ids without index pairs",
                got=tuple(teacher.input_ids.shape),
                expected=f"{tuple(shape)}, the shape of input_ids",
                fix="Pass sdpo_student_index and sdpo_teacher_index if the hinted context is longer.",
            )
        )
    mask = inputs.get("sdpo_loss_mask")
    if mask is None:
        counted = torch.ones_like(student.input_ids, dtype=torch.bool)
        for side in (student, teacher):
            counted = counted if side.attention_mask is None else counted & side.attention_mask
        return student.rows_predicting(counted)
    counted = token_mask(mask, shape, "sdpo_loss_mask")
    for side in (student, teacher):
        side.check_not_in_padding(counted, "sdpo_loss_mask")
    return student.rows_predicting(counted)


def _read_side(inputs: Mapping[str, Tensor], side: str) -> tuple[Sequences, Tensor]:
    """Return the chosen or rejected sequences and the mask of their response tokens. Raises if a response is empty."""
    sequences = _read_sequences(inputs, f"dpo_{side}_input_ids", f"dpo_{side}_attention_mask")
    name = f"dpo_{side}_response_mask"
    counted = token_mask(inputs[name], sequences.input_ids.shape, name)
    sequences.check_not_in_padding(counted, name)
    lengths = torch.bincount(sequences.rows_predicting(counted) // sequences.width, minlength=counted.shape[0])
    if bool((lengths == 0).any()):
        pair = int((lengths == 0).nonzero()[0, 0])
        raise InputError(explain(f"{name} of pair {pair}", got="no response token", expected="at least one"))
    return sequences, counted


def _read_reference(inputs: Mapping[str, Tensor], side: str, num_pairs: int) -> Tensor:
    reference = inputs[f"dpo_{side}_ref_logprobs"].detach()
    if reference.shape != (num_pairs,):
        # Summed, not averaged: DPO compares log-probs of whole responses.
        expected = f"({num_pairs},), one summed log-prob per pair"
        raise ShapeError(explain(f"dpo_{side}_ref_logprobs", got=tuple(reference.shape), expected=expected))
    return reference
