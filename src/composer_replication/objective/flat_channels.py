"""Every channel of a batch from passes over flat sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composer_replication.loss.linear import LinearHead
from composer_replication.objective import contract
from composer_replication.objective.alignment import RowIndex, Sequences
from composer_replication.objective.attention.causality import check_causal
from composer_replication.objective.channels import (
    Channel,
    Options,
    hint_channel,
    in_head_dtype,
    pair_channel,
    response_channel,
    summed_logprobs,
)
from composer_replication.objective.flat_teachers import FlatTeachers
from composer_replication.objective.model_head import head_of, hidden_states
from composer_replication.objective.row_weighting import HintTargets
from composer_replication.objective.teachers import models_of
from composer_replication.objective.wrapped import agreed_most


def flat_channels(model: nn.Module, batch: contract.Batch, options: Options) -> tuple[Channel, Channel, Channel]:
    """Cross-entropy, the hinted teacher and the pairs, in that order."""
    student = batch.student
    head = head_of(model, student.input_ids)
    check_causal(model, _longest(student))
    contrast = None if batch.hint is None else batch.hint.contrast
    others = [int(each is not None) for each in (batch.hint, batch.pairs, contrast)]
    hints_anywhere, pairs_anywhere, contrast_anywhere = agreed_most(models_of(model, options.teachers), others)
    hidden_BTH = in_head_dtype(hidden_states(model, student.input_ids, student.attention_mask), head)
    rows = batch.response_rows
    rows_NH = hidden_BTH[rows.sequence_N, rows.position_N]
    targets_N = rows.next_tokens(student.input_ids)
    lm_ce = response_channel(head, rows_NH, targets_N, options.label_smoothing, options.divide)
    sdpo = replay = Channel(lm_ce.value.new_zeros(()), 0)
    teachers = FlatTeachers(model, options, student, bool(contrast_anywhere))
    if batch.hint is not None:
        hint = batch.hint
        student_NH = hidden_BTH[hint.student_rows.sequence_N, hint.student_rows.position_N]
        tokens_N = hint.student_rows.next_tokens(student.input_ids)
        taught = teachers.rows(hint, student_NH)
        targets = HintTargets(tokens_N, hint.positions(), taught.contrast, hint.sites_without_contrast)
        sdpo = hint_channel(head, student_NH, taught.teachers, options, targets)
    elif hints_anywhere:
        teachers.passes_of_others(hidden_BTH)
    if batch.pairs is not None:
        replay = _pair_channel(model, head, batch.pairs, options)
    elif pairs_anywhere:
        replay = Channel(hidden_states(model, student.input_ids[:1, :1], None).sum() * 0.0, 0)
    return lm_ce, sdpo, replay


def sequence_logprobs(
    model: nn.Module, head: LinearHead, chosen: contract.PairSide, rejected: contract.PairSide
) -> tuple[Tensor, Tensor]:
    """Summed response log-probs (2B,), chosen first, and the responses' lengths."""
    both = _stack_right_padded(chosen.sequences, rejected.sequences)
    num_pairs = chosen.sequences.input_ids.shape[0]
    sequence_N = torch.cat([chosen.rows.sequence_N, rejected.rows.sequence_N + num_pairs])
    position_N = torch.cat([chosen.rows.position_N, rejected.rows.position_N])
    rows = RowIndex(sequence_N, position_N)
    hidden_BTH = in_head_dtype(hidden_states(model, both.input_ids, both.attention_mask), head)
    rows_NH = hidden_BTH[sequence_N, position_N]
    return summed_logprobs(head, rows_NH, rows.next_tokens(both.input_ids), sequence_N, 2 * num_pairs)


def _pair_channel(model: nn.Module, head: LinearHead, pairs: contract.PairChannel, options: Options) -> Channel:
    """Channel 3: chosen and rejected sequences in one forward pass."""
    logprobs, lengths = sequence_logprobs(model, head, pairs.chosen, pairs.rejected)
    references = (pairs.chosen.reference(), pairs.rejected.reference()) if options.preference.needs_reference else None
    return pair_channel(logprobs, lengths, references, options.preference, options.divide)


def _longest(sequences: Sequences) -> Tensor:
    """The ids of the sequence with most real tokens."""
    if sequences.attention_mask is None:
        return sequences.input_ids[0]
    real = sequences.attention_mask.bool()
    number = int(real.sum(1).argmax())
    return sequences.input_ids[number][real[number]]


def _stack_right_padded(first: Sequences, second: Sequences) -> Sequences:
    """Two batches as one. Right padding lies behind every real token, so causal attention needs no mask for it."""
    width = max(first.input_ids.shape[1], second.input_ids.shape[1])

    def widened(values: Tensor) -> Tensor:
        return nn.functional.pad(values, (0, width - values.shape[1]))

    ids = torch.cat([widened(first.input_ids), widened(second.input_ids)])
    if first.attention_mask is None and second.attention_mask is None:
        return Sequences(ids, None)
    masks = [
        torch.ones_like(side.input_ids, dtype=torch.bool) if side.attention_mask is None else side.attention_mask
        for side in (first, second)
    ]
    return Sequences(ids, torch.cat([widened(mask) for mask in masks]))
