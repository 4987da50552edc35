"""Attention over a token tree with flash kernels: the trunk as usual, the branches on the trunk's keys and values.

A branch's queries see the trunk up to where it turns off, and then their own past. Branches that turn off near each
other are one block of queries against the part of the trunk that they all see; what is left of the trunk for each of
them, and the branches' own tokens, are a second, causal part. Both are softmaxes over different keys of the same
query, so they merge by their log-sum-exp, and with the merged output and log-sum-exp each kernel's own backward gives
its part of the gradients exactly. There is nothing to compile, so session lengths may vary from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_replication.batch.tree import Run, Stretch, TokenTree
from composer_replication.objective.attention.paths import padding_attention

# Branches are read together while they turn off within this part of the trunk; the rest of it is read for each alone.
_SPREAD = 1 / 8
_MIN_SPREAD = 512
# The usual kernel may plan anew for every length; a trunk is padded to a multiple of this.
_TRUNK_STEP = 1024
# Many branches add to the same keys: in half precision the sums would lose what the kernels computed.
_SUMS = torch.float32


class Lengths(NamedTuple):
    """Where each sequence of packed queries and keys ends, and the longest of both."""

    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int


class _Part(NamedTuple):
    """All branch queries in order, cut into sequences; for each the rows of its keys, packed."""

    key_rows: Tensor
    lengths: Lengths


class _Branches(NamedTuple):
    runs: tuple[Run, ...]
    """Rows of the tree that are branches, in order; joined, they are the queries of both parts."""
    trunk_part: _Part
    own_part: _Part


@dataclass(frozen=True, eq=False)
class BranchPlan:
    """Which kernels read what."""

    trunks: tuple[Run, ...]
    branches: _Branches | None
    num_rows: int


def plan_branches(tree: TokenTree) -> BranchPlan:
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
        return BranchPlan(tuple(trunks), None, len(tree))
    sizes = [sum(branch.end - branch.start for branch in group) for group in groups]
    trunk_part = _part(sizes, [[prefix] for prefix in prefixes], device)
    every = [(branch, prefix) for group, prefix in zip(groups, prefixes, strict=True) for branch in group]
    own_keys = [_behind(branch, prefix) for branch, prefix in every]
    own_part = _part([branch.end - branch.start for branch, _ in every], own_keys, device)
    runs = _joined((branch.start, branch.end) for branch, _ in every)
    return BranchPlan(tuple(trunks), _Branches(tuple(runs), trunk_part, own_part), len(tree))


def flash_tree_attention(query: Tensor, key: Tensor, value: Tensor, plan: BranchPlan, scale: float | None) -> Tensor:
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
        pieces[covered] = padding_attention(value[:, :, covered:], query.shape[1]).transpose(1, 2)
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


def _parts(plan: _Branches) -> tuple[tuple[_Part, bool], tuple[_Part, bool]]:
    """Each with whether it is causal."""
    return (plan.own_part, True), (plan.trunk_part, False)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, is_causal: bool, scale: float
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
    lengths: Lengths,
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


def _part(num_queries: list[int], key_runs: list[list[Run]], device: torch.device) -> _Part:
    rows = torch.cat([torch.arange(*run) for runs in key_runs for run in runs])
    num_keys = [sum(end - start for start, end in runs) for runs in key_runs]
    query_ends, key_ends = (torch.tensor([0, *counts]).cumsum(0).int().to(device) for counts in (num_queries, num_keys))
    return _Part(rows.to(device), Lengths(query_ends, key_ends, max(num_queries), max(num_keys)))


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
