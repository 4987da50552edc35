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
from composer_replication.loss.dpo import dpo_loss
from composer_replication.loss.entropy_opd import EntropyGate
from composer_replication.loss.jsd import JSD
from composer_replication.loss.linear import (
    LinearHead,
    TeacherTerm,
    linear_cross_entropy,
    linear_divergence,
    linear_token_logprobs,
)
from composer_replication.loss.rows import (
    Divergence,
    check_at_least_zero,
    check_choice,
    check_positive,
    check_unit_interval,
)
from composer_replication.loss.simpo import simpo_loss
from composer_replication.loss.taid import CrossEntropyToTeacher
from composer_replication.objective import contract
from composer_replication.objective.alignment import RowIndex, Sequences
from composer_replication.objective.components import CHANNELS, LossComponents
from composer_replication.objective.model_head import embedding_count, head_of, hidden_states

DPO_VARIANTS = ("dpo", "simpo")
SDPO_WRAPPERS = ("none", "taid", "entropy_opd")


class _Preference(NamedTuple):
    """DPO's or SimPO's knobs; only DPO has a reference."""

    needs_reference: bool
    beta: float
    gamma: float


class _Channel(NamedTuple):
    value: Tensor
    items: int


def compose_loss(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
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

    Keys of `inputs` (masks hold 1 on *tokens* that count; `*_index` (N, 2) names the *row* that predicts one):

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
    divide = _Denominators(denominators)
    wanted = contract.Channels(alpha_sdpo > 0, beta_replay > 0, preference.needs_reference)
    batch = contract.read_batch(inputs, embedding_count(model), wanted)
    head = head_of(model, batch.student.input_ids)
    hidden_BTH = _in_head_dtype(hidden_states(model, batch.student.input_ids, batch.student.attention_mask), head)
    lm_ce = _response_channel(head, hidden_BTH, batch, lm_ce_label_smoothing, divide)
    zero = lm_ce.value.new_zeros(())
    sdpo = replay = _Channel(zero, 0)
    if batch.hint is not None:
        mix = taid_t if sdpo_wrapper == "taid" else None
        sdpo = _hint_channel(model, head, hidden_BTH, batch.hint, divergence, mix, sdpo_token_clip, divide)
    if batch.pairs is not None:
        replay = _pair_channel(model, head, batch.pairs, preference, divide)

    total = lm_ce.value + alpha_sdpo * sdpo.value + beta_replay * replay.value
    counts: dict[str, int] = dict(zip(CHANNELS, (lm_ce.items, sdpo.items, replay.items), strict=True))
    active = tuple(name for name in CHANNELS if counts[name])
    return LossComponents(lm_ce.value, sdpo.value, replay.value, total, active=active, counts=counts)


class _Denominators:
    """What a channel's sum is divided by: its own count, or what the caller says the whole batch holds."""

    def __init__(self, given: Mapping[str, float] | None) -> None:
        self._given = dict(given or {})
        for name, value in self._given.items():
            check_choice(name, CHANNELS, "denominators key")
            check_at_least_zero(value, f"denominators[{name!r}]")

    def of(self, channel: str, count: int) -> float:
        denominator = self._given.get(channel, count)
        if count and not denominator:
            expected = f"at least the {count} items of this batch"
            raise InputError(explain(f"denominators[{channel!r}]", got=denominator, expected=expected))
        return denominator or 1.0

    def row_weights(self, channel: str, count: int, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.full((count,), 1.0 / self.of(channel, count), dtype=dtype, device=like.device)


def _response_channel(
    head: LinearHead, hidden_BTH: Tensor, batch: contract.Batch, label_smoothing: float, divide: _Denominators
) -> _Channel:
    """Channel 1's stand-in: cross-entropy on the response tokens."""
    rows = batch.response_rows
    rows_NH = hidden_BTH[rows.sequence_N, rows.position_N]
    result = linear_cross_entropy(
        rows_NH,
        head,
        rows.next_tokens(batch.student.input_ids),
        row_weights=divide.row_weights("lm_ce", len(rows), rows_NH),
        label_smoothing=label_smoothing,
    )
    return _Channel(result.loss, len(rows))


def _hint_channel(
    model: nn.Module,
    head: LinearHead,
    hidden_BTH: Tensor,
    hint: contract.HintChannel,
    divergence: Divergence,
    taid_t: float | None,
    token_clip: float | None,
    divide: _Denominators,
) -> _Channel:
    """Channel 2 on the student pass that channel 1 already made, and one no-grad pass over the hinted contexts."""
    with torch.no_grad(), evaluating(model):
        hinted_BTH = hidden_states(model, hint.teacher.input_ids, hint.teacher.attention_mask)
        teacher_NH = _in_head_dtype(hinted_BTH[hint.teacher_rows.sequence_N, hint.teacher_rows.position_N], head)
        del hinted_BTH
    terms = [TeacherTerm(teacher_NH, head, 1.0 if taid_t is None else taid_t)]
    if taid_t is not None:
        terms.append(TeacherTerm.student(1.0 - taid_t))
    student_NH = hidden_BTH[hint.student_rows.sequence_N, hint.student_rows.position_N]
    weights_N = divide.row_weights("sdpo_jsd", len(hint.student_rows), student_NH)
    result = linear_divergence(student_NH, head, terms, divergence, row_weights=weights_N, token_clip=token_clip)
    return _Channel(result.loss, len(hint.student_rows))


def _pair_channel(
    model: nn.Module, head: LinearHead, pairs: contract.PairChannel, preference: _Preference, divide: _Denominators
) -> _Channel:
    """Channel 3: chosen and rejected sequences in one forward pass."""
    num_pairs = pairs.chosen.sequences.input_ids.shape[0]
    logprobs, lengths = sequence_logprobs(model, head, pairs.chosen, pairs.rejected)
    if preference.needs_reference:
        references = [side.reference().to(logprobs) for side in (pairs.chosen, pairs.rejected)]
        loss = dpo_loss(logprobs[:num_pairs], logprobs[num_pairs:], *references, beta=preference.beta)
    else:
        averages = logprobs / lengths
        loss = simpo_loss(averages[:num_pairs], averages[num_pairs:], beta=preference.beta, gamma=preference.gamma)
    return _Channel(loss * (num_pairs / divide.of("trace_replay_dpo", num_pairs)), num_pairs)


def sequence_logprobs(
    model: nn.Module, head: LinearHead, chosen: contract.PairSide, rejected: contract.PairSide
) -> tuple[Tensor, Tensor]:
    """Summed response log-probs (2B,), chosen first, and the responses' lengths."""
    both = _stack_right_padded(chosen.sequences, rejected.sequences)
    num_pairs = chosen.sequences.input_ids.shape[0]
    sequence_N = torch.cat([chosen.rows.sequence_N, rejected.rows.sequence_N + num_pairs])
    position_N = torch.cat([chosen.rows.position_N, rejected.rows.position_N])
    rows = RowIndex(sequence_N, position_N)
    hidden_BTH = _in_head_dtype(hidden_states(model, both.input_ids, both.attention_mask), head)
    token_logprobs_N = linear_token_logprobs(hidden_BTH[sequence_N, position_N], head, rows.next_tokens(both.input_ids))
    sums = token_logprobs_N.new_zeros(2 * num_pairs).index_add(0, sequence_N, token_logprobs_N)
    return sums, torch.bincount(sequence_N, minlength=2 * num_pairs)


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


def _in_head_dtype(hidden: Tensor, head: LinearHead) -> Tensor:
    """Outside autocast a head multiplies in its own dtype; some models end on an fp32 norm before a bf16 head."""
    return hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(head.weight.dtype)


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


def _preference(variant: str, dpo_beta: float, simpo_beta: float, simpo_gamma: float) -> _Preference:
    """What channel 3 measures; the other variant's knobs are checked too."""
    check_choice(variant, DPO_VARIANTS, "dpo_variant")
    check_positive(dpo_beta, "replay_dpo_beta")
    check_positive(simpo_beta, "simpo_beta")
    check_at_least_zero(simpo_gamma, "simpo_gamma")
    return _Preference(True, dpo_beta, 0.0) if variant == "dpo" else _Preference(False, simpo_beta, simpo_gamma)


def _check_weights(alpha_sdpo: float, beta_replay: float, token_clip: float | None) -> None:
    check_at_least_zero(alpha_sdpo, "alpha_sdpo")
    check_at_least_zero(beta_replay, "beta_replay")
    if token_clip is not None:
        check_positive(token_clip, "sdpo_token_clip")
