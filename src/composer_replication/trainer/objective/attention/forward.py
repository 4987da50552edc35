"""Hidden rows of a whole token tree: in one masked pass where the model allows it, sequence by sequence where not.

A tree may run in one pass where every layer attends to the whole path, or to a window of it that no path exceeds, and
nothing in the model depends on where a token lies in the layout. The config is asked first (`attention.rules`), then an
experiment on the tree itself (`attention.trial`): once for a model and setting, and again whenever a tree is longer, or
has a longer path, than any before. Every other tree runs flat, gives the same numbers, and says why.
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
# A path of so many tokens is enough to hold against a model what it did on it.
_ENOUGH_TO_FAIL = 16


class _HiddenRows(NamedTuple):
    """Last hidden states (L, H), one row a token; by which attention over a tree, or why not as a tree."""

    hidden: Tensor
    kind: Kind | None = None
    flat_because: str | None = None

    @property
    def ran_as(self) -> str:
        if self.kind is not None:
            return f"tree ({self.kind})"
        return "flat sequences" if self.flat_because is None else f"flat: {self.flat_because}"


class _Tried(NamedTuple):
    """What an experiment found, and the largest tree and longest path that it was made with."""

    verdict: _AttentionChoice
    length: int
    path: int
    has_told: bool  # of slots, which takes more than a few rows of branches


_tried: WeakKeyDictionary[nn.Module, dict[str, _Tried]] = WeakKeyDictionary()


def hidden_rows(model: nn.Module, tokens: Tokens) -> _HiddenRows:
    """The rows of a tree's tokens; or of padded sequences, one sequence behind the other."""
    if isinstance(tokens, TokenTree):
        return tree_hidden_states(model, tokens)
    return _HiddenRows(hidden_states(model, tokens.input_ids, tokens.attention_mask).flatten(0, 1))


def tree_hidden_states(model: nn.Module, tree: TokenTree) -> _HiddenRows:
    """The rows of every token, as the flat sequences would give them."""
    body = causal_lm_of(model)

    def work() -> _HiddenRows:
        kind, why, _ = _how(model, tree)
        hidden = run_sequences(model, tree) if kind is None else run_tree(body, masked(body, tree, kind))
        return _HiddenRows(hidden, kind, why)

    return inside_forward(model, body, work)


def why_flat(model: nn.Module, tree: TokenTree) -> str | None:
    """Why this tree cannot go through this model in one pass; None when it can."""
    return inside_forward(model, causal_lm_of(model), lambda: _how(model, tree)).flat_because


def _how(model: nn.Module, tree: TokenTree) -> _AttentionChoice:
    body = causal_lm_of(model)
    check_positions(body.config, tree.longest_path)
    never = why_never(body.config)
    if never is not None:
        return _AttentionChoice(None, never)
    if dropout_on(body) and not body.config._attn_implementation.endswith("eager") and tree.input_ids.is_cuda:
        return _AttentionChoice(None, "attention dropout is on, which no attention over trees has on this device")
    # Processes that share the weights must take the same way, or they wait for each other for ever.
    branches = len(tree.stretches) - 1
    length, path, branches = agreed_most([model], [len(tree) if branches else 0, tree.longest_path, branches])
    if not branches:
        return _AttentionChoice(None, "one sequence, without branches")
    too_long = _too_long(tree, path, shortest_window(body.config))
    if too_long is not None:
        return _AttentionChoice(None, too_long)
    verdict = _tested(model, body, tree, length, path)
    too_long = _too_long(tree, path, verdict.window)
    return verdict if too_long is None else _AttentionChoice(None, too_long)


def _too_long(tree: TokenTree, path: int, window: int | None) -> str | None:
    if window is None or path <= window:
        return None
    if tree.longest_path <= window:
        return f"another process has a path longer than the sliding window of {window}"
    return f"a path of {tree.longest_path} tokens is longer than the sliding window of {window}"


def _tested(model: nn.Module, body: Any, tree: TokenTree, length: int, path: int) -> _AttentionChoice:
    """What was found out on a tree at least as large as this one; a model that failed once is not tried again."""
    trials = _tried.setdefault(body, {})
    device = tree.input_ids.device
    setting = f"{device} {compute_dtype(body)} {usual_attention(body)}"
    before = trials.get(setting)
    if before is not None:
        fits = length <= before.length and path <= before.path
        too_long = _too_long(tree, path, before.verdict.window)
        if fits and before.verdict.kind is not None and not before.has_told:  # a few rows say little about slots
            fits = not _tells(model, tree)
        if fits or too_long is not None or before.verdict.kind is None:
            return before.verdict
        length, path = max(length, before.length), max(path, before.path)
    verdict = try_tree(model, tree, _kinds(body, device), path)
    # Another tree may fit into the window, and on a few tokens in half precision even a good model may seem to fail.
    is_final = path >= _ENOUGH_TO_FAIL and _too_long(tree, path, verdict.window) is None
    if verdict.kind is not None or is_final:
        trials[setting] = _Tried(verdict, length, path, _tells(model, tree))
    return verdict


def _tells(model: nn.Module, tree: TokenTree) -> bool:
    """Whether the branches that are run by themselves have rows enough, on any process, to tell slots from rounding."""
    return agreed_most([model], [_rows_that_tell(tree)])[0] >= ENOUGH_ROWS


def dropout_on(body: nn.Module) -> bool:
    """Whether the attention of this model as it is now is noisy."""
    return any(module.training and getattr(module, "attention_dropout", 0.0) for module in body.modules())


def _kinds(body: Any, device: torch.device) -> tuple[Kind, ...]:
    """What is worth trying, best first; an attention that is not a usual one cannot be done in another way."""
    if not any(name in usual_attention(body) for name in _REPLACEABLE):
        return ("dense",)
    if device.type != "cuda":
        return ("dense", "paths")
    half = compute_dtype(body) in (torch.float16, torch.bfloat16)
    return ("flash", "flex", "paths") if half else ("flex", "paths")


# Whether a model may run a tree in one pass: found out on that very tree, at its own size.
#
# The question is not whether a tree's rows are near to those of its sequences (a weak leak is near, too), but what they
# depend on. Four things are looked at, and the first that fails decides:
#
#     masks       every layer asks for attention, and with the mask that the model was given
#     branches    other tokens in the branches beside a path leave the path's rows as they are, bit for bit
#     positions   other positions change the rows: a model that does not read them may count slots instead
#     slots       rows of branches differ from those of their sequences no more than rows do whose slots are their
#                 positions (the trunk, and the end of the trunk run as a branch): what is left is the rounding of
#                 kernels
#
# Bit for bit is fair in any precision: the shapes, the mask and every other row are the same, so each product adds up
# the same numbers in the same order. (Mixtures of experts are the exception: `attention.causality`.)

# What models raise that were not written for such a mask; that it is not implemented is one of them.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
# How many branches are run by themselves beside the trunk: a fixed number, so that all processes make as many passes.
_BRANCHES = 2
_TIMES_TRUNK = 4.0
# In half precision a token on the edge of two experts goes either way; so few rows would say nothing.
ENOUGH_ROWS = 16


class _AttentionChoice(NamedTuple):
    """By which attention the tree may run, or why not at all; and the shortest window that a layer asked for."""

    kind: Kind | None
    flat_because: str | None
    window: int | None = None


class _LoneSequence(NamedTuple):
    """Which rows of the tree a sequence has, and their hidden states when it is run by itself."""

    sequence: Tensor
    rows: Tensor


class _Pass(NamedTuple):
    """A pass over the tree, and what it is held against."""

    kind: Kind
    given: MaskedTree
    rows: Tensor
    seen: _LayerTrace
    alone: list[_LoneSequence]


def try_tree(model: nn.Module, tree: TokenTree, kinds: Sequence[Kind], longest: int) -> _AttentionChoice:
    """The first kind by which this tree's rows depend on their paths alone; in eval mode and the model's dtype.

    A layer may ask for a window that the config does not tell of. If it is shorter than the longest path of all
    processes, it comes back without a kind and without a reason: shorter trees may fit.
    """
    body = causal_lm_of(model)
    usual, reasons = body.config._attn_implementation, list[str]()
    with torch.no_grad(), evaluating(model):
        try:  # before anything is changed about the model: these are what every kind has to come up to
            alone = [
                _LoneSequence(sequence, _flat_rows(model, tree, sequence)) for sequence in _trunk_and_branches(tree)
            ]
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            return _AttentionChoice(None, f"even a plain sequence fails: {type(error).__name__}: {error}"[:200])
        for kind in kinds:
            try:
                masked_tree = masked(body, tree, kind)
                with _watched_attention(body, masked_tree.mask) as seen:
                    rows = run_tree(body, masked_tree)
            except torch.OutOfMemoryError:  # says nothing about the model
                raise
            except _REFUSALS as error:
                reasons.append(f"{kind}: {type(error).__name__}: {error}"[:200])
                continue
            window = min(seen.windows, default=None)
            if window is not None and longest > window:
                return _AttentionChoice(None, None, window)
            reason = _first_objection(model, body, _Pass(kind, masked_tree, rows, seen, alone))
            if reason is None:
                return _AttentionChoice(kind, None, window)
            reasons.append(f"{kind}: {reason}")
    if body.config._attn_implementation != usual:
        body.set_attn_implementation(usual)  # some models look at the name of their attention
    return _AttentionChoice(None, "the model takes no tree's mask; " + "; ".join(reasons))


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


def _other_masks(body: Any, record: _LayerTrace) -> str | None:
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
    if half and _rows_that_tell(ran.given.tree) < ENOUGH_ROWS:
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


def _rows_that_tell(tree: TokenTree) -> int:
    """Rows that the branches which are run by themselves do not share with the trunk."""
    trunk, *branches = _trunk_and_branches(tree)
    return sum(branch.numel() - _shared(trunk, branch) for branch in branches)


def _noise_of_branches(body: Any, ran: _Pass, trunk: _LoneSequence) -> float:
    """The end of the trunk, run as a branch that lies where it would by itself: its gap is the kernels' rounding."""
    length = trunk.sequence.numel()
    cut = length - max(1, length // 8)
    index = torch.arange(length, device=trunk.sequence.device)
    is_end = (index >= cut).long()
    stretches = (Stretch(0, cut, ()), Stretch(cut, length, ((0, cut),)))
    ids = ran.given.tree.input_ids[trunk.sequence]
    chain = TokenTree(ids, index, is_end, torch.full_like(is_end, 2), (index,), stretches)
    rows = run_tree(body, masked(body, chain, ran.kind))
    return _usual_gap(_LoneSequence(index, trunk.rows), rows, cut)


def _flat_rows(model: nn.Module, tree: TokenTree, sequence: Tensor) -> Tensor:
    return hidden_states(model, tree.input_ids[sequence][None], None)[0].float()


def _usual_gap(alone: _LoneSequence, rows: Tensor, skip: int) -> float:
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


# Looking on while a Hugging Face model attends: which of its layers ask for attention, and with which mask.
#
# A layer that is given the tree's mask and hands it on unchanged sees exactly a token's path. A layer that changes it
# (sparse selection, a window of its own), or that attends without asking the model's attention function, does something
# that only its author knows.

_EAGER = "eager_attention_forward"
# Positions are what we gave; sinks are one more column of each row, and refused where they cannot be done.
_HARMLESS = {"attention_mask", "position_ids", "cache_position", "s_aux"}


@dataclass
class _LayerTrace:
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
def _watched_attention(body: nn.Module, mask: Any) -> Iterator[_LayerTrace]:
    """Inside, every attention that a layer of this model asks for is noted, and then done as always."""
    record = _LayerTrace(mask)
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
