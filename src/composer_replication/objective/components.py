"""What one step's loss was made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from composer_replication.batch.tree_batch import CHANNELS

_NO_COUNTS: Mapping[str, int] = MappingProxyType({})


@dataclass
class LossComponents:
    """The channels' values and their weighted total, as 0-d tensors.

    `active` names the channels that ran; the others hold an exact 0. `counts` says on how many items each one ran
    (response tokens, target tokens, pairs), `ran_as` how: on flat sequences, as a tree and by which attention, or why
    a tree was not run as one.
    """

    lm_ce: Tensor
    sdpo_jsd: Tensor
    trace_replay_dpo: Tensor
    total: Tensor
    active: tuple[str, ...] = field(default=(), kw_only=True)
    counts: Mapping[str, int] = field(default_factory=lambda: _NO_COUNTS, kw_only=True)
    ran_as: str = field(default="", kw_only=True)

    def detached(self) -> dict[str, float]:
        """The three channels and the total as plain floats."""
        return {name: float(getattr(self, name).detach()) for name in (*CHANNELS, "total")}
