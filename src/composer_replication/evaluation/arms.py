"""Load the models to compare, one at a time: folders, hub models, or adapters on either of these.

A base model is loaded once for all of its adapters, which are attached and removed in turn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from composer_replication.batch.model_folder import load_adapter, load_model, load_tokenizer, resolve_model
from composer_replication.errors import InputError, explain
from composer_replication.runs.files import ADAPTER_SETTINGS, adapter_settings, control_name
from composer_replication.runs.lineage import read_json_object
from composer_replication.trainer.objective.fingerprint import tokenizer_digest, weights_digest

Precision = Literal["auto", "float32", "bfloat16"]
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# A hub name, such as "org/model-1.5B" or "gpt2"; not "/data/model" or "runs/a/b", which are paths
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Arm(NamedTuple):
    """One model of a comparison: the arm's name, the weights that the user named, their base model, and the adapter."""

    name: str
    weights: str
    base: str
    adapter: str | None


def resolve_arms(before: str, after: str, controls: Sequence[str] = ()) -> list[Arm]:
    """Return the arms `before` and `after`, and one arm per control.

    If the base model of an adapter was a folder that no longer exists, the adapter is loaded on the base model of
    `before`. Raises InputError for weights that cannot be loaded or compared.
    """
    initial = _make_arm("before", before, None)
    weights_by_name = {"after": after} | {control_name(number): weights for number, weights in enumerate(controls, 1)}
    return [initial, *(_make_arm(name, weights, initial.base) for name, weights in weights_by_name.items())]


def _make_arm(name: str, weights: str, default_base: str | None) -> Arm:
    folder = Path(weights)
    if not weights or not (folder / ADAPTER_SETTINGS).is_file():
        if weights and folder.is_dir() and not (folder / "config.json").is_file():
            got = f"{weights!r}, which holds neither config.json nor {ADAPTER_SETTINGS}"
            fix = "Name the folder that `crf train` wrote (RUN/adapter or RUN/model), or a model."
            raise InputError(explain(f"--{name}", got=got, expected="a model or an adapter", fix=fix))
        return Arm(name, weights, resolve_model(weights), None)
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        got = f"{weights!r} without {_ADAPTER_WEIGHTS}"
        fix = "Save it as safetensors: other formats need pickle and are not loaded."
        raise InputError(explain(f"--{name}", got=got, expected="an adapter with safetensors weights", fix=fix))
    settings_base = _base_in_settings(folder)
    base = _choose_base(settings_base, default_base)
    if base is None and settings_base is not None:
        got = f"the adapter {weights!r}, trained on {settings_base!r}"
        fix = "Pass its base model as --before."
        raise InputError(explain(f"--{name}", got=got, expected=f"an adapter on {default_base!r}", fix=fix))
    if base is None:
        got = f"the adapter {weights!r}, which names no base model"
        raise InputError(
            explain(f"--{name}", got=got, expected="an adapter that names its base model, or a whole model")
        )
    return Arm(name, weights, base, weights)


def _base_in_settings(folder: Path) -> str | None:
    base = read_json_object(folder / ADAPTER_SETTINGS).get("base_model_name_or_path")
    return resolve_model(base) if isinstance(base, str) and base else None


def _choose_base(settings_base: str | None, default_base: str | None) -> str | None:
    """Return the base model on which to load an adapter.

    The result is None if no base model is known, or if the two candidates are different models.
    """
    if settings_base is None or default_base is None:
        return default_base or settings_base
    if Path(settings_base).is_dir():
        return default_base if _is_same(settings_base, default_base) else settings_base
    # Neither a folder nor a hub name: the path of a folder that was moved or deleted.
    is_gone = _HUB_NAME.fullmatch(settings_base) is None
    return default_base if is_gone or _is_same(settings_base, default_base) else None


def _is_same(first: str, second: str) -> bool:
    """Return whether both names refer to the same model.

    This holds if both name the same folder, or if `first` is a hub model and `second` a folder with a copy of it.
    """
    if Path(first).exists() and Path(second).exists():
        return Path(first).samefile(second)
    is_copy = Path(second).is_dir() and Path(first).name == Path(second).name
    # The hub's cache stores org/name in a folder models--org--name.
    return first == second or is_copy or f"models--{first.replace('/', '--')}" in Path(second).parts


def digest_of_arm(arm: Arm, model: Any) -> str:
    """Return a digest of an arm's weights. The digest of an adapter also covers its settings, such as its scale."""
    weights = weights_digest(model, with_adapter=arm.adapter is not None)
    if arm.adapter is None:
        return weights
    return hashlib.sha256(weights.encode() + adapter_settings(Path(arm.adapter))).hexdigest()


def load_tokenizers(arms: Sequence[Arm]) -> tuple[dict[str, Any], bool]:
    """Return the tokenizer of each base model, and whether all tokenizers give the same tokens.

    Log-probs can be compared only between models whose tokenizers agree.
    """
    tokenizers = {base: load_tokenizer(base) for base in dict.fromkeys(arm.base for arm in arms)}
    return tokenizers, len({tokenizer_digest(tokenizer) for tokenizer in tokenizers.values()}) == 1


def load_each_model(arms: Sequence[Arm], precision: Precision) -> Iterator[tuple[Arm, Any]]:
    """Yield each arm with its model, on the GPU if there is one.

    Finish using a model before requesting the next one.
    """
    device, dtype = device_and_dtype(precision)
    for base in dict.fromkeys(arm.base for arm in arms):
        model: Any = None
        # Arms are grouped by base model, so they are not yielded in the order of `arms`.
        for arm in (arm for arm in arms if arm.base == base):
            if model is None:
                model = load_model(base, what=f"model {base!r}", dtype=dtype).to(device).eval()
            if arm.adapter is None:
                yield arm, model
                continue
            adapted = load_adapter(model, arm.adapter, what=f"--{arm.name}")
            yield arm, adapted
            # Removing an adapter leaves full copies of modules and changed biases; then the base model is loaded again.
            model = adapted.unload() if all(map(_is_removable, adapted.peft_config.values())) else None
            del adapted
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _is_removable(settings: Any) -> bool:
    full_copies = (getattr(settings, key, None) for key in ("modules_to_save", "trainable_token_indices"))
    return not any(full_copies) and getattr(settings, "bias", "none") == "none"


def device_and_dtype(precision: Precision) -> tuple[torch.device, torch.dtype]:
    """Return the device for the evaluation, and the dtype that `precision` selects on this device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return device, torch.bfloat16 if has_bf16 else torch.float32
    return device, torch.bfloat16 if precision == "bfloat16" else torch.float32
