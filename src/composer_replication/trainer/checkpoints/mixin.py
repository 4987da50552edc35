"""Checkpoints of a `transformers.Trainer` as safetensors and JSON, complete or passed over, resumed bit for bit."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

from composer_replication.errors import StaleArtefactError, explain
from composer_replication.trainer.checkpoints.data_cursor import DataCursor, restore_samplers
from composer_replication.trainer.checkpoints.identity import model_identity
from composer_replication.trainer.checkpoints.manifest import check_manifest, read_manifest, write_manifest
from composer_replication.trainer.checkpoints.resume import (
    check_fits,
    checkpoint_to_resume,
    data_geometry,
    refuse_what_pickles,
)
from composer_replication.trainer.checkpoints.rng import rng_tree, set_rng_tree
from composer_replication.trainer.checkpoints.rotation import drop_replaced, make_room, rotate
from composer_replication.trainer.checkpoints.save_attempt import SaveAttempt
from composer_replication.trainer.checkpoints.tree_file import has_tree, load_tree, save_tree
from composer_replication.trainer.checkpoints.weights import (
    load_optimiser_tree,
    load_weights,
    optimiser_tree,
    save_weights,
    whole_state,
)

# The class that uses this names a Trainer after it in its bases, so every `super()` below means that one.
_Trainer: Any = object

_log = logging.getLogger(__name__)


class SafeCheckpoints(_Trainer):
    """Put before a Trainer class: `class MyTrainer(SafeCheckpoints, Trainer)`.

    A checkpoint folder holds the weights as `save_pretrained` writes them, `trainer_state.json`, and as trees
    `optimizer`, `scheduler`, `scaler` (fp16), and per process `rng-N`, `cursor-N` and `extra-N`; it is complete when
    `manifest.json` is there. Nothing is pickled, nothing is unpickled.
    """

    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    """Signals that end training after the step at hand, with a checkpoint; add SIGINT for Ctrl-C."""
    stopped_by: str = ""
    """The name of the signal that ended the last `train`, or nothing."""
    was_finished: bool = False
    """Whether the last `train` found all steps made, and took the weights of their checkpoint."""
    resumed_from: Path | None = None
    """The checkpoint that the last `train` went on from."""

    _attempt: SaveAttempt | None = None
    _identity: dict[str, Any] | None = None
    _cursor: DataCursor | None = None
    _resumed_cursor: dict[str, Any] | None = None
    _is_loss_whole: bool = True

    def extra_state(self) -> dict[str, Any]:
        """What else this process needs to go on as if nothing had happened, as a tree; add to what `super` gives."""
        return {}

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        """Take back what `extra_state` gave, before the first step; call `super` too."""

    def resume_geometry(self) -> dict[str, Any]:
        """Settings, as JSON, that have to be the same on resume; add to what `super` gives. Another one is refused."""
        return {}

    # ---- training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.train`; True takes the newest complete checkpoint of the output folder, a path takes that one."""
        from composer_replication.trainer.checkpoints.stopping import CheckpointTiming, StopRequest

        refuse_what_pickles(self)
        self._identity = model_identity(self.model)
        self._cursor, self._resumed_cursor, self.stopped_by = DataCursor(), None, ""
        self.was_finished, self._is_loss_whole = False, True
        folder = self.resumed_from = checkpoint_to_resume(self, resume_from_checkpoint)
        if folder is not None:
            check_fits(self, folder, self._identity, data_geometry(self))
            if self._is_finished(folder):
                return self._take_finished(folder)
        request = StopRequest()
        timing = CheckpointTiming(request)
        self.add_callback(timing)
        try:
            with request.listening(self.stop_signals):
                result = super().train(None if folder is None else str(folder), *args, **kwargs)
        finally:
            self.remove_callback(timing)
        if timing.stopped_at is not None:
            self._tell_stop(request.signal_name or "a signal to another process", timing.stopped_at)
        return result

    def _tell_stop(self, heard: str, step: int) -> None:
        if step >= self.state.max_steps:  # there is nothing to resume: the run is whole
            _log.warning("%s: heard in the last step, which was made and saved; the run is whole", heard)
            return
        self.stopped_by = heard
        place = Path(self.args.output_dir) / f"checkpoint-{step}"
        _log.warning("%s: stopped after step %d; resume from %s", heard, step, place)

    def _is_finished(self, folder: Path) -> bool:
        return 0 < self.args.max_steps <= read_manifest(folder)["step"]

    def _take_finished(self, folder: Path) -> Any:
        """Of a run that made all its steps there is nothing left to train: the base class would make one more."""
        from transformers.trainer_callback import TrainerState
        from transformers.trainer_utils import TrainOutput

        self.was_finished = True
        load_weights(self.model, folder)
        self.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
        _log.warning("%s has all %d steps; nothing is left to train", folder, self.args.max_steps)
        loss = _mean_loss(load_tree(folder, f"cursor-{self.args.process_index}")["loss"], self.state.global_step)
        return TrainOutput(self.state.global_step, loss, {"train_loss": loss})

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        loader, resumed = kwargs["train_dataloader"], self._resumed_cursor
        if resumed is not None:
            mid_epoch = kwargs["steps_trained_in_current_epoch"] > 0
            if not mid_epoch:
                self._load_rng_state(kwargs["resume_from_checkpoint"])
            restore_samplers(loader, resumed, epoch=kwargs["epoch"], mid_epoch=mid_epoch)
            self._take_up_loss_sum(resumed["loss"])
            self._resumed_cursor = None
        assert self._cursor is not None
        self._cursor.epoch_begins(loader)
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._speak_for_all_steps()
        with self._keeping_all_checkpoints():  # the newest stays, also beside a better one
            return super()._finalize_training(*args, **kwargs)

    # ---- saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        attempt = self._attempt = SaveAttempt(folder, self.args.device)
        try:
            with attempt.writing():
                if self.args.should_save:
                    make_room(folder)
            attempt.agree()  # nobody writes into a folder that another process is about to clear
            with attempt.writing(), self._keeping_all_checkpoints():
                super()._save_checkpoint(model, trial)
            attempt.agree()
            with attempt.writing():
                if self.args.should_save:
                    write_manifest(folder, step=self.state.global_step, about=self._about())
            attempt.agree()
        finally:
            self._attempt = None
        if self.args.should_save:
            drop_replaced(folder)
            best = self.state.best_model_checkpoint
            rotate(folder.parent, self.args.save_total_limit, keep=[Path(best)] if best else [])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer.save_model` without `training_args.bin`; under FSDP2 whole, whatever its state dict type."""
        with self._noting_failure():
            state = whole_state(self.model_wrapped)
            if state is None:
                super().save_model(output_dir, _internal_call)
                return
            if self.args.should_save:
                self._save(output_dir, state_dict=state)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # A checkpoint keeps the names of the model in memory; what leaves the run, those that other tools know.
        save_weights(self.model, folder, state_dict, own_names=self._attempt is not None)
        tokenizer: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if self.args.should_save and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(folder))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._noting_failure():
            optimiser = optimiser_tree(self.model_wrapped, self.optimizer)
            if self.args.should_save:
                save_tree(Path(output_dir), "optimizer", optimiser)
                save_tree(Path(output_dir), "scheduler", self.lr_scheduler.state_dict())

    def _save_scaler(self, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        with self._noting_failure():
            if scaler is not None and self.args.should_save:
                save_tree(Path(output_dir), "scaler", scaler.state_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        assert self._cursor is not None
        folder, number = Path(output_dir), self.args.process_index
        with self._noting_failure():
            folder.mkdir(parents=True, exist_ok=True)  # process 0 may still be on its way here
            loss = {"sum": self._tr_loss, "last_logged_step": self._globalstep_last_logged}
            if self._is_loss_whole:  # else it is of some steps only, and must not pass for one of all
                loss["total"] = self._total_loss_scalar
            save_tree(folder, f"cursor-{number}", self._cursor.tree() | {"loss": loss})
            save_tree(folder, f"extra-{number}", self.extra_state())
            save_tree(folder, f"rng-{number}", rng_tree())

    # ---- loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        check_manifest(best)
        _log.info("loading the best model, of %s (%s)", best, self.state.best_metric)
        load_weights(self.model, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # finds no file of its own; a subclass may have one in JSON
        if checkpoint is None:
            return
        folder, number = Path(checkpoint), self.args.process_index
        load_optimiser_tree(self.model_wrapped, self.optimizer, load_tree(folder, "optimizer"))
        self.lr_scheduler.load_state_dict(load_tree(folder, "scheduler"))
        self._resumed_cursor = load_tree(folder, f"cursor-{number}")
        try:
            self.load_extra_state(load_tree(folder, f"extra-{number}"))
        except KeyError as error:
            fix = "Go on with the version that saved it, or begin anew in another folder."
            got = f"no {error} among what it remembers"
            expected = "a checkpoint of this version"
            raise StaleArtefactError(explain(str(folder), got=got, expected=expected, fix=fix)) from error

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler: Any = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None and has_tree(Path(checkpoint), "scaler"):
            scaler.load_state_dict(load_tree(Path(checkpoint), "scaler"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            set_rng_tree(load_tree(Path(checkpoint), f"rng-{self.args.process_index}"))

    # ---- parts of the above

    def _about(self) -> dict[str, Any]:
        """What the manifest says about the run besides its files."""
        return {
            "model": self._identity,
            "data": data_geometry(self),
            "weights_only": self.args.save_only_model,
            "process": self.args.process_index,
        }

    def _take_up_loss_sum(self, saved: dict[str, Any]) -> None:
        """The loss since the last log line and before it: the next line and the mean at the end are then those of a
        run that was never interrupted."""
        self._tr_loss = saved["sum"].to(self._tr_loss)
        # A checkpoint of an earlier version has no total, nor have those of a run that went on from one: the mean is
        # then one over the steps of this call.
        self._total_loss_scalar = saved.get("total", -float(saved["sum"]))
        self._is_loss_whole = "total" in saved
        self._globalstep_last_logged = saved["last_logged_step"]

    def _speak_for_all_steps(self) -> None:
        """Have `train_loss` be the mean over the whole run: it is divided by the steps of this call alone."""
        first, last = getattr(self, "_initial_global_step", 0), self.state.global_step
        if first and last and self._is_loss_whole:
            rest = self._tr_loss.item()
            mean = (self._total_loss_scalar + rest) / last
            self._total_loss_scalar = mean * max(last - first, 0.001) - rest

    @contextlib.contextmanager
    def _keeping_all_checkpoints(self) -> Generator[None]:
        """The loop's own rotation off: it counts folders, not complete checkpoints."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def _noting_failure(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._attempt is None else self._attempt.writing()


def _mean_loss(saved: dict[str, Any], steps: int) -> float:
    """Over all steps of a run, from what a checkpoint keeps of its loss; NaN where an earlier version kept none."""
    return (saved.get("total", math.nan) + float(saved["sum"])) / max(steps, 1)
