"""TAID (arXiv 2501.16937): the target is a mix that starts near the student and moves to the teacher.

    p_t  = softmax((1 - t) sg(student_logits) + t teacher_logits)
    loss = - sum_v p_t(v) log q(v), mean over the rows that count

This is a cross-entropy, so at its minimum it equals the entropy of p_t, not zero; its gradient is that of KL(p_t || q).

Schedule: the first finite loss is only stored. From then on, with rel = (prev - loss) / (prev + 1e-15),

    m <- beta m + (1 - beta) rel        delta = alpha sigmoid(m) (1 - t)
    t <- min(t_end, max(t_start + (t_end - t_start) step / N, t + delta))        N: number of training steps

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_replication.errors import InputError, explain
from composer_replication.loss import rows


@dataclass(frozen=True, kw_only=True)
class CrossEntropyToTeacher:
    """The cross-entropy - sum_v p_T(v) log q(v) per row: TAID's loss if the teacher logits are the mix."""

    def check(self, vocab: int) -> None:
        """Do nothing, because there are no options to check."""
        del vocab

    def __call__(self, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        target = rows.in_compute_dtype(teacher_NV).detach().softmax(-1)
        return -(target * rows.in_compute_dtype(student_NV).log_softmax(-1)).sum(-1)


def taid_loss(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor | None = None, *, t: float) -> Tensor:
    """Return the mean cross-entropy to TAID's target over the rows of `mask`; see the module docstring."""
    t = float(t)
    rows.check_unit_interval(t, "t")
    rows.check_logit_pair(student_logits, teacher_logits)
    row_mask = rows.to_boolean_mask(mask, student_logits)
    student = rows.in_compute_dtype(rows.select_rows(student_logits, row_mask))
    teacher = rows.in_compute_dtype(rows.select_rows(teacher_logits, row_mask))
    mixed = (1.0 - t) * student.detach() + t * teacher.detach()
    values_N = CrossEntropyToTeacher()(student, mixed)
    rows.check_finite_rows(values_N, "taid_loss")
    return values_N.sum() / max(values_N.numel(), 1)


class TAIDScheduler:
    """Moves t from `t_start` to `t_end`, faster while the loss falls.

    Call `update_t` only after steps in which TAID ran. Other steps have no loss, and a loss of 0 would look like a
    sudden drop followed by an explosion, from which the momentum would need thousands of steps to recover.
    """

    def __init__(
        self,
        num_train_steps: int,
        *,
        t_start: float = 0.4,
        t_end: float = 1.0,
        alpha: float = 5e-4,
        beta: float = 0.99,
        disable_adaptive: bool = False,
        device: str | torch.device = "cpu",
    ) -> None:
        if num_train_steps < 1:
            raise InputError(explain("num_train_steps", got=num_train_steps, expected="an integer >= 1"))
        if not 0.0 <= t_start <= t_end <= 1.0:
            raise InputError(explain("t_start, t_end", got=(t_start, t_end), expected="0 <= t_start <= t_end <= 1"))
        rows.check_unit_interval(alpha, "alpha")
        rows.check_unit_interval(beta, "beta")
        self.num_train_steps = num_train_steps
        self.t_start, self.t_end, self.alpha, self.beta = t_start, t_end, alpha, beta
        self.disable_adaptive = disable_adaptive
        # fp32 tensors, as upstream: over a long schedule, Python floats would drift away from upstream's values.
        self._t = torch.tensor(t_start, dtype=torch.float32, device=device)
        self._previous_loss = torch.tensor(math.inf, dtype=torch.float32, device=device)
        self._momentum = torch.zeros((), dtype=torch.float32, device=device)

    @property
    def t(self) -> float:
        """The current weight of the teacher in the mix."""
        return float(self._t)

    def update_t(self, loss: Tensor | float, global_step: int) -> Tensor | None:
        """Update t after a step with this loss, and return the adaptive delta.

        Returns None and leaves t unchanged for the first finite loss, and for losses that are not finite.
        """
        current = torch.as_tensor(loss).detach().to(self._t)
        if not bool(torch.isfinite(current)):
            return None
        if bool(torch.isinf(self._previous_loss)):
            self._previous_loss = current.clone()
            return None
        relative_drop = (self._previous_loss - current) / (self._previous_loss + 1e-15)
        # After an overflow the momentum would stay infinite.
        relative_drop = relative_drop.clamp(-1e30, 1e30)
        self._momentum = self.beta * self._momentum + (1 - self.beta) * relative_drop
        delta = self.alpha * torch.sigmoid(self._momentum) * (1 - self._t)
        # t never falls below the linear schedule; the adaptive step can only raise it.
        linear = self.t_start + (self.t_end - self.t_start) * (global_step / self.num_train_steps)
        moved = self._t.new_tensor(linear)
        if not self.disable_adaptive:
            moved = torch.maximum(moved, self._t + delta)
        # Steps after num_train_steps would exceed t_end.
        self._t = moved.clamp(max=self.t_end)
        self._previous_loss = current.clone()
        return delta

    def state_dict(self) -> dict[str, float | None]:
        """Return the state as JSON numbers, for a checkpoint; `previous_loss` is None before the first loss.

        Every fp32 value is restored exactly, because a Python float represents it without rounding.
        """
        previous = None if bool(torch.isinf(self._previous_loss)) else float(self._previous_loss)
        return {"t": self.t, "previous_loss": previous, "momentum": float(self._momentum)}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Restore a state from `state_dict`. Raises InputError on missing, unknown or non-finite values."""
        expected = {"t", "previous_loss", "momentum"}
        if set(state) != expected:
            raise InputError(explain("TAIDScheduler state keys", got=sorted(state), expected=sorted(expected)))
        t, previous, momentum = (state[name] for name in ("t", "previous_loss", "momentum"))
        if t is None or momentum is None or not all(math.isfinite(v) for v in (t, momentum, previous or 0.0)):
            raise InputError(explain("TAIDScheduler state", got=dict(state), expected="finite numbers"))
        rows.check_unit_interval(t, "state t")
        self._t.fill_(t)
        self._previous_loss.fill_(math.inf if previous is None else previous)
        self._momentum.fill_(momentum)
