"""The outer optimiser around a training loop's own, over torchft's DiLoCo and any manager with its methods.

Every `sync_every` steps of the inner optimiser each replica gives the distance that it moved from the global weights;
the mean of them is the gradient of an outer step, from those global weights, of SGD with Nesterov momentum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from composer_replication.diloco.fragments import Fragment, trainable
from composer_replication.diloco.refusals import (
    check_buckets,
    check_fragments,
    check_manager,
    check_outer,
    check_schedule,
)
from composer_replication.optional import require

if TYPE_CHECKING:
    from torchft.local_sgd import DiLoCo

BEFORE_HEAL, AFTER_HEAL = "composer_replication.before_heal", "composer_replication.after_heal"


def make_diloco_outer_loop(
    manager: Any,
    model_fragments: Sequence[torch.nn.Module],
    inner_optimizer: torch.optim.Optimizer,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    sync_every: int = 100,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
) -> DiLoCo:
    """A context manager: while it is open, `inner_optimizer` exchanges weights every `sync_every` steps.

    Only trainable parameters travel. With several fragments one of them is exchanged every `sync_every` / fragments
    steps; with a delay it travels while that many steps are made. What torchft would get wrong without a word is
    refused (`refusals`).
    """
    local_sgd = require("torchft.local_sgd", extra="diloco")
    fragments = [module if isinstance(module, Fragment) else trainable(module) for module in model_fragments]
    delay, alpha = fragment_sync_delay, fragment_update_alpha
    check_outer(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
    check_schedule(len(fragments), sync_every=sync_every, delay=delay, alpha=alpha)
    check_fragments(fragments, inner_optimizer)
    check_buckets(fragments)
    check_manager(manager)
    # One for all fragments would move the others by the gradients that the inner step left on them.
    outer = [
        OuterSGD(fragment.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        for fragment in fragments
    ]
    stale = _StaleWeights()
    manager.register_state_dict_fn(BEFORE_HEAL, stale.before_heal, dict)
    loop = stale.loop = local_sgd.DiLoCo(
        manager,
        fragments,
        inner_optimizer,
        outer,
        sync_every,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    )
    manager.register_state_dict_fn(AFTER_HEAL, stale.after_heal, dict)
    if follow := getattr(manager, "follow", None):  # ours: it begins where its run stands
        from composer_replication.diloco.rounds.heal import TorchftFollower

        follow(TorchftFollower(loop))
    return loop


class OuterSGD(torch.optim.SGD):
    """SGD with momentum whose bits are the same on every machine: each product and each sum is rounded on its own.

    torch's own step multiplies and adds at once where the machine can, and so ends a bit aside on another kind of CPU,
    or on a GPU. Weight decay, dampening and `maximize` are none of an outer step's.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    weights.sub_(self._direction(weights, group["momentum"], group["nesterov"]).mul_(group["lr"]))

    def _direction(self, weights: Any, momentum: float, nesterov: bool) -> torch.Tensor:
        gradient = weights.grad
        if not momentum:
            return gradient.clone()
        state = self.state[weights]
        before = state.get("momentum_buffer")
        state["momentum_buffer"] = past = gradient.clone() if before is None else before.mul_(momentum).add_(gradient)
        return past.mul(momentum).add_(gradient) if nesterov else past.clone()


def take_global_weights(loop: DiLoCo) -> None:
    """Put the global weights into the model: those that are equal at all replicas."""
    loop._restore_parameters()


class _StaleWeights:
    """Lets a model that was healed begin where the others are.

    torchft brings the global weights up to date and leaves the model as it was, which then takes part with the distance
    between two histories. Managers load in the order of registration, so these two stand around the fragments. Where a
    heal brought what was there already, as torchft's first round does, the model's own steps count.
    """

    loop: DiLoCo
    _before = ""

    def before_heal(self, _state: object) -> None:
        self._before = self._digest()

    def after_heal(self, _state: object) -> None:
        if self._digest() != self._before:
            take_global_weights(self.loop)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in (weights for part in self.loop._fragments for weights in part.original_parameters.values()):
            values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(values)
        return digest.hexdigest()
