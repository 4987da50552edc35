"""Implement channel 2 (hint distillation) and channel 3 (DPO pairs) as loss functions for verl's engine.

With `distillation_use_topk`, an engine calls the loss function twice per micro-batch: first with the packed logits of
all tokens, then with the outputs computed from them. The first call computes channel 2 at the positions that predict
the tokens of erring turns; the second call adds it to the policy's loss. verl averages gradients over its data-parallel
processes, so each sum is divided by the count of the whole batch divided by the number of processes.

The teacher's logits are a weighted sum over two engines: the reference worker's engine (with LoRA, the policy's without
its adapter) and the policy's current engine. Every process runs as many forward passes as the process with the most
contexts; otherwise, sharded engines would wait for each other forever. A process without contexts runs a dummy of two
tokens.

Shape suffixes: N rows with a target, K entries of a distribution, V vocabulary, L packed tokens, R rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.errors import ConfigError, InputError, explain
from composer_replication.loss.jsd import log_prob_divergence
from composer_replication.loss.rows import (
    cap_rows,
    check_finite_rows,
    check_positive,
    check_unit_interval,
    in_compute_dtype,
)
from composer_replication.loss.sdpo import entries_with_tail, importance_weights, with_tail_bucket
from composer_replication.trainer.objective.channels import (
    Anneal,
    Denominators,
    LossKnobs,
    annealed_weight,
    check_anneal,
    pair_channel,
)
from composer_replication.trainer.objective.distributed import adapter_disabled, eval_mode
from composer_replication.trainer.rollouts.hint_distillation import ErringTurn

# Names of columns and outputs that this package adds to verl's batches.
ROW_NUMBER = "composer_row"
VALUES = "composer_values"
PAIR_START, PAIR_REFERENCE, PAIR_IS_REAL = "pair_start", "pair_reference", "pair_is_real"


class TeacherRows(NamedTuple):
    """The positions of a row that predict target tokens, and the teacher's distribution at each of them.

    `logprobs_NK` are the teacher's log-probs of the entries `ids_NK`; if `ids_NK` is None, they cover the whole
    vocabulary. `tail_N1` is the logarithm of the total probability of all other entries. If it is None, as for teachers
    that return only their top k entries, that probability is computed as one minus the sum of the listed probabilities.
    """

    position_N: Tensor
    ids_NK: Tensor | None
    logprobs_NK: Tensor
    tail_N1: Tensor | None = None

    def with_tail(self) -> Tensor:
        """Return the log-probs of the entries and of the tail as a tensor of shape (N, K + 1)."""
        if self.tail_N1 is None:
            return with_tail_bucket(self.logprobs_NK)
        return torch.cat([self.logprobs_NK, self.tail_N1], dim=-1)


def _divergence_rows(student_NV: Tensor, taught: TeacherRows, *, beta: float, temperature: float) -> Tensor:
    """Return the Jensen-Shannon divergence with weight `beta` in each row, computed on the teacher's entries and one
    tail bucket that holds all other entries.

    Without this bucket, neither distribution sums to one, and the "divergence" can be negative. Clamping it at zero, as
    verl's own top-k loss does, removes its gradient.
    """
    log_s = (in_compute_dtype(student_NV) / temperature).log_softmax(-1)
    if taught.ids_NK is None:
        return log_prob_divergence(log_s, taught.logprobs_NK.to(log_s), beta)
    return log_prob_divergence(entries_with_tail(log_s, taught.ids_NK), taught.with_tail().to(log_s), beta)


class ChannelLoss:
    """The policy's loss plus alpha times channel 2 (hint distillation) for one mini-batch. `taught` has one entry
    per row of the mini-batch.
    """

    def __init__(
        self,
        policy: Callable[..., tuple[Tensor, dict[str, Any]]],
        settings: EngineChannels,
        taught: Sequence[TeacherRows | None],
        *,
        alpha: float,
        num_items: float,
    ) -> None:
        self._policy, self._settings, self._taught = policy, settings, taught
        self._alpha, self._num_items = alpha, num_items

    def __call__(
        self,
        model_output: dict[str, Any] | None = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        **_unused: Any,
    ) -> Any:
        if student_logits is not None:
            return {VALUES: self._values(student_logits, data)}
        assert model_output is not None
        values_L = model_output[VALUES].values()
        if self._settings.sdpo_is_clip is not None:
            values_L = values_L * self._importance(model_output, data)
        # 0 if no process has a target; then the sum is 0 too.
        share = self._num_items / float(data["dp_size"])
        sdpo = values_L.sum() / share if share else values_L.sum()
        # The policy's loss comes from verl and already has its own normalization.
        policy, metrics = self._policy(model_output=model_output, data=data, dp_group=dp_group)
        return policy + self._alpha * sdpo, metrics | _metrics("sdpo_kl", sdpo, self._num_items, self._alpha)

    def _values(self, logits_1LV: Tensor, data: Any) -> Tensor:
        """Return a (1, L) tensor that holds the divergence of each target token at the position that predicts it,
        and 0 elsewhere.
        """
        # Part of the graph even without targets, because all processes must run the same backward pass.
        values_L = 0.0 * in_compute_dtype(logits_1LV[0, :, 0])
        for first, taught in self._rows(data):
            position_N = taught.position_N.to(logits_1LV.device) + first
            student_NV = _without_temperature(in_compute_dtype(logits_1LV[0, position_N]), data)
            settings = self._settings
            divergence_N = _divergence_rows(
                student_NV, taught, beta=settings.sdpo_jsd_beta, temperature=settings.sdpo_temperature
            )
            # Before the cap, which would hide an infinite value.
            check_finite_rows(divergence_N, "channel 2")
            values_L = values_L.index_add(0, position_N, cap_rows(divergence_N, settings.sdpo_token_clip))
        return values_L[None]

    def _rows(self, data: Any) -> list[tuple[int, TeacherRows]]:
        """Return the rows that have targets, each with the index of its first token among the packed tokens."""
        numbers, firsts = data[ROW_NUMBER].tolist(), data["input_ids"].offsets().tolist()
        pairs = [(first, self._taught[number]) for number, first in zip(numbers, firsts[:-1], strict=True)]
        return [(first, taught) for first, taught in pairs if taught is not None]

    def _importance(self, model_output: dict[str, Any], data: Any) -> Tensor:
        """Return min(clip, p_new / p_old) at positions that predict sampled tokens, and 1 elsewhere. The result has
        no gradient.
        """
        clip = self._settings.sdpo_is_clip
        assert clip is not None
        now_L = model_output["log_probs"].values()
        weights_L = torch.ones_like(now_L)
        ends, lengths = data["input_ids"].offsets()[1:].tolist(), _response_lengths(data)
        for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            # The row before a token predicts it, hence the shift by one.
            rows = slice(end - length - 1, end - 1)
            old_logprobs = data["old_log_probs"][row][:length].to(now_L)
            weights_L[rows] = importance_weights(now_L[rows].detach(), old_logprobs, clip)
        return weights_L.detach()


class PairLoss:
    """The loss of channel 3 (DPO) times beta_replay, for micro-batches in which chosen and rejected answers
    alternate.
    """

    def __init__(self, settings: EngineChannels, num_items: float) -> None:
        self._settings, self._num_items = settings, num_items

    def __call__(self, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:  # noqa: ARG002
        """Return the loss of the pairs in a micro-batch, computed from `log_probs`. Padding rows have no influence."""
        # A row's log-probs are those of its next tokens, so an answer that starts at s is predicted from s - 1 on.
        logprob_rows = model_output["log_probs"].unbind()
        sums = [row[start - 1 : -1].sum() for row, start in zip(logprob_rows, data[PAIR_START].tolist(), strict=True)]
        lengths = [row.numel() - start for row, start in zip(logprob_rows, data[PAIR_START].tolist(), strict=True)]
        sums_R, lengths_R = torch.stack(sums), torch.tensor(lengths, device=sums[0].device)
        is_real_R = data[PAIR_IS_REAL].bool()
        # Reorder from alternating rows to all chosen ones, then all rejected ones; padding rows are left out.
        order = torch.cat([is_real_R.nonzero()[:, 0][::2], is_real_R.nonzero()[:, 0][1::2]])
        # All rows are padding. The zero stays in the graph, because all processes must run the backward pass.
        if not order.numel():
            return sums_R.sum() * 0.0, _metrics("trace_replay_dpo", sums_R.new_zeros(()), self._num_items, 0.0)
        share = self._num_items / float(data["dp_size"])
        preference = self._settings.preference
        reference_R = data[PAIR_REFERENCE][order]
        half = order.numel() // 2
        references = (reference_R[:half], reference_R[half:]) if preference.needs_reference else None
        divide = Denominators({"trace_replay_dpo": share})
        channel = pair_channel(sums_R[order], lengths_R[order], references, preference, divide)
        beta = self._settings.beta_replay
        return beta * channel.value, _metrics("trace_replay_dpo", channel.value, self._num_items, beta)


def _without_temperature(rows_NV: Tensor, data: Any) -> Tensor:
    """Return the logits without the engine's division by the sampling temperature, because channel 2 has a
    temperature of its own.
    """
    temperature = data["temperature"]
    if isinstance(temperature, Tensor):
        # One factor is applied to all packed rows, so they must have been sampled alike.
        if temperature.numel() > 1 and bool((temperature != temperature.flatten()[0]).any()):
            got = "several in one micro-batch"
            raise InputError(explain("sampling temperature", got=got, expected="the same for all rows"))
        temperature = float(temperature.flatten()[0])
    return rows_NV if temperature == 1.0 else rows_NV * temperature


def _response_lengths(data: Any) -> list[int]:
    responses = data["responses"]
    # Nested without padding, or padded on the right with a mask.
    if responses.is_nested:
        return responses.offsets().diff().tolist()
    return data["attention_mask"][:, -responses.shape[1] :].sum(1).tolist()


def _metrics(name: str, value: Tensor, num_items: float, weight: float) -> dict[str, Any]:
    """Return the metrics of a channel. After verl has summed them over micro-batches and averaged them over
    processes, the loss is a mean over items.
    """
    from verl.utils.metric import Metric

    return {
        f"composer/{name}": Metric("sum", value.detach().float()),
        f"composer/{name}_items": Metric("max", float(num_items)),
        f"composer/{name}_weight": Metric("max", float(weight)),
    }


KEY = "composer"
"""The key under `actor_rollout_ref` in verl's config that holds `EngineChannels`."""


@dataclass(frozen=True, kw_only=True)
class EngineChannels(LossKnobs):
    """The options of channel 2 (hint distillation) and channel 3 (DPO pairs), with the names used by `compose_loss`,
    and additional options for an engine.

    `live_share` is the share of the current policy in the teacher's logits; the rest comes from the reference worker. A
    share of 0 gives a frozen teacher, 1 a teacher that is the current policy, and values in between a trust-region
    teacher. `teacher_top_k` is the number of teacher entries that are kept per token, while all others go into one tail
    bucket; None keeps the whole vocabulary. `teacher_batch` is the number of hinted contexts per forward pass, and
    `pair_batch` is the number of pairs. `sdpo_is_clip` is the clip in the weight min(clip, p_new / p_old) of a token
    that was sampled by older weights. With `anneal="linear"`, the weight of channel 2 changes from `alpha_sdpo` at the
    first step of the learning-rate schedule to `alpha_sdpo * anneal_end` at the last step.
    """

    live_share: float = 0.01
    teacher_top_k: int | None = None
    teacher_batch: int = 8
    sdpo_is_clip: float | None = None
    pair_batch: int = 2
    anneal: Anneal = "none"
    anneal_end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sdpo_wrapper != "none":
            fix = "verl's checkpoints cannot store TAID's schedule, and the entropy gate needs the whole vocabulary."
            raise InputError(explain("sdpo_wrapper in verl", got=repr(self.sdpo_wrapper), expected="'none'", fix=fix))
        check_unit_interval(self.live_share, "live_share")
        check_anneal(self.anneal, self.anneal_end)
        for name in ("teacher_top_k", "sdpo_is_clip"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)
        for name in ("teacher_batch", "pair_batch"):
            if getattr(self, name) < 1:
                raise InputError(explain(name, got=getattr(self, name), expected="1 or more"))

    def alpha_at(self, step: int, total_steps: int) -> float:
        """Return the loss weight of channel 2 (hint distillation) in the step that follows `step` completed steps."""
        if self.anneal != "none" and total_steps < 1:
            fix = "Set actor.optim.total_training_steps, as verl's trainer does, or use anneal: none."
            raise InputError(explain("total_training_steps", got=total_steps, expected="1 or more", fix=fix))
        return annealed_weight(self.alpha_sdpo, self.anneal, step=step, total_steps=total_steps, end=self.anneal_end)


def read_settings(actor_rollout_ref: Mapping[str, Any]) -> EngineChannels:
    """Read the settings of the channels in a config. Raises ConfigError if there are none, or if a name is unknown."""
    options = actor_rollout_ref.get(KEY)
    if options is None:
        expected = f"a mapping under actor_rollout_ref.{KEY}"
        raise ConfigError(explain(f"actor_rollout_ref.{KEY}", got=None, expected=expected))
    option_names = {field.name for field in fields(EngineChannels)}
    unknown = sorted(set(options) - option_names)
    if unknown:
        raise ConfigError(explain(f"actor_rollout_ref.{KEY}", got=unknown, expected=sorted(option_names)))
    return EngineChannels(**{str(name): value for name, value in options.items()})


class TeacherShare(NamedTuple):
    """One of the engines that make up the teacher, and the coefficient of its logits in the teacher's logits.

    `is_policy` marks the engine that is being trained.
    """

    engine: Any
    coefficient: float
    is_policy: bool = False
    without_adapter: bool = False


class _LogitsCapture:
    """A loss function for forward passes without gradient. It stores the logits at certain positions, and returns 0."""

    def __init__(self, rows_N: Tensor) -> None:
        self._rows_N = rows_N
        self.logits_NV: Tensor | None = None

    def __call__(self, student_logits: Tensor | None = None, **_unused: Any) -> Any:
        if student_logits is not None:
            self.logits_NV = in_compute_dtype(student_logits[0, self._rows_N.to(student_logits.device)])
            return {}
        return torch.zeros(()), {}


def max_over_processes(count: int, engine: Any) -> int:
    return int(_all_reduce(float(count), engine, torch.distributed.ReduceOp.MAX))


def sum_over_processes(count: float, engine: Any) -> float:
    return _all_reduce(count, engine, torch.distributed.ReduceOp.SUM)


def _all_reduce(value: float, engine: Any, operation: Any) -> float:
    # verl is imported inside functions, so that the losses above can be used and tested without it.
    from verl.utils.device import get_device_id

    # fp64, because fp32 cannot represent all counts above 2^24.
    reduced_value = torch.tensor([value], dtype=torch.float64, device=get_device_id())
    torch.distributed.all_reduce(reduced_value, op=operation, group=engine.get_data_parallel_group())
    return float(reduced_value.item())


def gather_lists(numbers: Sequence[int], engine: Any) -> list[list[int]]:
    """Return the lists of 64-bit integers of all processes, in rank order. All processes must call this at the same
    time.
    """
    from verl.utils.device import get_device_id

    group, longest = engine.get_data_parallel_group(), max_over_processes(len(numbers), engine)
    # all_gather needs equal sizes, so each process sends its length, its numbers and zeros.
    padded_numbers = torch.tensor([len(numbers), *numbers, *[0] * (longest - len(numbers))], device=get_device_id())
    lists = [torch.empty_like(padded_numbers) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(lists, padded_numbers, group=group)
    return [values[:size] for size, *values in (tensor.tolist() for tensor in lists)]


def make_engine_batch(rows: Sequence[Tensor], engine: Any, *, rows_in_pass: int, **settings: Any) -> Any:
    """Build a nested batch of complete sequences for verl's engine, with `rows_in_pass` rows per micro-batch."""
    from verl.utils import tensordict_utils

    positions = [torch.arange(row.numel()) for row in rows]
    batch = tensordict_utils.get_tensordict(
        {
            "input_ids": torch.nested.as_nested_tensor(list(rows), layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged),
            "loss_mask": torch.ones(len(rows), 1),
        }
    )
    tensordict_utils.assign_non_tensor(
        batch,
        # The teacher's temperature is applied later, in `_teacher_rows`.
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=rows_in_pass,
        use_remove_padding=engine.use_remove_padding,
        # Fused kernels do not produce the logits that are needed here.
        use_fused_kernels=False,
        **settings,
    )
    return batch


def run_teacher(
    shares: Sequence[TeacherShare], turns: Sequence[Sequence[ErringTurn]], settings: EngineChannels
) -> list[TeacherRows | None]:
    """Run the teacher on the hinted contexts. Returns the teacher's distributions for each row, or None for a row
    without error sites.

    All processes of the engines must call this together, even those without any sites.
    """
    flat = [(row, turn) for row, row_turns in enumerate(turns) for turn in row_turns]
    size = settings.teacher_batch
    num_passes = max_over_processes(-(-len(flat) // size), shares[0].engine)
    parts: list[list[TeacherRows]] = [[] for _ in turns]
    with torch.no_grad(), _eval_mode(shares):
        for number in range(num_passes):
            chunk = flat[number * size : (number + 1) * size]
            logits_NV = _mixed_logits(shares, [turn for _, turn in chunk])
            sizes = [turn.end - turn.start for _, turn in chunk]
            for (row, turn), turn_logits in zip(chunk, logits_NV.split(sizes), strict=True):
                parts[row].append(_teacher_rows(turn, turn_logits, settings))
    return [_concatenate(row_parts) if row_parts else None for row_parts in parts]


def _mixed_logits(shares: Sequence[TeacherShare], turns: Sequence[ErringTurn]) -> Tensor:
    """Return the teacher's logits, of shape (N, V), at the positions that predict the tokens of the turns. The turns
    follow one another in this tensor.
    """
    # Without contexts: a dummy of two tokens.
    contexts = [turn.teacher_ids for turn in turns] or [torch.zeros(2, dtype=torch.int64)]
    firsts = torch.tensor([0, *(context.numel() for context in contexts)]).cumsum(0).tolist()
    rows = [
        torch.arange(turn.end - turn.start) + firsts[number] + turn.teacher_start - 1
        for number, turn in enumerate(turns)
    ]
    rows_N = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    total: Tensor | None = None
    for share in shares:
        target_logits = _LogitsCapture(rows_N)
        # These keys make the engine pass its logits to the loss function and compute nothing else.
        keys = {"distillation_use_topk": True, "distillation_only": True}
        with _as_teacher(share):
            batch = make_engine_batch(contexts, share.engine, rows_in_pass=len(contexts), **keys)
            share.engine.infer_batch(batch, loss_function=target_logits)
        assert target_logits.logits_NV is not None, "the engine did not hand its logits to the loss function"
        part = share.coefficient * target_logits.logits_NV
        total = part if total is None else total + part
    assert total is not None
    return total


@contextmanager
def _eval_mode(shares: Sequence[TeacherShare]) -> Iterator[None]:
    """Switch the engines that are not being trained to eval mode, which also loads them onto the device. This is
    done once for all forward passes.
    """
    from contextlib import ExitStack

    with ExitStack() as stack:
        # By identity, because one engine can have two shares but must be switched only once.
        for engine in {id(share.engine): share.engine for share in shares if not share.is_policy}.values():
            stack.enter_context(engine.eval_mode())
        yield


@contextmanager
def _as_teacher(share: TeacherShare) -> Iterator[None]:
    from contextlib import nullcontext

    with (
        eval_mode(share.engine.module),
        adapter_disabled(share.engine.module) if share.without_adapter else nullcontext(),
    ):
        yield


def _teacher_rows(turn: ErringTurn, logits_NV: Tensor, settings: EngineChannels) -> TeacherRows:
    position_N = torch.arange(turn.start - 1, turn.end - 1)
    # The engine ran at temperature 1.0 (`make_engine_batch`).
    logprobs_NV = (logits_NV / settings.sdpo_temperature).log_softmax(-1)
    top_k = settings.teacher_top_k
    # The whole vocabulary needs no tail.
    if top_k is None or top_k >= logprobs_NV.shape[1]:
        return TeacherRows(position_N, None, logprobs_NV)
    ids_NK = logprobs_NV.topk(top_k, dim=-1).indices
    entries = entries_with_tail(logprobs_NV, ids_NK)
    return TeacherRows(position_N, ids_NK, entries[:, :-1], entries[:, -1:])


def _concatenate(parts: Sequence[TeacherRows]) -> TeacherRows:
    ids = [part.ids_NK for part in parts if part.ids_NK is not None]
    tails = [part.tail_N1 for part in parts if part.tail_N1 is not None]
    return TeacherRows(
        torch.cat([part.position_N for part in parts]),
        torch.cat(ids) if ids else None,
        torch.cat([part.logprobs_NK for part in parts]),
        torch.cat(tails) if tails else None,
    )
