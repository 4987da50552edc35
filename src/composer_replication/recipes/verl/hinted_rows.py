"""What a teacher says at the target tokens of hinted contexts, from passes of verl's own engines.

The teacher's logits are a sum of shares: the reference worker's engine (or, under LoRA, the policy's with its adapter
off) and the policy's engine as it is. Every process runs as many passes as the one with the most contexts, or sharded
engines would wait for each other; one that has nothing left runs a context of two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.loss.rows import in_compute_dtype
from composer_replication.loss.sdpo import entries_with_tail
from composer_replication.objective.adapters import below_adapter, evaluating
from composer_replication.recipes.verl.channel_loss import TaughtRows
from composer_replication.recipes.verl.settings import EngineChannels
from composer_replication.rollouts.sites import TaughtTurn


class Share(NamedTuple):
    """So much of the teacher's logits are this engine's; `is_policy`: it is in the middle of a training step."""

    engine: Any
    coefficient: float
    is_policy: bool = False
    without_adapter: bool = False


class TargetLogits:
    """A loss function for a pass without gradient that keeps the logits of some rows, and computes no loss."""

    def __init__(self, rows_N: Tensor) -> None:
        self._rows_N = rows_N
        self.logits_NV: Tensor | None = None

    def __call__(self, student_logits: Tensor | None = None, **_named: Any) -> Any:
        if student_logits is not None:
            self.logits_NV = in_compute_dtype(student_logits[0, self._rows_N.to(student_logits.device)])
            return {}
        return torch.zeros(()), {}


def most_on_any_process(count: int, engine: Any) -> int:
    return int(_reduced(float(count), engine, torch.distributed.ReduceOp.MAX))


def sum_over_processes(count: float, engine: Any) -> float:
    return _reduced(count, engine, torch.distributed.ReduceOp.SUM)


def _reduced(value: float, engine: Any, operation: Any) -> float:
    from verl.utils.device import get_device_id

    reduced_value = torch.tensor([value], dtype=torch.float64, device=get_device_id())
    torch.distributed.all_reduce(reduced_value, op=operation, group=engine.get_data_parallel_group())
    return float(reduced_value.item())


def lists_of_all_processes(numbers: Sequence[int], engine: Any) -> list[list[int]]:
    """Every process's 64-bit numbers, in the order of their ranks; all call this together."""
    from verl.utils.device import get_device_id

    group, longest = engine.get_data_parallel_group(), most_on_any_process(len(numbers), engine)
    own_numbers = torch.tensor([len(numbers), *numbers, *[0] * (longest - len(numbers))], device=get_device_id())
    lists = [torch.empty_like(own_numbers) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(lists, own_numbers, group=group)
    return [values[:size] for size, *values in (tensor.tolist() for tensor in lists)]


def rows_as_batch(rows: Sequence[Tensor], engine: Any, *, rows_in_pass: int, **settings: Any) -> Any:
    """Whole sequences as verl's engine takes them: nested, in order, so many in each micro-batch."""
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
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=rows_in_pass,
        use_remove_padding=engine.use_remove_padding,
        use_fused_kernels=False,
        **settings,
    )
    return batch


def taught_rows(
    shares: Sequence[Share], turns: Sequence[Sequence[TaughtTurn]], settings: EngineChannels
) -> list[TaughtRows | None]:
    """For each row of a batch its targets with the teacher's words on them; None where it has no site.

    All processes of the engines call this together, also those without a site.
    """
    flat = [(row, turn) for row, row_turns in enumerate(turns) for turn in row_turns]
    size = settings.teacher_batch
    passes = most_on_any_process(-(-len(flat) // size), shares[0].engine)
    parts: list[list[TaughtRows]] = [[] for _ in turns]
    with torch.no_grad(), _all_ready(shares):
        for number in range(passes):
            chunk = flat[number * size : (number + 1) * size]
            logits_NV = _mixed_logits(shares, [turn for _, turn in chunk])
            sizes = [turn.end - turn.start for _, turn in chunk]
            for (row, turn), turn_logits in zip(chunk, logits_NV.split(sizes), strict=True):
                parts[row].append(_kept(turn, turn_logits, settings))
    return [_joined(row_parts) if row_parts else None for row_parts in parts]


def _mixed_logits(shares: Sequence[Share], turns: Sequence[TaughtTurn]) -> Tensor:
    """(N, V) logits at the rows that predict the turns' tokens, one turn after the other."""
    contexts = [turn.teacher_ids for turn in turns] or [torch.zeros(2, dtype=torch.int64)]
    firsts = torch.tensor([0, *(context.numel() for context in contexts)]).cumsum(0).tolist()
    rows = [
        torch.arange(turn.end - turn.start) + firsts[number] + turn.teacher_start - 1
        for number, turn in enumerate(turns)
    ]
    rows_N = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    total: Tensor | None = None
    for share in shares:
        target_logits = TargetLogits(rows_N)
        keys = {"distillation_use_topk": True, "distillation_only": True}
        with _as_teacher(share):
            batch = rows_as_batch(contexts, share.engine, rows_in_pass=len(contexts), **keys)
            share.engine.infer_batch(batch, loss_function=target_logits)
        assert target_logits.logits_NV is not None, "the engine did not hand its logits to the loss function"
        part = share.coefficient * target_logits.logits_NV
        total = part if total is None else total + part
    assert total is not None
    return total


@contextmanager
def _all_ready(shares: Sequence[Share]) -> Iterator[None]:
    """Engines that are not training are switched to evaluation once, with what that loads onto the device."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        for engine in {id(share.engine): share.engine for share in shares if not share.is_policy}.values():
            stack.enter_context(engine.eval_mode())
        yield


@contextmanager
def _as_teacher(share: Share) -> Iterator[None]:
    from contextlib import nullcontext

    with (
        evaluating(share.engine.module),
        below_adapter(share.engine.module) if share.without_adapter else nullcontext(),
    ):
        yield


def _kept(turn: TaughtTurn, logits_NV: Tensor, settings: EngineChannels) -> TaughtRows:
    position_N = torch.arange(turn.start - 1, turn.end - 1)
    logprobs_NV = (logits_NV / settings.sdpo_temperature).log_softmax(-1)
    top_k = settings.teacher_top_k
    if top_k is None or top_k >= logprobs_NV.shape[1]:
        return TaughtRows(position_N, None, logprobs_NV)
    ids_NK = logprobs_NV.topk(top_k, dim=-1).indices
    entries = entries_with_tail(logprobs_NV, ids_NK)
    return TaughtRows(position_N, ids_NK, entries[:, :-1], entries[:, -1:])


def _joined(parts: Sequence[TaughtRows]) -> TaughtRows:
    ids = [part.ids_NK for part in parts if part.ids_NK is not None]
    tails = [part.tail_N1 for part in parts if part.tail_N1 is not None]
    return TaughtRows(
        torch.cat([part.position_N for part in parts]),
        torch.cat(ids) if ids else None,
        torch.cat([part.logprobs_NK for part in parts]),
        torch.cat(tails) if tails else None,
    )
