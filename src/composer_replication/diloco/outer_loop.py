"""The outer optimiser around a training loop's own, over torchft's DiLoCo and any manager with its methods.

Every `sync_every` steps of the inner optimiser each replica gives the distance that it moved from the global weights;
the mean of them is the gradient of an outer step, from those global weights, of SGD with Nesterov momentum.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer_replication.errors import ConfigError, InputError, explain
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
    fragments = [module if isinstance(module, _Fragment) else trainable(module) for module in model_fragments]
    delay, alpha = fragment_sync_delay, fragment_update_alpha
    check_outer(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
    check_schedule(len(fragments), sync_every=sync_every, delay=delay, alpha=alpha)
    _check_fragments(fragments, inner_optimizer)
    _check_buckets(fragments)
    _check_manager(manager)
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


# What travels of a model: its trainable parameters, in fragments that are exchanged in turn.


class _Fragment(nn.Module):
    """Parameters under their own names. torchft takes every parameter of the modules it is given, frozen ones too."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._chosen = dict(parameters)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        del recurse, remove_duplicate  # the parameters are a flat table of different ones
        return ((f"{prefix}.{name}" if prefix else name, parameter) for name, parameter in self._chosen.items())

    @property
    def num_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._chosen.values())


def trainable(module: nn.Module) -> _Fragment:
    """The parameters of a module that an optimiser changes; with an adapter on it, those of the adapter."""
    return _Fragment({name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad})


def split_into_fragments(model: nn.Module, number: int) -> list[_Fragment]:
    """The trainable parameters in `number` runs of whole layers, of sizes as equal as layers allow."""
    layers: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in trainable(model).named_parameters():
        layers.setdefault(_layer_of(name), {})[name] = parameter
    if not 1 <= number <= len(layers):
        fix = "Set fewer fragments." if number > len(layers) else ""
        expected = f"1 to {len(layers)}, the layers with trainable parameters"
        raise InputError(explain("fragments of the model", got=number, expected=expected, fix=fix))
    sizes = torch.tensor([sum(parameter.numel() for parameter in layer.values()) for layer in layers.values()])
    middles = sizes.cumsum(0) - sizes / 2
    groups = list(layers.values())
    return [
        _Fragment({name: parameter for layer in groups[begin:end] for name, parameter in layer.items()})
        for begin, end in pairwise(_bounds((middles / sizes.sum() * number).tolist(), number))
    ]


def _layer_of(name: str) -> str:
    """The name up to a layer's number: `model.layers.3` of `model.layers.3.mlp.up.weight`; else the module's."""
    parts = name.split(".")
    number = next((position for position, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])


def _bounds(middles: list[float], number: int) -> list[int]:
    """Where each group of layers begins, and the end: every group has a layer at least.

    `middles` says where the middle of each layer lies if the whole model is `number` long.
    """
    bounds = [0]
    for group in range(1, number):
        first_layer = next((layer for layer, middle in enumerate(middles) if middle >= group), len(middles))
        bounds.append(min(max(first_layer, bounds[-1] + 1), len(middles) - (number - group)))
    return [*bounds, len(middles)]


# What torchft's DiLoCo would get wrong without a word, refused before the first step with what to do instead.

_HALVES = (torch.bfloat16, torch.float16)
_log = logging.getLogger(__name__)


def check_schedule(num_fragments: int, *, sync_every: int, delay: int, alpha: float) -> None:
    """One fragment at a time, each after the same number of steps, and arrived before the next one leaves."""
    if num_fragments < 1:
        raise InputError(explain("model_fragments", got="none", expected="one module or more"))
    if sync_every < num_fragments or sync_every % num_fragments:
        nearest = num_fragments * max(1, round(sync_every / num_fragments))
        expected = f"a multiple of the number of fragments, {num_fragments}"
        raise InputError(explain("sync_every", got=sync_every, expected=expected, fix=f"Set {nearest}, say."))
    between = sync_every // num_fragments
    if not 0 <= delay < between:
        expected = f"0 to {between - 1}: a fragment leaves every {between} steps and has to be back before the next"
        raise InputError(explain("fragment_sync_delay", got=delay, expected=expected))
    if not 0 <= alpha <= 1:
        expected = "0 (take the new global weights) to 1 (keep the local ones)"
        raise InputError(explain("fragment_update_alpha", got=alpha, expected=expected))


def check_outer(*, lr: float, momentum: float, nesterov: bool) -> None:
    if not lr > 0:
        raise InputError(explain("outer_lr", got=lr, expected="above 0"))
    if not 0 <= momentum < 1:
        raise InputError(explain("outer_momentum", got=momentum, expected="0 or more, below 1"))
    if nesterov and momentum == 0:
        fix = "Set nesterov=False for plain averaging."
        raise InputError(explain("outer_momentum with nesterov", got=0, expected="above 0", fix=fix))


def _check_fragments(fragments: Sequence[_Fragment], inner_optimizer: torch.optim.Optimizer) -> None:
    """Every weight that the inner optimiser moves travels, once, in full precision."""
    owners: dict[tuple[Any, ...], str] = {}
    for number, fragment in enumerate(fragments):
        if not any(True for _ in fragment.parameters()):
            fix = "Leave it out, or unfreeze what should be trained."
            got = "no trainable parameter"
            raise InputError(explain(f"model_fragments[{number}]", got=got, expected="one or more", fix=fix))
        for name, weight in fragment.named_parameters():
            owner = f"{name} of fragment {number}"
            if weight.dtype in _HALVES:
                fix = "Outer steps would round to nothing: train model.float(), and compute under autocast."
                raise InputError(explain(owner, got=weight.dtype, expected="torch.float32", fix=fix))
            if (before := owners.setdefault(_memory_of(weight), owner)) != owner:
                fix = "Put tied weights into one fragment: they would be averaged and moved twice."
                raise InputError(explain(owner, got=f"the same weights as {before}", expected="its own", fix=fix))
    moved = [weight for group in inner_optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    missed = [tuple(weight.shape) for weight in moved if _memory_of(weight) not in owners]
    if missed:
        fix = "Give all of the model: replicas would drift apart in the rest (diloco.fragments.split_into_fragments)."
        got = f"{len(missed)} of the inner optimiser's {len(moved)} parameters in no fragment, the first {missed[0]}"
        raise InputError(explain("model_fragments", got=got, expected="every parameter that it moves", fix=fix))


def _memory_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Two parameters over one memory are tied as much as one parameter under two names is."""
    if not parameter.numel() or parameter.device.type == "meta" or not hasattr(parameter, "untyped_storage"):
        return (id(parameter),)
    return parameter.device, parameter.untyped_storage().data_ptr(), parameter.storage_offset()


def _check_buckets(fragments: Sequence[_Fragment]) -> None:
    """torchft packs buckets only where its environment variable asks; more than one of them come back mixed up.

    The callback of each bucket reads the variables of the last one, and tensors that did not fit are left out.
    """
    fragment_class = require("torchft.local_sgd", extra="diloco")._StreamingDiLoCoFragment
    name, cap = "TORCHFT_USE_BUCKETIZATION", fragment_class.bucket_cap_mb  # bytes, whatever it is called
    if os.environ.get(name) != "True":
        return
    for number, fragment in enumerate(fragments):
        dtypes = {weight.dtype for weight in fragment.parameters()}
        if fragment.num_bytes > cap or len(dtypes) > 1:
            got = f"{fragment.num_bytes:,} bytes of {len(dtypes)} dtypes"
            expected = f"one bucket: at most {cap:,} bytes of one dtype"
            fix = f"Unset {name}: torchft 0.2 averages wrongly over more than one bucket, without an error."
            raise ConfigError(explain(f"fragment {number} with {name}", got=got, expected=expected, fix=fix))


def _check_manager(manager: Any) -> None:
    """A quorum before the weights leave, and for torchft's own manager a name that its peers can find."""
    if manager._use_async_quorum:
        fix = "Make it with use_async_quorum=False: who takes part has to be known before weights leave."
        raise InputError(explain("manager", got="an asynchronous quorum", expected="a synchronous one", fix=fix))
    if not isinstance(manager, require("torchft.manager", extra="diloco").Manager):
        return
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        fix = f"Add a line to /etc/hosts (the address that peers reach, then {host}), or set a name that resolves."
        got = f"{host}, which does not resolve ({error})"
        expected = "a name with an address: peers are sent to it, and gloo falls back to 127.0.0.1 without a word"
        raise ConfigError(explain("host name of this machine", got=got, expected=expected, fix=fix)) from error
    _log.warning(
        "torchft heals a replica by unpickling what a peer sends (checkpoint transport %s): whoever reaches its port "
        "can run code here. Use it between machines that trust each other; over a bucket nothing is unpickled.",
        type(manager._checkpoint_transport).__name__,
    )
