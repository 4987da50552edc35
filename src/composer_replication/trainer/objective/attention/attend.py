"""Compute attention over a token tree in a Hugging Face model, which keeps its usual attention for all other inputs.

The mask that a call receives selects its attention, so nothing has to be switched back afterwards, and a layer that
gradient checkpointing recomputes in the backward pass uses the same attention as in the forward pass. The kinds, best
first:

    flash   the trunk by the usual causal kernel, the branches by flash kernels on the trunk's keys and values
    flex    FlexAttention with a block mask: any dtype, soft-caps; compiled once for each length
    paths   every stretch by scaled-dot-product attention on the keys of its path: any device and dtype
    dense   an (L, L) mask, for small trees and for models that accept no other mask

flash: a branch's queries attend to the trunk up to the branch point and to earlier tokens of the branch. Branches whose
branch points are close together form one block of queries, which attends to the part of the trunk that all of them
see. A second, causal part covers the rest of the trunk for each branch, and the branch's own tokens. The two parts are
softmaxes of the same queries over different keys, so they are merged by their log-sum-exp. Given the merged output and
log-sum-exp, the backward of each kernel returns its share of the gradients exactly. Nothing is compiled, so session
lengths may vary from step to step.

paths: keys and values are computed once and read by every branch, so the cost is that of the tree, not that of the
flat sequences. It needs nothing but scaled-dot-product attention.
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
# The attention of a model with "sdpa", for example, is registered as "composer_tree_sdpa".
_PREFIX = "composer_tree_"
# FlexAttention's default block size.
_BLOCK = 128
# FlexAttention is compiled for each length; beyond torch's recompile limit it silently falls back to the dense formula.
_MAX_LENGTHS = 256
# Branches share one block of queries if their branch points lie within this fraction of the trunk, or this many tokens,
# of each other; each branch reads the rest of the trunk separately.
_SPREAD = 1 / 8
_MIN_SPREAD = 512
# The usual kernel may be planned again for every length, so trunks are padded to a multiple of this.
_TRUNK_STEP = 1024
# Many branches add to the gradients of the same keys; sums in half precision would lose the precision of the kernels.
_SUMS = torch.float32


class SelfAttendingMask(BlockMask):
    """A mask that computes the attention itself. It subclasses BlockMask only so that models pass it on unchanged."""

    @classmethod
    def of_length(cls, length: int, device: torch.device) -> Self:
        """Return a mask for `length` tokens, with a dummy block structure of the right size."""
        zero = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        mask: Any = cls.from_kv_blocks(zero, zero[..., None], BLOCK_SIZE=length, seq_lengths=(length, length))
        return mask

    @abstractmethod
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the attention (B, L, heads, D) of queries, keys and values (B, heads, L, D)."""


class _TreeMask(SelfAttendingMask):
    """The mask of a tree, together with the tree and the inputs that the selected kind of attention needs."""

    tree: TokenTree
    blocks: BlockMask | None
    plan: _BranchPlan | None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:  # noqa: ARG002
        return _attend_to_tree(query, key, value, self, **options)


def tree_mask(tree: TokenTree, kind: Kind) -> _TreeMask:
    """Return the mask of a tree, which must already be on the model's device."""
    if kind == "flex" and len(tree) % _BLOCK:
        raise InputError(
            explain("tree", got=f"{len(tree)} tokens", expected=f"a length padded to a multiple of {_BLOCK}")
        )
    mask = _TreeMask.of_length(len(tree), tree.enter.device)
    mask.tree = tree
    mask.blocks = _block_mask(tree) if kind == "flex" else None
    mask.plan = _plan_branches(tree) if kind == "flash" else None
    return mask


def use_tree_attention(body: Any) -> None:
    """Make a Hugging Face model accept `SelfAttendingMask` masks; with all other masks it behaves as before."""
    before = body.config._attn_implementation
    # Already wrapped: the rest of the name is the wrapped attention.
    if before.startswith(_PREFIX):
        return
    name = _PREFIX + before
    _register_attention(name, before)
    body.set_attn_implementation(name)


@contextmanager
def accept_self_attending_masks(body: Any) -> Iterator[None]:
    """Make a Hugging Face model accept `SelfAttendingMask` masks, but only inside the block."""
    before = body.config._attn_implementation
    use_tree_attention(body)
    try:
        yield
    finally:
        if body.config._attn_implementation != before:
            body.set_attn_implementation(before)


def usual_attention(body: Any) -> str:
    """Return the name of the attention that a model uses for all masks other than a `SelfAttendingMask`."""
    return body.config._attn_implementation.removeprefix(_PREFIX)


def _register_attention(name: str, before: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = ALL_ATTENTION_FUNCTIONS[before]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(attention_mask, SelfAttendingMask):
            return usual(module, query, key, value, attention_mask, **options)
        # None: attention weights, which are not computed.
        return attention_mask.attend(module, query, key, value, **options), None

    AttentionInterface.register(name, attend)
    # For flat sequences, transformers builds the masks of the wrapped attention.
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])


def _attend_to_tree(query: Tensor, key: Tensor, value: Tensor, mask: _TreeMask, **options: Any) -> Tensor:
    """Return the attention (1, L, heads, D) over a tree for inputs (1, heads, L, D); raise for unsupported options."""
    query, key, value = cast_for_attention(query, key, value)
    softcap, scale = options.get("softcap"), options.get("scaling")
    check_attention_options("attention on a tree", options)
    if mask.blocks is not None:
        return _flex_attention(query, key, value, mask.blocks, scale, softcap).transpose(1, 2).contiguous()
    if softcap is not None:
        raise InputError(explain("attention without FlexAttention", got=f"soft-cap {softcap}", expected="no soft-cap"))
    if mask.plan is not None:
        return _flash_tree_attention(query, key, value, mask.plan, scale)
    return _path_tree_attention(query, key, value, mask.tree, scale).transpose(1, 2).contiguous()


def cast_for_attention(*states: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to autocast's dtype if autocast is on, as it would cast the inputs of torch's own attention."""
    device = states[0].device.type
    if not torch.is_autocast_enabled(device):
        return states
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in states)


def check_attention_options(what: str, options: Mapping[str, Any]) -> None:
    """Raise InputError if a layer passes an option that our attention does not support."""
    # s_aux: attention sinks (gpt-oss); position_bias: T5 and its relatives
    got = sorted(name for name in ("s_aux", "position_bias") if options.get(name) is not None)
    got += ["dropout"] if options.get("dropout") else []
    if got:
        raise InputError(explain(what, got=f"unsupported options {got}", expected="no such options"))


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float | None, softcap: float | None
) -> Tensor:
    # With grouped queries the kernel would run on the few key heads only, which leaves too little parallel work.
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    with torch._dynamo.config.patch(recompile_limit=_MAX_LENGTHS, accumulated_recompile_limit=_MAX_LENGTHS):
        return _compiled_flex()(query, key, value, _softcap_function(softcap), blocks, scale)


@cache
def _compiled_flex() -> Any:
    """Return FlexAttention, compiled separately for each length.

    A single kernel that supports all lengths would be a quarter slower.
    """
    return torch.compile(flex_attention, dynamic=False)


@cache
def _softcap_function(cap: float | None) -> Any:
    """Return the score function for a soft-cap, cached so that all layers and steps share one compiled kernel."""
    if cap is None:
        return None

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _q: Tensor, _kv: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _block_mask(tree: TokenTree) -> BlockMask:
    """Return a block mask that says which blocks of the attention matrix are visible in full, in part, or not at all.

    This is decided from the minimum and maximum of `enter` and `leave` in each block, without an (L, L) tensor. Row q
    sees row kv if kv comes before q (or is q) and q lies in kv's subtree [enter, leave).
    """
    enter, leave = tree.enter.to(torch.int32), tree.leave.to(torch.int32)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (enter[kv] <= enter[q]) & (enter[q] < leave[kv])

    min_enter, max_enter = (bound(enter.view(-1, _BLOCK), dim=1) for bound in (torch.amin, torch.amax))
    min_leave, max_leave = (bound(leave.view(-1, _BLOCK), dim=1) for bound in (torch.amin, torch.amax))
    index = torch.arange(len(min_enter), device=enter.device)
    row, column = index[:, None], index[None]
    # In empty blocks no pair of rows can satisfy `sees`, in full blocks every pair does; it is evaluated in all others.
    is_empty = (column > row) | (max_enter[:, None] < min_enter[None]) | (min_enter[:, None] >= max_leave[None])
    is_full = (column < row) & (max_enter[None] <= min_enter[:, None]) & (max_enter[:, None] < min_leave[None])
    partial, full = _marked_blocks_first(~is_empty & ~is_full), _marked_blocks_first(is_full)
    size = len(tree)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(size, size))


def _marked_blocks_first(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of marked blocks in each row, and the indices of all blocks, with the marked blocks first."""
    numbers = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).to(torch.int32)[None, None], numbers.to(torch.int32)[None, None].contiguous()


class _Lengths(NamedTuple):
    """The cumulative and maximum lengths of packed queries and keys, as flash kernels expect them."""

    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int


class _PackedBranches(NamedTuple):
    """The lengths of the sequences into which branch queries are cut, and the packed rows of their keys."""

    key_rows: Tensor
    lengths: _Lengths


class _Branches(NamedTuple):
    """The branches of all trees, and the two parts of their attention: to the trunk, and to the branches' own rows."""

    runs: tuple[Run, ...]
    """Indices of all branch rows in the tree, in order: the queries of both parts."""
    trunk_part: _PackedBranches
    own_part: _PackedBranches


@dataclass(frozen=True, eq=False)
class _BranchPlan:
    """The rows that belong to trunks and to branches, which are computed by different kernels."""

    trunks: tuple[Run, ...]
    branches: _Branches | None
    num_rows: int


def _plan_branches(tree: TokenTree) -> _BranchPlan:
    """Return the plan for a tree. It is computed from the stretches alone, so nothing is read back from the device."""
    device = tree.input_ids.device
    trunks: list[Run] = []
    groups: list[list[Stretch]] = []
    prefixes: list[Run] = []
    for trunk, branches in _trunks_with_branches(tree.stretches):
        trunks.append(trunk)
        for group in _group_by_branch_point(branches, trunk):
            groups.append(group)
            prefixes.append((trunk[0], trunk[0] + _branch_point(group[0], trunk)))
    if not groups:
        return _BranchPlan(tuple(trunks), None, len(tree))
    sizes = [sum(branch.end - branch.start for branch in group) for group in groups]
    trunk_part = _pack_branches(sizes, [[prefix] for prefix in prefixes], device)
    all_branches = [(branch, prefix) for group, prefix in zip(groups, prefixes, strict=True) for branch in group]
    own_keys = [_row_ranges_after_prefix(branch, prefix) for branch, prefix in all_branches]
    own_part = _pack_branches([branch.end - branch.start for branch, _ in all_branches], own_keys, device)
    runs = _merge_adjacent((branch.start, branch.end) for branch, _ in all_branches)
    return _BranchPlan(tuple(trunks), _Branches(tuple(runs), trunk_part, own_part), len(tree))


def _flash_tree_attention(query: Tensor, key: Tensor, value: Tensor, plan: _BranchPlan, scale: float | None) -> Tensor:
    """Return the attention (1, L, heads, D) for inputs (1, heads, L, D) in half precision on a CUDA device."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    pieces = {start: _trunk_attention(query, key, value, (start, end), factor) for start, end in plan.trunks}
    covered = max(end for _, end in plan.trunks)
    if plan.branches is not None:
        runs = plan.branches.runs
        by_token = [states[0].transpose(0, 1) for states in (query, key, value)]
        queries = torch.cat([by_token[0][start:end] for start, end in runs])
        rows: Any = _BranchAttention.apply(queries, *by_token[1:], plan.branches, factor)
        outputs = rows[None].split([end - start for start, end in runs], dim=1)
        pieces |= {start: output for (start, _), output in zip(runs, outputs, strict=True)}
        covered = max(covered, runs[-1][1])
    # The rest is padding, whose tokens see only themselves.
    if covered < plan.num_rows:
        pieces[covered] = _padding_attention(value[:, :, covered:], query.shape[1]).transpose(1, 2)
    return torch.cat([pieces[start] for start in sorted(pieces)], dim=1)


def _trunk_attention(query: Tensor, key: Tensor, value: Tensor, run: Run, scale: float) -> Tensor:
    """Return the causal attention of a trunk, padded at the end for the kernel; the padding's output is dropped.

    The padding is zeros rather than the branches that follow in memory: their masked values may be infinite, and
    inf * 0 is NaN.
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
    """The attention of branch queries (Q, heads, D) to all keys and values (L, key heads, D), with its backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Branches, scale: float) -> Tensor:
        (own_out, own_lse), (trunk_out, trunk_lse) = (
            _flash_forward(query, key[part.key_rows], value[part.key_rows], part.lengths, is_causal, scale)
            for part, is_causal in _attention_parts(plan)
        )
        out, lse = _merge_softmaxes(own_out, own_lse, trunk_out, trunk_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.zeros_like(states, dtype=_SUMS) for states in (query, key, value))
        for part, is_causal in _attention_parts(ctx.plan):
            rows = part.key_rows
            inputs = (grad, query, key[rows], value[rows], out, lse)
            dq_part, dk_part, dv_part = _flash_backward(*inputs, part.lengths, is_causal, ctx.scale)
            dq += dq_part
            dk.index_add_(0, rows, dk_part.to(_SUMS))
            dv.index_add_(0, rows, dv_part.to(_SUMS))
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


def _attention_parts(plan: _Branches) -> tuple[tuple[_PackedBranches, bool], tuple[_PackedBranches, bool]]:
    """Return (part, is_causal) for both parts of the attention: to the branches' own rows, and to the trunk."""
    return (plan.own_part, True), (plan.trunk_part, False)


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: _Lengths, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return outputs (Q, heads, D) and log-sum-exps (heads, Q) of packed sequences.

    A causal mask is aligned at the end: the last query of each sequence sees its last key.
    """
    # 0.0: no dropout; False: no debug mask.
    outputs = torch.ops.aten._flash_attention_forward(query, key, value, *lengths, 0.0, is_causal, False, scale=scale)
    return outputs[0], outputs[1]


def _flash_backward(
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
    """Return the gradients of queries, keys and values, given output and log-sum-exp over all visible keys."""
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of a dropout that is off
    return torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, *lengths, 0.0, is_causal, unused, unused, scale=scale
    )


def _merge_softmaxes(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two softmaxes over different keys into one over all of them; out is (Q, heads, D), lse is (heads, Q)."""
    merged_lse = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((part_lse - merged_lse).exp().T[..., None] for part_lse in (lse, other_lse))
    return (out * weight + other_out * other_weight).to(out.dtype), merged_lse


def _trunks_with_branches(stretches: tuple[Stretch, ...]) -> list[tuple[Run, list[Stretch]]]:
    """Return each trunk with its branches. A stretch that has no context starts a new tree, and is its trunk."""
    trees: list[tuple[Run, list[Stretch]]] = []
    for stretch in stretches:
        if stretch.context:
            trees[-1][1].append(stretch)
        else:
            trees.append(((stretch.start, stretch.end), []))
    return trees


def _branch_point(branch: Stretch, trunk: Run) -> int:
    """Return how many of the trunk's tokens a branch sees. The branches of a tree are sorted by this number."""
    # The first run of a branch's context lies in the trunk.
    first, last = branch.context[0]
    return min(last, trunk[1]) - first


def _group_by_branch_point(branches: list[Stretch], trunk: Run) -> list[list[Stretch]]:
    """Group branches whose branch points are close enough to share a block of queries."""
    spread = max(_MIN_SPREAD, int((trunk[1] - trunk[0]) * _SPREAD))
    groups: list[list[Stretch]] = []
    for branch in branches:
        if groups and _branch_point(branch, trunk) - _branch_point(groups[-1][0], trunk) <= spread:
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return groups


def _pack_branches(num_queries: list[int], key_runs: list[list[Run]], device: torch.device) -> _PackedBranches:
    rows = torch.cat([torch.arange(*run) for runs in key_runs for run in runs])
    num_keys = [sum(end - start for start, end in runs) for runs in key_runs]
    query_ends, key_ends = (torch.tensor([0, *counts]).cumsum(0).int().to(device) for counts in (num_queries, num_keys))
    return _PackedBranches(rows.to(device), _Lengths(query_ends, key_ends, max(num_queries), max(num_keys)))


def _row_ranges_after_prefix(branch: Stretch, prefix: Run) -> list[Run]:
    """Return the row ranges on a branch's path, its own included, that come after `prefix`.

    `prefix` is the part of the trunk that all branches of its group see.
    """
    runs = [(prefix[1], branch.context[0][1]), *branch.context[1:], (branch.start, branch.end)]
    return [run for run in runs if run[0] < run[1]]


def _merge_adjacent(runs: Iterable[Run]) -> list[Run]:
    """Merge each row range with the previous one if it begins where the previous one ends."""
    joined: list[Run] = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _path_tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: TokenTree, scale: float | None) -> Tensor:
    """Return the attention (1, heads, L, D), computed stretch by stretch from its queries and the keys on its path."""
    pieces = [
        _stretch_attention(query, key, value, start, end, context, scale) for start, end, context in tree.stretches
    ]
    covered = tree.stretches[-1].end
    return torch.cat([*pieces, _padding_attention(value[:, :, covered:], query.shape[1])], dim=2)


def _stretch_attention(
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
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes a second

    groups = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(groups, dim=1) for states in (keys, values))
    bias = causal_lower_right(end - start, keys.shape[2])
    return F.scaled_dot_product_attention(query[:, :, start:end], keys, values, attn_mask=bias, scale=scale)  # pyright: ignore[reportArgumentType]


def _padding_attention(value: Tensor, num_heads: int) -> Tensor:
    """Return the attention of padding tokens. Each of them sees only itself, so its output is its own value."""
    return value.repeat_interleave(num_heads // value.shape[1], dim=1)
