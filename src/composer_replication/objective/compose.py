"""The three channels of one batch, each on just the rows it needs.

total = lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from composer_replication.batch.flat_batch import Wanted, read_flat_batch
from composer_replication.batch.tree_batch import TreeBatch
from composer_replication.errors import InputError, explain
from composer_replication.loss.entropy_opd import EntropyGate
from composer_replication.loss.jsd import JSD
from composer_replication.loss.rows import (
    Divergence,
    check_at_least_zero,
    check_choice,
    check_positive,
    check_unit_interval,
)
from composer_replication.loss.taid import CrossEntropyToTeacher
from composer_replication.objective.batch_channels import batch_channels
from composer_replication.objective.channels import Channel, Denominators, Options, Preference
from composer_replication.objective.components import CHANNELS, LossComponents
from composer_replication.objective.model_head import causal_lm_of, embedding_count
from composer_replication.objective.row_weighting import HintTargets, RowWeighting
from composer_replication.objective.teachers import WeightedTeacher, check_teachers
from composer_replication.objective.wrapped import inside_forward

DPO_VARIANTS = ("dpo", "simpo")
SDPO_WRAPPERS = ("none", "taid", "entropy_opd")


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
    options = channel_options(
        model,
        alpha_sdpo=alpha_sdpo,
        beta_replay=beta_replay,
        sdpo_jsd_beta=sdpo_jsd_beta,
        sdpo_temperature=sdpo_temperature,
        sdpo_token_clip=sdpo_token_clip,
        replay_dpo_beta=replay_dpo_beta,
        lm_ce_label_smoothing=lm_ce_label_smoothing,
        dpo_variant=dpo_variant,
        sdpo_wrapper=sdpo_wrapper,
        taid_t=taid_t,
        simpo_beta=simpo_beta,
        simpo_gamma=simpo_gamma,
        entropy_opd_h_max=entropy_opd_h_max,
        denominators=denominators,
        sdpo_teachers=sdpo_teachers,
        sdpo_weighting=sdpo_weighting,
    )
    told: list[str] = []
    return _weighed(_channels(model, inputs, options, told), options, told[0])


def channel_options(
    model: nn.Module,
    *,
    alpha_sdpo: float,
    beta_replay: float,
    sdpo_jsd_beta: float = 0.5,
    sdpo_temperature: float = 1.0,
    sdpo_token_clip: float | None = None,
    replay_dpo_beta: float = 0.1,
    lm_ce_label_smoothing: float = 0.0,
    dpo_variant: str = "dpo",
    sdpo_wrapper: str = "none",
    taid_t: float | None = None,
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    entropy_opd_h_max: float | None = None,
    denominators: Mapping[str, float] | None = None,
    sdpo_teachers: Sequence[WeightedTeacher] | None = None,
    sdpo_weighting: RowWeighting | None = None,
) -> Options:
    """The arguments of `compose_loss`, checked: for those who have a channel's rows already (`objective.channels`)."""
    _check_weights(alpha_sdpo, beta_replay, sdpo_token_clip)
    return Options(
        _channel_2_divergence(sdpo_wrapper, taid_t, sdpo_jsd_beta, sdpo_temperature, entropy_opd_h_max),
        _preference(dpo_variant, replay_dpo_beta, simpo_beta, simpo_gamma),
        taid_t if sdpo_wrapper == "taid" else None,
        sdpo_token_clip,
        lm_ce_label_smoothing,
        Denominators(denominators),
        alpha_sdpo,
        beta_replay,
        check_teachers(sdpo_teachers, model),
        _checked(sdpo_weighting),
    )


def _weighed(channels: tuple[Channel, Channel, Channel], options: Options, ran_as: str) -> LossComponents:
    lm_ce, sdpo, replay = channels
    total = lm_ce.value + options.alpha * sdpo.value + options.beta * replay.value
    counts: dict[str, int] = dict(zip(CHANNELS, (lm_ce.items, sdpo.items, replay.items), strict=True))
    active = tuple(name for name in CHANNELS if counts[name])
    if options.contrasts:
        counts["sites_without_contrast"] = sdpo.sites_without_contrast
    return LossComponents(lm_ce.value, sdpo.value, replay.value, total, active=active, counts=counts, ran_as=ran_as)


def _channels(
    model: nn.Module, inputs: Mapping[str, Tensor] | TreeBatch, options: Options, told: list[str]
) -> tuple[Channel, Channel, Channel]:
    """Everything is checked before the first pass: a process that fails inside one leaves the others waiting."""
    causal_lm, needs_reference = causal_lm_of(model), options.preference.needs_reference
    if isinstance(inputs, TreeBatch):
        batch = inputs
        batch.check(embedding_count(model))
    else:
        wanted = Wanted(options.alpha > 0, options.beta > 0, needs_reference, options.contrasts)
        batch = read_flat_batch(inputs, embedding_count(model), wanted)
    if options.beta > 0 and needs_reference and batch.pairs is not None:
        batch.pairs.references()
    counts = batch.counts(hints=options.alpha > 0, pairs=options.beta > 0)
    options.divide.check(counts)
    if options.weighting is not None and counts["sdpo_jsd"]:
        HintTargets(batch.target_tokens, batch.site_position).check(options.weighting, counts["sdpo_jsd"])
    return inside_forward(model, causal_lm, lambda: batch_channels(model, batch, options, told))


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


def _checked(weighting: RowWeighting | None) -> RowWeighting | None:
    if weighting is not None and not isinstance(weighting, RowWeighting):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(explain("sdpo_weighting", got=type(weighting).__name__, expected="a RowWeighting or None"))
    return weighting


def _check_weights(alpha_sdpo: float, beta_replay: float, token_clip: float | None) -> None:
    check_at_least_zero(alpha_sdpo, "alpha_sdpo")
    check_at_least_zero(beta_replay, "beta_replay")
    if token_clip is not None:
        check_positive(token_clip, "sdpo_token_clip")
