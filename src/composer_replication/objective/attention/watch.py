"""Looking on while a Hugging Face model attends: which of its layers ask for attention, and with which mask.

A layer that is given the tree's mask and hands it on unchanged sees exactly a token's path. A layer that changes it
(sparse selection, a window of its own), or that attends without asking the model's attention function, does something
that only its author knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_EAGER = "eager_attention_forward"
# Positions are what we gave; sinks are one more column of each row, and refused where they cannot be done.
_HARMLESS = {"attention_mask", "position_ids", "cache_position", "s_aux"}


@dataclass
class Seen:
    """What the layers of a model did in one pass."""

    mask: Any
    layers: set[int] = field(default_factory=set[int])
    """Attention modules that asked, by identity."""
    changed_masks: set[str] = field(default_factory=set[str])
    """Classes of those that came with another mask than the one given to the model."""
    windows: set[int] = field(default_factory=set[int])
    extras: set[str] = field(default_factory=set[str])
    """What else their attention was told: a selection of keys, say, which a kernel of its own would heed."""

    def note(self, module: nn.Module, mask: Any, options: dict[str, Any]) -> None:
        self.layers.add(id(module))
        if not _same_mask(mask, self.mask):
            self.changed_masks.add(type(module).__name__)
        self.extras |= {name for name, value in options.items() if isinstance(value, Tensor) and name not in _HARMLESS}
        window = options.get("sliding_window")
        if isinstance(window, int):
            self.windows.add(window)


@contextmanager
def watched_attention(body: nn.Module, mask: Any) -> Iterator[Seen]:
    """Inside, every attention that a layer of this model asks for is noted, and then done as always."""
    record = Seen(mask)
    inside = {id(module) for module in body.modules()}

    def watching(usual: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: Any, *given: Any, **options: Any) -> Any:
            if id(module) in inside:  # behind the queries, keys and values comes the mask
                record.note(module, given[3] if len(given) > 3 else options.get("attention_mask"), options)
            return usual(module, *given, **options)

        return attend

    with ExitStack() as after:
        for name in _implementations(body):
            _watch_registered(name, watching, after)
        for names in _namespaces(body):
            usual = names[_EAGER]
            names[_EAGER] = watching(usual)
            after.callback(names.__setitem__, _EAGER, usual)
        yield record


def _implementations(body: nn.Module) -> set[str]:
    configs: list[Any] = [getattr(module, "config", None) for module in body.modules()]
    names = {getattr(config, "_attn_implementation", None) for config in configs}
    return {name for name in names if isinstance(name, str)}


def _watch_registered(name: str, watching: Callable[..., Any], after: ExitStack) -> None:
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = ALL_ATTENTION_FUNCTIONS.get(name)
    if usual is None:  # written out in the model's own file
        return
    AttentionInterface.register(name, watching(usual))
    after.callback(AttentionInterface.register, name, usual)


def _namespaces(body: nn.Module) -> list[dict[str, Any]]:
    """The files that these modules were written in, where those have an attention function of their own."""
    files = {type(module).__module__ for module in body.modules()}
    loaded = [vars(sys.modules[file]) for file in sorted(files) if file in sys.modules]
    return [namespace for namespace in loaded if callable(namespace.get(_EAGER))]


def _same_mask(actual_mask: Any, expected_mask: Any) -> bool:
    if actual_mask is expected_mask:
        return True
    if (
        not (isinstance(actual_mask, Tensor) and isinstance(expected_mask, Tensor))
        or actual_mask.shape[-2:] != expected_mask.shape[-2:]
    ):
        return False
    ours, theirs = (_allowed(mask) for mask in (expected_mask, actual_mask))
    return bool((ours == theirs).all())


def _allowed(mask: Tensor) -> Tensor:
    """Where a mask lets a row see a column: True, or nothing added to the score."""
    return mask if mask.dtype == torch.bool else mask == 0
