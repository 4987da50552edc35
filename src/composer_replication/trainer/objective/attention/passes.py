"""The two ways to the hidden rows of a token tree: one masked pass, or its sequences as a padded batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from composer_replication.batch.tree import TokenTree
from composer_replication.batch.windows import bucket
from composer_replication.errors import UnsupportedModelError, explain
from composer_replication.trainer.objective.attention.attend import Kind, tree_mask, use_tree_attention
from composer_replication.trainer.objective.distributed import agreed_most, evaluating
from composer_replication.trainer.objective.model_head import causal_lm_of, decoder_of, hidden_states


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


# Whether a row depends on its own past alone. Sequences that share a prefix, or stand padded in a batch, need it.
#
# There are models that choose what a token sees among all tokens of a call, later ones too; their rows of a prefix are
# others in every sequence, so no batch of shared or padded sequences can have the right ones.
#
# Rows are compared bit by bit. Mixtures of experts need care then: two passes that differ in some tokens route those
# elsewhere, and a product of another size may add up in another order. So while such passes are compared, blocks with
# experts see one row in the place of every token that differs.

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


# What a model's config says about trees, before anything runs: kinds of layers, windows, frequencies by length.
#
# A config can only forbid. What it does not say (a convolution inside a layer, a selection by blocks) is found out by
# the experiment in `objective.attention.trial`.

# Under these names transformers knows attention to the whole path, and to the last so many tokens of it.
_BY_MASK = {"full_attention", "attention", "sliding_attention"}
_KINDS = ("layer_types", "layers_block_type", "block_types")
_WINDOWS = ("sliding_window", "attention_window_size", "local_attention", "window_size")
_BY_LENGTH = {"dynamic", "longrope"}


def text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def why_never(config: Any) -> str | None:
    """Why no tree can go through this model at all, in plain words; None where the config has nothing against it."""
    text = text_config(config)
    for name in _KINDS:
        kinds = list(getattr(text, name, None) or ())
        other_kinds = Counter(kind for kind in kinds if isinstance(kind, str) and kind not in _BY_MASK)
        if other_kinds:
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(other_kinds.items()))
            return f"layers that no mask describes: {listed} of {len(kinds)}"
    if getattr(text, "alibi", False):
        return "attention that is biased by the distance of slots (ALiBi), which is another one in a tree"
    if getattr(text, "expert_capacity", None):
        return "experts of limited capacity: what one token gets depends on the others"
    sliding = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    return "sliding attention of unknown width" if sliding and shortest_window(config) is None else None


def shortest_window(config: Any) -> int | None:
    """The smallest sliding window of any layer; None where every layer sees everything."""
    text = text_config(config)
    if getattr(text, "use_sliding_window", True) is False:
        return None
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    sizes = [getattr(text, name, None) for name in _WINDOWS]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def check_positions(config: Any, longest: int) -> None:
    """Some models choose their rotary frequencies by the longest sequence of a call: a tree has several lengths."""
    limit, why = longest_alike(config)
    if limit is not None and longest > limit:
        fix = "Cut sessions into windows of that length, or use the flat collator."
        got = f"a path of {longest} tokens, {why}"
        raise UnsupportedModelError(explain("token tree", got=got, expected=f"at most {limit} tokens", fix=fix))


def longest_alike(config: Any) -> tuple[int | None, str]:
    """Up to which length the tokens before one mean the same to it whatever the length of the call, and why no more."""
    text = text_config(config)
    limit, why = _rotary_limit(text)
    keep = getattr(text, "keep_window_size", None)
    if limit is None and isinstance(keep, int):  # Doge keeps the best so many, and tells equal ones apart by length
        return keep, "more of which are equally good to see than it keeps"
    return limit, why


def _rotary_limit(text: Any) -> tuple[int | None, str]:
    """Up to which length the rotary frequencies stay as they are, where they depend on it."""
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    settings = [rope, *(setting for setting in rope.values() if isinstance(setting, dict))]
    kinds = {setting.get("rope_type") or setting.get("type") for setting in settings}
    if not kinds & _BY_LENGTH:
        return None, ""
    limits = [setting.get("original_max_position_embeddings") for setting in settings]
    limits.append(getattr(text, "original_max_position_embeddings", None))
    shortest = min((limit for limit in limits if limit), default=getattr(text, "max_position_embeddings", None))
    return shortest, f"for which the frequencies of {sorted(map(str, kinds))} change"
