"""A Hugging Face causal LM taken apart into a body that gives hidden rows and a head that gives logits.

Models scale or cap their logits after the head, each in its own way and under its own config names. Rather than trust a
list of names, the candidates are tried once per model on a few tokens: the combination that reproduces the model's own
logits is used, and if none does, an error says so. A head that is *almost* right would train silently on wrong numbers.
"""

from __future__ import annotations

from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.batch.eval_mode import evaluating
from composer_replication.errors import UnsupportedModelError, explain
from composer_replication.loss.linear import LinearHead

_PROBE_TOKENS = 4
# model -> (scale, softcap) that reproduce its logits
_transforms: WeakKeyDictionary[nn.Module, tuple[float, float | None]] = WeakKeyDictionary()


def causal_lm_of(model: nn.Module) -> Any:
    """The Hugging Face model inside a PEFT wrapper, or the model itself."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    if not (hasattr(inner, "get_decoder") and hasattr(inner, "get_output_embeddings")):
        raise UnsupportedModelError(
            explain("model", got=type(model).__name__, expected="a Hugging Face causal LM (get_decoder, LM head)")
        )
    return inner


def hidden_states(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Last hidden states (B, T, H), after the final norm, without computing a single logit.

    Positions are counted from each sequence's first real token, so left padding changes nothing.
    """
    options: dict[str, Any] = {}
    if attention_mask is not None:
        options["attention_mask"] = attention_mask.long()
        options["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return causal_lm_of(model).get_decoder()(input_ids=input_ids, use_cache=False, **options).last_hidden_state


def head_of(model: nn.Module, probe_ids: Tensor) -> LinearHead:
    """The model's head with its logit scale and soft-cap, checked once against the model's own logits."""
    causal_lm = causal_lm_of(model)
    linear = causal_lm.get_output_embeddings()
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise UnsupportedModelError(
            explain(
                f"LM head of {type(causal_lm).__name__}",
                got=type(linear).__name__,
                expected="a plain nn.Linear",
                fix="Leave lm_head out of the adapter's target modules.",
            )
        )
    if causal_lm not in _transforms:
        _transforms[causal_lm] = _find_transform(causal_lm, linear, probe_ids)
    scale, softcap = _transforms[causal_lm]
    return LinearHead(linear.weight, linear.bias, scale, softcap)


def _find_transform(causal_lm: Any, linear: nn.Linear, probe_ids: Tensor) -> tuple[float, float | None]:
    ids = probe_ids[:1, :_PROBE_TOKENS]
    with torch.no_grad(), evaluating(causal_lm):
        hidden = hidden_states(causal_lm, ids, None)
        expected = causal_lm(input_ids=ids, use_cache=False).logits.float()
        weight = linear.weight.to(hidden.dtype)
        bias = None if linear.bias is None else linear.bias.to(hidden.dtype)
        for scale, softcap in product(*_candidates(causal_lm.config)):
            logits = LinearHead(weight, bias, scale, softcap).logits(hidden)
            # Half precision rounds the model's own logits; a wrong scale or a missed cap is far outside this.
            tolerance = (1e-4 if hidden.dtype in (torch.float32, torch.float64) else 2e-2) * expected.abs().max()
            if bool(((logits.float() - expected).abs() <= tolerance).all()):
                return scale, softcap
    raise UnsupportedModelError(
        explain(
            f"logits of {type(causal_lm).__name__}",
            got="a transform after the head that no known scale or soft-cap reproduces",
            expected="softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)",
        )
    )


def _candidates(config: Any) -> tuple[list[float], list[float | None]]:
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scales = [1.0]
    for name in ("logit_scale", "logits_scaling", "output_multiplier"):
        value = getattr(text_config, name, None)
        if isinstance(value, int | float) and value:
            scales += [float(value), 1.0 / float(value)]
    softcap = getattr(text_config, "final_logit_softcapping", None)
    # The cap first: on the small logits of a fresh model a missing cap could hide inside the tolerance.
    return scales, [float(softcap), None] if softcap else [None]
