"""Hidden rows of a whole token tree: in one masked pass where the model allows it, sequence by sequence where not.

Which models allow it, and by which kind of attention, is found out by experiment: a small tree and its sequences must
give the same rows. A model that fails every kind, or a tree with a path longer than a sliding window, runs flat, gives
the same numbers, and says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.batch.eval_mode import evaluating
from composer_replication.batch.tree import TokenTree, build_tree
from composer_replication.batch.tree_attention import Kind, tree_mask, use_tree_attention
from composer_replication.batch.windows import bucket
from composer_replication.errors import UnsupportedModelError, explain
from composer_replication.objective.model_head import causal_lm_of, hidden_states
from composer_replication.objective.wrapped import agreed_most, inside_forward

_PROBE = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 8, 7], [1, 2, 3, 4, 2, 2], [1, 2, 3, 9, 8, 4], [4, 4, 1])


class TreeRows(NamedTuple):
    """Last hidden states (L, H), one row a token of the tree; by which attention, or why not as a tree."""

    hidden: Tensor
    kind: Kind | None
    flat_because: str | None


class _Found(NamedTuple):
    kind: Kind | None
    flat_because: str | None


_probed: WeakKeyDictionary[nn.Module, dict[str, _Found]] = WeakKeyDictionary()
# What models raise that were not written for such a mask; that it is not implemented is one of them.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)


def tree_hidden_states(model: nn.Module, tree: TokenTree) -> TreeRows:
    """The rows of every token, as the flat sequences would give them."""
    body = causal_lm_of(model)
    found: list[_Found] = []

    def work() -> Tensor:
        found.append(_how(model, tree))
        kind = found[0].kind
        return _as_sequences(model, tree) if kind is None else _as_tree(body, tree, kind)

    return TreeRows(inside_forward(model, body, work), *found[0])


def why_flat(model: nn.Module, tree: TokenTree) -> str | None:
    """Why this tree cannot go through this model in one pass; None when it can."""
    body = causal_lm_of(model)
    found: list[_Found] = []

    def work() -> None:
        found.append(_how(model, tree))

    inside_forward(model, body, work)
    return found[0].flat_because


def _how(model: nn.Module, tree: TokenTree) -> _Found:
    body = causal_lm_of(model)
    window = _shortest_window(body.config)
    longest = tree.longest_path
    _check_positions(body, longest)
    too_long = window is not None and longest > window
    # Processes that share the weights must take the same way, or they wait for each other for ever.
    (anywhere,) = agreed_most([model], [int(too_long)])
    if too_long:
        return _Found(None, f"a path of {longest} tokens is longer than the sliding window of {window}")
    if anywhere:
        return _Found(None, f"another process has a path longer than the sliding window of {window}")
    if dropout_on(body) and not body.config._attn_implementation.endswith("eager") and tree.input_ids.is_cuda:
        return _Found(None, "attention dropout is on, which no attention over trees has on this device")
    known = _probed.setdefault(body, {})
    setting = f"{tree.input_ids.device} {_compute_dtype(body)} {body.config._attn_implementation}"
    if setting not in known:
        known[setting] = _probe(model, tree.input_ids.device)
    return known[setting]


def dropout_on(body: nn.Module) -> bool:
    """Whether the attention of this model as it is now is noisy."""
    return any(module.training and getattr(module, "attention_dropout", 0.0) for module in body.modules())


def _check_positions(body: Any, longest: int) -> None:
    """Some models choose their rotary frequencies by the longest sequence of a call: a tree has several lengths."""
    text = body.config.get_text_config() if hasattr(body.config, "get_text_config") else body.config
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    settings = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    kinds = {each.get("rope_type") or each.get("type") for each in settings}
    limits = [each.get("original_max_position_embeddings") for each in settings]
    limits.append(getattr(text, "original_max_position_embeddings", None))
    limit = min((each for each in limits if each), default=text.max_position_embeddings)
    if kinds & {"dynamic", "longrope"} and longest > limit:
        fix = "Cut sessions into windows of that length, or use the flat collator."
        got = f"a path of {longest} tokens, for which the frequencies of {sorted(map(str, kinds))} change"
        raise UnsupportedModelError(explain("token tree", got=got, expected=f"at most {limit} tokens", fix=fix))


def _compute_dtype(body: nn.Module) -> torch.dtype:
    parameter = next(body.parameters())
    device = parameter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


def _kinds(body: Any, device: torch.device) -> tuple[Kind, ...]:
    """What is worth trying, best first."""
    if body.config._attn_implementation.endswith("eager"):
        return ("dense",)
    if device.type != "cuda":
        return ("dense", "paths")
    half = _compute_dtype(body) in (torch.float16, torch.bfloat16)
    return ("flash", "flex", "paths") if half else ("flex", "paths")


def _probe(model: nn.Module, device: torch.device) -> _Found:
    """The first kind by which rows of a small tree equal those of its sequences, in eval mode and the model's dtype."""
    tree = build_tree(_PROBE).to(device)
    body = causal_lm_of(model)
    reasons: list[str] = []
    with torch.no_grad(), evaluating(model):
        flat = _as_sequences(model, tree).float()
        # A plain causal pass over the tree is wrong on purpose: what a right one may differ by must be far from that.
        wrong = _worst_row(_run(body, tree, None).float(), flat)
        limit = 1e-1 if _compute_dtype(body) in (torch.float16, torch.bfloat16) else 1e-3
        for kind in _kinds(body, device):
            try:
                masked = _as_tree(body, tree, kind).float()
            except torch.OutOfMemoryError:  # says nothing about the model
                raise
            except _REFUSALS as error:
                reasons.append(f"{kind}: {type(error).__name__}: {error}"[:200])
                continue
            worst = _worst_row(masked, flat)
            if worst <= min(limit, wrong / 5):
                return _Found(kind, None)
            reasons.append(f"{kind}: a row of a tree differs from its sequence's by {worst:.1e} of its size")
    return _Found(None, "the model takes no tree's mask; " + "; ".join(reasons))


def _worst_row(got: Tensor, wanted: Tensor) -> float:
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)).max())


def _as_tree(body: Any, tree: TokenTree, kind: Kind) -> Tensor:
    if kind == "dense":
        return _run(body, tree, _dense(body, tree))
    length = len(tree)
    # FlexAttention is compiled for a length; a padded tree meets one that was compiled before.
    padded = tree.padded(bucket(length)) if kind == "flex" else tree
    use_tree_attention(body)
    return _run(body, padded, tree_mask(padded, kind))[:length]


def _dense(body: Any, tree: TokenTree) -> Tensor:
    """Boolean where the attention takes it; added to the scores where it is written out."""
    sees = tree.dense_mask()[None, None]
    if not body.config._attn_implementation.endswith("eager"):
        return sees
    dtype = _compute_dtype(body)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)


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
    (passes,) = agreed_most([model], [len(found)])
    extra = [hidden_states(model, tree.input_ids[None, :1], None).sum() for _ in range(passes - len(found))]
    hidden = torch.cat(found)
    result = hidden.new_zeros(len(tree), hidden.shape[-1]).index_copy(0, torch.cat(rows_of), hidden)
    return result + 0.0 * torch.stack(extra).sum() if extra else result


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
