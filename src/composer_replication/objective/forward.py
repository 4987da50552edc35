"""Hidden rows of a whole token tree: in one masked pass where the model allows it, sequence by sequence where not.

Which models allow it is found out by experiment: a small tree and its sequences must give the same rows. A model that
fails it, or a tree with a path longer than a sliding window, runs flat, gives the same numbers, and says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.batch.eval_mode import evaluating
from composer_replication.batch.tree import TokenTree, build_tree
from composer_replication.batch.tree_attention import tree_block_mask, use_tree_attention
from composer_replication.objective.model_head import causal_lm_of, hidden_states

# The kernel is compiled for a length; a padded tree meets one that was compiled before.
BUCKET = 1024
_PROBE = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 8, 7], [1, 2, 3, 4, 2, 2], [4, 4, 1])


class TreeRows(NamedTuple):
    """Last hidden states (L, H), one row a token of the tree, and why they were not computed as a tree, if not."""

    hidden: Tensor
    flat_because: str | None


_probed: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def tree_hidden_states(model: nn.Module, tree: TokenTree) -> TreeRows:
    """The rows of every token, as the flat sequences would give them."""
    reason = why_flat(model, tree)
    hidden = _as_tree(model, tree) if reason is None else _as_sequences(model, tree)
    return TreeRows(hidden, reason)


def why_flat(model: nn.Module, tree: TokenTree) -> str | None:
    """Why this tree cannot go through this model in one pass; None when it can."""
    body = causal_lm_of(model)
    window = _shortest_window(body.config)
    longest = int(tree.position_ids.max()) + 1
    if window is not None and longest > window:
        return f"a path of {longest} tokens is longer than the sliding window of {window}"
    if body not in _probed:
        _probed[body] = _probe(model, tree.input_ids.device)
    return _probed[body]


def _probe(model: nn.Module, device: torch.device) -> str | None:
    """Whether rows of a small tree equal those of its sequences, in eval mode and the model's own dtype."""
    tree = build_tree(_PROBE).to(device)
    with torch.no_grad(), evaluating(model):
        try:
            masked = _as_tree(model, tree)
        except (TypeError, ValueError, RuntimeError) as error:  # that it is not implemented is one of these
            return f"the model refuses a tree's mask: {type(error).__name__}: {error}"[:300]
        flat = _as_sequences(model, tree)
    narrow = flat.dtype in (torch.float16, torch.bfloat16)
    worst = float((masked.float() - flat.float()).abs().max() / flat.float().abs().max().clamp_min(1e-12))
    limit = 5e-2 if narrow else 1e-3
    return None if worst <= limit else f"a tree's rows differ from its sequences' by {worst:.1e} of their size"


def _as_tree(model: nn.Module, tree: TokenTree) -> Tensor:
    body = causal_lm_of(model)
    length = len(tree)
    if tree.input_ids.is_cuda and not body.config._attn_implementation.endswith("eager"):
        tree = tree.padded(BUCKET)
        use_tree_attention(body)
        return _run(body, tree, tree_block_mask(tree.subtree_end))[:length]
    dtype = next(body.parameters()).dtype
    mask = torch.zeros(1, 1, length, length, dtype=dtype, device=tree.input_ids.device)
    return _run(body, tree, mask.masked_fill_(~tree.dense_mask()[None, None], torch.finfo(dtype).min))


def _run(body: Any, tree: TokenTree, mask: Any) -> Tensor:
    decoder = body.get_decoder()
    ids, positions = tree.input_ids[None], tree.position_ids[None]
    return decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state[0]


def _as_sequences(model: nn.Module, tree: TokenTree) -> Tensor:
    """Every sequence by itself, longest first; a row that several share is taken from the first that has it."""
    rows_of: list[Tensor] = []
    found: list[Tensor] = []
    taken = torch.zeros(len(tree), dtype=torch.bool, device=tree.input_ids.device)
    for rows in sorted(tree.rows, key=lambda each: -each.numel()):
        new = ~taken[rows]
        if not bool(new.any()):
            continue
        hidden = hidden_states(model, tree.input_ids[rows][None], None)[0]
        rows_of.append(rows[new])
        found.append(hidden[new])
        taken[rows] = True
    hidden = torch.cat(found)
    result = hidden.new_zeros(len(tree), hidden.shape[-1])
    return result.index_copy(0, torch.cat(rows_of), hidden)


def _shortest_window(config: Any) -> int | None:
    """The smallest sliding window of any layer; None where every layer sees everything."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "use_sliding_window", True) is False:
        return None
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return None
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((size for size in sizes if isinstance(size, int)), default=None)
