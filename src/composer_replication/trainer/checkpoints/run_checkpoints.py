"""Save a trainer's run in checkpoints of safetensors and JSON files, and resume it from them bit for bit.

`trainer.overrides` passes the methods of `transformers.Trainer` to this module; `original` is always the overridden
method.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from composer_replication.errors import StaleArtefactError, explain
from composer_replication.tensor_file import has_tree, load_tree, save_tree
from composer_replication.trainer.checkpoints.data_cursor import DataCursor, restore_samplers, rng_tree, set_rng_tree
from composer_replication.trainer.checkpoints.manifest import (
    check_manifest,
    drop_replaced,
    make_room,
    read_manifest,
    rotate,
    write_manifest,
)
from composer_replication.trainer.checkpoints.resume import (
    SaveAttempt,
    check_fits,
    checkpoint_to_resume,
    data_geometry,
    max_over_processes,
    model_identity,
    refuse_pickled_checkpoints,
)
from composer_replication.trainer.checkpoints.weights import (
    load_optimiser_tree,
    load_weights,
    optimiser_tree,
    save_weights,
    whole_state,
)

Original = Callable[..., Any]
_log = logging.getLogger(__name__)


class RunCheckpoints:
    """Saves, finds and loads one run's checkpoints.

    A checkpoint folder contains the weights as `save_pretrained` writes them, `trainer_state.json`, the trees
    `optimizer`, `scheduler` and `scaler` (fp16), and the trees `rng-N`, `cursor-N` and `extra-N` per process. It is
    complete once `manifest.json` exists. Nothing is pickled or unpickled.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.cursor = DataCursor()
        self._attempt: SaveAttempt | None = None
        self._identity: dict[str, Any] | None = None
        self._resumed_cursor: dict[str, Any] | None = None
        self._has_total_loss = True

    # ---- training

    def train(self, original: Original, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replace `Trainer.train`: resume from the newest complete checkpoint for True, or from the given path."""
        trainer = self._trainer
        refuse_pickled_checkpoints(trainer)
        self._identity = model_identity(trainer.model)
        self.cursor, self._resumed_cursor, trainer.stopped_by = DataCursor(), None, ""
        trainer.was_finished, self._has_total_loss = False, True
        folder = trainer.resumed_from = checkpoint_to_resume(trainer, resume_from_checkpoint)
        if folder is not None:
            check_fits(trainer, folder, self._identity, data_geometry(trainer))
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
        """Load the weights and state of a finished run, for which transformers would train one more step."""
        from transformers.trainer_callback import TrainerState
        from transformers.trainer_utils import TrainOutput

        trainer = self._trainer
        trainer.was_finished = True
        load_weights(trainer.model, folder)
        state = trainer.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
        _log.warning("%s already has all %d steps: nothing to train", folder, trainer.args.max_steps)
        loss = _mean_loss(load_tree(folder, f"cursor-{trainer.args.process_index}")["loss"], state.global_step)
        return TrainOutput(state.global_step, loss, {"train_loss": loss})

    def run_epoch(self, original: Original, *args: Any, **kwargs: Any) -> None:
        """Replace `Trainer._run_epoch`: before a resumed run's first epoch, restore the position in the data."""
        loader, resumed = kwargs["train_dataloader"], self._resumed_cursor
        if resumed is not None:
            mid_epoch = kwargs["steps_trained_in_current_epoch"] > 0
            # In the middle of an epoch, transformers restores the generators itself, after skipping batches.
            if not mid_epoch:
                self.load_rng_state(kwargs["resume_from_checkpoint"])
            restore_samplers(loader, resumed, epoch=kwargs["epoch"], mid_epoch=mid_epoch)
            self.restore_loss_sum(resumed["loss"])
            self._resumed_cursor = None
        self.cursor.epoch_begins(loader)
        original(*args, **kwargs)

    def finalize_training(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Replace `Trainer._finalize_training`: correct a resumed run's mean loss, and delete no checkpoints."""
        self.average_loss_over_all_steps()
        # transformers would delete the newest checkpoint if another one is the best.
        with self._keeping_all_checkpoints():
            return original(*args, **kwargs)

    # ---- saving

    def save_checkpoint(self, original: Original, model: Any, trial: Any) -> None:
        """Replace `Trainer._save_checkpoint`: write all files, then the manifest, then delete old checkpoints.

        All processes finish a part before any process begins the next part, and all raise if any process fails.
        """
        trainer = self._trainer
        folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
        attempt = self._attempt = SaveAttempt(folder, trainer.args.device)
        try:
            with attempt.writing():
                if trainer.args.should_save:
                    make_room(folder)
            # Wait, so that no process writes to a folder that is about to be cleared.
            attempt.agree()
            with attempt.writing(), self._keeping_all_checkpoints():
                original(model, trial)
            attempt.agree()
            with attempt.writing():
                if trainer.args.should_save:
                    write_manifest(folder, step=trainer.state.global_step, about=self._manifest_fields())
            attempt.agree()
        finally:
            self._attempt = None
        if trainer.args.should_save:
            drop_replaced(folder)
            # Only complete checkpoints count towards the limit, and the best checkpoint is never deleted.
            best = trainer.state.best_model_checkpoint
            rotate(folder.parent, trainer.args.save_total_limit, keep=[Path(best)] if best else [])

    def save_model(self, original: Original, output_dir: str | None, is_internal: bool) -> None:
        """Replace `Trainer.save_model`: omit `training_args.bin`, and gather weights before saving under FSDP2."""
        trainer = self._trainer
        with self._noting_failure():
            state = whole_state(trainer.model_wrapped)
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
        """Replace `Trainer._save_rng_state`: write this process's generators, position in the data and extra state."""
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

    def load_optimizer_and_scheduler(self, original: Original, checkpoint: str | None) -> None:
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
        if checkpoint is not None and scaler is not None and has_tree(Path(checkpoint), "scaler"):
            scaler.load_state_dict(load_tree(Path(checkpoint), "scaler"))

    def load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            set_rng_tree(load_tree(Path(checkpoint), f"rng-{self._trainer.args.process_index}"))

    # ---- parts of the above

    def _manifest_fields(self) -> dict[str, Any]:
        """Return the manifest's `about` field, which describes the run."""
        return {
            "model": self._identity,
            "data": data_geometry(self._trainer),
            "weights_only": self._trainer.args.save_only_model,
            "process": self._trainer.args.process_index,
        }

    def restore_loss_sum(self, saved: dict[str, Any]) -> None:
        """Restore the loss sums since the last log line and before it.

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
        """Make `train_loss` the mean over the whole run; transformers divides by the steps since the resume only."""
        trainer = self._trainer
        first, last = getattr(trainer, "_initial_global_step", 0), trainer.state.global_step
        # transformers computes total / max(last - first, 0.001), so invert that.
        if first and last and self._has_total_loss:
            rest = trainer._tr_loss.item()
            mean = (trainer._total_loss_scalar + rest) / last
            trainer._total_loss_scalar = mean * max(last - first, 0.001) - rest

    @contextlib.contextmanager
    def _keeping_all_checkpoints(self) -> Generator[None]:
        """Disable transformers' rotation, which counts folders instead of complete checkpoints."""
        args = self._trainer.args
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            yield
        finally:
            args.save_total_limit = limit

    def _noting_failure(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._attempt is None else self._attempt.writing()


def _mean_loss(saved: dict[str, Any], steps: int) -> float:
    """Return the mean loss over all steps from a checkpoint's sums, or NaN if an earlier version saved no total."""
    return (saved.get("total", math.nan) + float(saved["sum"])) / max(steps, 1)


class _StopRequest:
    """A request to stop, made by a signal to this process."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextlib.contextmanager
    def handling(self, signals: Sequence[signal.Signals]) -> Generator[None]:
        """Handle these signals, and restore the earlier handlers afterwards. A no-op outside the main thread."""
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
    """Saves a checkpoint at the end of a step in which a signal arrived, and after an epoch's
    evaluation, not before.
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
