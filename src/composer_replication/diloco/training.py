"""Train as one replica: put DiLoCo's outer loop around any training loop, with torchft's DiLoCo and any manager.

Every `sync_every` steps of the inner optimizer each replica sends the distance that it has moved from the global
weights. The mean of these distances is the gradient of one outer step from the global weights, by SGD with Nesterov
momentum. The inner loop needs no change, and this module knows nothing of its losses: hooks of the inner optimizer
count the steps.

In some setups, torchft trains without raising an error, but its result is wrong. Such setups are refused before the
first step, with a message that says what to do instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer_replication.errors import ConfigError, InputError, explain
from composer_replication.optional import require

if TYPE_CHECKING:
    from torchft.local_sgd import DiLoCo

BEFORE_HEAL, AFTER_HEAL = "composer_replication.before_heal", "composer_replication.after_heal"
_log = logging.getLogger(__name__)
_HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class OuterLoop:
    """Settings of the outer loop. The fields are parameters of `make_diloco_outer_loop`."""

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    sync_every: int = 100
    num_fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0

    @property
    def steps_per_commit(self) -> int:
        """The number of inner steps between two exchanges. Each exchange transfers one fragment."""
        return self.sync_every // self.num_fragments

    def check(self) -> None:
        """Raise InputError for settings that `make_diloco_outer_loop` would refuse regardless of the model."""
        delay, alpha = self.fragment_sync_delay, self.fragment_update_alpha
        _check_schedule(self.num_fragments, sync_every=self.sync_every, delay=delay, alpha=alpha)
        _check_optimizer(lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.nesterov)

    def wrap(self, manager: Any, model: nn.Module, inner_optimizer: torch.optim.Optimizer) -> DiLoCo:
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
    """Train as one replica inside this context: the steps of `inner_optimizer` are counted, and weights are exchanged.
    When the context ends, the model has the global weights.

    Steps since the last exchange are dropped, and so is a fragment whose exchange is still under way. After the run has
    made `commits` exchanges, further steps have no effect, so a replica that wakes up or restarts after the end changes
    nothing and waits for no other replica.
    """
    # Before joining the run, which may wait for other replicas.
    if commits is not None and hasattr(manager, "end_after"):
        manager.end_after(commits)
    with (settings or OuterLoop()).wrap(manager, model, inner_optimizer) as loop:
        if commits is not None:
            _stop_exchange_after(loop, manager, inner_optimizer, commits)
        yield loop
    if hasattr(manager, "agree_on_weights"):
        manager.agree_on_weights()
    _load_global_weights(loop)


def _stop_exchange_after(loop: DiLoCo, manager: Any, inner_optimizer: torch.optim.Optimizer, commits: int) -> None:
    """Stop exchanging weights after this many commits, by removing the hook that torchft uses to count inner steps."""
    step_counter = loop._hooks[-1]

    # A pre-hook: the post-hooks of a step must not change while they run.
    def remove_when_done(*_: object) -> None:
        if manager.current_step() >= commits:
            step_counter.remove()

    remove_when_done()
    loop._hooks.append(_bare_optimizer(inner_optimizer).register_step_pre_hook(remove_when_done))


def _bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside any wrappers, such as Accelerate's. Hooks registered on a wrapper are never
    called.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


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
    """Return a context manager within which `inner_optimizer` exchanges weights every `sync_every` steps.

    Only trainable parameters are exchanged. With several fragments, one of them is exchanged every `sync_every` /
    fragments steps, and training continues for `fragment_sync_delay` steps during the exchange. Raises InputError or
    ConfigError for setups in which torchft would silently compute wrong results.
    """
    local_sgd = require("torchft.local_sgd", extra="diloco")
    fragments = [
        module if isinstance(module, _Fragment) else _trainable_parameters(module) for module in model_fragments
    ]
    delay, alpha = fragment_sync_delay, fragment_update_alpha
    _check_optimizer(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
    _check_schedule(len(fragments), sync_every=sync_every, delay=delay, alpha=alpha)
    _check_fragments(fragments, inner_optimizer)
    _check_buckets(fragments)
    _check_manager(manager)
    # A single optimizer would also move the other fragments, by gradients that are left over from the inner step.
    outer = [
        _OuterSGD(fragment.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
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
    # A manager over a store: join the run now, and continue from its weights.
    if hasattr(manager, "follow"):
        manager.follow(_TorchftFollower(loop))
    return loop


class _OuterSGD(torch.optim.SGD):
    """SGD with momentum whose results are bit-identical on every machine, because each product and each sum is rounded
    separately.

    The step of torch.optim.SGD uses a fused multiply-add on machines that have one, so the last bit of its result
    differs between CPUs and GPUs. Weight decay, dampening and `maximize` are not supported, because outer steps do not
    use them.
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
        # As in torch.optim.SGD, the momentum buffer starts as the first gradient.
        state["momentum_buffer"] = past = gradient.clone() if before is None else before.mul_(momentum).add_(gradient)
        return past.mul(momentum).add_(gradient) if nesterov else past.clone()


def _load_global_weights(loop: DiLoCo) -> None:
    """Copy the global weights, which are the same on all replicas, into the model."""
    loop._restore_parameters()


class _StaleWeights:
    """Resets the model to the global weights after they have been replaced by a newer state (a heal).

    In a heal, torchft updates the global weights but not the model, which would then send the distance between two
    unrelated sets of weights. State functions are loaded in the order of their registration, so `before_heal` is
    registered before those of the fragments, and `after_heal` after them. If a heal loads the weights that the replica
    already has, as in torchft's first round, the model keeps its own steps.
    """

    loop: DiLoCo
    _before = ""

    def before_heal(self, _state: object) -> None:
        self._before = self._digest()

    def after_heal(self, _state: object) -> None:
        if self._digest() != self._before:
            _load_global_weights(self.loop)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in (weights for part in self.loop._fragments for weights in part.original_parameters.values()):
            # Viewed as bytes, because numpy has no bfloat16.
            values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(values)
        return digest.hexdigest()


class _TorchftFollower:
    """A `Follower` (see `rounds.membership`) for torchft's DiLoCo. It applies commits with the same calls as
    DiLoCo's own `perform_sync`.
    """

    def __init__(self, diloco: Any) -> None:
        self._fragments: list[Any] = diloco._fragments

    def blanks(self, step: int) -> list[torch.Tensor]:
        originals = self._fragment(step).original_parameters
        return [torch.empty_like(tensor) for tensor in originals.values()]

    def apply(self, step: int, means: Sequence[torch.Tensor]) -> None:
        fragment = self._fragment(step)
        # Training may have changed the parameters, but an outer step starts from the global weights.
        fragment.restore_parameters()
        parameters = dict(fragment._model_fragment.named_parameters())
        fragment._grads = {
            name: mean.to(parameters[name].device)
            for name, mean in zip(fragment.original_parameters, means, strict=True)
        }
        fragment._set_grads()
        fragment._outer_optimizer.step()
        fragment.save_parameters()
        fragment._outer_optimizer.zero_grad()

    def restore(self) -> None:
        for fragment in self._fragments:
            fragment.restore_parameters()

    def _fragment(self, step: int) -> Any:
        return self._fragments[step % len(self._fragments)]


# Fragments: groups of trainable parameters, which are exchanged in turn.


class _Fragment(nn.Module):
    """A module that contains only some parameters of another module, under their original names. If it were given
    the whole module, torchft would also exchange frozen parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._chosen = dict(parameters)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        # There are no submodules, and no parameter occurs twice.
        del recurse, remove_duplicate
        return ((f"{prefix}.{name}" if prefix else name, parameter) for name, parameter in self._chosen.items())

    @property
    def num_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._chosen.values())


def _trainable_parameters(module: nn.Module) -> _Fragment:
    """Return a fragment that contains the trainable parameters of a module."""
    return _Fragment({name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad})


def split_into_fragments(model: nn.Module, number: int) -> list[_Fragment]:
    """Split the trainable parameters of a model into `number` groups of consecutive layers, with nearly equal sizes."""
    layers: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in _trainable_parameters(model).named_parameters():
        layers.setdefault(_layer_name(name), {})[name] = parameter
    if not 1 <= number <= len(layers):
        fix = "Set fewer fragments." if number > len(layers) else ""
        expected = f"1 to {len(layers)}, the layers with trainable parameters"
        raise InputError(explain("fragments of the model", got=number, expected=expected, fix=fix))
    sizes = torch.tensor([sum(parameter.numel() for parameter in layer.values()) for layer in layers.values()])
    # Split by the middles of layers, so that a large layer at a border joins the group that it overlaps most.
    middles = sizes.cumsum(0) - sizes / 2
    groups = list(layers.values())
    return [
        _Fragment({name: parameter for layer in groups[begin:end] for name, parameter in layer.items()})
        for begin, end in pairwise(_split_points((middles / sizes.sum() * number).tolist(), number))
    ]


def _layer_name(name: str) -> str:
    """Return the name of the layer that a parameter belongs to, such as `model.layers.3` for
    `model.layers.3.mlp.up.weight`. For a parameter outside the numbered layers, return the name of its module.
    """
    parts = name.split(".")
    number = next((position for position, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])


def _split_points(middles: list[float], number: int) -> list[int]:
    """Return the index of the first layer of each group, followed by the number of layers. Every group has at least one
    layer.

    `middles` are the positions of the layers' midpoints, scaled so that the whole model has length `number`.
    """
    # A group starts at the first layer whose middle it contains, but leaves at least one layer for every later group.
    bounds = [0]
    for group in range(1, number):
        first_layer = next((layer for layer, middle in enumerate(middles) if middle >= group), len(middles))
        bounds.append(min(max(first_layer, bounds[-1] + 1), len(middles) - (number - group)))
    return [*bounds, len(middles)]


# Checks of setups in which torchft would silently compute wrong results.


def _check_schedule(num_fragments: int, *, sync_every: int, delay: int, alpha: float) -> None:
    """Raise InputError unless fragments are exchanged in turn, equally often, and one at a time."""
    if num_fragments < 1:
        raise InputError(explain("model_fragments", got="no modules", expected="one module or more"))
    if sync_every < num_fragments or sync_every % num_fragments:
        nearest = num_fragments * max(1, round(sync_every / num_fragments))
        expected = f"a multiple of the number of fragments, {num_fragments}"
        raise InputError(explain("sync_every", got=sync_every, expected=expected, fix=f"For example, set {nearest}."))
    between = sync_every // num_fragments
    if not 0 <= delay < between:
        expected = (
            f"0 to {between - 1}: a fragment is sent every {between} steps and has to be back before the next one"
        )
        raise InputError(explain("fragment_sync_delay", got=delay, expected=expected))
    if not 0 <= alpha <= 1:
        expected = "0 (take the new global weights) to 1 (keep the local ones)"
        raise InputError(explain("fragment_update_alpha", got=alpha, expected=expected))


def _check_optimizer(*, lr: float, momentum: float, nesterov: bool) -> None:
    """Raise InputError if the learning rate or the momentum of the outer optimizer is out of range."""
    if not lr > 0:
        raise InputError(explain("outer_lr", got=lr, expected="above 0"))
    if not 0 <= momentum < 1:
        raise InputError(explain("outer_momentum", got=momentum, expected="a value of at least 0 and below 1"))
    if nesterov and momentum == 0:
        fix = "Set nesterov=False for plain averaging."
        raise InputError(explain("outer_momentum with nesterov", got=0, expected="above 0", fix=fix))


def _check_fragments(fragments: Sequence[_Fragment], inner_optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError unless every weight that the inner optimizer updates is in exactly one fragment, in full
    precision.
    """
    owners: dict[tuple[Any, ...], str] = {}
    for number, fragment in enumerate(fragments):
        if not any(True for _ in fragment.parameters()):
            fix = "Leave it out, or unfreeze the weights to train."
            got = "no trainable parameter"
            raise InputError(explain(f"model_fragments[{number}]", got=got, expected="trainable parameters", fix=fix))
        for name, weight in fragment.named_parameters():
            owner = f"{name} of fragment {number}"
            if weight.dtype in _HALF_PRECISION:
                fix = "Outer steps would round to nothing: train model.float(), and compute under autocast."
                raise InputError(explain(owner, got=weight.dtype, expected="torch.float32", fix=fix))
            if (before := owners.setdefault(_memory_key(weight), owner)) != owner:
                fix = "Put tied weights into one fragment; otherwise they are averaged and updated twice."
                raise InputError(
                    explain(owner, got=f"weights that {before} has, too", expected="weights of one fragment", fix=fix)
                )
    moved = [weight for group in inner_optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    missed = [tuple(weight.shape) for weight in moved if _memory_key(weight) not in owners]
    if missed:
        fix = "Pass the whole model (diloco.training.split_into_fragments): replicas would drift apart in the rest."
        got = f"{len(missed)} of the inner optimizer's {len(moved)} parameters in no fragment, the first {missed[0]}"
        raise InputError(
            explain("model_fragments", got=got, expected="every parameter that the optimizer updates", fix=fix)
        )


def _memory_key(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that identifies a parameter's memory. Tied parameters share their memory, and so have the same
    key.
    """
    if not parameter.numel() or parameter.device.type == "meta" or not hasattr(parameter, "untyped_storage"):
        return (id(parameter),)
    return parameter.device, parameter.untyped_storage().data_ptr(), parameter.storage_offset()


def _check_buckets(fragments: Sequence[_Fragment]) -> None:
    """Raise ConfigError if torchft would pack a fragment into several buckets, because it averages those incorrectly.

    torchft's callbacks all read the variables of the last bucket, and tensors that do not fit are left out. torchft
    uses buckets only if an environment variable is set.
    """
    fragment_class = require("torchft.local_sgd", extra="diloco")._StreamingDiLoCoFragment
    name, cap = "TORCHFT_USE_BUCKETIZATION", fragment_class.bucket_cap_mb  # in bytes, despite its name
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
    """Raise InputError if the manager's quorum is asynchronous, and ConfigError if peers of torchft's manager cannot
    resolve this host's name.
    """
    if manager._use_async_quorum:
        fix = "Create it with use_async_quorum=False: the members must be known before weights are sent."
        raise InputError(explain("manager", got="an asynchronous quorum", expected="a synchronous quorum", fix=fix))
    if not isinstance(manager, require("torchft.manager", extra="diloco").Manager):
        return
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        fix = f"Add a line to /etc/hosts (the address that peers reach, then {host}), or set a name that resolves."
        got = f"{host}, which does not resolve ({error})"
        expected = "a name with an address: peers connect to it, and gloo silently falls back to 127.0.0.1"
        raise ConfigError(explain("host name of this machine", got=got, expected=expected, fix=fix)) from error
    _log.warning(
        "torchft heals a replica by unpickling what a peer sends (checkpoint transport %s): whoever reaches its port "
        "can run code here. Use it only between machines that trust each other; runs over a bucket unpickle nothing.",
        type(manager._checkpoint_transport).__name__,
    )
