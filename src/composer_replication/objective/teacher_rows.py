"""Who teaches channel 2: the model itself as it is, or other weights, or a mixture of logits.

A live teacher drifts with its student. A frozen reference, an average of earlier weights (EMA) or a trust region
(0.99 x reference + 0.01 x live) do not; each of them is one more pass without gradient over the same sequences. Under
LoRA the reference is the same model with its adapter off, and needs no weights of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.errors import InputError, explain
from composer_replication.loss.linear.head import LinearHead
from composer_replication.objective.adapters import below_adapter, check_can_switch_off, evaluating
from composer_replication.objective.distributed import inside_forward, is_sharded, unwrapped
from composer_replication.objective.model_head import causal_lm_of, head_of


class WeightedTeacher(NamedTuple):
    """One share of the teacher's logits: these weights (None: the student's own as they are), this many times."""

    model: nn.Module | None = None
    coefficient: float = 1.0
    without_adapter: bool = False


class Teacher(NamedTuple):
    """What a share contributes: hidden rows (N, H) without gradient, the head they belong to, and its coefficient."""

    rows_NH: Tensor
    head: LinearHead
    coefficient: float


LIVE = WeightedTeacher()


def check_teachers(teachers: Sequence[WeightedTeacher] | None, student: nn.Module) -> tuple[WeightedTeacher, ...]:
    """Coefficients must add up to 1, or the teacher would be sharper or flatter than its weights say."""
    if teachers is None:
        return (LIVE,)
    weighted_teachers = tuple(teachers)
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
            check_can_switch_off(teacher.model or student)
    return weighted_teachers


def models_of(student: nn.Module, teachers: Sequence[WeightedTeacher]) -> list[nn.Module]:
    """Every model that a step runs: where one of them is sharded, processes must agree on its passes."""
    return [student, *(teacher.model for teacher in teachers if teacher.model is not None)]


def is_live(teacher: WeightedTeacher, student: nn.Module) -> bool:
    """Whether a share is the student itself as it is."""
    return not teacher.without_adapter and unwrapped(teacher.model or student) is unwrapped(student)


def teacher_rows(
    student: nn.Module,
    teachers: Sequence[WeightedTeacher],
    probe_ids: Tensor,
    rows_of: Callable[[nn.Module], Tensor],
    live_rows: Tensor | None = None,
) -> list[Teacher]:
    """Each share's rows; `live_rows` are those of the student itself where a pass has given them already."""
    shares: list[Teacher] = []
    for teacher in teachers:
        model = teacher.model or student
        if live_rows is not None and is_live(teacher, student):
            shares.append(Teacher(live_rows, head_of(model, probe_ids), teacher.coefficient))
            continue
        shares.append(_share(model, teacher, probe_ids, rows_of))
    return _mixed(shares)


def _share(
    model: nn.Module, teacher: WeightedTeacher, probe_ids: Tensor, rows_of: Callable[[nn.Module], Tensor]
) -> Teacher:
    causal_lm = causal_lm_of(model)

    def work() -> tuple[Tensor, Tensor, Tensor | None]:
        head = head_of(model, probe_ids)
        rows, weight, bias = rows_of(model).detach().to(head.weight.dtype), head.weight.detach(), head.bias
        if is_sharded(model):  # whole only in here, and the loss needs it outside
            weight, bias = weight.clone(), None if bias is None else bias.detach().clone()
        heads.append(head)
        return rows, weight, bias

    heads: list[LinearHead] = []
    with torch.no_grad(), evaluating(model), below_adapter(model) if teacher.without_adapter else nullcontext():
        rows, weight, bias = inside_forward(model, causal_lm, work)
    return Teacher(rows, replace(heads[0], weight=weight, bias=bias), teacher.coefficient)


def _mixed(shares: list[Teacher]) -> list[Teacher]:
    """Shares of one head as one share: a sum of logits is the head of a sum of rows, unless a soft-cap bends it.

    Not in half precision: rounded, a hundredth of a share is mostly nothing.
    """
    mixed: dict[int, Teacher] = {}
    for teacher in shares:
        is_exact = teacher.rows_NH.dtype in (torch.float32, torch.float64)
        is_linear = teacher.head.softcap is None and teacher.head.bias is None
        key = teacher.head.weight.data_ptr() if is_exact and is_linear else id(teacher)
        if key not in mixed:
            mixed[key] = teacher
            continue
        one = mixed[key]
        total = one.coefficient + teacher.coefficient
        share = teacher.coefficient / total
        rows = torch.lerp(one.rows_NH, teacher.rows_NH, share)
        mixed[key] = Teacher(rows, one.head, total)
    return list(mixed.values())
