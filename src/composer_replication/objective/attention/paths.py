"""Attention over a token tree, stretch by stretch: each one's queries on the keys and values of its path.

Keys and values are computed once and read again by every branch, so this costs what the tree costs, not what the flat
sequences do. It needs nothing but scaled-dot-product attention: the fallback where no faster kernel runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_replication.batch.tree import TokenTree


def path_tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: TokenTree, scale: float | None) -> Tensor:
    """Attention (1, heads, L, D)."""
    pieces = [_stretch(query, key, value, start, end, context, scale) for start, end, context in tree.stretches]
    covered = tree.stretches[-1].end
    return torch.cat([*pieces, padding_attention(value[:, :, covered:], query.shape[1])], dim=2)


def _stretch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    end: int,
    context: tuple[tuple[int, int], ...],
    scale: float | None,
) -> Tensor:
    runs = [*context, (start, end)]
    keys, values = (torch.cat([states[:, :, first:last] for first, last in runs], dim=2) for states in (key, value))
    if not context:
        return F.scaled_dot_product_attention(
            query[:, :, start:end], keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    from torch.nn.attention.bias import causal_lower_right  # brings the compiler with it: a second to import

    groups = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(groups, dim=1) for states in (keys, values))
    bias = causal_lower_right(end - start, keys.shape[2])
    return F.scaled_dot_product_attention(query[:, :, start:end], keys, values, attn_mask=bias, scale=scale)  # pyright: ignore[reportArgumentType]


def padding_attention(value: Tensor, num_heads: int) -> Tensor:
    """A token that sees only itself gets its own value."""
    return value.repeat_interleave(num_heads // value.shape[1], dim=1)
