"""Channels 2 and 3 from what verl's engine hands to a loss function.

An engine calls the loss function of a step twice for each micro-batch where `distillation_use_topk` is set: with the
logits of all its tokens, packed, and then with what became of them. So channel 2 is measured on the first call, at the
rows that predict the erring turns' tokens, and added to the policy's loss on the second. verl averages gradients over
its data-parallel processes: a sum over the whole batch is divided by the batch's count, times the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.loss.jsd import log_prob_divergence
from composer_replication.loss.rows import cap_rows, check_finite_rows, in_compute_dtype
from composer_replication.loss.sdpo import entries_with_tail, importance_weights, with_tail_bucket
from composer_replication.objective.channels import Denominators, pair_channel
from composer_replication.recipes.verl.settings import EngineChannels

ROW_NUMBER = "composer_row"
VALUES = "composer_values"
PAIR_START, PAIR_REFERENCE, PAIR_IS_REAL = "pair_start", "pair_reference", "pair_is_real"


class TaughtRows(NamedTuple):
    """A row's target tokens: which positions predict them, and what the teacher says there.

    `logprobs_NK` are the teacher's, of the entries `ids_NK`; without ids they are the whole vocabulary in its order.
    `tail_N1` is the log-mass of all other entries; None, from a teacher that gave its best ones alone, is what these
    leave.
    """

    position_N: Tensor
    ids_NK: Tensor | None
    logprobs_NK: Tensor
    tail_N1: Tensor | None = None

    def with_tail(self) -> Tensor:
        """(N, K + 1) log-probs of the entries and their tail."""
        if self.tail_N1 is None:
            return with_tail_bucket(self.logprobs_NK)
        return torch.cat([self.logprobs_NK, self.tail_N1], dim=-1)


def divergence_rows(student_NV: Tensor, taught: TaughtRows, *, beta: float, temperature: float) -> Tensor:
    """JSD_beta of student logits and the teacher's entries; what is not among these is one bucket on both sides.

    Without the bucket neither side sums to one, the "divergence" may be below zero, and whoever clamps it there (as
    verl's own top-k loss does) takes its gradient away.
    """
    log_s = (in_compute_dtype(student_NV) / temperature).log_softmax(-1)
    if taught.ids_NK is None:
        return log_prob_divergence(log_s, taught.logprobs_NK.to(log_s), beta)
    return log_prob_divergence(entries_with_tail(log_s, taught.ids_NK), taught.with_tail().to(log_s), beta)


class ChannelLoss:
    """The policy's loss plus alpha * channel 2, for one mini-batch; `taught` has one entry for each of its rows."""

    def __init__(
        self,
        policy: Callable[..., tuple[Tensor, dict[str, Any]]],
        settings: EngineChannels,
        taught: Sequence[TaughtRows | None],
        *,
        alpha: float,
        items: float,
    ) -> None:
        self._policy, self._settings, self._taught = policy, settings, taught
        self._alpha, self._items = alpha, items

    def __call__(
        self,
        model_output: dict[str, Any] | None = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        **_named: Any,
    ) -> Any:
        if student_logits is not None:
            return {VALUES: self._values(student_logits, data)}
        assert model_output is not None
        values_L = model_output[VALUES].values()
        if self._settings.sdpo_is_clip is not None:
            values_L = values_L * self._importance(model_output, data)
        share = self._items / float(data["dp_size"])
        sdpo = values_L.sum() / share if share else values_L.sum()
        policy, metrics = self._policy(model_output=model_output, data=data, dp_group=dp_group)
        return policy + self._alpha * sdpo, metrics | _metrics("sdpo_kl", sdpo, self._items, self._alpha)

    def _values(self, logits_1LV: Tensor, data: Any) -> Tensor:
        """(1, L): each target's divergence at the row that predicts it, 0 elsewhere."""
        # Attached to the graph also where a micro-batch has no target: all processes run the same backward.
        values_L = 0.0 * in_compute_dtype(logits_1LV[0, :, 0])
        for first, taught in self._rows(data):
            place_N = taught.position_N.to(logits_1LV.device) + first
            student_NV = _without_temperature(in_compute_dtype(logits_1LV[0, place_N]), data)
            settings = self._settings
            found_N = divergence_rows(
                student_NV, taught, beta=settings.sdpo_jsd_beta, temperature=settings.sdpo_temperature
            )
            check_finite_rows(found_N, "channel 2")
            values_L = values_L.index_add(0, place_N, cap_rows(found_N, settings.sdpo_token_clip))
        return values_L[None]

    def _rows(self, data: Any) -> list[tuple[int, TaughtRows]]:
        """Where each row with targets begins among the packed tokens."""
        numbers, firsts = data[ROW_NUMBER].tolist(), data["input_ids"].offsets().tolist()
        pairs = [(first, self._taught[number]) for number, first in zip(numbers, firsts[:-1], strict=True)]
        return [(first, taught) for first, taught in pairs if taught is not None]

    def _importance(self, model_output: dict[str, Any], data: Any) -> Tensor:
        """min(clip, p now / p then) of every sampled token at the row that predicts it, 1 elsewhere; no gradient."""
        clip = self._settings.sdpo_is_clip
        assert clip is not None
        now_L = model_output["log_probs"].values()
        weights_L = torch.ones_like(now_L)
        ends, lengths = data["input_ids"].offsets()[1:].tolist(), _response_lengths(data)
        for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            rows = slice(end - length - 1, end - 1)
            then = data["old_log_probs"][row][:length].to(now_L)
            weights_L[rows] = importance_weights(now_L[rows].detach(), then, clip)
        return weights_L.detach()


class PairLoss:
    """beta_replay * channel 3 on rows that are chosen and rejected answers in turn, both in one micro-batch."""

    def __init__(self, settings: EngineChannels, items: float) -> None:
        self._settings, self._items = settings, items

    def __call__(self, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:  # noqa: ARG002
        """`log_probs` of the micro-batch's rows; a row that only fills it up has no share."""
        each_row = model_output["log_probs"].unbind()
        sums = [row[start - 1 : -1].sum() for row, start in zip(each_row, data[PAIR_START].tolist(), strict=True)]
        lengths = [row.numel() - start for row, start in zip(each_row, data[PAIR_START].tolist(), strict=True)]
        sums_R, lengths_R = torch.stack(sums), torch.tensor(lengths, device=sums[0].device)
        real_R = data[PAIR_IS_REAL].bool()
        order = torch.cat([real_R.nonzero()[:, 0][::2], real_R.nonzero()[:, 0][1::2]])
        if not order.numel():
            return sums_R.sum() * 0.0, _metrics("trace_replay_dpo", sums_R.new_zeros(()), self._items, 0.0)
        share = self._items / float(data["dp_size"])
        preference = self._settings.preference
        reference_R = data[PAIR_REFERENCE][order]
        half = order.numel() // 2
        references = (reference_R[:half], reference_R[half:]) if preference.needs_reference else None
        divide = Denominators({"trace_replay_dpo": share})
        channel = pair_channel(sums_R[order], lengths_R[order], references, preference, divide)
        beta = self._settings.beta_replay
        return beta * channel.value, _metrics("trace_replay_dpo", channel.value, self._items, beta)


def _without_temperature(rows_NV: Tensor, data: Any) -> Tensor:
    """The engine divides logits by the temperature that rollouts were sampled with; channel 2 has its own."""
    temperature = data["temperature"]
    if isinstance(temperature, Tensor):
        if temperature.numel() > 1 and bool((temperature != temperature.flatten()[0]).any()):
            got = "several in one micro-batch"
            raise InputError(explain("temperature of rollouts", got=got, expected="one for all rows"))
        temperature = float(temperature.flatten()[0])
    return rows_NV if temperature == 1.0 else rows_NV * temperature


def _response_lengths(data: Any) -> list[int]:
    responses = data["responses"]
    if responses.is_nested:
        return responses.offsets().diff().tolist()
    return data["attention_mask"][:, -responses.shape[1] :].sum(1).tolist()


def _metrics(name: str, value: Tensor, items: float, weight: float) -> dict[str, Any]:
    """Shares of micro-batches add up, and the mean over processes is the mean over items (see `Metric`)."""
    from verl.utils.metric import Metric

    return {
        f"composer/{name}": Metric("sum", value.detach().float()),
        f"composer/{name}_items": Metric("max", float(items)),
        f"composer/{name}_weight": Metric("max", float(weight)),
    }
