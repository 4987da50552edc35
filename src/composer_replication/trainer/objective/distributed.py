"""Run work inside the forward of a model that is wrapped for several processes, or on the model without its adapter.

DDP observes the forward of the module that it wraps, and FSDP2 gathers whole weights only during that forward.
Computing hidden states, and applying the head to some of them, is not that forward. So the wrapper is called as usual,
and the work runs in place of the model's own forward (`inside_forward`). A plain model needs none of this.

A model also serves as a teacher or reference: without dropout (`eval_mode`) or without its adapter
(`adapter_disabled`). Afterwards it is unchanged. An adapter may train some rows of the embedding and the head (PEFT's
`trainable_token_indices`). Both layers are then wrapped, and their weight is the original weight with these rows
replaced.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from composer_replication.errors import InputError, UnsupportedModelError, explain

T = TypeVar("T")
# Prefixes that wrappers (torch.compile, activation checkpointing, FSDP1) add to parameter names.
_WRAPPER_STEPS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module._fsdp_wrapped_module.")
_running = threading.local()  # the models whose forward this thread is currently inside


def unwrapped(model: nn.Module) -> Any:
    """Return the model without the wrappers of DDP and torch.compile."""
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


def bare_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    for step in _WRAPPER_STEPS:
        name = name.replace(step, "")
    return name


def inside_forward(model: nn.Module, causal_lm: nn.Module, work: Callable[[], T]) -> T:
    """Run `work`, which returns tensors or tuples of tensors, inside the forward of the wrapped model.

    The result of `work` is returned directly, because the wrapper may cast its own output to half precision.
    """
    entry = _outermost_wrapper(model, causal_lm)
    inside: set[int] = _running.__dict__.setdefault("inside", set[int]())
    if entry is None or id(causal_lm) in inside:
        return work()
    # The instance may already have a forward of its own, set by accelerate for example.
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
        entry()  # without inputs, which the replacement ignores
    finally:
        inside.discard(id(causal_lm))
        put_back()
    if not results:
        got = f"{type(entry).__name__}, which does not call the forward of {type(causal_lm).__name__}"
        raise UnsupportedModelError(explain("wrapped model", got=got, expected="a model wrapped by DDP or FSDP2"))
    return results[0]


def max_over_shards(models: Sequence[nn.Module], counts: list[int]) -> list[int]:
    """Return the maximum of each count over the processes that share a model's weights.

    If no model is sharded, the counts are returned unchanged. Processes that hold shards of the same weights must make
    the same passes, so each makes as many as the process that needs the most.
    """
    groups = {id(group): group for model in models for group in _process_groups(unwrapped(model))}
    if not groups:
        return counts
    device = next(unwrapped(models[0]).parameters()).device
    agreed = torch.tensor(counts, device=device)
    for group in groups.values():
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX, group=group)
    return agreed.tolist()


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the model or any part of it."""
    kind = _fsdp_class()
    return kind is not None and any(isinstance(module, kind) for module in unwrapped(model).modules())


def _process_groups(model: nn.Module) -> list[Any]:
    """Return the process groups over which a model's weights are sharded, which need not be the default group."""
    if not is_sharded(model):
        return []
    # FSDP2's parameters are DTensors with a mesh.
    meshes: list[Any] = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    if mesh is None:  # inside a forward all weights may be whole, but FSDP's state still has the mesh
        mesh = _mesh_from_fsdp_state(model)
    # The mesh has two dimensions if weights are sharded over some processes and replicated over others.
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def _mesh_from_fsdp_state(model: nn.Module) -> Any:
    kind: Any = _fsdp_class()
    for module in model.modules():
        if isinstance(module, kind):
            state: Any = module._get_fsdp_state()  # pyright: ignore[reportCallIssue]
            group = state._fsdp_param_group
            if group is not None:
                return group.mesh_info.mesh
    raise UnsupportedModelError(explain("FSDP2 model", got="no mesh", expected="a device mesh from fully_shard"))


def _outermost_wrapper(model: nn.Module, causal_lm: nn.Module) -> nn.Module | None:
    """Return the outermost DDP or FSDP2 wrapper whose forward has to be called, or None if there is none."""
    bare = getattr(model, "_orig_mod", model)
    # Without gradients DDP has nothing to do, and would only wait for the other processes.
    if isinstance(bare, nn.parallel.DistributedDataParallel) and torch.is_grad_enabled():
        return bare
    kind = _fsdp_class()
    inner = unwrapped(model)
    chain = (inner, getattr(inner, "base_model", None), causal_lm)
    return next((wrapper for wrapper in chain if kind is not None and isinstance(wrapper, kind)), None)


def _fsdp_class() -> type[nn.Module] | None:
    """Return FSDP2's module class, or None if it was never imported, in which case no model can be sharded."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return None if loaded is None else loaded.FSDPModule


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block, and restore the mode of every module afterwards."""
    # model.eval() followed by model.train() would also switch modules that were in eval mode before.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def has_adapter(model: nn.Module) -> bool:
    """Return whether any layer wraps another layer, as PEFT's adapter layers do."""
    return any(hasattr(module, "base_layer") or hasattr(module, "original_module") for module in model.modules())


def without_trained_rows(layer: Any) -> Any:
    """Return the embedding or head without the wrapper for trained rows; return any other layer unchanged."""
    return layer.token_adapter.base_layer if hasattr(layer, "token_adapter") else layer


@contextmanager
def merged_token_rows(model: nn.Module) -> Iterator[None]:
    """Write the rows that an adapter trains into the weights inside the block, and restore the old rows afterwards.

    PEFT's wrapper builds a new matrix in every call. This takes most of the time of a pass over one token, and cannot
    be recorded as a CUDA graph, because the row indices come from the host. Nothing may be trained inside the block.
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
            # While an adapter is marked as merged, PEFT's wrapper uses the weight unchanged.
            layer.merged_adapters.extend(layer.active_adapters)
    try:
        yield
    finally:
        with torch.no_grad():
            # In reverse order: if two layers are tied, the second saved rows that the first had already replaced.
            for weight, ids, rows in reversed(before):
                weight[ids] = rows
        for layer in layers:
            layer.merged_adapters.clear()


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Switch the adapter off inside the block, and restore it and all `requires_grad` flags afterwards."""
    # Copied because PEFT's own switch turns requires_grad on for frozen weights when it is undone.
    inner: Any = unwrapped(model)
    check_adapter_can_be_disabled(model)
    trainable = {name: parameter.requires_grad for name, parameter in inner.named_parameters()}
    switched = inner.disable_adapter() if hasattr(inner, "disable_adapter") else _transformers_adapters_disabled(inner)
    try:
        with switched:
            yield
    finally:
        for name, parameter in inner.named_parameters():
            parameter.requires_grad_(trainable[name])


def check_adapter_can_be_disabled(model: nn.Module) -> None:
    """Raise if the model has no adapter, or if the adapter cannot be switched off or is merged into the weights."""
    inner: Any = unwrapped(model)
    if not has_adapter(inner):
        got = f"{type(inner).__name__}, which has no adapter to switch off"
        raise InputError(explain("model", got=got, expected="a PEFT model"))
    if not (hasattr(inner, "disable_adapter") or getattr(inner, "_hf_peft_config_loaded", False)):
        fix = "Create it with peft.get_peft_model or model.add_adapter."
        got = f"{type(inner).__name__} with adapter layers that cannot be switched off"
        raise UnsupportedModelError(
            explain("adapter", got=got, expected="an adapter that can be switched off", fix=fix)
        )
    if any(getattr(module, "merged_adapters", None) for module in inner.modules()):
        fix = "Unmerge it first: model.unmerge_adapter()."
        raise InputError(
            explain("adapter", got="weights with the adapter merged", expected="an unmerged adapter", fix=fix)
        )


@contextmanager
def _transformers_adapters_disabled(model: Any) -> Iterator[None]:
    """Switch off adapters that were added by transformers (`model.add_adapter`)."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
