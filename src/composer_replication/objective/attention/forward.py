"""Hidden rows of a whole token tree: in one masked pass where the model allows it, sequence by sequence where not.

A tree may run in one pass where every layer attends to the whole path, or to a window of it that no path exceeds, and
nothing in the model depends on where a token lies in the layout. The config is asked first (`attention.rules`), then an
experiment on the tree itself (`attention.trial`): once for a model and setting, and again whenever a tree is longer, or
has a longer path, than any before. Every other tree runs flat, gives the same numbers, and says why.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.batch.tree import TokenTree
from composer_replication.batch.tree_batch import Tokens
from composer_replication.objective.attention.attend import Kind, usual_attention
from composer_replication.objective.attention.passes import compute_dtype, masked, run_sequences, run_tree
from composer_replication.objective.attention.rules import check_positions, shortest_window, why_never
from composer_replication.objective.attention.trial import ENOUGH_ROWS, Verdict, rows_that_tell, try_tree
from composer_replication.objective.distributed import agreed_most, inside_forward
from composer_replication.objective.model_head import causal_lm_of, hidden_states

_REPLACEABLE = ("sdpa", "flash", "flex")
# A path of so many tokens is enough to hold against a model what it did on it.
_ENOUGH_TO_FAIL = 16


class HiddenRows(NamedTuple):
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

    verdict: Verdict
    length: int
    path: int
    has_told: bool  # of slots, which takes more than a few rows of branches


_tried: WeakKeyDictionary[nn.Module, dict[str, _Tried]] = WeakKeyDictionary()


def hidden_rows(model: nn.Module, tokens: Tokens) -> HiddenRows:
    """The rows of a tree's tokens; or of padded sequences, one sequence behind the other."""
    if isinstance(tokens, TokenTree):
        return tree_hidden_states(model, tokens)
    return HiddenRows(hidden_states(model, tokens.input_ids, tokens.attention_mask).flatten(0, 1))


def tree_hidden_states(model: nn.Module, tree: TokenTree) -> HiddenRows:
    """The rows of every token, as the flat sequences would give them."""
    body = causal_lm_of(model)

    def work() -> HiddenRows:
        kind, why, _ = _how(model, tree)
        hidden = run_sequences(model, tree) if kind is None else run_tree(body, masked(body, tree, kind))
        return HiddenRows(hidden, kind, why)

    return inside_forward(model, body, work)


def why_flat(model: nn.Module, tree: TokenTree) -> str | None:
    """Why this tree cannot go through this model in one pass; None when it can."""
    return inside_forward(model, causal_lm_of(model), lambda: _how(model, tree)).flat_because


def _how(model: nn.Module, tree: TokenTree) -> Verdict:
    body = causal_lm_of(model)
    check_positions(body.config, tree.longest_path)
    never = why_never(body.config)
    if never is not None:
        return Verdict(None, never)
    if dropout_on(body) and not body.config._attn_implementation.endswith("eager") and tree.input_ids.is_cuda:
        return Verdict(None, "attention dropout is on, which no attention over trees has on this device")
    # Processes that share the weights must take the same way, or they wait for each other for ever.
    branches = len(tree.stretches) - 1
    length, path, branches = agreed_most([model], [len(tree) if branches else 0, tree.longest_path, branches])
    if not branches:
        return Verdict(None, "one sequence, without branches")
    too_long = _too_long(tree, path, shortest_window(body.config))
    if too_long is not None:
        return Verdict(None, too_long)
    verdict = _tested(model, body, tree, length, path)
    too_long = _too_long(tree, path, verdict.window)
    return verdict if too_long is None else Verdict(None, too_long)


def _too_long(tree: TokenTree, path: int, window: int | None) -> str | None:
    if window is None or path <= window:
        return None
    if tree.longest_path <= window:
        return f"another process has a path longer than the sliding window of {window}"
    return f"a path of {tree.longest_path} tokens is longer than the sliding window of {window}"


def _tested(model: nn.Module, body: Any, tree: TokenTree, length: int, path: int) -> Verdict:
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
    return agreed_most([model], [rows_that_tell(tree)])[0] >= ENOUGH_ROWS


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
