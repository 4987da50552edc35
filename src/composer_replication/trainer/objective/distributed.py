"""Work inside the forward of a model that is wrapped for several processes.

DDP watches its module's forward, and FSDP2 has whole weights only inside it; hidden rows and the head's product on
selected rows are neither. So the wrapper is called as always, and in the place of the model's own forward the work is
done. A plain model needs none of this, and gets none of it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from composer_replication.errors import InputError, UnsupportedModelError, explain

T = TypeVar("T")
_running = threading.local()  # which models' forwards this thread is inside of


def unwrapped(model: nn.Module) -> Any:
    """The model inside DDP and torch.compile."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = getattr(model, "_orig_mod")  # noqa: B009
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            break
    if type(model).__name__ == "FullyShardedDataParallel":
        fix = "Shard with torch.distributed.fsdp.fully_shard (FSDP2)."
        raise UnsupportedModelError(explain("model", got="FSDP1", expected="a plain, DDP or FSDP2 model", fix=fix))
    return model


def inside_forward(model: nn.Module, causal_lm: nn.Module, work: Callable[[], T]) -> T:
    """What `work` returns: tensors, or tuples of them, which the wrapper watches.

    The result is what the work made, not what the wrapper passes on: that one may cast it to half precision.
    """
    entry = _entry(model, causal_lm)
    inside: set[int] = _running.__dict__.setdefault("inside", set[int]())
    if entry is None or id(causal_lm) in inside:
        return work()
    before = causal_lm.__dict__.get("forward")
    results: list[T] = []

    def instead(*_args: object, **_options: object) -> T:
        put_back()  # what the work asks of the model itself is the model's own
        results.append(work())
        return results[0]

    def put_back() -> None:
        if before is not None:
            causal_lm.__dict__["forward"] = before
        else:
            causal_lm.__dict__.pop("forward", None)

    causal_lm.__dict__["forward"] = instead
    inside.add(id(causal_lm))
    try:
        entry()
    finally:
        inside.discard(id(causal_lm))
        put_back()
    if not results:
        got = f"{type(entry).__name__}, which does not call the forward of {type(causal_lm).__name__}"
        raise UnsupportedModelError(explain("wrapped model", got=got, expected="DDP or FSDP2 around it"))
    return results[0]


def agreed_most(models: Sequence[nn.Module], counts: list[int]) -> list[int]:
    """Of each count the most on any process that holds a part of one of these models: they run as many passes."""
    groups = {id(group): group for model in models for group in _groups(unwrapped(model))}
    if not groups:
        return counts
    device = next(unwrapped(models[0]).parameters()).device
    agreed = torch.tensor(counts, device=device)
    for group in groups.values():
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX, group=group)
    return agreed.tolist()


def is_sharded(model: nn.Module) -> bool:
    kind = _sharded_kind()
    return kind is not None and any(isinstance(module, kind) for module in unwrapped(model).modules())


def _groups(model: nn.Module) -> list[Any]:
    """The process groups over which a model's weights are spread: its own mesh, not all processes there are."""
    if not is_sharded(model):
        return []
    meshes: list[Any] = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    if mesh is None:  # inside a forward all weights may be whole; the state remembers where they came from
        mesh = _remembered_mesh(model)
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def _remembered_mesh(model: nn.Module) -> Any:
    kind: Any = _sharded_kind()
    for module in model.modules():
        if isinstance(module, kind):
            state: Any = module._get_fsdp_state()  # pyright: ignore[reportCallIssue]
            group = state._fsdp_param_group
            if group is not None:
                return group.mesh_info.mesh
    raise UnsupportedModelError(explain("FSDP2 model", got="no mesh", expected="one that fully_shard was given"))


def _entry(model: nn.Module, causal_lm: nn.Module) -> nn.Module | None:
    """The outermost wrapper that has to be called, if any."""
    bare = getattr(model, "_orig_mod", model)
    # Without gradients there is nothing for DDP to watch, and it would only wait for the other processes.
    if isinstance(bare, nn.parallel.DistributedDataParallel) and torch.is_grad_enabled():
        return bare
    kind = _sharded_kind()
    inner = unwrapped(model)
    chain = (inner, getattr(inner, "base_model", None), causal_lm)
    return next((wrapper for wrapper in chain if kind is not None and isinstance(wrapper, kind)), None)


def _sharded_kind() -> type[nn.Module] | None:
    """FSDP2's class, without loading it: a model can only be one if it is loaded."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return None if loaded is None else loaded.FSDPModule


# A model as a teacher or a reference: without dropout, or below its adapter, and without leaving a trace.
#
# An adapter may also train some rows of the embedding and of the head (PEFT's `trainable_token_indices`): both layers
# are then wrapped, and the weight of either is the one below with these rows in their places.


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside, and put every module's mode back afterwards: a teacher must not be noisy."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def has_adapter(model: nn.Module) -> bool:
    """Whether any layer holds another below it, as PEFT's do."""
    return any(hasattr(module, "base_layer") or hasattr(module, "original_module") for module in model.modules())


def below_rows(layer: Any) -> Any:
    """The embedding or head itself, where an adapter trains some of its rows; any other layer as it is."""
    return layer.token_adapter.base_layer if hasattr(layer, "token_adapter") else layer


@contextmanager
def rows_in_place(model: nn.Module) -> Iterator[None]:
    """Rows that an adapter trains stand in the weights themselves inside, and the old ones again afterwards.

    The wrappers write a new matrix at each call, which a pass of one token spends most of its time on, and which asks
    the host for the places: no CUDA graph can be recorded of it. Nothing may be trained inside.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "trainable_tokens_delta")]
    layers = [layer for layer in layers if not (layer.merged or layer.disable_adapters)]
    before: list[tuple[Any, Tensor, Tensor]] = []
    with torch.no_grad():
        for layer in layers:
            weight = layer.base_layer.weight
            for adapter in layer.active_adapters:
                ids = torch.tensor(layer.token_indices[adapter], device=weight.device)
                before.append((weight, ids, weight[ids]))
                weight[ids] = layer.trainable_tokens_delta[adapter].to(weight)
            layer.merged_adapters.extend(layer.active_adapters)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, ids, rows in reversed(before):  # of tied layers the second saw the rows of the first
                weight[ids] = rows
        for layer in layers:
            layer.merged_adapters.clear()


@contextmanager
def below_adapter(model: nn.Module) -> Iterator[None]:
    """The weights below the adapter, and afterwards everything as it was: PEFT's own switch makes frozen ones train."""
    inner: Any = unwrapped(model)
    check_can_switch_off(model)
    trainable = {name: parameter.requires_grad for name, parameter in inner.named_parameters()}
    switched = inner.disable_adapter() if hasattr(inner, "disable_adapter") else _disabled(inner)
    try:
        with switched:
            yield
    finally:
        for name, parameter in inner.named_parameters():
            parameter.requires_grad_(trainable[name])


def start_weights(model: nn.Module) -> Any:
    """As `below_adapter` where there is an adapter; the model itself where there is none."""
    return below_adapter(model) if has_adapter(unwrapped(model)) else nullcontext()


def check_can_switch_off(model: nn.Module) -> None:
    """Raise where there is no adapter, where it cannot be switched off, or where it was merged into the weights."""
    inner: Any = unwrapped(model)
    if not has_adapter(inner):
        got = f"{type(inner).__name__}, which has no adapter to switch off"
        raise InputError(explain("model", got=got, expected="a PEFT model"))
    if not (hasattr(inner, "disable_adapter") or getattr(inner, "_hf_peft_config_loaded", False)):
        fix = "Make it with peft.get_peft_model or model.add_adapter."
        got = f"{type(inner).__name__} with adapter layers and no way to switch them off"
        raise UnsupportedModelError(explain("adapter", got=got, expected="one that can be", fix=fix))
    if any(getattr(module, "merged_adapters", None) for module in inner.modules()):
        fix = "Unmerge it first: model.unmerge_adapter()."
        raise InputError(explain("adapter", got="merged into the weights", expected="not merged", fix=fix))


@contextmanager
def _disabled(model: Any) -> Iterator[None]:
    """Adapters that transformers itself put in."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
