"""The three channels of one batch, each on just the rows it needs.

total = lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Literal

from torch import Tensor, nn

from composer_replication.batch.flat_batch import Wanted, read_flat_batch
from composer_replication.batch.tree_batch import CHANNELS, TreeBatch
from composer_replication.errors import InputError, explain
from composer_replication.objective.batch_channels import batch_channels
from composer_replication.objective.channels import Channel, Denominators, Options
from composer_replication.objective.components import LossComponents
from composer_replication.objective.distributed import inside_forward
from composer_replication.objective.knobs import LossKnobs
from composer_replication.objective.model_head import causal_lm_of, embedding_count
from composer_replication.objective.row_weighting import HintTargets, RowWeighting
from composer_replication.objective.teacher_rows import WeightedTeacher, check_teachers


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
    """Cross-entropy on response tokens, SDPO on the erring turn's tokens, DPO or SimPO on the pairs.

    `inputs`: a `TreeBatch` (`batch.tree_batch`), or a mapping, which gives the same numbers from several forwards.
    Its keys (masks hold 1 on *tokens* that count; `*_index` (N, 2) names the *row* that predicts one):

        always     input_ids (B, T), response_mask (B, T); attention_mask optional
        channel 2  ctx_teacher_input_ids (B', T'), sdpo_student_index, sdpo_teacher_index; or, when both contexts have
                   one shape, sdpo_loss_mask instead of the index pairs; ctx_teacher_attention_mask optional
        channel 3  dpo_{chosen,rejected}_{input_ids,response_mask} (P, T''), dpo_{chosen,rejected}_ref_logprobs (P,)
                   summed over each response (`objective.reference.reference_logprobs`; SimPO needs none)

    A channel is off when its weight is 0 or its keys are all absent or empty, and is then not in `components.active`;
    with a positive weight, half of its keys is an error. The teacher of channel 2 is the model itself, without gradient
    and without dropout, on the hinted context; or `sdpo_teachers`, whose logits are added up. `sdpo_weighting` has its
    switches (`objective.row_weighting`; a contrast's keys: `batch.flat_batch`). DDP and FSDP2 models work.
    `denominators` replaces a channel's item count (`components.counts`): micro-batches then add up to the whole. With
    `sdpo_wrapper="taid"` the `sdpo_jsd` component is TAID's cross-entropy, which ends at the teacher's entropy, not 0.
    """
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
    return _weighed(*_channels(model, inputs, options), options)


def channel_options(
    model: nn.Module,
    knobs: LossKnobs,
    *,
    taid_t: float | None = None,
    label_smoothing: float = 0.0,
    denominators: Mapping[str, float] | None = None,
    sdpo_teachers: Sequence[WeightedTeacher] | None = None,
    sdpo_weighting: RowWeighting | None = None,
) -> Options:
    """The arguments of `compose_loss`, checked: for those who have a channel's rows already (`objective.channels`)."""
    if sdpo_weighting is not None and not isinstance(sdpo_weighting, RowWeighting):  # pyright: ignore[reportUnnecessaryIsInstance]
        got = type(sdpo_weighting).__name__
        raise InputError(explain("sdpo_weighting", got=got, expected="a RowWeighting or None"))
    return Options(
        knobs.divergence(taid_t),
        knobs.preference,
        taid_t if knobs.sdpo_wrapper == "taid" else None,
        knobs.sdpo_token_clip,
        label_smoothing,
        Denominators(denominators),
        knobs.alpha_sdpo,
        knobs.beta_replay,
        check_teachers(sdpo_teachers, model),
        sdpo_weighting,
    )


def _weighed(lm_ce: Channel, sdpo: Channel, replay: Channel, ran_as: str, options: Options) -> LossComponents:
    total = lm_ce.value + options.alpha * sdpo.value + options.beta * replay.value
    counts: dict[str, int] = dict(zip(CHANNELS, (lm_ce.items, sdpo.items, replay.items), strict=True))
    active = tuple(name for name in CHANNELS if counts[name])
    if options.contrasts:
        counts["sites_without_contrast"] = sdpo.sites_without_contrast
    return LossComponents(lm_ce.value, sdpo.value, replay.value, total, active=active, counts=counts, ran_as=ran_as)


def _channels(
    model: nn.Module, inputs: Mapping[str, Tensor] | TreeBatch, options: Options
) -> tuple[Channel, Channel, Channel, str]:
    """Everything is checked before the first pass: a process that fails inside one leaves the others waiting."""
    causal_lm, needs_reference = causal_lm_of(model), options.preference.needs_reference
    if isinstance(inputs, TreeBatch):
        batch = inputs
        batch.check(embedding_count(model))
    else:
        needs = Wanted(options.alpha > 0, options.beta > 0, needs_reference, options.contrasts)
        batch = read_flat_batch(inputs, embedding_count(model), needs)
    if options.beta > 0 and needs_reference and batch.pairs is not None:
        batch.pairs.references()
    counts = batch.counts(hints=options.alpha > 0, pairs=options.beta > 0)
    options.divide.check(counts)
    if options.weighting is not None and counts["sdpo_jsd"]:
        HintTargets(batch.target_tokens, batch.site_position).check(options.weighting, counts["sdpo_jsd"])
    return inside_forward(model, causal_lm, lambda: batch_channels(model, batch, options))
