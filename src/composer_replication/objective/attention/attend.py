"""Attention over a token tree, in a Hugging Face model that keeps its usual attention for everything else.

The choice is made by the mask, in every call. So nothing has to be switched back, and a layer that gradient
checkpointing runs again during the backward pass finds what it ran with the first time. Kinds, best first:

    flash   the trunk by the usual causal kernel, the branches by flash kernels on the trunk's keys and values
    flex    FlexAttention with a block mask: any dtype, soft-caps; compiled once for each length
    paths   every stretch by scaled-dot-product attention on the keys of its path: any device and dtype
    dense   an (L, L) mask, for small trees and for models that take no other
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from composer_replication.batch.tree import TokenTree
from composer_replication.errors import InputError, explain
from composer_replication.objective.attention.flash import BranchPlan, flash_tree_attention, plan_branches
from composer_replication.objective.attention.paths import path_tree_attention

Kind = Literal["flash", "flex", "paths", "dense"]
_PREFIX = "composer_tree_"
_BLOCK = 128
# A compiled kernel is made for each length; beyond this many they would silently be replaced by the dense formula.
_MAX_LENGTHS = 256


class OwnMask(BlockMask):
    """A block mask by name only, so that models pass it on untouched; it says itself how a layer attends by it."""

    @classmethod
    def of_length(cls, length: int, device: torch.device) -> Self:
        zero = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        mask: Any = cls.from_kv_blocks(zero, zero[..., None], BLOCK_SIZE=length, seq_lengths=(length, length))
        return mask

    @abstractmethod
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention (B, L, heads, D) of (B, heads, L, D)."""


class TreeMask(OwnMask):
    """The mask of a tree, which carries it and how to attend to it."""

    tree: TokenTree
    blocks: BlockMask | None
    plan: BranchPlan | None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:  # noqa: ARG002
        return attend_to_tree(query, key, value, self, **options)


def tree_mask(tree: TokenTree, kind: Kind) -> TreeMask:
    """The mask of a tree that lies on the device of the model."""
    if kind == "flex" and len(tree) % _BLOCK:
        raise InputError(explain("tree", got=f"{len(tree)} tokens", expected=f"padding to a multiple of {_BLOCK}"))
    mask = TreeMask.of_length(len(tree), tree.enter.device)
    mask.tree = tree
    mask.blocks = _blocks(tree) if kind == "flex" else None
    mask.plan = plan_branches(tree) if kind == "flash" else None
    return mask


def use_tree_attention(body: Any) -> None:
    """Let a Hugging Face model take tree masks as well; for flat sequences nothing changes."""
    before = body.config._attn_implementation
    if before.startswith(_PREFIX):
        return
    name = _PREFIX + before
    _register(name, before)
    body.set_attn_implementation(name)


@contextmanager
def own_masks_taken(body: Any) -> Iterator[None]:
    """The same for a while."""
    before = body.config._attn_implementation
    use_tree_attention(body)
    try:
        yield
    finally:
        if body.config._attn_implementation != before:
            body.set_attn_implementation(before)


def usual_attention(body: Any) -> str:
    """The attention that a model has for everything else."""
    return body.config._attn_implementation.removeprefix(_PREFIX)


def _register(name: str, before: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = ALL_ATTENTION_FUNCTIONS[before]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(attention_mask, OwnMask):
            return usual(module, query, key, value, attention_mask, **options)
        return attention_mask.attend(module, query, key, value, **options), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])


def attend_to_tree(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, **options: Any) -> Tensor:
    """Attention (1, L, heads, D) of (1, heads, L, D) by the tree's rule, and of further options those that we do."""
    query, key, value = as_computed(query, key, value)
    softcap, scale = options.get("softcap"), options.get("scaling")
    check_options("attention on a tree", options)
    if mask.blocks is not None:
        return _flex(query, key, value, mask.blocks, scale, softcap).transpose(1, 2).contiguous()
    if softcap is not None:
        raise InputError(explain("attention without FlexAttention", got=f"soft-cap {softcap}", expected="none"))
    if mask.plan is not None:
        return flash_tree_attention(query, key, value, mask.plan, scale)
    return path_tree_attention(query, key, value, mask.tree, scale).transpose(1, 2).contiguous()


def as_computed(*states: Tensor) -> tuple[Tensor, ...]:
    """In the precision of autocast, as the usual attention is cast."""
    device = states[0].device.type
    if not torch.is_autocast_enabled(device):
        return states
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in states)


def check_options(what: str, options: Mapping[str, Any]) -> None:
    """Raise where a layer asks for something that attention by a mask of our own does not do."""
    got = sorted(name for name in ("s_aux", "position_bias") if options.get(name) is not None)
    got += ["dropout"] if options.get("dropout") else []
    if got:
        raise InputError(explain(what, got=f"options {got}", expected="none of them"))


def _flex(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float | None, softcap: float | None
) -> Tensor:
    # On few heads a kernel that shares keys among them has too little to do in parallel.
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    with torch._dynamo.config.patch(recompile_limit=_MAX_LENGTHS, accumulated_recompile_limit=_MAX_LENGTHS):
        return _compiled_flex()(query, key, value, _soft_cap(softcap), blocks, scale)


@cache
def _compiled_flex() -> Any:
    """Compiled for each length by itself: one kernel for all lengths is a quarter slower."""
    return torch.compile(flex_attention, dynamic=False)


@cache
def _soft_cap(cap: float | None) -> Any:
    """One function for each cap, so that every layer and every step meets the same compiled kernel."""
    if cap is None:
        return None

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _q: Tensor, _kv: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _blocks(tree: TokenTree) -> BlockMask:
    """Blocks that are seen whole or in part, from the least and greatest numbers in each: no (L, L) tensor."""
    enter, leave = tree.enter.to(torch.int32), tree.leave.to(torch.int32)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (enter[kv] <= enter[q]) & (enter[q] < leave[kv])

    first, last = (bound(enter.view(-1, _BLOCK), dim=1) for bound in (torch.amin, torch.amax))
    least, most = (bound(leave.view(-1, _BLOCK), dim=1) for bound in (torch.amin, torch.amax))
    index = torch.arange(len(first), device=enter.device)
    row, column = index[:, None], index[None]
    nothing = (column > row) | (last[:, None] < first[None]) | (first[:, None] >= most[None])
    whole = (column < row) & (last[None] <= first[:, None]) & (last[:, None] < least[None])
    some = _listed(~nothing & ~whole)
    every = _listed(whole)
    size = len(tree)
    return BlockMask.from_kv_blocks(*some, *every, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(size, size))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks: how many are marked, and their numbers first."""
    numbers = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).to(torch.int32)[None, None], numbers.to(torch.int32)[None, None].contiguous()
