"""Run work inside the forward of a model that is wrapped for several processes, or without its adapter.

DDP watches its module's forward, and FSDP2 has whole weights only inside it. Computing hidden rows and the head on some
of them is not that forward. So the wrapper is called as usual, and the work runs in place of the model's own forward
(`inside_forward`). A plain model needs none of this.

A model also serves as a teacher or reference: without dropout (`evaluating`), or below its adapter (`below_adapter`),
and is unchanged afterwards. An adapter may train some rows of the embedding and the head (PEFT's
`trainable_token_indices`); both layers are then wrapped, and their weight is the one below with these rows replaced.
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
    """Return the model inside DDP and torch.compile."""
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
    """Run `work`, which returns tensors or tuples of them, inside the forward of the wrapped model.

    Returns the result of `work` itself, not the wrapper's output, which may be cast to half precision.
    """
    entry = _entry(model, causal_lm)
    inside: set[int] = _running.__dict__.setdefault("inside", set[int]())
    if entry is None or id(causal_lm) in inside:
        return work()
    # A forward may be set on the instance already, by accelerate for example.
    before = causal_lm.__dict__.get("forward")
    results: list[T] = []

    def instead(*_args: object, **_options: object) -> T:
        put_back()  # so that the work can call the model's own forward
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
        entry()  # without inputs, which the replaced forward ignores
    finally:
        inside.discard(id(causal_lm))
        put_back()
    if not results:
        got = f"{type(entry).__name__}, which does not call the forward of {type(causal_lm).__name__}"
        raise UnsupportedModelError(explain("wrapped model", got=got, expected="DDP or FSDP2 around it"))
    return results[0]


def agreed_most(models: Sequence[nn.Module], counts: list[int]) -> list[int]:
    """Return the maximum of each count over the processes that share one of these models, or the counts as they are.

    Processes with parts of the same weights have to make the same passes, so each makes as many as any of them needs.
    """
    groups = {id(group): group for model in models for group in _groups(unwrapped(model))}
    if not groups:
        return counts
    device = next(unwrapped(models[0]).parameters()).device
    agreed = torch.tensor(counts, device=device)
    for group in groups.values():
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX, group=group)
    return agreed.tolist()


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the model or a part of it."""
    kind = _sharded_kind()
    return kind is not None and any(isinstance(module, kind) for module in unwrapped(model).modules())


def _groups(model: nn.Module) -> list[Any]:
    """Return the process groups over which a model's weights are sharded: those of its mesh, not all processes."""
    if not is_sharded(model):
        return []
    # FSDP2's parameters are DTensors with a mesh.
    meshes: list[Any] = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    if mesh is None:  # inside a forward all weights may be whole; FSDP's state has the mesh
        mesh = _mesh_in_state(model)
    # A mesh has two dimensions if weights are sharded over some processes and replicated over other ones.
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def _mesh_in_state(model: nn.Module) -> Any:
    kind: Any = _sharded_kind()
    for module in model.modules():
        if isinstance(module, kind):
            state: Any = module._get_fsdp_state()  # pyright: ignore[reportCallIssue]
            group = state._fsdp_param_group
            if group is not None:
                return group.mesh_info.mesh
    raise UnsupportedModelError(explain("FSDP2 model", got="no mesh", expected="one that fully_shard was given"))


def _entry(model: nn.Module, causal_lm: nn.Module) -> nn.Module | None:
    """Return the outermost wrapper that has to be called, or None."""
    bare = getattr(model, "_orig_mod", model)
    # Without gradients there is nothing for DDP to watch, and it would only wait for the other processes.
    if isinstance(bare, nn.parallel.DistributedDataParallel) and torch.is_grad_enabled():
        return bare
    kind = _sharded_kind()
    inner = unwrapped(model)
    chain = (inner, getattr(inner, "base_model", None), causal_lm)
    return next((wrapper for wrapper in chain if kind is not None and isinstance(wrapper, kind)), None)


def _sharded_kind() -> type[nn.Module] | None:
    """Return FSDP2's class, or None if it was never imported, in which case no model can be an instance of it."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return None if loaded is None else loaded.FSDPModule


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block, and restore every module's mode afterwards."""
    # Not model.eval() and model.train(), which would also switch modules that were in eval mode before.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def has_adapter(model: nn.Module) -> bool:
    """Return whether any layer wraps another one, as PEFT's do."""
    return any(hasattr(module, "base_layer") or hasattr(module, "original_module") for module in model.modules())


def below_rows(layer: Any) -> Any:
    """Return the embedding or head inside the wrapper with trained rows; any other layer unchanged."""
    return layer.token_adapter.base_layer if hasattr(layer, "token_adapter") else layer


@contextmanager
def rows_in_place(model: nn.Module) -> Iterator[None]:
    """Write the rows that an adapter trains into the weights inside the block, and restore the old rows afterwards.

    The wrappers build a new matrix in every call. That takes most of the time of a pass over one token, and its indices
    come from the host, so it cannot be recorded as a CUDA graph. Nothing may be trained inside the block.
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
            # While an adapter counts as merged, PEFT's wrapper uses the weight as it is.
            layer.merged_adapters.extend(layer.active_adapters)
    try:
        yield
    finally:
        with torch.no_grad():
            # Reversed, since of two tied layers the second saved the rows that the first had written.
            for weight, ids, rows in reversed(before):
                weight[ids] = rows
        for layer in layers:
            layer.merged_adapters.clear()


@contextmanager
def below_adapter(model: nn.Module) -> Iterator[None]:
    """Switch the adapter off inside the block, and restore everything afterwards."""
    # PEFT's own switch sets requires_grad of frozen weights when it is undone, hence the copy.
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
    """Return a context in which the model has its initial weights: below its adapter, if it has one."""
    return below_adapter(model) if has_adapter(unwrapped(model)) else nullcontext()


def check_can_switch_off(model: nn.Module) -> None:
    """Raise if the model has no adapter, if it cannot be switched off, or if it is merged into the weights."""
    inner: Any = unwrapped(model)
    if not has_adapter(inner):
        got = f"{type(inner).__name__}, which has no adapter to switch off"
        raise InputError(explain("model", got=got, expected="a PEFT model"))
    if not (hasattr(inner, "disable_adapter") or getattr(inner, "_hf_peft_config_loaded", False)):
        fix = "Create it with peft.get_peft_model or model.add_adapter."
        got = f"{type(inner).__name__} with adapter layers that cannot be switched off"
        raise UnsupportedModelError(explain("adapter", got=got, expected="an adapter that can be", fix=fix))
    if any(getattr(module, "merged_adapters", None) for module in inner.modules()):
        fix = "Unmerge it first: model.unmerge_adapter()."
        raise InputError(explain("adapter", got="merged into the weights", expected="not merged", fix=fix))


@contextmanager
def _disabled(model: Any) -> Iterator[None]:
    """Switch off adapters that were added by transformers (`model.add_adapter`)."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
