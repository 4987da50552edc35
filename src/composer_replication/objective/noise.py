"""Whether a model's pass is noisy as it stands: dropout, noise on the embeddings, jitter of a router.

Decided by what the modules are set to, not by comparing two passes: below a fresh adapter, whose B is 0, LoRA's dropout
changes nothing yet, and a run that asked the pass then would have another teacher than the same run resumed later.
A model that is called noisy without being so costs one more pass of the live teacher, and no figure changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn

from composer_replication.objective.model_head import causal_lm_of

_NOISE = ("drop", "jitter", "neftune_noise_alpha")
# Rates of heads that a causal language model has none of, though its config may name them.
_OTHER_HEADS = ("classifier", "summary", "seq_classif", "pooler", "head_dropout")
# Draws its experts in training mode, whatever its settings are.
_SAMPLING_ROUTERS = ("PhimoeTopKRouter", "PhimoeSparseMoeBlock")


def is_noisy(model: nn.Module) -> bool:
    """Whether two passes of the model as it is now may differ."""
    body = causal_lm_of(model)
    return any(module.training and _adds_noise(module) for module in body.modules())


def _adds_noise(module: nn.Module) -> bool:
    name = type(module).__name__
    if name in _SAMPLING_ROUTERS:
        return True
    if "dropout" in name.lower() and _is_rate(getattr(module, "p", 0.0)):
        return True
    return any(_is_rate(value) for settings in (vars(module), _config_of(module)) for value in _rates(settings))


def _rates(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Settings that name a noise: a number, or of an adapter layer one number an adapter."""
    for name, value in settings.items():
        if not any(part in name for part in _NOISE) or any(part in name for part in _OTHER_HEADS):
            continue
        if isinstance(value, dict):
            yield from cast("dict[str, Any]", value).values()
        else:
            yield value


def _config_of(module: nn.Module) -> Mapping[str, Any]:
    """Some layers read a rate from their config at every call (Falcon, GPT-Neo, GPT-J)."""
    config = vars(module).get("config")
    return {} if config is None or not hasattr(config, "__dict__") else vars(config)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
