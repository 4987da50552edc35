"""A model as a teacher or a reference: without dropout, or below its adapter, and without leaving a trace.

An adapter may also train some rows of the embedding and of the head (PEFT's `trainable_token_indices`): both layers are
then wrapped, and the weight of either is the one below with these rows in their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.errors import InputError, UnsupportedModelError, explain
from composer_replication.objective.distributed import unwrapped


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
