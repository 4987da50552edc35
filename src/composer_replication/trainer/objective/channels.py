"""Compute each channel's loss from hidden states, and define the settings of channels 2 and 3.

The hidden states may come from flat sequences, from a tree, or from the policy's pass over rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.errors import InputError, explain
from composer_replication.loss.entropy_opd import EntropyGate
from composer_replication.loss.jsd import JSD
from composer_replication.loss.linear import (
    LinearHead,
    TeacherTerm,
    linear_cross_entropy,
    linear_divergence,
    linear_token_logprobs,
)
from composer_replication.loss.preference import dpo_loss, simpo_loss
from composer_replication.loss.rows import (
    Divergence,
    check_at_least_zero,
    check_choice,
    check_positive,
    check_unit_interval,
)
from composer_replication.loss.taid import CrossEntropyToTeacher, TAIDScheduler
from composer_replication.trainer.objective.row_weighting import (
    HintTargets,
    RowGroup,
    RowWeighting,
    TeacherRows,
    WeightedTeacher,
    check_teachers,
    row_groups,
    row_weights,
)

DPO_VARIANTS = ("dpo", "simpo")
SDPO_WRAPPERS = ("none", "taid", "entropy_opd")
Anneal = Literal["none", "linear"]
"""How the weight of channel 2 changes over a run."""
_NO_TARGETS = HintTargets()


class ChannelOptions(NamedTuple):
    """The settings of all channels, already checked."""

    divergence: Divergence
    preference: Preference
    taid_t: float | None
    token_clip: float | None
    label_smoothing: float
    divide: Denominators
    alpha: float
    beta: float
    teachers: tuple[WeightedTeacher, ...]
    weighting: RowWeighting | None = None

    @property
    def contrasts(self) -> bool:
        """Whether channel 2 needs unrelated hints."""
        return self.weighting is not None and self.weighting.contrast is not None


class Channel(NamedTuple):
    """A channel's loss, its item count, and the number of sites without an unrelated hint."""

    value: Tensor
    items: int
    sites_without_contrast: int = 0


class Denominators:
    """The denominator of each channel's sum: its own item count, or a count for the whole batch given by the caller."""

    def __init__(self, by_channel: Mapping[str, float] | None) -> None:
        self._by_channel = dict(by_channel or {})
        for name, value in self._by_channel.items():
            check_choice(name, CHANNELS, "denominators key")
            check_at_least_zero(value, f"denominators[{name!r}]")

    def of(self, channel: str, count: int) -> float:
        """Return the denominator of a channel that has this many items."""
        denominator = self._by_channel.get(channel, count)
        if count and not denominator:
            expected = f"at least {count}, the number of items in this batch"
            raise InputError(explain(f"denominators[{channel!r}]", got=denominator, expected=expected))
        # Without items the sum is 0, so any denominator will do.
        return denominator or 1.0

    def check(self, counts: Mapping[str, int]) -> None:
        """Raise InputError if a channel with items would be divided by 0."""
        for channel, count in counts.items():
            self.of(channel, count)

    def row_weights(self, channel: str, count: int, like: Tensor) -> Tensor:
        """Return equal weights (count,) that divide the sum over a channel's rows by its denominator."""
        # 1 / count would be too inexact in half precision.
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.full((count,), 1.0 / self.of(channel, count), dtype=dtype, device=like.device)


def response_channel(
    head: LinearHead, rows_NH: Tensor, targets_N: Tensor, label_smoothing: float, divide: Denominators
) -> Channel:
    """Return channel 1 for data without rollouts: the cross-entropy of the response tokens."""
    count = targets_N.numel()
    weights = divide.row_weights("lm_ce", count, rows_NH)
    result = linear_cross_entropy(rows_NH, head, targets_N, row_weights=weights, label_smoothing=label_smoothing)
    return Channel(result.loss, count)


def hint_channel(
    head: LinearHead,
    student_NH: Tensor,
    teachers: Sequence[TeacherRows],
    options: ChannelOptions,
    targets: HintTargets = _NO_TARGETS,
) -> Channel:
    """Return channel 2: the divergence between the student and the hinted teacher.

    Row n of the student and of each teacher predicts the same token; the teachers' rows have no gradient. `targets` is
    the input of the switches in `options.weighting` (see `objective.row_weighting`).
    """
    count = student_NH.shape[0]
    weights_N = options.divide.row_weights("sdpo_jsd", count, student_NH)
    groups = row_groups(student_NH, teachers, options.weighting, targets)
    if options.weighting is not None and options.weighting.changes_weights:
        weights_N = weights_N * row_weights(head, groups, options.weighting, targets, weights_N)
    # After the row weights are normalized, since importance weights must keep their scale to correct the sampling.
    if targets.importance_N is not None:
        weights_N = weights_N * targets.importance_N.to(weights_N)
    values = [_group_loss(head, group, options, weights_N) for group in groups]
    num_without = targets.sites_without_contrast if options.contrasts else 0
    return Channel(values[0] if len(values) == 1 else torch.stack(values).sum(), count, num_without)


def _group_loss(head: LinearHead, group: RowGroup, options: ChannelOptions, weights_N: Tensor) -> Tensor:
    """Return the weighted sum of a group's losses; TAID mixes the student's own logits into the teacher's."""
    terms = group.terms
    # The logits of TAID's target are t * teacher + (1 - t) * student.
    if options.taid_t is not None:
        terms = [replace(term, coefficient=options.taid_t * term.coefficient) for term in terms]
        terms.append(TeacherTerm.student(1.0 - options.taid_t))
    weights_n = group.of_channel(weights_N)
    clip = options.token_clip
    return linear_divergence(
        group.student_NH, head, terms, options.divergence, row_weights=weights_n, token_clip=clip
    ).loss


def summed_logprobs(
    head: LinearHead, rows_NH: Tensor, targets_N: Tensor, response_N: Tensor, num_responses: int
) -> tuple[Tensor, Tensor]:
    """Return the summed log-probs (R,) and the length of each response.

    `response_N` maps each row to the index of its response.
    """
    token_logprobs_N = linear_token_logprobs(rows_NH, head, targets_N)
    sums = token_logprobs_N.new_zeros(num_responses).index_add(0, response_N, token_logprobs_N)
    return sums, torch.bincount(response_N, minlength=num_responses)


def pair_channel(
    logprobs: Tensor,
    lengths: Tensor,
    references: tuple[Tensor, Tensor] | None,
    preference: Preference,
    divide: Denominators,
) -> Channel:
    """Return channel 3 from the log-probs of all responses: first the chosen ones, then the rejected ones."""
    num_pairs = logprobs.numel() // 2
    if references is not None:
        reference_logprobs = [reference.to(logprobs) for reference in references]
        loss = dpo_loss(logprobs[:num_pairs], logprobs[num_pairs:], *reference_logprobs, beta=preference.beta)
    else:
        # SimPO has no reference model, and normalizes by length instead.
        averages = logprobs / lengths
        loss = simpo_loss(averages[:num_pairs], averages[num_pairs:], beta=preference.beta, gamma=preference.gamma)
    # Both losses are means over these pairs, but the denominator may count the pairs of a larger batch.
    return Channel(loss * (num_pairs / divide.of("trace_replay_dpo", num_pairs)), num_pairs)


def in_head_dtype(hidden: Tensor, head: LinearHead) -> Tensor:
    """Cast hidden states to the dtype that the head multiplies in."""
    # Outside autocast that is the head's own dtype; some models have an fp32 final norm before a bf16 head.
    return hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(head.weight.dtype)


def annealed(weight: float, anneal: Anneal, *, step: int, total_steps: int, end: float = 0.0) -> float:
    """Return the weight at the optimizer step that comes after `step` completed steps.

    With "linear" the weight moves from `weight` at the first of `total_steps` to `weight * end` at the last, and stays
    there.
    """
    if anneal == "none" or total_steps <= 1:
        return weight
    # The last of `total_steps` steps comes after `total_steps - 1` completed steps.
    progress = min(max(step / (total_steps - 1), 0.0), 1.0)
    return weight * (1.0 - progress * (1.0 - end))


def check_anneal(anneal: str, end: float = 0.0) -> None:
    """Raise InputError unless `annealed` supports this schedule and final fraction."""
    check_choice(anneal, get_args(Anneal), "anneal")
    check_unit_interval(end, "anneal_end")


class Preference(NamedTuple):
    """The settings of DPO or SimPO; only DPO uses a reference."""

    needs_reference: bool
    beta: float
    gamma: float


@dataclass(frozen=True, kw_only=True)
class LossKnobs:
    """The weights and loss settings of channels 2 and 3, under their names in `compose_loss` and the config.

    All values are checked, even those for loss variants that are not selected.
    """

    alpha_sdpo: float = 0.1
    beta_replay: float = 0.05
    sdpo_jsd_beta: float = 0.5
    sdpo_temperature: float = 1.0
    sdpo_token_clip: float | None = None
    replay_dpo_beta: float = 0.1
    dpo_variant: Literal["dpo", "simpo"] = "dpo"
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = "none"
    simpo_beta: float = 2.0
    simpo_gamma: float = 1.0
    entropy_opd_h_max: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha_sdpo", "beta_replay", "simpo_gamma"):
            check_at_least_zero(getattr(self, name), name)
        for name in ("sdpo_temperature", "sdpo_token_clip", "replay_dpo_beta", "simpo_beta", "entropy_opd_h_max"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)
        check_unit_interval(self.sdpo_jsd_beta, "sdpo_jsd_beta")
        check_choice(self.dpo_variant, DPO_VARIANTS, "dpo_variant")
        check_choice(self.sdpo_wrapper, SDPO_WRAPPERS, "sdpo_wrapper")

    def divergence(self, taid_t: float | None) -> Divergence:
        """Return the divergence for channel 2; `taid_t` is the weight of the teacher in TAID's target."""
        if taid_t is not None:
            check_unit_interval(taid_t, "taid_t")
        if self.sdpo_wrapper == "taid":
            if taid_t is None:
                raise InputError(explain('sdpo_wrapper="taid"', got="taid_t=None", expected="taid_t in [0, 1]"))
            return CrossEntropyToTeacher()
        if self.sdpo_wrapper == "entropy_opd":
            return EntropyGate(h_max=self.entropy_opd_h_max, temperature=self.sdpo_temperature)
        return JSD(beta=self.sdpo_jsd_beta, temperature=self.sdpo_temperature)

    @property
    def preference(self) -> Preference:
        """The preference loss for channel 3."""
        if self.dpo_variant == "dpo":
            return Preference(True, self.replay_dpo_beta, 0.0)
        return Preference(False, self.simpo_beta, self.simpo_gamma)


@dataclass(frozen=True, kw_only=True)
class ChannelSettings(LossKnobs):
    """Settings for channels 2 and 3: arguments of `compose_loss` under the same names, and annealing of channel 2's
    weight.

    `sdpo_is_clip` caps the importance ratio (current / sampling probability) by which a rollout's tokens are weighted;
    no gradient flows through it. With `sdpo_wrapper="taid"`, t moves from `taid_start` to `taid_end`, as in
    `TAIDScheduler`. With `anneal="linear"`, the weight goes from `alpha_sdpo` at the first step to `alpha_sdpo *
    anneal_end` at the last.
    """

    sdpo_is_clip: float | None = None
    taid_start: float = 0.4
    taid_end: float = 1.0
    taid_rate: float = 5e-4
    taid_momentum: float = 0.99
    anneal: Anneal = "none"
    anneal_end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sdpo_is_clip is not None and not self.sdpo_is_clip > 0:
            raise InputError(explain("sdpo_is_clip", got=self.sdpo_is_clip, expected="above 0, or None"))
        # Called only to validate: it raises InputError for invalid TAID settings.
        self.taid_schedule(1)
        check_anneal(self.anneal, self.anneal_end)

    def alpha_at(self, step: int, total_steps: int) -> float:
        """Return channel 2's weight in the next optimizer step, when `step` steps are finished."""
        return annealed(self.alpha_sdpo, self.anneal, step=step, total_steps=total_steps, end=self.anneal_end)

    def loss_options(self) -> dict[str, Any]:
        """Return keyword arguments for `compose_loss`, except the weights and TAID's t, which change during a run."""
        names = {field.name for field in fields(LossKnobs)} - {"alpha_sdpo", "beta_replay"}
        return {name: value for name, value in vars(self).items() if name in names}

    def taid_schedule(self, total_steps: int) -> TAIDScheduler:
        """Return the schedule of TAID's t for a run with `total_steps` steps."""
        return TAIDScheduler(
            max(total_steps, 1),
            t_start=self.taid_start,
            t_end=self.taid_end,
            alpha=self.taid_rate,
            beta=self.taid_momentum,
        )


def channel_options(
    model: nn.Module,
    knobs: LossKnobs,
    *,
    taid_t: float | None = None,
    label_smoothing: float = 0.0,
    denominators: Mapping[str, float] | None = None,
    sdpo_teachers: Sequence[WeightedTeacher] | None = None,
    sdpo_weighting: RowWeighting | None = None,
) -> ChannelOptions:
    """Check the arguments of `compose_loss` and return them as options, for callers that have hidden states already."""
    if sdpo_weighting is not None and not isinstance(sdpo_weighting, RowWeighting):  # pyright: ignore[reportUnnecessaryIsInstance]
        got = type(sdpo_weighting).__name__
        raise InputError(explain("sdpo_weighting", got=got, expected="a RowWeighting or None"))
    return ChannelOptions(
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
