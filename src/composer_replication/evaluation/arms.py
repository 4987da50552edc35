"""Load the models to compare, one after the other: a folder, a hub name, or an adapter on either.

Adapters on the same base model share it: it is loaded once, and each adapter is attached and removed again.
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
from composer_replication.runs.lineage import read_json_object, read_training
from composer_replication.trainer.objective.fingerprint import tokenizer_digest, weights_digest
from composer_replication.trainer.sessions.dataset import NO_OTHER_KIND, TURNED

Precision = Literal["auto", "float32", "bfloat16"]
_ADAPTER, _ADAPTER_WEIGHTS = ADAPTER_SETTINGS, "adapter_model.safetensors"
# Names of channels 2 and 3 in a training record.
_HINTS, _PAIRS = "sdpo_kl", "trace_replay_dpo"
# "org/model-1.5B" or "gpt2" -> a hub name; not "/data/model" or "runs/a/b", which are paths
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Arm(NamedTuple):
    """One model of a comparison: its arm, what the user named, its base model, and the adapter on it."""

    name: str
    weights: str
    base: str
    adapter: str | None


def arms_of(before: str, after: str, controls: Sequence[str] = ()) -> list[Arm]:
    """Return the arms in this order. An adapter whose base was a folder that no longer exists is put on `before`'s
    base.
    """
    first = _arm("before", before, None)
    by_name = [("after", after), *((control_name(shuffle), model) for shuffle, model in enumerate(controls, start=1))]
    return [first, *(_arm(name, model, first.base) for name, model in by_name)]


def _arm(name: str, weights: str, default: str | None) -> Arm:
    folder = Path(weights)
    if not weights or not (folder / _ADAPTER).is_file():
        if weights and folder.is_dir() and not (folder / "config.json").is_file():
            got = f"{weights!r}, which holds neither config.json nor {_ADAPTER}"
            fix = "Name the folder that `crf train` wrote (RUN/adapter or RUN/model), or a model."
            raise InputError(explain(f"--{name}", got=got, expected="a model or an adapter", fix=fix))
        return Arm(name, weights, resolve_model(weights), None)
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        got = f"{weights!r} without {_ADAPTER_WEIGHTS}"
        fix = "Other formats need pickle and are not loaded."
        raise InputError(explain(f"--{name}", got=got, expected="an adapter as safetensors", fix=fix))
    own_base = _base_in_settings(folder)
    base = _base_of(own_base, default)
    if base is None and own_base is not None:
        got = f"the adapter {weights!r}, trained on {own_base!r}"
        fix = "Pass its base model as --before."
        raise InputError(explain(f"--{name}", got=got, expected=f"an adapter on {default!r}", fix=fix))
    if base is None:
        got = f"the adapter {weights!r}, which names no base model"
        raise InputError(
            explain(f"--{name}", got=got, expected="an adapter that names its base model, or a whole model")
        )
    return Arm(name, weights, base, weights)


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Return the settings of an adapter."""
    return read_json_object(folder / _ADAPTER)


def _base_in_settings(folder: Path) -> str | None:
    base = adapter_facts(folder).get("base_model_name_or_path")
    return resolve_model(base) if isinstance(base, str) and base else None


def _base_of(own_base: str | None, default: str | None) -> str | None:
    """Return the base model of an adapter, or None if it names another one than `default` or there is none at all."""
    # One of them is missing, so the other decides.
    if own_base is None or default is None:
        return default or own_base
    if Path(own_base).is_dir():
        return default if _is_same(own_base, default) else own_base
    # A path that no longer exists cannot be a hub name, so the adapter goes on the default.
    is_gone = _HUB_NAME.fullmatch(own_base) is None
    return default if is_gone or _is_same(own_base, default) else None


def control_lacks(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence for each channel that ran in the training but not in its control.

    The training records of both tell; weights without a record are trusted to be what the user says.
    """
    records = {arm.name: read_training(Path(arm.weights)) for arm in arms}
    real, control = records.get("after"), records.get("control")
    if not real or not control:
        return []
    ran, ran_in_control = ({row["name"] for row in record["channels"] if row["steps"]} for record in (real, control))
    sentences: list[str] = []
    if _HINTS in ran - ran_in_control:
        sentences.append("No control for channel 2: it had no hint of another kind to teach.")
    elif num_uncontrolled := control["drops"].get(f"{_HINTS}: {NO_OTHER_KIND}"):
        sentences.append(f"{num_uncontrolled:,} sites have no control: there is no hint of another kind for them.")
    if _PAIRS in ran and (_PAIRS not in ran_in_control or control["counts"].get(TURNED) == 0):
        sentences.append("No control for channel 3: it had no pair to turn round.")
    return sentences


def _is_same(one: str, other_name: str) -> bool:
    """Return whether both name the same folder, or one a hub model and the other a folder with a copy of it."""
    if Path(one).exists() and Path(other_name).exists():
        return Path(one).samefile(other_name)
    is_copy = Path(other_name).is_dir() and Path(one).name == Path(other_name).name
    # The hub's cache keeps org/name in a folder models--org--name.
    return one == other_name or is_copy or f"models--{one.replace('/', '--')}" in Path(other_name).parts


def digest_of_arm(arm: Arm, model: Any) -> str:
    """Return a digest that identifies these weights; an adapter's includes its settings, such as its scale."""
    weights = weights_digest(model, with_adapter=arm.adapter is not None)
    if arm.adapter is None:
        return weights
    return hashlib.sha256(weights.encode() + adapter_settings(Path(arm.adapter))).hexdigest()


def tokenizers_of(arms: Sequence[Arm]) -> tuple[dict[str, Any], bool]:
    """Return the tokenizer of each base model, and whether all tokenize alike: otherwise log-probs
    cannot be compared.
    """
    loaded = {base: load_tokenizer(base) for base in dict.fromkeys(arm.base for arm in arms)}
    return loaded, len({tokenizer_digest(tokenizer) for tokenizer in loaded.values()}) == 1


def load_each_model(arms: Sequence[Arm], precision: Precision) -> Iterator[tuple[Arm, Any]]:
    """Yield each arm with its model, on the GPU if there is one. A model is valid until the next one is requested."""
    device, dtype = device_and_dtype(precision)
    for base in dict.fromkeys(arm.base for arm in arms):
        model: Any = None
        # Grouped by base model, not in the order of the arms.
        for arm in (arm for arm in arms if arm.base == base):
            if model is None:
                model = load_model(base, what=f"model {base!r}", dtype=dtype).to(device).eval()
            if arm.adapter is None:
                yield arm, model
                continue
            adapted = load_adapter(model, arm.adapter, what=f"--{arm.name}")
            yield arm, adapted
            # Full copies of modules and changed biases remain when an adapter is removed, so the base is loaded again.
            model = adapted.unload() if all(map(_only_adds, adapted.peft_config.values())) else None
            del adapted
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _only_adds(settings: Any) -> bool:
    is_whole = (getattr(settings, key, None) for key in ("modules_to_save", "trainable_token_indices"))
    return not any(is_whole) and getattr(settings, "bias", "none") == "none"


def device_and_dtype(precision: Precision) -> tuple[torch.device, torch.dtype]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if precision == "auto":
        is_half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return device, torch.bfloat16 if is_half else torch.float32
    return device, torch.bfloat16 if precision == "bfloat16" else torch.float32
