"""Train on logged sessions only, with all three channels, on top of `transformers.Trainer`.

    loss = lm_weight * lm_ce + alpha_sdpo * sdpo + beta_replay * replay

Each channel is a mean over all its items in an optimizer step, across micro-batches and processes. The loss therefore
does not depend on how a batch is divided into micro-batches or over processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.errors import InputError, explain
from composer_replication.loss.taid import TAIDScheduler
from composer_replication.trainer.metrics_file import MetricsFile, StepCallback
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.compose import LossComponents, compose_loss
from composer_replication.trainer.objective.distributed import is_sharded
from composer_replication.trainer.objective.fingerprint import tokenizer_digest
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.offline_checks import (
    NAMES,
    WARM_UP,
    ChannelLog,
    EvaluationSums,
    channels_that_never_ran,
    check_arguments,
    plan_run,
    ready_sessions,
    startup_warnings,
    take_warmed_up,
    weighted_sum,
    weighted_total,
)
from composer_replication.trainer.overrides import WithTeacher
from composer_replication.trainer.same_start import refuse_differences
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.stored_windows import KEY, TOKENS, SessionBatch, collate, items_of, moved
from composer_replication.trainer.start_model import Quantization, prepare_model, shard_model
from composer_replication.trainer.teacher_keeper import (
    TeacherKeeper,
    attach_teacher,
    load_local_state,
    local_state,
    reshard,
    shard_teacher,
)
from composer_replication.trainer.watch.memory_plan import MemoryPlan

_log = logging.getLogger(__name__)


class OfflineTrainer(WithTeacher, Trainer):
    """Trains a model on `LoggedSessions`.

    A micro-batch is `per_device_train_batch_size` items of `sessions`, side by side in one tree batch.

    Args:
        model: A loaded model, a folder, a hub name, or `student`, the tiny model that comes with the package. Weights
            to train are kept in full precision: without an adapter, a name is loaded in fp32, and `bf16` is the
            precision of autocast.
        args: The `transformers.TrainingArguments`.
        sessions: The sessions to train on.
        settings: Settings for channels 2 and 3.
        teacher: Channel 2's teacher; a trust region by default.
        weighting: How much each token of an erring turn counts.
        lm_weight: Weight of channel 1.
        eval_sessions: The sessions to evaluate on.
        peft_config: The config of an adapter to add.
        quantization: "4bit" loads the base weights in four bits; only an adapter is then trained.
        fsdp: Shard the weights over the processes (FSDP2).
        warmed_up: The last checkpoint of a warm-up (`trainer.warmup`). Its weights are loaded, and the hint check, the
            reference log-probs and the teacher start from them.
        hint_margin: If given, train only on sites that pass the hint check with this margin.
        shuffle_seed: Makes the run a control: the same sites get hints for other kinds of errors, and half of the pairs
            are swapped.
        reference_path: The file for the pairs' reference log-probs, by default in the run directory. Missing log-probs
            are computed from the initial model, in the precision of the training steps.
        metrics_path: The file for metrics, which also go to `report_to`; default `metrics.jsonl` in `output_dir`.
        callbacks: Additional callbacks.
        options: More arguments for `transformers.Trainer`, such as `optimizers` and `processing_class`.
    """

    # The loss needs no division by the number of micro-batches: each channel is divided by the items of the whole step.
    loss_is_scaled_for_ga = True
    _step_items: Mapping[str, int] = {}
    _step_tokens = 0
    _taid: TAIDScheduler | None = None
    _taid_state: Mapping[str, float | None] | None = None
    _evaluation: EvaluationSums | None = None
    phase: Mapping[str, str] = {}
    """The training phase, if there is a warm-up. A run resumes only from checkpoints saved in its own phase."""

    def __init__(
        self,
        model: str | nn.Module,
        args: TrainingArguments,
        sessions: LoggedSessions,
        *,
        settings: ChannelSettings | None = None,
        teacher: TeacherKeeper | None = None,
        weighting: RowWeighting | None = None,
        lm_weight: float = 1.0,
        eval_sessions: LoggedSessions | None = None,
        peft_config: Any | None = None,
        quantization: Quantization = "none",
        fsdp: bool = False,
        warmed_up: str | Path | None = None,
        hint_margin: float | None = None,
        shuffle_seed: int | None = None,
        reference_path: str | Path | None = None,
        metrics_path: str | Path | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **options: Any,
    ) -> None:
        if not lm_weight >= 0:
            raise InputError(explain("lm_weight", got=lm_weight, expected="0 or more"))
        check_arguments(args)
        refuse_differences({"tokenizer": tokenizer_digest(sessions.renderer.tokenizer), "sessions": sessions.digest})
        self.settings, self.lm_weight = settings or ChannelSettings(), lm_weight
        # Only channel 2 uses a teacher, so without it no copy of the initial model is needed.
        self.teacher = teacher or TeacherKeeper("trust_region" if self.settings.alpha_sdpo > 0 else "live")
        self.weighting, self.channel_log = weighting, ChannelLog()
        metrics = MetricsFile(metrics_path or Path(args.output_dir or "", "metrics.jsonl"))
        start = prepare_model(model, args, peft_config=peft_config, quantization=quantization)
        if is_sharded_here := fsdp and args.world_size > 1 and not is_sharded(start):
            self._shard(start, args, warmed_up)
        super().__init__(
            model=start,
            args=args,
            data_collator=collate,
            train_dataset=sessions,
            eval_dataset=eval_sessions,
            callbacks=[*callbacks, StepCallback(self), metrics],
            **options,
        )
        model = self._start_model
        # This flag keeps the base class from wrapping the model again.
        if is_sharded(model):
            self.is_distributed_loading_by_transformers = True
        if not is_sharded_here and warmed_up is not None:
            self.phase = take_warmed_up(model, Path(warmed_up))
        # Training steps compare their log-probs with these, so both must be rounded in the same way.
        with self.accelerator.autocast():
            shared_options = {"settings": self.settings, "lm_weight": lm_weight, "with_adapter": bool(self.phase)}
            proof = {"hint_margin": hint_margin, "shuffle_seed": shuffle_seed}
            self.train_dataset = ready_sessions(sessions, model, reference_path, **proof, **shared_options)
            if eval_sessions is not None:
                self.eval_dataset = ready_sessions(eval_sessions, model, reference_path, **shared_options)
        for warning in startup_warnings(self, model, self._train_sessions):
            self._warn(warning)
        if not is_sharded_here:
            attach_teacher(self.teacher, model, with_adapter=bool(self.phase))
        self._num_weights = sum(parameter.numel() for parameter in model.parameters())

    def _shard(self, model: nn.Module, args: TrainingArguments, warmed_up: str | Path | None) -> None:
        """Shard model and teacher over all processes, after loading a warm-up's weights and copying the teacher."""
        if warmed_up is not None:
            self.phase = take_warmed_up(model, Path(warmed_up))
        attach_teacher(self.teacher, model, with_adapter=bool(self.phase))
        shard_model(model, args)
        shard_teacher(self.teacher, model)

    def plan(self) -> MemoryPlan:
        """Return an estimate of whether the largest step fits into memory, and what to change if it does not."""
        model, sessions = self._start_model, self._train_sessions
        return plan_run(model, self.args, sessions, self.teacher.kind, warmed_up=bool(self.phase))

    # ---- one step

    def weights(self) -> dict[str, float]:
        """Return the weight of each channel in the next step."""
        alpha = self.settings.alpha_at(self.state.global_step, self.state.max_steps)
        return dict(zip(CHANNELS, (self.lm_weight, alpha, self.settings.beta_replay), strict=True))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches for one optimizer step, and each channel's number of items over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        local_items = items_of(batches)
        totals = self._sum_over_processes(torch.tensor([local_items[name] for name in (*CHANNELS, TOKENS)])).tolist()
        self._step_items = dict(zip(CHANNELS, totals[:-1], strict=True))
        self._step_tokens = totals[-1]
        return batches, self._step_items

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this micro-batch's share of the step's loss.

        The share is multiplied by the number of processes, because DDP and FSDP average the gradients instead of
        summing them.
        """
        weights = self.weights()
        components = self._components(model, inputs[KEY], weights, num_items_in_batch)
        loss = weighted_total(components, weights)
        if num_items_in_batch is not None:
            self.channel_log.add(components)
            loss = loss * self.accelerator.num_processes
        return (loss, components) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Add a batch to the evaluation's sums, and return its loss."""
        del prediction_loss_only, ignore_keys  # the loss is the only output
        weights = self.weights()
        # At the end of annealing channel 2's weight may be 0, but its loss is then of most interest.
        measured = {**weights, CHANNELS[1]: weights[CHANNELS[1]] or self.settings.alpha_sdpo}
        with torch.no_grad():
            components = self._components(model, inputs[KEY], measured, None)
        if self._evaluation is not None:
            self._evaluation.add(components)
        return weighted_sum(components, weights).detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Evaluate as transformers does, and add the channels' losses over all items; `loss` is their weighted sum."""
        self._evaluation = EvaluationSums()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **options)
        metrics = EvaluationSums.metrics(self._sum_over_processes(self._evaluation.both()), self.weights())
        self._evaluation = None
        metrics["loss"] = metrics.pop("total")
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _components(
        self, model: nn.Module, batch: SessionBatch, weights: Mapping[str, float], items: Mapping[str, int] | None
    ) -> LossComponents:
        options = self.settings.loss_options()
        if self.settings.sdpo_wrapper == "taid":
            options["taid_t"] = self.taid.t
        # Accelerate enables autocast in the model's `forward`, but only the model's body is called here.
        with self.accelerator.autocast():
            return compose_loss(
                model,
                moved(batch.batch, self.args.device),
                alpha_sdpo=weights[CHANNELS[1]],
                beta_replay=weights[CHANNELS[2]],
                denominators=items,
                sdpo_teachers=self.teacher.shares(),
                sdpo_weighting=self.weighting,
                **options,
            )

    # ---- after a step

    @property
    def taid(self) -> TAIDScheduler:
        """The TAID schedule for this run; until the number of steps is known, a schedule at its initial value."""
        return self._taid or self.settings.taid_schedule(1)

    def before_steps(self) -> None:
        """Create the TAID schedule for the run's steps, and restore its state if a checkpoint was loaded."""
        self._taid = self.settings.taid_schedule(self.state.max_steps)
        if self._taid_state is not None:
            self._taid.load_state_dict(self._taid_state)
        self._taid_state = None

    def after_step(self) -> None:
        """Log the step's losses over all processes, and update TAID's schedule and the teacher."""
        values = self._sum_over_processes(self.channel_log.take_step())
        num_steps = self.state.global_step
        # The weight in the step that just finished; `weights` returns those for the next step.
        alpha = self.settings.alpha_at(num_steps - 1, self.state.max_steps)
        weights = {**self.weights(), CHANNELS[1]: alpha}
        self.channel_log.finish_step(values, self._step_items, weights, tokens=self._step_tokens)
        if self.settings.sdpo_wrapper == "taid" and alpha > 0 and self._step_items[CHANNELS[1]]:
            self.taid.update_t(values[1], num_steps)
        if not self.accelerator.optimizer_step_was_skipped:
            reshard(self.teacher)
            self.teacher.after_step(self.model_wrapped)

    def _sum_over_processes(self, local: Tensor) -> Tensor:
        """Return the sum of `local` over all processes."""
        if self.accelerator.num_processes == 1:
            return local
        total: Any = self.accelerator.reduce(local.to(self.args.device), reduction="sum")
        return total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the channels' metrics to every log line that has a loss, and a summary to the last line."""
        if "loss" in logs:
            logs |= self.channel_log.take()
            if self.settings.sdpo_wrapper == "taid":
                logs["loss/taid_t"] = self.taid.t
        if "train_runtime" in logs:
            logs |= {f"ran_steps/{NAMES[name]}": self.channel_log.ran_steps[name] for name in CHANNELS}
            self._warn_about_idle_channels()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the estimated operations: 6 per weight and token (2 in the forward pass, 4 in the backward pass)."""
        return 6 * self._num_weights * len(inputs[KEY].batch.tree)

    def resume_geometry(self) -> dict[str, Any]:
        """Add the digest of the sessions, since different sessions may have the same number of items."""
        return {**super().resume_geometry(), "sessions": self._train_sessions.digest, **self.phase}

    def extra_state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs besides weights, optimizer and random number generators."""
        taid = self.taid.state_dict() if self.settings.sdpo_wrapper == "taid" else None
        state = {"teacher": local_state(self.teacher), "taid": taid, "channels": self.channel_log.state()}
        return super().extra_state() | state

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        super().load_extra_state(tree)
        shard_teacher(self.teacher, self.model_wrapped)
        load_local_state(self.teacher, tree["teacher"])
        self._taid_state = tree["taid"]
        self.channel_log.load_state(tree["channels"])

    # ---- before the first step

    @property
    def _start_model(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _warn_about_idle_channels(self) -> None:
        # A warm-up trains channel 1 only.
        if self.phase.get("phase") == WARM_UP:
            return
        for warning in channels_that_never_ran(self.channel_log, self._train_sessions.channels):
            self._warn(warning)

    def _warn(self, message: str) -> None:
        if self.is_world_process_zero():
            _log.warning(message)

    @property
    def _train_sessions(self) -> LoggedSessions:
        assert isinstance(self.train_dataset, LoggedSessions)
        return self.train_dataset
