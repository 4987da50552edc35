"""Whether a row depends on its own past alone. Sequences that share a prefix, or stand padded in a batch, need it.

There are models that choose what a token sees among all tokens of a call, later ones too; their rows of a prefix are
others in every sequence, so no batch of shared or padded sequences can have the right ones.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.errors import UnsupportedModelError, explain
from composer_replication.objective.adapters import evaluating
from composer_replication.objective.attention.expert_blocks import other_tokens, same_bits, same_rows_for_experts
from composer_replication.objective.model_head import causal_lm_of, hidden_states
from composer_replication.objective.wrapped import agreed_most

_longest: WeakKeyDictionary[nn.Module, dict[torch.dtype, int]] = WeakKeyDictionary()


def check_causal(model: nn.Module, ids_T: Tensor) -> None:
    """Raise where other tokens in the second half of a sequence change a row of the first, bit for bit.

    Looked at once for a model, and again with every sequence that is longer than any before.
    """
    body = causal_lm_of(model)
    known = _longest.setdefault(body, {})
    dtype = next(body.parameters()).dtype
    (length,) = agreed_most([model], [ids_T.numel()])
    if length <= known.get(dtype, 1):
        return
    half = max(1, ids_T.numel() // 2)
    others = _rows_that_change(model, ids_T, half)
    if agreed_most([model], [others]) != [0]:
        got = f"{others} of {half} rows that change with the tokens behind them, in a sequence of {ids_T.numel()}"
        fix = "Sessions of this model cannot share prefixes or be padded; cut them shorter, or use another model."
        raise UnsupportedModelError(
            explain(f"rows of {type(body).__name__}", got=got, expected="rows that depend on what is before", fix=fix)
        )
    known[dtype] = length


def _rows_that_change(model: nn.Module, ids_T: Tensor, half: int) -> int:
    body = causal_lm_of(model)
    kept = torch.arange(ids_T.numel(), device=ids_T.device) < half
    changed = torch.where(kept, ids_T, other_tokens(ids_T, body))
    try:
        with torch.no_grad(), evaluating(model), same_rows_for_experts(body, kept):
            before, after = (hidden_states(model, each[None], None)[0, :half] for each in (ids_T, changed))
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except RuntimeError as error:  # a model that cannot even do this fails in every batch
        what = f"{type(body).__name__} in {next(body.parameters()).dtype} on a plain sequence of {ids_T.numel()} tokens"
        fix = "See that model(input_ids=ids, use_cache=False) runs; another dtype may do."
        raise UnsupportedModelError(explain(what, got=str(error)[:200], expected="hidden states", fix=fix)) from error
    return int((~same_bits(before, after)).sum())
