"""Whether a row depends on its own past alone. Sequences that share a prefix, or stand padded in a batch, need it.

There are models that choose what a token sees among all tokens of a call, later ones too; their rows of a prefix are
others in every sequence, so no batch of shared or padded sequences can have the right ones.

Rows are compared bit by bit. Mixtures of experts need care then: two passes that differ in some tokens route those
elsewhere, and a product of another size may add up in another order. So while such passes are compared, blocks with
experts see one row in the place of every token that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.errors import UnsupportedModelError, explain
from composer_replication.objective.adapters import evaluating
from composer_replication.objective.distributed import agreed_most
from composer_replication.objective.model_head import causal_lm_of, hidden_states

_longest: WeakKeyDictionary[nn.Module, dict[torch.dtype, int]] = WeakKeyDictionary()


def check_causal(model: nn.Module, ids_T: Tensor) -> None:
    """Raise where other tokens in the second half of a sequence change a row of the first, bit for bit.

    Looked at once for a model, and again with every sequence that is longer than any before.
    """
    body = causal_lm_of(model)
    longest = _longest.setdefault(body, {})
    dtype = next(body.parameters()).dtype
    (length,) = agreed_most([model], [ids_T.numel()])
    if length <= longest.get(dtype, 1):
        return
    half = max(1, ids_T.numel() // 2)
    num_changed = _rows_that_change(model, ids_T, half)
    if agreed_most([model], [num_changed]) != [0]:
        got = f"{num_changed} of {half} rows that change with the tokens behind them, in a sequence of {ids_T.numel()}"
        fix = "Sessions of this model cannot share prefixes or be padded; cut them shorter, or use another model."
        raise UnsupportedModelError(
            explain(f"rows of {type(body).__name__}", got=got, expected="rows that depend on what is before", fix=fix)
        )
    longest[dtype] = length


def _rows_that_change(model: nn.Module, ids_T: Tensor, half: int) -> int:
    body = causal_lm_of(model)
    is_kept = torch.arange(ids_T.numel(), device=ids_T.device) < half
    changed = torch.where(is_kept, ids_T, other_tokens(ids_T, body))
    try:
        with torch.no_grad(), evaluating(model), same_rows_for_experts(body, is_kept):
            before, after = (hidden_states(model, ids[None], None)[0, :half] for ids in (ids_T, changed))
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except RuntimeError as error:  # a model that cannot even do this fails in every batch
        what = f"{type(body).__name__} in {next(body.parameters()).dtype} on a plain sequence of {ids_T.numel()} tokens"
        fix = "See that model(input_ids=ids, use_cache=False) runs; another dtype may do."
        raise UnsupportedModelError(explain(what, got=str(error)[:200], expected="hidden states", fix=fix)) from error
    return int((~same_bits(before, after)).sum())


@contextmanager
def same_rows_for_experts(body: nn.Module, kept: Tensor) -> Iterator[bool]:
    """Inside, blocks with experts get a kept row in the place of all that are not; says whether there are any."""
    row = int(kept.int().argmax())

    def swap(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or kept.numel() not in value.shape[:2]:
            return value
        dim = 0 if value.shape[0] == kept.numel() else 1
        shape = [1] * value.dim()
        shape[dim] = -1
        return torch.where(kept.view(shape), value, value.narrow(dim, row, 1))

    def before(_block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(swap(argument) for argument in args), {name: swap(option) for name, option in options.items()}

    blocks = [
        module
        for module in body.modules()
        if any(type(child).__name__.endswith("Experts") for child in module.children())
    ]
    with ExitStack() as after:
        for block in blocks:
            after.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield bool(blocks)


def other_tokens(ids: Tensor, body: Any) -> Tensor:
    """For each token another one of those given, so that it is one that this model is meant to read."""
    unique_ids, inverse = ids.unique(return_inverse=True)
    if unique_ids.numel() == 1:
        return (ids + 1) % body.get_input_embeddings().weight.shape[0]
    return unique_ids.roll(-1)[inverse]


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Of each row (…, H); what is no number is one for both."""
    return ((one == other) | (one.isnan() & other.isnan())).all(dim=-1)
