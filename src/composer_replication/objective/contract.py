"""The batch contract: which keys a channel needs, what they must look like, and the rows they select."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.errors import BatchKeyError, InputError, ShapeError, explain
from composer_replication.objective.alignment import (
    RowIndex,
    Sequences,
    check_alignment,
    check_not_in_padding,
    read_index,
    rows_predicting,
    token_mask,
)
from composer_replication.objective.row_weighting import positions_in_sites

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
PAIR_OPTIONAL = ("dpo_chosen_attention_mask", "dpo_rejected_attention_mask")


@dataclass(frozen=True, eq=False)
class ContrastContexts:
    """Contexts with a wrong hint: row m predicts the same token as row `numbers_M[m]` of the channel."""

    sequences: Sequences
    rows: RowIndex
    numbers_M: Tensor


@dataclass(frozen=True, eq=False)
class HintChannel:
    """Channel 2: row n of the student and row n of the teacher predict the same token."""

    teacher: Sequences
    student_rows: RowIndex
    teacher_rows: RowIndex
    contrast: ContrastContexts | None = None
    sites_without_contrast: int = 0

    def positions(self) -> Tensor:
        """The number of each target token in its site."""
        sides = (self.student_rows, self.teacher_rows)
        return positions_in_sites(*((side.sequence_N, side.position_N) for side in sides))


@dataclass(frozen=True, eq=False)
class PairSide:
    """One side of channel 3: sequences, the rows that predict their responses, and the reference's log-probs (B,)."""

    sequences: Sequences
    rows: RowIndex
    ref_logprobs: Tensor | None

    def reference(self) -> Tensor:
        if self.ref_logprobs is None:
            raise BatchKeyError(explain("dpo reference log-probs", got=None, expected="read with needs_reference=True"))
        return self.ref_logprobs


@dataclass(frozen=True, eq=False)
class PairChannel:
    chosen: PairSide
    rejected: PairSide


@dataclass(frozen=True, eq=False)
class Batch:
    """A whole batch, read: what is None has nothing to do."""

    student: Sequences
    response_rows: RowIndex
    hint: HintChannel | None
    pairs: PairChannel | None

    def counts(self) -> dict[str, int]:
        """Items of each channel."""
        hints = 0 if self.hint is None else len(self.hint.student_rows)
        pairs = 0 if self.pairs is None else self.pairs.chosen.sequences.input_ids.shape[0]
        return dict(zip(CHANNELS, (len(self.response_rows), hints, pairs), strict=True))


def read_sequences(inputs: Mapping[str, Tensor], ids_key: str, mask_key: str) -> Sequences:
    ids = inputs[ids_key]
    if ids.dim() != 2 or not ids.numel():
        raise ShapeError(explain(f"{ids_key} shape", got=tuple(ids.shape), expected="(B, T), neither of them 0"))
    if ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(explain(f"{ids_key} dtype", got=ids.dtype, expected="int64 or int32"))
    mask = inputs.get(mask_key)
    return Sequences(ids, None if mask is None else token_mask(mask, ids.shape, mask_key))


class Channels(NamedTuple):
    """Which channels have a weight, and whether the pairs need a reference."""

    hints: bool
    pairs: bool
    reference: bool


def read_batch(inputs: Mapping[str, Tensor], num_embeddings: int, wanted: Channels) -> Batch:
    """Everything checked before the first forward pass; a key whose value is None counts as absent."""
    inputs = {key: value for key, value in inputs.items() if value is not None}
    check_keys(inputs)
    check_ids_in_vocabulary(inputs, num_embeddings)
    student, response_rows = read_student(inputs)
    hint = read_hint_channel(inputs, student) if wanted.hints else None
    pairs = read_pair_channel(inputs, needs_reference=wanted.reference) if wanted.pairs else None
    return Batch(student, response_rows, hint, pairs)


def check_keys(inputs: Mapping[str, Tensor]) -> None:
    """Keys that look like ours but are not, and values that are no tensors: a typo must not switch a channel off."""
    known = {
        "input_ids",
        "response_mask",
        "attention_mask",
        *HINT_KEYS,
        *CONTRAST_KEYS,
        *PAIR_REQUIRED,
        *PAIR_REFERENCE,
        *PAIR_OPTIONAL,
    }
    for key, value in inputs.items():
        if key in known and not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(explain(key, got=type(value).__name__, expected="a tensor"))
        if key == "position_ids":
            fix = "Positions are counted from the attention mask; leave the key out."
            raise BatchKeyError(explain("batch key", got=repr(key), expected="none of that name", fix=fix))
        if key not in known and key.startswith(("dpo_", "sdpo_", "ctx_teacher", "ctx_contrast")):
            close = difflib.get_close_matches(key, known, n=1)
            fix = f"Did you mean {close[0]!r}?" if close else ""
            raise BatchKeyError(explain("batch key", got=repr(key), expected=f"one of {sorted(known)}", fix=fix))


def check_ids_in_vocabulary(inputs: Mapping[str, Tensor], num_embeddings: int) -> None:
    """Every id of every sequence, padding included, has an embedding: a GPU's own complaint would end the process."""
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
                    fix="Pad with a real token id and say so in the attention mask.",
                )
            )


def read_student(inputs: Mapping[str, Tensor]) -> tuple[Sequences, RowIndex]:
    """The student's sequences and the rows that predict response tokens."""
    missing = [key for key in ("input_ids", "response_mask") if key not in inputs]
    if missing:
        raise BatchKeyError(explain("batch keys", got=sorted(inputs), expected=f"also {missing}"))
    student = read_sequences(inputs, "input_ids", "attention_mask")
    counted = token_mask(inputs["response_mask"], student.input_ids.shape, "response_mask")
    check_not_in_padding(counted, student, "response_mask")
    return student, rows_predicting(counted, student)


def read_hint_channel(inputs: Mapping[str, Tensor], student: Sequences) -> HintChannel | None:
    """Channel 2's inputs, or None when all its keys are absent or empty."""
    present = present_keys(inputs, HINT_KEYS)
    if not present:
        return None
    if "ctx_teacher_input_ids" not in present:
        raise BatchKeyError(half_a_channel("channel 2 (SDPO)", present, "ctx_teacher_input_ids"))
    teacher = read_sequences(inputs, "ctx_teacher_input_ids", "ctx_teacher_attention_mask")
    index_keys = {"sdpo_student_index", "sdpo_teacher_index"}
    if given := index_keys & set(inputs):
        if given != index_keys:
            raise BatchKeyError(half_a_channel("channel 2 (SDPO)", present, *sorted(index_keys - given)))
        student_rows = read_index(inputs["sdpo_student_index"], student, "sdpo_student_index")
        teacher_rows = read_index(inputs["sdpo_teacher_index"], teacher, "sdpo_teacher_index")
        _check_mask_agrees(inputs, student, student_rows)
    else:
        student_rows = teacher_rows = _rows_of_equal_shapes(inputs, student, teacher)
    check_alignment(student.input_ids, student_rows, teacher.input_ids, teacher_rows)
    return HintChannel(teacher, student_rows, teacher_rows) if len(student_rows) else None


def read_pair_channel(inputs: Mapping[str, Tensor], *, needs_reference: bool) -> PairChannel | None:
    """Channel 3's inputs, or None when all its keys are absent or empty."""
    present = present_keys(inputs, (*PAIR_REQUIRED, *PAIR_REFERENCE, *PAIR_OPTIONAL))
    if not present:
        return None
    required = (*PAIR_REQUIRED, *PAIR_REFERENCE) if needs_reference else PAIR_REQUIRED
    if missing := [key for key in required if key not in present]:
        fix = " Compute them once with the frozen start weights." if set(missing) <= set(PAIR_REFERENCE) else ""
        raise BatchKeyError(half_a_channel("channel 3 (DPO)", present, *missing) + fix)
    sides = [_read_side(inputs, side, needs_reference) for side in ("chosen", "rejected")]
    counts = [side.sequences.input_ids.shape[0] for side in sides]
    if counts[0] != counts[1]:
        raise ShapeError(
            explain("dpo_chosen and dpo_rejected sequences", got=tuple(counts), expected="one number of pairs")
        )
    return PairChannel(*sides)


def present_keys(inputs: Mapping[str, Tensor], keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if key in inputs and inputs[key].numel() > 0]


def half_a_channel(channel: str, present: list[str], *missing: str) -> str:
    fix = "Give all of them, none of them, or weight 0."
    return explain(f"{channel} has half its keys", got=present, expected=f"also {', '.join(missing)}", fix=fix)


def _check_mask_agrees(inputs: Mapping[str, Tensor], student: Sequences, rows: RowIndex) -> None:
    """A mask beside index pairs must mark the very tokens the pairs predict."""
    if (mask := inputs.get("sdpo_loss_mask")) is None:
        return
    counted = token_mask(mask, student.input_ids.shape, "sdpo_loss_mask")
    predicted = torch.zeros_like(counted)
    predicted[rows.sequence_N, rows.position_N + 1] = True
    if not torch.equal(predicted[:, 1:], counted[:, 1:]):
        counts = f"{int(counted[:, 1:].sum())} marked tokens, {int(predicted.sum())} indexed ones"
        raise BatchKeyError(
            explain("sdpo_loss_mask and sdpo_student_index", got=counts, expected="the same tokens", fix="Drop one.")
        )


def _rows_of_equal_shapes(inputs: Mapping[str, Tensor], student: Sequences, teacher: Sequences) -> RowIndex:
    shape = student.input_ids.shape
    if teacher.input_ids.shape != shape:
        raise ShapeError(
            explain(
                "ctx_teacher_input_ids without index pairs",
                got=tuple(teacher.input_ids.shape),
                expected=f"{tuple(shape)}, as input_ids",
                fix="Give sdpo_student_index and sdpo_teacher_index when the hinted context is longer.",
            )
        )
    mask = inputs.get("sdpo_loss_mask")
    if mask is None:
        counted = torch.ones_like(student.input_ids, dtype=torch.bool)
        for side in (student, teacher):
            counted = counted if side.attention_mask is None else counted & side.attention_mask
        return rows_predicting(counted, student)
    counted = token_mask(mask, shape, "sdpo_loss_mask")
    for side in (student, teacher):
        check_not_in_padding(counted, side, "sdpo_loss_mask")
    return rows_predicting(counted, student)


def _read_side(inputs: Mapping[str, Tensor], side: str, needs_reference: bool) -> PairSide:
    sequences = read_sequences(inputs, f"dpo_{side}_input_ids", f"dpo_{side}_attention_mask")
    name = f"dpo_{side}_response_mask"
    counted = token_mask(inputs[name], sequences.input_ids.shape, name)
    check_not_in_padding(counted, sequences, name)
    rows = rows_predicting(counted, sequences)
    lengths = torch.bincount(rows.sequence_N, minlength=counted.shape[0])
    if bool((lengths == 0).any()):
        pair = int((lengths == 0).nonzero()[0, 0])
        raise InputError(explain(f"{name} of pair {pair}", got="no response token", expected="at least one"))
    reference = inputs[f"dpo_{side}_ref_logprobs"].detach() if needs_reference else None
    if reference is not None and reference.shape != sequences.input_ids.shape[:1]:
        expected = f"({sequences.input_ids.shape[0]},), one summed log-prob per pair"
        raise ShapeError(explain(f"dpo_{side}_ref_logprobs", got=tuple(reference.shape), expected=expected))
    return PairSide(sequences, rows, reference)
