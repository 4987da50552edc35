"""Which model a checkpoint belongs to: its class, config and parameters, and under an adapter also its base weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.errors import StaleArtefactError, explain
from composer_replication.objective.wrapped import unwrapped

# What a config says about how a model is run, and what the trainer itself sets in it.
_VOLATILE = {
    "transformers_version",
    "use_cache",
    "architectures",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
_ADAPTER_VOLATILE = {"base_model_name_or_path", "revision", "inference_mode", "auto_mapping"}
# Wrappers put their own steps into parameters' names.
_WRAPPER_STEPS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module._fsdp_wrapped_module.")
_SAMPLED_TENSORS = 64
_SAMPLED_VALUES = 4096
_MAX_NAMED = 6


def model_identity(model: nn.Module) -> dict[str, Any]:
    """As a JSON object. The bytes of weights count only where a checkpoint does not hold them, below an adapter."""
    bare: Any = unwrapped(model)
    adapters: Mapping[str, Any] = getattr(bare, "peft_config", None) or {}
    base: Any = bare.get_base_model() if adapters and hasattr(bare, "get_base_model") else bare
    config: Any = getattr(base, "config", None)
    return {
        "class": type(base).__name__,
        "config": _plain(config.to_dict(), _VOLATILE) if hasattr(config, "to_dict") else {},
        "adapters": {name: _plain(each.to_dict(), _ADAPTER_VOLATILE) for name, each in adapters.items()},
        "parameters": {
            _bare_name(name): f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
            for name, each in bare.named_parameters()
        },
        "base_weights": _base_sample(bare) if adapters else None,
    }


def weights_digest(model: nn.Module) -> str:
    """A digest of some values of every parameter: the same for the same weights, on any device, wrapped or not.

    Of a sharded parameter the part on this process is read, since all processes would have to gather the whole at the
    same moment: compare such a digest with one of the same process and the same sharding. A parameter on the meta
    device counts with its name, dtype and shape.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(unwrapped(model).named_parameters(), key=lambda item: _bare_name(item[0])):
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(_sample(name, local))
    return digest.hexdigest()


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise StaleArtefactError that says what differs between a checkpoint's model and the one in use."""
    found = list(_differences(saved, now))
    if found:
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        got = "; ".join(found[:_MAX_NAMED]) + more
        fix = "Build the model the checkpoint was saved with, or start a new run in another folder."
        raise StaleArtefactError(explain(f"checkpoint {folder}", got=got, expected="the model in use", fix=fix))


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if saved["class"] != now["class"]:
        yield f"class {saved['class']} in the checkpoint, {now['class']} in use"
    if saved["adapters"].keys() != now["adapters"].keys():
        old, new = (", ".join(sorted(each["adapters"])) or "none" for each in (saved, now))
        yield f"adapters {old} in the checkpoint, {new} in use"
    for part in ("config", "adapters"):
        old, new = (dict(_flat(each[part])) for each in (saved, now))
        # A key that only one of the two knows is most often one that another version of a library has.
        for key in sorted(old.keys() & new.keys()):
            if old[key] != new[key]:
                yield f"{part}.{key} {old[key]!r:.60} in the checkpoint, {new[key]!r:.60} in use"
    old, new = saved["parameters"], now["parameters"]
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"parameter {name}: {old.get(name, 'none')} in the checkpoint, {new.get(name, 'none')} in use"
    if saved["base_weights"] != now["base_weights"]:
        yield "other frozen weights below the adapter than those it was trained on"


def _base_sample(model: nn.Module) -> str:
    """A digest of some values of some frozen tensors: reading all of a large base at every start would take long."""
    frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
    digest = hashlib.sha256()
    for name, tensor in frozen[:: max(1, len(frozen) // _SAMPLED_TENSORS)]:
        whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore
        digest.update(_sample(name, whole))
    return digest.hexdigest()


def _sample(name: str, tensor: Tensor) -> bytes:
    """A tensor's name, dtype and shape, and values of it that are evenly spread."""
    head = f"{_bare_name(name)} {tensor.dtype} {list(tensor.shape)}\n".encode()
    if tensor.is_meta or not tensor.numel():
        return head
    values = tensor.detach().reshape(-1)
    # An odd step: one that divides the length of the rows would read the same few columns of each.
    values = values[:: max(1, values.numel() // _SAMPLED_VALUES) | 1].contiguous().cpu()
    return head + values.view(torch.uint8).numpy().tobytes()


def _bare_name(name: str) -> str:
    for step in _WRAPPER_STEPS:
        name = name.replace(step, "")
    return name


def _plain(settings: Mapping[str, Any], volatile: set[str]) -> dict[str, Any]:
    kept = {key: each for key, each in settings.items() if key not in volatile and not str(key).startswith("_")}
    return json.loads(json.dumps(kept, sort_keys=True, default=_as_text))


def _as_text(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
