"""Check what a model's attention allows: whether the model is causal, and what its config rules out.

Shared prefixes and padding require a causal model (`check_causal`). A config can only rule trees out (`why_no_tree`,
`shortest_window`, `max_invariant_length`). What it does not mention (a convolution inside a layer, a selection by
blocks) is found by the experiment in `attention.forward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.errors import UnsupportedModelError, explain
from composer_replication.trainer.objective.distributed import eval_mode, max_over_shards
from composer_replication.trainer.objective.model_head import get_causal_lm, hidden_states

# The longest sequence that passed `check_causal`, by model and dtype. Weak references, so that a model can be freed.
_longest_causal: WeakKeyDictionary[nn.Module, dict[torch.dtype, int]] = WeakKeyDictionary()
# The layer types in transformers for attention to the whole path, or to its last tokens.
_MASKABLE_LAYERS = {"full_attention", "attention", "sliding_attention"}
# Config keys for the list of layer types, and for the width of a sliding window.
_LAYER_TYPE_KEYS = ("layer_types", "layers_block_type", "block_types")
_WINDOW_KEYS = ("sliding_window", "attention_window_size", "local_attention", "window_size")
# Kinds of rotary embedding whose frequencies depend on the longest sequence in a call.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def compute_dtype(body: nn.Module) -> torch.dtype:
    """Return the dtype that a pass computes in: autocast's if it is on, else that of the weights."""
    parameter = next(body.parameters())
    device = parameter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


def check_causal(model: nn.Module, ids_T: Tensor) -> None:
    """Raise UnsupportedModelError if changing tokens in the second half of a sequence changes a row in the first half.

    In some models, what a token sees is selected from all tokens of the call, including later ones. Their hidden states
    for a prefix differ from sequence to sequence, so neither shared prefixes nor padded batches can be correct. The
    comparison is bitwise. It runs once per model and dtype, and again for every sequence that is longer than all
    before.
    """
    body = get_causal_lm(model)
    longest = _longest_causal.setdefault(body, {})
    dtype = next(body.parameters()).dtype
    (length,) = max_over_shards([model], [ids_T.numel()])
    if length <= longest.get(dtype, 1):
        return
    half = max(1, ids_T.numel() // 2)
    num_changed = _count_changed_rows(model, ids_T, half)
    if max_over_shards([model], [num_changed]) != [0]:
        got = f"{num_changed} of {half} hidden states that change with later tokens, at length {ids_T.numel()}"
        fix = "Sequences of this model cannot share prefixes or be padded; use shorter ones or another model."
        raise UnsupportedModelError(
            explain(f"hidden states of {type(body).__name__}", got=got, expected="a causal model", fix=fix)
        )
    longest[dtype] = length


def _count_changed_rows(model: nn.Module, ids_T: Tensor, half: int) -> int:
    body = get_causal_lm(model)
    is_kept = torch.arange(ids_T.numel(), device=ids_T.device) < half
    changed = torch.where(is_kept, ids_T, replace_tokens(ids_T, body))
    try:
        with torch.no_grad(), eval_mode(model), equal_inputs_for_experts(body, is_kept):
            before, after = (hidden_states(model, ids[None], None)[0, :half] for ids in (ids_T, changed))
    except torch.OutOfMemoryError:  # a RuntimeError, but no evidence against the model
        raise
    except RuntimeError as error:  # a model that fails here would fail in every batch
        what = f"{type(body).__name__} in {next(body.parameters()).dtype} on a plain sequence of {ids_T.numel()} tokens"
        fix = "Check that model(input_ids=ids, use_cache=False) runs; try another dtype."
        raise UnsupportedModelError(explain(what, got=str(error)[:200], expected="hidden states", fix=fix)) from error
    return int((~bitwise_equal_rows(before, after)).sum())


@contextmanager
def equal_inputs_for_experts(body: nn.Module, is_kept: Tensor) -> Iterator[bool]:
    """Inside the block, make mixture-of-experts blocks replace each row outside `is_kept` with the first row inside it.

    Yields whether the model has any such blocks. Tokens that differ between two passes are routed to other experts, and
    matrix products of another size may sum in another order. With these rows equal, the passes can be compared bitwise.
    """
    row = int(is_kept.int().argmax())

    def swap(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or is_kept.numel() not in value.shape[:2]:
            return value
        # Rows are (L, H) or (1, L, H), depending on the model.
        dim = 0 if value.shape[0] == is_kept.numel() else 1
        shape = [1] * value.dim()
        shape[dim] = -1
        return torch.where(is_kept.view(shape), value, value.narrow(dim, row, 1))

    def before(_block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(swap(argument) for argument in args), {name: swap(option) for name, option in options.items()}

    # Detected by class name, since every model in transformers has its own (MixtralExperts, Qwen3MoeExperts, ...).
    blocks = [
        module
        for module in body.modules()
        if any(type(child).__name__.endswith("Experts") for child in module.children())
    ]
    with ExitStack() as after:
        for block in blocks:
            after.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield bool(blocks)


def replace_tokens(ids: Tensor, body: Any) -> Tensor:
    """Replace each token by a different one that the model can embed, if possible one from the same input."""
    unique_ids, inverse = ids.unique(return_inverse=True)
    if unique_ids.numel() == 1:
        return (ids + 1) % body.get_input_embeddings().weight.shape[0]
    return unique_ids.roll(-1)[inverse]


def bitwise_equal_rows(before: Tensor, after: Tensor) -> Tensor:
    """Return for each row (..., H) whether both tensors are bitwise equal, with NaN equal to NaN."""
    return ((before == after) | (before.isnan() & after.isnan())).all(dim=-1)


def text_config(config: Any) -> Any:
    """Return the config of the text model, which multimodal models nest in theirs."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def why_no_tree(config: Any) -> str | None:
    """Return why no tree can run through this model in one pass, or None if the config does not rule it out."""
    text = text_config(config)
    for name in _LAYER_TYPE_KEYS:
        kinds = list(getattr(text, name, None) or ())
        other_kinds = Counter(kind for kind in kinds if isinstance(kind, str) and kind not in _MASKABLE_LAYERS)
        if other_kinds:
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(other_kinds.items()))
            return f"layers that no mask can describe: {listed} of {len(kinds)}"
    if getattr(text, "alibi", False):
        return "attention that is biased by slot distance (ALiBi), which is different in a tree"
    if getattr(text, "expert_capacity", None):
        return "experts with limited capacity: the output for a token depends on the other tokens"
    sliding = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    return "sliding attention with an unknown width" if sliding and shortest_window(config) is None else None


def shortest_window(config: Any) -> int | None:
    """Return the smallest sliding window of all layers, or None if every layer sees the whole sequence."""
    text = text_config(config)
    # Qwen2's configs set a window but switch it off.
    if getattr(text, "use_sliding_window", True) is False:
        return None
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    sizes = [getattr(text, name, None) for name in _WINDOW_KEYS]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def max_invariant_length(config: Any) -> tuple[int | None, str]:
    """Return the maximum input length at which results do not depend on that length, and the reason for this limit.

    The length is None if there is no limit.
    """
    text = text_config(config)
    limit, why = _rotary_limit(text)
    keep = getattr(text, "keep_window_size", None)
    # Doge keeps only the best keys of a row, and breaks ties by the length of the call.
    if limit is None and isinstance(keep, int):
        return keep, "which exceeds the number of keys that the model keeps"
    return limit, why


def _rotary_limit(text: Any) -> tuple[int | None, str]:
    """Return the maximum input length at which rotary frequencies are constant, and why they change beyond it.

    The length is None if they never change.
    """
    # Older configs use the keys `rope_scaling` and `type`; settings may be nested by layer type.
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    settings = [rope, *(setting for setting in rope.values() if isinstance(setting, dict))]
    kinds = {setting.get("rope_type") or setting.get("type") for setting in settings}
    if not kinds & _LENGTH_DEPENDENT_ROPE:
        return None, ""
    limits = [setting.get("original_max_position_embeddings") for setting in settings]
    limits.append(getattr(text, "original_max_position_embeddings", None))
    shortest = min((limit for limit in limits if limit), default=getattr(text, "max_position_embeddings", None))
    return shortest, f"for which the frequencies of {sorted(map(str, kinds))} change"
