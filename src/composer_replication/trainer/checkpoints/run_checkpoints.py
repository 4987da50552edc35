"""Save a trainer's run in checkpoints of safetensors and JSON files, and resume it from them bit for bit.

`trainer.overrides` passes the methods of `transformers.Trainer` to this module; `original` is always the overridden
method.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed, nn
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from composer_replication.canonical_json import decode_object, encode, nested_items
from composer_replication.errors import (
    ArtefactNotFoundError,
    ComposerError,
    ConfigError,
    RunError,
    StaleArtefactError,
    explain,
)
from composer_replication.tensor_file import load_tree, save_tree
from composer_replication.trainer.checkpoints.data_cursor import DataCursor, rng_tree, set_rng_tree
from composer_replication.trainer.checkpoints.manifest import (
    SAMPLED,
    check_manifest,
    checkpoints_in,
    clear_path,
    delete_old_checkpoints,
    delete_replaced,
    newest_complete,
    read_manifest,
    write_manifest,
)
from composer_replication.trainer.checkpoints.weights import (
    gather_state,
    load_optimiser_tree,
    load_weights,
    optimiser_tree,
    save_weights,
)
from composer_replication.trainer.objective.distributed import bare_name, unwrapped
from composer_replication.trainer.objective.fingerprint import weights_digest

OriginalMethod = Callable[..., Any]
_log = logging.getLogger(__name__)


class RunCheckpoints:
    """The checkpoints of one run: saves, finds and loads them.

    A checkpoint folder contains the weights as `save_pretrained` writes them, `trainer_state.json`, nested state
    ("trees") named `optimizer`, `scheduler` and `scaler` (fp16), and one `rng-N`, `cursor-N` and `extra-N` for each
    process N. It is complete once `manifest.json` exists. Nothing is pickled or unpickled.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.cursor = DataCursor()
        self._attempt: _SaveAttempt | None = None
        self._identity: dict[str, Any] | None = None
        self._resumed_cursor: dict[str, Any] | None = None
        self._has_total_loss = True

    # ---- training

    def train(self, original: OriginalMethod, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replace `Trainer.train`: resume from the given checkpoint, or for True from the newest complete one."""
        trainer = self._trainer
        _check_no_pickles(trainer)
        self._identity = model_identity(trainer.model)
        self.cursor, self._resumed_cursor, trainer.stopped_by = DataCursor(), None, ""
        trainer.was_finished, self._has_total_loss = False, True
        folder = trainer.resumed_from = _checkpoint_to_resume(trainer, resume_from_checkpoint)
        if folder is not None:
            _check_fits(trainer, folder, self._identity, _data_geometry(trainer))
            # max_steps is -1 if the number of epochs determines the steps; transformers then counts them.
            if 0 < trainer.args.max_steps <= read_manifest(folder)["step"]:
                return self._load_finished(folder)
        request = _StopRequest()
        timing = _CheckpointTiming(request)
        trainer.add_callback(timing)
        try:
            with request.handling(trainer.stop_signals):
                result = original(None if folder is None else str(folder), *args, **kwargs)
        finally:
            trainer.remove_callback(timing)
        if timing.stopped_at is not None:
            self._log_stop(request.signal_name or "a signal to another process", timing.stopped_at)
        return result

    def _log_stop(self, signal_name: str, step: int) -> None:
        if step >= self._trainer.state.max_steps:  # nothing is left to resume
            _log.warning("%s received in the last step; the run is complete and saved", signal_name)
            return
        self._trainer.stopped_by = signal_name
        checkpoint = Path(self._trainer.args.output_dir) / f"checkpoint-{step}"
        _log.warning("%s: stopped after step %d; resume from %s", signal_name, step, checkpoint)

    def _load_finished(self, folder: Path) -> Any:
        """Load the weights and state of a finished run, because transformers would train it for one more step."""
        from transformers.trainer_callback import TrainerState
        from transformers.trainer_utils import TrainOutput

        trainer = self._trainer
        trainer.was_finished = True
        load_weights(trainer.model, folder)
        state = trainer.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
        _log.warning("%s already has all %d steps: nothing to train", folder, trainer.args.max_steps)
        sums = load_tree(folder, f"cursor-{trainer.args.process_index}")["loss"]
        # The mean over all steps, or NaN if an earlier version saved no total.
        loss = (sums.get("total", math.nan) + float(sums["sum"])) / max(state.global_step, 1)
        return TrainOutput(state.global_step, loss, {"train_loss": loss})

    def run_epoch(self, original: OriginalMethod, *args: Any, **kwargs: Any) -> None:
        """Replace `Trainer._run_epoch`: before a resumed run's first epoch, restore the position in the data."""
        loader, resumed = kwargs["train_dataloader"], self._resumed_cursor
        if resumed is not None:
            mid_epoch = kwargs["steps_trained_in_current_epoch"] > 0
            # In the middle of an epoch, transformers restores the generators itself, after skipping batches.
            if not mid_epoch:
                self.load_rng_state(kwargs["resume_from_checkpoint"])
            self.cursor.restore(loader, resumed, epoch=kwargs["epoch"], mid_epoch=mid_epoch)
            self.restore_loss_sum(resumed["loss"])
            self._resumed_cursor = None
        self.cursor.epoch_begins(loader)
        original(*args, **kwargs)

    def finalize_training(self, original: OriginalMethod, *args: Any, **kwargs: Any) -> Any:
        """Replace `Trainer._finalize_training`: correct a resumed run's mean loss, and delete no checkpoints."""
        self.average_loss_over_all_steps()
        # transformers would delete the newest checkpoint if another one is the best.
        with self._keeping_all_checkpoints():
            return original(*args, **kwargs)

    # ---- saving

    def save_checkpoint(self, original: OriginalMethod, model: Any, trial: Any) -> None:
        """Replace `Trainer._save_checkpoint`: write all files, then the manifest, then delete old checkpoints.

        No process begins the next of these parts before all processes have finished the current one. If any process
        fails, all of them raise an error.
        """
        trainer = self._trainer
        folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
        attempt = self._attempt = _SaveAttempt(folder, trainer.args.device)
        try:
            with attempt.writing():
                if trainer.args.should_save:
                    clear_path(folder)
            # Wait, so that no process writes to a folder that is about to be cleared.
            attempt.agree()
            with attempt.writing(), self._keeping_all_checkpoints():
                original(model, trial)
            attempt.agree()
            with attempt.writing():
                if trainer.args.should_save:
                    about = {
                        "model": self._identity,
                        "data": _data_geometry(trainer),
                        "weights_only": trainer.args.save_only_model,
                        "process": trainer.args.process_index,
                    }
                    write_manifest(folder, step=trainer.state.global_step, about=about)
            attempt.agree()
        finally:
            self._attempt = None
        if trainer.args.should_save:
            delete_replaced(folder)
            # Only complete checkpoints count towards the limit, and the best checkpoint is never deleted.
            best = trainer.state.best_model_checkpoint
            delete_old_checkpoints(folder.parent, trainer.args.save_total_limit, keep=[Path(best)] if best else [])

    def save_model(self, original: OriginalMethod, output_dir: str | None, is_internal: bool) -> None:
        """Replace `Trainer.save_model`: omit `training_args.bin`, and gather weights before saving under FSDP2."""
        trainer = self._trainer
        with self._noting_failure():
            state = gather_state(trainer.model_wrapped)
            if state is None:
                original(output_dir, is_internal)
                return
            if trainer.args.should_save:
                self.save(output_dir, state)
            if trainer.args.push_to_hub and not is_internal:
                trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def save(self, output_dir: str | None, state_dict: dict[str, Any] | None) -> None:
        """Replace `Trainer._save`: write the weights and the tokenizer."""
        trainer = self._trainer
        folder = Path(output_dir or trainer.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # Checkpoints use the parameter names of the model in memory; exported weights use the names that other tools
        # expect.
        save_weights(trainer.model, folder, state_dict, own_names=self._attempt is not None)
        tokenizer: Any = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if trainer.args.should_save and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(folder))

    def save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Replace `Trainer._save_optimizer_and_scheduler`, which writes pickles."""
        trainer = self._trainer
        with self._noting_failure():
            optimiser = optimiser_tree(trainer.model_wrapped, trainer.optimizer)
            if trainer.args.should_save:
                save_tree(Path(output_dir), "optimizer", optimiser)
                save_tree(Path(output_dir), "scheduler", trainer.lr_scheduler.state_dict())

    def save_scaler(self, output_dir: str) -> None:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        with self._noting_failure():
            if scaler is not None and self._trainer.args.should_save:
                save_tree(Path(output_dir), "scaler", scaler.state_dict())

    def save_rng_state(self, output_dir: str) -> None:
        """Replace `Trainer._save_rng_state`: save the generators, the position in the data and extra state."""
        trainer = self._trainer
        folder, number = Path(output_dir), trainer.args.process_index
        with self._noting_failure():
            # Process 0 may not have created the folder yet.
            folder.mkdir(parents=True, exist_ok=True)
            loss = {"sum": trainer._tr_loss, "last_logged_step": trainer._globalstep_last_logged}
            # A sum over only some steps must not be mistaken for the total.
            if self._has_total_loss:
                loss["total"] = trainer._total_loss_scalar
            save_tree(folder, f"cursor-{number}", self.cursor.tree() | {"loss": loss})
            save_tree(folder, f"extra-{number}", trainer.extra_state())
            save_tree(folder, f"rng-{number}", rng_tree())

    # ---- loading

    def load_from_checkpoint(self, folder: str, model: Any) -> None:
        load_weights(self._trainer.model if model is None else model, Path(folder))

    def load_best_model(self) -> None:
        """Load the best checkpoint's weights, after checking all its files."""
        state = self._trainer.state
        best = Path(state.best_model_checkpoint or "")
        check_manifest(best)
        _log.info("loading the best model from %s (%s)", best, state.best_metric)
        load_weights(self._trainer.model, best)

    def load_optimizer_and_scheduler(self, original: OriginalMethod, checkpoint: str | None) -> None:
        """Restore the optimizer, the scheduler, the position in the data and the extra state."""
        # transformers finds none of its files here, but a subclass may load other files.
        original(checkpoint)
        if checkpoint is None:
            return
        trainer = self._trainer
        folder, number = Path(checkpoint), trainer.args.process_index
        load_optimiser_tree(trainer.model_wrapped, trainer.optimizer, load_tree(folder, "optimizer"))
        trainer.lr_scheduler.load_state_dict(load_tree(folder, "scheduler"))
        self._resumed_cursor = load_tree(folder, f"cursor-{number}")
        try:
            trainer.load_extra_state(load_tree(folder, f"extra-{number}"))
        except KeyError as error:
            fix = "Resume with the version that saved the checkpoint, or start again in another folder."
            got = f"an extra state without {error}"
            expected = "a checkpoint saved by this version"
            raise StaleArtefactError(explain(str(folder), got=got, expected=expected, fix=fix)) from error

    def load_scaler(self, checkpoint: str | None) -> None:
        scaler: Any = getattr(self._trainer.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None and Path(checkpoint, "scaler.json").is_file():
            scaler.load_state_dict(load_tree(Path(checkpoint), "scaler"))

    def load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            set_rng_tree(load_tree(Path(checkpoint), f"rng-{self._trainer.args.process_index}"))

    # ---- parts of the above

    def restore_loss_sum(self, saved: dict[str, Any]) -> None:
        """Restore the sum of losses since the last log line, and the sum up to that line.

        The next log line and the final mean are then the same as in an uninterrupted run.
        """
        trainer = self._trainer
        trainer._tr_loss = saved["sum"].to(trainer._tr_loss)
        # Checkpoints saved by earlier versions have no total, nor do runs resumed from them. The mean then covers only
        # the steps since the resume.
        trainer._total_loss_scalar = saved.get("total", -float(saved["sum"]))
        self._has_total_loss = "total" in saved
        trainer._globalstep_last_logged = saved["last_logged_step"]

    def average_loss_over_all_steps(self) -> None:
        """Make `train_loss` the mean over the whole run; transformers divides only by the resumed steps."""
        trainer = self._trainer
        first, last = getattr(trainer, "_initial_global_step", 0), trainer.state.global_step
        # transformers computes total / max(last - first, 0.001), so invert that.
        if first and last and self._has_total_loss:
            rest = trainer._tr_loss.item()
            mean = (trainer._total_loss_scalar + rest) / last
            trainer._total_loss_scalar = mean * max(last - first, 0.001) - rest

    @contextlib.contextmanager
    def _keeping_all_checkpoints(self) -> Generator[None]:
        """Disable transformers' deletion of old checkpoints inside the block, since it also counts incomplete
        checkpoints.
        """
        args = self._trainer.args
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            yield
        finally:
            args.save_total_limit = limit

    def _noting_failure(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._attempt is None else self._attempt.writing()


class _StopRequest:
    """A request to stop the run, made by sending a signal to this process."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextlib.contextmanager
    def handling(self, signals: Sequence[signal.Signals]) -> Generator[None]:
        """Handle these signals inside the block, then restore the earlier handlers. Does nothing outside the main
        thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, self._on_signal) for signum in signals}
        try:
            yield
        finally:
            for signum, handler in before.items():
                # None means that the handler was not set from Python and cannot be restored.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # A second Ctrl-C is deliberate. A second SIGTERM may not be, since launchers and schedulers send several.
        if self.signal_name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = self.signal_name or signal.Signals(number).name


class _CheckpointTiming(TrainerCallback):
    """A callback that saves a checkpoint and stops after a step in which a signal arrived.

    It also delays the checkpoint at the end of an epoch until after the epoch's evaluation.
    """

    def __init__(self, request: _StopRequest) -> None:
        self._request = request
        self._held_back = False
        self.stopped_at: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> Any:
        if max_over_processes(int(bool(self._request.signal_name)), args.device):
            control.should_save = control.should_training_stop = True
            self.stopped_at = state.global_step
        # Evaluation draws random numbers, so a run resumed from before it would continue with different ones.
        elif control.should_save and args.eval_strategy == IntervalStrategy.EPOCH and float(state.epoch).is_integer():
            control.should_save, self._held_back = False, True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> Any:  # noqa: ARG002
        # The step is already saved, and the epoch is not over.
        if self.stopped_at is not None:
            control.should_save = control.should_evaluate = control.should_log = False
        elif self._held_back:
            control.should_save, self._held_back = True, False
        return control


# Settings that determine how many batches to skip; they do not matter if `ignore_data_skip` is set.
_SKIP_SETTINGS = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_examples"}
# GRPO settings: a checkpoint within a generation contains the rollouts in slices that depend on these settings.
_GENERATION_SETTINGS = ("steps_per_generation", "num_generations", "num_iterations")


def _check_no_pickles(trainer: Any) -> None:
    """Raise ConfigError if the settings would make other libraries write pickled checkpoints."""
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise _pickle_error("deepspeed", "on", "FSDP2 or DDP", "DeepSpeed writes its own pickled checkpoints.")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise _pickle_error("fsdp_version", "1", "2", "Set fsdp_version: 2 in the FSDP config.")
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end":
        fix = "During training, transformers pushes a pickle of the training arguments."
        raise _pickle_error("hub_strategy", args.hub_strategy, "'end'", fix)


def _checkpoint_to_resume(trainer: Any, requested: bool | str | Path | None) -> Path | None:
    """Return the checkpoint to resume from, after checking it; None to start from the initial weights.

    `requested` is the checkpoint's path, or True for the newest complete one.
    """
    output = Path(trainer.args.output_dir)
    if not requested:
        names = sorted(folder.name for _, folder in checkpoints_in(output))
        if names and trainer.args.should_save:
            _log.warning(
                "%s contains %s from another run; resuming later would mix both runs", output, ", ".join(names)
            )
        return None
    folder = _newest_on_all_processes(trainer, output) if requested is True else Path(requested)
    # Only processes that save hash the files; the others get the result from them.
    problem = _checkpoint_error(folder) if trainer.args.should_save and requested is not True else None
    if max_over_processes(int(problem is not None), trainer.args.device):
        raise problem or RunError(f"checkpoint {folder}: another process found this checkpoint incomplete")
    return folder


def _check_fits(trainer: Any, folder: Path, identity: dict[str, Any], geometry: dict[str, Any]) -> None:
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


def _data_geometry(trainer: Any) -> dict[str, Any]:
    """Return the settings on which the position in the data, buffered rollouts and the trainer's own state depend."""
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


def _newest_on_all_processes(trainer: Any, output: Path) -> Path:
    """Return the newest complete checkpoint, the same on every process. Files are read only on processes that save."""
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


def _checkpoint_error(folder: Path) -> RunError | None:
    try:
        check_manifest(folder)
    except RunError as error:
        return error
    return None


def _pickle_error(name: str, got: object, expected: str, fix: str) -> ConfigError:
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

    If the model has an adapter, its base weights are identified by a digest, since a checkpoint does not contain them.
    """
    bare: Any = unwrapped(model)
    adapters: Mapping[str, Any] = getattr(bare, "peft_config", None) or {}
    base: Any = bare.get_base_model() if adapters and hasattr(bare, "get_base_model") else bare
    config: Any = getattr(base, "config", None)
    return {
        "class": _class_name(type(base).__name__),
        "config": _comparable_settings(config.to_dict(), _VOLATILE) if hasattr(config, "to_dict") else {},
        "adapters": {
            name: _comparable_settings(settings.to_dict(), _ADAPTER_VOLATILE) for name, settings in adapters.items()
        },
        "parameters": {
            bare_name(name): f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            for name, parameter in bare.named_parameters()
        },
        "base_weights": weights_digest(bare) if adapters else None,
    }


def _class_name(name: str) -> str:
    """Return a class name without the prefix that `fully_shard` adds, such as FSDP in FSDPQwen2ForCausalLM."""
    return name.removeprefix("FSDP")


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise StaleArtefactError, naming the differences, if the model in use is not the checkpoint's model."""
    differences = list(_identity_differences(saved, now))
    if differences:
        more = f" and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        got = "; ".join(differences[:_MAX_LISTED]) + more
        fix = "Build the model that the checkpoint was saved with, or start a new run in another folder."
        raise StaleArtefactError(explain(f"checkpoint {folder}", got=got, expected="the model in use", fix=fix))


def _identity_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
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


def _comparable_settings(settings: Mapping[str, Any], volatile: set[str]) -> dict[str, Any]:
    entries = {key: value for key, value in settings.items() if key not in volatile and not str(key).startswith("_")}
    return json.loads(json.dumps(entries, sort_keys=True, default=_json_default))


def _json_default(value: Any) -> Any:
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


class _SaveAttempt:
    """One attempt to save a checkpoint, which records this process's first failure so that all processes raise
    together.

    A process that raised immediately would leave the others waiting in the middle of a save.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """Run the block as part of the save. If writing fails, the error is recorded, and `agree` raises it later."""
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
