"""Which model a checkpoint belongs to: its class, config and parameters, and under an adapter also its base weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from composer_replication.canonical_json import nested_items
from composer_replication.errors import StaleArtefactError, explain
from composer_replication.objective.fingerprint import bare_name, weights_digest
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
            bare_name(name): f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
            for name, each in bare.named_parameters()
        },
        "base_weights": weights_digest(bare) if adapters else None,
    }


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
        old, new = (dict(nested_items(each[part])) for each in (saved, now))
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


def _plain(settings: Mapping[str, Any], volatile: set[str]) -> dict[str, Any]:
    kept = {key: each for key, each in settings.items() if key not in volatile and not str(key).startswith("_")}
    return json.loads(json.dumps(kept, sort_keys=True, default=_as_text))


def _as_text(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
