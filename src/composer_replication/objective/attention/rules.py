"""What a model's config says about trees, before anything runs: kinds of layers, windows, frequencies by length.

A config can only forbid. What it does not say (a convolution inside a layer, a selection by blocks) is found out by
the experiment in `objective.attention.trial`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from composer_replication.errors import UnsupportedModelError, explain

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
