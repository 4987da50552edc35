"""Compute the fingerprint of a model and its tokenizer, to tell whether stored log-probs are stale.

A fingerprint consists of digests of the initial weights, the tokenizer and the template in use, and of the precision.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.batch.render.renderer import Renderer
from composer_replication.trainer.objective.distributed import bare_name, is_sharded, unwrapped
from composer_replication.trainer.objective.model_head import get_causal_lm

# Config keys that describe the machine, the runtime or the history of a model, and do not affect its results.
_IGNORED_CONFIG_KEYS = {
    "_name_or_path",
    "dtype",  # depends on who saves the config; the weights are hashed with their own dtypes
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


# "layers.0.q_proj.lora_B.default.weight" and "embed_tokens.lora_embedding_B.default"; not "lora_A" or "lora_Bias"
_LORA_B = re.compile(r"\blora_(?:embedding_)?B\b")
# How many values `_change_marker` reads from each tensor.
_NUM_SAMPLED_VALUES = 64
# The state of each model when it was last hashed, and the resulting digest.
_digests: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()


class Fingerprint(NamedTuple):
    """Digests of the weights, the tokenizer and the template, and the precision.

    Stored log-probs are stale if any of these differs.
    """

    weights: str
    tokenizer: str
    template: str
    precision: str
    """The value of `compute_precision`: the same weights give other log-probs under autocast."""

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the names of the fields in which two fingerprints differ."""
        values = zip(self._fields, self, other, strict=True)
        return [name for name, value, other_value in values if value != other_value]


def compute_fingerprint(model: nn.Module, renderer: Renderer, *, with_adapter: bool = False) -> Fingerprint:
    """Return the fingerprint of the reference weights, the tokenizer, the template and the precision."""
    tokenizer, template = tokenizer_digest(renderer.tokenizer), _hash_json(renderer.settings)
    return Fingerprint(weights_digest(model, with_adapter=with_adapter), tokenizer, template, compute_precision(model))


def compute_precision(model: nn.Module) -> str:
    """Return the name of the dtype in which a pass would compute now: autocast's if on, else the weights'."""
    tensors = _base_tensors(get_causal_lm(model)).values()
    own_dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    device = next(iter(tensors)).device.type
    if own_dtypes == {torch.float64}:  # autocast does not touch double precision
        used = own_dtypes
    elif torch.is_autocast_enabled(device):
        used = {torch.get_autocast_dtype(device)}
    else:
        sharded = _dtype_of_shards(model)
        used = own_dtypes if sharded is None else {sharded}
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in used))


def _dtype_of_shards(model: nn.Module) -> torch.dtype | None:
    """Return the dtype to which FSDP2 casts weights during a pass, or None if it does not cast them."""
    states: list[Any] = (
        [getattr(module, "_get_fsdp_state", None) for module in model.modules()] if is_sharded(model) else []
    )
    return next((state()._mp_policy.param_dtype for state in states if state is not None), None)


def weights_digest(model: nn.Module, *, with_adapter: bool = False) -> str:
    """Return a digest of the config, and of all weights and buffers of the model without its adapter.

    It covers their names, dtypes, shapes and bytes; tensors on the meta device have no bytes. `with_adapter` includes
    the adapter's own weights. For a model that is not sharded, the digest is cached as long as `_change_marker` reports
    no change.
    """
    module, sharded = _model_below_adapter(model), is_sharded(model)
    for submodule in module.modules() if sharded else ():
        if hasattr(submodule, "reshard"):  # after a pass the root's weights may still be whole and cast
            submodule.reshard()
    tensors = _base_tensors(module)
    for name, tensor in tuple(tensors.items()):
        tensors |= {f"{name}.{key}": value for key, value in _quantization_scales(tensor).items()}
    config = _hash_json(_relevant_config(module))
    if with_adapter and (own_tensors := adapter_tensors(module)):
        return _hash_tensors(weights_digest(model), own_tensors)
    if sharded:  # all processes gather together, so none of them may use a cached digest
        return _hash_tensors(config, tensors)
    state = _change_marker(config, tensors)
    cache_entry = _digests.get(module)
    if cache_entry is None or cache_entry[0] != state:
        cache_entry = _digests[module] = state, _hash_tensors(config, tensors)
    return cache_entry[1]


def has_no_weights(model: nn.Module) -> bool:
    """Return whether all parameters of the model without its adapter are zeros or on the meta device.

    Such a model was created but its weights were never loaded: with FSDP's `cpu_ram_efficient_loading`, all ranks but
    rank 0 start that way. If the model is sharded, only the parameters on this rank are checked.
    """
    below = _model_below_adapter(model)
    own_ids = {id(tensor) for tensor in adapter_tensors(below).values()}
    for tensor in below.parameters():
        local: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
        if id(tensor) not in own_ids and not local.is_meta and bool(local.any()):
            return False
    return True


def trained_adapter_digest(model: nn.Module) -> str | None:
    """Return a digest of an adapter's own weights.

    Returns None without an adapter, or if it is a LoRA that was never trained (all B are zero).
    """
    own_tensors = adapter_tensors(_model_below_adapter(model))
    lora_Bs = [tensor for name, tensor in own_tensors.items() if _LORA_B.search(name)]
    is_fresh = lora_Bs and not any(not tensor.is_meta and bool(_full_tensor(tensor).any()) for tensor in lora_Bs)
    if not own_tensors or is_fresh:
        return None
    return _hash_tensors("", own_tensors)


def _hash_tensors(config: str, tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256(config.encode())
    for name in sorted(tensors):
        whole = _full_tensor(tensors[name])
        total.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        if not whole.is_meta:
            total.update(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    return total.hexdigest()


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()  # pyright: ignore


def _change_marker(config: str, tensors: dict[str, Tensor]) -> str:
    """Return a digest that is cheap to compute and changes if the weights change.

    It covers their addresses, version counters and a sample of their values. The sample alone would miss a change of a
    single value, and torch's version counters miss changes by custom kernels.
    """
    hasher = hashlib.sha256(config.encode())
    for name, tensor in tensors.items():
        about = (name, tensor.dtype, tuple(tensor.shape), tensor.device, tensor.data_ptr(), tensor._version)
        hasher.update(repr(about).encode())
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().reshape(-1)
            # The step is odd, because a divisor of the row length would sample the same few columns of every row.
            few = flat[:: max(1, flat.numel() // _NUM_SAMPLED_VALUES) | 1].contiguous().cpu()
            hasher.update(few.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    return hasher.hexdigest()


def _model_below_adapter(model: nn.Module) -> Any:
    inner = unwrapped(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _base_tensors(causal_lm: nn.Module) -> dict[str, Tensor]:
    """Return the weights and saved buffers of the model without its adapter, under their original names."""
    # The attributes of PEFT's wrappers that hold the wrapped layer: trained rows, LoRA, modules_to_save.
    rows = [name for name, module in causal_lm.named_modules() if hasattr(module, "token_adapter")]
    adapted = [name for name, module in causal_lm.named_modules() if hasattr(module, "base_layer")]
    saved = [name for name, module in causal_lm.named_modules() if hasattr(module, "original_module")]
    wrapped = {
        "token_adapter.base_layer": rows,
        "base_layer": [name for name in adapted if name.removesuffix(".token_adapter") not in rows],
        "original_module": [name for name in saved if name not in rows],
    }
    state_keys = set(causal_lm.state_dict())
    buffers = ((name, buffer) for name, buffer in causal_lm.named_buffers() if name in state_keys)
    named_tensors = (
        (_name_below_adapters(name, wrapped), tensor) for name, tensor in (*causal_lm.named_parameters(), *buffers)
    )
    return {bare_name(name): tensor for name, tensor in named_tensors if name is not None}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return an adapter's own weights by name: all parameters that the model without its adapter does not have."""
    causal_lm = _model_below_adapter(model)
    below = {id(tensor) for tensor in _base_tensors(causal_lm).values()}
    return {bare_name(name): tensor for name, tensor in causal_lm.named_parameters() if id(tensor) not in below}


def _relevant_config(causal_lm: Any) -> dict[str, Any]:
    """Return the part of the config that affects results: rotary base, windows, norms and so on."""
    config: Any = getattr(causal_lm, "config", None)
    plain = config.to_dict() if hasattr(config, "to_dict") else {}
    return json.loads(json.dumps(_without_volatile(plain), sort_keys=True, default=str))


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _without_volatile(setting) for key, setting in value.items() if key not in _IGNORED_CONFIG_KEYS
        }
    return value


def _quantization_scales(tensor: Tensor) -> dict[str, Tensor]:
    """Return the scales of a quantized weight (bitsandbytes)."""
    state: Any = getattr(tensor, "quant_state", None)
    if state is None or not hasattr(state, "as_dict"):
        return {}
    return {key: value for key, value in state.as_dict(packed=True).items() if isinstance(value, Tensor)}


def _name_below_adapters(name: str, wrapped: Mapping[str, list[str]]) -> str | None:
    """Return the name that a weight had before adapters wrapped its layer, or None if it is an adapter's own weight.

    `wrapped` maps the attribute that holds the wrapped layer to the names of the wrapper modules.
    """
    for inner, modules in wrapped.items():
        for module in modules:
            if name.startswith(f"{module}."):
                rest = name.removeprefix(f"{module}.")
                if not rest.startswith(f"{inner}."):
                    return None
                name = f"{module}.{rest.removeprefix(f'{inner}.')}"
    return name


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of how the tokenizer turns text into ids; padding and truncation settings are left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A custom tokenizer without a vocabulary is covered by the digest of the template, which includes some of its ids.
    if backend is None and not hasattr(tokenizer, "get_vocab"):
        return _hash_json({"type": type(tokenizer).__qualname__})
    if backend is None:
        return _hash_json({"vocabulary": tokenizer.get_vocab(), "added": sorted(tokenizer.get_added_vocab().items())})
    settings = json.loads(backend.to_str())
    return _hash_json({key: value for key, value in settings.items() if key not in ("truncation", "padding")})


def _hash_json(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
