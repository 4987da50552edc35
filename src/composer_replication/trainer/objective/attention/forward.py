"""Compute the hidden rows of a whole token tree: in one masked pass where the model allows it, else flat.

A tree may run in one pass if every layer attends to the whole path, or to a window of it that no path exceeds, and if
nothing in the model depends on a token's slot (its index in the tree's layout). The config is checked first
(`passes.why_never`). Then an experiment on the tree itself decides (`try_tree`): once for a model and setting, and
again for every tree that is longer, or has a longer path, than any before. All other trees run flat, as their
sequences; the rows are the same, and the result says why (`flat_because`).

The experiment does not ask whether a tree's rows are close to those of its sequences, since a weak leak is close as
well. It asks what they depend on. There are four checks, and the first that fails decides:

    masks       every layer asks for attention, and with the mask that the model was given
    branches    other tokens in the branches beside a path leave the path's rows unchanged, bit for bit
    positions   other positions change the rows: a model that does not read them may count slots instead
    slots       rows of branches differ from those of their sequences no more than rows whose slots equal their
                positions (the trunk, and the end of the trunk run as a branch): the difference is rounding

Equality bit for bit is fair in any precision: the shapes, the mask and every other row are the same, so each product
adds up the same numbers in the same order. Mixtures of experts are the exception (`passes.same_rows_for_experts`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.batch.tree import Stretch, TokenTree
from composer_replication.batch.tree_batch import Tokens
from composer_replication.trainer.objective.attention.attend import Kind, usual_attention
from composer_replication.trainer.objective.attention.passes import (
    MaskedTree,
    check_positions,
    compute_dtype,
    masked,
    other_tokens,
    run_sequences,
    run_tree,
    same_bits,
    same_rows_for_experts,
    shortest_window,
    text_config,
    why_never,
)
from composer_replication.trainer.objective.distributed import agreed_most, evaluating, inside_forward
from composer_replication.trainer.objective.model_head import causal_lm_of, hidden_states

_REPLACEABLE = ("sdpa", "flash", "flex")
# A failure on shorter paths is not final: a few tokens say little.
_MIN_PATH_TO_FAIL = 16


class _HiddenRows(NamedTuple):
    """Last hidden states (L, H), one row per token; and the attention over the tree, or why it did not run as one."""

    hidden: Tensor
    kind: Kind | None = None
    flat_because: str | None = None

    @property
    def ran_as(self) -> str:
        """How the rows were computed, for logs and `LossComponents.ran_as`."""
        if self.kind is not None:
            return f"tree ({self.kind})"
        return "flat sequences" if self.flat_because is None else f"flat: {self.flat_because}"


class _Trial(NamedTuple):
    """The result of an experiment, and the largest tree and longest path that it was made with."""

    choice: _AttentionChoice
    length: int
    path: int
    has_checked_slots: bool  # which takes more than a few rows of branches


# By device, precision and usual attention. Weak, so that a model can be freed.
_trials: WeakKeyDictionary[nn.Module, dict[str, _Trial]] = WeakKeyDictionary()


def hidden_rows(model: nn.Module, tokens: Tokens) -> _HiddenRows:
    """Return the rows of a tree's tokens; or of padded sequences, one sequence after the other."""
    if isinstance(tokens, TokenTree):
        return tree_hidden_states(model, tokens)
    return _HiddenRows(hidden_states(model, tokens.input_ids, tokens.attention_mask).flatten(0, 1))


def tree_hidden_states(model: nn.Module, tree: TokenTree) -> _HiddenRows:
    """Return the rows of all tokens, equal to those of the flat sequences up to rounding."""
    body = causal_lm_of(model)

    def work() -> _HiddenRows:
        kind, why, _ = _choose_attention(model, tree)
        hidden = run_sequences(model, tree) if kind is None else run_tree(body, masked(body, tree, kind))
        return _HiddenRows(hidden, kind, why)

    return inside_forward(model, body, work)


def why_flat(model: nn.Module, tree: TokenTree) -> str | None:
    """Return why this tree cannot go through this model in one pass; None if it can."""
    return inside_forward(model, causal_lm_of(model), lambda: _choose_attention(model, tree)).flat_because


def _choose_attention(model: nn.Module, tree: TokenTree) -> _AttentionChoice:
    body = causal_lm_of(model)
    check_positions(body.config, tree.longest_path)
    never = why_never(body.config)
    if never is not None:
        return _AttentionChoice(None, never)
    if dropout_on(body) and not body.config._attn_implementation.endswith("eager") and tree.input_ids.is_cuda:
        return _AttentionChoice(None, "attention dropout is on, which no attention over trees has on this device")
    # Processes that share the weights must make the same choice, or they wait for each other forever.
    branches = len(tree.stretches) - 1
    length, path, branches = agreed_most([model], [len(tree) if branches else 0, tree.longest_path, branches])
    if not branches:
        return _AttentionChoice(None, "one sequence, without branches")
    too_long = _too_long(tree, path, shortest_window(body.config))
    if too_long is not None:
        return _AttentionChoice(None, too_long)
    choice = _cached_trial(model, body, tree, length, path)
    too_long = _too_long(tree, path, choice.window)
    return choice if too_long is None else _AttentionChoice(None, too_long)


def _too_long(tree: TokenTree, path: int, window: int | None) -> str | None:
    if window is None or path <= window:
        return None
    if tree.longest_path <= window:
        return f"another process has a path longer than the sliding window of {window}"
    return f"a path of {tree.longest_path} tokens is longer than the sliding window of {window}"


def _cached_trial(model: nn.Module, body: Any, tree: TokenTree, length: int, path: int) -> _AttentionChoice:
    """Return the choice made on a tree at least as large as this one; a model that failed once is not tried again."""
    trials = _trials.setdefault(body, {})
    device = tree.input_ids.device
    setting = f"{device} {compute_dtype(body)} {usual_attention(body)}"
    before = trials.get(setting)
    if before is not None:
        fits = length <= before.length and path <= before.path
        too_long = _too_long(tree, path, before.choice.window)
        # The earlier tree had too few rows of branches to check slots, and this one has enough: run it again.
        if fits and before.choice.kind is not None and not before.has_checked_slots:
            fits = not _can_check_slots(model, tree)
        if fits or too_long is not None or before.choice.kind is None:
            return before.choice
        length, path = max(length, before.length), max(path, before.path)
    choice = try_tree(model, tree, _kinds(body, device), path)
    # Another tree may fit into the window, and on a few tokens in half precision rounding can fail a good model.
    is_final = path >= _MIN_PATH_TO_FAIL and _too_long(tree, path, choice.window) is None
    if choice.kind is not None or is_final:
        trials[setting] = _Trial(choice, length, path, _can_check_slots(model, tree))
    return choice


def _can_check_slots(model: nn.Module, tree: TokenTree) -> bool:
    """Return whether the branches that run alone have enough rows, on any process, to tell slots from rounding."""
    return agreed_most([model], [_num_branch_rows(tree)])[0] >= ENOUGH_ROWS


def dropout_on(body: nn.Module) -> bool:
    """Return whether attention dropout is active in any module."""
    return any(module.training and getattr(module, "attention_dropout", 0.0) for module in body.modules())


def _kinds(body: Any, device: torch.device) -> tuple[Kind, ...]:
    """Return the kinds of attention to try, best first; only a known attention can be replaced by one of ours."""
    if not any(name in usual_attention(body) for name in _REPLACEABLE):
        return ("dense",)
    if device.type != "cuda":
        return ("dense", "paths")
    half = compute_dtype(body) in (torch.float16, torch.bfloat16)
    return ("flash", "flex", "paths") if half else ("flex", "paths")


# What models raise that were not written for such a mask. NotImplementedError is a RuntimeError.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
# How many branches run alone beside the trunk: a fixed number, so that all processes make the same number of passes.
_BRANCHES = 2
# A branch may differ from its sequence by this many times the rounding of the trunk.
_MAX_TRUNK_ROUNDINGS = 4.0
# In half precision a token between two experts may be routed to either; fewer rows than this would say nothing.
ENOUGH_ROWS = 16


class _AttentionChoice(NamedTuple):
    """The attention that the tree may run with, or why none; and the shortest window that a layer asked for."""

    kind: Kind | None
    flat_because: str | None
    window: int | None = None


class _LoneSequence(NamedTuple):
    """The rows of the tree that a sequence has, and their hidden states when it runs alone."""

    sequence: Tensor
    rows: Tensor


class _Pass(NamedTuple):
    """A pass over the tree, what its layers did, and the sequences to compare it with."""

    kind: Kind
    masked_tree: MaskedTree
    rows: Tensor
    trace: _LayerTrace
    alone: list[_LoneSequence]


def try_tree(model: nn.Module, tree: TokenTree, kinds: Sequence[Kind], longest: int) -> _AttentionChoice:
    """Return the first kind with which this tree's rows depend only on their paths; in eval mode and the model's dtype.

    A layer may ask for a window that the config does not mention. If it is shorter than the longest path of all
    processes, the choice has the window, but neither a kind nor a reason: shorter trees may fit.
    """
    body = causal_lm_of(model)
    usual, reasons = body.config._attn_implementation, list[str]()
    with torch.no_grad(), evaluating(model):
        try:  # before anything about the model is changed: every kind has to reproduce these rows
            alone = [
                _LoneSequence(sequence, _flat_rows(model, tree, sequence)) for sequence in _trunk_and_branches(tree)
            ]
        except torch.OutOfMemoryError:  # a RuntimeError, but it says nothing about the model
            raise
        except _REFUSALS as error:
            return _AttentionChoice(None, f"even a plain sequence fails: {type(error).__name__}: {error}"[:200])
        for kind in kinds:
            try:
                masked_tree = masked(body, tree, kind)
                with _watched_attention(body, masked_tree.mask) as trace:
                    rows = run_tree(body, masked_tree)
            except torch.OutOfMemoryError:
                raise
            except _REFUSALS as error:
                reasons.append(f"{kind}: {type(error).__name__}: {error}"[:200])
                continue
            window = min(trace.windows, default=None)
            if window is not None and longest > window:
                return _AttentionChoice(None, None, window)
            reason = _first_objection(model, body, _Pass(kind, masked_tree, rows, trace, alone))
            if reason is None:
                return _AttentionChoice(kind, None, window)
            reasons.append(f"{kind}: {reason}")
    if body.config._attn_implementation != usual:
        body.set_attn_implementation(usual)  # some models branch on the name of their attention
    return _AttentionChoice(None, "the model does not accept a tree's mask; " + "; ".join(reasons))


def _first_objection(model: nn.Module, body: Any, ran: _Pass) -> str | None:
    """Return why the first failing check fails, or None; processes that share the weights stop at the same one."""
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _other_masks(body, ran.trace),
        lambda: _leaks(model, body, ran.masked_tree, ran.rows),
        lambda: _ignores_positions(body, ran.masked_tree, ran.rows),
        lambda: _counts_slots(model, body, ran),
    )
    for check in checks:
        reason = check()
        (anywhere,) = agreed_most([model], [int(reason is not None)])
        if anywhere:
            return reason or "the check failed on another process"
    return None


def _other_masks(body: Any, record: _LayerTrace) -> str | None:
    """Check "masks"."""
    layers = getattr(text_config(body.config), "num_hidden_layers", 1)
    if record.changed_masks:
        return f"{', '.join(sorted(record.changed_masks))} changes the mask it is given"
    if record.extras:
        return f"its attention uses more than a mask: {', '.join(sorted(record.extras))}"
    if len(record.layers) < layers:
        return f"only {len(record.layers)} of {layers} layers attend with the mask; the rest cannot be checked"
    return None


def _leaks(model: nn.Module, body: Any, masked_tree: MaskedTree, rows: Tensor) -> str | None:
    """Check "branches": change the tokens beside the paths of every second branch, and compare the paths' rows."""
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
        return "two identical passes differ, so its branches cannot be checked"
    gap = float((before[is_kept].float() - after[is_kept].float()).abs().max())
    return f"other tokens in a branch change {int(changed.sum())} of {len(changed)} rows beside it, by up to {gap:.1e}"


def _ignores_positions(body: Any, masked_tree: MaskedTree, rows: Tensor) -> str | None:
    """Check "positions" by counting them backwards, which stays within what any model has positions for."""
    tree = masked_tree.tree
    changed = run_tree(body, masked_tree, position_ids=(tree.longest_path - 1 - tree.position_ids).clamp_min(0))
    if not torch.equal(rows, changed):
        return None
    # On a path that repeats one token, positions make no difference to any model.
    has_order = any(bool((tree.input_ids[path] != tree.input_ids[path[0]]).any()) for path in tree.rows)
    return "it ignores the positions it is given" if has_order else None


def _counts_slots(model: nn.Module, body: Any, ran: _Pass) -> str | None:
    """Check "slots"."""
    (trunk, *branches), rows = ran.alone, ran.rows
    noise = _median_gap(trunk, rows, 0)
    gaps = [_median_gap(branch, rows, _shared(trunk.sequence, branch.sequence)) for branch in branches]
    half = compute_dtype(body) in (torch.float16, torch.bfloat16)
    if half and _num_branch_rows(ran.masked_tree.tree) < ENOUGH_ROWS:
        return None
    if noise > (0.1 if half else 1e-3):
        return f"rows of the trunk differ from those of its sequence by {noise:.1e} of their norm"
    # A norm inside the model may compute in single precision whatever the weights' dtype is, hence at least 16 of its
    # roundings; in half precision the floor is one rounding.
    floor = torch.finfo(compute_dtype(body)).eps / 2 if half else 16 * torch.finfo(torch.float32).eps
    worst = max(gaps)
    # A trunk may run with the same kernel as a sequence, without any difference, while branches have another kernel.
    (unclear,) = agreed_most([model], [int(worst > _MAX_TRUNK_ROUNDINGS * max(noise, floor))])
    noise = max(noise, _noise_of_branches(body, ran, trunk)) if unclear else noise
    if worst <= _MAX_TRUNK_ROUNDINGS * max(noise, floor):
        return None
    return (
        f"rows of a branch differ from those of its sequence by {worst:.1e} of their norm, of the trunk by {noise:.1e}"
    )


def _num_branch_rows(tree: TokenTree) -> int:
    """Return how many rows of the branches that run alone are not shared with the trunk."""
    trunk, *branches = _trunk_and_branches(tree)
    return sum(branch.numel() - _shared(trunk, branch) for branch in branches)


def _noise_of_branches(body: Any, ran: _Pass, trunk: _LoneSequence) -> float:
    """Return the gap of the end of the trunk when it runs as a branch in its own slots: the rounding of the kernels."""
    length = trunk.sequence.numel()
    cut = length - max(1, length // 8)
    index = torch.arange(length, device=trunk.sequence.device)
    is_end = (index >= cut).long()
    stretches = (Stretch(0, cut, ()), Stretch(cut, length, ((0, cut),)))
    ids = ran.masked_tree.tree.input_ids[trunk.sequence]
    chain = TokenTree(ids, index, is_end, torch.full_like(is_end, 2), (index,), stretches)
    rows = run_tree(body, masked(body, chain, ran.kind))
    return _median_gap(_LoneSequence(index, trunk.rows), rows, cut)


def _flat_rows(model: nn.Module, tree: TokenTree, sequence: Tensor) -> Tensor:
    return hidden_states(model, tree.input_ids[sequence][None], None)[0].float()


def _median_gap(alone: _LoneSequence, rows: Tensor, skip: int) -> float:
    """Return the median relative difference between tree and sequence, over all rows after the first `skip`."""
    got = rows[alone.sequence].float()
    gaps = (got - alone.rows).norm(dim=-1) / alone.rows.norm(dim=-1).clamp_min(1e-12)
    return float(gaps[skip:].median()) if skip < gaps.numel() else 0.0


def _shared(trunk: Tensor, sequence: Tensor) -> int:
    """Return how many rows a sequence shares with the trunk; they are its first ones."""
    count = min(trunk.numel(), sequence.numel())
    return int((trunk[:count] == sequence[:count]).sum())


def _trunk_and_branches(tree: TokenTree) -> list[Tensor]:
    """Return the trunk, whose slots are its positions, and `_BRANCHES` sequences whose slots differ most from them."""
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
    """Return a mask of the rows on paths that end in every second stretch, beginning with the one after the trunk."""
    is_kept = torch.zeros(len(tree), dtype=torch.bool, device=tree.input_ids.device)
    starts = torch.tensor([tree_stretch.start for tree_stretch in tree.stretches])
    for rows in tree.rows:
        stretch = int(torch.searchsorted(starts, int(rows[-1]), right=True)) - 1
        if stretch % 2:
            is_kept[rows] = True
    return is_kept


# The name of the attention function in the file of every transformers model.
_EAGER = "eager_attention_forward"
# Tensors that layers may pass to their attention. Positions are ours; sinks (`s_aux`) are one more column of each row,
# and `check_options` refuses them where they are not implemented.
_HARMLESS = {"attention_mask", "position_ids", "cache_position", "s_aux"}


@dataclass
class _LayerTrace:
    """What the layers of a model did in one pass.

    A layer that passes the tree's mask on unchanged sees exactly a token's path. A layer that changes it (sparse
    selection, a window of its own), or that does not call the model's attention function, cannot be checked.
    """

    mask: Any
    layers: set[int] = field(default_factory=set[int])
    """Attention modules that called the attention function, by identity."""
    changed_masks: set[str] = field(default_factory=set[str])
    """Classes of those that passed another mask than the one given to the model."""
    windows: set[int] = field(default_factory=set[int])
    extras: set[str] = field(default_factory=set[str])
    """Names of other tensors that they passed: a selection of keys, say, which a special kernel would use."""

    def note(self, module: nn.Module, mask: Any, options: dict[str, Any]) -> None:
        self.layers.add(id(module))
        if not _same_mask(mask, self.mask):
            self.changed_masks.add(type(module).__name__)
        self.extras |= {name for name, value in options.items() if isinstance(value, Tensor) and name not in _HARMLESS}
        window = options.get("sliding_window")
        if isinstance(window, int):
            self.windows.add(window)


@contextmanager
def _watched_attention(body: nn.Module, mask: Any) -> Iterator[_LayerTrace]:
    """Yield a record of every attention that a layer of this model computes inside the block."""
    record = _LayerTrace(mask)
    inside = {id(module) for module in body.modules()}

    def watching(usual: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: Any, *args: Any, **options: Any) -> Any:
            if id(module) in inside:  # args: queries, keys, values, and the mask if it is passed by position
                record.note(module, args[3] if len(args) > 3 else options.get("attention_mask"), options)
            return usual(module, *args, **options)

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
    if usual is None:  # eager: a function in the model's own file
        return
    AttentionInterface.register(name, watching(usual))
    after.callback(AttentionInterface.register, name, usual)


def _namespaces(body: nn.Module) -> list[dict[str, Any]]:
    """Return the globals of the files of these modules that have an attention function of their own."""
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
    """Return where a mask lets a row see a column: True, or nothing added to the score."""
    return mask if mask.dtype == torch.bool else mask == 0
