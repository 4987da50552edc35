"""The three channels of one batch, each on just the rows it needs.

total = lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.eval_mode import evaluating
from composer_replication.errors import InputError, explain
from composer_replication.loss.entropy_opd import EntropyGate
from composer_replication.loss.jsd import JSD
from composer_replication.loss.linear import LinearHead
from composer_replication.loss.rows import (
    Divergence,
    check_at_least_zero,
    check_choice,
    check_positive,
    check_unit_interval,
)
from composer_replication.loss.taid import CrossEntropyToTeacher
from composer_replication.objective import contract
from composer_replication.objective.alignment import RowIndex, Sequences
from composer_replication.objective.channels import (
    Channel,
    Denominators,
    Preference,
    hint_channel,
    in_head_dtype,
    pair_channel,
    response_channel,
    summed_logprobs,
)
from composer_replication.objective.components import CHANNELS, LossComponents
from composer_replication.objective.forward import tree_hidden_states
from composer_replication.objective.model_head import embedding_count, head_of, hidden_states
from composer_replication.objective.tree_batch import TreeBatch

DPO_VARIANTS = ("dpo", "simpo")
SDPO_WRAPPERS = ("none", "taid", "entropy_opd")


class _Options(NamedTuple):
    """What the channels are asked to do."""

    divergence: Divergence
    preference: Preference
    taid_t: float | None
    token_clip: float | None
    label_smoothing: float
    divide: Denominators
    alpha: float
    beta: float


def compose_loss(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | TreeBatch,
    *,
    alpha_sdpo: float = 0.1,
    beta_replay: float = 0.05,
    sdpo_jsd_beta: float = 0.5,
    sdpo_temperature: float = 1.0,
    sdpo_token_clip: float | None = None,
    replay_dpo_beta: float = 0.1,
    lm_ce_label_smoothing: float = 0.0,
    dpo_variant: Literal["dpo", "simpo"] = "dpo",
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = "none",
    taid_t: float | None = None,
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    entropy_opd_h_max: float | None = None,
    denominators: Mapping[str, float] | None = None,
) -> LossComponents:
    """Cross-entropy on response tokens, SDPO on the erring turn's tokens, DPO or SimPO on the pairs.

    `inputs` is a mapping, or a `TreeBatch` (`objective.tree_batch`), which gives the same numbers from one forward.
    Keys of the mapping (masks hold 1 on *tokens* that count; `*_index` (N, 2) names the *row* that predicts one):

        always     input_ids (B, T), response_mask (B, T); attention_mask optional
        channel 2  ctx_teacher_input_ids (B', T'), sdpo_student_index, sdpo_teacher_index; or, when both contexts have
                   one shape, sdpo_loss_mask instead of the index pairs; ctx_teacher_attention_mask optional
        channel 3  dpo_{chosen,rejected}_{input_ids,response_mask} (P, T''), dpo_{chosen,rejected}_ref_logprobs (P,)
                   summed over each response (`objective.reference.reference_logprobs`; SimPO needs none)

    A channel is off when its weight is 0 or its keys are all absent or empty, and is then not in `components.active`;
    with a positive weight, half of its keys is an error. The teacher of channel 2 is the model itself, without gradient
    and without dropout, on the hinted context. `denominators` replaces a channel's own item count (see
    `components.counts`) so that micro-batches add up to the loss of the whole batch. With `sdpo_wrapper="taid"` the
    `sdpo_jsd` component is TAID's cross-entropy, which ends at the teacher's entropy and not at 0.
    """
    divergence = _channel_2_divergence(sdpo_wrapper, taid_t, sdpo_jsd_beta, sdpo_temperature, entropy_opd_h_max)
    preference = _preference(dpo_variant, replay_dpo_beta, simpo_beta, simpo_gamma)
    _check_weights(alpha_sdpo, beta_replay, sdpo_token_clip)
    mix, divide = taid_t if sdpo_wrapper == "taid" else None, Denominators(denominators)
    options = _Options(
        divergence, preference, mix, sdpo_token_clip, lm_ce_label_smoothing, divide, alpha_sdpo, beta_replay
    )
    lm_ce, sdpo, replay = _channels(model, inputs, options)
    total = lm_ce.value + alpha_sdpo * sdpo.value + beta_replay * replay.value
    counts: dict[str, int] = dict(zip(CHANNELS, (lm_ce.items, sdpo.items, replay.items), strict=True))
    active = tuple(name for name in CHANNELS if counts[name])
    return LossComponents(lm_ce.value, sdpo.value, replay.value, total, active=active, counts=counts)


def _channels(
    model: nn.Module, inputs: Mapping[str, Tensor] | TreeBatch, options: _Options
) -> tuple[Channel, Channel, Channel]:
    if isinstance(inputs, TreeBatch):
        inputs.check(embedding_count(model))
        return _tree_channels(model, head_of(model, inputs.tree.input_ids[None]), inputs, options)
    wanted = contract.Channels(options.alpha > 0, options.beta > 0, options.preference.needs_reference)
    batch = contract.read_batch(inputs, embedding_count(model), wanted)
    return _flat_channels(model, head_of(model, batch.student.input_ids), batch, options)


def _flat_channels(
    model: nn.Module, head: LinearHead, batch: contract.Batch, options: _Options
) -> tuple[Channel, Channel, Channel]:
    """Every channel from passes over flat sequences."""
    student = batch.student
    hidden_BTH = in_head_dtype(hidden_states(model, student.input_ids, student.attention_mask), head)
    rows = batch.response_rows
    rows_NH = hidden_BTH[rows.sequence_N, rows.position_N]
    targets_N = rows.next_tokens(student.input_ids)
    lm_ce = response_channel(head, rows_NH, targets_N, options.label_smoothing, options.divide)
    sdpo = replay = Channel(lm_ce.value.new_zeros(()), 0)
    if batch.hint is not None:
        sdpo = _hint_channel(model, head, hidden_BTH, batch.hint, options)
    if batch.pairs is not None:
        replay = _pair_channel(model, head, batch.pairs, options)
    return lm_ce, sdpo, replay


def _hint_channel(
    model: nn.Module, head: LinearHead, hidden_BTH: Tensor, hint: contract.HintChannel, options: _Options
) -> Channel:
    """Channel 2 on the student pass that channel 1 already made, and one no-grad pass over the hinted contexts."""
    with torch.no_grad(), evaluating(model):
        hinted_BTH = hidden_states(model, hint.teacher.input_ids, hint.teacher.attention_mask)
        teacher_NH = in_head_dtype(hinted_BTH[hint.teacher_rows.sequence_N, hint.teacher_rows.position_N], head)
        del hinted_BTH
    student_NH = hidden_BTH[hint.student_rows.sequence_N, hint.student_rows.position_N]
    return hint_channel(
        head, student_NH, teacher_NH, options.divergence, options.taid_t, options.token_clip, options.divide
    )


def _pair_channel(model: nn.Module, head: LinearHead, pairs: contract.PairChannel, options: _Options) -> Channel:
    """Channel 3: chosen and rejected sequences in one forward pass."""
    logprobs, lengths = sequence_logprobs(model, head, pairs.chosen, pairs.rejected)
    references = (pairs.chosen.reference(), pairs.rejected.reference()) if options.preference.needs_reference else None
    return pair_channel(logprobs, lengths, references, options.preference, options.divide)


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


def _tree_channels(
    model: nn.Module, head: LinearHead, batch: TreeBatch, options: _Options
) -> tuple[Channel, Channel, Channel]:
    """Every channel from one pass over a tree; the teacher of channel 2 is the same pass, without its gradient.

    With dropout on, the teacher would be noisy: then it gets a pass of its own, as on flat sequences.
    """
    hidden_LH = in_head_dtype(tree_hidden_states(model, batch.tree).hidden, head)
    lm_ce = response_channel(
        head, hidden_LH[batch.response.rows], batch.response.targets, options.label_smoothing, options.divide
    )
    sdpo = replay = Channel(lm_ce.value.new_zeros(()), 0)
    if options.alpha > 0 and batch.student_rows.numel():
        teacher_LH = hidden_LH
        if _has_dropout(model):
            with torch.no_grad(), evaluating(model):
                teacher_LH = in_head_dtype(tree_hidden_states(model, batch.tree).hidden, head)
        student_NH, teacher_NH = hidden_LH[batch.student_rows], teacher_LH[batch.teacher_rows]
        sdpo = hint_channel(
            head, student_NH, teacher_NH, options.divergence, options.taid_t, options.token_clip, options.divide
        )
    if options.beta > 0 and batch.pairs is not None:
        sides = batch.pairs
        sums, lengths = summed_logprobs(head, hidden_LH[sides.rows], sides.targets, sides.response, 2 * sides.num_pairs)
        references = sides.references() if options.preference.needs_reference else None
        replay = pair_channel(sums, lengths, references, options.preference, options.divide)
    return lm_ce, sdpo, replay


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(each, nn.Dropout) and each.training and each.p > 0 for each in model.modules()) or any(
        module.training and getattr(module, "attention_dropout", 0.0) for module in model.modules()
    )


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


def _channel_2_divergence(
    wrapper: str, taid_t: float | None, jsd_beta: float, temperature: float, h_max: float | None
) -> Divergence:
    """What channel 2 measures."""
    check_choice(wrapper, SDPO_WRAPPERS, "sdpo_wrapper")
    check_unit_interval(jsd_beta, "sdpo_jsd_beta")
    check_positive(temperature, "sdpo_temperature")
    if h_max is not None:
        check_positive(h_max, "entropy_opd_h_max")
    if taid_t is not None:
        check_unit_interval(taid_t, "taid_t")
    if wrapper == "taid":
        if taid_t is None:
            raise InputError(explain('sdpo_wrapper="taid"', got="taid_t=None", expected="taid_t in [0, 1]"))
        return CrossEntropyToTeacher()
    if wrapper == "entropy_opd":
        return EntropyGate(h_max=h_max, temperature=temperature)
    return JSD(beta=jsd_beta, temperature=temperature)


def _preference(variant: str, dpo_beta: float, simpo_beta: float, simpo_gamma: float) -> Preference:
    """What channel 3 measures; the other variant's knobs are checked too."""
    check_choice(variant, DPO_VARIANTS, "dpo_variant")
    check_positive(dpo_beta, "replay_dpo_beta")
    check_positive(simpo_beta, "simpo_beta")
    check_at_least_zero(simpo_gamma, "simpo_gamma")
    return Preference(True, dpo_beta, 0.0) if variant == "dpo" else Preference(False, simpo_beta, simpo_gamma)


def _check_weights(alpha_sdpo: float, beta_replay: float, token_clip: float | None) -> None:
    check_at_least_zero(alpha_sdpo, "alpha_sdpo")
    check_at_least_zero(beta_replay, "beta_replay")
    if token_clip is not None:
        check_positive(token_clip, "sdpo_token_clip")
