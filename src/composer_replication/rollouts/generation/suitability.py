"""Whether a model may generate from kept rows: its config is asked first, then an experiment is made, once a setting.

The experiment reads a few rows of unequal lengths in pieces, as generation does, and holds the logits against those of
plain passes over the whole rows. So what a config does not tell (a convolution, a recurrent state, a bias by slots) is
found out before anything is sampled.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.objective.adapters import evaluating
from composer_replication.objective.attention.attend import own_masks_taken, usual_attention
from composer_replication.objective.attention.forward import dropout_on
from composer_replication.objective.attention.passes import compute_dtype
from composer_replication.objective.attention.rules import longest_alike, shortest_window, text_config, why_never
from composer_replication.objective.distributed import is_sharded
from composer_replication.rollouts.generation.key_values import KeyValueRows
from composer_replication.rollouts.generation.passes import NextTokens, read_tokens

# As in `objective.attention.trial`: what models raise that were not written for such a mask.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
_LENGTHS, _PIECES = (23, 14, 31), ((0, 9, 20), (6, 6, 11), (0, 17, 28))
_tried: WeakKeyDictionary[nn.Module, dict[str, str | None]] = WeakKeyDictionary()


def why_not_kept(model: Any, longest: int) -> str | None:
    """Why this model cannot generate rows of up to so many tokens from kept keys; None where it can."""
    reason = _why_never(model) or _why_too_long(model.config, longest)
    if reason is not None:
        return reason
    reasons = _tried.setdefault(model, {})
    setting = f"{model.device} {compute_dtype(model)} {usual_attention(model)}"
    if setting not in reasons:
        with evaluating(model):
            reasons[setting] = _try_rows(model)
    return reasons[setting]


def _why_never(model: Any) -> str | None:
    is_fsdp1 = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if is_fsdp1 or is_sharded(model) or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "the weights are spread over processes"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "the weights lie on several devices"
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model has an encoder"
    if dropout_on(model) or any(
        isinstance(module, nn.Dropout) and module.training and module.p for module in model.modules()
    ):
        return "dropout is on while generating"
    if usual_attention(model) == "eager":
        return "its attention is written out (eager); load it with attn_implementation='sdpa' where it has that"
    return why_never(model.config)


def _why_too_long(config: Any, longest: int) -> str | None:
    window = shortest_window(config)
    if window is not None and longest > window:
        return f"rows of up to {longest} tokens are longer than the sliding window of {window}"
    limit, why = longest_alike(config)
    return None if limit is None or longest <= limit else f"rows of up to {longest} tokens, {why}"


def _try_rows(model: Any) -> str | None:
    try:
        return _first_objection(model)
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except _REFUSALS as error:
        return f"it does not take rows of kept keys: {type(error).__name__}: {error}"[:200]


def _first_objection(model: Any) -> str | None:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rows = [[(7919 * (31 * row + slot + 1)) % vocabulary for slot in range(size)] for row, size in enumerate(_LENGTHS)]
    whole = [_plain_logits(model, row) for row in rows]
    cache = KeyValueRows(len(rows), max(_LENGTHS))
    with own_masks_taken(model):
        for ends in zip(*_PIECES, strict=True):
            read_tokens(model, cache, [row[:end] for row, end in zip(rows, ends, strict=True)])
        layers = getattr(text_config(model.config), "num_hidden_layers", 1)
        if cache.num_layers < layers:
            return f"of its {layers} layers {cache.num_layers} ask for attention; what the others keep cannot be kept"
        worst = _worst_step(model, cache, rows, whole)
    half = cache.dtype in (torch.float16, torch.bfloat16)
    if not worst <= (0.1 if half else 1e-3):  # so that NaN fails too
        return f"logits from kept keys differ from those of plain passes by {worst:.1e} of their size"
    return None


def _worst_step(model: Any, cache: KeyValueRows, rows: list[list[int]], whole: list[Tensor]) -> float:
    """The largest gap over a few tokens more of every row."""
    step = NextTokens(model, cache, record=False)
    gaps: list[float] = []
    for ahead in range(3):
        slots = [min(pieces[-1] + ahead, size - 1) for pieces, size in zip(_PIECES, _LENGTHS, strict=True)]
        tokens = [row[slot] for row, slot in zip(rows, slots, strict=True)]
        tokens_B, slots_B = (torch.tensor(numbers, device=model.device) for numbers in (tokens, slots))
        logits = step.logits(tokens_B, slots_B, max(_LENGTHS))
        gaps += [_gap(whole[row][slot], logits[row]) for row, slot in enumerate(slots)]
    return max(gaps)


def _plain_logits(model: Any, row: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits[0].float()


def _gap(expected: Tensor, logits: Tensor) -> float:
    return float((logits.float() - expected).norm() / expected.norm().clamp_min(1e-12))
