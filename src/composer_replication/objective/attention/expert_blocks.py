"""Mixtures of experts in experiments that compare bits: how large an expert's product is depends on every token.

Two passes that differ in some tokens route those tokens elsewhere, and a product of another size may add up in
another order. So while such passes are compared, the blocks see one row in the place of every token that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def same_rows_for_experts(body: nn.Module, kept: Tensor) -> Iterator[bool]:
    """Inside, blocks with experts get a kept row in the place of all that are not; says whether there are any."""
    row = int(kept.int().argmax())

    def swap(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or kept.numel() not in value.shape[:2]:
            return value
        dim = 0 if value.shape[0] == kept.numel() else 1
        shape = [1] * value.dim()
        shape[dim] = -1
        return torch.where(kept.view(shape), value, value.narrow(dim, row, 1))

    def before(_block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(swap(each) for each in args), {name: swap(each) for name, each in options.items()}

    blocks = [
        each for each in body.modules() if any(type(child).__name__.endswith("Experts") for child in each.children())
    ]
    with ExitStack() as after:
        for block in blocks:
            after.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield bool(blocks)


def other_tokens(ids: Tensor, body: Any) -> Tensor:
    """For each token another one of those given, so that it is one that this model is meant to read."""
    found, place = ids.unique(return_inverse=True)
    if found.numel() == 1:
        return (ids + 1) % body.get_input_embeddings().weight.shape[0]
    return found.roll(-1)[place]


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Of each row (…, H); what is no number is one for both."""
    return ((one == other) | (one.isnan() & other.isnan())).all(dim=-1)
