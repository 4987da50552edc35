"""A replica's training: the outer loop around any training loop, and the model that it ends with.

The loop that is wrapped knows nothing of it, and this knows nothing of its losses: it is told by the optimiser's own
hooks that a step was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer_replication.diloco.outer_loop import make_diloco_outer_loop, split_into_fragments, take_global_weights
from composer_replication.diloco.rounds.heal import TorchftFollower

if TYPE_CHECKING:
    from torchft.local_sgd import DiLoCo


@dataclass(frozen=True, kw_only=True)
class OuterLoop:
    """How replicas are brought together; the parameters are those of `make_diloco_outer_loop`."""

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    sync_every: int = 100
    num_fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0

    @property
    def steps_per_commit(self) -> int:
        """Inner steps between two exchanges, each of one fragment."""
        return self.sync_every // self.num_fragments

    def around(self, manager: Any, model: nn.Module, inner_optimizer: torch.optim.Optimizer) -> DiLoCo:
        return make_diloco_outer_loop(
            manager,
            split_into_fragments(model, self.num_fragments),
            _bare_optimizer(inner_optimizer),
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            nesterov=self.nesterov,
            sync_every=self.sync_every,
            fragment_sync_delay=self.fragment_sync_delay,
            fragment_update_alpha=self.fragment_update_alpha,
        )


@contextlib.contextmanager
def train_replica(
    manager: Any,
    model: nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    settings: OuterLoop | None = None,
    *,
    commits: int | None = None,
) -> Iterator[DiLoCo]:
    """Steps of `inner_optimizer` in this block are those of one replica; after it the model has the global weights.

    Steps since the last exchange, and with a delay or several fragments what is on its way, count for nothing. So do
    all steps once the run has its `commits`: a replica that wakes or is started again after the end adds nothing to it,
    and waits for nobody.
    """
    if commits is not None and hasattr(manager, "end_after"):  # before the run is joined, which may have to wait
        manager.end_after(commits)
    with (settings or OuterLoop()).around(manager, model, inner_optimizer) as loop:
        if hasattr(manager, "follow"):  # over a store: join now, and begin where the run is
            manager.follow(TorchftFollower(loop))
        if commits is not None:
            _end_with(loop, manager, inner_optimizer, commits)
        yield loop
    if hasattr(manager, "agree_on_weights"):
        manager.agree_on_weights()
    take_global_weights(loop)


def _end_with(loop: DiLoCo, manager: Any, inner_optimizer: torch.optim.Optimizer, commits: int) -> None:
    """No exchange after so many commits: torchft's hook, which counts the steps that were made, is taken away."""
    counting = loop._hooks[-1]

    def look(*_: object) -> None:  # before a step: the hooks after it must not change while they are called
        if manager.current_step() >= commits:
            counting.remove()

    look()
    loop._hooks.append(_bare_optimizer(inner_optimizer).register_step_pre_hook(look))


def _bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser inside of wrappers such as Accelerate's, whose own hooks are never called."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
