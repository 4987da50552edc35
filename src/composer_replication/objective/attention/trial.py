"""Whether a model may run a tree in one pass: found out on that very tree, at its own size.

The question is not whether a tree's rows are near to those of its sequences (a weak leak is near, too), but what they
depend on. Four things are looked at, and the first that fails decides:

    masks       every layer asks for attention, and with the mask that the model was given
    branches    other tokens in the branches beside a path leave the path's rows as they are, bit for bit
    positions   other positions change the rows: a model that does not read them may count slots instead
    slots       rows of branches differ from those of their sequences no more than rows do whose slots are their
                positions (the trunk, and the end of the trunk run as a branch): what is left is the rounding of kernels

Bit for bit is fair in any precision: the shapes, the mask and every other row are the same, so each product adds up
the same numbers in the same order. (Mixtures of experts are the exception: `attention.causality`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.tree import Stretch, TokenTree
from composer_replication.objective.adapters import evaluating
from composer_replication.objective.attention.attend import Kind
from composer_replication.objective.attention.causality import other_tokens, same_bits, same_rows_for_experts
from composer_replication.objective.attention.passes import MaskedTree, compute_dtype, masked, run_tree
from composer_replication.objective.attention.rules import text_config
from composer_replication.objective.attention.watch import Seen, watched_attention
from composer_replication.objective.distributed import agreed_most
from composer_replication.objective.model_head import causal_lm_of, hidden_states

# What models raise that were not written for such a mask; that it is not implemented is one of them.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
# How many branches are run by themselves beside the trunk: a fixed number, so that all processes make as many passes.
_BRANCHES = 2
_TIMES_TRUNK = 4.0
# In half precision a token on the edge of two experts goes either way; so few rows would say nothing.
ENOUGH_ROWS = 16


class Verdict(NamedTuple):
    """By which attention the tree may run, or why not at all; and the shortest window that a layer asked for."""

    kind: Kind | None
    flat_because: str | None
    window: int | None = None


class _Alone(NamedTuple):
    """Which rows of the tree a sequence has, and their hidden states when it is run by itself."""

    sequence: Tensor
    rows: Tensor


class _Pass(NamedTuple):
    """A pass over the tree, and what it is held against."""

    kind: Kind
    given: MaskedTree
    rows: Tensor
    seen: Seen
    alone: list[_Alone]


def try_tree(model: nn.Module, tree: TokenTree, kinds: Sequence[Kind], longest: int) -> Verdict:
    """The first kind by which this tree's rows depend on their paths alone; in eval mode and the model's dtype.

    A layer may ask for a window that the config does not tell of. If it is shorter than the longest path of all
    processes, it comes back without a kind and without a reason: shorter trees may fit.
    """
    body = causal_lm_of(model)
    usual, reasons = body.config._attn_implementation, list[str]()
    with torch.no_grad(), evaluating(model):
        try:  # before anything is changed about the model: these are what every kind has to come up to
            alone = [_Alone(sequence, _flat_rows(model, tree, sequence)) for sequence in _trunk_and_branches(tree)]
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            return Verdict(None, f"even a plain sequence fails: {type(error).__name__}: {error}"[:200])
        for kind in kinds:
            try:
                masked_tree = masked(body, tree, kind)
                with watched_attention(body, masked_tree.mask) as seen:
                    rows = run_tree(body, masked_tree)
            except torch.OutOfMemoryError:  # says nothing about the model
                raise
            except _REFUSALS as error:
                reasons.append(f"{kind}: {type(error).__name__}: {error}"[:200])
                continue
            window = min(seen.windows, default=None)
            if window is not None and longest > window:
                return Verdict(None, None, window)
            reason = _first_objection(model, body, _Pass(kind, masked_tree, rows, seen, alone))
            if reason is None:
                return Verdict(kind, None, window)
            reasons.append(f"{kind}: {reason}")
    if body.config._attn_implementation != usual:
        body.set_attn_implementation(usual)  # some models look at the name of their attention
    return Verdict(None, "the model takes no tree's mask; " + "; ".join(reasons))


def _first_objection(model: nn.Module, body: Any, ran: _Pass) -> str | None:
    """The checks in order; processes that share the weights stop at the same one."""
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _other_masks(body, ran.seen),
        lambda: _leaks(model, body, ran.given, ran.rows),
        lambda: _ignores_positions(body, ran.given, ran.rows),
        lambda: _counts_slots(model, body, ran),
    )
    for check in checks:
        reason = check()
        (anywhere,) = agreed_most([model], [int(reason is not None)])
        if anywhere:
            return reason or "another process found that its tree cannot"
    return None


def _other_masks(body: Any, record: Seen) -> str | None:
    layers = getattr(text_config(body.config), "num_hidden_layers", 1)
    if record.changed_masks:
        return f"{', '.join(sorted(record.changed_masks))} attends by another mask than the one it is given"
    if record.extras:
        return f"its attention is told more than a mask: {', '.join(sorted(record.extras))}"
    if len(record.layers) < layers:
        attending = f"of {layers} layers {len(record.layers)} attend by the mask they are given"
        return f"{attending}; the others cannot be looked into"
    return None


def _leaks(model: nn.Module, body: Any, masked_tree: MaskedTree, rows: Tensor) -> str | None:
    """Other tokens beside the paths of every second branch: do rows of those paths change?"""
    is_kept = _every_second_path(masked_tree.tree)
    ids = torch.where(is_kept, masked_tree.tree.input_ids, other_tokens(masked_tree.tree.input_ids, body))
    with same_rows_for_experts(body, is_kept) as has_experts:
        before = run_tree(body, masked_tree) if has_experts else rows
        after = run_tree(body, masked_tree, input_ids=ids)
        is_kept = is_kept[: masked_tree.length]
        changed = ~same_bits(before[is_kept], after[is_kept])
        (anywhere,) = agreed_most([model], [int(changed.any())])
        again = run_tree(body, masked_tree) if anywhere else before
    if not bool(changed.any()):
        return None
    if not bool(same_bits(before, again).all()):
        return "two equal passes differ, so that nothing can be shown about branches"
    gap = float((before[is_kept].float() - after[is_kept].float()).abs().max())
    return (
        f"other tokens in one branch change {int(changed.sum())} of {len(changed)} rows of others, by up to {gap:.1e}"
    )


def _ignores_positions(body: Any, masked_tree: MaskedTree, rows: Tensor) -> str | None:
    """Counted backwards, which stays within what any model has positions for."""
    tree = masked_tree.tree
    changed = run_tree(body, masked_tree, position_ids=(tree.longest_path - 1 - tree.position_ids).clamp_min(0))
    if not torch.equal(rows, changed):
        return None
    # On a path of one token over and over, the order of what is seen makes no difference to any model.
    tells = any(bool((tree.input_ids[path] != tree.input_ids[path[0]]).any()) for path in tree.rows)
    return "it does not read the positions it is given" if tells else None


def _counts_slots(model: nn.Module, body: Any, ran: _Pass) -> str | None:
    (trunk, *branches), rows = ran.alone, ran.rows
    noise = _usual_gap(trunk, rows, 0)
    gaps = [_usual_gap(branch, rows, _shared(trunk.sequence, branch.sequence)) for branch in branches]
    half = compute_dtype(body) in (torch.float16, torch.bfloat16)
    if half and rows_that_tell(ran.given.tree) < ENOUGH_ROWS:
        return None
    if noise > (0.1 if half else 1e-3):
        return f"rows of the trunk itself differ from those of its sequence by {noise:.1e} of their size"
    # A norm inside may round to single precision whatever the weights are; half precision is one rounding of a row.
    floor = torch.finfo(compute_dtype(body)).eps / 2 if half else 16 * torch.finfo(torch.float32).eps
    worst = max(gaps)
    # A trunk may run by the very kernel of a sequence and differ by nothing, where branches have one of their own.
    (unclear,) = agreed_most([model], [int(worst > _TIMES_TRUNK * max(noise, floor))])
    noise = max(noise, _noise_of_branches(body, ran, trunk)) if unclear else noise
    if worst <= _TIMES_TRUNK * max(noise, floor):
        return None
    return (
        f"rows of a branch differ from those of its sequence by {worst:.1e} of their size, of the trunk by {noise:.1e}"
    )


def rows_that_tell(tree: TokenTree) -> int:
    """Rows that the branches which are run by themselves do not share with the trunk."""
    trunk, *branches = _trunk_and_branches(tree)
    return sum(branch.numel() - _shared(trunk, branch) for branch in branches)


def _noise_of_branches(body: Any, ran: _Pass, trunk: _Alone) -> float:
    """The end of the trunk, run as a branch that lies where it would by itself: its gap is the kernels' rounding."""
    length = trunk.sequence.numel()
    cut = length - max(1, length // 8)
    index = torch.arange(length, device=trunk.sequence.device)
    is_end = (index >= cut).long()
    stretches = (Stretch(0, cut, ()), Stretch(cut, length, ((0, cut),)))
    ids = ran.given.tree.input_ids[trunk.sequence]
    chain = TokenTree(ids, index, is_end, torch.full_like(is_end, 2), (index,), stretches)
    rows = run_tree(body, masked(body, chain, ran.kind))
    return _usual_gap(_Alone(index, trunk.rows), rows, cut)


def _flat_rows(model: nn.Module, tree: TokenTree, sequence: Tensor) -> Tensor:
    return hidden_states(model, tree.input_ids[sequence][None], None)[0].float()


def _usual_gap(alone: _Alone, rows: Tensor, skip: int) -> float:
    """The median over the rows of a sequence behind the first few: tree against sequence, in parts of a row's size."""
    got = rows[alone.sequence].float()
    gaps = (got - alone.rows).norm(dim=-1) / alone.rows.norm(dim=-1).clamp_min(1e-12)
    return float(gaps[skip:].median()) if skip < gaps.numel() else 0.0


def _shared(trunk: Tensor, sequence: Tensor) -> int:
    """How many rows a sequence has in common with the trunk: all of them before its others."""
    count = min(trunk.numel(), sequence.numel())
    return int((trunk[:count] == sequence[:count]).sum())


def _trunk_and_branches(tree: TokenTree) -> list[Tensor]:
    """The sequence whose slots are its positions, and those of which most does not lie where it would by itself."""
    first = tree.stretches[0]
    trunk = next(
        sequence for sequence in tree.rows if sequence.numel() == first.end and int(sequence[-1]) == first.end - 1
    )
    branches = sorted(
        (sequence for sequence in tree.rows if int(sequence[-1]) >= first.end), key=lambda sequence: -int(sequence[-1])
    )
    middle = branches[len(branches) // 2 :][:1]
    chosen = [*branches[:1], *middle]
    return [trunk, *chosen, *[trunk] * (_BRANCHES - len(chosen))]


def _every_second_path(tree: TokenTree) -> Tensor:
    """Rows on the paths that end in every second stretch, beginning with the one behind the trunk."""
    is_kept = torch.zeros(len(tree), dtype=torch.bool, device=tree.input_ids.device)
    starts = torch.tensor([tree_stretch.start for tree_stretch in tree.stretches])
    for rows in tree.rows:
        stretch = int(torch.searchsorted(starts, int(rows[-1]), right=True)) - 1
        if stretch % 2:
            is_kept[rows] = True
    return is_kept
