"""Train as one replica: put the outer loop around any training loop, and end with the global weights.

The inner loop needs no change, and this module knows nothing of its losses: hooks of the optimizer count the steps.
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
    """How replicas are averaged; the fields are parameters of `make_diloco_outer_loop`."""

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    sync_every: int = 100
    num_fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0

    @property
    def steps_per_commit(self) -> int:
        """The inner steps between two exchanges, each of one fragment."""
        return self.sync_every // self.num_fragments

    def around(self, manager: Any, model: nn.Module, inner_optimizer: torch.optim.Optimizer) -> DiLoCo:
        """Return the outer loop around a model and its inner optimizer."""
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
    """Make the steps of `inner_optimizer` in this block those of one replica; afterwards the model has the global
    weights.

    Steps since the last exchange do not count, nor does a fragment that is still being exchanged. Neither do any steps
    after the run has its `commits`: a replica that wakes up or is restarted after the end adds nothing, and waits for
    nobody.
    """
    # Before joining the run, which may have to wait.
    if commits is not None and hasattr(manager, "end_after"):
        manager.end_after(commits)
    with (settings or OuterLoop()).around(manager, model, inner_optimizer) as loop:
        # A manager over a store: join now, and continue from the weights of the run.
        if hasattr(manager, "follow"):
            manager.follow(TorchftFollower(loop))
        if commits is not None:
            _end_with(loop, manager, inner_optimizer, commits)
        yield loop
    if hasattr(manager, "agree_on_weights"):
        manager.agree_on_weights()
    take_global_weights(loop)


def _end_with(loop: DiLoCo, manager: Any, inner_optimizer: torch.optim.Optimizer, commits: int) -> None:
    """Stop exchanging after so many commits, by removing torchft's hook, which counts the inner steps."""
    counting = loop._hooks[-1]

    # A pre-hook: the post-hooks of a step must not change while they run.
    def look(*_: object) -> None:
        if manager.current_step() >= commits:
            counting.remove()

    look()
    loop._hooks.append(_bare_optimizer(inner_optimizer).register_step_pre_hook(look))


def _bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers such as Accelerate's, whose own hooks are never called."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
