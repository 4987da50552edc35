"""Save and load a checkpoint's weights and optimizer state, for unsharded models and under FSDP2.

Weights are written by `save_pretrained`; with an adapter, only the adapter is saved. The saved weights must match the
model's weights one to one. Under FSDP2, weights and optimizer state are gathered for saving, and sharded again from
process 0 on loading. Optimizer state is stored by parameter index for unsharded models, and by name under FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from composer_replication.atomic import atomic_write_json, staged
from composer_replication.canonical_json import decode_object
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, StaleArtefactError, explain
from composer_replication.optional import require
from composer_replication.tensor_file import write_tensors
from composer_replication.trainer.checkpoints.manifest import (
    WEIGHTS,
    adapter_file,
    read_manifest,
    regular_file,
    weight_files,
)
from composer_replication.trainer.objective.distributed import is_sharded, unwrapped


def gather_state(model: nn.Module) -> dict[str, Tensor] | None:
    """Gather an FSDP2 model's state dict on process 0, and return it; it is empty on the other processes.

    Returns None for an unsharded model.
    """
    if not is_sharded(model):
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    adapted = bool(_adapter_names(unwrapped(model)))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapted)
    state: Any = get_model_state_dict(model, options=options)
    return state


def save_weights(model: nn.Module, folder: Path, state: dict[str, Tensor] | None, *, own_names: bool) -> None:
    """Save weights as `save_pretrained` does.

    If `own_names` is set, the files contain the parameter names of the model in memory; otherwise transformers may
    change them to the names in the original checkpoint.
    """
    bare = unwrapped(model)
    if _adapter_names(bare):
        bare.save_pretrained(folder, state_dict=state)
        _sort_adapter_settings(bare, folder)
    elif hasattr(bare, "save_pretrained"):
        bare.save_pretrained(folder, state_dict=state, save_original_format=not own_names)
    else:
        with staged(folder / WEIGHTS) as stage:
            write_tensors(stage.file, dict(bare.state_dict() if state is None else state))
            stage.commit()


def _sort_adapter_settings(adapted: Any, folder: Path) -> None:
    """Sort the sets of module names in PEFT's adapter configs.

    PEFT writes a set in an order that differs between processes, but configs of the same adapter should have the same
    hash.
    """
    for adapter, settings in adapted.peft_config.items():
        path = folder / Path(adapter_file(adapter)).with_name("adapter_config.json")
        sets = {name: sorted(value) for name, value in vars(settings).items() if isinstance(value, set)}
        # Only the main process writes this file.
        if sets and path.is_file():
            atomic_write_json(path, {**decode_object(path.read_bytes()), **sets})


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load a checkpoint's weights into the model. Raises an error that names missing or unknown weights.

    Only files that the manifest lists are read, and `check_manifest` must have verified their hashes.
    """
    bare = unwrapped(model)
    sharded = is_sharded(model)
    adapters = _adapter_names(bare)
    expected_weights: dict[str, Tensor] = bare.state_dict()
    seen_names: set[str] = set()
    listed = read_manifest(folder)["files"]
    if adapters:
        parts = _adapter_parts(bare, adapters, folder, listed)
    else:
        parts = (_tensors(regular_file(folder, name)) for name in weight_files(folder, listed))
    for part in parts:
        # Check each file before loading any of its weights.
        if unknown := sorted(part.keys() - expected_weights.keys()):
            raise _mismatch_error(folder, f"weights {unknown[:3]} that the model does not have")
        for name, tensor in part.items():
            if tensor.shape != expected_weights[name].shape:
                raise _mismatch_error(folder, f"weights {name!r} with shape {list(tensor.shape)}")
        seen_names |= part.keys()
        if sharded:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            options = StateDictOptions(full_state_dict=True, strict=False)
            set_model_state_dict(model, dict(part), options=options)
        else:
            # Not strict, since each file has only some of the weights; completeness is checked below.
            bare.load_state_dict(part, strict=False)
    if adapters:
        missing = {
            name for adapter in adapters for name in _model_names_by_file_name(bare, adapter).values()
        } - seen_names
    else:
        missing = _missing_weights(bare, expected_weights, seen_names)
    if missing:
        raise _mismatch_error(folder, f"no weights for {sorted(missing)[:3]}")


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ArtefactCorruptError(explain(str(path), got=str(error), expected="a safetensors file")) from error


def _adapter_names(model: Any) -> list[str]:
    return list(getattr(model, "peft_config", None) or {})


def _adapter_parts(
    model: Any, adapters: list[str], folder: Path, listed: Mapping[str, Any]
) -> Iterator[dict[str, Tensor]]:
    """Yield each adapter's weights under their names in the model. The names in files lack the adapter's name."""
    for adapter in adapters:
        if (file := adapter_file(adapter)) not in listed:
            got = f"no weights in the manifest of {folder}"
            raise ArtefactNotFoundError(explain(f"adapter {adapter!r}", got=got, expected=file))
        path = regular_file(folder, file)
        names = _model_names_by_file_name(model, adapter)
        yield {names.get(name, name): tensor for name, tensor in _tensors(path).items()}


def _model_names_by_file_name(model: Any, adapter: str) -> dict[str, str]:
    """Map each weight name in an adapter's file to the weight's name in the model."""
    peft = require("peft", extra="train")
    # PEFT renames the keys of a state dict. With names instead of tensors, the result maps new names to old names.
    placeholders: Any = {name: name for name in model.state_dict()}
    names: Any = peft.get_peft_model_state_dict(
        model, state_dict=placeholders, adapter_name=adapter, save_embedding_layers=False
    )
    return names


def _missing_weights(model: Any, weights: dict[str, Tensor], seen_names: set[str]) -> set[str]:
    """Return the names of weights that were not loaded, neither directly nor through a weight that they are tied to."""
    storages = {(weights[name].data_ptr(), weights[name].shape) for name in seen_names if weights[name].numel()}
    # Tied weights share their storage and are saved under one name only.
    not_saved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    missing_names = weights.keys() - seen_names - not_saved
    return {name for name in missing_names if (weights[name].data_ptr(), weights[name].shape) not in storages}


def _mismatch_error(folder: Path, got: str) -> StaleArtefactError:
    fix = "Build the model that the checkpoint was saved with."
    return StaleArtefactError(
        explain(f"checkpoint {folder}", got=got, expected="the weights of the model in use", fix=fix)
    )


def optimiser_tree(model: nn.Module, optimiser: Any) -> dict[str, Any]:
    """Return the optimizer's state. Under FSDP2 it is gathered on process 0, and every process must call this."""
    if not is_sharded(model):
        return optimiser.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_optimizer_state_dict(model, _unwrapped_optimiser(optimiser), options=options))


def load_optimiser_tree(model: nn.Module, optimiser: Any, tree: dict[str, Any]) -> None:
    """Restore the state that `optimiser_tree` returned. Every process must pass the same tree."""
    if not is_sharded(model):
        optimiser.load_state_dict(tree)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, _unwrapped_optimiser(optimiser), tree, options=options)


def _unwrapped_optimiser(optimiser: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimiser, "optimizer", optimiser)
