"""The two ways to the hidden rows of a token tree: one masked pass, or its sequences as a padded batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from composer_replication.batch.tree import TokenTree
from composer_replication.batch.windows import bucket
from composer_replication.objective.attention.attend import Kind, tree_mask, use_tree_attention
from composer_replication.objective.attention.causality import check_causal
from composer_replication.objective.distributed import agreed_most
from composer_replication.objective.model_head import decoder_of, hidden_states


class MaskedTree(NamedTuple):
    """A tree with the mask for one kind of attention; what is behind `length` rows is padding."""

    tree: TokenTree
    mask: Any
    length: int


def compute_dtype(body: nn.Module) -> torch.dtype:
    parameter = next(body.parameters())
    device = parameter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


def masked(body: Any, tree: TokenTree, kind: Kind) -> MaskedTree:
    """The tree as this kind of attention takes it, and the model able to take it."""
    length = len(tree)
    if kind == "dense":
        return MaskedTree(tree, _dense(body, tree), length)
    # FlexAttention is compiled for a length; a padded tree meets one that was compiled before.
    padded = tree.padded(bucket(length)) if kind == "flex" else tree
    use_tree_attention(body)
    return MaskedTree(padded, tree_mask(padded, kind), length)


def run_tree(
    body: Any, given: MaskedTree, *, input_ids: Tensor | None = None, position_ids: Tensor | None = None
) -> Tensor:
    """Rows (L, H) from one pass; other tokens or positions in the same tree are for experiments."""
    ids = given.tree.input_ids if input_ids is None else input_ids
    positions = given.tree.position_ids if position_ids is None else position_ids
    output = decoder_of(body)(
        input_ids=ids[None], position_ids=positions[None], attention_mask=given.mask, use_cache=False
    )
    return output.last_hidden_state[0, : given.length]


def run_sequences(model: nn.Module, tree: TokenTree) -> Tensor:
    """All sequences as one padded batch; a row that several share is taken from the longest that has it."""
    if agreed_most([model], [len(tree.rows)]) != [1]:  # a single sequence shares nothing
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


def _dense(body: Any, tree: TokenTree) -> Tensor:
    """Boolean where the attention takes it; added to the scores where it is written out."""
    sees = tree.dense_mask()[None, None]
    if not body.config._attn_implementation.endswith("eager"):
        return sees
    dtype = compute_dtype(body)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)
