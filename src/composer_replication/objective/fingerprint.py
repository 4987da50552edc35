"""What reference log-probs were computed with: the start weights, the tokenizer, and the template as it was used."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.render import Renderer
from composer_replication.objective.model_head import causal_lm_of
from composer_replication.objective.wrapped import is_sharded

# What a config says about the machine, the way of running and the history of a model, not about what it computes.
_VOLATILE = {
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "attn_implementation",
    "transformers_version",
    "use_cache",
    "architectures",
    "id2label",
    "label2id",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "attention_dropout",
}


class Fingerprint(NamedTuple):
    """Three digests; any of them different makes stored numbers those of something else."""

    weights: str
    tokenizer: str
    template: str

    def differences(self, other: Fingerprint) -> list[str]:
        return [name for name, mine, theirs in zip(self._fields, self, other, strict=True) if mine != theirs]


def fingerprint_of(model: nn.Module, renderer: Renderer) -> Fingerprint:
    """Of the weights below any adapter, which are the reference, and of what turns conversations into ids."""
    return Fingerprint(weights_digest(model), tokenizer_digest(renderer.tokenizer), _digest_of(renderer.settings))


def weights_digest(model: nn.Module) -> str:
    """Names, dtypes, shapes and bytes of weights and buffers, and the config; an adapter on top changes nothing."""
    causal_lm = causal_lm_of(model)
    for module in causal_lm.modules():
        if is_sharded(model) and hasattr(module, "reshard"):  # after a pass the root's weights may be whole, and cast
            module.reshard()
    adapted = [name for name, module in causal_lm.named_modules() if hasattr(module, "base_layer")]
    saved = [name for name, module in causal_lm.named_modules() if hasattr(module, "original_module")]
    total = hashlib.sha256(_digest_of(_config_of(causal_lm)).encode())
    found: dict[str, Tensor] = {}
    kept = set(causal_lm.state_dict())
    buffers = ((name, buffer) for name, buffer in causal_lm.named_buffers() if name in kept)
    for name, tensor in (*causal_lm.named_parameters(), *buffers):
        plain = _name_below_adapters(name, adapted, saved)
        if plain is not None:
            found[plain] = tensor
            found |= {f"{plain}.{key}": value for key, value in _quantisation(tensor).items()}
    for name in sorted(found):
        tensor = found[name].detach()
        whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore
        total.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        total.update(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    return total.hexdigest()


def _config_of(causal_lm: Any) -> dict[str, Any]:
    """What the weights mean: rotary base, windows, norms. Two models with one set of weights may differ here."""
    return json.loads(json.dumps(_without_volatile(causal_lm.config.to_dict()), sort_keys=True, default=str))


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_volatile(each) for key, each in value.items() if key not in _VOLATILE}
    return value


def _quantisation(tensor: Tensor) -> dict[str, Tensor]:
    """The scales of a weight that is kept in few bits."""
    state: Any = getattr(tensor, "quant_state", None)
    if state is None or not hasattr(state, "as_dict"):
        return {}
    return {key: value for key, value in state.as_dict(packed=True).items() if isinstance(value, Tensor)}


def _name_below_adapters(name: str, adapted: list[str], saved: list[str]) -> str | None:
    """A weight's name as if there were no adapter; None for a weight of the adapter itself."""
    for inner, modules in (("base_layer", adapted), ("original_module", saved)):
        for module in modules:
            if name.startswith(f"{module}."):
                rest = name.removeprefix(f"{module}.")
                if not rest.startswith(f"{inner}."):
                    return None
                name = f"{module}.{rest.removeprefix(f'{inner}.')}"
    return name


def tokenizer_digest(tokenizer: Any) -> str:
    """The whole tokenizer as it turns text into ids; how it would pad or cut a batch does not matter."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _digest_of({"vocabulary": tokenizer.get_vocab(), "added": sorted(tokenizer.get_added_vocab().items())})
    settings = json.loads(backend.to_str())
    return _digest_of({key: value for key, value in settings.items() if key not in ("truncation", "padding")})


def _digest_of(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
