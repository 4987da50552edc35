"""Find the checkpoint that a run resumes from, check that it fits the model and the run, and coordinate saving."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from composer_replication.canonical_json import decode_object, encode, nested_items
from composer_replication.errors import (
    ArtefactNotFoundError,
    ComposerError,
    ConfigError,
    RunError,
    StaleArtefactError,
    explain,
)
from composer_replication.trainer.checkpoints.manifest import (
    SAMPLED,
    check_manifest,
    checkpoints_in,
    newest_complete,
    read_manifest,
)
from composer_replication.trainer.objective.distributed import bare_name, unwrapped
from composer_replication.trainer.objective.fingerprint import weights_digest

# Settings that determine how many batches to skip; they do not matter if `ignore_data_skip` is set.
_SKIP_SETTINGS = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_examples"}
# GRPO settings: a checkpoint within a generation contains the rollouts in slices that depend on these settings.
_GENERATION_SETTINGS = ("steps_per_generation", "num_generations", "num_iterations")
_log = logging.getLogger(__name__)


def refuse_pickled_checkpoints(trainer: Any) -> None:
    """Raise ConfigError for settings with which other libraries would write pickled checkpoints."""
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise _refusal("deepspeed", "on", "FSDP2 or DDP", "DeepSpeed writes its own pickled checkpoints.")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise _refusal("fsdp_version", "1", "2", "Set fsdp_version: 2 in the FSDP config.")
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end":
        fix = "During training, transformers pushes a pickle of the training arguments."
        raise _refusal("hub_strategy", args.hub_strategy, "'end'", fix)


def checkpoint_to_resume(trainer: Any, requested: bool | str | Path | None) -> Path | None:
    """Return the checkpoint to resume from, after checking it: the newest complete one for True, or the given path."""
    output = Path(trainer.args.output_dir)
    if not requested:
        names = sorted(folder.name for _, folder in checkpoints_in(output))
        if names and trainer.args.should_save:
            _log.warning(
                "%s contains %s from another run; resuming later would mix both runs", output, ", ".join(names)
            )
        return None
    folder = _newest(trainer, output) if requested is True else Path(requested)
    # Only processes that save hash the files; the others get the result from them.
    problem = _problem_of(folder) if trainer.args.should_save and requested is not True else None
    if max_over_processes(int(problem is not None), trainer.args.device):
        raise problem or RunError(f"checkpoint {folder}: another process found this checkpoint incomplete")
    return folder


def check_fits(trainer: Any, folder: Path, identity: dict[str, Any], geometry: dict[str, Any]) -> None:
    """Raise StaleArtefactError if the checkpoint was saved with another model, data set or batch size."""
    manifest = read_manifest(folder)
    about = manifest["about"]
    model: dict[str, Any] = about["model"]
    if manifest["version"] == SAMPLED and model["base_weights"] is not None:
        _log.warning("%s was saved by an earlier version: the base weights below its adapter are not compared", folder)
        model = model | {"base_weights": identity["base_weights"]}
    check_identity(model, identity, folder)
    if about["weights_only"]:
        fix = "Set save_only_model=False to save checkpoints that a run can resume from."
        message = explain(
            f"checkpoint {folder}", got="weights only", expected="optimizer and data states as well", fix=fix
        )
        raise ArtefactNotFoundError(message)
    saved = about["data"]
    names = saved.keys() | geometry.keys()
    if trainer.args.ignore_data_skip:
        names -= _SKIP_SETTINGS
    if different := sorted(name for name in names if saved.get(name) != geometry.get(name)):
        got, expected = (", ".join(f"{name} {values.get(name)}" for name in different) for values in (saved, geometry))
        fix = "Resume with the settings and data that the checkpoint was saved with."
        raise StaleArtefactError(explain(f"checkpoint {folder}", got=got, expected=expected, fix=fix))


def data_geometry(trainer: Any) -> dict[str, Any]:
    """Return the settings that the position in the data, buffered rollouts and the trainer's own state depend on."""
    args, dataset = trainer.args, trainer.train_dataset
    geometry = {
        **trainer.resume_geometry(),
        "num_processes": args.world_size,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "num_examples": len(dataset) if hasattr(dataset, "__len__") else None,
        **{name: getattr(args, name) for name in _GENERATION_SETTINGS if hasattr(args, name)},
    }
    # Round-trip through JSON, for comparison with a manifest: tuples become lists, and values that JSON cannot
    # represent raise an error now.
    return decode_object(encode(geometry, where="resume_geometry"))


def _newest(trainer: Any, output: Path) -> Path:
    """Return the newest complete checkpoint, the same on every process. Only processes that save read the files."""
    newest_folder = newest_complete(output) if trainer.args.should_save else None
    positions = {folder: position for position, folder in checkpoints_in(output)}
    step, has_own_name = positions[newest_folder] if newest_folder is not None else (-1, True)
    # Encode both in one number: the step, and in the lowest bit whether the name lacks the suffix ".replaced".
    agreed = max_over_processes(2 * step + has_own_name, trainer.args.device)
    if agreed < 0:
        fix = "Start again in another output folder (train.output), or move the checkpoints out of this one."
        message = explain(
            f"output folder {output}", got="no complete checkpoint", expected="a checkpoint to resume from", fix=fix
        )
        raise ArtefactNotFoundError(message)
    return output / f"checkpoint-{agreed // 2}{'' if agreed % 2 else '.replaced'}"


def _problem_of(folder: Path) -> RunError | None:
    try:
        check_manifest(folder)
    except RunError as error:
        return error
    return None


def _refusal(name: str, got: object, expected: str, fix: str) -> ConfigError:
    return ConfigError(explain(f"{name} with checkpoints without pickles", got=got, expected=expected, fix=fix))


# Config keys that describe how a model is run, or that trainers change.
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
_MAX_LISTED = 6


def model_identity(model: nn.Module) -> dict[str, Any]:
    """Return the properties that identify a model, as a JSON object.

    Base weights below an adapter are identified by a digest, since a checkpoint does not contain them.
    """
    bare: Any = unwrapped(model)
    adapters: Mapping[str, Any] = getattr(bare, "peft_config", None) or {}
    base: Any = bare.get_base_model() if adapters and hasattr(bare, "get_base_model") else bare
    config: Any = getattr(base, "config", None)
    return {
        "class": _class_name(type(base).__name__),
        "config": _plain(config.to_dict(), _VOLATILE) if hasattr(config, "to_dict") else {},
        "adapters": {name: _plain(settings.to_dict(), _ADAPTER_VOLATILE) for name, settings in adapters.items()},
        "parameters": {
            bare_name(name): f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            for name, parameter in bare.named_parameters()
        },
        "base_weights": weights_digest(bare) if adapters else None,
    }


def _class_name(name: str) -> str:
    """Return a class name without the prefix that `fully_shard` adds, as in FSDPQwen2ForCausalLM."""
    return name.removeprefix("FSDP")


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise StaleArtefactError, naming the differences, if the model in use is not the checkpoint's model."""
    differences = list(_differences(saved, now))
    if differences:
        more = f" and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        got = "; ".join(differences[:_MAX_LISTED]) + more
        fix = "Build the model that the checkpoint was saved with, or start a new run in another folder."
        raise StaleArtefactError(explain(f"checkpoint {folder}", got=got, expected="the model in use", fix=fix))


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    # Class, adapters and config are more informative than a list of parameters, so compare them first.
    if _class_name(saved["class"]) != now["class"]:
        yield f"class {saved['class']} in the checkpoint, {now['class']} in use"
    if saved["adapters"].keys() != now["adapters"].keys():
        old, new = (", ".join(sorted(identity["adapters"])) or "none" for identity in (saved, now))
        yield f"adapters {old} in the checkpoint, {new} in use"
    for part in ("config", "adapters"):
        old, new = (dict(nested_items(identity[part])) for identity in (saved, now))
        # A key that only one side has usually comes from another version of a library.
        for key in sorted(old.keys() & new.keys()):
            if old[key] != new[key]:
                yield f"{part}.{key} {old[key]!r:.60} in the checkpoint, {new[key]!r:.60} in use"
    old, new = saved["parameters"], now["parameters"]
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"parameter {name}: {old.get(name, 'none')} in the checkpoint, {new.get(name, 'none')} in use"
    if saved["base_weights"] != now["base_weights"]:
        yield "base_weights: the adapter was trained on other frozen weights"


def _plain(settings: Mapping[str, Any], volatile: set[str]) -> dict[str, Any]:
    entries = {key: value for key, value in settings.items() if key not in volatile and not str(key).startswith("_")}
    return json.loads(json.dumps(entries, sort_keys=True, default=_as_text))


def _as_text(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def max_over_processes(value: int, device: torch.device | str) -> int:
    """Return the largest `value` on any process.

    This is also a barrier: it returns once all processes have called it.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    agreed = torch.tensor([value], device=device)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX)
    return int(agreed.item())


class SaveAttempt:
    """One attempt at saving a checkpoint. It collects this process's first failure, and all processes raise together.

    A process that raised immediately would leave the others waiting in the middle of a save.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """Run a part of the save. A write failure ends this part, and `agree` raises the error later."""
        # The safetensors writer raises this if the disk is full.
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError, ComposerError) as error:
            self._failure = self._failure or error

    def agree(self) -> None:
        """Wait for the other processes, and raise an error if any process could not write."""
        failed = max_over_processes(int(self._failure is not None), self._device)
        if not failed:
            return
        if isinstance(self._failure, ComposerError):
            raise self._failure
        got = "another process could not write its part" if self._failure is None else str(self._failure)
        fix = "Free some space and resume: earlier checkpoints are untouched, and this one is ignored."
        raise RunError(explain(f"saving {self._folder}", got=got, expected="every file written", fix=fix)) from (
            self._failure
        )
