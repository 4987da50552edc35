"""Whether a model heeds hints in its own rollouts: where a contrast has both, its own hint against a wrong one.

Any text before a turn moves it. Only what a turn's own hint does beyond a hint about something else is its meaning, and
all that channel 2 can teach of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composer_replication.loss.linear import TeacherTerm
from composer_replication.loss.linear.row_stats import linear_row_stats
from composer_replication.objective.row_weighting import Contrast
from composer_replication.objective.teacher_rows import Teacher


class Heeding(NamedTuple):
    """Sums over erring turns that have a wrong hint beside their own; drops are in nats a token of the turn."""

    turns: float = 0.0
    own_wins: float = 0.0
    """At how many the teacher finds the turn less likely after its own hint than after the wrong one."""
    own_drop: float = 0.0
    """By how much its own hint lowers the turn against no hint."""
    other_drop: float = 0.0


@torch.no_grad()
def heeding_sums(teachers: Sequence[Teacher], contrast: Contrast, targets_N: Tensor, turn_position_N: Tensor) -> Tensor:
    """The four sums of a micro-batch, (4,). A row whose `turn_position_N` is 0 begins a turn."""
    numbers_M = contrast.numbers_M
    if not numbers_M.numel():
        return torch.zeros(4, device=targets_N.device)
    turn_N = (turn_position_N == 0).cumsum(0) - 1
    tokens_M, turn_M = targets_N[numbers_M], turn_N[numbers_M]
    own = [each._replace(rows_NH=each.rows_NH[numbers_M]) for each in teachers]
    sums_T3 = torch.zeros(turn_N.numel(), 3, device=targets_N.device)  # more turns than rows there are not
    found = [_logprobs(each, tokens_M).float() for each in (contrast.unhinted, own, contrast.wrong)]
    sums_T3.index_add_(0, turn_M, torch.stack(found, dim=1))
    length_T = torch.zeros_like(sums_T3[:, 0]).index_add_(0, turn_M, torch.ones_like(found[0]))
    is_turn_T = length_T > 0
    means_T3 = sums_T3 / length_T.clamp(min=1)[:, None]
    own_drop_T, other_drop_T = means_T3[:, 0] - means_T3[:, 1], means_T3[:, 0] - means_T3[:, 2]
    wins_T = ((own_drop_T > other_drop_T) & is_turn_T).float()
    return torch.stack([is_turn_T.float().sum(), wins_T.sum(), own_drop_T.sum(), other_drop_T.sum()])


def _logprobs(teachers: Sequence[Teacher], tokens_M: Tensor) -> Tensor:
    """What a sum of shares says of each token."""
    terms = [TeacherTerm(each.rows_NH, each.head, each.coefficient) for each in teachers]
    first = teachers[0]
    return linear_row_stats(first.rows_NH, first.head, terms, tokens_M).teacher_logprobs
