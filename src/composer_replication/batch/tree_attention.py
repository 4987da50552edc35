"""Attention that takes a tree's block mask and leaves every other mask to what the model used before.

The choice is made by the mask, in every call. So nothing has to be switched back, and a layer that gradient
checkpointing runs again during the backward pass finds what it ran with the first time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PREFIX = "composer_tree_"


def use_tree_attention(body: Any) -> None:
    """Let a Hugging Face model take block masks as well; for flat sequences nothing changes."""
    before = body.config._attn_implementation
    if before.startswith(_PREFIX):
        return
    name = _PREFIX + before
    _register(name, before)
    body.set_attn_implementation(name)


def tree_block_mask(subtree_end: Tensor) -> Any:
    """The tree's rule, `kv <= q < subtree_end[kv]`, as a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends = subtree_end.to(torch.int32)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (q < ends[kv])

    size = ends.numel()
    return create_block_mask(sees, None, None, size, size, device=str(ends.device), _compile=True)


def _register(name: str, before: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = ALL_ATTENTION_FUNCTIONS[before]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        is_tree = attention_mask is not None and not isinstance(attention_mask, Tensor)
        chosen: Any = flex_attention_forward if is_tree else usual
        return chosen(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
