"""The batch contract: which keys a channel needs, what they must look like, and the rows they select.

A mask marks *tokens*; a loss needs the *rows that predict them*, one position earlier. That shift happens here and
nowhere else. Index pairs (N, 2) of (sequence, position) name the predicting row directly. Shape suffixes: B sequences,
T positions, N selected rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_replication.errors import AlignmentError, BatchKeyError, InputError, ShapeError, explain

IGNORE_INDEX = -100

HINT_KEYS = (
    "ctx_teacher_input_ids",
    "ctx_teacher_attention_mask",
    "sdpo_loss_mask",
    "sdpo_student_index",
    "sdpo_teacher_index",
)
PAIR_REQUIRED = (
    "dpo_chosen_input_ids",
    "dpo_chosen_response_mask",
    "dpo_rejected_input_ids",
    "dpo_rejected_response_mask",
)
PAIR_REFERENCE = ("dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs")
PAIR_OPTIONAL = ("dpo_chosen_attention_mask", "dpo_rejected_attention_mask")


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


@dataclass(frozen=True, eq=False)
class HintChannel:
    """Channel 2: row n of the student and row n of the teacher predict the same token."""

    teacher: Sequences
    student_rows: RowIndex
    teacher_rows: RowIndex


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


def token_mask(mask: Tensor, shape: torch.Size, name: str) -> Tensor:
    """1 (True) counts; 0 and -100 do not; anything else is an error. The one place where -100 becomes a boolean."""
    if mask.shape != shape:
        raise ShapeError(explain(f"{name} shape", got=tuple(mask.shape), expected=f"{tuple(shape)}, as its ids"))
    if mask.dtype == torch.bool:
        return mask
    counted = mask == 1
    if not bool((counted | (mask == 0) | (mask == IGNORE_INDEX)).all()):
        raise InputError(
            explain(f"{name} values", got="others", expected=f"1 on tokens that count, 0 or {IGNORE_INDEX}")
        )
    return counted


def rows_predicting(counted_BT: Tensor) -> RowIndex:
    """Rows that predict the marked tokens; nothing predicts a first token, so a mark there selects no row."""
    sequence, position = counted_BT[:, 1:].nonzero(as_tuple=True)
    return RowIndex(sequence, position)


def read_sequences(inputs: Mapping[str, Tensor], ids_key: str, mask_key: str) -> Sequences:
    ids = inputs[ids_key]
    if ids.dim() != 2:
        raise ShapeError(explain(f"{ids_key} shape", got=tuple(ids.shape), expected="(B, T)"))
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ShapeError(explain(f"{ids_key} dtype", got=ids.dtype, expected="an integer dtype"))
    mask = inputs.get(mask_key)
    return Sequences(ids, None if mask is None else token_mask(mask, ids.shape, mask_key))


def read_student(inputs: Mapping[str, Tensor]) -> tuple[Sequences, RowIndex]:
    """The student's sequences and the rows that predict response tokens."""
    missing = [key for key in ("input_ids", "response_mask") if key not in inputs]
    if missing:
        raise BatchKeyError(explain("batch keys", got=sorted(inputs), expected=f"also {missing}"))
    student = read_sequences(inputs, "input_ids", "attention_mask")
    counted = token_mask(inputs["response_mask"], student.input_ids.shape, "response_mask")
    check_not_in_padding(counted, student, "response_mask")
    return student, rows_predicting(counted)


def read_hint_channel(inputs: Mapping[str, Tensor], student: Sequences) -> HintChannel | None:
    """Channel 2's inputs, or None when all its keys are absent or empty."""
    present = _present(inputs, HINT_KEYS)
    if not present:
        return None
    if "ctx_teacher_input_ids" not in present:
        raise BatchKeyError(_half_a_channel("channel 2 (SDPO)", present, "ctx_teacher_input_ids"))
    teacher = read_sequences(inputs, "ctx_teacher_input_ids", "ctx_teacher_attention_mask")
    index_keys = {"sdpo_student_index", "sdpo_teacher_index"}
    if given := index_keys & set(inputs):
        if given != index_keys:
            raise BatchKeyError(_half_a_channel("channel 2 (SDPO)", present, *sorted(index_keys - given)))
        student_rows = _read_index(inputs["sdpo_student_index"], student, "sdpo_student_index")
        teacher_rows = _read_index(inputs["sdpo_teacher_index"], teacher, "sdpo_teacher_index")
        _check_mask_agrees(inputs, student, student_rows)
    else:
        student_rows = teacher_rows = _rows_of_equal_shapes(inputs, student, teacher)
    check_alignment(student.input_ids, student_rows, teacher.input_ids, teacher_rows)
    return HintChannel(teacher, student_rows, teacher_rows) if len(student_rows) else None


def read_pair_channel(inputs: Mapping[str, Tensor], *, needs_reference: bool) -> PairChannel | None:
    """Channel 3's inputs, or None when all its keys are absent or empty."""
    present = _present(inputs, (*PAIR_REQUIRED, *PAIR_REFERENCE, *PAIR_OPTIONAL))
    if not present:
        return None
    required = (*PAIR_REQUIRED, *PAIR_REFERENCE) if needs_reference else PAIR_REQUIRED
    if missing := [key for key in required if key not in present]:
        fix = " Compute them once with the frozen start weights." if set(missing) <= set(PAIR_REFERENCE) else ""
        raise BatchKeyError(_half_a_channel("channel 3 (DPO)", present, *missing) + fix)
    sides = [_read_side(inputs, side, needs_reference) for side in ("chosen", "rejected")]
    counts = [side.sequences.input_ids.shape[0] for side in sides]
    if counts[0] != counts[1]:
        raise ShapeError(
            explain("dpo_chosen and dpo_rejected sequences", got=tuple(counts), expected="one number of pairs")
        )
    return PairChannel(*sides)


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


def _present(inputs: Mapping[str, Tensor], keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if key in inputs and inputs[key] is not None and inputs[key].numel() > 0]


def _half_a_channel(channel: str, present: list[str], *missing: str) -> str:
    fix = "Give all of them, none of them, or weight 0."
    return explain(f"{channel} has half its keys", got=present, expected=f"also {', '.join(missing)}", fix=fix)


def _read_index(index: Tensor, sequences: Sequences, name: str) -> RowIndex:
    if index.dim() != 2 or index.shape[1] != 2 or index.is_floating_point():
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
        return rows_predicting(counted)
    counted = token_mask(mask, shape, "sdpo_loss_mask")
    check_not_in_padding(counted, student, "sdpo_loss_mask")
    return rows_predicting(counted)


def _read_side(inputs: Mapping[str, Tensor], side: str, needs_reference: bool) -> PairSide:
    sequences = read_sequences(inputs, f"dpo_{side}_input_ids", f"dpo_{side}_attention_mask")
    name = f"dpo_{side}_response_mask"
    counted = token_mask(inputs[name], sequences.input_ids.shape, name)
    check_not_in_padding(counted, sequences, name)
    without = (~counted[:, 1:].any(-1)).nonzero()[:, 0]
    if without.numel():
        raise InputError(explain(f"{name} of pair {int(without[0])}", got="no response token", expected="at least one"))
    reference = inputs[f"dpo_{side}_ref_logprobs"].detach() if needs_reference else None
    if reference is not None and reference.shape != sequences.input_ids.shape[:1]:
        expected = f"({sequences.input_ids.shape[0]},), one summed log-prob per pair"
        raise ShapeError(explain(f"dpo_{side}_ref_logprobs", got=tuple(reference.shape), expected=expected))
    return PairSide(sequences, rows_predicting(counted), reference)
