"""The weights that are compared: a folder, a name on the hub, or an adapter on either, loaded one after the other.

Adapters on the same weights share them: those are loaded once, and each adapter is put on and taken off again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from composer_replication.batch.model_folder import load_model, load_tokenizer, reading
from composer_replication.canonical_json import decode_object
from composer_replication.errors import InputError, explain
from composer_replication.objective.fingerprint import tokenizer_digest
from composer_replication.optional import require
from composer_replication.sessions.shuffled import NO_OTHER_KIND, TURNED

ArmName = Literal["before", "after", "control"]
Precision = Literal["auto", "float32", "bfloat16"]
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HINTS, _PAIRS = "sdpo_kl", "trace_replay_dpo"


class Arm(NamedTuple):
    """One set of weights: what it was called, the whole weights in it, and the adapter on them."""

    name: ArmName
    given: str
    base: str
    adapter: str | None


def arms_of(before: str, after: str, control: str | None = None) -> list[Arm]:
    """In this order. An adapter whose own base is no folder here is put on the weights of `before`."""
    first = _arm("before", before, None)
    named: list[tuple[ArmName, str | None]] = [("after", after), ("control", control)]
    return [first, *(_arm(name, given, first.base) for name, given in named if given is not None)]


def _arm(name: ArmName, given: str, default: str | None) -> Arm:
    folder = Path(given)
    if not given or not (folder / _ADAPTER).is_file():
        if given and folder.is_dir() and not (folder / "config.json").is_file():
            got = f"{given!r}, which holds neither config.json nor {_ADAPTER}"
            fix = "Name the folder that `crf train` wrote (RUN/adapter or RUN/model), or a model."
            raise InputError(explain(f"--{name}", got=got, expected="weights or an adapter", fix=fix))
        return Arm(name, given, given, None)
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        got = f"{given!r} without {_ADAPTER_WEIGHTS}"
        fix = "Weights in other files would have to be unpickled, which is not done."
        raise InputError(explain(f"--{name}", got=got, expected="an adapter as safetensors", fix=fix))
    base = _base_of(folder, default)
    if base is None:
        got = f"the adapter {given!r}, which does not say what it stands on"
        raise InputError(explain(f"--{name}", got=got, expected="an adapter with a base, or whole weights"))
    return Arm(name, given, base, given)


def _base_of(folder: Path, default: str | None) -> str | None:
    try:
        base = json.loads((folder / _ADAPTER).read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError, UnicodeDecodeError) as error:
        raise InputError(explain(str(folder / _ADAPTER), got=error, expected="a JSON object")) from error
    named = base if isinstance(base, str) and base else None
    if named is not None and Path(named).is_dir():
        return default if default is not None and _is_same(named, default) else named
    return default or named


def control_lacks(arms: Sequence[Arm]) -> list[str]:
    """What a control was not taught though the training it is to be compared with was, in sentences.

    By the records of both trainings; weights without one are taken for what they are said to be.
    """
    records = {arm.name: _training_of(Path(arm.given)) for arm in arms}
    real, control = records.get("after"), records.get("control")
    if not real or not control:
        return []
    ran, ran_in_control = ({each["name"] for each in record["channels"] if each["steps"]} for record in (real, control))
    said: list[str] = []
    if _HINTS in ran - ran_in_control:
        said.append("No control for channel 2: it had no hint of another kind to teach.")
    elif left := control["drops"].get(f"{_HINTS}: {NO_OTHER_KIND}"):
        said.append(f"{left:,} sites have no control: there is no hint of another kind for them.")
    if _PAIRS in ran and (_PAIRS not in ran_in_control or control["counts"].get(TURNED) == 0):
        said.append("No control for channel 3: it had no pair to turn round.")
    return said


def _training_of(folder: Path) -> dict[str, Any]:
    path = folder / "training.json"
    return decode_object(path.read_bytes()) if path.is_file() else {}


def _is_same(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def tokenizers_of(arms: Sequence[Arm]) -> tuple[dict[str, Any], bool]:
    """By the weights they belong to, and whether all make the same tokens: log-probs of other tokens do not compare."""
    loaded = {base: load_tokenizer(base) for base in dict.fromkeys(arm.base for arm in arms)}
    return loaded, len({tokenizer_digest(each) for each in loaded.values()}) == 1


def each_model(arms: Sequence[Arm], precision: Precision) -> Iterator[tuple[Arm, Any]]:
    """Each arm's model in turn, on the GPU where there is one; a model is of use until the next is asked for."""
    device, dtype = device_and_dtype(precision)
    for base in dict.fromkeys(arm.base for arm in arms):
        model = load_model(base, what=f"model {base!r}", dtype=dtype).to(device).eval()
        for arm in (each for each in arms if each.base == base):
            if arm.adapter is None:
                yield arm, model
                continue
            peft = require("peft", extra="train")
            with reading(arm.adapter, f"--{arm.name}"):
                adapted = peft.PeftModel.from_pretrained(model, arm.adapter, is_trainable=False).eval()
            yield arm, adapted
            model = adapted.unload()
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()


def device_and_dtype(precision: Precision) -> tuple[torch.device, torch.dtype]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if precision == "auto":
        is_half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return device, torch.bfloat16 if is_half else torch.float32
    return device, torch.bfloat16 if precision == "bfloat16" else torch.float32
