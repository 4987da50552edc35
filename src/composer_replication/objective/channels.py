"""Each channel's loss from the hidden rows it needs, wherever those rows come from: flat sequences or a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.loss.dpo import dpo_loss
from composer_replication.loss.linear import (
    LinearHead,
    TeacherTerm,
    linear_cross_entropy,
    linear_divergence,
    linear_token_logprobs,
)
from composer_replication.loss.rows import Divergence, check_at_least_zero, check_choice
from composer_replication.loss.simpo import simpo_loss
from composer_replication.objective.components import CHANNELS
from composer_replication.objective.teachers import Teacher, WeightedTeacher


class Preference(NamedTuple):
    """DPO's or SimPO's knobs; only DPO has a reference."""

    needs_reference: bool
    beta: float
    gamma: float


class Options(NamedTuple):
    """What the channels are asked to do."""

    divergence: Divergence
    preference: Preference
    taid_t: float | None
    token_clip: float | None
    label_smoothing: float
    divide: Denominators
    alpha: float
    beta: float
    teachers: tuple[WeightedTeacher, ...]


class Channel(NamedTuple):
    """A channel's loss, and how many items it is the mean of."""

    value: Tensor
    items: int


class Denominators:
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

    def check(self, counts: Mapping[str, int]) -> None:
        """Raise before anything runs where a channel with items would be divided by nothing."""
        for channel, count in counts.items():
            self.of(channel, count)

    def row_weights(self, channel: str, count: int, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.full((count,), 1.0 / self.of(channel, count), dtype=dtype, device=like.device)


def response_channel(
    head: LinearHead, rows_NH: Tensor, targets_N: Tensor, label_smoothing: float, divide: Denominators
) -> Channel:
    """Channel 1's stand-in: cross-entropy on the response tokens."""
    count = targets_N.numel()
    weights = divide.row_weights("lm_ce", count, rows_NH)
    result = linear_cross_entropy(rows_NH, head, targets_N, row_weights=weights, label_smoothing=label_smoothing)
    return Channel(result.loss, count)


def hint_channel(head: LinearHead, student_NH: Tensor, teachers: Sequence[Teacher], options: Options) -> Channel:
    """Channel 2: row n of all sides predicts the same token; the teachers' rows carry no gradient."""
    share = 1.0 if options.taid_t is None else options.taid_t
    terms = [TeacherTerm(each.rows_NH, each.head, share * each.coefficient) for each in teachers]
    if options.taid_t is not None:
        terms.append(TeacherTerm.student(1.0 - options.taid_t))
    count = student_NH.shape[0]
    weights_N = options.divide.row_weights("sdpo_jsd", count, student_NH)
    result = linear_divergence(
        student_NH, head, terms, options.divergence, row_weights=weights_N, token_clip=options.token_clip
    )
    return Channel(result.loss, count)


def summed_logprobs(
    head: LinearHead, rows_NH: Tensor, targets_N: Tensor, response_N: Tensor, num_responses: int
) -> tuple[Tensor, Tensor]:
    """Log-probs summed over each response (R,), and the responses' lengths; `response_N` says whose each row is."""
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
    """Channel 3 from the log-probs of all responses, chosen first."""
    num_pairs = logprobs.numel() // 2
    if references is not None:
        given = [each.to(logprobs) for each in references]
        loss = dpo_loss(logprobs[:num_pairs], logprobs[num_pairs:], *given, beta=preference.beta)
    else:
        averages = logprobs / lengths
        loss = simpo_loss(averages[:num_pairs], averages[num_pairs:], beta=preference.beta, gamma=preference.gamma)
    return Channel(loss * (num_pairs / divide.of("trace_replay_dpo", num_pairs)), num_pairs)


def in_head_dtype(hidden: Tensor, head: LinearHead) -> Tensor:
    """Outside autocast a head multiplies in its own dtype; some models end on an fp32 norm before a bf16 head."""
    return hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(head.weight.dtype)
