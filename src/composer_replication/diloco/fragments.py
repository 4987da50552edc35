"""What travels of a model: its trainable parameters, in fragments that are exchanged in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import nn

from composer_replication.errors import InputError, explain


class Fragment(nn.Module):
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


def trainable(module: nn.Module) -> Fragment:
    """The parameters of a module that an optimiser changes; with an adapter on it, those of the adapter."""
    return Fragment({name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad})


def split_into_fragments(model: nn.Module, number: int) -> list[Fragment]:
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
        Fragment({name: parameter for layer in groups[begin:end] for name, parameter in layer.items()})
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
