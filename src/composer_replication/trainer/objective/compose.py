"""Compute the composed loss of a batch, running each of the three channels on only the rows that it needs.

total = lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo

The rows come from one pass over a tree, or from several passes over padded sequences (`batch_channels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from composer_replication.batch.alignment import Sequences
from composer_replication.batch.flat_batch import NeededChannels, read_flat_batch
from composer_replication.batch.tree_batch import CHANNELS, ContrastRows, FlatBatch, TreeBatch
from composer_replication.loss.linear.logprobs import summed_logprobs
from composer_replication.trainer.objective.attention.forward import token_hidden_states
from composer_replication.trainer.objective.attention.model_checks import check_causal
from composer_replication.trainer.objective.channels import (
    Channel,
    ChannelOptions,
    LossKnobs,
    channel_options,
    hint_channel,
    pair_channel,
    response_channel,
)
from composer_replication.trainer.objective.distributed import inside_forward, max_over_shards
from composer_replication.trainer.objective.model_head import (
    cast_to_head_dtype,
    embedding_count,
    get_causal_lm,
    get_linear_head,
)
from composer_replication.trainer.objective.row_weighting import (
    Contrast,
    HintTargets,
    RowWeighting,
    TeacherRows,
    WeightedTeacher,
    all_models,
    is_live,
    rows_by_part,
)

__all__ = ["LossComponents", "channel_options", "compose_loss"]


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
    sdpo_teachers: Sequence[WeightedTeacher] | None = None,
    sdpo_weighting: RowWeighting | None = None,
) -> LossComponents:
    """Return the composed loss: cross-entropy on responses, SDPO on erring turns, and DPO or SimPO on preference pairs.

    `inputs` is a `TreeBatch` (`batch.tree_batch`), or a mapping, which gives the same numbers from several forward
    passes. Its keys (masks are 1 on *tokens* that count; `*_index` (N, 2) contains the *row* that predicts each of
    them):

        always     input_ids (B, T), response_mask (B, T); attention_mask optional
        channel 2  ctx_teacher_input_ids (B', T'), sdpo_student_index, sdpo_teacher_index; or, when both contexts have
                   the same shape, sdpo_loss_mask instead of the index pairs; ctx_teacher_attention_mask optional
        channel 3  dpo_{chosen,rejected}_{input_ids,response_mask} (P, T''), dpo_{chosen,rejected}_ref_logprobs (P,)
                   summed over each response (`objective.reference.reference_logprobs`; SimPO needs none)

    A channel is off, and missing from `components.active`, when its weight is 0 or all of its keys are absent or empty.
    A positive weight with only some of the keys is an error.

    The teacher of channel 2 is the model itself on the hinted context, without gradient and without dropout; or
    `sdpo_teachers`, whose logits are summed. `sdpo_weighting` has the switches of `objective.row_weighting` (for the
    keys of a contrast see `batch.flat_batch`). DDP and FSDP2 models are supported. `denominators` replaces the item
    counts of channels (`components.counts`), so that the losses of micro-batches add up to that of the whole batch.
    With `sdpo_wrapper="taid"` the `sdpo_jsd` component is TAID's cross-entropy, whose minimum is the teacher's entropy,
    not 0.
    """
    # The fields of LossKnobs are parameters of this function; locals() comes first, before any other variable is set.
    arguments = locals()
    knobs = LossKnobs(**{field.name: arguments[field.name] for field in fields(LossKnobs)})
    options = channel_options(
        model,
        knobs,
        taid_t=taid_t,
        label_smoothing=lm_ce_label_smoothing,
        denominators=denominators,
        sdpo_teachers=sdpo_teachers,
        sdpo_weighting=sdpo_weighting,
    )
    return _sum_channels(*_compute_channels(model, inputs, options), options)


def _sum_channels(
    lm_ce: Channel, sdpo: Channel, replay: Channel, ran_as: str, options: ChannelOptions
) -> LossComponents:
    total = lm_ce.value + options.alpha * sdpo.value + options.beta * replay.value
    counts: dict[str, int] = dict(zip(CHANNELS, (lm_ce.items, sdpo.items, replay.items), strict=True))
    active = tuple(name for name in CHANNELS if counts[name])
    if options.contrasts:
        counts["sites_without_contrast"] = sdpo.sites_without_contrast
    return LossComponents(lm_ce.value, sdpo.value, replay.value, total, active=active, counts=counts, ran_as=ran_as)


def _compute_channels(
    model: nn.Module, inputs: Mapping[str, Tensor] | TreeBatch, options: ChannelOptions
) -> tuple[Channel, Channel, Channel, str]:
    """Check the batch, and return its three channels and a description of how the student ran."""
    # All checks precede the first pass: a process that fails during a pass would leave the other processes waiting.
    causal_lm, needs_reference = get_causal_lm(model), options.preference.needs_reference
    if isinstance(inputs, TreeBatch):
        batch = inputs
        batch.check(embedding_count(model))
    else:
        needs = NeededChannels(options.alpha > 0, options.beta > 0, needs_reference, options.contrasts)
        batch = read_flat_batch(inputs, embedding_count(model), needs)
    if options.beta > 0 and needs_reference and batch.pairs is not None:
        batch.pairs.references()
    counts = batch.counts(hints=options.alpha > 0, pairs=options.beta > 0)
    options.divide.check(counts)
    if options.weighting is not None and counts["sdpo_jsd"]:
        HintTargets(batch.target_tokens, batch.site_position).check(options.weighting, counts["sdpo_jsd"])
    return inside_forward(model, causal_lm, lambda: batch_channels(model, batch, options))


def batch_channels(
    model: nn.Module, batch: TreeBatch | FlatBatch, options: ChannelOptions
) -> tuple[Channel, Channel, Channel, str]:
    """Return channels 1, 2 and 3 of a batch, and a description of how the student ran (`LossComponents.ran_as`)."""
    passes = batch.passes
    head = get_linear_head(model, passes.student.input_ids.reshape(1, -1))
    # Padded sequences require a causal model; for a tree, `token_hidden_states` checks that itself.
    if isinstance(passes.student, Sequences):
        check_causal(model, passes.student.longest())
    has_sites = options.alpha > 0 and batch.student_rows.numel() > 0
    pairs = batch.pairs if options.beta > 0 else None
    contrast = batch.contrast if options.contrasts else None
    needs_pair_pass = passes.pairs is not passes.student
    # Processes of a sharded model must make the same passes, even those without sites or pairs.
    flags = [int(has_sites), int(contrast is not None), int(needs_pair_pass and pairs is not None)]
    sites_anywhere, contrast_anywhere, pairs_anywhere = max_over_shards(all_models(model, options.teachers), flags)
    ran = token_hidden_states(model, passes.student)
    hidden_LH = cast_to_head_dtype(ran.hidden, head)
    lm_ce = response_channel(
        head, hidden_LH[batch.response.rows], batch.response.targets, options.label_smoothing, options.divide
    )
    # Channels that do not run are exactly 0.
    sdpo = replay = Channel(lm_ce.value.new_zeros(()), 0)
    if sites_anywhere:
        teachers, contrasted = _teacher_rows(model, batch, hidden_LH, options, bool(contrast_anywhere))
        targets = HintTargets(batch.target_tokens, batch.site_position, contrasted, batch.sites_without_contrast)
        if has_sites:
            sdpo = hint_channel(head, hidden_LH[batch.student_rows], teachers, options, targets)
    paired_LH = (
        cast_to_head_dtype(token_hidden_states(model, passes.pairs).hidden, head) if pairs_anywhere else hidden_LH
    )
    if pairs is not None:
        rows_NH = paired_LH[pairs.rows]
        sums, lengths = summed_logprobs(head, rows_NH, pairs.targets, pairs.response, 2 * pairs.num_pairs)
        references = pairs.references() if options.preference.needs_reference else None
        replay = pair_channel(sums, lengths, references, options.preference, options.divide)
    elif pairs_anywhere:  # a zero gradient keeps this process in step with the backward passes of the others
        replay = Channel(paired_LH.sum() * 0.0, 0)
    return lm_ce, sdpo, replay, ran.ran_as


def _teacher_rows(
    model: nn.Module, batch: TreeBatch | FlatBatch, hidden_LH: Tensor, options: ChannelOptions, with_contrast: bool
) -> tuple[list[TeacherRows], Contrast | None]:
    """Return the teachers' rows with the site's own hint, and the contrast: rows with an unrelated hint and without a
    hint.

    A live teacher (the student itself) reuses the detached rows of the student's pass, unless dropout made them noisy.
    If all teachers are live, no rows without a hint are returned, because the loss uses the student's.
    """
    passes, noisy = batch.passes, _is_noisy(model)
    only_live = not noisy and all(is_live(teacher, model) for teacher in options.teachers)
    parts = [(passes.hinted, batch.teacher_rows)]
    contrast = batch.contrast or ContrastRows(batch.student_rows[:0], batch.student_rows[:0])
    if with_contrast:
        parts.append((passes.contrast, contrast.rows))
    if with_contrast and not only_live:
        parts.append((passes.student, batch.student_rows[contrast.numbers]))
    teachers_by_part: dict[int, list[TeacherRows]] = {}
    for is_student_pass in (True, False):
        numbers = [number for number, (tokens, _) in enumerate(parts) if (tokens is passes.student) == is_student_pass]
        if numbers:
            group = [parts[number] for number in numbers]
            can_reuse = is_student_pass and not noisy
            live_rows = hidden_LH[torch.cat([rows for _, rows in group])].detach() if can_reuse else None
            teachers_by_part |= zip(numbers, rows_by_part(model, options.teachers, group, live_rows), strict=True)
    if not with_contrast or batch.contrast is None:
        return teachers_by_part[0], None
    return teachers_by_part[0], Contrast(contrast.numbers, teachers_by_part[1], teachers_by_part.get(2, ()))


# Name fragments of settings that add noise: "resid_pdrop", "router_jitter_noise", ...
_NOISE = ("drop", "jitter", "neftune_noise_alpha")
# Rates for heads that a causal language model does not have, although its config may contain them.
_OTHER_HEADS = ("classifier", "summary", "seq_classif", "pooler", "head_dropout")
# Routers that sample their experts in training mode, whatever their settings are.
_SAMPLING_ROUTERS = ("PhimoeTopKRouter", "PhimoeSparseMoeBlock")


def _is_noisy(model: nn.Module) -> bool:
    """Return whether two passes of the model may differ through dropout, noise on the embeddings, or router jitter.

    The decision is based on the modules' settings rather than on a comparison of two passes. With a new adapter, whose
    matrix B is 0, LoRA's dropout has no effect yet, so a comparison would give another result after a run is resumed. A
    wrong True costs one more pass of the live teacher, and changes no result.
    """
    body = get_causal_lm(model)
    return any(module.training and _adds_noise(module) for module in body.modules())


def _adds_noise(module: nn.Module) -> bool:
    name = type(module).__name__
    if name in _SAMPLING_ROUTERS:
        return True
    if "dropout" in name.lower() and _is_rate(getattr(module, "p", 0.0)):
        return True
    return any(
        _is_rate(value) for settings in (vars(module), _config_settings(module)) for value in _noise_rates(settings)
    )


def _noise_rates(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the rates of dropout and other noise in a module's settings; adapter layers have one rate per adapter."""
    for name, value in settings.items():
        if not any(part in name for part in _NOISE) or any(part in name for part in _OTHER_HEADS):
            continue
        if isinstance(value, dict):
            yield from cast("dict[str, Any]", value).values()
        else:
            yield value


def _config_settings(module: nn.Module) -> Mapping[str, Any]:
    """Return the settings in a module's own config, where some layers (Falcon, GPT-J) look up a rate at every call."""
    config = vars(module).get("config")
    return {} if config is None or not hasattr(config, "__dict__") else vars(config)


def _is_rate(value: object) -> bool:
    # A bool is an int in Python, but a switch is not a rate.
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


_NO_COUNTS: Mapping[str, int] = MappingProxyType({})


@dataclass
class LossComponents:
    """The channels' losses and their weighted total, as 0-d tensors.

    `active` contains the names of the channels that ran; the other channels are exactly 0. `counts` has the item count
    of each channel (response tokens, target tokens, pairs). `ran_as` says how the student ran: as flat sequences, as a
    tree with some kind of attention, or as flat sequences for the stated reason.
    """

    lm_ce: Tensor
    sdpo_jsd: Tensor
    trace_replay_dpo: Tensor
    total: Tensor
    active: tuple[str, ...] = field(default=(), kw_only=True)
    counts: Mapping[str, int] = field(default_factory=lambda: _NO_COUNTS, kw_only=True)
    ran_as: str = field(default="", kw_only=True)

    def detached(self) -> dict[str, float]:
        """Return the losses of the three channels and the total as Python floats."""
        return {name: float(getattr(self, name).detach()) for name in (*CHANNELS, "total")}
