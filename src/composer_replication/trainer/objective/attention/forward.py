"""Compute the hidden states of a token tree: in one masked pass where the model allows it, else as flat sequences.

A tree may run in one pass if every layer attends to the whole path, or to a window of it that no path exceeds, and if
nothing in the model depends on a token's slot (its index in the tree's layout). The config is checked first
(`why_no_tree`). Then an experiment on the tree itself decides (`_try_tree`). It runs once per model and setting, and
again for every tree that is longer, or has a longer path, than all trees before. All other trees run as flat sequences,
with the same hidden states, and the result gives the reason (`flat_because`).

The experiment does not measure how close a tree's hidden states are to those of its sequences, because a weak leak
changes them only slightly. It tests what they depend on, in four checks, of which the first that fails decides:

    masks       every layer calls the attention function, with the mask that the model was given
    branches    changing tokens in the branches beside a path leaves the path's hidden states bitwise identical
    positions   changing positions changes the hidden states: a model that ignores them may count slots instead
    slots       hidden states of branches differ from those of their sequences no more than hidden states whose slots
                equal their positions (the trunk, and the end of the trunk run as a branch): that is rounding

Bitwise comparison is valid in any precision: the shapes, the mask and all other rows are the same, so each product
adds up the same numbers in the same order. Mixtures of experts are the exception (`equal_inputs_for_experts`).
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
from torch.nn.utils.rnn import pad_sequence

from composer_replication.batch.tree import Stretch, TokenTree
from composer_replication.batch.tree_batch import Tokens
from composer_replication.batch.windows import padded_length
from composer_replication.errors import UnsupportedModelError, explain
from composer_replication.trainer.objective.attention.attend import Kind, tree_mask, use_tree_attention, usual_attention
from composer_replication.trainer.objective.attention.model_checks import (
    bitwise_equal_rows,
    check_causal,
    compute_dtype,
    equal_inputs_for_experts,
    max_invariant_length,
    replace_tokens,
    shortest_window,
    text_config,
    why_no_tree,
)
from composer_replication.trainer.objective.distributed import eval_mode, inside_forward, max_over_shards
from composer_replication.trainer.objective.model_head import get_body, get_causal_lm, hidden_states

_REPLACEABLE = ("sdpa", "flash", "flex")
# A failure on shorter paths is not final, since a few tokens prove little.
_MIN_PATH_TO_FAIL = 16


class _HiddenStates(NamedTuple):
    """The last hidden states (L, H), one row per token, and how they were computed.

    `kind` is the kind of tree attention. `flat_because` is the reason why a tree ran as flat sequences.
    """

    hidden: Tensor
    kind: Kind | None = None
    flat_because: str | None = None

    @property
    def ran_as(self) -> str:
        """A description of how the hidden states were computed, for logs and `LossComponents.ran_as`."""
        if self.kind is not None:
            return f"tree ({self.kind})"
        return "flat sequences" if self.flat_because is None else f"flat: {self.flat_because}"


class _Trial(NamedTuple):
    """The result of an experiment, with the largest tree size and the longest path for which it is valid."""

    choice: _AttentionChoice
    length: int
    path: int
    has_checked_slots: bool  # the slots check needs more than a few branch rows


# Keyed by device, precision and usual attention. Weak references, so that a model can be freed.
_trials: WeakKeyDictionary[nn.Module, dict[str, _Trial]] = WeakKeyDictionary()


def token_hidden_states(model: nn.Module, tokens: Tokens) -> _HiddenStates:
    """Return the hidden states of a tree's tokens, or of all tokens of padded sequences, concatenated."""
    if isinstance(tokens, TokenTree):
        return tree_hidden_states(model, tokens)
    return _HiddenStates(hidden_states(model, tokens.input_ids, tokens.attention_mask).flatten(0, 1))


def tree_hidden_states(model: nn.Module, tree: TokenTree) -> _HiddenStates:
    """Return the hidden states of all tokens, equal to those of the flat sequences up to rounding."""
    body = get_causal_lm(model)

    def work() -> _HiddenStates:
        kind, why, _ = _choose_attention(model, tree)
        hidden = _run_sequences(model, tree) if kind is None else _run_tree(body, _mask_tree(body, tree, kind))
        return _HiddenStates(hidden, kind, why)

    return inside_forward(model, body, work)


def _why_flat(model: nn.Module, tree: TokenTree) -> str | None:
    """Return the reason why this tree cannot run through this model in one pass, or None if it can."""
    return inside_forward(model, get_causal_lm(model), lambda: _choose_attention(model, tree)).flat_because


def _run_sequences(model: nn.Module, tree: TokenTree) -> Tensor:
    """Return the hidden states (L, H) from one padded batch; shared rows are taken from the longest sequence."""
    if max_over_shards([model], [len(tree.rows)]) != [1]:  # a single sequence has nothing to share
        check_causal(model, tree.input_ids[max(tree.rows, key=len)])
    is_taken = torch.zeros(len(tree), dtype=torch.bool, device=tree.input_ids.device)
    sequences: list[Tensor] = []
    is_new: list[Tensor] = []
    for rows in sorted(tree.rows, key=lambda rows: -rows.numel()):
        if not bool(is_taken[rows].all()):
            sequences.append(rows)
            is_new.append(~is_taken[rows])
            is_taken[rows] = True
    ids_BT = pad_sequence([tree.input_ids[rows] for rows in sequences], batch_first=True)
    new_BT = pad_sequence(is_new, batch_first=True)
    hidden = hidden_states(model, ids_BT, None)[new_BT]
    rows_of = torch.cat([rows[new] for rows, new in zip(sequences, is_new, strict=True)])
    return hidden.new_zeros(len(tree), hidden.shape[-1]).index_copy(0, rows_of, hidden)


def _run_tree(
    body: Any, masked_tree: _MaskedTree, *, input_ids: Tensor | None = None, position_ids: Tensor | None = None
) -> Tensor:
    """Return the hidden states (L, H) from one pass. Experiments replace the tree's tokens or positions."""
    ids = masked_tree.tree.input_ids if input_ids is None else input_ids
    positions = masked_tree.tree.position_ids if position_ids is None else position_ids
    output = get_body(body)(
        input_ids=ids[None], position_ids=positions[None], attention_mask=masked_tree.mask, use_cache=False
    )
    return output.last_hidden_state[0, : masked_tree.length]


def _mask_tree(body: Any, tree: TokenTree, kind: Kind) -> _MaskedTree:
    """Return the tree with its mask for this kind of attention, and prepare the model for it."""
    length = len(tree)
    if kind == "dense":
        return _MaskedTree(tree, _dense_mask(body, tree), length)
    # FlexAttention is compiled for each length; padding leaves only a few different lengths.
    padded = tree.padded(padded_length(length)) if kind == "flex" else tree
    use_tree_attention(body)
    return _MaskedTree(padded, tree_mask(padded, kind), length)


class _MaskedTree(NamedTuple):
    """A tree with the mask for one kind of attention; rows from `length` on are padding."""

    tree: TokenTree
    mask: Any
    length: int


def _dense_mask(body: Any, tree: TokenTree) -> Tensor:
    """Return the (1, 1, L, L) mask: boolean, or additive for eager attention."""
    sees = tree.dense_mask()[None, None]
    if not body.config._attn_implementation.endswith("eager"):
        return sees
    dtype = compute_dtype(body)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)


def _choose_attention(model: nn.Module, tree: TokenTree) -> _AttentionChoice:
    body = get_causal_lm(model)
    _check_positions(body.config, tree.longest_path)
    never = why_no_tree(body.config)
    if never is not None:
        return _AttentionChoice(None, never)
    if (
        has_attention_dropout(body)
        and not body.config._attn_implementation.endswith("eager")
        and tree.input_ids.is_cuda
    ):
        return _AttentionChoice(None, "attention dropout is on, which no attention over trees has on this device")
    # Processes that share weights must make the same choice; otherwise they wait for each other forever.
    branches = len(tree.stretches) - 1
    length, path, branches = max_over_shards([model], [len(tree) if branches else 0, tree.longest_path, branches])
    if not branches:
        return _AttentionChoice(None, "one sequence, without branches")
    too_long = _why_too_long(tree, path, shortest_window(body.config))
    if too_long is not None:
        return _AttentionChoice(None, too_long)
    choice = _choice_from_trial(model, body, tree, length, path)
    too_long = _why_too_long(tree, path, choice.window)
    return choice if too_long is None else _AttentionChoice(None, too_long)


def _check_positions(config: Any, longest: int) -> None:
    """Raise UnsupportedModelError if a path is too long for constant rotary frequencies.

    Beyond that length, the model's frequencies depend on the length of the input. The paths of a tree have several
    lengths, so no single set of frequencies would be right for all of them.
    """
    limit, why = max_invariant_length(config)
    if limit is not None and longest > limit:
        fix = "Cut sessions into windows of that length, or use the flat collator."
        got = f"a path of {longest} tokens, {why}"
        raise UnsupportedModelError(
            explain("token tree", got=got, expected=f"a path of at most {limit} tokens", fix=fix)
        )


def _why_too_long(tree: TokenTree, path: int, window: int | None) -> str | None:
    if window is None or path <= window:
        return None
    if tree.longest_path <= window:
        return f"another process has a path longer than the sliding window of {window}"
    return f"a path of {tree.longest_path} tokens is longer than the sliding window of {window}"


def _choice_from_trial(model: nn.Module, body: Any, tree: TokenTree, length: int, path: int) -> _AttentionChoice:
    """Return the kind of attention for trees of this size, from an earlier experiment or by running a new one.

    A model that has failed the experiment is not tried again.
    """
    trials = _trials.setdefault(body, {})
    device = tree.input_ids.device
    setting = f"{device} {compute_dtype(body)} {usual_attention(body)}"
    before = trials.get(setting)
    if before is not None:
        fits = length <= before.length and path <= before.path
        too_long = _why_too_long(tree, path, before.choice.window)
        # The earlier tree had too few branch rows for the slots check, but this one has enough: run it again.
        if fits and before.choice.kind is not None and not before.has_checked_slots:
            fits = not _can_check_slots(model, tree)
        if fits or too_long is not None or before.choice.kind is None:
            return before.choice
        length, path = max(length, before.length), max(path, before.path)
    choice = _try_tree(model, tree, _candidate_kinds(body, device), path)
    # Another tree may fit into the window, and in half precision rounding over a few tokens can fail a good model.
    is_final = path >= _MIN_PATH_TO_FAIL and _why_too_long(tree, path, choice.window) is None
    if choice.kind is not None or is_final:
        trials[setting] = _Trial(choice, length, path, _can_check_slots(model, tree))
    return choice


def _can_check_slots(model: nn.Module, tree: TokenTree) -> bool:
    """Return whether some process has enough branch rows for a meaningful "slots" check."""
    return max_over_shards([model], [_num_branch_rows(tree)])[0] >= ENOUGH_ROWS


def has_attention_dropout(body: nn.Module) -> bool:
    """Return whether attention dropout is active in any module."""
    return any(module.training and getattr(module, "attention_dropout", 0.0) for module in body.modules())


def _candidate_kinds(body: Any, device: torch.device) -> tuple[Kind, ...]:
    """Return the kinds of attention to try, best first.

    If the model's own attention function is not one that can be replaced, only a dense mask is tried.
    """
    if not any(name in usual_attention(body) for name in _REPLACEABLE):
        return ("dense",)
    if device.type != "cuda":
        return ("dense", "paths")
    half = compute_dtype(body) in (torch.float16, torch.bfloat16)
    return ("flash", "flex", "paths") if half else ("flex", "paths")


# Errors raised by models that were not written for such a mask. NotImplementedError is a RuntimeError.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
# The number of branches that are also run alone. It is fixed, so that all processes make the same number of passes.
_BRANCHES = 2
# How much more than the rounding of the trunk a branch may differ from its sequence.
_MAX_TRUNK_ROUNDINGS = 4.0
# In half precision a token that scores two experts equally may be routed to either; with fewer rows than this such
# tokens would dominate the comparison.
ENOUGH_ROWS = 16


class _AttentionChoice(NamedTuple):
    """The kind of attention for a tree, or why none works, and the shortest window that a layer asked for."""

    kind: Kind | None
    flat_because: str | None
    window: int | None = None


class _StandaloneSequence(NamedTuple):
    """The tree rows of one sequence, and the hidden states that the sequence has when it runs alone."""

    sequence: Tensor
    rows: Tensor


class _Pass(NamedTuple):
    """The hidden states and layer trace of a pass over the tree, and lone sequences to compare them with."""

    kind: Kind
    masked_tree: _MaskedTree
    rows: Tensor
    trace: _LayerTrace
    alone: list[_StandaloneSequence]


def _try_tree(model: nn.Module, tree: TokenTree, kinds: Sequence[Kind], longest: int) -> _AttentionChoice:
    """Return the first kind of attention with which this tree's hidden states depend only on their paths.

    The experiment runs in eval mode and in the model's dtype. A layer may ask for a window that the config does not
    mention. If that window is shorter than the longest path on any process, the returned choice has the window but
    neither a kind nor a reason, because shorter trees may still fit into the window.
    """
    body = get_causal_lm(model)
    usual, reasons = body.config._attn_implementation, list[str]()
    with torch.no_grad(), eval_mode(model):
        try:  # before the model is changed in any way: every kind of attention has to reproduce these rows
            alone = [
                _StandaloneSequence(sequence, hidden_states(model, tree.input_ids[sequence][None], None)[0].float())
                for sequence in _trunk_and_branches(tree)
            ]
        except torch.OutOfMemoryError:  # a RuntimeError, but no evidence against the model
            raise
        except _REFUSALS as error:
            return _AttentionChoice(None, f"even a plain sequence fails: {type(error).__name__}: {error}"[:200])
        for kind in kinds:
            try:
                masked_tree = _mask_tree(body, tree, kind)
                with _watched_attention(body, masked_tree.mask) as trace:
                    rows = _run_tree(body, masked_tree)
            except torch.OutOfMemoryError:
                raise
            except _REFUSALS as error:
                reasons.append(f"{kind}: {type(error).__name__}: {error}"[:200])
                continue
            window = min(trace.windows, default=None)
            if window is not None and longest > window:
                return _AttentionChoice(None, None, window)
            reason = _first_failed_check(model, body, _Pass(kind, masked_tree, rows, trace, alone))
            if reason is None:
                return _AttentionChoice(kind, None, window)
            reasons.append(f"{kind}: {reason}")
    if body.config._attn_implementation != usual:
        body.set_attn_implementation(usual)  # some models branch on the name of their attention
    return _AttentionChoice(None, "the model does not accept a tree's mask; " + "; ".join(reasons))


def _first_failed_check(model: nn.Module, body: Any, ran: _Pass) -> str | None:
    """Return the reason given by the first check that fails, or None if all checks pass.

    Processes that share weights stop at the same check.
    """
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _find_changed_masks(body, ran.trace),
        lambda: _find_leak(model, body, ran.masked_tree, ran.rows),
        lambda: _find_ignored_positions(body, ran.masked_tree, ran.rows),
        lambda: _find_slot_dependence(model, body, ran),
    )
    for check in checks:
        reason = check()
        (anywhere,) = max_over_shards([model], [int(reason is not None)])
        if anywhere:
            return reason or "the check failed on another process"
    return None


def _find_changed_masks(body: Any, record: _LayerTrace) -> str | None:
    """Run the "masks" check: return a reason if a layer changes the mask or does not use it, else None."""
    layers = getattr(text_config(body.config), "num_hidden_layers", 1)
    if record.changed_masks:
        return f"{', '.join(sorted(record.changed_masks))} changes the mask that it receives"
    if record.extras:
        return f"the attention uses more than a mask: {', '.join(sorted(record.extras))}"
    if len(record.layers) < layers:
        return f"only {len(record.layers)} of {layers} layers attend with the mask; the rest cannot be checked"
    return None


def _find_leak(model: nn.Module, body: Any, masked_tree: _MaskedTree, rows: Tensor) -> str | None:
    """Run the "branches" check: return a reason if tokens in other branches affect a path's hidden states, else None.

    The tokens on every second branch's path are kept, all others are changed, and the kept rows are compared.
    """
    is_kept = _every_second_path(masked_tree.tree)
    ids = torch.where(is_kept, masked_tree.tree.input_ids, replace_tokens(masked_tree.tree.input_ids, body))
    with equal_inputs_for_experts(body, is_kept) as has_experts:
        before = _run_tree(body, masked_tree) if has_experts else rows
        after = _run_tree(body, masked_tree, input_ids=ids)
        is_kept = is_kept[: masked_tree.length]
        changed = ~bitwise_equal_rows(before[is_kept], after[is_kept])
        (anywhere,) = max_over_shards([model], [int(changed.any())])
        again = _run_tree(body, masked_tree) if anywhere else before
    if not bool(changed.any()):
        return None
    if not bool(bitwise_equal_rows(before, again).all()):
        return "two identical passes differ, so the branches cannot be checked"
    gap = float((before[is_kept].float() - after[is_kept].float()).abs().max())
    return f"changing tokens in a branch changes {int(changed.sum())} of {len(changed)} other rows, by up to {gap:.1e}"


def _find_ignored_positions(body: Any, masked_tree: _MaskedTree, rows: Tensor) -> str | None:
    """Run the "positions" check: return a reason if reversing the positions has no effect, else None.

    Reversed positions stay within the model's range.
    """
    tree = masked_tree.tree
    changed = _run_tree(body, masked_tree, position_ids=(tree.longest_path - 1 - tree.position_ids).clamp_min(0))
    if not torch.equal(rows, changed):
        return None
    # On a path that repeats a single token, positions make no difference to any model.
    has_order = any(bool((tree.input_ids[path] != tree.input_ids[path[0]]).any()) for path in tree.rows)
    return "the model ignores positions" if has_order else None


def _find_slot_dependence(model: nn.Module, body: Any, ran: _Pass) -> str | None:
    """Run the "slots" check: return a reason if branches differ from lone sequences by more than rounding."""
    (trunk, *branches), rows = ran.alone, ran.rows
    noise = _median_gap(trunk, rows, 0)
    gaps = [_median_gap(branch, rows, _num_shared_rows(trunk.sequence, branch.sequence)) for branch in branches]
    half = compute_dtype(body) in (torch.float16, torch.bfloat16)
    if half and _num_branch_rows(ran.masked_tree.tree) < ENOUGH_ROWS:
        return None
    if noise > (0.1 if half else 1e-3):
        return f"rows of the trunk differ from those of the flat sequence by {noise:.1e} of their norm"
    # A norm inside the model may compute in single precision whatever the dtype of the weights, so the floor is 16
    # single-precision roundings; in half precision it is one rounding.
    floor = torch.finfo(compute_dtype(body)).eps / 2 if half else 16 * torch.finfo(torch.float32).eps
    worst = max(gaps)
    # The trunk may use the same kernel as a lone sequence and show no difference, while branches use another kernel.
    (unclear,) = max_over_shards([model], [int(worst > _MAX_TRUNK_ROUNDINGS * max(noise, floor))])
    noise = max(noise, _branch_rounding_noise(body, ran, trunk)) if unclear else noise
    if worst <= _MAX_TRUNK_ROUNDINGS * max(noise, floor):
        return None
    return (
        f"rows of a branch differ from those of the flat sequence by {worst:.1e} of their norm, "
        f"rows of the trunk only by {noise:.1e}"
    )


def _num_branch_rows(tree: TokenTree) -> int:
    """Return how many rows the branches chosen for comparison have beyond those that they share with the trunk."""
    trunk, *branches = _trunk_and_branches(tree)
    return sum(branch.numel() - _num_shared_rows(trunk, branch) for branch in branches)


def _branch_rounding_noise(body: Any, ran: _Pass, trunk: _StandaloneSequence) -> float:
    """Return the median gap that rounding alone causes in a branch.

    The end of the trunk is run as a branch whose slots equal its positions, so slots cannot cause a gap.
    """
    length = trunk.sequence.numel()
    cut = length - max(1, length // 8)
    index = torch.arange(length, device=trunk.sequence.device)
    is_end = (index >= cut).long()
    stretches = (Stretch(0, cut, ()), Stretch(cut, length, ((0, cut),)))
    ids = ran.masked_tree.tree.input_ids[trunk.sequence]
    chain = TokenTree(ids, index, is_end, torch.full_like(is_end, 2), (index,), stretches)
    rows = _run_tree(body, _mask_tree(body, chain, ran.kind))
    return _median_gap(_StandaloneSequence(index, trunk.rows), rows, cut)


def _median_gap(alone: _StandaloneSequence, rows: Tensor, skip: int) -> float:
    """Return the median relative difference between a sequence's rows in the tree and when it runs alone.

    The first `skip` rows are left out.
    """
    got = rows[alone.sequence].float()
    gaps = (got - alone.rows).norm(dim=-1) / alone.rows.norm(dim=-1).clamp_min(1e-12)
    return float(gaps[skip:].median()) if skip < gaps.numel() else 0.0


def _num_shared_rows(trunk: Tensor, sequence: Tensor) -> int:
    """Return how many leading rows a sequence shares with the trunk."""
    count = min(trunk.numel(), sequence.numel())
    return int((trunk[:count] == sequence[:count]).sum())


def _trunk_and_branches(tree: TokenTree) -> list[Tensor]:
    """Return the trunk, whose slots equal its positions, followed by `_BRANCHES` sequences to compare with it.

    These are the last branch in the tree's layout, where slots differ most from positions, and a branch from the
    middle. The trunk fills the places of missing branches.
    """
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
    """Return a boolean mask of the rows on the paths that end in every second stretch, starting after the trunk."""
    is_kept = torch.zeros(len(tree), dtype=torch.bool, device=tree.input_ids.device)
    starts = torch.tensor([tree_stretch.start for tree_stretch in tree.stretches])
    for rows in tree.rows:
        stretch = int(torch.searchsorted(starts, int(rows[-1]), right=True)) - 1
        if stretch % 2:
            is_kept[rows] = True
    return is_kept


# The name of the eager attention function in every model file of transformers.
_EAGER = "eager_attention_forward"
# Tensors that layers may pass to their attention. Positions come from us; sinks (`s_aux`) are an extra score column,
# which `check_options` rejects where it is not supported.
_HARMLESS = {"attention_mask", "position_ids", "cache_position", "s_aux"}


@dataclass
class _LayerTrace:
    """A trace of the attention calls that the layers of a model made in one pass.

    A layer that passes the tree's mask on unchanged sees exactly the path of each token. A layer that changes the mask
    (sparse selection, a window of its own), or does not call the model's attention function, cannot be checked.
    """

    mask: Any
    layers: set[int] = field(default_factory=set[int])
    """Attention modules that called the attention function, by `id()`."""
    changed_masks: set[str] = field(default_factory=set[str])
    """Names of the classes whose modules passed another mask than the one given to the model."""
    windows: set[int] = field(default_factory=set[int])
    extras: set[str] = field(default_factory=set[str])
    """Names of other tensors that modules passed, for example a selection of keys for a special kernel."""

    def note(self, module: nn.Module, mask: Any, options: dict[str, Any]) -> None:
        self.layers.add(id(module))
        if not _is_same_mask(mask, self.mask):
            self.changed_masks.add(type(module).__name__)
        self.extras |= {name for name, value in options.items() if isinstance(value, Tensor) and name not in _HARMLESS}
        window = options.get("sliding_window")
        if isinstance(window, int):
            self.windows.add(window)


@contextmanager
def _watched_attention(body: nn.Module, mask: Any) -> Iterator[_LayerTrace]:
    """Yield a trace that records every attention call made by a layer of this model inside the block."""
    record = _LayerTrace(mask)
    inside = {id(module) for module in body.modules()}

    def watching(usual: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: Any, *args: Any, **options: Any) -> Any:
            if id(module) in inside:  # args: queries, keys, values, and the mask if it is passed by position
                record.note(module, args[3] if len(args) > 3 else options.get("attention_mask"), options)
            return usual(module, *args, **options)

        return attend

    with ExitStack() as after:
        for name in _attention_names(body):
            _watch_registered(name, watching, after)
        for names in _eager_namespaces(body):
            usual = names[_EAGER]
            names[_EAGER] = watching(usual)
            after.callback(names.__setitem__, _EAGER, usual)
        yield record


def _attention_names(body: nn.Module) -> set[str]:
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


def _eager_namespaces(body: nn.Module) -> list[dict[str, Any]]:
    """Return the globals of each file that defines one of these modules and an eager attention function."""
    files = {type(module).__module__ for module in body.modules()}
    loaded = [vars(sys.modules[file]) for file in sorted(files) if file in sys.modules]
    return [namespace for namespace in loaded if callable(namespace.get(_EAGER))]


def _is_same_mask(actual_mask: Any, expected_mask: Any) -> bool:
    if actual_mask is expected_mask:
        return True
    if (
        not (isinstance(actual_mask, Tensor) and isinstance(expected_mask, Tensor))
        or actual_mask.shape[-2:] != expected_mask.shape[-2:]
    ):
        return False
    # A boolean mask lets a row see a column where it is True, an additive mask where it is 0.
    expected, actual = (mask if mask.dtype == torch.bool else mask == 0 for mask in (expected_mask, actual_mask))
    return bool((expected == actual).all())
