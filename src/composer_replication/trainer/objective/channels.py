"""Compute each channel's loss from hidden states, and define the settings of channels 2 and 3.

The hidden states may come from flat sequences, from a tree, or from the policy's pass over rollouts.
"""

from __future__ import annotations

import math
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
    linear_cross_entropy,
    linear_divergence,
)
from composer_replication.loss.linear.head import LinearHead, TeacherTerm
from composer_replication.loss.linear.logprobs import RowStats, linear_row_stats
from composer_replication.loss.preference import dpo_loss, simpo_loss
from composer_replication.loss.rows import (
    Divergence,
    check_at_least_zero,
    check_choice,
    check_positive,
    check_unit_interval,
)
from composer_replication.loss.taid import CrossEntropyToTeacher, TAIDScheduler
from composer_replication.trainer.objective.distributed import check_adapter_can_be_disabled
from composer_replication.trainer.objective.row_weighting import (
    LIVE,
    HintTargets,
    RowWeighting,
    TeacherRows,
    WeightedTeacher,
)

DPO_VARIANTS = ("dpo", "simpo")
SDPO_WRAPPERS = ("none", "taid", "entropy_opd")
Anneal = Literal["none", "linear"]
"""How the weight of channel 2 changes over a run."""
METRIC_NAMES: dict[str, str] = dict(zip(CHANNELS, ("lm_ce", "sdpo_kl", "trace_replay_dpo"), strict=True))
"""The channels' names in metrics."""
_NO_TARGETS = HintTargets()


def with_metric_names(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers with metric names for channels in their keys (`channel` or `channel: reason`)."""
    parts = ((name.partition(":"), number) for name, number in numbers.items())
    return {METRIC_NAMES.get(channel, channel) + colon + reason: number for (channel, colon, reason), number in parts}


class ChannelOptions(NamedTuple):
    """The settings of all channels, after validation."""

    divergence: Divergence
    preference: _Preference
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
        """Whether channel 2 (hint distillation) needs unrelated hints."""
        return self.weighting is not None and self.weighting.contrast is not None


class Channel(NamedTuple):
    """A channel's loss, its item count, and the number of sites without an unrelated hint."""

    value: Tensor
    items: int
    sites_without_contrast: int = 0


class Denominators:
    """The denominator of each channel's loss: the number of its items, or a number given by the caller.

    The caller may, for example, give the number of items in all micro-batches of a step.
    """

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
        """Raise InputError if the denominator of a channel that has items is 0."""
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
    groups = _row_groups(student_NH, teachers, options.weighting, targets)
    if options.weighting is not None and options.weighting.changes_weights:
        weights_N = weights_N * _hint_row_weights(head, groups, options.weighting, targets, weights_N)
    # After the row weights are normalized, since importance weights must keep their scale to correct the sampling.
    if targets.importance_N is not None:
        weights_N = weights_N * targets.importance_N.to(weights_N)
    values = [_group_loss(head, group, options, weights_N) for group in groups]
    num_without = targets.sites_without_contrast if options.contrasts else 0
    return Channel(values[0] if len(values) == 1 else torch.stack(values).sum(), count, num_without)


def _group_loss(head: LinearHead, group: _RowGroup, options: ChannelOptions, weights_N: Tensor) -> Tensor:
    """Return the weighted sum of the divergences of a group's rows.

    With TAID, the student's own logits are mixed into the teacher's.
    """
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


def _row_groups(
    student_NH: Tensor, teachers: Sequence[TeacherRows], weighting: RowWeighting | None, targets: HintTargets
) -> list[_RowGroup]:
    """Return all rows as one group, or as two groups: rows with a contrast, then rows without."""
    contrast = targets.contrast
    if weighting is None or weighting.contrast is None or contrast is None or not contrast.numbers_M.numel():
        return [_RowGroup(None, student_NH, _teacher_terms(teachers))]
    num_rows, numbers_M = student_NH.shape[0], contrast.numbers_M
    is_whole = numbers_M.numel() == num_rows
    # Indexing with every row would only make a copy.
    right = teachers if is_whole else _select_rows(teachers, numbers_M)
    student = student_NH if is_whole else student_NH[numbers_M]
    unhinted = _teacher_terms(contrast.unhinted) if contrast.unhinted else [TeacherTerm.student(1.0)]
    strength = weighting.contrast
    # unhinted + strength * (right - wrong), as a sum of logits with signed coefficients.
    terms = [*unhinted, *_teacher_terms(right, strength), *_teacher_terms(contrast.wrong, -strength)]
    if is_whole:
        return [_RowGroup(None, student, terms)]
    has_contrast = torch.zeros(num_rows, dtype=torch.int8, device=numbers_M.device).index_fill_(0, numbers_M, 1)
    # Unlike this, nonzero() would wait for the GPU to report how many rows there are.
    plain_numbers = has_contrast.argsort(stable=True)[: num_rows - numbers_M.numel()]
    plain = _RowGroup(plain_numbers, student_NH[plain_numbers], _teacher_terms(_select_rows(teachers, plain_numbers)))
    return [_RowGroup(numbers_M, student, terms), plain]


def _teacher_terms(teachers: Sequence[TeacherRows], times: float = 1.0) -> list[TeacherTerm]:
    return [TeacherTerm(teacher.rows_NH, teacher.head, times * teacher.coefficient) for teacher in teachers]


def _select_rows(teachers: Sequence[TeacherRows], numbers: Tensor) -> list[TeacherRows]:
    return [teacher._replace(rows_NH=teacher.rows_NH[numbers]) for teacher in teachers]


class _RowGroup(NamedTuple):
    """Rows of channel 2 whose teacher logits are the same sum of terms.

    `numbers` are the indices of the rows in the channel, or None if the group contains all rows. `terms` is the teacher
    before TAID, with coefficients that add up to 1.
    """

    numbers: Tensor | None
    student_NH: Tensor
    terms: list[TeacherTerm]

    def of_channel(self, values_N: Tensor) -> Tensor:
        """Select the values of this group's rows from the values of all rows of the channel."""
        return values_N if self.numbers is None else values_N[self.numbers]


def _hint_row_weights(
    head: LinearHead, groups: Sequence[_RowGroup], weighting: RowWeighting, targets: HintTargets, like_N: Tensor
) -> Tensor:
    """Return the weight of each row (N,): the product of all weightings that are on, in the dtype of `like_N`."""
    targets.check(weighting, like_N.numel())
    weights_N = torch.ones_like(like_N)
    if weighting.position_decay is not None and targets.position_N is not None:
        weights_N = weights_N * _position_decay(targets.position_N, weighting.position_decay, like_N.dtype)
    if weighting.looks_at_rows and targets.tokens_N is not None:
        for group in groups:
            stats = linear_row_stats(group.student_NH, head, group.terms, group.of_channel(targets.tokens_N))
            factors = _row_factors(weighting, stats, head.vocab).to(like_N.dtype)
            if group.numbers is None:
                weights_N = weights_N * factors
            else:
                weights_N[group.numbers] *= factors
    return _with_mean_one(weights_N) if weighting.normalise else weights_N


def _row_factors(weighting: RowWeighting, stats: RowStats, vocab: int) -> Tensor:
    factors = torch.ones_like(stats.teacher_entropy)
    if weighting.sigmoid_gate_tau is not None:
        factors = _sigmoid_gate(stats.student_logprobs, stats.teacher_logprobs, weighting.sigmoid_gate_tau)
    return factors * _teacher_certainty(stats.teacher_entropy, vocab) if weighting.teacher_entropy else factors


def _sigmoid_gate(student_logprobs_N: Tensor, teacher_logprobs_N: Tensor, tau: float) -> Tensor:
    """Return the weight 2 sigmoid((log p_S(y) - log p_T(y)) / tau).

    It is 1 where student and teacher agree on the token, and up to 2 where the teacher finds it less likely.
    """
    check_positive(tau, "tau")
    return 2.0 * torch.sigmoid((student_logprobs_N - teacher_logprobs_N).detach() / tau)


def _teacher_certainty(entropy_N: Tensor, vocab: int) -> Tensor:
    """Return the weight 1 - H_T / log V in [0, 1], where H_T is the teacher's entropy in nats."""
    # A vocabulary of size 1 has log V = 0, and its only distribution is certain.
    return (1.0 - entropy_N.detach() / (math.log(vocab) or 1.0)).clamp(0.0, 1.0)


def _position_decay(position_N: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """Return the weight decay^j, where j is the index of a target token within its site."""
    check_positive(decay, "decay")
    check_unit_interval(decay, "decay")
    return torch.pow(torch.full_like(position_N, decay, dtype=dtype), position_N)


def _with_mean_one(weights_N: Tensor) -> Tensor:
    """Scale the weights to a mean of 1. If all weights are 0 they stay 0, so that no row counts."""
    # torch.where rather than `if`, which would wait for the device.
    mean = weights_N.mean() if weights_N.numel() else weights_N.new_ones(())
    return weights_N / torch.where(mean == 0, torch.ones_like(mean), mean)


def pair_channel(
    logprobs: Tensor,
    lengths: Tensor,
    references: tuple[Tensor, Tensor] | None,
    preference: _Preference,
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


def annealed_weight(weight: float, anneal: Anneal, *, step: int, total_steps: int, end: float = 0.0) -> float:
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
    """Raise InputError unless `annealed_weight` supports this schedule and final fraction."""
    check_choice(anneal, get_args(Anneal), "anneal")
    check_unit_interval(end, "anneal_end")


class _Preference(NamedTuple):
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
        """Return the divergence for channel 2. `taid_t` is the teacher's share in TAID's target, if TAID is on."""
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
    def preference(self) -> _Preference:
        """The preference loss for channel 3."""
        if self.dpo_variant == "dpo":
            return _Preference(True, self.replay_dpo_beta, 0.0)
        return _Preference(False, self.simpo_beta, self.simpo_gamma)


@dataclass(frozen=True, kw_only=True)
class ChannelSettings(LossKnobs):
    """Settings for channels 2 and 3: arguments of `compose_loss`, and how channel 2's weight changes over the steps.

    The arguments have the same names as in `compose_loss`. `sdpo_is_clip` caps the importance ratio (current / sampling
    probability) by which a rollout's tokens are weighted; no gradient flows through it. With `sdpo_wrapper="taid"`, t
    moves from `taid_start` to `taid_end`, as in `TAIDScheduler`. With `anneal="linear"`, the weight goes from
    `alpha_sdpo` at the first step to `alpha_sdpo * anneal_end` at the last.
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
        """Return channel 2's weight for the next optimizer step after `step` completed steps."""
        return annealed_weight(self.alpha_sdpo, self.anneal, step=step, total_steps=total_steps, end=self.anneal_end)

    def loss_options(self) -> dict[str, Any]:
        """Return keyword arguments for `compose_loss`, except the weights and TAID's t, which change during a run."""
        names = {field.name for field in fields(LossKnobs)} - {"alpha_sdpo", "beta_replay"}
        return {name: value for name, value in vars(self).items() if name in names}

    def taid_schedule(self, total_steps: int) -> TAIDScheduler:
        """Return the schedule of TAID's mixing weight t for a run with `total_steps` steps."""
        return TAIDScheduler(
            max(total_steps, 1),
            t_start=self.taid_start,
            t_end=self.taid_end,
            alpha=self.taid_rate,
            beta=self.taid_momentum,
        )


NO_PAIR = (
    "channel trace_replay_dpo cannot run: beta_replay is {:g}, but there are no preference pairs. Create pairs with"
    " `crf replay` and `crf pairs`, or set loss.beta_replay = 0"
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
    """Check the arguments of `compose_loss` and return them as options, for callers that already have hidden states."""
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
        _check_teachers(sdpo_teachers, model),
        sdpo_weighting,
    )


def _check_teachers(teachers: Sequence[WeightedTeacher] | None, student: nn.Module) -> tuple[WeightedTeacher, ...]:
    """Check the teachers and return them; None means that the student itself is the only teacher.

    Coefficients must add up to 1. Otherwise the summed logits would be sharper or flatter than those of the models.
    """
    if teachers is None:
        return (LIVE,)
    weighted_teachers = tuple(teachers)
    # Up to the rounding in sums such as 0.99 + 0.01.
    total = math.fsum(teacher.coefficient for teacher in weighted_teachers)
    if (
        not weighted_teachers
        or any(teacher.coefficient <= 0 for teacher in weighted_teachers)
        or abs(total - 1.0) > 1e-6
    ):
        got = [teacher.coefficient for teacher in weighted_teachers]
        raise InputError(explain("sdpo_teachers coefficients", got=got, expected="positive numbers that add up to 1"))
    for teacher in weighted_teachers:
        if teacher.without_adapter:
            check_adapter_can_be_disabled(teacher.model or student)
    return weighted_teachers
