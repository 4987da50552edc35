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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from composer_replication.batch.tree import Run, Stretch, TokenTree
from composer_replication.errors import InputError, explain

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


class _TreeMask(OwnMask):
    """The mask of a tree, which carries it and how to attend to it."""

    tree: TokenTree
    blocks: BlockMask | None
    plan: _BranchPlan | None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:  # noqa: ARG002
        return attend_to_tree(query, key, value, self, **options)


def tree_mask(tree: TokenTree, kind: Kind) -> _TreeMask:
    """The mask of a tree that lies on the device of the model."""
    if kind == "flex" and len(tree) % _BLOCK:
        raise InputError(explain("tree", got=f"{len(tree)} tokens", expected=f"padding to a multiple of {_BLOCK}"))
    mask = _TreeMask.of_length(len(tree), tree.enter.device)
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


def attend_to_tree(query: Tensor, key: Tensor, value: Tensor, mask: _TreeMask, **options: Any) -> Tensor:
    """Attention (1, L, heads, D) of (1, heads, L, D) by the tree's rule, and of further options those that we do."""
    query, key, value = as_computed(query, key, value)
    softcap, scale = options.get("softcap"), options.get("scaling")
    check_options("attention on a tree", options)
    if mask.blocks is not None:
        return _flex(query, key, value, mask.blocks, scale, softcap).transpose(1, 2).contiguous()
    if softcap is not None:
        raise InputError(explain("attention without FlexAttention", got=f"soft-cap {softcap}", expected="none"))
    if mask.plan is not None:
        return _flash_tree_attention(query, key, value, mask.plan, scale)
    return _path_tree_attention(query, key, value, mask.tree, scale).transpose(1, 2).contiguous()


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


# Attention over a token tree with flash kernels: the trunk as usual, the branches on the trunk's keys and values.
#
# A branch's queries see the trunk up to where it turns off, and then their own past. Branches that turn off near each
# other are one block of queries against the part of the trunk that they all see; what is left of the trunk for each of
# them, and the branches' own tokens, are a second, causal part. Both are softmaxes over different keys of the same
# query, so they merge by their log-sum-exp, and with the merged output and log-sum-exp each kernel's own backward gives
# its part of the gradients exactly. There is nothing to compile, so session lengths may vary from step to step.

# Branches are read together while they turn off within this part of the trunk; the rest of it is read for each alone.
_SPREAD = 1 / 8
_MIN_SPREAD = 512
# The usual kernel may plan anew for every length; a trunk is padded to a multiple of this.
_TRUNK_STEP = 1024
# Many branches add to the same keys: in half precision the sums would lose what the kernels computed.
_SUMS = torch.float32


class _Lengths(NamedTuple):
    """Where each sequence of packed queries and keys ends, and the longest of both."""

    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int


class _PackedBranches(NamedTuple):
    """All branch queries in order, cut into sequences; for each the rows of its keys, packed."""

    key_rows: Tensor
    lengths: _Lengths


class _Branches(NamedTuple):
    runs: tuple[Run, ...]
    """Rows of the tree that are branches, in order; joined, they are the queries of both parts."""
    trunk_part: _PackedBranches
    own_part: _PackedBranches


@dataclass(frozen=True, eq=False)
class _BranchPlan:
    """Which kernels read what."""

    trunks: tuple[Run, ...]
    branches: _Branches | None
    num_rows: int


def plan_branches(tree: TokenTree) -> _BranchPlan:
    """Made of the tree's stretches alone: nothing is read back from the device."""
    device = tree.input_ids.device
    trunks: list[Run] = []
    groups: list[list[Stretch]] = []
    prefixes: list[Run] = []
    for trunk, branches in _trees(tree.stretches):
        trunks.append(trunk)
        for together in _near_each_other(branches, trunk):
            groups.append(together)
            prefixes.append((trunk[0], trunk[0] + _turn_off(together[0], trunk)))
    if not groups:
        return _BranchPlan(tuple(trunks), None, len(tree))
    sizes = [sum(branch.end - branch.start for branch in group) for group in groups]
    trunk_part = _part(sizes, [[prefix] for prefix in prefixes], device)
    every = [(branch, prefix) for group, prefix in zip(groups, prefixes, strict=True) for branch in group]
    own_keys = [_behind(branch, prefix) for branch, prefix in every]
    own_part = _part([branch.end - branch.start for branch, _ in every], own_keys, device)
    runs = _joined((branch.start, branch.end) for branch, _ in every)
    return _BranchPlan(tuple(trunks), _Branches(tuple(runs), trunk_part, own_part), len(tree))


def _flash_tree_attention(query: Tensor, key: Tensor, value: Tensor, plan: _BranchPlan, scale: float | None) -> Tensor:
    """Attention (1, L, heads, D) of (1, heads, L, D), in half precision on a CUDA device."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    pieces = {start: _trunk(query, key, value, (start, end), factor) for start, end in plan.trunks}
    covered = max(end for _, end in plan.trunks)
    if plan.branches is not None:
        runs = plan.branches.runs
        by_token = [states[0].transpose(0, 1) for states in (query, key, value)]
        queries = torch.cat([by_token[0][start:end] for start, end in runs])
        rows: Any = _BranchAttention.apply(queries, *by_token[1:], plan.branches, factor)
        outputs = rows[None].split([end - start for start, end in runs], dim=1)
        pieces |= {start: output for (start, _), output in zip(runs, outputs, strict=True)}
        covered = max(covered, runs[-1][1])
    if covered < plan.num_rows:
        pieces[covered] = _padding_attention(value[:, :, covered:], query.shape[1]).transpose(1, 2)
    return torch.cat([pieces[start] for start in sorted(pieces)], dim=1)


def _trunk(query: Tensor, key: Tensor, value: Tensor, run: Run, scale: float) -> Tensor:
    """Causal attention of a trunk. Rows added behind it see it and are not seen; their results are dropped.

    They are zeros, not the branches that lie there: an infinite value times nothing is not nothing.
    """
    start, end = run
    missing = -(end - start) % _TRUNK_STEP
    q, k, v = (
        F.pad(states[:, :, start:end], (0, 0, 0, missing)) if missing else states[:, :, start:end]
        for states in (query, key, value)
    )
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)[:, : end - start]


class _BranchAttention(torch.autograd.Function):
    """Queries of the branches (Q, heads, D) on keys and values of all rows (L, key heads, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Branches, scale: float) -> Tensor:
        own_outputs, trunk = (
            flash_forward(query, key[part.key_rows], value[part.key_rows], part.lengths, is_causal, scale)
            for part, is_causal in _parts(plan)
        )
        out, lse = _merged(*own_outputs, *trunk)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.zeros_like(states, dtype=_SUMS) for states in (query, key, value))
        for part, is_causal in _parts(ctx.plan):
            rows = part.key_rows
            inputs = (grad, query, key[rows], value[rows], out, lse)
            dq_part, dk_part, dv_part = flash_backward(*inputs, part.lengths, is_causal, ctx.scale)
            dq += dq_part
            dk.index_add_(0, rows, dk_part.to(_SUMS))
            dv.index_add_(0, rows, dv_part.to(_SUMS))
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


def _parts(plan: _Branches) -> tuple[tuple[_PackedBranches, bool], tuple[_PackedBranches, bool]]:
    """Each with whether it is causal."""
    return (plan.own_part, True), (plan.trunk_part, False)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: _Lengths, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs (Q, heads, D) and log-sum-exps (heads, Q) of packed sequences; causal as seen from their last tokens."""
    outputs = torch.ops.aten._flash_attention_forward(query, key, value, *lengths, 0.0, is_causal, False, scale=scale)
    return outputs[0], outputs[1]


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: _Lengths,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given the whole row's output and log-sum-exp."""
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of a dropout that is off
    return torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, *lengths, 0.0, is_causal, unused, unused, scale=scale
    )


def _merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmaxes over different keys as one over both; lse (heads, Q), out (Q, heads, D)."""
    both = torch.logaddexp(lse, other_lse)
    mine, theirs = ((part_lse - both).exp().T[..., None] for part_lse in (lse, other_lse))
    return (out * mine + other_out * theirs).to(out.dtype), both


def _trees(stretches: tuple[Stretch, ...]) -> list[tuple[Run, list[Stretch]]]:
    """Each trunk with its branches."""
    trees: list[tuple[Run, list[Stretch]]] = []
    for stretch in stretches:
        if stretch.context:
            trees[-1][1].append(stretch)
        else:
            trees.append(((stretch.start, stretch.end), []))
    return trees


def _turn_off(branch: Stretch, trunk: Run) -> int:
    """How many of the trunk's tokens a branch sees; the layout sorts by it."""
    first, last = branch.context[0]
    return min(last, trunk[1]) - first


def _near_each_other(branches: list[Stretch], trunk: Run) -> list[list[Stretch]]:
    spread = max(_MIN_SPREAD, int((trunk[1] - trunk[0]) * _SPREAD))
    groups: list[list[Stretch]] = []
    for branch in branches:
        if groups and _turn_off(branch, trunk) - _turn_off(groups[-1][0], trunk) <= spread:
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return groups


def _part(num_queries: list[int], key_runs: list[list[Run]], device: torch.device) -> _PackedBranches:
    rows = torch.cat([torch.arange(*run) for runs in key_runs for run in runs])
    num_keys = [sum(end - start for start, end in runs) for runs in key_runs]
    query_ends, key_ends = (torch.tensor([0, *counts]).cumsum(0).int().to(device) for counts in (num_queries, num_keys))
    return _PackedBranches(rows.to(device), _Lengths(query_ends, key_ends, max(num_queries), max(num_keys)))


def _behind(branch: Stretch, prefix: Run) -> list[Run]:
    """The rows of a branch's path behind the part of the trunk that its block reads, with its own."""
    runs = [(prefix[1], branch.context[0][1]), *branch.context[1:], (branch.start, branch.end)]
    return [run for run in runs if run[0] < run[1]]


def _joined(runs: Iterable[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


# Attention over a token tree, stretch by stretch: each one's queries on the keys and values of its path.
#
# Keys and values are computed once and read again by every branch, so this costs what the tree costs, not what the flat
# sequences do. It needs nothing but scaled-dot-product attention: the fallback where no faster kernel runs.


def _path_tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: TokenTree, scale: float | None) -> Tensor:
    """Attention (1, heads, L, D)."""
    pieces = [_stretch(query, key, value, start, end, context, scale) for start, end, context in tree.stretches]
    covered = tree.stretches[-1].end
    return torch.cat([*pieces, _padding_attention(value[:, :, covered:], query.shape[1])], dim=2)


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


def _padding_attention(value: Tensor, num_heads: int) -> Tensor:
    """A token that sees only itself gets its own value."""
    return value.repeat_interleave(num_heads // value.shape[1], dim=1)
