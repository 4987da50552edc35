"""The hinted teacher of channel 2, and the switches that determine the weight of each target token.

The teacher is the model itself (live), other weights, or a mixture of the logits of several models. A live teacher
drifts with its student. A frozen reference, an average of earlier weights (EMA) or a trust region (0.99 x reference +
0.01 x live) does not; each costs one more pass without gradient over the same sequences. Under LoRA the reference is
the same model with its adapter off, so it needs no weights of its own.

All switches are off by default. The sigmoid gate gives more weight to tokens that the teacher finds less likely than
the student does, and less weight to all others. Weights have no gradient. If they are normalized to a mean of 1 over
the channel's rows, they shift the loss between tokens and leave its scale to alpha.

The contrast removes the style drift that any hint causes, whatever it says. An unrelated hint is put in the same place,
and the effect that both hints share cancels:

    teacher logits = without a hint + strength * (with the hint - with an unrelated hint)

Sites without an unrelated hint keep the plain teacher, and are counted. In rollouts the teachers compute all three
terms in passes without dropout; for a live teacher, the student's own logits come from such a pass as well. With a live
teacher, the loss asks for a difference that remains even when the student follows hints: loss and gradient vanish only
where both hints have the same effect, or where the student is certain of one token
(`experiments/2026-11-18-live-contrast`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.tree_batch import Tokens
from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss.linear.head import LinearHead
from composer_replication.loss.rows import check_positive, check_unit_interval
from composer_replication.trainer.objective.attention.forward import token_hidden_states
from composer_replication.trainer.objective.distributed import (
    adapter_disabled,
    eval_mode,
    inside_forward,
    is_sharded,
    unwrapped,
)
from composer_replication.trainer.objective.model_head import get_causal_lm, get_linear_head


@dataclass(frozen=True)
class RowWeighting:
    """The switches that determine the row weights of channel 2. If several are on, their weights are multiplied.

    In the formulas, the teacher is the sum of all its shares, contrast included, at temperature 1 and before TAID mixes
    in the student. No weight has a gradient.
    """

    sigmoid_gate_tau: float | None = None
    """w = 2 sigmoid((log p_S(y) - log p_T(y)) / tau); tau > 0."""
    teacher_entropy: bool = False
    """w = clamp(1 - H_T / log V, 0, 1), H_T in nats."""
    position_decay: float | None = None
    """w = decay^j for the j-th target token of its site; 0 < decay <= 1."""
    contrast: float | None = None
    """Strength of the contrast with an unrelated hint, > 0."""
    normalise: bool = True
    """Scale the weights to a mean of 1 over the rows of a call; micro-batches then do not add up to the whole batch."""

    def __post_init__(self) -> None:
        if self.sigmoid_gate_tau is not None:
            check_positive(self.sigmoid_gate_tau, "sigmoid_gate_tau")
        if self.position_decay is not None:
            check_positive(self.position_decay, "position_decay")
            check_unit_interval(self.position_decay, "position_decay")
        if self.contrast is not None:
            check_positive(self.contrast, "contrast")
        for name in ("teacher_entropy", "normalise"):
            if type(getattr(self, name)) is not bool:
                raise InputError(explain(name, got=repr(getattr(self, name)), expected="True or False"))

    @property
    def looks_at_rows(self) -> bool:
        """Whether any weight depends on the predictions of the student and the teacher."""
        return self.sigmoid_gate_tau is not None or self.teacher_entropy

    @property
    def changes_weights(self) -> bool:
        """Whether weights may differ between rows."""
        return self.looks_at_rows or self.position_decay is not None


class Contrast(NamedTuple):
    """The rows of the channel that have an unrelated hint; `numbers_M` are their indices among its N rows, ascending.

    Row m of `wrong` and of `unhinted` predicts the same token as row `numbers_M[m]` of the channel. The coefficients in
    each list add up to 1. An empty `unhinted` means the student's own rows, which are also those of a live teacher.
    """

    numbers_M: Tensor
    wrong: Sequence[TeacherRows]
    unhinted: Sequence[TeacherRows] = ()


class HintTargets(NamedTuple):
    """Properties of channel 2's rows; each is needed only if a weighting switch that depends on it is on."""

    tokens_N: Tensor | None = None
    """The token that each row predicts."""
    position_N: Tensor | None = None
    """The index of that token among the target tokens of its site, from 0."""
    contrast: Contrast | None = None
    sites_without_contrast: int = 0
    importance_N: Tensor | None = None
    """Clipped importance weights of rows that were sampled by older weights."""

    def check(self, weighting: RowWeighting, num_rows: int) -> None:
        """Raise if the input for a switch that is on is missing or has the wrong shape."""
        needs = [
            ("the target token of each row", self.tokens_N, weighting.looks_at_rows),
            ("the position of each row in its site", self.position_N, weighting.position_decay is not None),
        ]
        for what, values_N, is_needed in needs:
            if is_needed and values_N is None:
                fix = "Build tree batches with SessionTargets, or pass HintTargets to hint_channel as `targets`."
                raise InputError(
                    explain(what, got=None, expected="a tensor, which the selected row weights need", fix=fix)
                )
            if is_needed and values_N is not None and values_N.shape != (num_rows,):
                raise ShapeError(explain(what, got=tuple(values_N.shape), expected=f"({num_rows},), one value per row"))


class WeightedTeacher(NamedTuple):
    """One share of the teacher's logits: a coefficient times the logits of `model` (None: the student)."""

    model: nn.Module | None = None
    coefficient: float = 1.0
    without_adapter: bool = False


class TeacherRows(NamedTuple):
    """The rows of one share: hidden states (N, H) without gradient, their head, and the share's coefficient."""

    rows_NH: Tensor
    head: LinearHead
    coefficient: float


LIVE = WeightedTeacher()


def all_models(student: nn.Module, teachers: Sequence[WeightedTeacher]) -> list[nn.Module]:
    """Return the student and all teacher models.

    If any of them is sharded, the processes must agree on the passes of a step.
    """
    return [student, *(teacher.model for teacher in teachers if teacher.model is not None)]


def is_live(teacher: WeightedTeacher, student: nn.Module) -> bool:
    """Return whether a teacher is the student itself, with its adapter on."""
    return not teacher.without_adapter and unwrapped(teacher.model or student) is unwrapped(student)


def rows_by_part(
    model: nn.Module,
    teachers: Sequence[WeightedTeacher],
    parts: Sequence[tuple[Tokens, Tensor]],
    live_rows: Tensor | None = None,
) -> list[list[TeacherRows]]:
    """Return the teachers' rows for each of `parts`, which are (tokens, row indices) pairs.

    Each teacher makes one pass over every distinct `Tokens` object, even if several parts use it.
    """

    def rows_of(teacher: nn.Module) -> Tensor:
        # Several parts may be rows of the same tokens (a tree), which then need only one pass.
        hidden: dict[int, Tensor] = {}
        for tokens, _ in parts:
            if id(tokens) not in hidden:
                hidden[id(tokens)] = token_hidden_states(teacher, tokens).hidden
        return torch.cat([hidden[id(tokens)][rows] for tokens, rows in parts])

    shares = _teacher_rows(model, teachers, parts[0][0].input_ids.reshape(1, -1), rows_of, live_rows)
    split_rows = [share.rows_NH.split([rows.numel() for _, rows in parts]) for share in shares]
    return [
        [share._replace(rows_NH=share_rows[number]) for share, share_rows in zip(shares, split_rows, strict=True)]
        for number in range(len(parts))
    ]


def _teacher_rows(
    student: nn.Module,
    teachers: Sequence[WeightedTeacher],
    probe_ids: Tensor,
    rows_of: Callable[[nn.Module], Tensor],
    live_rows: Tensor | None = None,
) -> list[TeacherRows]:
    """Return the rows of each teacher share.

    `live_rows` are the student's own rows if a pass has already computed them.
    """
    shares: list[TeacherRows] = []
    for teacher in teachers:
        model = teacher.model or student
        if live_rows is not None and is_live(teacher, student):
            shares.append(TeacherRows(live_rows, get_linear_head(model, probe_ids), teacher.coefficient))
            continue
        shares.append(_compute_share(model, teacher, probe_ids, rows_of))
    return _merge_shares(shares)


def _compute_share(
    model: nn.Module, teacher: WeightedTeacher, probe_ids: Tensor, rows_of: Callable[[nn.Module], Tensor]
) -> TeacherRows:
    causal_lm = get_causal_lm(model)

    # The weight of the head is returned too: under FSDP2 it is whole only inside the forward.
    def work() -> tuple[Tensor, Tensor, Tensor | None]:
        head = get_linear_head(model, probe_ids)
        rows, weight, bias = rows_of(model).detach().to(head.weight.dtype), head.weight.detach(), head.bias
        if is_sharded(model):  # the weights are whole only inside the forward, but the loss needs them afterwards
            weight, bias = weight.clone(), None if bias is None else bias.detach().clone()
        # Return tensors, because a LinearHead cannot pass through the forward of a wrapper.
        heads.append(head)
        return rows, weight, bias

    heads: list[LinearHead] = []
    with torch.no_grad(), eval_mode(model), adapter_disabled(model) if teacher.without_adapter else nullcontext():
        rows, weight, bias = inside_forward(model, causal_lm, work)
    return TeacherRows(rows, replace(heads[0], weight=weight, bias=bias), teacher.coefficient)


def _merge_shares(shares: list[TeacherRows]) -> list[TeacherRows]:
    """Merge shares that use the same head: a sum of logits equals the head applied to the sum of rows.

    Shares are not merged if the head has a soft-cap, for which this does not hold, or a bias, or in half precision,
    where a small share would be lost to rounding in the sum.
    """
    mixed: dict[int, TeacherRows] = {}
    for teacher in shares:
        is_exact = teacher.rows_NH.dtype in (torch.float32, torch.float64)
        is_linear = teacher.head.softcap is None and teacher.head.bias is None
        # Compare heads by the address of their weights, because every call of `get_linear_head` returns a new object.
        key = teacher.head.weight.data_ptr() if is_exact and is_linear else id(teacher)
        if key not in mixed:
            mixed[key] = teacher
            continue
        merged = mixed[key]
        total = merged.coefficient + teacher.coefficient
        share = teacher.coefficient / total
        rows = torch.lerp(merged.rows_NH, teacher.rows_NH, share)
        mixed[key] = TeacherRows(rows, merged.head, total)
    return list(mixed.values())
